#include "decode/output.h"

#include <bit>
#include <cmath>

namespace forebay {
namespace {

std::array<std::array<float, 256>, 3> FloatTable(const TransformSpec& spec) {
  std::array<std::array<float, 256>, 3> table;
  for (size_t c = 0; c < 3; ++c) {
    for (size_t v = 0; v < 256; ++v) {
      float x = static_cast<float>(v) / 255.0f;
      for (const ops::Op& op : spec.ops) {
        const auto* normalize = std::get_if<ops::Normalize>(&op);
        if (normalize != nullptr) x = (x - normalize->mean[c]) / normalize->std[c];
      }
      table[c][v] = x;
    }
  }
  return table;
}

}  // namespace

uint16_t ToBfloat16(float value) {
  const auto bits = std::bit_cast<uint32_t>(value);
  if (std::isnan(value)) return static_cast<uint16_t>((bits >> 16) | 0x40);
  return static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

uint16_t ToFloat16(float value) {
  const auto bits = std::bit_cast<uint32_t>(value);
  const auto sign = static_cast<uint16_t>((bits >> 16) & 0x8000);
  if (std::isnan(value)) return static_cast<uint16_t>(sign | 0x7e00);
  const float magnitude = std::abs(value);
  if (magnitude >= 65520.0f) return static_cast<uint16_t>(sign | 0x7c00);
  if (magnitude < 0x1p-14f) {
    // Subnormal: the value in units of 2^-24, rounded to even by the addition.
    const float units = magnitude * 0x1p24f + 0x1p23f;
    return static_cast<uint16_t>(sign | (std::bit_cast<uint32_t>(units) & 0x7ff));
  }
  const uint32_t rest = (bits & 0x7fffffff) - (112u << 23);
  return static_cast<uint16_t>(sign | ((rest + 0xfff + ((rest >> 13) & 1)) >> 13));
}

OutputWriter::OutputWriter(const TransformSpec& spec, const OutputSpec& output, OutputShape shape)
    : output_(output), shape_(shape), floats_(FloatTable(spec)) {
  for (size_t c = 0; c < 3; ++c) {
    for (size_t v = 0; v < 256; ++v) {
      const float x = floats_[c][v];
      halves_[c][v] = output.dtype == DType::kFloat16 ? ToFloat16(x) : ToBfloat16(x);
    }
  }
}

size_t OutputWriter::SampleBytes() const {
  return static_cast<size_t>(shape_.height) * shape_.width * 3 * DTypeBytes(output_.dtype);
}

template <typename T>
void OutputWriter::WriteTable(std::byte* sample, uint32_t y, const uint8_t* rgbx, bool flip_x,
                              const std::array<std::array<T, 256>, 3>& table) const {
  const size_t width = shape_.width;
  const ptrdiff_t step = flip_x ? -4 : 4;
  const uint8_t* p = flip_x ? rgbx + (width - 1) * 4 : rgbx;
  T* out = reinterpret_cast<T*>(sample);
  if (output_.layout == Layout::kHwc) {
    out += y * width * 3;
    for (size_t x = 0; x < width; ++x, p += step, out += 3) {
      for (size_t c = 0; c < 3; ++c) out[c] = table[c][p[c]];
    }
    return;
  }
  const size_t plane = static_cast<size_t>(shape_.height) * width;
  T* r = out + y * width;
  T* g = r + plane;
  T* b = g + plane;
  for (size_t x = 0; x < width; ++x, p += step) {
    r[x] = table[0][p[0]];
    g[x] = table[1][p[1]];
    b[x] = table[2][p[2]];
  }
}

void OutputWriter::WriteBytes(std::byte* sample, uint32_t y, const uint8_t* rgbx,
                              bool flip_x) const {
  const size_t width = shape_.width;
  const ptrdiff_t step = flip_x ? -4 : 4;
  const uint8_t* p = flip_x ? rgbx + (width - 1) * 4 : rgbx;
  auto* out = reinterpret_cast<uint8_t*>(sample);
  const bool hwc = output_.layout == Layout::kHwc;
  out += hwc ? y * width * 3 : y * width;
  const size_t plane = hwc ? 1 : static_cast<size_t>(shape_.height) * width;
  const size_t stride = hwc ? 3 : 1;
  for (size_t x = 0; x < width; ++x, p += step, out += stride) {
    out[0] = p[0];
    out[plane] = p[1];
    out[2 * plane] = p[2];
  }
}

void OutputWriter::Row(std::byte* sample, uint32_t y, const uint8_t* rgbx, bool flip_x) const {
  switch (output_.dtype) {
    case DType::kUint8:
      WriteBytes(sample, y, rgbx, flip_x);
      break;
    case DType::kFloat32:
      WriteTable(sample, y, rgbx, flip_x, floats_);
      break;
    case DType::kFloat16:
    case DType::kBfloat16:
      WriteTable(sample, y, rgbx, flip_x, halves_);
      break;
  }
}

}  // namespace forebay
