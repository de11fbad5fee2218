#include "decode/output_kernels.h"

#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>
#endif

namespace forebay::kernels {

#if defined(__x86_64__)
namespace {

#define FOREBAY_AVX2 __attribute__((target("avx2,fma,f16c")))
#define FOREBAY_INLINE FOREBAY_AVX2 __attribute__((always_inline)) inline

// Eight pixels that go to output pixels x ... x + 7.
FOREBAY_INLINE __m256i Load8(const uint8_t* rgbx, size_t width, bool flip, size_t x) {
  if (!flip) return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(rgbx + x * 4));
  const uint8_t* p = rgbx + (width - 8 - x) * 4;
  return _mm256_permutevar8x32_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)),
                                     _mm256_setr_epi32(7, 6, 5, 4, 3, 2, 1, 0));
}

struct Constants {
  __m256 mean;
  __m256 std;
  __m256 inverse;
};

FOREBAY_INLINE Constants ConstantsOf(const float (&mean)[8], const float (&std)[8]) {
  const __m256 s = _mm256_loadu_ps(std);
  return {_mm256_loadu_ps(mean), s, _mm256_div_ps(_mm256_set1_ps(1.0f), s)};
}

FOREBAY_INLINE __m256 Divide(__m256 x, __m256 by, __m256 inverse) {
  const __m256 q = _mm256_mul_ps(x, inverse);
  return _mm256_fmadd_ps(_mm256_fnmadd_ps(q, by, x), inverse, q);
}

FOREBAY_INLINE __m256 Scale(__m256i bytes, const Constants& c, bool normalize, bool multiply) {
  const __m256 x = _mm256_cvtepi32_ps(bytes);
  const __m256 inverse = _mm256_set1_ps(1.0f / 255.0f);
  const __m256 q =
      multiply ? _mm256_mul_ps(x, inverse) : Divide(x, _mm256_set1_ps(255.0f), inverse);
  return normalize ? Divide(_mm256_sub_ps(q, c.mean), c.std, c.inverse) : q;
}

template <FloatType kType>
FOREBAY_INLINE void Store(void* out, size_t at, __m256 x) {
  if constexpr (kType == FloatType::kFloat32) {
    _mm256_storeu_ps(static_cast<float*>(out) + at, x);
  } else if constexpr (kType == FloatType::kFloat16) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(static_cast<uint16_t*>(out) + at),
                     _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT));
  } else {
    __m256i bits = _mm256_castps_si256(x);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    bits = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
    bits = _mm256_srli_epi32(bits, 16);
    bits = _mm256_permute4x64_epi64(_mm256_packus_epi32(bits, bits), 0x08);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(static_cast<uint16_t*>(out) + at),
                     _mm256_castsi256_si128(bits));
  }
}

template <FloatType kType>
FOREBAY_AVX2 size_t Planes(const uint8_t* rgbx, size_t width, bool flip, const Scaling& scaling,
                           void* r, void* g, void* b) {
  Constants c[3];
  for (size_t i = 0; i < 3; ++i) {
    float mean[8];
    float std[8];
    for (size_t k = 0; k < 8; ++k) {
      mean[k] = scaling.mean[i];
      std[k] = scaling.std[i];
    }
    c[i] = ConstantsOf(mean, std);
  }
  const __m256i byte = _mm256_set1_epi32(0xff);
  size_t x = 0;
  for (; x + 8 <= width; x += 8) {
    const __m256i p = Load8(rgbx, width, flip, x);
    const __m256i red = _mm256_and_si256(p, byte);
    const __m256i green = _mm256_and_si256(_mm256_srli_epi32(p, 8), byte);
    const __m256i blue = _mm256_and_si256(_mm256_srli_epi32(p, 16), byte);
    Store<kType>(r, x, Scale(red, c[0], scaling.normalize, scaling.multiply));
    Store<kType>(g, x, Scale(green, c[1], scaling.normalize, scaling.multiply));
    Store<kType>(b, x, Scale(blue, c[2], scaling.normalize, scaling.multiply));
  }
  return x;
}

template <FloatType kType>
FOREBAY_AVX2 size_t Pixels(const uint8_t* rgbx, size_t width, bool flip, const Scaling& scaling,
                           void* out) {
  // Value i of the 24 of eight pixels is channel i % 3 of pixel i / 3.
  Constants c[3];
  __m256i pixel[3];
  __m256i shift[3];
  for (size_t v = 0; v < 3; ++v) {
    float mean[8];
    float std[8];
    int32_t from[8];
    int32_t bits[8];
    for (size_t k = 0; k < 8; ++k) {
      const size_t i = v * 8 + k;
      mean[k] = scaling.mean[i % 3];
      std[k] = scaling.std[i % 3];
      from[k] = static_cast<int32_t>(i / 3);
      bits[k] = static_cast<int32_t>(i % 3 * 8);
    }
    c[v] = ConstantsOf(mean, std);
    pixel[v] = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
    shift[v] = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(bits));
  }
  const __m256i byte = _mm256_set1_epi32(0xff);
  size_t x = 0;
  for (; x + 8 <= width; x += 8) {
    const __m256i p = Load8(rgbx, width, flip, x);
    for (size_t v = 0; v < 3; ++v) {
      const __m256i values = _mm256_and_si256(
          _mm256_srlv_epi32(_mm256_permutevar8x32_epi32(p, pixel[v]), shift[v]), byte);
      Store<kType>(out, x * 3 + v * 8, Scale(values, c[v], scaling.normalize, scaling.multiply));
    }
  }
  return x;
}

// Four pixels that go to output pixels x ... x + 3, shuffled by `order` (made for no flip).
FOREBAY_INLINE __m128i Load4(const uint8_t* rgbx, size_t width, bool flip, size_t x,
                             __m128i order) {
  const uint8_t* p = flip ? rgbx + (width - 4 - x) * 4 : rgbx + x * 4;
  __m128i pixels = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  if (flip) pixels = _mm_shuffle_epi32(pixels, 0x1b);
  return _mm_shuffle_epi8(pixels, order);
}

}  // namespace

bool HaveOutputKernels() {
  static const bool have = [] {
    // clang 14 has no name for F16C.
    unsigned int eax = 0;
    unsigned int ebx = 0;
    unsigned int ecx = 0;
    unsigned int edx = 0;
    const bool f16c = __get_cpuid(1, &eax, &ebx, &ecx, &edx) != 0 && (ecx & bit_F16C) != 0;
    return f16c && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  }();
  return have;
}

size_t FloatsToPlanes(const uint8_t* rgbx, size_t width, bool flip, const Scaling& scaling,
                      FloatType type, void* r, void* g, void* b) {
  switch (type) {
    case FloatType::kFloat16:
      return Planes<FloatType::kFloat16>(rgbx, width, flip, scaling, r, g, b);
    case FloatType::kBfloat16:
      return Planes<FloatType::kBfloat16>(rgbx, width, flip, scaling, r, g, b);
    case FloatType::kFloat32:
      break;
  }
  return Planes<FloatType::kFloat32>(rgbx, width, flip, scaling, r, g, b);
}

size_t FloatsToPixels(const uint8_t* rgbx, size_t width, bool flip, const Scaling& scaling,
                      FloatType type, void* out) {
  switch (type) {
    case FloatType::kFloat16:
      return Pixels<FloatType::kFloat16>(rgbx, width, flip, scaling, out);
    case FloatType::kBfloat16:
      return Pixels<FloatType::kBfloat16>(rgbx, width, flip, scaling, out);
    case FloatType::kFloat32:
      break;
  }
  return Pixels<FloatType::kFloat32>(rgbx, width, flip, scaling, out);
}

FOREBAY_AVX2 size_t BytesToPlanes(const uint8_t* rgbx, size_t width, bool flip, uint8_t* r,
                                  uint8_t* g, uint8_t* b) {
  const __m128i by_channel = _mm_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
  size_t x = 0;
  for (; x + 16 <= width; x += 16) {
    const __m128i p0 = Load4(rgbx, width, flip, x, by_channel);
    const __m128i p1 = Load4(rgbx, width, flip, x + 4, by_channel);
    const __m128i p2 = Load4(rgbx, width, flip, x + 8, by_channel);
    const __m128i p3 = Load4(rgbx, width, flip, x + 12, by_channel);
    const __m128i rg0 = _mm_unpacklo_epi32(p0, p1);
    const __m128i rg1 = _mm_unpacklo_epi32(p2, p3);
    const __m128i bx0 = _mm_unpackhi_epi32(p0, p1);
    const __m128i bx1 = _mm_unpackhi_epi32(p2, p3);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(r + x), _mm_unpacklo_epi64(rg0, rg1));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(g + x), _mm_unpackhi_epi64(rg0, rg1));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(b + x), _mm_unpacklo_epi64(bx0, bx1));
  }
  return x;
}

FOREBAY_AVX2 size_t BytesToPixels(const uint8_t* rgbx, size_t width, bool flip, uint8_t* out) {
  const __m128i packed = _mm_setr_epi8(0, 1, 2, 4, 5, 6, 8, 9, 10, 12, 13, 14, -1, -1, -1, -1);
  size_t x = 0;
  // 12 of the 16 bytes stored count; those after them must belong to this row too.
  for (; x + 6 <= width; x += 4) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out + x * 3), Load4(rgbx, width, flip, x, packed));
  }
  return x;
}

#else

bool HaveOutputKernels() { return false; }
size_t FloatsToPlanes(const uint8_t*, size_t, bool, const Scaling&, FloatType, void*, void*,
                      void*) {
  return 0;
}
size_t FloatsToPixels(const uint8_t*, size_t, bool, const Scaling&, FloatType, void*) { return 0; }
size_t BytesToPlanes(const uint8_t*, size_t, bool, uint8_t*, uint8_t*, uint8_t*) { return 0; }
size_t BytesToPixels(const uint8_t*, size_t, bool, uint8_t*) { return 0; }

#endif

}  // namespace forebay::kernels
