// All coefficients of an image, for files that hold them in several scans: progressive ones, and
// sequential ones with a scan for each component.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "base/status.h"
#include "decode/jpeg_header.h"
#include "decode/jpeg_huffman.h"
#include "decode/jpeg_segment.h"

namespace forebay::jpeg {

// Whether the tables that `scan` needs are there. kUnimplemented where a Huffman table is missing,
// as in frames of motion JPEG.
Status CheckTables(const Header& header, const Scan& scan);

// Reuses its memory from image to image.
class Coefficients {
 public:
  // Reads all scans, from `scan` on, which `header` led to.
  Status Read(std::span<const uint8_t> file, const Header& header, const Scan& scan,
              Segment& segment);

  // kDataLoss when a file of that many bytes cannot hold the image.
  static Status CheckSize(const Header& header, size_t file_bytes);
  // The most that Read allocates for such an image.
  static uint64_t ScratchBytes(const Header& header);

  // After Read: 64 coefficients in natural order, 64-byte aligned; the next block follows.
  const int16_t* Block(uint32_t c, uint32_t x, uint32_t y) const {
    return blocks_ + (planes_[c].first + size_t{y} * planes_[c].stride + x) * 64;
  }
  const uint16_t* Quant(uint32_t c) const { return planes_[c].quant.data(); }

 private:
  struct Plane {
    size_t first = 0;     // block
    uint32_t stride = 0;  // in blocks
    bool seen = false;
    alignas(32) std::array<uint16_t, 64> quant{};
  };

  Status ReadOne(std::span<const uint8_t> file, size_t& at, Segment& segment);
  template <typename ReadBlock>
  Status ForEachBlock(std::span<const uint8_t> file, size_t& at, Segment& segment,
                      ReadBlock&& read);

  Header header_;  // its tables change from scan to scan
  Scan scan_;
  std::array<Plane, kMaxComponents> planes_;
  std::vector<int16_t> memory_;
  int16_t* blocks_ = nullptr;      // in memory_, aligned
  std::vector<uint64_t> nonzero_;  // a bit for each AC coefficient; progressive only
  std::array<SymbolTable, 4> dc_;
  std::array<SymbolTable, 4> ac_;   // progressive
  std::array<AcTable, 4> fast_ac_;  // sequential
  std::array<uint32_t, kMaxComponents> predictor_{};
  uint32_t end_of_band_ = 0;  // blocks that have no further coefficient in this scan
};

}  // namespace forebay::jpeg
