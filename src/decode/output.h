// OutputWriter: from RGBX rows to the sample's place in the batch, in its type and layout.
//
// ToTensor and Normalize are functions of one byte, so they are tables: float32 values are those of
// torch's x.float().div(255).sub(mean).div(std); float16 and bfloat16 are these, rounded to even.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "decode/transform_spec.h"

namespace forebay {

// Safe for concurrent use by multiple threads once made.
class OutputWriter {
 public:
  // The spec has been validated, and the output's type fits it.
  OutputWriter(const TransformSpec& spec, const OutputSpec& output, OutputShape shape);

  // Row y of the sample whose memory starts at `sample`. 64 bytes after the row may be read.
  void Row(std::byte* sample, uint32_t y, const uint8_t* rgbx, bool flip_x) const;
  size_t SampleBytes() const;

 private:
  template <typename T>
  void WriteTable(std::byte* sample, uint32_t y, const uint8_t* rgbx, bool flip_x,
                  const std::array<std::array<T, 256>, 3>& table) const;
  void WriteBytes(std::byte* sample, uint32_t y, const uint8_t* rgbx, bool flip_x) const;

  const OutputSpec output_;
  const OutputShape shape_;
  std::array<std::array<float, 256>, 3> floats_{};
  std::array<std::array<uint16_t, 256>, 3> halves_{};
};

uint16_t ToFloat16(float value);
uint16_t ToBfloat16(float value);

}  // namespace forebay
