// The inner loops of OutputWriter, for AVX2. Each does as many pixels of a row as fill its vectors
// and returns how many; the caller does the rest. With `flip` the row is read from its end.
#pragma once

#include <cstddef>
#include <cstdint>

namespace forebay::kernels {

// (x / 255 - mean) / std. Quotients are products with the reciprocal, corrected by one step of
// Newton: almost always the rounded quotient, and the caller checks all 256 values.
struct Scaling {
  bool multiply = false;   // x * (1 / 255) instead of x / 255
  bool normalize = false;  // else x / 255 is all
  float mean[3] = {0, 0, 0};
  float std[3] = {1, 1, 1};
};

enum class FloatType : uint8_t { kFloat32, kFloat16, kBfloat16 };

// True when the processor has what these need: AVX2, FMA and F16C.
bool HaveOutputKernels();

// To three planes, or to pixels of three values.
size_t FloatsToPlanes(const uint8_t* rgbx, size_t width, bool flip, const Scaling& scaling,
                      FloatType type, void* r, void* g, void* b);
size_t FloatsToPixels(const uint8_t* rgbx, size_t width, bool flip, const Scaling& scaling,
                      FloatType type, void* out);
size_t BytesToPlanes(const uint8_t* rgbx, size_t width, bool flip, uint8_t* r, uint8_t* g,
                     uint8_t* b);
size_t BytesToPixels(const uint8_t* rgbx, size_t width, bool flip, uint8_t* out);

}  // namespace forebay::kernels
