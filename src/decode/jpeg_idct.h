// The inverse DCT of libjpeg's slow integer method, bit for bit, on two blocks at a time.
#pragma once

#include <cstddef>
#include <cstdint>

namespace forebay::jpeg {

// One block: coefficients in natural order, their quantisation table (both 32-byte aligned), and
// where its 8x8 samples go.
struct IdctJob {
  const int16_t* block = nullptr;
  const uint16_t* quant = nullptr;
  uint8_t* out = nullptr;
  size_t stride = 0;
  uint32_t last = 63;  // no coefficient after this one, as they are stored, is other than zero

  bool flat() const { return last == 0; }
  // Nothing but the four lowest frequencies in each direction.
  bool sparse() const { return last < 10; }
};

using IdctPair = void (*)(const IdctJob& a, const IdctJob& b);

// One block to size x size samples, 1, 2 or 4, as libjpeg's scaled decoding does it.
void IdctSmall(const IdctJob& job, uint32_t size);

// The plain code, for every machine; the other exists where Avx2() holds.
void IdctPairPlain(const IdctJob& a, const IdctJob& b);
void IdctPairAvx2(const IdctJob& a, const IdctJob& b);

// Whether this machine has AVX2 and BMI2.
bool Avx2();

}  // namespace forebay::jpeg
