// Huffman decoding, the heart of the JPEG decoder.
//
// One look-up of kAcBits bits gives up to two coefficients with their runs, or, where a block is
// only passed over, as many as those bits hold.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include "base/status.h"
#include "decode/jpeg_header.h"
#include "decode/jpeg_segment.h"

namespace forebay::jpeg {

inline constexpr uint32_t kAcBits = 12;
inline constexpr uint32_t kSymbolBits = 9;
inline constexpr uint32_t kSkipBits = 12;
// What an end of block adds to the position: past everything that a run can reach.
inline constexpr uint32_t kEndOfBlock = 128;

// The codes of one table by their length.
struct CodeLengths {
  std::array<int32_t, 17> last{};    // the last code of each length, or -1
  std::array<int32_t, 17> offset{};  // code + offset: place in `symbols`
  std::array<uint8_t, 256> symbols{};

  // kDataLoss where the lengths are those of no code.
  Status Set(const HuffmanSpec& spec);
  // The symbol of the code that the high 16 bits of `bits` begin with, its length to `length`; -1
  // for none. Tries lengths from `from` on.
  int32_t Find(uint32_t bits, uint32_t from, uint32_t& length) const {
    for (uint32_t l = from; l <= 16; ++l) {
      const int32_t code = static_cast<int32_t>(bits >> (16 - l));
      if (code <= last[l]) {
        length = l;
        return symbols[static_cast<size_t>(code + offset[l])];
      }
    }
    return -1;
  }
};

class SymbolTable {
 public:
  // kDataLoss for a symbol above `highest` as well.
  Status Set(const HuffmanSpec& spec, uint32_t highest);
  // The symbol, its bits taken; -1 for none. At least 16 bits must be there.
  FOREBAY_JPEG_INLINE int32_t Symbol(BitReader& in) const {
    const uint32_t entry = fast_[in.Peek(kSymbolBits)];
    if (__builtin_expect(entry != 0, 1)) {
      in.Drop(entry & 255);
      return static_cast<int32_t>(entry >> 8);
    }
    return Slow(in);
  }

 private:
  int32_t Slow(BitReader& in) const;
  std::array<uint16_t, 1 << kSymbolBits> fast_{};  // length | symbol << 8; 0: a longer code
  CodeLengths codes_;
  HuffmanSpec spec_;  // what it was made from
};

// `entry` of AcTable::pairs: bits of both coefficients | bits of the first << 8 | advance of the
// first << 16 | of the second << 24 | value of the first << 32 | of the second << 48. The second's
// advance is 0, and its value the first's, where it does not fit. The first's advance is 0 where
// nothing fits: the value is then the symbol, and the bits of the first those of its code, or 0 for
// a longer one.
class AcTable {
 public:
  Status Set(const HuffmanSpec& spec);
  // Builds `skip`, once for each table.
  void PrepareSkip();

  alignas(64) std::array<uint64_t, 1 << kAcBits> pairs{};
  // Bits | advance << 8 of all coefficients that fit; 0: none does.
  alignas(64) std::array<uint16_t, 1 << kSkipBits> skip{};

  // For a coefficient that no table holds: its advance (or 0 for no code) and value, bits taken.
  uint32_t Slow(BitReader& in, uint64_t entry, int32_t& value) const;

 private:
  CodeLengths codes_;
  HuffmanSpec spec_;
  bool skip_ready_ = false;
};

// A number of `size` bits as JPEG writes it: without its sign, which the first bit shows.
FOREBAY_JPEG_INLINE int32_t Extend(uint32_t bits, uint32_t size) {
  const uint32_t half = 1u << size >> 1;
  return static_cast<int32_t>(bits - (bits < half ? (1u << size) - 1 : 0));
}

// The difference of a block's DC coefficient; false: no code.
FOREBAY_JPEG_INLINE bool ReadDc(BitReader& in, const SymbolTable& table, uint32_t& predictor) {
  in.Refill();
  const int32_t size = table.Symbol(in);
  if (__builtin_expect(size < 0, 0)) return false;
  const uint32_t bits = in.Take(static_cast<uint32_t>(size));
  predictor += static_cast<uint32_t>(Extend(bits, static_cast<uint32_t>(size)));
  return true;
}

// The AC coefficients of a block to `block` (65 values: the last one is scratch), which must be
// zero. False: no code, or a run past the block's end. `empty` says whether there were none.
FOREBAY_JPEG_INLINE bool ReadAc(BitReader& in, const AcTable& table, int16_t* block, bool& empty) {
  BitReader reader = in;
  uint32_t k = 0;
  uint64_t entry;
  uint32_t first;
  uint32_t second;
  while (true) {
    reader.Refill();
#pragma GCC unroll 4
    for (uint32_t i = 0; i < 4; ++i) {
      entry = table.pairs[reader.buffer >> (64 - kAcBits)];
      first = k + (static_cast<uint32_t>(entry >> 16) & 255);
      if (__builtin_expect(first == k, 0)) goto slow;
      second = first + (static_cast<uint32_t>(entry >> 24) & 255);
      block[kNaturalOrder[first]] = static_cast<int16_t>(entry >> 32);
      block[kNaturalOrder[second]] = static_cast<int16_t>(entry >> 48);
      if (second >= 63) goto end;
      k = second;
      reader.buffer <<= entry & 63;
      reader.bits -= static_cast<uint32_t>(entry & 255);
    }
    continue;
  slow:
    reader.Refill();
    int32_t value;
    const uint32_t advance = table.Slow(reader, entry, value);
    if (advance == 0) {
      in = reader;
      return false;
    }
    k += advance;
    block[kNaturalOrder[k]] = static_cast<int16_t>(value);
    if (k >= 63) {
      empty = false;
      in = reader;
      return k == 63 || k >= kEndOfBlock;
    }
  }
end:
  empty = first == kEndOfBlock;
  // The second coefficient of an entry may be bits of the next block.
  const bool whole = first >= 63;
  const uint32_t last = whole ? first : second;
  reader.Drop(static_cast<uint32_t>(whole ? entry >> 8 : entry) & 63);
  in = reader;
  return last == 63 || last >= kEndOfBlock;
}

// Passes over the AC coefficients of a block.
FOREBAY_JPEG_INLINE bool SkipAc(BitReader& in, const AcTable& table) {
  BitReader reader = in;
  uint32_t k = 0;
  while (true) {
    reader.Refill();
    uint32_t entry;
    uint32_t next;
#pragma GCC unroll 4
    for (uint32_t i = 0; i < 4; ++i) {
      entry = table.skip[reader.buffer >> (64 - kSkipBits)];
      next = k + (entry >> 8);
      if (__builtin_expect(next >= 63, 0)) goto end;
      if (__builtin_expect(entry == 0, 0)) goto single;
      k = next;
      reader.buffer <<= entry & 63;
      reader.bits -= entry & 255;
    }
    continue;
  end:
    if (next >= kEndOfBlock && next < kEndOfBlock + 63) {
      reader.Drop(entry & 63);
      in = reader;
      return true;
    }
  single:
    // A long code, or the block may end within the entry: one coefficient at a time.
    reader.Refill();
    const uint64_t pair = table.pairs[reader.buffer >> (64 - kAcBits)];
    uint32_t advance = static_cast<uint32_t>(pair >> 16) & 255;
    if (advance == 0) {
      int32_t value;
      advance = table.Slow(reader, pair, value);
      if (advance == 0) {
        in = reader;
        return false;
      }
    } else {
      reader.Drop(static_cast<uint32_t>(pair >> 8) & 63);
    }
    k += advance;
    if (k >= 63) {
      in = reader;
      return k == 63 || k >= kEndOfBlock;
    }
  }
}

}  // namespace forebay::jpeg
