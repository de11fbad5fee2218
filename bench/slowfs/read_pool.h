// ReadPool: threads that read from the source folder what is not in memory, so that a disk does not
// hold up the answers of others.
#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <thread>
#include <vector>

#include "base/thread_annotations.h"

namespace forebay::slowfs {

// Safe for concurrent use by multiple threads.
class ReadPool {
 public:
  ~ReadPool() { Close(); }

  // Runs `read` in a thread of the pool. As many wait as the kernel has requests in flight.
  void Run(std::function<void()> read);
  // Returns when every read has run. Nothing may be run afterwards.
  void Close();

 private:
  void Work();

  Mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> reads_ GUARDED_BY(mutex_);
  std::vector<std::jthread> threads_ GUARDED_BY(mutex_);  // started by the first read
  bool closing_ GUARDED_BY(mutex_) = false;
};

}  // namespace forebay::slowfs
