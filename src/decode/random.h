// SampleRandom: the random numbers of one sample's augmentation.
//
// Counter-based (Philox4x32-10 of Salmon, Moraes, Dror and Shaw, 2011): a draw is a function of
// (seed, epoch, sample, stream, position) alone. A sample is augmented alike at any number of
// threads and nodes and after a resume. Each op draws from a stream of its own, so that adding an
// op leaves the draws of the others as they were. Golden vectors freeze both.
#pragma once

#include <array>
#include <cstdint>
#include <span>

namespace forebay {

// What a sample's randomness depends on.
struct SampleKey {
  uint64_t seed = 0;
  uint32_t epoch = 0;
  uint64_t sample = 0;
};

// The block of four words at `counter` under `key`.
std::array<uint32_t, 4> Philox4x32(std::array<uint32_t, 4> counter, std::array<uint32_t, 2> key);

class SampleRandom {
 public:
  explicit SampleRandom(const SampleKey& key, uint16_t stream = 0);

  uint32_t Next32();
  // Uniform in [lo, hi), 53 bits.
  double Uniform(double lo, double hi);
  // Uniform in {lo, ..., hi - 1}, without bias. lo < hi, which differ by less than 2^32.
  int64_t Int(int64_t lo, int64_t hi);
  // True with probability p.
  bool Bernoulli(double p) { return Uniform(0, 1) < p; }
  // A permutation of 0 ... out.size() - 1, all equally likely.
  void Permutation(std::span<uint8_t> out);

 private:
  std::array<uint32_t, 2> key_;
  std::array<uint32_t, 4> counter_;  // sample, sample, epoch, stream and block
  std::array<uint32_t, 4> block_{};
  int used_ = 4;
};

}  // namespace forebay
