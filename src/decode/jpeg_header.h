// The markers of a JPEG file: frame, tables and scans, with every length checked.
//
// Quantisation tables are kept in natural (row by row) order, Huffman tables as they are stored.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

#include "base/status.h"

namespace forebay::jpeg {

inline constexpr uint32_t kMaxComponents = 4;
inline constexpr uint32_t kMaxBlocksInMcu = 10;

// Position in a block of the k-th coefficient as stored. The entries from 64 on point behind the
// block: a decoder may look up an index that lies beyond it and check once a block.
extern const std::array<uint8_t, 256> kNaturalOrder;

struct HuffmanSpec {
  bool present = false;
  std::array<uint8_t, 16> counts{};  // of codes of 1..16 bits
  std::array<uint8_t, 256> symbols{};
  bool operator==(const HuffmanSpec&) const = default;
};

struct QuantTable {
  bool present = false;
  alignas(32) std::array<uint16_t, 64> values{};
};

struct Component {
  uint8_t id = 0;
  uint8_t h = 1;  // sampling factors
  uint8_t v = 1;
  uint8_t quant = 0;    // which table
  uint32_t width = 0;   // in samples, without the padding to whole blocks
  uint32_t height = 0;  //
};

enum class ColorSpace : uint8_t { kGray, kRgb, kYcc, kCmyk, kYcck };

struct Scan {
  uint32_t count = 0;  // of components; 0: the file has no further scan
  std::array<uint8_t, kMaxComponents> component{};
  std::array<uint8_t, kMaxComponents> dc{};
  std::array<uint8_t, kMaxComponents> ac{};
  uint8_t first = 0;  // spectral selection and successive approximation, for progressive files
  uint8_t last = 63;
  uint8_t high = 0;
  uint8_t low = 0;
  size_t data = 0;  // where the entropy-coded bytes begin
};

struct Header {
  uint32_t width = 0;
  uint32_t height = 0;
  uint32_t count = 0;  // of components; 0: no frame yet
  bool progressive = false;
  uint8_t max_h = 1;
  uint8_t max_v = 1;
  std::array<Component, kMaxComponents> components{};
  std::array<QuantTable, 4> quant{};
  std::array<HuffmanSpec, 4> dc{};
  std::array<HuffmanSpec, 4> ac{};
  uint32_t restart_interval = 0;  // in MCUs; 0: none
  bool jfif = false;
  bool adobe = false;
  uint8_t adobe_transform = 0;

  // As libjpeg decides it.
  ColorSpace Color() const;
};

// Reads markers from `at` (0: the start of the file) to the next scan and leaves `at` where its
// data begins. Tables replace those in `header`. kUnimplemented for the kinds of JPEG that this
// decoder leaves out, kDataLoss for bytes that make no sense.
Status ReadMarkers(std::span<const uint8_t> file, size_t& at, Header& header, Scan& scan);

}  // namespace forebay::jpeg
