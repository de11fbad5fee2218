// Many blocking storage calls in flight: a stack of tasks drained by threads.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <functional>
#include <thread>
#include <vector>

#include "base/clock.h"
#include "base/status.h"
#include "base/thread_annotations.h"

namespace forebay {

// The task pushed last runs first, so that work which releases descriptors goes before work which
// takes more. Push and stopping are safe for concurrent use, also from inside tasks.
class WorkStack {
 public:
  using Task = std::function<Status()>;

  // Threads start as tasks arrive, `max_threads` at most.
  explicit WorkStack(size_t max_threads) : max_threads_(max_threads) {}
  // Drops tasks that have not begun and waits for those that have.
  ~WorkStack();
  WorkStack(const WorkStack&) = delete;
  WorkStack& operator=(const WorkStack&) = delete;

  void Push(Task task);

  // Returns when every task has run, or after the first error, when the rest is dropped. `tick`
  // runs on the calling thread, at once and every 100 ms; when it returns false the result is
  // kCancelled.
  Status Drain(const std::function<bool()>& tick);

  // True once an error or a cancellation has made further work pointless.
  bool stopping() const { return stopping_.load(std::memory_order_relaxed); }

 private:
  void Work();
  void Fail(Status status) REQUIRES(mutex_);

  const size_t max_threads_;
  std::atomic<bool> stopping_ = false;  // a hint; decisions are made under mutex_
  Mutex mutex_;
  std::condition_variable work_;
  std::condition_variable idle_;
  std::vector<Task> tasks_ GUARDED_BY(mutex_);
  size_t waiting_ GUARDED_BY(mutex_) = 0;
  size_t running_ GUARDED_BY(mutex_) = 0;
  bool closed_ GUARDED_BY(mutex_) = false;
  Status status_ GUARDED_BY(mutex_);
  std::vector<std::jthread> threads_ GUARDED_BY(mutex_);
};

// Calls `body` for 0 .. n-1 on up to `threads` threads; ends early as WorkStack::Drain does.
Status ParallelFor(size_t n, size_t threads, const std::function<Status(size_t)>& body,
                   const std::function<bool()>& tick);

// Lets a call through at most ten times a second, the first one at once. For one thread.
class Pace {
 public:
  bool Due();

 private:
  bool begun_ = false;
  Nanos last_ = 0;
};

}  // namespace forebay
