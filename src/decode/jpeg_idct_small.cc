// The inverse DCTs of libjpeg that give 4x4, 2x2 or 1x1 samples of a block.
#include <algorithm>
#include <array>

#include "decode/jpeg_idct.h"

namespace forebay::jpeg {
namespace {

// Multiplied by 2^13.
constexpr int32_t k0_211164243 = 1730;
constexpr int32_t k0_509795579 = 4176;
constexpr int32_t k0_601344887 = 4926;
constexpr int32_t k0_720959822 = 5906;
constexpr int32_t k0_765366865 = 6270;
constexpr int32_t k0_850430095 = 6967;
constexpr int32_t k0_899976223 = 7373;
constexpr int32_t k1_061594337 = 8697;
constexpr int32_t k1_272758580 = 10426;
constexpr int32_t k1_451774981 = 11893;
constexpr int32_t k1_847759065 = 15137;
constexpr int32_t k2_172734803 = 17799;
constexpr int32_t k2_562915447 = 20995;
constexpr int32_t k3_624509785 = 29692;

// Of coefficients that no encoder writes, sums may wrap.
int32_t Times(int32_t a, int32_t b) {
  return static_cast<int32_t>(static_cast<uint32_t>(a) * static_cast<uint32_t>(b));
}
int32_t Sum(std::initializer_list<int32_t> values) {
  uint32_t sum = 0;
  for (const int32_t value : values) sum += static_cast<uint32_t>(value);
  return static_cast<int32_t>(sum);
}
int32_t Minus(int32_t a) { return static_cast<int32_t>(0u - static_cast<uint32_t>(a)); }
int32_t Descale(int32_t value, int shift) { return Sum({value, 1 << (shift - 1)}) >> shift; }

uint8_t Sample(int32_t value) { return static_cast<uint8_t>(std::clamp(value, -128, 127) + 128); }

// Four values from the eight of one column or row, of which the fifth is not used.
std::array<int32_t, 4> Four(const int32_t* x, size_t step, int shift) {
  const int32_t x0 = Times(x[0], 1 << 14);
  const int32_t even = Sum({Times(x[2 * step], k1_847759065), Times(x[6 * step], -k0_765366865)});
  const int32_t x1 = x[step];
  const int32_t x3 = x[3 * step];
  const int32_t x5 = x[5 * step];
  const int32_t x7 = x[7 * step];
  const int32_t inner = Sum({Times(x7, -k0_211164243), Times(x5, k1_451774981),
                             Times(x3, -k2_172734803), Times(x1, k1_061594337)});
  const int32_t outer = Sum({Times(x7, -k0_509795579), Times(x5, -k0_601344887),
                             Times(x3, k0_899976223), Times(x1, k2_562915447)});
  return {Descale(Sum({x0, even, outer}), shift), Descale(Sum({x0, Minus(even), inner}), shift),
          Descale(Sum({x0, Minus(even), Minus(inner)}), shift),
          Descale(Sum({x0, even, Minus(outer)}), shift)};
}

// Two values from the first and the odd ones.
std::array<int32_t, 2> Two(const int32_t* x, size_t step, int shift) {
  const int32_t x0 = Times(x[0], 1 << 15);
  const int32_t odd = Sum({Times(x[7 * step], -k0_720959822), Times(x[5 * step], k0_850430095),
                           Times(x[3 * step], -k1_272758580), Times(x[step], k3_624509785)});
  return {Descale(Sum({x0, odd}), shift), Descale(Sum({x0, Minus(odd)}), shift)};
}

}  // namespace

void IdctSmall(const IdctJob& job, uint32_t size) {
  if (size == 1 || job.flat()) {
    // All samples of a flat block are those of the smallest.
    const int32_t dc = job.block[0] * static_cast<int16_t>(job.quant[0]);
    const uint8_t value = Sample(Descale(dc, 3));
    for (uint32_t y = 0; y < size; ++y) std::fill_n(job.out + y * job.stride, size, value);
    return;
  }
  std::array<int32_t, 64> x;
  for (uint32_t i = 0; i < 64; ++i) x[i] = job.block[i] * static_cast<int16_t>(job.quant[i]);
  const auto pass = [&](auto transform, int first_shift, int second_shift) {
    std::array<int32_t, 32> rows;
    for (uint32_t column = 0; column < 8; ++column) {
      const auto values = transform(&x[column], 8, first_shift);
      for (uint32_t y = 0; y < values.size(); ++y) rows[8 * y + column] = values[y];
    }
    for (uint32_t y = 0; y < size; ++y) {
      const auto values = transform(&rows[8 * y], 1, second_shift);
      for (uint32_t i = 0; i < values.size(); ++i) job.out[y * job.stride + i] = Sample(values[i]);
    }
  };
  if (size == 4) {
    pass(Four, 13 - 2 + 1, 13 + 2 + 3 + 1);
  } else {
    pass(Two, 13 - 2 + 2, 13 + 2 + 3 + 2);
  }
}

}  // namespace forebay::jpeg
