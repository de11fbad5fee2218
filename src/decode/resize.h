// Resampler: resizes an image row by row, with Pillow's bits.
//
// Pillow resizes 8-bit images in two passes, one an axis, with 8 bits between them and coefficients
// of 22 fractional bits. The same is done here on rows as they arrive: the pass along the row at
// once, the other as soon as the last row that an output row needs is there. Every SIMD level
// gives the same bits: a coefficient is split in parts whose products are summed exactly.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "decode/image.h"

namespace forebay {

// PIL's numbers.
enum class Interpolation : uint8_t {
  kNearest = 0,
  kLanczos = 1,
  kBilinear = 2,
  kBicubic = 3,
  kBox = 4,
  kHamming = 5,
};

// Which pass comes first. It shows in the last bit only, but it does.
enum class PassOrder : uint8_t {
  kRowsFirst,  // along each row, always: Pillow before 13
  kPillow13,   // down the columns first where the height shrinks by more than twice the width
};

enum class SimdLevel : uint8_t { kScalar, kAvx2, kVnni };
// The best that this processor has.
SimdLevel BestSimd();

// One axis of a resize.
struct AxisSpec {
  uint32_t in_size = 0;  // pixels that exist; taps beyond them are cut off
  double in_begin = 0;   // the part that is stretched to the output
  double in_end = 0;
  uint32_t out_size = 0;
  uint32_t window_begin = 0;  // the part of the output that is computed
  uint32_t window_size = 0;
};

// Coefficients of one axis, for the window. Input positions are relative to `first`.
struct AxisTaps {
  bool identity = false;  // output pixel i of the window is input pixel i
  uint32_t first = 0;     // the input that the window needs
  uint32_t count = 0;
  uint32_t stride = 0;  // coefficients an output pixel has room for, a multiple of 4
  std::vector<uint32_t> begin;
  std::vector<uint32_t> taps;
  std::vector<int32_t> coefficients;

  void Plan(const AxisSpec& axis, Interpolation interpolation);

 private:
  void PlanNearest(const AxisSpec& axis);
  template <double (*kWeight)(double)>
  void PlanFilter(const AxisSpec& axis, double reach);
  std::vector<double> weights_;
};

// Not safe for concurrent use. Keeps its memory from image to image.
class Resampler {
 public:
  explicit Resampler(SimdLevel level = BestSimd()) : level_(level) {}

  SimdLevel level() const { return level_; }
  // Begins an image. Returns the part of the input that the window needs; its rows come next.
  Rect Start(const AxisSpec& x, const AxisSpec& y, Interpolation interpolation, PassOrder order);
  // The most that Start allocates for such an image.
  static uint64_t ScratchBytes(const AxisSpec& x, const AxisSpec& y, Interpolation interpolation,
                               PassOrder order);
  // The next row of that part, RGBX; 32 bytes after it may be read. It must stay until Pop has
  // returned null.
  void Push(const uint8_t* rgbx);
  // The next row of the window, RGBX, or null until another row is pushed. 64 bytes after it may be
  // read. It stays until the next call.
  const uint8_t* Pop();

 private:
  void Horizontal(const uint8_t* rgbx, uint8_t* out);
  void PlanHorizontal();

  SimdLevel level_;
  AxisTaps x_;
  AxisTaps y_;
  uint32_t out_width_ = 0;
  uint32_t out_height_ = 0;
  bool columns_first_ = false;
  uint32_t pushed_ = 0;  // rows
  uint32_t popped_ = 0;
  size_t row_bytes_ = 0;  // of a ring slot
  uint32_t ring_ = 0;     // slots
  // In the memory below; valid since the last Start.
  uint8_t* packed_ = nullptr;        // coefficients as the SIMD kernel reads them
  uint8_t* rows_ = nullptr;          // the ring of rows after the first pass, or before it
  uint8_t* column_row_ = nullptr;    // one row between the passes, when columns come first
  uint8_t* out_ = nullptr;           // one output row
  const uint8_t* direct_ = nullptr;  // the row pushed last, when it is not kept

  std::vector<uint32_t> offsets_;       // bytes to the first tap of each output pixel
  std::vector<const uint8_t*> inputs_;  // rows that go into one output row
  std::vector<uint8_t> packed_memory_;
  std::vector<uint8_t> rows_memory_;
  std::vector<uint8_t> column_memory_;
  std::vector<uint8_t> out_memory_;
};

}  // namespace forebay
