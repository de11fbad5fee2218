#include "decode/output.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>

namespace forebay {
namespace {

bool Multiplies(const TransformSpec& spec) {
  return std::any_of(spec.ops.begin(), spec.ops.end(), [](const ops::Op& op) {
    const auto* tensor = std::get_if<ops::ToTensor>(&op);
    return tensor != nullptr && tensor->multiply;
  });
}

std::array<std::array<float, 256>, 3> FloatTable(const TransformSpec& spec) {
  std::array<std::array<float, 256>, 3> table;
  const bool multiply = Multiplies(spec);
  for (size_t c = 0; c < 3; ++c) {
    for (size_t v = 0; v < 256; ++v) {
      const auto level = static_cast<float>(v);
      float x = multiply ? level * (1.0f / 255.0f) : level / 255.0f;
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
      bytes_[c][v] = static_cast<uint8_t>(v);
    }
  }
  if (!kernels::HaveOutputKernels()) return;
  scaling_.multiply = Multiplies(spec);
  int normalized = 0;
  for (const ops::Op& op : spec.ops) {
    const auto* normalize = std::get_if<ops::Normalize>(&op);
    if (normalize == nullptr) continue;
    ++normalized;
    scaling_.normalize = true;
    std::copy(normalize->mean.begin(), normalize->mean.end(), scaling_.mean);
    std::copy(normalize->std.begin(), normalize->std.end(), scaling_.std);
  }
  switch (output.dtype) {
    case DType::kUint8:
      fast_ = true;
      break;
    case DType::kFloat32:
      type_ = kernels::FloatType::kFloat32;
      fast_ = normalized <= 1 && Agrees(floats_);
      break;
    case DType::kFloat16:
      type_ = kernels::FloatType::kFloat16;
      fast_ = normalized <= 1 && Agrees(halves_);
      break;
    case DType::kBfloat16:
      type_ = kernels::FloatType::kBfloat16;
      fast_ = normalized <= 1 && Agrees(halves_);
      break;
  }
}

template <typename T>
bool OutputWriter::Agrees(const Tables<T>& tables) const {
  std::array<uint8_t, 256 * 4> row;
  for (size_t i = 0; i < row.size(); ++i) row[i] = static_cast<uint8_t>(i / 4);
  Tables<T> got;
  kernels::FloatsToPlanes(row.data(), 256, false, scaling_, type_, got[0].data(), got[1].data(),
                          got[2].data());
  return std::memcmp(got.data(), tables.data(), sizeof(got)) == 0;
}

size_t OutputWriter::SampleBytes() const {
  return static_cast<size_t>(shape_.height) * shape_.width * 3 * DTypeBytes(output_.dtype);
}

template <typename T>
void OutputWriter::Write(std::byte* sample, uint32_t y, const uint8_t* rgbx, bool flip_x,
                         const Tables<T>& tables) const {
  const size_t width = shape_.width;
  const size_t plane = static_cast<size_t>(shape_.height) * width;
  const bool hwc = output_.layout == Layout::kHwc;
  T* out = reinterpret_cast<T*>(sample) + y * width * (hwc ? 3 : 1);
  size_t x = 0;
  if (fast_) {
    if constexpr (sizeof(T) == 1) {
      x = hwc ? kernels::BytesToPixels(rgbx, width, flip_x, out)
              : kernels::BytesToPlanes(rgbx, width, flip_x, out, out + plane, out + 2 * plane);
    } else {
      x = hwc ? kernels::FloatsToPixels(rgbx, width, flip_x, scaling_, type_, out)
              : kernels::FloatsToPlanes(rgbx, width, flip_x, scaling_, type_, out, out + plane,
                                        out + 2 * plane);
    }
  }
  for (; x < width; ++x) {
    const uint8_t* p = rgbx + (flip_x ? width - 1 - x : x) * 4;
    for (size_t c = 0; c < 3; ++c) out[hwc ? x * 3 + c : c * plane + x] = tables[c][p[c]];
  }
}

void OutputWriter::Row(std::byte* sample, uint32_t y, const uint8_t* rgbx, bool flip_x) const {
  switch (output_.dtype) {
    case DType::kUint8:
      Write(sample, y, rgbx, flip_x, bytes_);
      break;
    case DType::kFloat32:
      Write(sample, y, rgbx, flip_x, floats_);
      break;
    case DType::kFloat16:
    case DType::kBfloat16:
      Write(sample, y, rgbx, flip_x, halves_);
      break;
  }
}

}  // namespace forebay
