// The bits of a scan.
//
// The entropy-coded bytes of a segment (from a scan's start or a restart marker to the next marker)
// are first copied without their stuffing, which costs one percent of decoding them, so that the
// bit buffer refills without a branch.
#pragma once

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <vector>

#include "base/status.h"

#define FOREBAY_JPEG_INLINE inline __attribute__((always_inline))

namespace forebay::jpeg {

// Reads bits from memory that is followed by Segment::kPadding bytes of zeros.
struct BitReader {
  uint64_t buffer = 0;  // the next bit is the highest one
  // How many of `buffer` count, in the low six bits; the others mean nothing, so that table entries
  // can be subtracted as they are.
  uint32_t bits = 0;
  const uint8_t* next = nullptr;
  const uint8_t* end = nullptr;

  // At least 56 bits after it.
  FOREBAY_JPEG_INLINE void Refill() {
    uint64_t word;
    std::memcpy(&word, next, 8);
    if constexpr (std::endian::native == std::endian::little) word = __builtin_bswap64(word);
    buffer |= word >> (bits & 63);
    next += ~bits >> 3 & 7;
    bits |= 56;
  }
  // Only the low six bits of `count` count.
  FOREBAY_JPEG_INLINE void Drop(uint32_t count) {
    buffer <<= count & 63;
    bits -= count;
  }
  FOREBAY_JPEG_INLINE uint32_t Peek(uint32_t count) const {  // 1..32
    return static_cast<uint32_t>(buffer >> (64 - count));
  }
  // 0..16 bits, taken.
  FOREBAY_JPEG_INLINE uint32_t Take(uint32_t count) {
    const uint32_t value = static_cast<uint32_t>(buffer >> 1 >> (63 - count));
    Drop(count);
    return value;
  }
  FOREBAY_JPEG_INLINE bool Overrun() const { return (next - end) * 8 > std::ptrdiff_t{bits & 63}; }
};

// The bytes of one segment without stuffing.
class Segment {
 public:
  // More than one MCU can take: ten blocks of 64 coefficients of 31 bits.
  static constexpr size_t kPadding = 4096;

  // Reads from `at` to the next marker, and leaves `at` there (or at the file's end).
  BitReader Read(std::span<const uint8_t> file, size_t& at);

 private:
  std::vector<uint8_t> bytes_;
};

// Follows a scan over its restart markers.
class SegmentReader {
 public:
  // `interval` in MCUs, 0: no restarts. `memory` must outlive it.
  SegmentReader(std::span<const uint8_t> file, size_t start, uint32_t interval, Segment& memory);

  // Calls `run(BitReader&, from, to, restarted)` for parts of begin..end between restarts;
  // `restarted`: predictions begin anew. `run` returns false where the bits make no sense.
  template <typename RunPart>
  Status Run(uint32_t begin, uint32_t end, RunPart&& run) {
    while (begin < end) {
      bool restarted = false;
      if (left_ == 0) {
        FOREBAY_RETURN_IF_ERROR(Restart());
        restarted = true;
      }
      const uint32_t part = static_cast<uint32_t>(std::min<uint64_t>(left_, end - begin));
      if (!run(bits_, begin, begin + part, restarted)) return Broken();
      left_ -= part;
      begin += part;
    }
    return Status();
  }

  // Where the scan's last segment ended: a marker, or the end of the file.
  size_t at() const { return at_; }

 private:
  Status Restart();
  Status Broken() const;

  std::span<const uint8_t> file_;
  size_t start_;
  size_t at_;
  uint32_t interval_;
  uint64_t left_;  // MCUs to the next restart
  uint32_t number_ = 0;
  Segment& memory_;
  BitReader bits_;
};

}  // namespace forebay::jpeg
