// Spans of time and moments of a clock, in nanoseconds. Code that only computes with them needs no
// clock.
#pragma once

#include <cstdint>

namespace forebay {

using Nanos = int64_t;
inline constexpr Nanos kMicro = 1000;
inline constexpr Nanos kMilli = 1000 * kMicro;
inline constexpr Nanos kSecond = 1000 * kMilli;

}  // namespace forebay
