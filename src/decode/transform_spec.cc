#include "decode/transform_spec.h"

#include <cmath>

namespace forebay {
namespace {

constexpr uint32_t kMostPixels = 1 << 16;  // an edge

template <typename T>
constexpr bool kIsFlip =
    std::is_same_v<T, ops::RandomHorizontalFlip> || std::is_same_v<T, ops::RandomVerticalFlip>;

std::string Name(const ops::Op& op) { return std::string(OpName(op)); }

bool InOrder(const ops::Range& r, double lo, double hi) {
  return std::isfinite(r.lo) && std::isfinite(r.hi) && lo <= r.lo && r.lo <= r.hi && r.hi <= hi;
}

Status CheckSize(std::string_view name, uint32_t height, uint32_t width) {
  if (height == 0 || width == 0 || height > kMostPixels || width > kMostPixels) {
    return {Code::kInvalidArgument, StrCat(name, ": size must be 1 to ", kMostPixels,
                                           " pixels, got (", height, ", ", width, ")")};
  }
  return {};
}

Status CheckProbability(std::string_view name, double p) {
  if (p >= 0 && p <= 1) return {};
  return {Code::kInvalidArgument, StrCat(name, ": p must be from 0 to 1, got ", p)};
}

Status CheckFactor(std::string_view name, const std::optional<ops::Range>& range, double lo,
                   double hi) {
  if (!range || InOrder(*range, lo, hi)) return {};
  return {Code::kInvalidArgument, StrCat("ColorJitter: ", name, " must be a range within (", lo,
                                         ", ", hi, "), got (", range->lo, ", ", range->hi, ")")};
}

Status Check(const ops::RandomResizedCrop& op) {
  FOREBAY_RETURN_IF_ERROR(CheckSize("RandomResizedCrop", op.height, op.width));
  if (!InOrder(op.scale, 0, 1e6) || op.scale.hi == 0) {
    return {Code::kInvalidArgument, StrCat("RandomResizedCrop: scale must be (min, max), got (",
                                           op.scale.lo, ", ", op.scale.hi, ")")};
  }
  if (!InOrder(op.ratio, 1e-6, 1e6)) {
    return {Code::kInvalidArgument, StrCat("RandomResizedCrop: ratio must be (min, max), got (",
                                           op.ratio.lo, ", ", op.ratio.hi, ")")};
  }
  return {};
}

Status Check(const ops::Resize& op) {
  const bool edge = op.width == 0;
  FOREBAY_RETURN_IF_ERROR(CheckSize("Resize", op.height, edge ? op.height : op.width));
  if (op.max_size != 0 && (!edge || op.max_size <= op.height)) {
    return {Code::kInvalidArgument,
            StrCat("Resize: max_size = ", op.max_size,
                   " goes with a size of one number, and must be greater than it")};
  }
  return {};
}

Status Check(const ops::CenterCrop& op) { return CheckSize("CenterCrop", op.height, op.width); }

Status Check(const ops::RandomCrop& op) {
  for (const uint32_t pad : op.padding) {
    if (pad > kMostPixels) {
      return {Code::kInvalidArgument, StrCat("RandomCrop: padding of ", pad, " pixels")};
    }
  }
  return CheckSize("RandomCrop", op.height, op.width);
}

Status Check(const ops::RandomHorizontalFlip& op) {
  return CheckProbability("RandomHorizontalFlip", op.p);
}
Status Check(const ops::RandomVerticalFlip& op) {
  return CheckProbability("RandomVerticalFlip", op.p);
}
Status Check(const ops::Grayscale&) { return {}; }
Status Check(const ops::RandomGrayscale& op) { return CheckProbability("RandomGrayscale", op.p); }
Status Check(const ops::ToTensor&) { return {}; }

Status Check(const ops::ColorJitter& op) {
  FOREBAY_RETURN_IF_ERROR(CheckFactor("brightness", op.brightness, 0, 1e6));
  FOREBAY_RETURN_IF_ERROR(CheckFactor("contrast", op.contrast, 0, 1e6));
  FOREBAY_RETURN_IF_ERROR(CheckFactor("saturation", op.saturation, 0, 1e6));
  return CheckFactor("hue", op.hue, -0.5, 0.5);
}

Status Check(const ops::RandAugment& op) {
  if (op.num_ops > 1000 || op.num_magnitude_bins < 2 || op.num_magnitude_bins > 100000 ||
      op.magnitude >= op.num_magnitude_bins) {
    return {Code::kInvalidArgument,
            StrCat("RandAugment: magnitude ", op.magnitude, " must be below num_magnitude_bins ",
                   op.num_magnitude_bins, ", of which there must be 2 or more")};
  }
  if (op.interpolation != Interpolation::kNearest && op.interpolation != Interpolation::kBilinear &&
      op.interpolation != Interpolation::kBicubic) {
    return {Code::kInvalidArgument,
            "RandAugment: interpolation must be nearest, bilinear or bicubic"};
  }
  return {};
}

Status Check(const ops::Normalize& op) {
  for (size_t c = 0; c < 3; ++c) {
    if (op.std[c] == 0 || !std::isfinite(op.std[c]) || !std::isfinite(op.mean[c])) {
      return {Code::kInvalidArgument,
              StrCat("Normalize: std must not be 0, and all must be finite; channel ", c,
                     " has mean ", op.mean[c], " and std ", op.std[c])};
    }
  }
  return {};
}

}  // namespace

std::string_view OpName(const ops::Op& op) {
  constexpr std::string_view kNames[] = {
      "RandomResizedCrop",  "Resize",      "CenterCrop", "RandomCrop",      "RandomHorizontalFlip",
      "RandomVerticalFlip", "ColorJitter", "Grayscale",  "RandomGrayscale", "RandAugment",
      "ToTensor",           "Normalize",
  };
  static_assert(std::size(kNames) == std::variant_size_v<ops::Op>);
  return kNames[op.index()];
}

uint32_t DTypeBytes(DType dtype) {
  switch (dtype) {
    case DType::kUint8:
      return 1;
    case DType::kFloat16:
    case DType::kBfloat16:
      return 2;
    case DType::kFloat32:
      break;
  }
  return 4;
}

std::string_view DTypeName(DType dtype) {
  switch (dtype) {
    case DType::kUint8:
      return "uint8";
    case DType::kFloat16:
      return "float16";
    case DType::kBfloat16:
      return "bfloat16";
    case DType::kFloat32:
      break;
  }
  return "float32";
}

Status TransformSpec::Validate() const {
  bool tensor = false;
  for (const ops::Op& op : ops) {
    FOREBAY_RETURN_IF_ERROR(std::visit([](const auto& o) { return Check(o); }, op));
    const bool flip =
        std::visit([](const auto& o) { return kIsFlip<std::decay_t<decltype(o)>>; }, op);
    const bool normalize = std::holds_alternative<ops::Normalize>(op);
    if (tensor && !flip && !normalize) {
      return {Code::kInvalidArgument,
              StrCat(Name(op), " stands after ToTensor; put it before ToTensor")};
    }
    if (!tensor && normalize) {
      return {Code::kInvalidArgument, "Normalize needs ToTensor before it"};
    }
    if (std::holds_alternative<ops::ToTensor>(op)) tensor = true;
  }
  return {};
}

Result<OutputShape> TransformSpec::Shape() const {
  OutputShape shape;
  for (const ops::Op& op : ops) {
    if (const auto* rrc = std::get_if<ops::RandomResizedCrop>(&op)) {
      shape = {rrc->height, rrc->width};
    } else if (const auto* center = std::get_if<ops::CenterCrop>(&op)) {
      shape = {center->height, center->width};
    } else if (const auto* crop = std::get_if<ops::RandomCrop>(&op)) {
      shape = {crop->height, crop->width};
    } else if (const auto* resize = std::get_if<ops::Resize>(&op)) {
      if (resize->width != 0) {
        shape = {resize->height, resize->width};
      } else if (shape.height != 0 && shape.height == shape.width) {
        shape = {resize->height, resize->height};
      } else {
        shape = {};
      }
    }
  }
  if (shape.height == 0) {
    return Status(Code::kInvalidArgument,
                  "these transforms leave images of different sizes, which do not form a batch; "
                  "add CenterCrop(224), or give Resize both a height and a width");
  }
  return shape;
}

}  // namespace forebay
