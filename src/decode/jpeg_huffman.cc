#include "decode/jpeg_huffman.h"

#include <algorithm>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

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

using Entries = std::array<PairEntry, 1 << kAcBits>;

// pairs[i]: the entry at i with the one that follows it, where both fit.
void PairUp(const Entries& singles, Entries& pairs) {
  for (uint32_t i = 0; i < pairs.size(); ++i) {
    const PairEntry one = singles[i];
    const PairEntry two = singles[(i << BitsOf(one)) & (pairs.size() - 1)];
    const uint32_t both = BitsOf(one) + BitsOf(two);
    const uint32_t value = static_cast<uint32_t>(FirstValue(two));
    const bool fits =
        FirstAdvance(one) != kEndOfBlock && two != kLong && both <= kAcBits && value + 32 < 64;
    pairs[i] = fits ? both | (one & ~63u) | FirstAdvance(two) << 12 | (value & 63) << 18 : one;
  }
}

#if defined(__x86_64__)
// The same, three times as fast: the branches above are ones that nothing can foresee.
__attribute__((target("avx2"))) void PairUpAvx2(const Entries& singles, Entries& pairs) {
  const __m256i low6 = _mm256_set1_epi32(63);
  const __m256i end = _mm256_set1_epi32(kEndOfBlock);
  const __m256i mask = _mm256_set1_epi32(static_cast<int32_t>(pairs.size() - 1));
  __m256i index = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
  for (size_t i = 0; i < pairs.size(); i += 8) {
    const __m256i one = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(&singles[i]));
    const __m256i bits = _mm256_and_si256(one, low6);
    const __m256i rest = _mm256_and_si256(_mm256_sllv_epi32(index, bits), mask);
    const __m256i two =
        _mm256_i32gather_epi32(reinterpret_cast<const int*>(singles.data()), rest, 4);
    const __m256i both = _mm256_add_epi32(bits, _mm256_and_si256(two, low6));
    const __m256i value = _mm256_srai_epi32(two, 24);
    const __m256i advance = _mm256_and_si256(_mm256_srli_epi32(two, 6), low6);
    const __m256i pair =
        _mm256_or_si256(_mm256_or_si256(both, _mm256_andnot_si256(low6, one)),
                        _mm256_or_si256(_mm256_slli_epi32(advance, 12),
                                        _mm256_slli_epi32(_mm256_and_si256(value, low6), 18)));
    const __m256i first = _mm256_and_si256(_mm256_srli_epi32(one, 6), low6);
    const __m256i unfit = _mm256_or_si256(
        _mm256_or_si256(_mm256_cmpeq_epi32(first, end),
                        _mm256_cmpeq_epi32(two, _mm256_set1_epi32(kLong))),
        _mm256_or_si256(_mm256_cmpgt_epi32(both, _mm256_set1_epi32(kAcBits)),
                        _mm256_or_si256(_mm256_cmpgt_epi32(value, _mm256_set1_epi32(31)),
                                        _mm256_cmpgt_epi32(_mm256_set1_epi32(-32), value))));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(&pairs[i]),
                        _mm256_blendv_epi8(pair, one, unfit));
    index = _mm256_add_epi32(index, _mm256_set1_epi32(8));
  }
}
#endif

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

Status AcTable::Set(const HuffmanSpec& spec, bool simd) {
  reused_ = spec == spec_;
  if (reused_) return Status();
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
#if defined(__x86_64__)
  if (simd) {
    PairUpAvx2(singles, pairs);
  } else {
    PairUp(singles, pairs);
  }
#else
  static_cast<void>(simd);
  PairUp(singles, pairs);
#endif
  spec_ = spec;
  return Status();
}

void AcTable::PrepareSkip(uint64_t blocks) {
  if (skip_ready_ || (!reused_ && blocks < 10000)) return;
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
