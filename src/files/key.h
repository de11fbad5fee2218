// How a file of a data folder is named in the cache: by a hash of its absolute path.
//
// Everything here works on buffers of the caller, allocates nothing and is safe in a signal handler
// and in the child of a vfork: the preloaded library calls it from within open().
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

namespace forebay::files {

struct FileKey {
  uint64_t high = 0;
  uint64_t low = 0;
  bool operator==(const FileKey&) const = default;
};

// Of a path in its normal form. 128 bits: two paths of one cache never share a key.
FileKey KeyOf(std::string_view path);

constexpr size_t kNameLength = 32;
// The key in hexadecimal: kNameLength digits.
void WriteName(const FileKey& key, char* out);
// And a 0.
inline void NameOf(const FileKey& key, char (&out)[kNameLength + 1]) {
  WriteName(key, out);
  out[kNameLength] = 0;
}

// The absolute path without empty and "." parts; `folder` is what a relative path stands in.
// Returns its length, or 0 when it cannot be told without asking the storage: ".." in it (a link
// may lead elsewhere), an empty path, one that does not fit, or a folder that is not absolute.
size_t NormalPath(std::string_view folder, std::string_view path, char* out, size_t size);

// How many of `length` bytes of `text` a string that ends with a 0 begins with. It reads the string
// in words, so beyond its end, but never beyond its page.
[[gnu::no_sanitize_address]] inline size_t SameBytes(const char* string, const char* text,
                                                     size_t length) {
  size_t i = 0;
  for (; i + 8 <= length && (reinterpret_cast<uintptr_t>(string + i) & 4095) <= 4088; i += 8) {
    uint64_t one = 0;
    uint64_t other = 0;
    __builtin_memcpy(&one, string + i, 8);
    __builtin_memcpy(&other, text + i, 8);
    if (one != other) break;
  }
  while (i < length && string[i] == text[i]) ++i;
  return i;
}

// Whether a slash of `path` at `from` or later is followed by another one, or by a dot: a name that
// begins with a dot is rare, and not worth telling "." and ".." from it. The path ends with a 0.
bool HasOddName(std::string_view path, size_t from);

// Whether `path` is `folder` or lies below it. Both in their normal form.
bool IsBelow(std::string_view path, std::string_view folder);

}  // namespace forebay::files
