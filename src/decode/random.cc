#include "decode/random.h"

namespace forebay {

std::array<uint32_t, 4> Philox4x32(std::array<uint32_t, 4> c, std::array<uint32_t, 2> k) {
  constexpr uint64_t kMultiplier0 = 0xD2511F53;
  constexpr uint64_t kMultiplier1 = 0xCD9E8D57;
  constexpr uint32_t kWeyl0 = 0x9E3779B9;
  constexpr uint32_t kWeyl1 = 0xBB67AE85;
  for (int round = 0; round < 10; ++round) {
    const uint64_t p0 = kMultiplier0 * c[0];
    const uint64_t p1 = kMultiplier1 * c[2];
    c = {static_cast<uint32_t>(p1 >> 32) ^ c[1] ^ k[0], static_cast<uint32_t>(p1),
         static_cast<uint32_t>(p0 >> 32) ^ c[3] ^ k[1], static_cast<uint32_t>(p0)};
    k[0] += kWeyl0;
    k[1] += kWeyl1;
  }
  return c;
}

SampleRandom::SampleRandom(const SampleKey& key, uint16_t stream)
    : key_{static_cast<uint32_t>(key.seed), static_cast<uint32_t>(key.seed >> 32)},
      counter_{static_cast<uint32_t>(key.sample), static_cast<uint32_t>(key.sample >> 32),
               key.epoch, static_cast<uint32_t>(stream) << 16} {}

uint32_t SampleRandom::Next32() {
  if (used_ == 4) {
    block_ = Philox4x32(counter_, key_);
    ++counter_[3];
    used_ = 0;
  }
  return block_[static_cast<size_t>(used_++)];
}

double SampleRandom::Uniform(double lo, double hi) {
  const uint64_t high = Next32();
  const uint64_t bits = ((high << 32) | Next32()) >> 11;
  return lo + (hi - lo) * (static_cast<double>(bits) * 0x1.0p-53);
}

int64_t SampleRandom::Int(int64_t lo, int64_t hi) {
  const auto n = static_cast<uint32_t>(hi - lo);
  // Lemire's method: the low half of the product tells the draws that would be one too many.
  const uint32_t threshold = (0u - n) % n;
  for (;;) {
    const uint64_t product = static_cast<uint64_t>(Next32()) * n;
    if (static_cast<uint32_t>(product) >= threshold) {
      return lo + static_cast<int64_t>(product >> 32);
    }
  }
}

void SampleRandom::Permutation(std::span<uint8_t> out) {
  for (size_t i = 0; i < out.size(); ++i) {
    const auto j = static_cast<size_t>(Int(0, static_cast<int64_t>(i) + 1));
    out[i] = out[j];
    out[j] = static_cast<uint8_t>(i);
  }
}

}  // namespace forebay
