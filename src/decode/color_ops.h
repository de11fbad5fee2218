// Operations on a whole RGBX image in place, with the bits of PIL's ImageEnhance and ImageOps.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "decode/resize.h"

namespace forebay {

// An RGBX image. Keeps its memory when it is made anew; 64 bytes after each row may be read.
class ScratchImage {
 public:
  void Reset(uint32_t width, uint32_t height);
  uint32_t width() const { return width_; }
  uint32_t height() const { return height_; }
  uint8_t* row(uint32_t y) { return bytes_.data() + y * stride_; }
  const uint8_t* row(uint32_t y) const { return bytes_.data() + y * stride_; }

 private:
  uint32_t width_ = 0;
  uint32_t height_ = 0;
  size_t stride_ = 0;
  std::vector<uint8_t> bytes_;
};

// ImageEnhance: 0 gives the degenerate image (black, mean gray, gray), 1 the image itself.
void AdjustBrightness(ScratchImage& image, double factor);
void AdjustContrast(ScratchImage& image, double factor);
void AdjustSaturation(ScratchImage& image, double factor);
// torchvision's adjust_hue: HSV in bytes, the hue moved by factor * 255, in [-0.5, 0.5].
void AdjustHue(ScratchImage& image, double factor);
void ToGray(ScratchImage& image);
void Posterize(ScratchImage& image, int bits);
void Solarize(ScratchImage& image, double threshold);
void AutoContrast(ScratchImage& image);
void Equalize(ScratchImage& image);

// From `in` to `out`, which is made as large.
void AdjustSharpness(const ScratchImage& in, ScratchImage& out, double factor);
// Image.transform(AFFINE): out(x, y) is in(m0 x + m1 y + m2, m3 x + m4 y + m5).
void Affine(const ScratchImage& in, ScratchImage& out, const std::array<double, 6>& matrix,
            Interpolation interpolation, const std::array<uint8_t, 3>& fill);
// The rectangle of `in` at (x, y); what lies outside `in` is `fill`.
void CropFill(const ScratchImage& in, ScratchImage& out, int32_t x, int32_t y, uint32_t width,
              uint32_t height, const std::array<uint8_t, 3>& fill);

}  // namespace forebay
