#include "decode/color_kernels.h"

#include <cstring>

// A fused multiply-add, which AVX-512 has, rounds once where PIL rounds twice.
#if defined(__clang__)
#pragma clang fp contract(off)
#elif defined(__GNUC__)
#pragma GCC optimize("fp-contract=off")
#endif

// `name` calls `name##Loop`, compiled for the level.
#if defined(__x86_64__)
#define FOREBAY_WIDE __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl")))
#define FOREBAY_AVX2 __attribute__((target("avx2")))
#define FOREBAY_DISPATCH(result, name, parameters, arguments)                \
  namespace {                                                                \
  FOREBAY_WIDE result name##Wide parameters { return name##Loop arguments; } \
  FOREBAY_AVX2 result name##Avx2 parameters { return name##Loop arguments; } \
  result name##Base parameters { return name##Loop arguments; }              \
  }                                                                          \
  decltype(&name##Base) name(SimdLevel level) {                              \
    if (level == SimdLevel::kVnni) return name##Wide;                        \
    return level == SimdLevel::kAvx2 ? name##Avx2 : name##Base;              \
  }
#else
#define FOREBAY_DISPATCH(result, name, parameters, arguments)   \
  namespace {                                                   \
  result name##Base parameters { return name##Loop arguments; } \
  }                                                             \
  decltype(&name##Base) name(SimdLevel) { return name##Base; }
#endif

#define FOREBAY_INLINE __attribute__((always_inline)) inline

namespace forebay::kernels {
namespace {

FOREBAY_INLINE uint32_t Pixel(const uint8_t* rgbx, size_t x) {
  uint32_t pixel;
  std::memcpy(&pixel, rgbx + x * 4, 4);
  return pixel;
}

FOREBAY_INLINE void SetPixel(uint8_t* rgbx, size_t x, int r, int g, int b) {
  const uint32_t pixel =
      static_cast<uint32_t>(r) | static_cast<uint32_t>(g) << 8 | static_cast<uint32_t>(b) << 16;
  std::memcpy(rgbx + x * 4, &pixel, 4);
}

// Truncated; between 0 and 1 nothing needs clipping, so that one formula serves all factors.
FOREBAY_INLINE int Blend(float degenerate, float value, float factor) {
  float x = degenerate + factor * (value - degenerate);
  x = x < 0.0f ? 0.0f : x;
  x = x > 255.0f ? 255.0f : x;
  return static_cast<int>(x);
}

// PIL's RGB to L, ITU-R 601-2 in 16 bits.
FOREBAY_INLINE int Luma(int r, int g, int b) {
  return (r * 19595 + g * 38470 + b * 7471 + 0x8000) >> 16;
}

// To the nearest, halves up; x is not negative.
FOREBAY_INLINE int RoundHalfUp(double x) {
  const int whole = static_cast<int>(x);
  return whole + static_cast<int>(2.0 * (x - whole));
}

FOREBAY_INLINE int Max(int a, int b) { return a > b ? a : b; }
FOREBAY_INLINE int Min(int a, int b) { return a < b ? a : b; }

// a where `condition`, else b; a branch would keep the loop from being vectorised.
FOREBAY_INLINE int Select(bool condition, int a, int b) { return b ^ ((a ^ b) & -int{condition}); }

FOREBAY_INLINE void BlendValueLoop(uint8_t* rgbx, size_t width, float degenerate, float factor) {
  for (size_t i = 0; i < width * 4; ++i) {
    rgbx[i] = static_cast<uint8_t>(Blend(degenerate, static_cast<float>(rgbx[i]), factor));
  }
}

FOREBAY_INLINE void BlendGrayLoop(uint8_t* rgbx, size_t width, float factor) {
  for (size_t x = 0; x < width; ++x) {
    const uint32_t p = Pixel(rgbx, x);
    const int r = p & 0xff;
    const int g = (p >> 8) & 0xff;
    const int b = (p >> 16) & 0xff;
    const auto gray = static_cast<float>(Luma(r, g, b));
    SetPixel(rgbx, x, Blend(gray, static_cast<float>(r), factor),
             Blend(gray, static_cast<float>(g), factor),
             Blend(gray, static_cast<float>(b), factor));
  }
}

FOREBAY_INLINE void GrayLoop(uint8_t* rgbx, size_t width) {
  for (size_t x = 0; x < width; ++x) {
    const uint32_t p = Pixel(rgbx, x);
    const int gray = Luma(p & 0xff, (p >> 8) & 0xff, (p >> 16) & 0xff);
    SetPixel(rgbx, x, gray, gray, gray);
  }
}

FOREBAY_INLINE uint64_t GraySumLoop(const uint8_t* rgbx, size_t width) {
  uint32_t sum = 0;  // of at most 2^24 pixels
  for (size_t x = 0; x < width; ++x) {
    const uint32_t p = Pixel(rgbx, x);
    sum += static_cast<uint32_t>(Luma(p & 0xff, (p >> 8) & 0xff, (p >> 16) & 0xff));
  }
  return sum;
}

// The mix of float and double is PIL's. Where it adds in float, a double holds the sum exactly, so
// that one formula serves the three sextants' pairs. A gray pixel comes out as it was.
FOREBAY_INLINE void ShiftHueLoop(uint8_t* rgbx, size_t width, uint8_t shift) {
  for (size_t x = 0; x < width; ++x) {
    const uint32_t p = Pixel(rgbx, x);
    const int r = p & 0xff;
    const int g = (p >> 8) & 0xff;
    const int b = (p >> 16) & 0xff;
    const int high = Max(Max(r, g), b);
    const int range = high - Min(Min(r, g), b);
    const auto divisor = static_cast<float>(range + (range == 0));
    const float s = static_cast<float>(range) / static_cast<float>(high + (high == 0));
    // h is (offset + a) - c, of the two channels that are not the highest.
    const bool red = r == high;
    const bool green = g == high;
    const int a = high - Select(red, b, Select(green, r, g));
    const int c = high - Select(red, g, Select(green, b, r));
    const double offset = Select(red, 0, Select(green, 2, 4));
    const double ac = static_cast<float>(a) / divisor;
    const double cc = static_cast<float>(c) / divisor;
    const auto raw = static_cast<float>(offset + ac - cc);
    const double turn = raw / 6.0 + 1.0;
    const auto h = static_cast<float>(turn - static_cast<int>(turn));
    const int hue = (static_cast<int>(h * 255.0) + shift) & 0xff;
    const int saturation = static_cast<int>(s * 255.0);

    const double sixth = hue * 6.0 / 255.0;
    const int sector = static_cast<int>(sixth);
    const auto f = static_cast<float>(sixth - sector);
    const auto fs = static_cast<float>(saturation / 255.0);
    const double v = high;
    const int lowest = RoundHalfUp(v * (1.0 - fs));
    const int falling = RoundHalfUp(v * (1.0 - fs * f));
    const int rising = RoundHalfUp(v * (1.0 - fs * (1.0 - f)));
    const bool first = (sector == 0) | (sector == 6);
    const int out_r = Select(first | (sector == 5), high,
                             Select(sector == 1, falling, Select(sector == 4, rising, lowest)));
    const int out_g = Select((sector == 1) | (sector == 2), high,
                             Select(first, rising, Select(sector == 3, falling, lowest)));
    const int out_b = Select((sector == 3) | (sector == 4), high,
                             Select(sector == 2, rising, Select(sector == 5, falling, lowest)));
    SetPixel(rgbx, x, out_r, out_g, out_b);
  }
}

}  // namespace

FOREBAY_DISPATCH(void, BlendValue, (uint8_t * rgbx, size_t width, float degenerate, float factor),
                 (rgbx, width, degenerate, factor))
FOREBAY_DISPATCH(void, BlendGray, (uint8_t * rgbx, size_t width, float factor),
                 (rgbx, width, factor))
FOREBAY_DISPATCH(void, Gray, (uint8_t * rgbx, size_t width), (rgbx, width))
FOREBAY_DISPATCH(uint64_t, GraySum, (const uint8_t* rgbx, size_t width), (rgbx, width))
FOREBAY_DISPATCH(void, ShiftHue, (uint8_t * rgbx, size_t width, uint8_t shift),
                 (rgbx, width, shift))

}  // namespace forebay::kernels
