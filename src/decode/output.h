// OutputWriter: from RGBX rows to the sample's place in the batch, in its type and layout.
//
// float32 values are those of torch's x.float().div(255).sub(mean).div(std); float16 and bfloat16
// are these, rounded to even. A value depends on one byte, so a table of 256 says what it must be.
// The fast way computes it, and is used only where it was found to agree with the whole table.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include "decode/output_kernels.h"
#include "decode/transform_spec.h"

namespace forebay {

// Safe for concurrent use by multiple threads once made.
class OutputWriter {
 public:
  // The spec has been validated, and the output's type fits it.
  OutputWriter(const TransformSpec& spec, const OutputSpec& output, OutputShape shape);

  // Row y of the sample whose memory starts at `sample`.
  void Row(std::byte* sample, uint32_t y, const uint8_t* rgbx, bool flip_x) const;
  size_t SampleBytes() const;
  // Values are computed, not looked up.
  bool fast() const { return fast_; }

 private:
  template <typename T>
  using Tables = std::array<std::array<T, 256>, 3>;

  template <typename T>
  void Write(std::byte* sample, uint32_t y, const uint8_t* rgbx, bool flip_x,
             const Tables<T>& tables) const;
  template <typename T>
  bool Agrees(const Tables<T>& tables) const;

  const OutputSpec output_;
  const OutputShape shape_;
  kernels::FloatType type_ = kernels::FloatType::kFloat32;
  kernels::Scaling scaling_;
  bool fast_ = false;
  Tables<float> floats_{};
  Tables<uint16_t> halves_{};
  Tables<uint8_t> bytes_{};
};

uint16_t ToFloat16(float value);
uint16_t ToBfloat16(float value);

}  // namespace forebay
