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
// The key in hexadecimal, and a 0.
void NameOf(const FileKey& key, char (&out)[kNameLength + 1]);

// The absolute path without empty and "." parts; `folder` is what a relative path stands in.
// Returns its length, or 0 when it cannot be told without asking the storage: ".." in it (a link
// may lead elsewhere), an empty path, one that does not fit, or a folder that is not absolute.
size_t NormalPath(std::string_view folder, std::string_view path, char* out, size_t size);

// Whether `path` is `folder` or lies below it. Both in their normal form.
bool IsBelow(std::string_view path, std::string_view folder);

}  // namespace forebay::files
