#include "base/clock.h"

#include <time.h>

#include <algorithm>

namespace forebay {
namespace {

constexpr Nanos kMostSkew = 600 * kSecond;  // of two clocks, where files' times are coarse

class MonotonicClock final : public Clock {
 public:
  Nanos Now() override {
    timespec ts;
    clock_gettime(CLOCK_MONOTONIC, &ts);
    return ts.tv_sec * kSecond + ts.tv_nsec;
  }
};

}  // namespace

Clock& SteadyClock() {
  static MonotonicClock clock;
  return clock;
}

bool SeemsYoung(int64_t file_time_ns, bool coarse, Nanos young) {
  timespec now;
  clock_gettime(CLOCK_REALTIME_COARSE, &now);
  const Nanos wanted = coarse ? std::max(young, kMostSkew) : young;
  return now.tv_sec * kSecond + now.tv_nsec - file_time_ns < wanted;
}

}  // namespace forebay
