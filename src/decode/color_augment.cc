// RandAugment's operations: histograms, sharpness, affine maps.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "decode/color_ops.h"

namespace forebay {
namespace {

using Table = std::array<uint8_t, 256>;
using Histogram = std::array<uint64_t, 256>;

std::array<Histogram, 3> HistogramsOf(const ScratchImage& image) {
  std::array<Histogram, 3> histograms{};
  for (uint32_t y = 0; y < image.height(); ++y) {
    const uint8_t* p = image.row(y);
    for (uint32_t x = 0; x < image.width(); ++x, p += 4) {
      for (size_t c = 0; c < 3; ++c) ++histograms[c][p[c]];
    }
  }
  return histograms;
}

void Map(ScratchImage& image, const std::array<Table, 3>& tables) {
  for (uint32_t y = 0; y < image.height(); ++y) {
    uint8_t* p = image.row(y);
    for (uint32_t x = 0; x < image.width(); ++x, p += 4) {
      for (size_t c = 0; c < 3; ++c) p[c] = tables[c][p[c]];
    }
  }
}

Table Identity() {
  Table table;
  for (size_t v = 0; v < 256; ++v) table[v] = static_cast<uint8_t>(v);
  return table;
}

Table StretchTable(const Histogram& histogram) {
  int low = 0;
  int high = 255;
  while (low < 255 && histogram[static_cast<size_t>(low)] == 0) ++low;
  while (high > 0 && histogram[static_cast<size_t>(high)] == 0) --high;
  if (high <= low) return Identity();
  const double scale = 255.0 / (high - low);
  const double offset = -low * scale;
  Table table;
  for (int v = 0; v < 256; ++v) {
    table[static_cast<size_t>(v)] =
        static_cast<uint8_t>(std::clamp(static_cast<int>(v * scale + offset), 0, 255));
  }
  return table;
}

Table EqualizeTable(const Histogram& histogram) {
  uint64_t sum = 0;
  uint64_t last = 0;
  int used = 0;
  for (const uint64_t count : histogram) {
    if (count == 0) continue;
    sum += count;
    last = count;
    ++used;
  }
  const uint64_t step = (sum - last) / 255;
  if (used <= 1 || step == 0) return Identity();
  Table table;
  uint64_t n = step / 2;
  for (size_t v = 0; v < 256; ++v) {
    table[v] = static_cast<uint8_t>(std::min<uint64_t>(n / step, 255));
    n += histogram[v];
  }
  return table;
}

template <Table (*kMake)(const Histogram&)>
void MapByHistogram(ScratchImage& image) {
  const std::array<Histogram, 3> histograms = HistogramsOf(image);
  Map(image, {kMake(histograms[0]), kMake(histograms[1]), kMake(histograms[2])});
}

int Floor(double v) { return static_cast<int>(std::floor(v)); }

// Where a coordinate falls, -1 when before the image.
int Coordinate(double v) { return v < 0.0 ? -1 : static_cast<int>(v); }

class AffineMap {
 public:
  AffineMap(const ScratchImage& in, ScratchImage& out, const std::array<double, 6>& m)
      : in_(in),
        out_(out),
        m_(m),
        width_(static_cast<int>(in.width())),
        height_(static_cast<int>(in.height())) {}

  void Nearest();
  void Bilinear();
  void Bicubic();

 private:
  void Put(uint8_t* to, int x, int y) const {
    if (x < 0 || x >= width_ || y < 0 || y >= height_) return;
    std::memcpy(to, in_.row(static_cast<uint32_t>(y)) + x * 4, 4);
  }
  // Calls put(to, x, y) for each output pixel, with its place in the input.
  template <typename F>
  void ForEach(F put) {
    for (uint32_t y = 0; y < out_.height(); ++y) {
      uint8_t* to = out_.row(y);
      for (uint32_t x = 0; x < out_.width(); ++x, to += 4) {
        const double xin = x + 0.5;
        const double yin = y + 0.5;
        const double from_x = m_[0] * xin + m_[1] * yin + m_[2];
        const double from_y = m_[3] * xin + m_[4] * yin + m_[5];
        if (from_x < 0.0 || from_x >= width_ || from_y < 0.0 || from_y >= height_) continue;
        put(to, from_x - 0.5, from_y - 0.5);
      }
    }
  }
  bool FitsFixed(double x, double y) const {
    return std::abs(x * m_[0] + y * m_[1] + m_[2]) < 32768.0 &&
           std::abs(x * m_[3] + y * m_[4] + m_[5]) < 32768.0;
  }
  const uint8_t* ClippedRow(int y) const {
    return in_.row(static_cast<uint32_t>(std::clamp(y, 0, height_ - 1)));
  }
  int ClippedX(int x) const { return std::clamp(x, 0, width_ - 1) * 4; }

  const ScratchImage& in_;
  ScratchImage& out_;
  const std::array<double, 6>& m_;
  const int width_;
  const int height_;
};

// Pillow has three ways, which round differently: a scale, 16.16 fixed point, and double where
// that overflows. Positions are summed up pixel by pixel in all of them.
void AffineMap::Nearest() {
  const double w = out_.width();
  const double h = out_.height();
  const bool scale = m_[1] == 0 && m_[3] == 0;
  if (!scale && FitsFixed(0, 0) && FitsFixed(w, h) && FitsFixed(0, h) && FitsFixed(w, 0)) {
    const auto fixed = [](double v) { return Floor(v * 65536.0 + 0.5); };
    const int step_x = fixed(m_[0]);
    const int step_y = fixed(m_[3]);
    const int row_x = fixed(m_[1]);
    const int row_y = fixed(m_[4]);
    int start_x = fixed(m_[2] + m_[0] * 0.5 + m_[1] * 0.5);
    int start_y = fixed(m_[5] + m_[3] * 0.5 + m_[4] * 0.5);
    for (uint32_t y = 0; y < out_.height(); ++y) {
      uint8_t* to = out_.row(y);
      // 64 bits: the step after the last pixel may leave 32.
      int64_t from_x = start_x;
      int64_t from_y = start_y;
      for (uint32_t x = 0; x < out_.width(); ++x, to += 4) {
        Put(to, static_cast<int>(from_x >> 16), static_cast<int>(from_y >> 16));
        from_x += step_x;
        from_y += step_y;
      }
      start_x = static_cast<int>(static_cast<uint32_t>(start_x) + static_cast<uint32_t>(row_x));
      start_y = static_cast<int>(static_cast<uint32_t>(start_y) + static_cast<uint32_t>(row_y));
    }
    return;
  }
  double start_x = scale ? m_[2] + m_[0] * 0.5 : m_[2] + m_[1] * 0.5 + m_[0] * 0.5;
  double start_y = scale ? m_[5] + m_[4] * 0.5 : m_[5] + m_[4] * 0.5 + m_[3] * 0.5;
  for (uint32_t y = 0; y < out_.height(); ++y) {
    uint8_t* to = out_.row(y);
    double from_x = start_x;
    double from_y = start_y;
    for (uint32_t x = 0; x < out_.width(); ++x, to += 4) {
      Put(to, Coordinate(from_x), Coordinate(from_y));
      from_x += m_[0];
      from_y += m_[3];
    }
    start_x += m_[1];
    start_y += m_[4];
  }
}

void AffineMap::Bilinear() {
  ForEach([this](uint8_t* to, double xin, double yin) {
    const int x = Floor(xin);
    const int y = Floor(yin);
    const double dx = xin - x;
    const double dy = yin - y;
    const int x0 = ClippedX(x);
    const int x1 = ClippedX(x + 1);
    const uint8_t* row = ClippedRow(y);
    const uint8_t* next = y + 1 >= 0 && y + 1 < height_ ? ClippedRow(y + 1) : nullptr;
    for (int c = 0; c < 3; ++c) {
      const double v1 = row[x0 + c] + (row[x1 + c] - row[x0 + c]) * dx;
      const double v2 = next != nullptr ? next[x0 + c] + (next[x1 + c] - next[x0 + c]) * dx : v1;
      to[c] = static_cast<uint8_t>(v1 + (v2 - v1) * dy);
    }
  });
}

double Cubic(double v1, double v2, double v3, double v4, double d) {
  const double p2 = -v1 + v3;
  const double p3 = 2 * (v1 - v2) + v3 - v4;
  const double p4 = -v1 + v2 - v3 + v4;
  return v2 + d * (p2 + d * (p3 + d * p4));
}

void AffineMap::Bicubic() {
  ForEach([this](uint8_t* to, double xin, double yin) {
    const int x = Floor(xin);
    const int y = Floor(yin);
    const double dx = xin - x;
    const double dy = yin - y;
    const int at[4] = {ClippedX(x - 1), ClippedX(x), ClippedX(x + 1), ClippedX(x + 2)};
    for (int c = 0; c < 3; ++c) {
      double v[4] = {};
      for (int i = 0; i < 4; ++i) {
        const int from = y - 1 + i;
        if (i > 0 && (from < 0 || from >= height_)) {
          v[i] = v[i - 1];  // a row that is not there repeats the one before it
          continue;
        }
        const uint8_t* row = ClippedRow(from) + c;
        v[i] = Cubic(row[at[0]], row[at[1]], row[at[2]], row[at[3]], dx);
      }
      to[c] = static_cast<uint8_t>(std::clamp(Cubic(v[0], v[1], v[2], v[3], dy), 0.0, 255.0));
    }
  });
}

}  // namespace

void AutoContrast(ScratchImage& image) { MapByHistogram<StretchTable>(image); }

void Equalize(ScratchImage& image) { MapByHistogram<EqualizeTable>(image); }

void AdjustSharpness(const ScratchImage& in, ScratchImage& out, double factor) {
  const uint32_t width = in.width();
  const uint32_t height = in.height();
  out.Reset(width, height);
  const auto f = static_cast<float>(factor);
  constexpr float kSide = 1.0f / 13.0f;
  constexpr float kMiddle = 5.0f / 13.0f;
  for (uint32_t y = 0; y < height; ++y) {
    std::memcpy(out.row(y), in.row(y), static_cast<size_t>(width) * 4);
    // At the border the smoothed image is the image itself, and so is every blend of the two.
    if (y == 0 || y + 1 == height) continue;
    const uint8_t* above = in.row(y - 1);
    const uint8_t* here = in.row(y);
    const uint8_t* below = in.row(y + 1);
    uint8_t* to = out.row(y);
    const auto side = [](const uint8_t* p, size_t i, float middle) {
      return static_cast<float>(p[i - 4]) * kSide + static_cast<float>(p[i]) * middle +
             static_cast<float>(p[i + 4]) * kSide;
    };
    for (size_t i = 4; i + 4 < static_cast<size_t>(width) * 4; ++i) {
      // In Pillow's order, and in float: the last bit of the sum decides the rounding.
      float sum = 0.5f;
      sum += side(below, i, kSide);
      sum += side(here, i, kMiddle);
      sum += side(above, i, kSide);
      const auto smooth = static_cast<float>(static_cast<int>(std::clamp(sum, 0.0f, 255.0f)));
      const float x = smooth + f * (static_cast<float>(here[i]) - smooth);
      to[i] = static_cast<uint8_t>(std::clamp(x, 0.0f, 255.0f));
    }
  }
}

void Affine(const ScratchImage& in, ScratchImage& out, const std::array<double, 6>& matrix,
            Interpolation interpolation, const std::array<uint8_t, 3>& fill) {
  out.Reset(in.width(), in.height());
  const uint8_t pixel[4] = {fill[0], fill[1], fill[2], 0};
  for (uint32_t y = 0; y < out.height(); ++y) {
    uint8_t* row = out.row(y);
    for (uint32_t x = 0; x < out.width(); ++x) std::memcpy(row + x * 4, pixel, 4);
  }
  AffineMap map(in, out, matrix);
  if (interpolation == Interpolation::kBilinear) return map.Bilinear();
  if (interpolation == Interpolation::kBicubic) return map.Bicubic();
  map.Nearest();
}

}  // namespace forebay
