#include "base/rng.h"

namespace forebay {

Mt19937::Mt19937(uint32_t seed) {
  state_[0] = seed;
  for (uint32_t i = 1; i < kWords; ++i) {
    state_[i] = 1812433253u * (state_[i - 1] ^ (state_[i - 1] >> 30)) + i;
  }
}

void Mt19937::Refill() {
  constexpr size_t kN = kWords;
  constexpr size_t kShift = 397;
  auto twist = [](uint32_t high, uint32_t low, uint32_t far) {
    const uint32_t y = (high & 0x80000000u) | (low & 0x7fffffffu);
    return far ^ (y >> 1) ^ ((low & 1u) ? 0x9908b0dfu : 0u);
  };
  size_t i = 0;
  for (; i < kN - kShift; ++i) state_[i] = twist(state_[i], state_[i + 1], state_[i + kShift]);
  for (; i < kN - 1; ++i) state_[i] = twist(state_[i], state_[i + 1], state_[i + kShift - kN]);
  state_[kN - 1] = twist(state_[kN - 1], state_[0], state_[kShift - 1]);
  used_ = 0;
}

}  // namespace forebay
