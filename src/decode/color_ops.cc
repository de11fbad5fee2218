#include "decode/color_ops.h"

#include <algorithm>
#include <cstring>

#include "decode/color_kernels.h"

namespace forebay {
namespace {

using Table = std::array<uint8_t, 256>;

template <typename F>
void ForEachRow(ScratchImage& image, F f) {
  for (uint32_t y = 0; y < image.height(); ++y) f(image.row(y));
}

void Map(ScratchImage& image, const Table& table) {
  for (uint32_t y = 0; y < image.height(); ++y) {
    uint8_t* p = image.row(y);
    const size_t bytes = static_cast<size_t>(image.width()) * 4;
    for (size_t i = 0; i < bytes; ++i) p[i] = table[p[i]];
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
  ForEachRow(image, [&](uint8_t* row) {
    kernels::BlendValue(BestSimd())(row, image.width(), 0.0f, static_cast<float>(factor));
  });
}

void AdjustContrast(ScratchImage& image, double factor) {
  uint64_t sum = 0;
  ForEachRow(image,
             [&](const uint8_t* row) { sum += kernels::GraySum(BestSimd())(row, image.width()); });
  const double pixels = static_cast<double>(image.width()) * image.height();
  const int mean = static_cast<int>(static_cast<double>(sum) / pixels + 0.5);
  ForEachRow(image, [&](uint8_t* row) {
    kernels::BlendValue(BestSimd())(row, image.width(), static_cast<float>(mean),
                                    static_cast<float>(factor));
  });
}

void AdjustSaturation(ScratchImage& image, double factor) {
  ForEachRow(image, [&](uint8_t* row) {
    kernels::BlendGray(BestSimd())(row, image.width(), static_cast<float>(factor));
  });
}

void AdjustHue(ScratchImage& image, double factor) {
  const auto shift = static_cast<uint8_t>(static_cast<int>(factor * 255));
  ForEachRow(image,
             [&](uint8_t* row) { kernels::ShiftHue(BestSimd())(row, image.width(), shift); });
}

void ToGray(ScratchImage& image) {
  ForEachRow(image, [&](uint8_t* row) { kernels::Gray(BestSimd())(row, image.width()); });
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
