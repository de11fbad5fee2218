#include "decode/resize.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numbers>

#include "decode/resize_kernels.h"

namespace forebay {
namespace {

constexpr size_t kSpare = 64;  // bytes after a row

double Bilinear(double x) {
  x = std::abs(x);
  return x < 1.0 ? 1.0 - x : 0.0;
}

double Bicubic(double x) {
  constexpr double kA = -0.5;
  x = std::abs(x);
  if (x < 1.0) return ((kA + 2.0) * x - (kA + 3.0)) * x * x + 1;
  if (x < 2.0) return (((x - 5) * x + 8) * x - 4) * kA;
  return 0.0;
}

double Box(double x) { return x > -0.5 && x <= 0.5 ? 1.0 : 0.0; }

double Hamming(double x) {
  x = std::abs(x);
  if (x == 0.0) return 1.0;
  if (x >= 1.0) return 0.0;
  x = x * std::numbers::pi;
  return std::sin(x) / x * (0.54f + 0.46f * std::cos(x));  // in float, as Pillow has them
}

double Sinc(double x) {
  if (x == 0.0) return 1.0;
  x = x * std::numbers::pi;
  return std::sin(x) / x;
}

double Lanczos(double x) { return -3.0 <= x && x < 3.0 ? Sinc(x) * Sinc(x / 3) : 0.0; }

int32_t FixedPoint(double weight) {
  constexpr double kOne = 1 << kernels::kPrecision;
  return static_cast<int32_t>(weight < 0 ? -0.5 + weight * kOne : 0.5 + weight * kOne);
}

// Makes room for `size` bytes from an address that is a multiple of 64: vectors that straddle two
// lines of the cache cost twice.
uint8_t* Room(std::vector<uint8_t>& v, size_t size) {
  if (v.size() < size + 64) v.resize(size + 64);
  return v.data() + (64 - reinterpret_cast<uintptr_t>(v.data()) % 64) % 64;
}

double Reach(Interpolation interpolation) {
  switch (interpolation) {
    case Interpolation::kLanczos:
      return 3.0;
    case Interpolation::kBicubic:
      return 2.0;
    default:
      return 1.0;  // or less
  }
}

bool Identity(const AxisSpec& axis) {
  return axis.in_begin == std::floor(axis.in_begin) && axis.in_end - axis.in_begin == axis.out_size;
}

bool ColumnsFirst(const AxisSpec& x, const AxisSpec& y, Interpolation interpolation,
                  PassOrder order) {
  return order == PassOrder::kPillow13 && !Identity(x) && !Identity(y) &&
         interpolation != Interpolation::kNearest && y.out_size < y.in_size &&
         2 * (int64_t{x.in_size} - x.out_size) < int64_t{y.in_size} - y.out_size;
}

uint64_t MostTaps(const AxisSpec& axis, Interpolation interpolation) {
  if (Identity(axis) || interpolation == Interpolation::kNearest) return 4;
  const double scale = std::max(1.0, (axis.in_end - axis.in_begin) / axis.out_size);
  return static_cast<uint64_t>(Reach(interpolation) * scale) * 2 + 8;
}

uint64_t TapBytes(const AxisSpec& axis, Interpolation interpolation) {
  if (Identity(axis)) return 0;
  // Weights, coefficients, and those again as the widest kernel reads them; where each begins.
  constexpr uint64_t kTap = sizeof(double) + sizeof(int32_t) + kernels::kAvx2Bytes / 8;
  return axis.window_size * (MostTaps(axis, interpolation) * kTap + 3 * sizeof(uint32_t));
}

}  // namespace

SimdLevel BestSimd() {
#if defined(__x86_64__)
  static const SimdLevel level = [] {
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl")) {
      return SimdLevel::kVnni;
    }
    return __builtin_cpu_supports("avx2") ? SimdLevel::kAvx2 : SimdLevel::kScalar;
  }();
  return level;
#else
  return SimdLevel::kScalar;
#endif
}

void AxisTaps::PlanNearest(const AxisSpec& axis) {
  const double scale = (axis.in_end - axis.in_begin) / axis.out_size;
  // Summed up from the first pixel on, as Pillow does: the rounding is part of the result.
  double position = axis.in_begin + scale * 0.5;
  for (uint32_t i = 0; i < axis.window_begin + axis.window_size; ++i) {
    if (i >= axis.window_begin) {
      begin.push_back(std::min(static_cast<uint32_t>(position), axis.in_size - 1));
      taps.push_back(1);
      weights_.push_back(1.0);
    }
    position += scale;
  }
  stride = 1;
}

template <double (*kWeight)(double)>
void AxisTaps::PlanFilter(const AxisSpec& axis, double reach) {
  const double scale = (axis.in_end - axis.in_begin) / axis.out_size;
  const double filter_scale = std::max(scale, 1.0);
  const double support = reach * filter_scale;
  const double inverse = 1.0 / filter_scale;
  stride = static_cast<uint32_t>(std::ceil(support)) * 2 + 1;
  weights_.resize(static_cast<size_t>(axis.window_size) * stride);
  begin.resize(axis.window_size);
  taps.resize(axis.window_size);
  for (uint32_t i = 0; i < axis.window_size; ++i) {
    const double center = axis.in_begin + (axis.window_begin + i + 0.5) * scale;
    const int low = std::max(static_cast<int>(center - support + 0.5), 0);
    const int high =
        std::min(static_cast<int>(center + support + 0.5), static_cast<int>(axis.in_size));
    double* weight = &weights_[static_cast<size_t>(i) * stride];
    double sum = 0;
    for (int x = 0; x < high - low; ++x) {
      weight[x] = kWeight((x + low - center + 0.5) * inverse);
      sum += weight[x];
    }
    if (sum != 0.0) {
      for (int x = 0; x < high - low; ++x) weight[x] /= sum;
    }
    begin[i] = static_cast<uint32_t>(low);
    taps[i] = static_cast<uint32_t>(high - low);
  }
}

void AxisTaps::Plan(const AxisSpec& axis, Interpolation interpolation) {
  begin.clear();
  taps.clear();
  weights_.clear();
  identity = Identity(axis);
  if (identity) {
    first = static_cast<uint32_t>(axis.in_begin) + axis.window_begin;
    count = axis.window_size;
    stride = 0;
    return;
  }
  switch (interpolation) {
    case Interpolation::kNearest:
      PlanNearest(axis);
      break;
    case Interpolation::kLanczos:
      PlanFilter<Lanczos>(axis, 3.0);
      break;
    case Interpolation::kBilinear:
      PlanFilter<Bilinear>(axis, 1.0);
      break;
    case Interpolation::kBicubic:
      PlanFilter<Bicubic>(axis, 2.0);
      break;
    case Interpolation::kBox:
      PlanFilter<Box>(axis, 0.5);
      break;
    case Interpolation::kHamming:
      PlanFilter<Hamming>(axis, 1.0);
      break;
  }
  // Positions only grow, so the ends of the needed input are at the ends of the window.
  const uint32_t weight_stride = stride;
  uint32_t most = 1;
  uint32_t end = 0;
  first = begin.front();
  for (size_t i = 0; i < begin.size(); ++i) {
    most = std::max(most, taps[i]);
    end = std::max(end, begin[i] + taps[i]);
  }
  count = end - first;
  stride = (most + 3) / 4 * 4;
  coefficients.assign(begin.size() * stride, 0);
  for (size_t i = 0; i < begin.size(); ++i) {
    begin[i] -= first;
    for (uint32_t x = 0; x < taps[i]; ++x) {
      coefficients[i * stride + x] = FixedPoint(weights_[i * weight_stride + x]);
    }
  }
}

uint64_t Resampler::ScratchBytes(const AxisSpec& x, const AxisSpec& y, Interpolation interpolation,
                                 PassOrder order) {
  const uint64_t kept =
      ColumnsFirst(x, y, interpolation, order) ? x.in_size : uint64_t{x.window_size};
  const uint64_t row = kept * 4 + kSpare + 64;
  return TapBytes(x, interpolation) + TapBytes(y, interpolation) +
         row * (MostTaps(y, interpolation) + 1) + (uint64_t{x.window_size} * 4 + 2 * kSpare);
}

Rect Resampler::Start(const AxisSpec& x, const AxisSpec& y, Interpolation interpolation,
                      PassOrder order) {
  x_.Plan(x, interpolation);
  y_.Plan(y, interpolation);
  out_width_ = x.window_size;
  out_height_ = y.window_size;
  pushed_ = 0;
  popped_ = 0;
  direct_ = nullptr;
  columns_first_ = ColumnsFirst(x, y, interpolation, order);
  const uint32_t kept_width = columns_first_ ? x_.count : out_width_;
  row_bytes_ = (static_cast<size_t>(kept_width) * 4 + kSpare + 63) / 64 * 64;
  ring_ = 1;
  if (!y_.identity) {
    for (const uint32_t taps : y_.taps) ring_ = std::max(ring_, taps);
    inputs_.resize(y_.stride);
  }
  rows_ = Room(rows_memory_, row_bytes_ * ring_ + kSpare);
  out_ = Room(out_memory_, static_cast<size_t>(out_width_) * 4 + 2 * kSpare);
  if (columns_first_) column_row_ = Room(column_memory_, row_bytes_ + kSpare);
  if (!x_.identity) PlanHorizontal();
  return {x_.first, y_.first, x_.count, y_.count};
}

void Resampler::PlanHorizontal() {
  // Whole groups of taps are read: near the right edge they start further left, after taps of 0.
  const uint32_t last = x_.count > x_.stride ? x_.count - x_.stride : 0;
  for (size_t i = 0; i < out_width_; ++i) {
    if (x_.begin[i] <= last) continue;
    const uint32_t shift = x_.begin[i] - last;
    int32_t* c = &x_.coefficients[i * x_.stride];
    std::memmove(c + shift, c, x_.taps[i] * sizeof(int32_t));
    std::fill_n(c, shift, 0);
    x_.begin[i] = last;
  }
  const size_t n = (out_width_ + 3) / 4 * 4;
  const size_t groups = x_.stride / 4;
  x_.coefficients.resize(n * x_.stride, 0);
  offsets_.assign(n, 0);
  for (size_t i = 0; i < out_width_; ++i) offsets_[i] = x_.begin[i] * 4;
  if (level_ == SimdLevel::kAvx2) {
    packed_ = Room(packed_memory_, n / 2 * groups * kernels::kAvx2Bytes);
    kernels::PackAvx2(x_.coefficients.data(), n, groups, packed_);
  } else if (level_ == SimdLevel::kVnni) {
    packed_ = Room(packed_memory_, n / 4 * groups * kernels::kVnniBytes);
    kernels::PackVnni(x_.coefficients.data(), n, groups, packed_);
  }
}

void Resampler::Horizontal(const uint8_t* rgbx, uint8_t* out) {
  const size_t n = offsets_.size();
  const size_t groups = x_.stride / 4;
  switch (level_) {
    case SimdLevel::kScalar:
      kernels::HorizontalScalar(rgbx, out, n, offsets_.data(), groups, x_.coefficients.data());
      break;
    case SimdLevel::kAvx2:
      kernels::HorizontalAvx2(rgbx, out, n, offsets_.data(), groups, packed_);
      break;
    case SimdLevel::kVnni:
      kernels::HorizontalVnni(rgbx, out, n, offsets_.data(), groups, packed_);
      break;
  }
}

void Resampler::Push(const uint8_t* rgbx) {
  uint8_t* slot = rows_ + pushed_ % ring_ * row_bytes_;
  ++pushed_;
  direct_ = slot;
  if (columns_first_) {
    std::memcpy(slot, rgbx, static_cast<size_t>(x_.count) * 4);
  } else if (!x_.identity) {
    Horizontal(rgbx, slot);
  } else if (y_.identity) {
    direct_ = rgbx;
  } else {
    std::memcpy(slot, rgbx, static_cast<size_t>(out_width_) * 4);
  }
}

const uint8_t* Resampler::Pop() {
  if (popped_ == out_height_) return nullptr;
  if (y_.identity) {
    if (popped_ == pushed_) return nullptr;
    ++popped_;
    return direct_;
  }
  const uint32_t begin = y_.begin[popped_];
  const uint32_t taps = y_.taps[popped_];
  if (begin + taps > pushed_) return nullptr;
  const int32_t* coefficients = &y_.coefficients[static_cast<size_t>(popped_) * y_.stride];
  ++popped_;
  const uint8_t* row = rows_ + begin % ring_ * row_bytes_;
  if (taps != 1 || coefficients[0] != 1 << kernels::kPrecision) {
    uint32_t slot = begin % ring_;
    for (uint32_t i = 0; i < taps; ++i) {
      inputs_[i] = rows_ + slot * row_bytes_;
      if (++slot == ring_) slot = 0;
    }
    for (uint32_t i = taps; i < y_.stride; ++i) inputs_[i] = row;
    uint8_t* to = columns_first_ ? column_row_ : out_;
    const size_t bytes = static_cast<size_t>(columns_first_ ? x_.count : out_width_) * 4;
    switch (level_) {
      case SimdLevel::kScalar:
        kernels::VerticalScalar(inputs_.data(), taps, coefficients, to, bytes);
        break;
      case SimdLevel::kAvx2:
        kernels::VerticalAvx2(inputs_.data(), taps, coefficients, to, bytes);
        break;
      case SimdLevel::kVnni:
        kernels::VerticalVnni(inputs_.data(), taps, coefficients, to, bytes);
        break;
    }
    row = to;
  }
  if (!columns_first_) return row;
  Horizontal(row, out_);
  return out_;
}

}  // namespace forebay
