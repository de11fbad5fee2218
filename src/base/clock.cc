#include "base/clock.h"

#include <time.h>

namespace forebay {
namespace {

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

}  // namespace forebay
