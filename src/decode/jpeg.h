// JPEG, decoded by code of our own: the pixels are those of libjpeg-turbo's default (slow integer
// DCT, smooth chroma), also at the edges of a part of the image.
//
// Baseline, extended sequential and progressive files of 8 bits; gray, YCbCr, RGB, CMYK and YCCK.
// What is left out (arithmetic coding, 12 bits, lossless) goes to libjpeg-turbo where the build
// has it, and is kUnimplemented elsewhere.
#pragma once

#include <memory>

#include "decode/image.h"

namespace forebay {

std::unique_ptr<ImageReader> MakeJpegReader();

namespace jpeg {
// Without the fallback; `simd` off takes the plain code, which gives the same bits.
std::unique_ptr<ImageReader> MakeOwnReader(bool simd = true);
}  // namespace jpeg

}  // namespace forebay
