// Counts a thread's system calls, for tests and benchmarks.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>

#include "base/status.h"

namespace forebay {

class SystemCalls {
 public:
  // From now on every system call of the calling thread, and of threads it starts, waits until a
  // thread of its own has counted it (a seccomp notification). That is for good: call it in a
  // thread or process that ends soon. kUnimplemented where the kernel does not let us.
  static Result<std::shared_ptr<const SystemCalls>> Count();
  uint64_t count() const { return count_.load(std::memory_order_relaxed); }
  // The number of the last one; -1 before the first.
  int last() const { return last_.load(std::memory_order_relaxed); }

 private:
  // Serves the notifications until the last thread that has the filter has ended.
  void Watch();

  std::atomic<int> listener_{0};  // 0: not there yet; negative: there will be none
  std::atomic<uint64_t> count_{0};
  std::atomic<int> last_{-1};
};

}  // namespace forebay
