#include "base/crc32c.h"

#include <array>
#include <cassert>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace forebay {
namespace {

constexpr uint32_t kPoly = 0x82f63b78u;  // 0x1edc6f41 with its bits reversed

using ByteTable = std::array<std::array<uint32_t, 256>, 8>;

constexpr ByteTable MakeByteTable() {
  ByteTable t{};
  for (uint32_t i = 0; i < 256; ++i) {
    uint32_t c = i;
    for (int k = 0; k < 8; ++k) c = (c >> 1) ^ ((c & 1u) ? kPoly : 0u);
    t[0][i] = c;
  }
  for (uint32_t i = 0; i < 256; ++i) {
    for (size_t k = 1; k < 8; ++k) t[k][i] = (t[k - 1][i] >> 8) ^ t[0][t[k - 1][i] & 0xffu];
  }
  return t;
}

constexpr ByteTable kTable = MakeByteTable();

// Advances a raw (not inverted) CRC over `n` zero bytes; linear in the CRC, so a table of four
// bytes replaces it at run time.
using ShiftTable = std::array<std::array<uint32_t, 256>, 4>;

uint32_t Shifted(const ShiftTable& t, uint32_t crc) {
  return t[0][crc & 0xffu] ^ t[1][(crc >> 8) & 0xffu] ^ t[2][(crc >> 16) & 0xffu] ^ t[3][crc >> 24];
}

uint32_t AdvanceZeros(uint32_t crc, size_t n) {
  while (n-- > 0) crc = (crc >> 8) ^ kTable[0][crc & 0xffu];
  return crc;
}

ShiftTable MakeShiftTable(size_t zeros) {
  // The CRC is linear over GF(2): 32 basis images give every entry.
  std::array<uint32_t, 32> basis;
  for (size_t bit = 0; bit < 32; ++bit) basis[bit] = AdvanceZeros(1u << bit, zeros);
  ShiftTable t{};
  for (size_t byte = 0; byte < 4; ++byte) {
    for (uint32_t v = 0; v < 256; ++v) {
      uint32_t image = 0;
      for (size_t bit = 0; bit < 8; ++bit) {
        if (v & (1u << bit)) image ^= basis[byte * 8 + bit];
      }
      t[byte][v] = image;
    }
  }
  return t;
}

uint64_t Load64(const std::byte* p) {
  uint64_t v;
  std::memcpy(&v, p, sizeof v);
  return v;
}

#if defined(__x86_64__)

// The instruction has a latency of three cycles and a throughput of one: three independent lanes
// keep it busy. Lanes are joined with precomputed zero-shift tables.
template <size_t kLane>
__attribute__((target("sse4.2"))) uint32_t ThreeLanes(const std::byte* p, uint32_t crc,
                                                      const ShiftTable& one) {
  uint64_t a = crc;
  uint64_t b = 0;
  uint64_t c = 0;
  for (size_t i = 0; i < kLane; i += 8) {
    a = _mm_crc32_u64(a, Load64(p + i));
    b = _mm_crc32_u64(b, Load64(p + kLane + i));
    c = _mm_crc32_u64(c, Load64(p + 2 * kLane + i));
  }
  const uint32_t ab = Shifted(one, static_cast<uint32_t>(a)) ^ static_cast<uint32_t>(b);
  return Shifted(one, ab) ^ static_cast<uint32_t>(c);
}

__attribute__((target("sse4.2"))) uint32_t Hardware(std::span<const std::byte> bytes,
                                                    uint32_t crc) {
  constexpr size_t kLong = 2048;
  constexpr size_t kShort = 128;
  static const ShiftTable long_shift = MakeShiftTable(kLong);
  static const ShiftTable short_shift = MakeShiftTable(kShort);
  const std::byte* p = bytes.data();
  size_t n = bytes.size();
  crc = ~crc;
  while (n >= 3 * kLong) {
    crc = ThreeLanes<kLong>(p, crc, long_shift);
    p += 3 * kLong;
    n -= 3 * kLong;
  }
  while (n >= 3 * kShort) {
    crc = ThreeLanes<kShort>(p, crc, short_shift);
    p += 3 * kShort;
    n -= 3 * kShort;
  }
  uint64_t wide = crc;
  for (; n >= 8; p += 8, n -= 8) wide = _mm_crc32_u64(wide, Load64(p));
  crc = static_cast<uint32_t>(wide);
  for (; n > 0; ++p, --n) crc = _mm_crc32_u8(crc, static_cast<uint8_t>(*p));
  return ~crc;
}

// x^n modulo the checksum's polynomial, for carry-less products: those of reversed numbers come out
// one bit low.
uint64_t PowerForFolding(int n) {
  uint32_t power = 1u << 31;
  for (; n > 0; --n) power = (power >> 1) ^ ((power & 1u) ? kPoly : 0u);
  return uint64_t{power} << 1;
}

constexpr size_t kFold = 256;
constexpr size_t kFoldFrom = 4 * kFold;

// Folding, after Gopal et al., "Fast CRC Computation for Generic Polynomials Using PCLMULQDQ": four
// vectors of 64 bytes are moved over the next four by two multiplications each, and stay congruent
// to all that came before. What is left of them goes through the plain instruction.
//
// kCopies: the bytes also go to `to`, which is aligned to 64 bytes, past the caches.
template <bool kCopies>
__attribute__((target("sse4.2,avx512f,vpclmulqdq"))) uint32_t Folded(
    std::span<const std::byte> bytes, uint32_t crc, std::byte* to = nullptr) {
  static const uint64_t low = PowerForFolding(8 * kFold + 32);
  static const uint64_t high = PowerForFolding(8 * kFold - 32);
  const __m512i by = _mm512_set_epi64(static_cast<int64_t>(high), static_cast<int64_t>(low),
                                      static_cast<int64_t>(high), static_cast<int64_t>(low),
                                      static_cast<int64_t>(high), static_cast<int64_t>(low),
                                      static_cast<int64_t>(high), static_cast<int64_t>(low));
  const std::byte* p = bytes.data();
  size_t n = bytes.size();
  __m512i state[4];
  for (size_t i = 0; i < 4; ++i) {
    state[i] = _mm512_loadu_si512(p + 64 * i);
    if constexpr (kCopies) _mm512_stream_si512(reinterpret_cast<__m512i*>(to + 64 * i), state[i]);
  }
  state[0] =
      _mm512_xor_si512(state[0], _mm512_zextsi128_si512(_mm_cvtsi32_si128(static_cast<int>(~crc))));
  for (p += kFold, n -= kFold; n >= kFold; p += kFold, n -= kFold) {
    if constexpr (kCopies) to += kFold;
    for (size_t i = 0; i < 4; ++i) {
      const __m512i next = _mm512_loadu_si512(p + 64 * i);
      if constexpr (kCopies) _mm512_stream_si512(reinterpret_cast<__m512i*>(to + 64 * i), next);
      state[i] =
          _mm512_ternarylogic_epi64(_mm512_clmulepi64_epi128(state[i], by, 0x00),
                                    _mm512_clmulepi64_epi128(state[i], by, 0x11), next, 0x96);
    }
  }
  if constexpr (kCopies) {
    _mm_sfence();  // such stores are not ordered with others: whoever is told next sees them
    std::memcpy(to + kFold, p, n);
  }
  std::byte folded[kFold];
  for (size_t i = 0; i < 4; ++i) _mm512_storeu_si512(folded + 64 * i, state[i]);
  return Hardware({p, n}, Hardware(folded, ~uint32_t{0}));
}

bool Folds() {
  static const bool folds = __builtin_cpu_supports("sse4.2") && __builtin_cpu_supports("avx512f") &&
                            __builtin_cpu_supports("vpclmulqdq");
  return folds;
}

#endif

// Product of two polynomials modulo the checksum's; bits are reversed, 1 << 31 is x^0.
uint32_t MultiplyModP(uint32_t a, uint32_t b) {
  uint32_t product = 0;
  for (uint32_t bit = 1u << 31; bit != 0; bit >>= 1) {
    if (a & bit) product ^= b;
    b = (b >> 1) ^ ((b & 1u) ? kPoly : 0u);
  }
  return product;
}

}  // namespace

uint32_t Crc32cPortable(std::span<const std::byte> bytes, uint32_t crc) {
  const std::byte* p = bytes.data();
  size_t n = bytes.size();
  crc = ~crc;
  for (; n >= 8; p += 8, n -= 8) {
    const uint64_t v = Load64(p) ^ crc;
    crc = kTable[7][v & 0xff] ^ kTable[6][(v >> 8) & 0xff] ^ kTable[5][(v >> 16) & 0xff] ^
          kTable[4][(v >> 24) & 0xff] ^ kTable[3][(v >> 32) & 0xff] ^ kTable[2][(v >> 40) & 0xff] ^
          kTable[1][(v >> 48) & 0xff] ^ kTable[0][v >> 56];
  }
  for (; n > 0; ++p, --n) crc = (crc >> 8) ^ kTable[0][(crc ^ static_cast<uint32_t>(*p)) & 0xffu];
  return ~crc;
}

uint32_t Crc32c(std::span<const std::byte> bytes, uint32_t crc) {
#if defined(__x86_64__)
  static const bool has_instruction = __builtin_cpu_supports("sse4.2");
  if (bytes.size() >= kFoldFrom && Folds()) return Folded<false>(bytes, crc);
  if (has_instruction) return Hardware(bytes, crc);
#endif
  return Crc32cPortable(bytes, crc);
}

uint32_t CopyCrc32c(std::span<std::byte> to, std::span<const std::byte> from) {
  assert(to.size() == from.size());
#if defined(__x86_64__)
  constexpr size_t kLine = 64;
  constexpr size_t kPastCaches = 16 << 10;
  if (from.size() >= kPastCaches && Folds()) {
    const size_t head = -reinterpret_cast<uintptr_t>(to.data()) % kLine;
    std::memcpy(to.data(), from.data(), head);
    const uint32_t crc = Hardware(from.first(head), 0);
    return Folded<true>(from.subspan(head), crc, to.data() + head);
  }
#endif
  if (!from.empty()) std::memcpy(to.data(), from.data(), from.size());
  return Crc32c(from);
}

uint32_t Crc32cJoin(uint32_t first, uint32_t second, uint64_t bytes) {
  uint32_t shift = 1u << 31;
  for (uint32_t power = 1u << 23; bytes > 0; bytes >>= 1) {  // x^8, squared with each bit
    if (bytes & 1u) shift = MultiplyModP(power, shift);
    power = MultiplyModP(power, power);
  }
  return MultiplyModP(shift, first) ^ second;
}

}  // namespace forebay
