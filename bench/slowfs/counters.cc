#include "slowfs/counters.h"

#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>

#include "base/status.h"

namespace forebay::slowfs {
namespace {

constexpr std::array<const char*, kRequests> kNames = {
    "lookup",  "getattr", "access", "readlink", "statfs",
    "opendir", "readdir", "open",   "read",     "release",
};

template <typename N>
void RaiseTo(std::atomic<N>& highest, N value) {
  N seen = highest.load(std::memory_order_relaxed);
  while (seen < value && !highest.compare_exchange_weak(seen, value, std::memory_order_relaxed)) {
  }
}

}  // namespace

Counters::Counters() { Reset(); }

void Counters::Count(Request request) {
  requests_[static_cast<size_t>(request)].fetch_add(1, std::memory_order_relaxed);
}

void Counters::CountBytes(uint64_t bytes) {
  bytes_read_.fetch_add(bytes, std::memory_order_relaxed);
}

void Counters::CountEio() { eio_injected_.fetch_add(1, std::memory_order_relaxed); }

void Counters::Begin() {
  RaiseTo(in_flight_max_, in_flight_.fetch_add(1, std::memory_order_relaxed) + 1);
}

void Counters::End(Nanos late) {
  in_flight_.fetch_sub(1, std::memory_order_relaxed);
  answers_.fetch_add(1, std::memory_order_relaxed);
  late_sum_.fetch_add(late, std::memory_order_relaxed);
  RaiseTo(late_max_, late);
}

void Counters::Reset() {
  for (auto& count : requests_) count.store(0, std::memory_order_relaxed);
  bytes_read_.store(0, std::memory_order_relaxed);
  eio_injected_.store(0, std::memory_order_relaxed);
  in_flight_max_.store(in_flight_.load(std::memory_order_relaxed), std::memory_order_relaxed);
  answers_.store(0, std::memory_order_relaxed);
  late_sum_.store(0, std::memory_order_relaxed);
  late_max_.store(0, std::memory_order_relaxed);
  MutexLock lock(mutex_);
  cpu_at_reset_ = ReadCpuTime();
}

Counters::CpuTime Counters::ReadCpuTime() {
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  const auto seconds = [](const timeval& t) {
    return static_cast<double>(t.tv_sec) + static_cast<double>(t.tv_usec) / 1e6;
  };
  return {seconds(usage.ru_utime), seconds(usage.ru_stime)};
}

std::string Counters::ToJson() const {
  const CpuTime now = ReadCpuTime();
  CpuTime start;
  {
    MutexLock lock(mutex_);
    start = cpu_at_reset_;
  }
  // The kernel estimates how the time splits into user and system, and may move some between them.
  const auto answers = answers_.load(std::memory_order_relaxed);
  const auto late_sum = static_cast<double>(late_sum_.load(std::memory_order_relaxed));
  std::string json = "{\n";
  for (size_t i = 0; i < kRequests; ++i) {
    json += StrCat("  \"", kNames[i], "\": ", requests_[i].load(std::memory_order_relaxed), ",\n");
  }
  json += StrCat("  \"bytes_read\": ", bytes_read_.load(std::memory_order_relaxed), ",\n",
                 "  \"eio_injected\": ", eio_injected_.load(std::memory_order_relaxed), ",\n",
                 "  \"in_flight\": ", in_flight_.load(std::memory_order_relaxed), ",\n",
                 "  \"in_flight_max\": ", in_flight_max_.load(std::memory_order_relaxed), ",\n",
                 "  \"answers\": ", answers, ",\n", "  \"late_us_mean\": ",
                 answers == 0 ? 0.0 : late_sum / static_cast<double>(answers) / kMicro, ",\n",
                 "  \"late_us_max\": ",
                 static_cast<double>(late_max_.load(std::memory_order_relaxed)) / kMicro, ",\n",
                 "  \"cpu_user_s\": ", std::max(0.0, now.user_s - start.user_s), ",\n",
                 "  \"cpu_system_s\": ", std::max(0.0, now.system_s - start.system_s), ",\n",
                 "  \"pid\": ", getpid(), "\n}\n");
  return json;
}

}  // namespace forebay::slowfs
