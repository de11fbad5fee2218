// Time, behind an interface so that tests and simulators own it. Outside base/ and the drivers
// nobody reads a clock.
#pragma once

#include "base/nanos.h"

namespace forebay {

class Clock {
 public:
  virtual ~Clock() = default;
  // Monotonic; the origin is arbitrary. Safe for concurrent use by multiple threads.
  virtual Nanos Now() = 0;
};

// CLOCK_MONOTONIC. Lives for the whole process.
Clock& SteadyClock();

class ManualClock final : public Clock {
 public:
  Nanos Now() override { return now_; }
  void Advance(Nanos by) { now_ += by; }

 private:
  Nanos now_ = 0;
};

}  // namespace forebay
