// DecodePool: the threads that decode, shared by all loaders of an engine.
//
// As many threads as processors may run; how many do is a knob, or chosen by a governor that spends
// the fewest that keep finished batches ready. Threads run at a lower priority than the training
// loop, whose work is worth more, and on several NUMA nodes each stays on one.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <thread>
#include <vector>

#include "base/status.h"
#include "base/thread_annotations.h"
#include "metrics/registry.h"

namespace forebay {

// Chooses a number of threads. Pure: told what each batch taken found, no clock.
class ThreadGovernor {
 public:
  explicit ThreadGovernor(size_t maximum) : maximum_(maximum), limit_(maximum) {}
  // A consumer came for a batch: `ready` of the `ahead` batches that may be were finished. Running
  // low brings all threads back; many full queues in a row spare one.
  void OnTake(size_t ready, size_t ahead);
  size_t limit() const { return limit_; }

 private:
  static constexpr size_t kCalm = 16;     // full queues in a row before one thread less is tried
  static constexpr size_t kForget = 512;  // batches after which a number that failed is tried again

  const size_t maximum_;
  size_t limit_;
  size_t calm_ = 0;
  size_t floor_ = 1;        // the fewest that are known to be enough, or not known to be too few
  size_t since_floor_ = 0;  // batches since floor_ was raised
};

// What the threads work on.
class DecodeWork {
 public:
  virtual ~DecodeWork() = default;
  // Does one piece of work as thread number `thread`; false when there is none now.
  virtual bool Step(size_t thread) = 0;
};

// Safe for concurrent use by multiple threads.
class DecodePool {
 public:
  // `threads`: the most there can be; at least one.
  DecodePool(Registry& registry, size_t threads);
  ~DecodePool();
  DecodePool(const DecodePool&) = delete;
  DecodePool& operator=(const DecodePool&) = delete;

  size_t threads() const { return most_; }
  // The first call starts the threads. Where not even one starts, nothing is added.
  Status Add(DecodeWork& work);
  // Afterwards no thread is in `work`, nor will be.
  void Remove(DecodeWork& work);
  // Some work has more to do.
  void Wake();
  // As ThreadGovernor::OnTake.
  void OnTake(size_t ready, size_t ahead);

 private:
  struct Entry {
    DecodeWork* work = nullptr;
    size_t inside = 0;  // threads in Step
    bool leaving = false;
  };
  void Run(std::stop_token stop, size_t thread);
  size_t Limit() REQUIRES(mutex_);
  // Lets one thread do one piece; false when nobody has any.
  bool StepOne(size_t thread) REQUIRES(mutex_);

  const size_t most_;
  Mechanism& mechanism_;
  Metric& active_;
  Knob& knob_;

  Mutex mutex_;
  std::condition_variable ready_;
  std::condition_variable left_;
  std::vector<std::shared_ptr<Entry>> works_ GUARDED_BY(mutex_);  // shared with threads inside
  ThreadGovernor governor_ GUARDED_BY(mutex_);
  size_t turn_ GUARDED_BY(mutex_) = 0;
  uint64_t wakes_ GUARDED_BY(mutex_) = 0;
  std::vector<std::jthread> pool_ GUARDED_BY(mutex_);
};

}  // namespace forebay
