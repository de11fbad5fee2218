// From samples of the components to RGBX rows: upsampling as libjpeg-turbo does it by default (the
// triangle filter where a factor of two allows it, repetition elsewhere) and its colour conversion.
#pragma once

#include <cstddef>
#include <cstdint>

#include "decode/jpeg_header.h"

namespace forebay::jpeg {

enum class Upsample : uint8_t {
  kNone,
  kH2V1,  // triangle filter in x
  kH2V2,  // in both
  kH1V2,  // in y
  kBox,   // repeat
};

struct ColorKernels {
  // out[2 i] and out[2 i + 1] for i in 0..count-1, from in[-1..count]. Writes and reads up to 32
  // bytes more than that, as all of these do.
  void (*h2v1)(const uint8_t* in, size_t count, uint8_t* out);
  // The same from the nearer and the farther of two rows.
  void (*h2v2)(const uint8_t* near, const uint8_t* far, size_t count, uint8_t* out);
  // `lower`: the output row is the lower one of the two that `near` gives.
  void (*h1v2)(const uint8_t* near, const uint8_t* far, bool lower, size_t count, uint8_t* out);
  void (*ycc)(const uint8_t* y, const uint8_t* cb, const uint8_t* cr, size_t count, uint8_t* rgbx);
  void (*rgb)(const uint8_t* r, const uint8_t* g, const uint8_t* b, size_t count, uint8_t* rgbx);
};
const ColorKernels& Colors(bool simd);

// CMYK to PIL's RGB, which takes all such files for inverted, as Adobe writes them. `rgbx` holds
// the file's C, M and Y, or (`rgb`) what YCCK gives before libjpeg inverts it; changed in place.
void CmykToRgb(const uint8_t* k, bool rgb, size_t count, uint8_t* rgbx);

}  // namespace forebay::jpeg
