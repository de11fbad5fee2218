#include "decode/jpeg_output.h"

#include <algorithm>
#include <cstring>

namespace forebay::jpeg {
namespace {

uint32_t DivideUp(uint32_t a, uint32_t b) { return (a + b - 1) / b; }

// libjpeg-turbo's choice: very narrow components are repeated.
Upsample MethodOf(uint32_t h_factor, uint32_t v_factor, uint32_t width, bool smooth) {
  if (h_factor == 1 && v_factor == 1) return Upsample::kNone;
  if (!smooth) return Upsample::kBox;
  if (h_factor == 2 && v_factor == 1 && width > 2) return Upsample::kH2V1;
  if (h_factor == 2 && v_factor == 2 && width > 2) return Upsample::kH2V2;
  if (h_factor == 1 && v_factor == 2) return Upsample::kH1V2;
  return Upsample::kBox;
}

// Samples first..last that pixels from..from+count-1 need, out of `size`; `context`: and those
// beside them.
void Needed(uint32_t from, uint32_t count, uint32_t factor, bool context, uint32_t size,
            uint32_t& first, uint32_t& last) {
  first = from / factor;
  last = std::min((from + count - 1) / factor, size - 1);
  if (!context) return;
  if (first > 0) --first;
  if (last < size - 1) ++last;
}

}  // namespace

void Output::Begin(const Header& header, uint32_t shrink, const Rect& rect) {
  color_ = header.Color();
  count_ = header.count;
  rect_ = rect;
  next_ = rect.y;
  const uint32_t smallest = 8 / shrink;
  mcus_per_row_ = DivideUp(header.width, 8u * header.max_h);
  mcus_ = BlockRange{mcus_per_row_, 0, UINT32_MAX, 0};
  skipped_ = 0;
  for (uint32_t c = 0; c < count_; ++c) {
    const Component& component = header.components[c];
    Plane& plane = planes_[c];
    // As libjpeg: a coarser component is shrunk less, where that saves its upsampling.
    plane.size = smallest;
    while (plane.size < 8 && header.max_h * smallest % (component.h * plane.size * 2) == 0 &&
           header.max_v * smallest % (component.v * plane.size * 2) == 0) {
      plane.size *= 2;
    }
    plane.h_factor = header.max_h * smallest / (component.h * plane.size);
    plane.v_factor = header.max_v * smallest / (component.v * plane.size);
    plane.width = DivideUp(header.width * component.h * plane.size, header.max_h * 8u);
    plane.height = DivideUp(header.height * component.v * plane.size, header.max_v * 8u);
    plane.method = MethodOf(plane.h_factor, plane.v_factor, plane.width, smallest > 1);
    plane.rows = plane.size * component.v;
    plane.first = 0;
    const bool beside = plane.method == Upsample::kH2V1 || plane.method == Upsample::kH2V2;
    BlockRange& wanted = plane.wanted;
    Needed(rect.x, rect.width, plane.h_factor, beside, plane.width, wanted.x0, wanted.x1);
    Needed(rect.y, rect.height, plane.v_factor, plane.TwoRows(), plane.height, wanted.y0,
           wanted.y1);
    wanted = BlockRange{wanted.x0 / plane.size, wanted.x1 / plane.size + 1, wanted.y0 / plane.size,
                        wanted.y1 / plane.size + 1};
    mcus_.x0 = std::min(mcus_.x0, wanted.x0 / component.h);
    mcus_.x1 = std::max(mcus_.x1, (wanted.x1 - 1) / component.h + 1);
    mcus_.y0 = std::min(mcus_.y0, wanted.y0 / component.v);
    mcus_.y1 = std::max(mcus_.y1, (wanted.y1 - 1) / component.v + 1);
    // Rows below the rectangle are not read.
    skipped_ += uint64_t{wanted.y1} * mcus_per_row_ * component.h -
                uint64_t{wanted.y1 - wanted.y0} * (wanted.x1 - wanted.x0);
    plane.stride = 2 * kMargin + size_t{wanted.x1 - wanted.x0} * plane.size;
    const size_t bytes = plane.stride * (plane.rows + 1) + kMargin;
    if (plane.bytes.size() < bytes) plane.bytes.resize(bytes);
    if (plane.wide.size() < rect.width + 2 * kMargin) plane.wide.resize(rect.width + 2 * kMargin);
  }
  const size_t row = size_t{rect.width} * 4 + 4 * kMargin;
  if (row_.size() < row) row_.resize(row);
}

uint64_t Output::ScratchBytes(const Header& header) {
  const uint64_t width = uint64_t{header.width} + 8 * header.max_h + 4 * kMargin;
  uint64_t bytes = width * 4;
  for (uint32_t c = 0; c < header.count; ++c) {
    const Component& component = header.components[c];
    bytes += width * component.h / header.max_h * (8 * component.v + 2) + width;
  }
  return bytes;
}

const uint8_t* Output::Samples(const Plane& plane, uint32_t row, uint32_t column) const {
  return plane.bytes.data() + kMargin + (row + 1 - plane.first) * plane.stride + column -
         size_t{plane.wanted.x0} * plane.size;
}

const uint8_t* Output::Widen(Plane& plane, uint32_t y) {
  const uint32_t row = y / plane.v_factor;
  const uint32_t column = rect_.x / plane.h_factor;
  const uint8_t* near = Samples(plane, row, column);
  const uint8_t* far = near;
  const bool lower = y % 2 != 0;
  if (plane.TwoRows()) {
    const uint32_t other = lower ? std::min(row + 1, plane.height - 1) : row - (row > 0 ? 1 : 0);
    far = Samples(plane, other, column);
  }
  uint8_t* wide = plane.wide.data();
  const uint32_t offset = rect_.x % plane.h_factor;
  const size_t count = (offset + rect_.width + plane.h_factor - 1) / plane.h_factor;
  switch (plane.method) {
    case Upsample::kNone:
      return near;
    case Upsample::kH2V1:
      kernels_.h2v1(near, count, wide);
      return wide + offset;
    case Upsample::kH2V2:
      kernels_.h2v2(near, far, count, wide);
      return wide + offset;
    case Upsample::kH1V2:
      kernels_.h1v2(near, far, lower, count, wide);
      return wide;
    case Upsample::kBox:
      break;
  }
  uint32_t phase = offset;
  for (uint32_t i = 0; i < rect_.width; ++i) {
    wide[i] = *near;
    if (++phase == plane.h_factor) {
      phase = 0;
      ++near;
    }
  }
  return wide;
}

void Output::EmitRow(uint32_t y, RowSink& sink) {
  std::array<const uint8_t*, kMaxComponents> in{};
  for (uint32_t c = 0; c < count_; ++c) in[c] = Widen(planes_[c], y);
  uint8_t* out = row_.data();
  const size_t width = rect_.width;
  switch (color_) {
    case ColorSpace::kGray:
      kernels_.rgb(in[0], in[0], in[0], width, out);
      break;
    case ColorSpace::kRgb:
      kernels_.rgb(in[0], in[1], in[2], width, out);
      break;
    case ColorSpace::kYcc:
      kernels_.ycc(in[0], in[1], in[2], width, out);
      break;
    case ColorSpace::kCmyk:
      kernels_.rgb(in[0], in[1], in[2], width, out);
      CmykToRgb(in[3], false, width, out);
      break;
    case ColorSpace::kYcck:
      kernels_.ycc(in[0], in[1], in[2], width, out);
      CmykToRgb(in[3], true, width, out);
      break;
  }
  sink.Row(out);
}

void Output::Emit(uint32_t mcu_row, RowSink& sink) {
  for (uint32_t c = 0; c < count_; ++c) {
    Plane& plane = planes_[c];
    plane.first = mcu_row * plane.rows;
    if (plane.method != Upsample::kH2V1 && plane.method != Upsample::kH2V2) continue;
    // The filter sees the first and the last column repeated.
    const size_t left = size_t{plane.wanted.x0} * plane.size;
    uint8_t* row = samples(c);
    for (uint32_t i = 0; i < plane.rows; ++i, row += plane.stride) {
      if (left == 0) row[-1] = row[0];
      if (size_t{plane.wanted.x1} * plane.size >= plane.width) {
        row[plane.width - left] = row[plane.width - 1 - left];
      }
    }
  }
  const auto ready = [&](uint32_t y) {
    for (uint32_t c = 0; c < count_; ++c) {
      const Plane& plane = planes_[c];
      uint32_t row = y / plane.v_factor;
      if (plane.TwoRows() && y % 2 != 0) row = std::min(row + 1, plane.height - 1);
      if (row >= plane.first + plane.rows) return false;
    }
    return true;
  };
  const uint32_t end = rect_.y + rect_.height;
  for (; next_ < end && ready(next_); ++next_) EmitRow(next_, sink);
  for (uint32_t c = 0; c < count_; ++c) {
    Plane& plane = planes_[c];
    std::memcpy(plane.bytes.data(), plane.bytes.data() + plane.rows * plane.stride, plane.stride);
  }
}

}  // namespace forebay::jpeg
