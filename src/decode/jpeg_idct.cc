// The sums that the SIMD code keeps in 16 bits are kept so in the plain code: both agree with
// libjpeg-turbo's SIMD code even for coefficients that no encoder writes.
#include "decode/jpeg_idct.h"

#include <algorithm>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace forebay::jpeg {
namespace {

// Multiplied by 2^13.
constexpr int32_t k0_298631336 = 2446;
constexpr int32_t k0_390180644 = 3196;
constexpr int32_t k0_541196100 = 4433;
constexpr int32_t k0_765366865 = 6270;
constexpr int32_t k0_899976223 = 7373;
constexpr int32_t k1_175875602 = 9633;
constexpr int32_t k1_501321110 = 12299;
constexpr int32_t k1_847759065 = 15137;
constexpr int32_t k1_961570560 = 16069;
constexpr int32_t k2_053119869 = 16819;
constexpr int32_t k2_562915447 = 20995;
constexpr int32_t k3_072711026 = 25172;

constexpr int kPass1Shift = 13 - 2;
constexpr int kPass2Shift = 13 + 2 + 3;

int32_t Wrap16(int32_t value) { return static_cast<int16_t>(value); }

int16_t Saturate16(int32_t value) { return static_cast<int16_t>(std::clamp(value, -32768, 32767)); }

// Products of two 16-bit numbers are added in 32 bits, which may wrap as the SIMD code's do.
int32_t Dot(int32_t a, int32_t ka, int32_t b, int32_t kb) {
  return static_cast<int32_t>(static_cast<uint32_t>(a * ka) + static_cast<uint32_t>(b * kb));
}
int32_t Add(int32_t a, int32_t b) {
  return static_cast<int32_t>(static_cast<uint32_t>(a) + static_cast<uint32_t>(b));
}
int32_t Sub(int32_t a, int32_t b) {
  return static_cast<int32_t>(static_cast<uint32_t>(a) - static_cast<uint32_t>(b));
}

// Eight values, `step` apart.
template <int kShift>
void Pass(int16_t* x, size_t step) {
  const int32_t x0 = x[0];
  const int32_t x1 = x[step];
  const int32_t x2 = x[2 * step];
  const int32_t x3 = x[3 * step];
  const int32_t x4 = x[4 * step];
  const int32_t x5 = x[5 * step];
  const int32_t x6 = x[6 * step];
  const int32_t x7 = x[7 * step];
  const int32_t even2 = Dot(x2, k0_541196100, x6, k0_541196100 - k1_847759065);
  const int32_t even3 = Dot(x2, k0_541196100 + k0_765366865, x6, k0_541196100);
  const int32_t even0 = Wrap16(x0 + x4) * 8192;
  const int32_t even1 = Wrap16(x0 - x4) * 8192;
  const int32_t z3 = Wrap16(x7 + x3);
  const int32_t z4 = Wrap16(x5 + x1);
  const int32_t y3 = Dot(z3, k1_175875602 - k1_961570560, z4, k1_175875602);
  const int32_t y4 = Dot(z3, k1_175875602, z4, k1_175875602 - k0_390180644);
  const int32_t odd0 = Add(Dot(x7, k0_298631336 - k0_899976223, x1, -k0_899976223), y3);
  const int32_t odd3 = Add(Dot(x7, -k0_899976223, x1, k1_501321110 - k0_899976223), y4);
  const int32_t odd1 = Add(Dot(x5, k2_053119869 - k2_562915447, x3, -k2_562915447), y4);
  const int32_t odd2 = Add(Dot(x5, -k2_562915447, x3, k3_072711026 - k2_562915447), y3);
  const auto put = [&](size_t low, size_t high, int32_t even, int32_t odd) {
    const int32_t rounded = Add(even, 1 << (kShift - 1));
    x[low * step] = Saturate16(Add(rounded, odd) >> kShift);
    x[high * step] = Saturate16(Sub(rounded, odd) >> kShift);
  };
  put(0, 7, Add(even0, even3), odd3);
  put(1, 6, Add(even1, even2), odd2);
  put(2, 5, Sub(even1, even2), odd1);
  put(3, 4, Sub(even0, even3), odd0);
}

uint8_t Sample(int32_t value) { return static_cast<uint8_t>(std::clamp(value, -128, 127) + 128); }

void Flat(const IdctJob& job) {
  const int32_t dc = Wrap16(job.block[0] * static_cast<int16_t>(job.quant[0]));
  // The second pass sees what the first one saturated.
  const int32_t value = Sample((Saturate16(dc * 4) + 16) >> 5);
  for (uint32_t y = 0; y < 8; ++y) std::memset(job.out + y * job.stride, value, 8);
}

void Plain(const IdctJob& job) {
  if (job.flat()) return Flat(job);
  int16_t x[64];
  for (uint32_t i = 0; i < 64; ++i) {
    x[i] = static_cast<int16_t>(job.block[i] * static_cast<int16_t>(job.quant[i]));
  }
  for (uint32_t i = 0; i < 8; ++i) Pass<kPass1Shift>(x + i, 8);
  for (uint32_t i = 0; i < 8; ++i) {
    Pass<kPass2Shift>(x + 8 * i, 1);
    for (uint32_t j = 0; j < 8; ++j) job.out[i * job.stride + j] = Sample(x[8 * i + j]);
  }
}

}  // namespace

void IdctPairPlain(const IdctJob& a, const IdctJob& b) {
  Plain(a);
  Plain(b);
}

#if defined(__x86_64__)

bool Avx2() {
  static const bool has = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("bmi2");
  return has;
}

// Block a is in the low lanes, b in the high ones; each lane does what SSE2 would.
#define FOREBAY_AVX2 __attribute__((target("avx2"), always_inline)) inline

namespace {

FOREBAY_AVX2 __m256i Constants(int32_t low, int32_t high) {
  return _mm256_set1_epi32(static_cast<int32_t>(static_cast<uint32_t>(low) & 0xFFFFu) |
                           static_cast<int32_t>(static_cast<uint32_t>(high) << 16));
}

// 16-bit values times 2^13, plus `round`.
FOREBAY_AVX2 __m256i ScaleLow(__m256i v, __m256i round) {
  const __m256i high = _mm256_unpacklo_epi16(_mm256_setzero_si256(), v);
  return _mm256_add_epi32(_mm256_srai_epi32(high, 3), round);
}
FOREBAY_AVX2 __m256i ScaleHigh(__m256i v, __m256i round) {
  const __m256i high = _mm256_unpackhi_epi16(_mm256_setzero_si256(), v);
  return _mm256_add_epi32(_mm256_srai_epi32(high, 3), round);
}

FOREBAY_AVX2 __m256i DotAdd(__m256i pair, __m256i constants, __m256i more) {
  return _mm256_add_epi32(_mm256_madd_epi16(pair, constants), more);
}

template <int kShift>
FOREBAY_AVX2 void Put(__m256i& low, __m256i& high, __m256i even_lo, __m256i even_hi, __m256i odd_lo,
                      __m256i odd_hi) {
  low = _mm256_packs_epi32(_mm256_srai_epi32(_mm256_add_epi32(even_lo, odd_lo), kShift),
                           _mm256_srai_epi32(_mm256_add_epi32(even_hi, odd_hi), kShift));
  high = _mm256_packs_epi32(_mm256_srai_epi32(_mm256_sub_epi32(even_lo, odd_lo), kShift),
                            _mm256_srai_epi32(_mm256_sub_epi32(even_hi, odd_hi), kShift));
}

template <int kShift>
FOREBAY_AVX2 void Pass(__m256i (&x)[8]) {
  // The even part.
  const __m256i c2 = Constants(k0_541196100, k0_541196100 - k1_847759065);
  const __m256i c3 = Constants(k0_541196100 + k0_765366865, k0_541196100);
  const __m256i lo26 = _mm256_unpacklo_epi16(x[2], x[6]);
  const __m256i hi26 = _mm256_unpackhi_epi16(x[2], x[6]);
  const __m256i lo_even2 = _mm256_madd_epi16(lo26, c2);
  const __m256i hi_even2 = _mm256_madd_epi16(hi26, c2);
  const __m256i lo_even3 = _mm256_madd_epi16(lo26, c3);
  const __m256i hi_even3 = _mm256_madd_epi16(hi26, c3);
  const __m256i sum04 = _mm256_add_epi16(x[0], x[4]);
  const __m256i difference04 = _mm256_sub_epi16(x[0], x[4]);
  const __m256i round = _mm256_set1_epi32(1 << (kShift - 1));
  const __m256i lo_even0 = ScaleLow(sum04, round);
  const __m256i hi_even0 = ScaleHigh(sum04, round);
  const __m256i lo_even1 = ScaleLow(difference04, round);
  const __m256i hi_even1 = ScaleHigh(difference04, round);
  // The odd part.
  const __m256i z3 = _mm256_add_epi16(x[7], x[3]);
  const __m256i z4 = _mm256_add_epi16(x[5], x[1]);
  const __m256i lo_z = _mm256_unpacklo_epi16(z3, z4);
  const __m256i hi_z = _mm256_unpackhi_epi16(z3, z4);
  const __m256i c_y3 = Constants(k1_175875602 - k1_961570560, k1_175875602);
  const __m256i c_y4 = Constants(k1_175875602, k1_175875602 - k0_390180644);
  const __m256i lo_y3 = _mm256_madd_epi16(lo_z, c_y3);
  const __m256i hi_y3 = _mm256_madd_epi16(hi_z, c_y3);
  const __m256i lo_y4 = _mm256_madd_epi16(lo_z, c_y4);
  const __m256i hi_y4 = _mm256_madd_epi16(hi_z, c_y4);
  const __m256i lo71 = _mm256_unpacklo_epi16(x[7], x[1]);
  const __m256i hi71 = _mm256_unpackhi_epi16(x[7], x[1]);
  const __m256i lo53 = _mm256_unpacklo_epi16(x[5], x[3]);
  const __m256i hi53 = _mm256_unpackhi_epi16(x[5], x[3]);
  const __m256i c_odd0 = Constants(k0_298631336 - k0_899976223, -k0_899976223);
  const __m256i c_odd3 = Constants(-k0_899976223, k1_501321110 - k0_899976223);
  const __m256i c_odd1 = Constants(k2_053119869 - k2_562915447, -k2_562915447);
  const __m256i c_odd2 = Constants(-k2_562915447, k3_072711026 - k2_562915447);
  Put<kShift>(x[0], x[7], _mm256_add_epi32(lo_even0, lo_even3),
              _mm256_add_epi32(hi_even0, hi_even3), DotAdd(lo71, c_odd3, lo_y4),
              DotAdd(hi71, c_odd3, hi_y4));
  Put<kShift>(x[1], x[6], _mm256_add_epi32(lo_even1, lo_even2),
              _mm256_add_epi32(hi_even1, hi_even2), DotAdd(lo53, c_odd2, lo_y3),
              DotAdd(hi53, c_odd2, hi_y3));
  Put<kShift>(x[2], x[5], _mm256_sub_epi32(lo_even1, lo_even2),
              _mm256_sub_epi32(hi_even1, hi_even2), DotAdd(lo53, c_odd1, lo_y4),
              DotAdd(hi53, c_odd1, hi_y4));
  Put<kShift>(x[3], x[4], _mm256_sub_epi32(lo_even0, lo_even3),
              _mm256_sub_epi32(hi_even0, hi_even3), DotAdd(lo71, c_odd0, lo_y3),
              DotAdd(hi71, c_odd0, hi_y3));
}

// The same where x[4] to x[7] are zero, from half the products.
template <int kShift>
FOREBAY_AVX2 void SparsePass(__m256i (&x)[8]) {
  const __m256i lo02 = _mm256_unpacklo_epi16(x[0], x[2]);
  const __m256i hi02 = _mm256_unpackhi_epi16(x[0], x[2]);
  const __m256i lo31 = _mm256_unpacklo_epi16(x[3], x[1]);
  const __m256i hi31 = _mm256_unpackhi_epi16(x[3], x[1]);
  const __m256i round = _mm256_set1_epi32(1 << (kShift - 1));
  const auto put = [&](__m256i & low, __m256i & high, int32_t even, int32_t odd3, int32_t odd1)
      __attribute__((target("avx2"), always_inline)) {
    const __m256i c_even = Constants(8192, even);
    const __m256i c_odd = Constants(odd3, odd1);
    Put<kShift>(low, high, DotAdd(lo02, c_even, round), DotAdd(hi02, c_even, round),
                _mm256_madd_epi16(lo31, c_odd), _mm256_madd_epi16(hi31, c_odd));
  };
  put(x[0], x[7], k0_541196100 + k0_765366865, k1_175875602,
      k1_175875602 - k0_390180644 + k1_501321110 - k0_899976223);
  put(x[1], x[6], k0_541196100, k1_175875602 - k1_961570560 + k3_072711026 - k2_562915447,
      k1_175875602);
  put(x[2], x[5], -k0_541196100, k1_175875602 - k2_562915447, k1_175875602 - k0_390180644);
  put(x[3], x[4], -k0_541196100 - k0_765366865, k1_175875602 - k1_961570560,
      k1_175875602 - k0_899976223);
}

// Of eight rows to the first four columns.
FOREBAY_AVX2 void SparseTranspose(__m256i (&x)[8]) {
  const __m256i r01 = _mm256_unpacklo_epi16(x[0], x[1]);
  const __m256i r23 = _mm256_unpacklo_epi16(x[2], x[3]);
  const __m256i r45 = _mm256_unpacklo_epi16(x[4], x[5]);
  const __m256i r67 = _mm256_unpacklo_epi16(x[6], x[7]);
  const __m256i c01_low = _mm256_unpacklo_epi32(r01, r23);
  const __m256i c23_low = _mm256_unpackhi_epi32(r01, r23);
  const __m256i c01_high = _mm256_unpacklo_epi32(r45, r67);
  const __m256i c23_high = _mm256_unpackhi_epi32(r45, r67);
  x[0] = _mm256_unpacklo_epi64(c01_low, c01_high);
  x[1] = _mm256_unpackhi_epi64(c01_low, c01_high);
  x[2] = _mm256_unpacklo_epi64(c23_low, c23_high);
  x[3] = _mm256_unpackhi_epi64(c23_low, c23_high);
}

FOREBAY_AVX2 void Transpose(__m256i (&x)[8]) {
  __m256i a[8];
  for (int i = 0; i < 4; ++i) {
    a[2 * i] = _mm256_unpacklo_epi16(x[2 * i], x[2 * i + 1]);
    a[2 * i + 1] = _mm256_unpackhi_epi16(x[2 * i], x[2 * i + 1]);
  }
  __m256i b[8];
  for (int i = 0; i < 2; ++i) {
    b[4 * i] = _mm256_unpacklo_epi32(a[4 * i], a[4 * i + 2]);
    b[4 * i + 1] = _mm256_unpackhi_epi32(a[4 * i], a[4 * i + 2]);
    b[4 * i + 2] = _mm256_unpacklo_epi32(a[4 * i + 1], a[4 * i + 3]);
    b[4 * i + 3] = _mm256_unpackhi_epi32(a[4 * i + 1], a[4 * i + 3]);
  }
  for (int i = 0; i < 4; ++i) {
    x[2 * i] = _mm256_unpacklo_epi64(b[i], b[i + 4]);
    x[2 * i + 1] = _mm256_unpackhi_epi64(b[i], b[i + 4]);
  }
}

FOREBAY_AVX2 __m256i Load(const void* a, const void* b) {
  return _mm256_inserti128_si256(
      _mm256_castsi128_si256(_mm_load_si128(static_cast<const __m128i*>(a))),
      _mm_load_si128(static_cast<const __m128i*>(b)), 1);
}

}  // namespace

__attribute__((target("avx2"))) void IdctPairAvx2(const IdctJob& a, const IdctJob& b) {
  if (a.flat() && b.flat()) {
    Flat(a);
    Flat(b);
    return;
  }
  const bool sparse = a.sparse() && b.sparse();
  __m256i x[8];
  for (int i = 0; i < (sparse ? 4 : 8); ++i) {
    x[i] = _mm256_mullo_epi16(Load(a.block + 8 * i, b.block + 8 * i),
                              Load(a.quant + 8 * i, b.quant + 8 * i));
  }
  if (sparse) {
    SparsePass<kPass1Shift>(x);
    SparseTranspose(x);
    SparsePass<kPass2Shift>(x);
  } else {
    Pass<kPass1Shift>(x);
    Transpose(x);
    Pass<kPass2Shift>(x);
  }
  // x[i] is column i; to bytes, and back to rows.
  __m256i p[4];
  for (int i = 0; i < 4; ++i) p[i] = _mm256_packs_epi16(x[i], x[i + 4]);
  const __m256i c01 = _mm256_unpacklo_epi8(p[0], p[1]);
  const __m256i c45 = _mm256_unpackhi_epi8(p[0], p[1]);
  const __m256i c23 = _mm256_unpacklo_epi8(p[2], p[3]);
  const __m256i c67 = _mm256_unpackhi_epi8(p[2], p[3]);
  const __m256i low0 = _mm256_unpacklo_epi16(c01, c23);
  const __m256i low4 = _mm256_unpackhi_epi16(c01, c23);
  const __m256i high0 = _mm256_unpacklo_epi16(c45, c67);
  const __m256i high4 = _mm256_unpackhi_epi16(c45, c67);
  const __m256i rows[4] = {_mm256_unpacklo_epi32(low0, high0), _mm256_unpackhi_epi32(low0, high0),
                           _mm256_unpacklo_epi32(low4, high4), _mm256_unpackhi_epi32(low4, high4)};
  const __m256i middle = _mm256_set1_epi8(-128);
  for (int i = 0; i < 4; ++i) {
    const __m256i v = _mm256_xor_si256(rows[i], middle);
    const __m128i va = _mm256_castsi256_si128(v);
    const __m128i vb = _mm256_extracti128_si256(v, 1);
    uint8_t* out_a = a.out + 2 * static_cast<size_t>(i) * a.stride;
    uint8_t* out_b = b.out + 2 * static_cast<size_t>(i) * b.stride;
    _mm_storel_epi64(reinterpret_cast<__m128i*>(out_a), va);
    _mm_storel_epi64(reinterpret_cast<__m128i*>(out_a + a.stride), _mm_unpackhi_epi64(va, va));
    _mm_storel_epi64(reinterpret_cast<__m128i*>(out_b), vb);
    _mm_storel_epi64(reinterpret_cast<__m128i*>(out_b + b.stride), _mm_unpackhi_epi64(vb, vb));
  }
}

#else

bool Avx2() { return false; }
void IdctPairAvx2(const IdctJob& a, const IdctJob& b) { IdctPairPlain(a, b); }

#endif

}  // namespace forebay::jpeg
