// Random numbers that every build and every node computes alike.
//
// SplitMix64 serves seeds, jitter and tests. Mt19937 is the 32-bit Mersenne twister (Matsumoto and
// Nishimura, 1998), the generator under PyTorch's CPU random numbers; golden vectors freeze both.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

namespace forebay {

class SplitMix64 {
 public:
  explicit SplitMix64(uint64_t seed) : state_(seed) {}
  uint64_t Next() {
    uint64_t z = (state_ += 0x9e3779b97f4a7c15ULL);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ULL;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebULL;
    return z ^ (z >> 31);
  }
  // Uniform in [0, n); the modulo bias is below 2^-32 for n < 2^32.
  uint64_t Below(uint64_t n) { return Next() % n; }
  double Uniform() { return static_cast<double>(Next() >> 11) * 0x1.0p-53; }

 private:
  uint64_t state_;
};

class Mt19937 {
 public:
  static constexpr int kWords = 624;
  using State = std::array<uint32_t, kWords>;

  // The reference initialisation from a 32-bit seed. PyTorch uses the low 32 bits of its seed.
  explicit Mt19937(uint32_t seed);
  // Continues from a saved state; `used` of its 624 words are spent (624: refill before the next).
  Mt19937(const State& state, int used) : state_(state), used_(used) {}

  uint32_t Next() {
    if (used_ >= kWords) Refill();
    uint32_t y = state_[static_cast<size_t>(used_++)];
    y ^= y >> 11;
    y ^= (y << 7) & 0x9d2c5680u;
    y ^= (y << 15) & 0xefc60000u;
    return y ^ (y >> 18);
  }
  // Two draws, the first one in the high half.
  uint64_t Next64() {
    const uint64_t high = Next();
    return (high << 32) | Next();
  }

  const State& state() const { return state_; }
  int used() const { return used_; }

 private:
  void Refill();

  State state_;
  int used_ = kWords;
};

}  // namespace forebay
