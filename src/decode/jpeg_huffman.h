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

inline constexpr uint32_t kAcBits = 13;
inline constexpr uint32_t kSymbolBits = 9;
inline constexpr uint32_t kSkipBits = 13;
// What an end of block adds to the position: more than any run.
inline constexpr uint32_t kEndOfBlock = 63;
// The same in AcTable::skip.
inline constexpr uint32_t kSkipEnd = 128;

// The codes of one table by their length.
struct CodeLengths {
  std::array<int32_t, 17> last{};    // the last code of each length, or -1
  std::array<int32_t, 17> offset{};  // code + offset: place in `symbols`
  std::array<uint8_t, 256> symbols{};

  // kDataLoss where the lengths are those of no code.
  Status Set(const HuffmanSpec& spec);
  // Length | symbol << 8 of the code that the 16 bits `bits` begin with; 0 for none. Tries lengths
  // from `from` on.
  uint32_t Find(uint32_t bits, uint32_t from) const;
};

class SymbolTable {
 public:
  // kDataLoss for a symbol above `highest` as well.
  Status Set(const HuffmanSpec& spec, uint32_t highest);
  // The symbol, its bits taken; -1 for none. At least 16 bits must be there.
  FOREBAY_JPEG_INLINE int32_t Symbol(BitReader& in) const {
    uint32_t entry = fast_[in.Peek(kSymbolBits)];
    if (__builtin_expect(entry == 0, 0)) {
      entry = codes_.Find(in.Peek(16), kSymbolBits + 1);
      if (entry == 0) return -1;
    }
    in.Drop(entry);
    return static_cast<int32_t>(entry >> 8);
  }

 private:
  std::array<uint16_t, 1 << kSymbolBits> fast_{};  // length | symbol << 8; 0: a longer code
  CodeLengths codes_;
  HuffmanSpec spec_;  // what it was made from
};

// Up to two coefficients in 32 bits, so that the tables of luma and chroma nearly fit in the first
// cache: bits of both (0..5), advance of the first (6..11) and of the second (12..17), value of the
// second (18..23) and of the first (24..31). The second's advance is 0 where it does not fit;
// storing it before the first then does no harm. kLong where not even the first one fits, which
// like an end of block stores zeros past everything else.
using PairEntry = uint32_t;
constexpr uint32_t BitsOf(PairEntry entry) { return entry & 63; }
constexpr uint32_t FirstAdvance(PairEntry entry) { return entry >> 6 & 63; }
constexpr uint32_t SecondAdvance(PairEntry entry) { return entry >> 12 & 63; }
constexpr int32_t FirstValue(PairEntry entry) { return static_cast<int32_t>(entry) >> 24; }
constexpr int32_t SecondValue(PairEntry entry) { return static_cast<int32_t>(entry << 8) >> 26; }

inline constexpr PairEntry kLong = kEndOfBlock << 6 | kEndOfBlock << 12;

class AcTable {
 public:
  // `simd`: with AVX2, which the machine must have; the table is the same.
  Status Set(const HuffmanSpec& spec, bool simd);
  // Builds `skip`, once for each table, where that pays: it takes as long as it saves on five
  // thousand blocks, so not for a table that is new, unless `blocks` are to be passed over.
  void PrepareSkip(uint64_t blocks);
  bool skip_ready() const { return skip_ready_; }

  alignas(64) std::array<PairEntry, 1 << kAcBits> pairs{};
  // Of the first coefficient alone: its bits. Where even it does not fit: the bits of its code |
  // symbol << 8, or 0 for a code of more than kAcBits bits.
  std::array<uint16_t, 1 << kAcBits> first{};
  // Bits | advance << 8 of all coefficients that fit, an end of block as kSkipEnd; 0: none does.
  alignas(64) std::array<uint16_t, 1 << kSkipBits> skip{};
  CodeLengths codes;

 private:
  HuffmanSpec spec_;
  bool skip_ready_ = false;
  bool reused_ = false;  // by a second image, so most likely by many
};

// What a symbol of an AC table does to the position in the block.
constexpr uint32_t Advance(uint32_t symbol) {
  if ((symbol & 15) != 0) return (symbol >> 4) + 1;
  return symbol == 0xF0 ? 16 : kEndOfBlock;
}

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

// The symbol of a code that AcTable::pairs has no room for, or -1 for no code.
FOREBAY_JPEG_INLINE int32_t ReadLong(BitReader& in, const AcTable& table) {
  uint32_t code = table.first[in.Peek(kAcBits)];
  in.Refill();
  if (__builtin_expect(code == 0, 0)) {
    code = table.codes.Find(in.Peek(16), kAcBits + 1);
    if (code == 0) return -1;
  }
  in.Drop(code);
  return static_cast<int32_t>(code >> 8);
}

// The AC coefficients of a block to `block` (65 values: the last one is scratch), which must be
// zero; without kStore they are only passed over. False: no code, or a run past the block's end.
// `last` is set to the place, as stored, of the last one (or to a later place).
template <bool kStore = true>
FOREBAY_JPEG_INLINE bool ReadAc(BitReader& reader, const AcTable& table, int16_t* block,
                                uint32_t& last) {
  const PairEntry* const pairs = table.pairs.data();
  uint32_t k = 0;
  while (true) {
    PairEntry entry;
    uint32_t first;
    uint32_t second;
    reader.Refill();
#pragma GCC unroll 4
    for (uint32_t i = 0; i < 4; ++i) {
      entry = pairs[reader.buffer >> (64 - kAcBits)];
      first = k + FirstAdvance(entry);
      second = first + SecondAdvance(entry);
      if constexpr (kStore) {
        block[kNaturalOrder[second]] = static_cast<int16_t>(SecondValue(entry));
        block[kNaturalOrder[first]] = static_cast<int16_t>(FirstValue(entry));
      }
      if (second >= 63) goto end;
      k = second;
      reader.Drop(entry);
    }
    continue;
  end:
    if (__builtin_expect(entry != kLong, 1)) {
      if (first < 63) {
        reader.Drop(entry);
        last = SecondAdvance(entry) == kEndOfBlock ? first : 63;
        return second == 63 || SecondAdvance(entry) == kEndOfBlock;
      }
      // What follows the first coefficient is the next block's.
      reader.Drop(table.first[reader.Peek(kAcBits)]);
      last = FirstAdvance(entry) == kEndOfBlock ? k : 63;
      return first == 63 || FirstAdvance(entry) == kEndOfBlock;
    }
    const int32_t symbol = ReadLong(reader, table);
    if (__builtin_expect(symbol < 0, 0)) return false;
    const uint32_t size = static_cast<uint32_t>(symbol) & 15;
    const uint32_t advance = Advance(static_cast<uint32_t>(symbol));
    k += advance;
    const int32_t value = Extend(reader.Take(size), size);
    if constexpr (kStore) block[kNaturalOrder[k]] = static_cast<int16_t>(value);
    if (k >= 63) {
      last = 63;
      return k == 63 || advance == kEndOfBlock;
    }
  }
}

// Passes over the AC coefficients of a block.
FOREBAY_JPEG_INLINE bool SkipAc(BitReader& reader, const AcTable& table) {
  if (!table.skip_ready()) {
    uint32_t last;
    return ReadAc<false>(reader, table, nullptr, last);
  }
  const uint16_t* const skip = table.skip.data();
  uint32_t k = 0;
  while (true) {
    reader.Refill();
    uint32_t entry;
    uint32_t next;
#pragma GCC unroll 3
    for (uint32_t i = 0; i < 3; ++i) {
      entry = skip[reader.buffer >> (64 - kSkipBits)];
      next = k + (entry >> 8);
      if (__builtin_expect(next >= 63, 0)) goto end;
      if (__builtin_expect(entry == 0, 0)) goto single;
      k = next;
      reader.Drop(entry);
    }
    continue;
  end:
    // Past the entry's coefficients and its end of block, unless the block ends before that.
    if (entry >> 8 >= kSkipEnd && next < kSkipEnd + 63) {
      reader.Drop(entry);
      return true;
    }
  single:
    // A long code, or the block may end within the entry: one coefficient at a time.
    const PairEntry pair = table.pairs[reader.Peek(kAcBits)];
    uint32_t advance = FirstAdvance(pair);
    if (pair == kLong) {
      const int32_t symbol = ReadLong(reader, table);
      if (__builtin_expect(symbol < 0, 0)) return false;
      reader.Drop(static_cast<uint32_t>(symbol) & 15);
      advance = Advance(static_cast<uint32_t>(symbol));
    } else {
      reader.Drop(table.first[reader.Peek(kAcBits)]);
    }
    k += advance;
    if (k >= 63) return k == 63 || advance == kEndOfBlock;
  }
}

}  // namespace forebay::jpeg
