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

// Whether a time of a file may be that of a moment ago: less than `young` by this node's clock, and
// some minutes where files' times are `coarse`, which is whole seconds. It is of the clock of the
// file's storage, which may be ahead of ours or behind it, so this is a guess.
bool SeemsYoung(int64_t file_time_ns, bool coarse, Nanos young);

class ManualClock final : public Clock {
 public:
  Nanos Now() override { return now_; }
  void Advance(Nanos by) { now_ += by; }

 private:
  Nanos now_ = 0;
};

}  // namespace forebay
