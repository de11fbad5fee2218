// The plan of one sample: every random parameter drawn, every size known, before a pixel is read.
#pragma once

#include <array>
#include <cstdint>
#include <string_view>
#include <vector>

#include "base/status.h"
#include "decode/image.h"
#include "decode/random.h"
#include "decode/transform_spec.h"

namespace forebay {

// One deterministic operation on an image.
struct Step {
  enum class Kind : uint8_t {
    kCrop,    // x, y, width, height; what lies outside the image is `fill`
    kResize,  // width, height, interpolation
    kFlipX,
    kFlipY,
    kBrightness,  // factor, as the next four
    kContrast,
    kSaturation,
    kHue,
    kSharpness,
    kGray,
    kPosterize,  // factor: bits kept
    kSolarize,   // factor: threshold
    kAutoContrast,
    kEqualize,
    kShearX,  // these five: matrix (from output to input), interpolation, fill; factor: magnitude
    kShearY,
    kTranslateX,
    kTranslateY,
    kRotate,
  };
  Kind kind;
  uint32_t op = 0;  // its index in the spec
  int32_t x = 0;
  int32_t y = 0;
  uint32_t width = 0;  // of the result, for every kind
  uint32_t height = 0;
  Interpolation interpolation = Interpolation::kBilinear;
  PassOrder pass_order = PassOrder::kPillow13;
  double factor = 0;
  std::array<double, 6> matrix{};
  ops::Color fill{};
};

std::string_view StepName(Step::Kind kind);

struct Plan {
  std::vector<Step> steps;  // without ToTensor and Normalize
  uint32_t width = 0;       // of the result
  uint32_t height = 0;
};

// Fills `plan`, whose memory is used again. kInvalidArgument where torchvision raises: a RandomCrop
// larger than the image.
Status MakePlan(const TransformSpec& spec, const ImageInfo& info, const SampleKey& key, Plan& plan);

}  // namespace forebay
