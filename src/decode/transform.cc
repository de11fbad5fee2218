#include "decode/transform.h"

#include <algorithm>
#include <cmath>
#include <cstring>

namespace forebay {
namespace {

using Kind = Step::Kind;

bool HasToTensor(const TransformSpec& spec) {
  return std::any_of(spec.ops.begin(), spec.ops.end(),
                     [](const ops::Op& op) { return std::holds_alternative<ops::ToTensor>(op); });
}

// The divisor that a decoder used, or the quotient of the sizes when it is none we know.
double ShrinkScale(uint32_t full, uint32_t shrunk) {
  for (uint32_t shrink = 1; shrink <= 8; shrink *= 2) {
    if ((full + shrink - 1) / shrink == shrunk) return 1.0 / shrink;
  }
  return static_cast<double>(shrunk) / full;
}

// The part [begin, begin + size) of an edge of `full` pixels, in an edge of `shrunk`. Whole pixels
// that cover it are read, and `axis` says where in them it lies.
void MapAxis(uint32_t begin, uint32_t size, uint32_t full, uint32_t shrunk, uint32_t& first,
             AxisSpec& axis) {
  const double scale = ShrinkScale(full, shrunk);
  const double lo = std::min(begin * scale, static_cast<double>(shrunk - 1));
  const double hi = std::min((begin + size) * scale, static_cast<double>(shrunk));
  first = static_cast<uint32_t>(lo);
  axis.in_size = static_cast<uint32_t>(std::ceil(hi)) - first;
  axis.in_begin = lo - first;
  axis.in_end = hi - first;
}

void CopyRow(const uint8_t* from, uint8_t* to, uint32_t width, bool flip) {
  if (!flip) {
    std::memcpy(to, from, static_cast<size_t>(width) * 4);
    return;
  }
  for (uint32_t x = 0; x < width; ++x) std::memcpy(to + x * 4, from + (width - 1 - x) * 4, 4);
}

// A step on the pixels of a scratch image of this size: not one of those that are fused.
bool IsPixelStep(const Step& step, const ImageInfo& size) {
  switch (step.kind) {
    case Kind::kCrop:
      return step.x < 0 || step.y < 0 || step.x + int64_t{step.width} > size.width ||
             step.y + int64_t{step.height} > size.height;
    case Kind::kResize:
    case Kind::kFlipX:
    case Kind::kFlipY:
      return false;
    default:
      return true;
  }
}

}  // namespace

Result<std::unique_ptr<Transformer>> Transformer::Make(const TransformSpec& spec,
                                                       const OutputSpec& output) {
  FOREBAY_RETURN_IF_ERROR(spec.Validate());
  const Result<OutputShape> shape = spec.Shape();
  if (!shape) return shape.error();
  const bool tensor = HasToTensor(spec);
  if (tensor && output.dtype == DType::kUint8) {
    return Status(Code::kInvalidArgument,
                  "ToTensor gives floats: leave it out for an output of uint8");
  }
  if (!tensor && output.dtype != DType::kUint8) {
    return Status(Code::kInvalidArgument, StrCat("an output of ", DTypeName(output.dtype),
                                                 " needs ToTensor among the transforms"));
  }
  return std::unique_ptr<Transformer>(new Transformer(spec, output, *shape));
}

Transformer::Transformer(const TransformSpec& spec, const OutputSpec& output, OutputShape shape)
    : spec_(spec), shape_(shape), writer_(spec, output, shape) {}

Transformer::~Transformer() = default;

size_t Transformer::OutputBytes() const { return writer_.SampleBytes(); }

// Folds steps from `from` on into one geometry of an image of the given size. Returns the first
// step that does not fit.
size_t Transformer::Collect(size_t from, uint32_t width, uint32_t height,
                            Geometry& geometry) const {
  geometry = {};
  geometry.source = {0, 0, width, height};
  geometry.window = geometry.source;
  size_t i = from;
  for (; i < plan_.steps.size(); ++i) {
    const Step& step = plan_.steps[i];
    const uint32_t now_width = geometry.window.width;
    const uint32_t now_height = geometry.window.height;
    if (step.kind == Kind::kFlipX) {
      geometry.flip_x = !geometry.flip_x;
    } else if (step.kind == Kind::kFlipY) {
      geometry.flip_y = !geometry.flip_y;
    } else if (step.kind == Kind::kCrop) {
      if (step.x < 0 || step.y < 0) break;
      auto x = static_cast<uint32_t>(step.x);
      auto y = static_cast<uint32_t>(step.y);
      if (x + step.width > now_width || y + step.height > now_height) break;
      if (geometry.flip_x) x = now_width - x - step.width;
      if (geometry.flip_y) y = now_height - y - step.height;
      Rect& rect = geometry.resize ? geometry.window : geometry.source;
      rect = {rect.x + x, rect.y + y, step.width, step.height};
      if (!geometry.resize) geometry.window = {0, 0, step.width, step.height};
    } else if (step.kind == Kind::kResize) {
      if (step.width == now_width && step.height == now_height) continue;
      // What is cut off after a resize has no part in the next one; a flip is not the same to the
      // last bit before and after one.
      if (geometry.resize || geometry.flip_x || geometry.flip_y) break;
      geometry.resize = true;
      geometry.width = step.width;
      geometry.height = step.height;
      geometry.interpolation = step.interpolation;
      geometry.pass_order = step.pass_order;
      geometry.window = {0, 0, step.width, step.height};
    } else {
      break;
    }
  }
  if (!geometry.resize) {
    geometry.width = geometry.source.width;
    geometry.height = geometry.source.height;
  }
  return i;
}

uint32_t Transformer::BestShrink(const ImageInfo& full, const SampleKey& key) {
  if (full.width == 0 || full.height == 0 || !MakePlan(spec_, full, key, plan_).ok()) return 1;
  Geometry geometry;
  Collect(0, full.width, full.height, geometry);
  if (!geometry.resize || geometry.interpolation == Interpolation::kNearest) return 1;
  uint32_t shrink = 8;
  while (shrink > 1 && (geometry.source.width < geometry.width * shrink ||
                        geometry.source.height < geometry.height * shrink)) {
    shrink /= 2;
  }
  return shrink;
}

Result<Rect> Transformer::Begin(const ImageInfo& full, const ImageInfo& shrunk,
                                const SampleKey& key, std::byte* out) {
  const Result<uint64_t> prepared = Prepare(full, shrunk, key);
  if (!prepared) return prepared.error();
  return Start(out);
}

Result<uint64_t> Transformer::Prepare(const ImageInfo& full, const ImageInfo& shrunk,
                                      const SampleKey& key) {
  rows_left_ = 0;
  if (full.width == 0 || full.height == 0 || shrunk.width == 0 || shrunk.height == 0) {
    return Status(Code::kInvalidArgument, "the image has no pixels");
  }
  FOREBAY_RETURN_IF_ERROR(MakePlan(spec_, full, key, plan_));
  if (plan_.width != shape_.width || plan_.height != shape_.height) {
    return Status(Code::kInternal, StrCat("planned ", plan_.width, "x", plan_.height, " for ",
                                          shape_.width, "x", shape_.height));
  }
  next_step_ = Collect(0, full.width, full.height, geometry_);
  full_ = full;
  shrunk_ = shrunk;
  return ScratchBytes();
}

Rect Transformer::Start(std::byte* out) {
  out_ = out;
  return StartGeometry(full_, shrunk_);
}

void Transformer::DropScratch() {
  rows_left_ = 0;
  resampler_ = Resampler(resampler_.level());
  image_ = ScratchImage();
  spare_ = ScratchImage();
}

// Follows the steps as Finish will, by their sizes alone.
uint64_t Transformer::ScratchBytes() const {
  const auto resampling = [](const Geometry& geometry, const Axes& axes) {
    return Resampler::ScratchBytes(axes.x, axes.y, geometry.interpolation, geometry.pass_order);
  };
  uint64_t rows = resampling(geometry_, AxesOf(geometry_, full_, shrunk_));
  uint64_t image = 0;  // the largest; there may be two of it
  Geometry geometry = geometry_;
  for (size_t next = next_step_; next < plan_.steps.size();) {
    ImageInfo size{geometry.window.width, geometry.window.height};
    image = std::max(image, uint64_t{size.width} * size.height);
    for (; next < plan_.steps.size() && IsPixelStep(plan_.steps[next], size); ++next) {
      size = {plan_.steps[next].width, plan_.steps[next].height};
      image = std::max(image, uint64_t{size.width} * size.height);
    }
    next = Collect(next, size.width, size.height, geometry);
    rows = std::max(rows, resampling(geometry, AxesOf(geometry, size, size)));
  }
  return rows + image * 8;
}

Rect Transformer::StartGeometry(const ImageInfo& full, const ImageInfo& shrunk) {
  to_output_ = next_step_ == plan_.steps.size();
  if (!to_output_) image_.Reset(geometry_.window.width, geometry_.window.height);
  out_row_ = 0;
  const Axes axes = AxesOf(geometry_, full, shrunk);
  const Rect needed =
      resampler_.Start(axes.x, axes.y, geometry_.interpolation, geometry_.pass_order);
  rows_left_ = needed.height;
  return {axes.left + needed.x, axes.top + needed.y, needed.width, needed.height};
}

Transformer::Axes Transformer::AxesOf(const Geometry& geometry, const ImageInfo& full,
                                      const ImageInfo& shrunk) {
  Axes axes;
  MapAxis(geometry.source.x, geometry.source.width, full.width, shrunk.width, axes.left, axes.x);
  MapAxis(geometry.source.y, geometry.source.height, full.height, shrunk.height, axes.top, axes.y);
  axes.x.out_size = geometry.width;
  axes.y.out_size = geometry.height;
  axes.x.window_begin = geometry.window.x;
  axes.x.window_size = geometry.window.width;
  axes.y.window_begin = geometry.window.y;
  axes.y.window_size = geometry.window.height;
  return axes;
}

void Transformer::Row(const uint8_t* rgbx) {
  if (rows_left_ == 0) return;
  --rows_left_;
  resampler_.Push(rgbx);
  while (const uint8_t* row = resampler_.Pop()) Emit(out_row_++, row);
}

void Transformer::Emit(uint32_t y, const uint8_t* rgbx) {
  if (geometry_.flip_y) y = geometry_.window.height - 1 - y;
  if (to_output_) {
    writer_.Row(out_, y, rgbx, geometry_.flip_x);
  } else {
    CopyRow(rgbx, image_.row(y), geometry_.window.width, geometry_.flip_x);
  }
}

Status Transformer::Finish() {
  if (rows_left_ != 0 || out_row_ != geometry_.window.height) {
    return {Code::kDataLoss, StrCat(rows_left_, " rows of the image are missing")};
  }
  while (!to_output_) {
    while (next_step_ < plan_.steps.size() && ApplyPixelStep(plan_.steps[next_step_])) ++next_step_;
    std::swap(image_, spare_);
    const ImageInfo info{spare_.width(), spare_.height()};
    next_step_ = Collect(next_step_, info.width, info.height, geometry_);
    const Rect rect = StartGeometry(info, info);
    for (uint32_t y = 0; y < rect.height; ++y) {
      Row(spare_.row(rect.y + y) + static_cast<size_t>(rect.x) * 4);
    }
  }
  return {};
}

// False when the step is one that Collect takes.
bool Transformer::ApplyPixelStep(const Step& step) {
  if (!IsPixelStep(step, {image_.width(), image_.height()})) return false;
  switch (step.kind) {
    case Kind::kCrop:
      CropFill(image_, spare_, step.x, step.y, step.width, step.height, step.fill);
      std::swap(image_, spare_);
      return true;
    case Kind::kResize:
    case Kind::kFlipX:
    case Kind::kFlipY:
      return false;
    case Kind::kBrightness:
      AdjustBrightness(image_, step.factor);
      return true;
    case Kind::kContrast:
      AdjustContrast(image_, step.factor);
      return true;
    case Kind::kSaturation:
      AdjustSaturation(image_, step.factor);
      return true;
    case Kind::kHue:
      AdjustHue(image_, step.factor);
      return true;
    case Kind::kSharpness:
      AdjustSharpness(image_, spare_, step.factor);
      std::swap(image_, spare_);
      return true;
    case Kind::kGray:
      ToGray(image_);
      return true;
    case Kind::kPosterize:
      Posterize(image_, static_cast<int>(step.factor));
      return true;
    case Kind::kSolarize:
      Solarize(image_, step.factor);
      return true;
    case Kind::kAutoContrast:
      AutoContrast(image_);
      return true;
    case Kind::kEqualize:
      Equalize(image_);
      return true;
    case Kind::kShearX:
    case Kind::kShearY:
    case Kind::kTranslateX:
    case Kind::kTranslateY:
    case Kind::kRotate:
      Affine(image_, spare_, step.matrix, step.interpolation, step.fill);
      std::swap(image_, spare_);
      return true;
  }
  return false;
}

}  // namespace forebay
