// What slowfs did so far, for `.slowfs/stats`.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <string>

#include "base/clock.h"
#include "base/thread_annotations.h"

namespace forebay::slowfs {

// Requests of the kernel that reach the source folder.
enum class Request : uint8_t {
  kLookup,
  kGetattr,
  kAccess,
  kReadlink,
  kStatfs,
  kOpendir,
  kReaddir,
  kOpen,
  kRead,
  kRelease,
};
inline constexpr size_t kRequests = 10;

// Safe for concurrent use by multiple threads.
class Counters {
 public:
  Counters();

  void Count(Request request);
  void CountBytes(uint64_t bytes);
  void CountEio();
  // A request waits for its answer from Begin to End; `late` is how long after its due time the
  // answer went out.
  void Begin();
  void End(Nanos late);

  // Everything back to 0, processor time included. Requests that still wait stay counted as
  // waiting.
  void Reset();
  std::string ToJson() const;

 private:
  struct CpuTime {
    double user_s = 0;
    double system_s = 0;
  };
  static CpuTime ReadCpuTime();

  // Statistics only: no other memory is published through them, so every access is relaxed.
  std::array<std::atomic<uint64_t>, kRequests> requests_{};
  std::atomic<uint64_t> bytes_read_{0};
  std::atomic<uint64_t> eio_injected_{0};
  std::atomic<uint64_t> in_flight_{0};
  std::atomic<uint64_t> in_flight_max_{0};
  std::atomic<uint64_t> answers_{0};
  std::atomic<int64_t> late_sum_{0};
  std::atomic<int64_t> late_max_{0};

  mutable Mutex mutex_;
  CpuTime cpu_at_reset_ GUARDED_BY(mutex_);
};

}  // namespace forebay::slowfs
