#include "decode/transform_plan.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <numbers>

namespace forebay {
namespace {

using Kind = Step::Kind;

// Python's int(round(x)): to even.
int64_t Round(double x) { return static_cast<int64_t>(std::nearbyint(x)); }

class Planner {
 public:
  Planner(const TransformSpec& spec, const ImageInfo& info, const SampleKey& key, Plan& plan)
      : spec_(spec), key_(key), plan_(plan) {
    plan_.steps.clear();
    plan_.width = info.width;
    plan_.height = info.height;
  }

  Status Run() {
    for (; op_ < spec_.ops.size(); ++op_) {
      FOREBAY_RETURN_IF_ERROR(
          std::visit([this](const auto& op) { return Apply(op); }, spec_.ops[op_]));
    }
    return {};
  }

 private:
  // The stream of the op at hand: its kind and how many of the kind came before. Not its place in
  // the list, so that an op which is added leaves the draws of the others alone.
  SampleRandom Random() const {
    const size_t kind = spec_.ops[op_].index();
    size_t before = 0;
    for (size_t i = 0; i < op_; ++i) before += spec_.ops[i].index() == kind;
    return SampleRandom(key_, static_cast<uint16_t>((kind << 8) | (before & 0xff)));
  }

  Step& Add(Kind kind) {
    Step& step = plan_.steps.emplace_back();
    step.kind = kind;
    step.op = static_cast<uint32_t>(op_);
    step.width = plan_.width;
    step.height = plan_.height;
    return step;
  }
  Step& AddFactor(Kind kind, double factor) {
    Step& step = Add(kind);
    step.factor = factor;
    return step;
  }
  void AddCrop(int64_t x, int64_t y, int64_t width, int64_t height, ops::Color fill = {}) {
    plan_.width = static_cast<uint32_t>(width);
    plan_.height = static_cast<uint32_t>(height);
    Step& step = Add(Kind::kCrop);
    step.x = static_cast<int32_t>(x);
    step.y = static_cast<int32_t>(y);
    step.fill = fill;
  }
  template <typename Op>
  void AddResize(int64_t width, int64_t height, const Op& op) {
    plan_.width = static_cast<uint32_t>(width);
    plan_.height = static_cast<uint32_t>(height);
    Step& step = Add(Kind::kResize);
    step.interpolation = op.interpolation;
    step.pass_order = op.pass_order;
  }

  Status Apply(const ops::RandomResizedCrop& op);
  Status Apply(const ops::Resize& op);
  Status Apply(const ops::CenterCrop& op);
  Status Apply(const ops::RandomCrop& op);
  Status Apply(const ops::ColorJitter& op);
  Status Apply(const ops::RandAugment& op);
  Status Apply(const ops::RandomHorizontalFlip& op) {
    if (Random().Bernoulli(op.p)) Add(Kind::kFlipX);
    return {};
  }
  Status Apply(const ops::RandomVerticalFlip& op) {
    if (Random().Bernoulli(op.p)) Add(Kind::kFlipY);
    return {};
  }
  Status Apply(const ops::Grayscale&) {
    Add(Kind::kGray);
    return {};
  }
  Status Apply(const ops::RandomGrayscale& op) {
    if (Random().Bernoulli(op.p)) Add(Kind::kGray);
    return {};
  }
  Status Apply(const ops::ToTensor&) { return {}; }
  Status Apply(const ops::Normalize&) { return {}; }

  const TransformSpec& spec_;
  const SampleKey& key_;
  Plan& plan_;
  size_t op_ = 0;
};

Status Planner::Apply(const ops::RandomResizedCrop& op) {
  SampleRandom random = Random();
  const int64_t width = plan_.width;
  const int64_t height = plan_.height;
  const double area = static_cast<double>(width) * static_cast<double>(height);
  const double log_lo = std::log(op.ratio.lo);
  const double log_hi = std::log(op.ratio.hi);
  for (int attempt = 0; attempt < 10; ++attempt) {
    const double target = area * random.Uniform(op.scale.lo, op.scale.hi);
    const double ratio = std::exp(random.Uniform(log_lo, log_hi));
    const int64_t w = Round(std::sqrt(target * ratio));
    const int64_t h = Round(std::sqrt(target / ratio));
    if (0 < w && w <= width && 0 < h && h <= height) {
      const int64_t y = random.Int(0, height - h + 1);
      const int64_t x = random.Int(0, width - w + 1);
      AddCrop(x, y, w, h);
      AddResize(op.width, op.height, op);
      return {};
    }
  }
  // The central crop whose ratio is the nearest.
  const double in_ratio = static_cast<double>(width) / static_cast<double>(height);
  int64_t w = width;
  int64_t h = height;
  if (in_ratio < op.ratio.lo) {
    h = Round(static_cast<double>(w) / op.ratio.lo);
  } else if (in_ratio > op.ratio.hi) {
    w = Round(static_cast<double>(h) * op.ratio.hi);
  }
  // A strip of one pixel has no crop of an extreme ratio; torchvision fails there.
  w = std::clamp<int64_t>(w, 1, width);
  h = std::clamp<int64_t>(h, 1, height);
  AddCrop((width - w) / 2, (height - h) / 2, w, h);
  AddResize(op.width, op.height, op);
  return {};
}

Status Planner::Apply(const ops::Resize& op) {
  if (op.width != 0) {
    AddResize(op.width, op.height, op);
    return {};
  }
  const bool tall = plan_.width <= plan_.height;
  const double narrow = tall ? plan_.width : plan_.height;
  const double wide = tall ? plan_.height : plan_.width;
  int64_t short_edge = op.height;
  auto long_edge = static_cast<int64_t>(static_cast<double>(op.height) * wide / narrow);
  if (op.max_size != 0 && long_edge > op.max_size) {
    short_edge =
        static_cast<int64_t>(static_cast<double>(op.max_size) * static_cast<double>(short_edge) /
                             static_cast<double>(long_edge));
    long_edge = op.max_size;
  }
  if (short_edge < 1 || long_edge > (1 << 24)) {
    return {Code::kInvalidArgument, StrCat("Resize: an image of ", plan_.width, "x", plan_.height,
                                           " pixels would become ", short_edge, "x", long_edge)};
  }
  AddResize(tall ? short_edge : long_edge, tall ? long_edge : short_edge, op);
  return {};
}

Status Planner::Apply(const ops::CenterCrop& op) {
  // Padding (on both sides, the odd pixel at the end) and crop are one step.
  const auto origin = [](int64_t have, int64_t want) {
    return want > have ? -((want - have) / 2) : Round(static_cast<double>(have - want) / 2.0);
  };
  AddCrop(origin(plan_.width, op.width), origin(plan_.height, op.height), op.width, op.height);
  return {};
}

Status Planner::Apply(const ops::RandomCrop& op) {
  int64_t left = op.padding[0];
  int64_t top = op.padding[1];
  int64_t width = plan_.width + left + op.padding[2];
  int64_t height = plan_.height + top + op.padding[3];
  if (op.pad_if_needed && width < op.width) {
    const int64_t pad = op.width - width;
    left += pad;
    width += 2 * pad;
  }
  if (op.pad_if_needed && height < op.height) {
    const int64_t pad = op.height - height;
    top += pad;
    height += 2 * pad;
  }
  if (width < op.width || height < op.height) {
    return {Code::kInvalidArgument, StrCat("RandomCrop: the crop of (", op.height, ", ", op.width,
                                           ") is larger than the image of (", height, ", ", width,
                                           "); set pad_if_needed=True, or resize first")};
  }
  int64_t x = 0;
  int64_t y = 0;
  if (width != op.width || height != op.height) {
    SampleRandom random = Random();
    y = random.Int(0, height - op.height + 1);
    x = random.Int(0, width - op.width + 1);
  }
  AddCrop(x - left, y - top, op.width, op.height, op.fill);
  return {};
}

Status Planner::Apply(const ops::ColorJitter& op) {
  SampleRandom random = Random();
  std::array<uint8_t, 4> order;
  random.Permutation(order);
  const std::array<std::optional<ops::Range>, 4> ranges = {op.brightness, op.contrast,
                                                           op.saturation, op.hue};
  constexpr std::array<Kind, 4> kKinds = {Kind::kBrightness, Kind::kContrast, Kind::kSaturation,
                                          Kind::kHue};
  // Drawn also for those that are off, so that the others' draws stay when one is switched on.
  std::array<double, 4> factors;
  for (size_t i = 0; i < 4; ++i) {
    const ops::Range range = ranges[i].value_or(ops::Range{0, 1});
    factors[i] = random.Uniform(range.lo, range.hi);
  }
  for (const uint8_t i : order) {
    if (ranges[i]) AddFactor(kKinds[i], factors[i]);
  }
  return {};
}

// One of torch.linspace(from, to, bins), which is computed in float from the nearer end.
float Linspace(float from, float to, uint32_t bins, uint32_t i) {
  const float step = (to - from) / static_cast<float>(bins - 1);
  if (i < bins / 2) return from + step * static_cast<float>(i);
  return to - step * static_cast<float>(bins - 1 - i);
}

double Radians(double degrees) { return degrees * (std::numbers::pi / 180.0); }
double Degrees(double radians) { return radians * (180.0 / std::numbers::pi); }

// Python's round(x, 15).
double Round15(double x) {
  char text[40];
  std::snprintf(text, sizeof(text), "%.15f", x);
  return std::strtod(text, nullptr);
}

// torchvision's _get_inverse_affine_matrix for a shear (in degrees) or a shift about a center.
std::array<double, 6> InverseAffine(double cx, double cy, double tx, double ty, double shear_x,
                                    double shear_y) {
  const double sx = Radians(shear_x);
  const double sy = Radians(shear_y);
  const double a = std::cos(-sy) / std::cos(sy);
  const double b = -std::cos(-sy) * std::tan(sx) / std::cos(sy);
  const double c = std::sin(-sy) / std::cos(sy);
  const double d = -std::sin(-sy) * std::tan(sx) / std::cos(sy) + 1.0;
  std::array<double, 6> m = {d, -b, 0.0, -c, a, 0.0};
  m[2] += m[0] * (-cx - tx) + m[1] * (-cy - ty);
  m[5] += m[3] * (-cx - tx) + m[4] * (-cy - ty);
  m[2] += cx;
  m[5] += cy;
  return m;
}

// Image.rotate about the middle.
std::array<double, 6> Rotation(double degrees, double width, double height) {
  double turn = std::fmod(degrees, 360.0);
  if (turn < 0) turn += 360.0;
  const double angle = -Radians(turn);
  const double cx = width / 2;
  const double cy = height / 2;
  std::array<double, 6> m = {Round15(std::cos(angle)),  Round15(std::sin(angle)), 0.0,
                             Round15(-std::sin(angle)), Round15(std::cos(angle)), 0.0};
  m[2] = m[0] * -cx + m[1] * -cy + 0.0;
  m[5] = m[3] * -cx + m[4] * -cy + 0.0;
  m[2] += cx;
  m[5] += cy;
  return m;
}

Status Planner::Apply(const ops::RandAugment& op) {
  SampleRandom random = Random();
  const double width = plan_.width;
  const double height = plan_.height;
  const auto magnitude = [&](double from, double to) {
    return static_cast<double>(Linspace(static_cast<float>(from), static_cast<float>(to),
                                        op.num_magnitude_bins, op.magnitude));
  };
  const auto add_affine = [&](Kind kind, double factor, const std::array<double, 6>& matrix) {
    Step& step = AddFactor(kind, factor);
    step.matrix = matrix;
    step.interpolation = op.interpolation;
    step.fill = op.fill;
  };
  for (uint32_t i = 0; i < op.num_ops; ++i) {
    const int64_t choice = random.Int(0, 14);
    const double sign = random.Int(0, 2) == 0 ? 1.0 : -1.0;
    switch (choice) {
      case 1: {
        const double m = sign * magnitude(0.0, 0.3);
        add_affine(Kind::kShearX, m, InverseAffine(0, 0, 0, 0, Degrees(std::atan(m)), 0));
        break;
      }
      case 2: {
        const double m = sign * magnitude(0.0, 0.3);
        add_affine(Kind::kShearY, m, InverseAffine(0, 0, 0, 0, 0, Degrees(std::atan(m))));
        break;
      }
      case 3: {
        const double m = sign * magnitude(0.0, 150.0 / 331.0 * width);
        add_affine(Kind::kTranslateX, m,
                   InverseAffine(width * 0.5, height * 0.5, std::trunc(m), 0, 0, 0));
        break;
      }
      case 4: {
        const double m = sign * magnitude(0.0, 150.0 / 331.0 * height);
        add_affine(Kind::kTranslateY, m,
                   InverseAffine(width * 0.5, height * 0.5, 0, std::trunc(m), 0, 0));
        break;
      }
      case 5: {
        const double m = sign * magnitude(0.0, 30.0);
        if (m != 0) add_affine(Kind::kRotate, m, Rotation(m, width, height));
        break;
      }
      case 6:
        AddFactor(Kind::kBrightness, 1.0 + sign * magnitude(0.0, 0.9));
        break;
      case 7:
        AddFactor(Kind::kSaturation, 1.0 + sign * magnitude(0.0, 0.9));
        break;
      case 8:
        AddFactor(Kind::kContrast, 1.0 + sign * magnitude(0.0, 0.9));
        break;
      case 9:
        AddFactor(Kind::kSharpness, 1.0 + sign * magnitude(0.0, 0.9));
        break;
      case 10: {
        const auto bin = static_cast<float>(op.magnitude);
        const auto per_bit = static_cast<float>((op.num_magnitude_bins - 1) / 4.0);
        AddFactor(Kind::kPosterize, 8 - std::nearbyint(bin / per_bit));
        break;
      }
      case 11:
        AddFactor(Kind::kSolarize, magnitude(255.0, 0.0));
        break;
      case 12:
        Add(Kind::kAutoContrast);
        break;
      case 13:
        Add(Kind::kEqualize);
        break;
      default:  // Identity
        break;
    }
  }
  return {};
}

}  // namespace

std::string_view StepName(Kind kind) {
  constexpr std::string_view kNames[] = {
      "crop",      "resize",      "flip_x",       "flip_y",    "brightness",
      "contrast",  "saturation",  "hue",          "sharpness", "gray",
      "posterize", "solarize",    "autocontrast", "equalize",  "shear_x",
      "shear_y",   "translate_x", "translate_y",  "rotate",
  };
  static_assert(std::size(kNames) == static_cast<size_t>(Kind::kRotate) + 1);
  return kNames[static_cast<size_t>(kind)];
}

Status MakePlan(const TransformSpec& spec, const ImageInfo& info, const SampleKey& key,
                Plan& plan) {
  return Planner(spec, info, key, plan).Run();
}

}  // namespace forebay
