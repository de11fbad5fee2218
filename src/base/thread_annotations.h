// Clang's thread-safety attributes, and a mutex that carries them. g++ ignores them.
#pragma once

#include <condition_variable>
#include <mutex>

#if defined(__clang__)
#define FOREBAY_TSA(x) __attribute__((x))
#else
#define FOREBAY_TSA(x)
#endif

#define CAPABILITY(x) FOREBAY_TSA(capability(x))
#define SCOPED_CAPABILITY FOREBAY_TSA(scoped_lockable)
#define GUARDED_BY(x) FOREBAY_TSA(guarded_by(x))
#define REQUIRES(...) FOREBAY_TSA(requires_capability(__VA_ARGS__))
#define ACQUIRE(...) FOREBAY_TSA(acquire_capability(__VA_ARGS__))
#define RELEASE(...) FOREBAY_TSA(release_capability(__VA_ARGS__))
#define EXCLUDES(...) FOREBAY_TSA(locks_excluded(__VA_ARGS__))
#define NO_THREAD_SAFETY_ANALYSIS FOREBAY_TSA(no_thread_safety_analysis)

namespace forebay {

class CAPABILITY("mutex") Mutex {
 public:
  void Lock() ACQUIRE() { mutex_.lock(); }
  void Unlock() RELEASE() { mutex_.unlock(); }
  std::mutex& native() { return mutex_; }

 private:
  std::mutex mutex_;
};

class SCOPED_CAPABILITY MutexLock {
 public:
  explicit MutexLock(Mutex& mutex) ACQUIRE(mutex) : lock_(mutex.native()) {}
  ~MutexLock() RELEASE() {}
  MutexLock(const MutexLock&) = delete;
  MutexLock& operator=(const MutexLock&) = delete;

  // For condition variables only; the lock is held again when the wait returns.
  std::unique_lock<std::mutex>& native() { return lock_; }

 private:
  std::unique_lock<std::mutex> lock_;
};

}  // namespace forebay
