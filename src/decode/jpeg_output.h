// What a rectangle needs of each component, the samples of one row of MCUs, and the pixel rows that
// they give.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "decode/image.h"
#include "decode/jpeg_color.h"
#include "decode/jpeg_header.h"
#include "decode/jpeg_scan.h"

namespace forebay::jpeg {

// Begin, then for each row of MCUs in mcus(): fill the blocks that blocks() names, Emit.
class Output {
 public:
  explicit Output(bool simd) : kernels_(Colors(simd)) {}

  // `rect` is not empty and lies inside the image, as shrunk by 1, 2, 4 or 8.
  void Begin(const Header& header, uint32_t shrink, const Rect& rect);

  // The most that Begin allocates, for any rectangle.
  static uint64_t ScratchBytes(const Header& header);

  uint32_t mcus_per_row() const { return mcus_per_row_; }
  // MCUs that hold a wanted block.
  const BlockRange& mcus() const { return mcus_; }
  // How many blocks must be passed over.
  uint64_t skipped() const { return skipped_; }
  // Samples in a row of a block.
  uint32_t size(uint32_t c) const { return planes_[c].size; }
  const BlockRange& blocks(uint32_t c) const { return planes_[c].wanted; }
  // Where the block in column blocks(c).x0 and the first row of the row of MCUs goes.
  uint8_t* samples(uint32_t c) { return planes_[c].bytes.data() + kMargin + planes_[c].stride; }
  size_t stride(uint32_t c) const { return planes_[c].stride; }

  // After the blocks of one row of MCUs are there.
  void Emit(uint32_t mcu_row, RowSink& sink);

 private:
  static constexpr size_t kMargin = 64;

  struct Plane {
    Upsample method = Upsample::kNone;
    uint32_t size = 8;
    uint32_t h_factor = 1;
    uint32_t v_factor = 1;
    uint32_t width = 0;
    uint32_t height = 0;
    uint32_t rows = 0;  // in a row of MCUs
    BlockRange wanted;
    size_t stride = 0;
    // One row from the row of MCUs before, then this one's.
    std::vector<uint8_t> bytes;
    uint32_t first = 0;         // number of the first row after the one from before
    std::vector<uint8_t> wide;  // one row, upsampled
    bool TwoRows() const { return method == Upsample::kH2V2 || method == Upsample::kH1V2; }
  };

  const uint8_t* Samples(const Plane& plane, uint32_t row, uint32_t column) const;
  // The plane's row of the output's row y, from the rectangle's first column on.
  const uint8_t* Widen(Plane& plane, uint32_t y);
  void EmitRow(uint32_t y, RowSink& sink);

  const ColorKernels& kernels_;
  ColorSpace color_ = ColorSpace::kGray;
  uint32_t count_ = 0;
  Rect rect_;
  uint32_t next_ = 0;  // output row
  uint64_t skipped_ = 0;
  uint32_t mcus_per_row_ = 0;
  BlockRange mcus_;
  std::array<Plane, kMaxComponents> planes_;
  std::vector<uint8_t> row_;
};

}  // namespace forebay::jpeg
