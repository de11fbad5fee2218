#include "decode/jpeg_huffman.h"

#include <algorithm>

namespace forebay::jpeg {
namespace {

constexpr uint64_t Single(uint32_t bits, uint32_t advance, int32_t value) {
  const uint64_t value16 = static_cast<uint16_t>(value);
  return bits | uint64_t{bits} << 8 | uint64_t{advance} << 16 | value16 << 32 | value16 << 48;
}
constexpr uint32_t BitsOf(uint64_t entry) { return static_cast<uint32_t>(entry >> 8) & 255; }
constexpr uint32_t AdvanceOf(uint64_t entry) { return static_cast<uint32_t>(entry >> 16) & 255; }

// What a symbol of an AC table does to the position in the block.
constexpr uint32_t Advance(uint32_t symbol) {
  if ((symbol & 15) != 0) return (symbol >> 4) + 1;
  return symbol == 0xF0 ? 16 : kEndOfBlock;
}

}  // namespace

Status CodeLengths::Set(const HuffmanSpec& spec) {
  uint32_t code = 0;
  int32_t place = 0;
  for (uint32_t length = 1; length <= 16; ++length) {
    const uint32_t count = spec.counts[length - 1];
    offset[length] = place - static_cast<int32_t>(code);
    code += count;
    place += static_cast<int32_t>(count);
    last[length] = count == 0 ? -1 : static_cast<int32_t>(code) - 1;
    // No code is all ones.
    if (count != 0 && code >= 1u << length) {
      return Status(Code::kDataLoss, "JPEG: a Huffman table with too many codes");
    }
    code <<= 1;
  }
  symbols = spec.symbols;
  return Status();
}

Status SymbolTable::Set(const HuffmanSpec& spec, uint32_t highest) {
  if (spec == spec_) return Status();
  spec_ = HuffmanSpec();
  FOREBAY_RETURN_IF_ERROR(codes_.Set(spec));
  fast_.fill(0);
  size_t place = 0;
  uint32_t code = 0;
  for (uint32_t length = 1; length <= 16; ++length, code <<= 1) {
    for (uint32_t i = 0; i < spec.counts[length - 1]; ++i, ++code) {
      const uint32_t symbol = spec.symbols[place++];
      if (symbol > highest)
        return Status(Code::kDataLoss, "JPEG: a Huffman table of other symbols");
      if (length > kSymbolBits) continue;
      const uint32_t shift = kSymbolBits - length;
      std::fill_n(fast_.begin() + (code << shift), size_t{1} << shift,
                  static_cast<uint16_t>(length | symbol << 8));
    }
  }
  spec_ = spec;
  return Status();
}

int32_t SymbolTable::Slow(BitReader& in) const {
  uint32_t length = 0;
  const int32_t symbol = codes_.Find(in.Peek(16), kSymbolBits + 1, length);
  in.Drop(length);
  return symbol;
}

Status AcTable::Set(const HuffmanSpec& spec) {
  if (spec == spec_) return Status();
  spec_ = HuffmanSpec();
  skip_ready_ = false;
  FOREBAY_RETURN_IF_ERROR(codes_.Set(spec));
  std::array<uint64_t, 1 << kAcBits> singles{};
  size_t place = 0;
  uint32_t code = 0;
  for (uint32_t length = 1; length <= kAcBits; ++length, code <<= 1) {
    for (uint32_t i = 0; i < spec.counts[length - 1]; ++i, ++code) {
      const uint32_t symbol = spec.symbols[place++];
      const uint32_t size = symbol & 15;
      const uint32_t shift = kAcBits - length;
      uint64_t* out = &singles[size_t{code} << shift];
      if (size > shift) {
        std::fill_n(out, size_t{1} << shift, uint64_t{length} << 8 | uint64_t{symbol} << 32);
        continue;
      }
      for (uint32_t bits = 0; bits < 1u << size; ++bits) {
        const uint64_t entry = Single(length + size, Advance(symbol), Extend(bits, size));
        out = std::fill_n(out, size_t{1} << (shift - size), entry);
      }
    }
  }
  for (size_t i = 0; i < pairs.size(); ++i) {
    const uint64_t first = singles[i];
    pairs[i] = first;
    const uint32_t advance = AdvanceOf(first);
    if (advance == 0 || advance == kEndOfBlock) continue;
    const uint32_t bits = BitsOf(first);
    const uint64_t second = singles[(i << bits) & (pairs.size() - 1)];
    const uint32_t both = bits + BitsOf(second);
    if (AdvanceOf(second) == 0 || both > kAcBits) continue;
    pairs[i] = both | uint64_t{bits} << 8 | uint64_t{advance} << 16 |
               uint64_t{AdvanceOf(second)} << 24 | (first >> 32 & 0xFFFF) << 32 |
               second >> 48 << 48;
  }
  spec_ = spec;
  return Status();
}

void AcTable::PrepareSkip() {
  if (skip_ready_) return;
  skip_ready_ = true;
  static_assert(kSkipBits >= kAcBits);
  for (size_t i = 0; i < skip.size(); ++i) {
    uint32_t bits = 0;
    uint32_t advance = 0;
    while (bits < kSkipBits) {
      const size_t rest = (i << bits) & (skip.size() - 1);
      const uint64_t entry = pairs[rest >> (kSkipBits - kAcBits)];
      const uint32_t more = AdvanceOf(entry);
      if (more == 0 || bits + BitsOf(entry) > kSkipBits) break;
      if (advance + (more == kEndOfBlock ? 0 : more) > 62) break;
      advance += more;
      bits += BitsOf(entry);
      if (more == kEndOfBlock) break;
    }
    skip[i] = static_cast<uint16_t>(bits | advance << 8);
  }
}

uint32_t AcTable::Slow(BitReader& in, uint64_t entry, int32_t& value) const {
  uint32_t length = BitsOf(entry);
  int32_t symbol = static_cast<int32_t>(entry >> 32 & 255);
  if (length == 0) {
    symbol = codes_.Find(in.Peek(16), kAcBits + 1, length);
    if (symbol < 0) return 0;
  }
  in.Drop(length);
  const uint32_t size = static_cast<uint32_t>(symbol) & 15;
  value = Extend(in.Take(size), size);
  return Advance(static_cast<uint32_t>(symbol));
}

}  // namespace forebay::jpeg
