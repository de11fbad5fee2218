#include "files/key.h"

#include <bit>
#include <cstring>

namespace forebay::files {
namespace {

constexpr uint64_t kPrimeA = 0x9E3779B97F4A7C15;
constexpr uint64_t kPrimeB = 0xC2B2AE3D27D4EB4F;
constexpr uint64_t kPrimeC = 0x165667B19E3779F9;

__extension__ using Wide = unsigned __int128;

uint64_t Mix(uint64_t a, uint64_t b) {
  const auto product = static_cast<Wide>(a) * b;
  return static_cast<uint64_t>(product) ^ static_cast<uint64_t>(product >> 64);
}

}  // namespace

// Two lanes of folded multiplications with different constants, over the same words, two at a time.
FileKey KeyOf(std::string_view path) {
  uint64_t a = kPrimeA ^ path.size();
  uint64_t b = kPrimeB + path.size();
  const auto take = [&](uint64_t one, uint64_t two) {
    a = Mix(one ^ a, two ^ kPrimeC);
    b = Mix(one ^ kPrimeA, two ^ b);
  };
  const auto word = [](const char* at) {
    uint64_t value = 0;
    std::memcpy(&value, at, 8);
    return value;
  };
  const char* at = path.data();
  size_t left = path.size();
  if (left < 16) {
    char padded[16] = {};
    if (left > 0) std::memcpy(padded, at, left);
    take(word(padded), word(padded + 8));
  } else {
    for (; left > 16; left -= 16, at += 16) take(word(at), word(at + 8));
    at -= 16 - left;  // the last 16 bytes, some of them again
    take(word(at), word(at + 8));
  }
  return {.high = Mix(a ^ (b >> 3), kPrimeA) ^ b, .low = Mix(b, kPrimeA ^ kPrimeC) + a};
}

namespace {

#if defined(__has_builtin)
#if __has_builtin(__builtin_shufflevector)
#define FOREBAY_BYTES_AT_ONCE
#endif
#endif

#ifdef FOREBAY_BYTES_AT_ONCE

using Bytes [[gnu::vector_size(16)]] = uint8_t;

inline Bytes LoadBytes(const void* at) {
  Bytes bytes;
  std::memcpy(&bytes, at, sizeof(bytes));
  return bytes;
}

#else

// Eight digits at once: each nibble to a byte of its own, then 10 to 15 are moved on to the
// letters.
inline void EightDigits(uint32_t value, char* out) {
  constexpr uint64_t kOnes = 0x0101010101010101;
  uint64_t x = __builtin_bswap32(value);
  x = (x | (x << 16)) & 0x0000FFFF0000FFFF;
  x = (x | (x << 8)) & 0x00FF00FF00FF00FF;
  x = ((x >> 4) | (x << 8)) & (0x0F * kOnes);
  x += '0' * kOnes + (((x + 6 * kOnes) >> 4) & kOnes) * ('a' - '0' - 10);
  if constexpr (std::endian::native == std::endian::big) x = __builtin_bswap64(x);
  std::memcpy(out, &x, 8);
}

#endif

}  // namespace

void WriteName(const FileKey& key, char* out) {
#ifdef FOREBAY_BYTES_AT_ONCE
  uint64_t words[] = {key.high, key.low};
  if constexpr (std::endian::native == std::endian::little) {
    for (uint64_t& word : words) word = __builtin_bswap64(word);
  }
  const Bytes bytes = LoadBytes(words);
  const Bytes high = bytes >> 4;
  const Bytes low = bytes & 15;
  const auto digits = [](Bytes nibbles) {
    return nibbles + '0' + (reinterpret_cast<Bytes>(nibbles > 9) & ('a' - '0' - 10));
  };
  const Bytes first = digits(
      __builtin_shufflevector(high, low, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23));
  const Bytes second = digits(__builtin_shufflevector(high, low, 8, 24, 9, 25, 10, 26, 11, 27, 12,
                                                      28, 13, 29, 14, 30, 15, 31));
  std::memcpy(out, &first, sizeof(first));
  std::memcpy(out + sizeof(first), &second, sizeof(second));
#else
  EightDigits(static_cast<uint32_t>(key.high >> 32), out);
  EightDigits(static_cast<uint32_t>(key.high), out + 8);
  EightDigits(static_cast<uint32_t>(key.low >> 32), out + 16);
  EightDigits(static_cast<uint32_t>(key.low), out + 24);
#endif
}

bool HasOddName(std::string_view path, size_t from) {
  // Pairs of a byte and the one after it, which for the last of all is the 0.
  const char* text = path.data();
  size_t i = from;
#ifdef FOREBAY_BYTES_AT_ONCE
  if (path.size() >= sizeof(Bytes)) {
    constexpr Bytes kNumbers = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    const auto odd_at = [&](size_t at) {
      const Bytes one = LoadBytes(text + at);
      const Bytes next = LoadBytes(text + at + 1);
      return reinterpret_cast<Bytes>(one == '/') &
             (reinterpret_cast<Bytes>(next == '/') | reinterpret_cast<Bytes>(next == '.'));
    };
    Bytes odd = {};
    for (; i + sizeof(Bytes) <= path.size(); i += sizeof(Bytes)) odd |= odd_at(i);
    // The last bytes, with some that were looked at already, or come before `from`.
    const size_t last = path.size() - sizeof(Bytes);
    const auto before = static_cast<uint8_t>(i - last);
    odd |= odd_at(last) & reinterpret_cast<Bytes>(kNumbers >= before);
    uint64_t any[2];
    std::memcpy(any, &odd, sizeof(any));
    return (any[0] | any[1]) != 0;
  }
#endif
  for (; i < path.size(); ++i) {
    if (text[i] == '/' && (text[i + 1] == '/' || text[i + 1] == '.')) return true;
  }
  return false;
}

size_t NormalPath(std::string_view folder, std::string_view path, char* out, size_t size) {
  if (path.empty() || size == 0) return 0;
  size_t length = 0;
  const bool absolute = path[0] == '/';
  if (!absolute && (folder.empty() || folder[0] != '/')) return 0;
  for (const std::string_view half : {absolute ? std::string_view() : folder, path}) {
    for (size_t at = 0; at < half.size();) {
      while (at < half.size() && half[at] == '/') ++at;
      size_t end = at;
      while (end < half.size() && half[end] != '/') ++end;
      const std::string_view part(half.data() + at, end - at);  // substr() may throw
      at = end;
      if (part.empty() || part == ".") continue;
      if (part == ".." || length + part.size() + 2 > size) return 0;
      out[length++] = '/';
      std::memcpy(out + length, part.data(), part.size());
      length += part.size();
    }
  }
  if (length == 0) {
    if (size < 2) return 0;
    out[length++] = '/';
  }
  out[length] = 0;
  return length;
}

bool IsBelow(std::string_view path, std::string_view folder) {
  if (folder == "/") return true;
  return path.starts_with(folder) && (path.size() == folder.size() || path[folder.size()] == '/');
}

}  // namespace forebay::files
