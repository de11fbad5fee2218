#include "decode/jpeg_color.h"

#include <algorithm>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "decode/jpeg_idct.h"

namespace forebay::jpeg {
namespace {

void H2V1(const uint8_t* in, size_t count, uint8_t* out) {
  for (size_t i = 0; i < count; ++i, ++in, out += 2) {
    const uint32_t three = 3u * in[0];
    out[0] = static_cast<uint8_t>((three + in[-1] + 1) >> 2);
    out[1] = static_cast<uint8_t>((three + in[1] + 2) >> 2);
  }
}

void H2V2(const uint8_t* near, const uint8_t* far, size_t count, uint8_t* out) {
  uint32_t before = 3u * near[-1] + far[-1];
  uint32_t here = 3u * near[0] + far[0];
  for (size_t i = 0; i < count; ++i, out += 2) {
    const uint32_t after = 3u * near[i + 1] + far[i + 1];
    out[0] = static_cast<uint8_t>((3 * here + before + 8) >> 4);
    out[1] = static_cast<uint8_t>((3 * here + after + 7) >> 4);
    before = here;
    here = after;
  }
}

void H1V2(const uint8_t* near, const uint8_t* far, bool lower, size_t count, uint8_t* out) {
  const uint32_t bias = lower ? 2 : 1;
  for (size_t i = 0; i < count; ++i) {
    out[i] = static_cast<uint8_t>((3u * near[i] + far[i] + bias) >> 2);
  }
}

uint8_t Clamp(int32_t value) { return static_cast<uint8_t>(std::clamp(value, 0, 255)); }

// Factors times 2^16.
constexpr int32_t k1_40200 = 91881;
constexpr int32_t k1_77200 = 116130;
constexpr int32_t k0_71414 = 46802;
constexpr int32_t k0_34414 = 22554;

void Ycc(const uint8_t* y, const uint8_t* cb, const uint8_t* cr, size_t count, uint8_t* rgbx) {
  for (size_t i = 0; i < count; ++i, rgbx += 4) {
    const int32_t blue = cb[i] - 128;
    const int32_t red = cr[i] - 128;
    rgbx[0] = Clamp(y[i] + ((k1_40200 * red + 32768) >> 16));
    rgbx[1] = Clamp(y[i] + ((-k0_34414 * blue - k0_71414 * red + 32768) >> 16));
    rgbx[2] = Clamp(y[i] + ((k1_77200 * blue + 32768) >> 16));
    rgbx[3] = 255;
  }
}

void Rgb(const uint8_t* r, const uint8_t* g, const uint8_t* b, size_t count, uint8_t* rgbx) {
  for (size_t i = 0; i < count; ++i, rgbx += 4) {
    rgbx[0] = r[i];
    rgbx[1] = g[i];
    rgbx[2] = b[i];
    rgbx[3] = 255;
  }
}

#if defined(__x86_64__)
#define FOREBAY_AVX2 __attribute__((target("avx2")))

FOREBAY_AVX2 inline __m256i Wide(const uint8_t* in) {
  return _mm256_cvtepu8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(in)));
}
FOREBAY_AVX2 inline __m256i Triple(__m256i v) {
  return _mm256_add_epi16(v, _mm256_add_epi16(v, v));
}
FOREBAY_AVX2 inline void Store(uint8_t* out, __m256i v) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(out), v);
}

FOREBAY_AVX2 void H2V1Avx2(const uint8_t* in, size_t count, uint8_t* out) {
  const __m256i one = _mm256_set1_epi16(1);
  const __m256i two = _mm256_set1_epi16(2);
  for (size_t i = 0; i < count; i += 16, in += 16, out += 32) {
    const __m256i three = Triple(Wide(in));
    const __m256i even =
        _mm256_srli_epi16(_mm256_add_epi16(_mm256_add_epi16(three, one), Wide(in - 1)), 2);
    const __m256i odd =
        _mm256_srli_epi16(_mm256_add_epi16(_mm256_add_epi16(three, two), Wide(in + 1)), 2);
    Store(out, _mm256_or_si256(even, _mm256_slli_epi16(odd, 8)));
  }
}

FOREBAY_AVX2 void H2V2Avx2(const uint8_t* near, const uint8_t* far, size_t count, uint8_t* out) {
  const __m256i seven = _mm256_set1_epi16(7);
  const __m256i eight = _mm256_set1_epi16(8);
  for (size_t i = 0; i < count; i += 16, near += 16, far += 16, out += 32) {
    const __m256i before = _mm256_add_epi16(Triple(Wide(near - 1)), Wide(far - 1));
    const __m256i here = _mm256_add_epi16(Triple(Wide(near)), Wide(far));
    const __m256i after = _mm256_add_epi16(Triple(Wide(near + 1)), Wide(far + 1));
    const __m256i three = Triple(here);
    const __m256i even =
        _mm256_srli_epi16(_mm256_add_epi16(_mm256_add_epi16(three, eight), before), 4);
    const __m256i odd =
        _mm256_srli_epi16(_mm256_add_epi16(_mm256_add_epi16(three, seven), after), 4);
    Store(out, _mm256_or_si256(even, _mm256_slli_epi16(odd, 8)));
  }
}

FOREBAY_AVX2 void H1V2Avx2(const uint8_t* near, const uint8_t* far, bool lower, size_t count,
                           uint8_t* out) {
  const __m256i bias = _mm256_set1_epi16(lower ? 2 : 1);
  for (size_t i = 0; i < count; i += 16, near += 16, far += 16, out += 16) {
    const __m256i sum = _mm256_add_epi16(_mm256_add_epi16(Triple(Wide(near)), Wide(far)), bias);
    const __m256i v = _mm256_srli_epi16(sum, 2);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out),
                     _mm_packus_epi16(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1)));
  }
}

// Sixteen pixels, each channel in 16-bit values of 0..255.
FOREBAY_AVX2 inline void StorePixels(uint8_t* rgbx, __m256i r, __m256i g, __m256i b) {
  const __m256i rg = _mm256_or_si256(r, _mm256_slli_epi16(g, 8));
  const __m256i bx = _mm256_or_si256(b, _mm256_set1_epi16(static_cast<int16_t>(0xFF00)));
  const __m256i low = _mm256_unpacklo_epi16(rg, bx);   // pixels 0..3, 8..11
  const __m256i high = _mm256_unpackhi_epi16(rg, bx);  // 4..7, 12..15
  Store(rgbx, _mm256_permute2x128_si256(low, high, 0x20));
  Store(rgbx + 32, _mm256_permute2x128_si256(low, high, 0x31));
}

FOREBAY_AVX2 void YccAvx2(const uint8_t* y, const uint8_t* cb, const uint8_t* cr, size_t count,
                          uint8_t* rgbx) {
  const __m256i middle = _mm256_set1_epi16(128);
  const __m256i zero = _mm256_setzero_si256();
  const __m256i top = _mm256_set1_epi16(255);
  const __m256i one = _mm256_set1_epi16(1);
  // A factor of 16 bits is what is left of it without its whole part.
  const __m256i to_red = _mm256_set1_epi16(k1_40200 - 65536);
  const __m256i to_blue = _mm256_set1_epi16(k1_77200 - 2 * 65536);
  const __m256i to_green = _mm256_set1_epi32(static_cast<int32_t>(
      (static_cast<uint32_t>(-k0_34414) & 0xFFFF) | static_cast<uint32_t>(65536 - k0_71414) << 16));
  const __m256i half = _mm256_set1_epi32(32768);
  for (size_t i = 0; i < count; i += 16, rgbx += 64) {
    const __m256i luma = Wide(y + i);
    const __m256i blue = _mm256_sub_epi16(Wide(cb + i), middle);
    const __m256i red = _mm256_sub_epi16(Wide(cr + i), middle);
    const __m256i blue2 = _mm256_add_epi16(blue, blue);
    const __m256i red2 = _mm256_add_epi16(red, red);
    // (x * factor + 2^15) >> 16 is ((2 x * factor >> 16) + 1) >> 1.
    __m256i r = _mm256_srai_epi16(_mm256_add_epi16(_mm256_mulhi_epi16(red2, to_red), one), 1);
    __m256i b = _mm256_srai_epi16(_mm256_add_epi16(_mm256_mulhi_epi16(blue2, to_blue), one), 1);
    r = _mm256_add_epi16(luma, _mm256_add_epi16(r, red));
    b = _mm256_add_epi16(luma, _mm256_add_epi16(b, blue2));
    const __m256i low = _mm256_madd_epi16(_mm256_unpacklo_epi16(blue, red), to_green);
    const __m256i high = _mm256_madd_epi16(_mm256_unpackhi_epi16(blue, red), to_green);
    __m256i g = _mm256_packs_epi32(_mm256_srai_epi32(_mm256_add_epi32(low, half), 16),
                                   _mm256_srai_epi32(_mm256_add_epi32(high, half), 16));
    g = _mm256_add_epi16(luma, _mm256_sub_epi16(g, red));
    r = _mm256_min_epi16(_mm256_max_epi16(r, zero), top);
    g = _mm256_min_epi16(_mm256_max_epi16(g, zero), top);
    b = _mm256_min_epi16(_mm256_max_epi16(b, zero), top);
    StorePixels(rgbx, r, g, b);
  }
}

FOREBAY_AVX2 void RgbAvx2(const uint8_t* r, const uint8_t* g, const uint8_t* b, size_t count,
                          uint8_t* rgbx) {
  for (size_t i = 0; i < count; i += 16) {
    StorePixels(rgbx + 4 * i, Wide(r + i), Wide(g + i), Wide(b + i));
  }
}
#endif

}  // namespace

const ColorKernels& Colors(bool simd) {
  static constexpr ColorKernels kPlain = {H2V1, H2V2, H1V2, Ycc, Rgb};
#if defined(__x86_64__)
  static constexpr ColorKernels kAvx2 = {H2V1Avx2, H2V2Avx2, H1V2Avx2, YccAvx2, RgbAvx2};
  if (simd && Avx2()) return kAvx2;
#endif
  static_cast<void>(simd);
  return kPlain;
}

void CmykToRgb(const uint8_t* k, bool rgb, size_t count, uint8_t* rgbx) {
  const uint32_t flip = rgb ? 0 : 255;
  for (size_t i = 0; i < count; ++i, rgbx += 4) {
    const uint32_t light = k[i];  // 255 less the black ink
    for (uint32_t c = 0; c < 3; ++c) {
      const uint32_t product = (rgbx[c] ^ flip) * light + 128;
      rgbx[c] = Clamp(static_cast<int32_t>(light - (((product >> 8) + product) >> 8)));
    }
  }
}

}  // namespace forebay::jpeg
