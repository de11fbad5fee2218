#include "files/key.h"

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

// Two lanes of folded multiplications with different constants, over the same words.
FileKey KeyOf(std::string_view path) {
  uint64_t a = kPrimeA ^ path.size();
  uint64_t b = kPrimeB + path.size();
  const char* at = path.data();
  const auto take = [&](uint64_t word) {
    a = Mix(a ^ word, kPrimeB) + kPrimeC;
    b = Mix(b + word, kPrimeC | 1) ^ (a >> 7) ^ word;
  };
  size_t left = path.size();
  for (; left >= 8; left -= 8, at += 8) {
    uint64_t word = 0;
    std::memcpy(&word, at, 8);
    take(word);
  }
  if (left > 0) {
    uint64_t word = 0;
    std::memcpy(&word, at, left);
    take(word);
  }
  return {.high = Mix(a ^ (b >> 3), kPrimeA) ^ b, .low = Mix(b, kPrimeA ^ kPrimeC) + a};
}

void NameOf(const FileKey& key, char (&out)[kNameLength + 1]) {
  constexpr char kDigits[] = "0123456789abcdef";
  for (size_t i = 0; i < 16; ++i) {
    out[i] = kDigits[(key.high >> (60 - 4 * i)) & 15];
    out[16 + i] = kDigits[(key.low >> (60 - 4 * i)) & 15];
  }
  out[kNameLength] = 0;
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
