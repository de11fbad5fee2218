#include "decode/jpeg_huffman.h"

#include <algorithm>

namespace forebay::jpeg {
namespace {

// Calls `each(symbol, length, code)` for each of `spec`.
template <typename Each>
void ForEachCode(const HuffmanSpec& spec, Each&& each) {
  size_t place = 0;
  uint32_t code = 0;
  for (uint32_t length = 1; length <= 16; ++length, code <<= 1) {
    for (uint32_t i = 0; i < spec.counts[length - 1]; ++i)
      each(spec.symbols[place++], length, code++);
  }
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

uint32_t CodeLengths::Find(uint32_t bits, uint32_t from) const {
  for (uint32_t length = from; length <= 16; ++length) {
    const int32_t code = static_cast<int32_t>(bits >> (16 - length));
    if (code > last[length]) continue;
    return length | uint32_t{symbols[static_cast<size_t>(code + offset[length])]} << 8;
  }
  return 0;
}

Status SymbolTable::Set(const HuffmanSpec& spec, uint32_t highest) {
  if (spec == spec_) return Status();
  spec_ = HuffmanSpec();
  FOREBAY_RETURN_IF_ERROR(codes_.Set(spec));
  fast_.fill(0);
  bool known = true;
  ForEachCode(spec, [&](uint32_t symbol, uint32_t length, uint32_t code) {
    known = known && symbol <= highest;
    if (length > kSymbolBits) return;
    const uint32_t shift = kSymbolBits - length;
    std::fill_n(fast_.begin() + (code << shift), size_t{1} << shift,
                static_cast<uint16_t>(length | symbol << 8));
  });
  if (!known) return Status(Code::kDataLoss, "JPEG: a Huffman table of other symbols");
  spec_ = spec;
  return Status();
}

Status AcTable::Set(const HuffmanSpec& spec) {
  if (spec == spec_) return Status();
  spec_ = HuffmanSpec();
  skip_ready_ = false;
  FOREBAY_RETURN_IF_ERROR(codes.Set(spec));
  std::array<PairEntry, 1 << kAcBits> singles;
  singles.fill(kLong);
  first.fill(0);
  ForEachCode(spec, [&](uint32_t symbol, uint32_t length, uint32_t code) {
    if (length > kAcBits) return;
    const uint32_t size = symbol & 15;
    const uint32_t shift = kAcBits - length;
    const size_t begin = size_t{code} << shift;
    // Values of more than 7 bits and a sign have no room, even where their bits have.
    if (size > shift || size > 7) {
      std::fill_n(&first[begin], size_t{1} << shift, static_cast<uint16_t>(length | symbol << 8));
      return;
    }
    std::fill_n(&first[begin], size_t{1} << shift, static_cast<uint16_t>(length + size));
    PairEntry* out = &singles[begin];
    for (uint32_t bits = 0; bits < 1u << size; ++bits) {
      const uint32_t value = static_cast<uint8_t>(Extend(bits, size));
      const PairEntry entry = (length + size) | Advance(symbol) << 6 | value << 24;
      out = std::fill_n(out, size_t{1} << (shift - size), entry);
    }
  });
  for (size_t i = 0; i < pairs.size(); ++i) {
    const PairEntry one = singles[i];
    pairs[i] = one;
    if (FirstAdvance(one) == kEndOfBlock) continue;
    const PairEntry two = singles[(i << BitsOf(one)) & (pairs.size() - 1)];
    const uint32_t both = BitsOf(one) + BitsOf(two);
    const int32_t value = FirstValue(two);
    if (two == kLong || both > kAcBits || value < -32 || value > 31) continue;
    pairs[i] =
        both | (one & ~63u) | FirstAdvance(two) << 12 | (static_cast<uint32_t>(value) & 63) << 18;
  }
  spec_ = spec;
  return Status();
}

void AcTable::PrepareSkip() {
  if (skip_ready_) return;
  skip_ready_ = true;
  std::array<uint16_t, 1 << kSkipBits> singles{};
  ForEachCode(spec_, [&](uint32_t symbol, uint32_t length, uint32_t code) {
    const uint32_t bits = length + (symbol & 15);
    if (bits > kSkipBits) return;
    const uint32_t advance = Advance(symbol) == kEndOfBlock ? kSkipEnd : Advance(symbol);
    std::fill_n(&singles[size_t{code} << (kSkipBits - length)], size_t{1} << (kSkipBits - length),
                static_cast<uint16_t>(bits | advance << 8));
  });
  for (size_t i = 0; i < skip.size(); ++i) {
    uint32_t bits = 0;
    uint32_t advance = 0;
    while (bits < kSkipBits && advance < kSkipEnd) {
      const uint32_t entry = singles[(i << bits) & (skip.size() - 1)];
      const uint32_t more = entry >> 8;
      if (more == 0 || bits + (entry & 255) > kSkipBits) break;
      if (more < kSkipEnd && advance + more > 62) break;
      advance += more;
      bits += entry & 255;
    }
    skip[i] = static_cast<uint16_t>(bits | advance << 8);
  }
}

}  // namespace forebay::jpeg
