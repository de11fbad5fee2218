// The inner loops of the colour operations, on one row of RGBX pixels. Written so that compilers
// vectorise them; each is compiled for AVX-512, AVX2 and the base processor, with the same bits:
// no operation is contracted or reordered.
#pragma once

#include <cstddef>
#include <cstdint>

#include "decode/resize.h"

namespace forebay::kernels {

// Image.blend of every byte with one value: (rgbx, width, degenerate, factor).
using BlendValueKernel = void (*)(uint8_t*, size_t, float, float);
BlendValueKernel BlendValue(SimdLevel level);
// Image.blend of every pixel with its gray: (rgbx, width, factor).
using BlendGrayKernel = void (*)(uint8_t*, size_t, float);
BlendGrayKernel BlendGray(SimdLevel level);
// The pixels' gray, in three channels.
using GrayKernel = void (*)(uint8_t*, size_t);
GrayKernel Gray(SimdLevel level);
// The sum of the pixels' gray.
using GraySumKernel = uint64_t (*)(const uint8_t*, size_t);
GraySumKernel GraySum(SimdLevel level);
// PIL's conversion to HSV and back, with the hue moved in between: (rgbx, width, shift).
using ShiftHueKernel = void (*)(uint8_t*, size_t, uint8_t);
ShiftHueKernel ShiftHue(SimdLevel level);

}  // namespace forebay::kernels
