#include "decode/resize_kernels.h"

#include <algorithm>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
// g++ 12 warns of its own AVX-512 headers, once inlined.
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif
#endif

namespace forebay::kernels {
namespace {

constexpr int32_t kHalf = 1 << (kPrecision - 1);

uint8_t Clip(int32_t sum) { return static_cast<uint8_t>(std::clamp(sum >> kPrecision, 0, 255)); }

}  // namespace

void HorizontalScalar(const uint8_t* in, uint8_t* out, size_t n, const uint32_t* offsets,
                      size_t groups, const int32_t* coefficients) {
  const size_t taps = groups * 4;
  for (size_t i = 0; i < n; ++i, coefficients += taps, out += 4) {
    const uint8_t* p = in + offsets[i];
    int32_t sum[4] = {kHalf, kHalf, kHalf, kHalf};
    for (size_t t = 0; t < taps; ++t) {
      for (size_t c = 0; c < 4; ++c) sum[c] += p[t * 4 + c] * coefficients[t];
    }
    for (size_t c = 0; c < 4; ++c) out[c] = Clip(sum[c]);
  }
}

void VerticalScalar(const uint8_t* const* rows, size_t taps, const int32_t* coefficients,
                    uint8_t* out, size_t bytes) {
  constexpr size_t kBlock = 64;
  for (size_t i = 0; i < bytes; i += kBlock) {
    int32_t sum[kBlock];
    for (size_t k = 0; k < kBlock; ++k) sum[k] = kHalf;
    for (size_t t = 0; t < taps; ++t) {
      const uint8_t* row = rows[t] + i;
      for (size_t k = 0; k < kBlock; ++k) sum[k] += row[k] * coefficients[t];
    }
    for (size_t k = 0; k < kBlock; ++k) out[i + k] = Clip(sum[k]);
  }
}

#if defined(__x86_64__)

void PackAvx2(const int32_t* coefficients, size_t n, size_t groups, uint8_t* packed) {
  const size_t taps = groups * 4;
  const auto pair = [](int32_t a, int32_t b) {
    return static_cast<int32_t>((static_cast<uint32_t>(b) << 16) |
                                (static_cast<uint32_t>(a) & 0xffff));
  };
  for (size_t i = 0; i < n; i += 2) {
    for (size_t g = 0; g < groups; ++g, packed += kAvx2Bytes) {
      auto* to = reinterpret_cast<__m128i*>(packed);
      for (size_t lane = 0; lane < 2; ++lane) {
        const int32_t* c = coefficients + (i + lane) * taps + g * 4;
        int32_t high[4];
        int32_t low[4];
        for (size_t t = 0; t < 4; ++t) {
          high[t] = c[t] >> kSplit;
          low[t] = c[t] & ((1 << kSplit) - 1);
        }
        _mm_storeu_si128(to + lane, _mm_set1_epi32(pair(high[0], high[1])));
        _mm_storeu_si128(to + lane + 2, _mm_set1_epi32(pair(low[0], low[1])));
        _mm_storeu_si128(to + lane + 4, _mm_set1_epi32(pair(high[2], high[3])));
        _mm_storeu_si128(to + lane + 6, _mm_set1_epi32(pair(low[2], low[3])));
      }
    }
  }
}

namespace {

#define FOREBAY_AVX2 __attribute__((target("avx2")))

struct Sums {
  __m256i high;
  __m256i low;
};

// Taps of two pixels, one a lane: 4 channels of 32 bits each.
FOREBAY_AVX2 inline Sums SumTaps(const uint8_t* a, const uint8_t* b, size_t groups,
                                 const uint8_t* packed) {
  const __m256i even = _mm256_broadcastsi128_si256(
      _mm_setr_epi8(0, -1, 4, -1, 1, -1, 5, -1, 2, -1, 6, -1, 3, -1, 7, -1));
  const __m256i odd = _mm256_broadcastsi128_si256(
      _mm_setr_epi8(8, -1, 12, -1, 9, -1, 13, -1, 10, -1, 14, -1, 11, -1, 15, -1));
  Sums sums{_mm256_setzero_si256(), _mm256_set1_epi32(kHalf)};
  for (size_t g = 0; g < groups; ++g, packed += kAvx2Bytes) {
    const __m256i pixels = _mm256_inserti128_si256(
        _mm256_castsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(a + g * 16))),
        _mm_loadu_si128(reinterpret_cast<const __m128i*>(b + g * 16)), 1);
    const auto* c = reinterpret_cast<const __m256i*>(packed);
    const __m256i p01 = _mm256_shuffle_epi8(pixels, even);
    const __m256i p23 = _mm256_shuffle_epi8(pixels, odd);
    sums.high = _mm256_add_epi32(sums.high, _mm256_madd_epi16(p01, _mm256_loadu_si256(c)));
    sums.low = _mm256_add_epi32(sums.low, _mm256_madd_epi16(p01, _mm256_loadu_si256(c + 1)));
    sums.high = _mm256_add_epi32(sums.high, _mm256_madd_epi16(p23, _mm256_loadu_si256(c + 2)));
    sums.low = _mm256_add_epi32(sums.low, _mm256_madd_epi16(p23, _mm256_loadu_si256(c + 3)));
  }
  return sums;
}

FOREBAY_AVX2 inline __m256i Combine(const Sums& sums) {
  const __m256i sum = _mm256_add_epi32(_mm256_slli_epi32(sums.high, kSplit), sums.low);
  return _mm256_srai_epi32(sum, kPrecision);
}

}  // namespace

FOREBAY_AVX2 void HorizontalAvx2(const uint8_t* in, uint8_t* out, size_t n, const uint32_t* offsets,
                                 size_t groups, const uint8_t* packed) {
  const size_t bytes = groups * kAvx2Bytes;
  const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 0, 0, 0, 0);
  for (size_t i = 0; i < n; i += 4, packed += 2 * bytes, out += 16) {
    const __m256i a = Combine(SumTaps(in + offsets[i], in + offsets[i + 1], groups, packed));
    const __m256i b =
        Combine(SumTaps(in + offsets[i + 2], in + offsets[i + 3], groups, packed + bytes));
    const __m256i words = _mm256_packs_epi32(a, b);  // 0 2 | 1 3
    const __m256i result = _mm256_permutevar8x32_epi32(_mm256_packus_epi16(words, words), order);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out), _mm256_castsi256_si128(result));
  }
}

FOREBAY_AVX2 void VerticalAvx2(const uint8_t* const* rows, size_t taps, const int32_t* coefficients,
                               uint8_t* out, size_t bytes) {
  const __m256i zero = _mm256_setzero_si256();
  const __m256i half = _mm256_set1_epi32(kHalf);
  for (size_t i = 0; i < bytes; i += 32) {
    Sums s[4] = {{zero, half}, {zero, half}, {zero, half}, {zero, half}};
    for (size_t t = 0; t < taps; t += 2) {
      const bool pair = t + 1 < taps;
      const uint32_t c0 = static_cast<uint32_t>(coefficients[t]);
      const uint32_t c1 = pair ? static_cast<uint32_t>(coefficients[t + 1]) : 0;
      const auto h0 = static_cast<uint32_t>(static_cast<int32_t>(c0) >> kSplit);
      const auto h1 = static_cast<uint32_t>(static_cast<int32_t>(c1) >> kSplit);
      constexpr uint32_t kMask = (1 << kSplit) - 1;
      const __m256i high = _mm256_set1_epi32(static_cast<int>((h0 & 0xffff) | (h1 << 16)));
      const __m256i low = _mm256_set1_epi32(static_cast<int>((c0 & kMask) | ((c1 & kMask) << 16)));
      const __m256i a = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(rows[t] + i));
      const __m256i b =
          _mm256_loadu_si256(reinterpret_cast<const __m256i*>(rows[pair ? t + 1 : t] + i));
      const __m256i ab0 = _mm256_unpacklo_epi8(a, b);
      const __m256i ab1 = _mm256_unpackhi_epi8(a, b);
      const __m256i words[4] = {_mm256_unpacklo_epi8(ab0, zero), _mm256_unpackhi_epi8(ab0, zero),
                                _mm256_unpacklo_epi8(ab1, zero), _mm256_unpackhi_epi8(ab1, zero)};
      for (int k = 0; k < 4; ++k) {
        s[k].high = _mm256_add_epi32(s[k].high, _mm256_madd_epi16(words[k], high));
        s[k].low = _mm256_add_epi32(s[k].low, _mm256_madd_epi16(words[k], low));
      }
    }
    const __m256i result = _mm256_packus_epi16(_mm256_packs_epi32(Combine(s[0]), Combine(s[1])),
                                               _mm256_packs_epi32(Combine(s[2]), Combine(s[3])));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + i), result);
  }
}

namespace {

// Four coefficients as three signed bytes each, c = d2 * 2^16 + d1 * 2^8 + d0; digits[i] holds the
// four bytes d_i.
inline void PackDigits(const int32_t* c, uint32_t (&digits)[3]) {
  digits[0] = digits[1] = digits[2] = 0;
  for (size_t t = 0; t < 4; ++t) {
    // Adding 128 to each digit and taking it off again carries what a signed byte cannot hold.
    const uint32_t bits = (static_cast<uint32_t>(c[t]) + 0x808080u) ^ 0x808080u;
    digits[0] |= (bits & 0xff) << (8 * t);
    digits[1] |= ((bits >> 8) & 0xff) << (8 * t);
    digits[2] |= ((bits >> 16) & 0xff) << (8 * t);
  }
}

}  // namespace

void PackVnni(const int32_t* coefficients, size_t n, size_t groups, uint8_t* packed) {
  const size_t taps = groups * 4;
  for (size_t i = 0; i < n; i += 4) {
    for (size_t g = 0; g < groups; ++g, packed += kVnniBytes) {
      for (size_t lane = 0; lane < 4; ++lane) {
        const int32_t* c = coefficients + (i + lane) * taps + g * 4;
        uint32_t digits[3];
        PackDigits(c, digits);
        for (size_t d = 0; d < 3; ++d) {
          _mm_storeu_si128(reinterpret_cast<__m128i*>(packed + d * 64 + lane * 16),
                           _mm_set1_epi32(static_cast<int>(digits[d])));
        }
      }
    }
  }
}

#define FOREBAY_VNNI __attribute__((target("avx512f,avx512bw,avx512vl,avx512vnni")))

FOREBAY_VNNI void HorizontalVnni(const uint8_t* in, uint8_t* out, size_t n, const uint32_t* offsets,
                                 size_t groups, const uint8_t* packed) {
  const __m512i by_channel =
      _mm512_broadcast_i32x4(_mm_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15));
  const auto load = [](const uint8_t* p) {
    return _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  };
  for (size_t i = 0; i < n; i += 4, out += 16) {
    const uint8_t* p[4] = {in + offsets[i], in + offsets[i + 1], in + offsets[i + 2],
                           in + offsets[i + 3]};
    __m512i sum0 = _mm512_set1_epi32(kHalf);
    __m512i sum1 = _mm512_setzero_si512();
    __m512i sum2 = _mm512_setzero_si512();
    for (size_t g = 0; g < groups; ++g, packed += kVnniBytes) {
      const size_t at = g * 16;
      __m512i pixels = _mm512_castsi128_si512(load(p[0] + at));
      pixels = _mm512_inserti32x4(pixels, load(p[1] + at), 1);
      pixels = _mm512_inserti32x4(pixels, load(p[2] + at), 2);
      pixels = _mm512_inserti32x4(pixels, load(p[3] + at), 3);
      pixels = _mm512_shuffle_epi8(pixels, by_channel);
      sum0 = _mm512_dpbusd_epi32(sum0, pixels, _mm512_loadu_si512(packed));
      sum1 = _mm512_dpbusd_epi32(sum1, pixels, _mm512_loadu_si512(packed + 64));
      sum2 = _mm512_dpbusd_epi32(sum2, pixels, _mm512_loadu_si512(packed + 128));
    }
    const __m512i high = _mm512_add_epi32(_mm512_slli_epi32(sum2, 8), sum1);
    __m512i sum = _mm512_add_epi32(_mm512_slli_epi32(high, 8), sum0);
    sum = _mm512_max_epi32(_mm512_srai_epi32(sum, kPrecision), _mm512_setzero_si512());
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out), _mm512_cvtusepi32_epi8(sum));
  }
}

namespace {

struct Digits {
  __m512i sum0;
  __m512i sum1;
  __m512i sum2;
};

FOREBAY_VNNI inline __m512i Combine(const Digits& s) {
  const __m512i high = _mm512_add_epi32(_mm512_slli_epi32(s.sum2, 8), s.sum1);
  return _mm512_srai_epi32(_mm512_add_epi32(_mm512_slli_epi32(high, 8), s.sum0), kPrecision);
}

}  // namespace

FOREBAY_VNNI void VerticalVnni(const uint8_t* const* rows, size_t taps, const int32_t* coefficients,
                               uint8_t* out, size_t bytes) {
  const __m512i zero = _mm512_setzero_si512();
  const __m512i half = _mm512_set1_epi32(kHalf);
  for (size_t i = 0; i < bytes; i += 64) {
    Digits s[4] = {{half, zero, zero}, {half, zero, zero}, {half, zero, zero}, {half, zero, zero}};
    for (size_t t = 0; t < taps; t += 4) {
      uint32_t digits[3];
      PackDigits(coefficients + t, digits);
      const __m512i d0 = _mm512_set1_epi32(static_cast<int>(digits[0]));
      const __m512i d1 = _mm512_set1_epi32(static_cast<int>(digits[1]));
      const __m512i d2 = _mm512_set1_epi32(static_cast<int>(digits[2]));
      const __m512i a = _mm512_loadu_si512(rows[t] + i);
      const __m512i b = _mm512_loadu_si512(rows[t + 1] + i);
      const __m512i c = _mm512_loadu_si512(rows[t + 2] + i);
      const __m512i d = _mm512_loadu_si512(rows[t + 3] + i);
      const __m512i ab0 = _mm512_unpacklo_epi8(a, b);
      const __m512i ab1 = _mm512_unpackhi_epi8(a, b);
      const __m512i cd0 = _mm512_unpacklo_epi8(c, d);
      const __m512i cd1 = _mm512_unpackhi_epi8(c, d);
      const __m512i quads[4] = {_mm512_unpacklo_epi16(ab0, cd0), _mm512_unpackhi_epi16(ab0, cd0),
                                _mm512_unpacklo_epi16(ab1, cd1), _mm512_unpackhi_epi16(ab1, cd1)};
      for (int k = 0; k < 4; ++k) {
        s[k].sum0 = _mm512_dpbusd_epi32(s[k].sum0, quads[k], d0);
        s[k].sum1 = _mm512_dpbusd_epi32(s[k].sum1, quads[k], d1);
        s[k].sum2 = _mm512_dpbusd_epi32(s[k].sum2, quads[k], d2);
      }
    }
    const __m512i result = _mm512_packus_epi16(_mm512_packs_epi32(Combine(s[0]), Combine(s[1])),
                                               _mm512_packs_epi32(Combine(s[2]), Combine(s[3])));
    _mm512_storeu_si512(out + i, result);
  }
}

#else  // never chosen by BestSimd

void PackAvx2(const int32_t*, size_t, size_t, uint8_t*) {}
void PackVnni(const int32_t*, size_t, size_t, uint8_t*) {}
void HorizontalAvx2(const uint8_t*, uint8_t*, size_t, const uint32_t*, size_t, const uint8_t*) {}
void HorizontalVnni(const uint8_t*, uint8_t*, size_t, const uint32_t*, size_t, const uint8_t*) {}
void VerticalAvx2(const uint8_t* const*, size_t, const int32_t*, uint8_t*, size_t) {}
void VerticalVnni(const uint8_t* const*, size_t, const int32_t*, uint8_t*, size_t) {}

#endif

}  // namespace forebay::kernels
