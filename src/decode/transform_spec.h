// What happens to an image between its decoding and its place in the batch: torchvision's
// transforms by their names, with the meaning they have on PIL images.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string_view>
#include <variant>
#include <vector>

#include "base/status.h"
#include "decode/resize.h"

namespace forebay {
namespace ops {

struct Range {
  double lo = 0;
  double hi = 0;
};
using Color = std::array<uint8_t, 3>;

struct RandomResizedCrop {
  uint32_t height = 0;
  uint32_t width = 0;
  Range scale{0.08, 1.0};
  Range ratio{3.0 / 4.0, 4.0 / 3.0};
  Interpolation interpolation = Interpolation::kBilinear;
  PassOrder pass_order = PassOrder::kPillow13;
};
struct Resize {
  uint32_t height = 0;  // or the shorter edge, when width is 0
  uint32_t width = 0;
  uint32_t max_size = 0;  // of the longer edge; 0: none
  Interpolation interpolation = Interpolation::kBilinear;
  PassOrder pass_order = PassOrder::kPillow13;
};
// A smaller image is padded with black.
struct CenterCrop {
  uint32_t height = 0;
  uint32_t width = 0;
};
struct RandomCrop {
  uint32_t height = 0;
  uint32_t width = 0;
  std::array<uint32_t, 4> padding{};  // left, top, right, bottom
  bool pad_if_needed = false;
  Color fill{};
};
struct RandomHorizontalFlip {
  double p = 0.5;
};
struct RandomVerticalFlip {
  double p = 0.5;
};
// Ranges of the factors; none: not changed. The four run in a random order.
struct ColorJitter {
  std::optional<Range> brightness;
  std::optional<Range> contrast;
  std::optional<Range> saturation;
  std::optional<Range> hue;
};
// To three equal channels.
struct Grayscale {};
struct RandomGrayscale {
  double p = 0.1;
};
struct RandAugment {
  uint32_t num_ops = 2;
  uint32_t magnitude = 9;
  uint32_t num_magnitude_bins = 31;
  Interpolation interpolation = Interpolation::kNearest;
  Color fill{};
};
// To float, divided by 255. Without it the output is uint8.
struct ToTensor {
  bool multiply = false;  // by 1 / 255 instead, as v2's ToDtype does: another last bit
};
struct Normalize {
  std::array<float, 3> mean{};
  std::array<float, 3> std{1, 1, 1};
};

using Op = std::variant<RandomResizedCrop, Resize, CenterCrop, RandomCrop, RandomHorizontalFlip,
                        RandomVerticalFlip, ColorJitter, Grayscale, RandomGrayscale, RandAugment,
                        ToTensor, Normalize>;

}  // namespace ops

// "RandomResizedCrop", ...
std::string_view OpName(const ops::Op& op);

enum class DType : uint8_t { kUint8, kFloat32, kFloat16, kBfloat16 };
enum class Layout : uint8_t { kChw, kHwc };

uint32_t DTypeBytes(DType dtype);
std::string_view DTypeName(DType dtype);

struct OutputSpec {
  DType dtype = DType::kFloat32;
  Layout layout = Layout::kChw;
};

struct OutputShape {
  uint32_t height = 0;
  uint32_t width = 0;
  uint32_t channels = 3;
  bool operator==(const OutputShape&) const = default;
};

// In the order in which they are applied. After ToTensor only Normalize and flips may come.
struct TransformSpec {
  std::vector<ops::Op> ops;
  // Parameters out of their range, or an order that torchvision would refuse.
  Status Validate() const;
  // The size that every image comes out with; kInvalidArgument with the remedy when images of
  // different sizes would come out with different ones.
  Result<OutputShape> Shape() const;
};

}  // namespace forebay
