// Who a copy stands for: the source file's own attributes and path, kept as an extended attribute
// of the copy, so that any process that gets its descriptor, also by exec or over a socket, can
// answer fstat() as the source would have.
#pragma once

#include <sys/stat.h>

#include <cstddef>
#include <cstdint>

namespace forebay::files {

// Copies have this mode and no other file is likely to: fstat() is asked first, and the extended
// attribute only of files with this mode.
constexpr uint32_t kCopyMode = S_IFREG | S_ISVTX | 0444;
inline bool MayBeCopy(uint32_t mode) { return mode == kCopyMode; }

constexpr const char* kIdentityName = "user.forebay.file";

struct Identity {
  static constexpr uint32_t kVersion = 1;
  uint32_t version = kVersion;
  uint32_t path_length = 0;
  struct stat stat = {};
  int64_t birth_seconds = 0;  // 0: the source does not say
  uint32_t birth_nanoseconds = 0;
  uint32_t crc = 0;  // crc32c of the copy's bytes, 0 when not known
  char path[4096] = {};

  size_t bytes() const { return offsetof(Identity, path) + path_length; }
};

// Whether `bytes` read into `out` are an identity; ends its path with a 0.
bool CheckIdentity(size_t bytes, Identity* out);
// 0, or an errno: ENODATA when the file is no copy.
int ReadIdentity(int fd, Identity* out);
int ReadIdentityAt(const char* copy, Identity* out);
int WriteIdentity(int fd, const Identity& identity);

}  // namespace forebay::files
