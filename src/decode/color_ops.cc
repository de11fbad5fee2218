#include "decode/color_ops.h"

#include <algorithm>
#include <cmath>
#include <cstring>

namespace forebay {
namespace {

using Table = std::array<uint8_t, 256>;

// Image.blend, whose arithmetic is in float. Truncated; between 0 and 1 nothing needs clipping.
uint8_t Blend(int degenerate, int value, float factor) {
  const float x = static_cast<float>(degenerate) + factor * static_cast<float>(value - degenerate);
  return static_cast<uint8_t>(std::clamp(x, 0.0f, 255.0f));
}

// PIL's RGB to L, ITU-R 601-2 in 16 bits.
int Luma(const uint8_t* p) { return (p[0] * 19595 + p[1] * 38470 + p[2] * 7471 + 0x8000) >> 16; }

Table BlendTable(int degenerate, float factor) {
  Table table;
  for (int v = 0; v < 256; ++v) table[static_cast<size_t>(v)] = Blend(degenerate, v, factor);
  return table;
}

void Map(ScratchImage& image, const Table& table) {
  for (uint32_t y = 0; y < image.height(); ++y) {
    uint8_t* p = image.row(y);
    const size_t bytes = static_cast<size_t>(image.width()) * 4;
    for (size_t i = 0; i < bytes; ++i) p[i] = table[p[i]];
  }
}

// To the nearest, halves up; x is not negative.
int RoundHalfUp(double x) {
  const int whole = static_cast<int>(x);
  return whole + (x - whole >= 0.5);
}

// PIL's RGB to HSV and back, with the hue moved in between; the mix of float and double is PIL's.
void ShiftHue(uint8_t* p, uint8_t shift) {
  const int r = p[0];
  const int g = p[1];
  const int b = p[2];
  const int high = std::max({r, g, b});
  const int low = std::min({r, g, b});
  if (low == high) return;  // no saturation, no hue
  const auto range = static_cast<float>(high - low);
  const float s = range / static_cast<float>(high);
  const float rc = static_cast<float>(high - r) / range;
  const float gc = static_cast<float>(high - g) / range;
  const float bc = static_cast<float>(high - b) / range;
  float h;
  if (r == high) {
    h = bc - gc;
  } else if (g == high) {
    h = static_cast<float>(2.0 + rc - bc);
  } else {
    h = static_cast<float>(4.0 + gc - rc);
  }
  const double turn = h / 6.0 + 1.0;
  h = static_cast<float>(turn >= 1.0 ? turn - 1.0 : turn);
  const auto hue = static_cast<uint8_t>(std::clamp(static_cast<int>(h * 255.0), 0, 255) + shift);
  const int saturation = std::clamp(static_cast<int>(s * 255.0), 0, 255);

  const double sixth = static_cast<float>(hue) * 6.0 / 255.0;
  const int sector = static_cast<int>(sixth);
  const auto f = static_cast<float>(sixth - static_cast<float>(sector));
  const auto fs = static_cast<float>(static_cast<float>(saturation) / 255.0);
  const auto v = static_cast<float>(high);
  const auto up = static_cast<uint8_t>(RoundHalfUp(v * (1.0 - fs)));
  const auto uq = static_cast<uint8_t>(RoundHalfUp(v * (1.0 - fs * f)));
  const auto ut = static_cast<uint8_t>(RoundHalfUp(v * (1.0 - fs * (1.0 - f))));
  const auto uv = static_cast<uint8_t>(high);
  const auto set = [p](uint8_t red, uint8_t green, uint8_t blue) {
    p[0] = red;
    p[1] = green;
    p[2] = blue;
  };
  if (saturation == 0) return set(uv, uv, uv);
  switch (sector % 6) {
    case 0:
      return set(uv, ut, up);
    case 1:
      return set(uq, uv, up);
    case 2:
      return set(up, uv, ut);
    case 3:
      return set(up, uq, uv);
    case 4:
      return set(ut, up, uv);
    default:
      return set(uv, up, uq);
  }
}

}  // namespace

void ScratchImage::Reset(uint32_t width, uint32_t height) {
  width_ = width;
  height_ = height;
  stride_ = (static_cast<size_t>(width) * 4 + 63) / 64 * 64;
  const size_t bytes = stride_ * height + 64;
  if (bytes_.size() < bytes) bytes_.resize(bytes);
}

void AdjustBrightness(ScratchImage& image, double factor) {
  Map(image, BlendTable(0, static_cast<float>(factor)));
}

void AdjustContrast(ScratchImage& image, double factor) {
  uint64_t sum = 0;
  for (uint32_t y = 0; y < image.height(); ++y) {
    const uint8_t* p = image.row(y);
    uint32_t row_sum = 0;
    for (uint32_t x = 0; x < image.width(); ++x) row_sum += static_cast<uint32_t>(Luma(p + x * 4));
    sum += row_sum;
  }
  const double pixels = static_cast<double>(image.width()) * image.height();
  const int mean = static_cast<int>(static_cast<double>(sum) / pixels + 0.5);
  Map(image, BlendTable(mean, static_cast<float>(factor)));
}

void AdjustSaturation(ScratchImage& image, double factor) {
  const auto f = static_cast<float>(factor);
  for (uint32_t y = 0; y < image.height(); ++y) {
    uint8_t* p = image.row(y);
    for (uint32_t x = 0; x < image.width(); ++x, p += 4) {
      const int luma = Luma(p);
      for (size_t c = 0; c < 3; ++c) p[c] = Blend(luma, p[c], f);
    }
  }
}

void AdjustHue(ScratchImage& image, double factor) {
  const auto shift = static_cast<uint8_t>(static_cast<int>(factor * 255));
  for (uint32_t y = 0; y < image.height(); ++y) {
    uint8_t* p = image.row(y);
    for (uint32_t x = 0; x < image.width(); ++x, p += 4) ShiftHue(p, shift);
  }
}

void ToGray(ScratchImage& image) {
  for (uint32_t y = 0; y < image.height(); ++y) {
    uint8_t* p = image.row(y);
    for (uint32_t x = 0; x < image.width(); ++x, p += 4) {
      p[0] = p[1] = p[2] = static_cast<uint8_t>(Luma(p));
    }
  }
}

void Posterize(ScratchImage& image, int bits) {
  Table table;
  const int mask = bits >= 8 ? 0xff : ~((1 << (8 - bits)) - 1) & 0xff;
  for (int v = 0; v < 256; ++v) table[static_cast<size_t>(v)] = static_cast<uint8_t>(v & mask);
  Map(image, table);
}

void Solarize(ScratchImage& image, double threshold) {
  Table table;
  for (int v = 0; v < 256; ++v) {
    table[static_cast<size_t>(v)] = static_cast<uint8_t>(v < threshold ? v : 255 - v);
  }
  Map(image, table);
}

void CropFill(const ScratchImage& in, ScratchImage& out, int32_t x, int32_t y, uint32_t width,
              uint32_t height, const std::array<uint8_t, 3>& fill) {
  out.Reset(width, height);
  const uint8_t pixel[4] = {fill[0], fill[1], fill[2], 0};
  const int64_t in_width = in.width();
  const int64_t begin = std::clamp<int64_t>(-int64_t{x}, 0, width);
  const int64_t end = std::clamp<int64_t>(in_width - x, begin, width);
  for (uint32_t row = 0; row < height; ++row) {
    uint8_t* to = out.row(row);
    const int64_t from_y = int64_t{y} + row;
    const bool inside = from_y >= 0 && from_y < in.height() && begin < end;
    const int64_t b = inside ? begin : width;
    const int64_t e = inside ? end : width;
    for (int64_t i = 0; i < b; ++i) std::memcpy(to + i * 4, pixel, 4);
    if (inside) {
      std::memcpy(to + b * 4, in.row(static_cast<uint32_t>(from_y)) + (x + b) * 4,
                  static_cast<size_t>(e - b) * 4);
    }
    for (int64_t i = e; i < width; ++i) std::memcpy(to + i * 4, pixel, 4);
  }
}

}  // namespace forebay
