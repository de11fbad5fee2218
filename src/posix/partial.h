// Descriptors of large files that are being copied. They are the source's own; what is read of them
// comes from the part of the copy that is there, or is waited for, so that nothing is read from the
// source twice.
//
// An entry only says what a descriptor may be: each read makes sure of it by device and inode. So a
// close that was not seen, an entry taken over by another file, and a fork in the middle of an
// update do no harm. No locks, and any thread may call anything at any time.
#pragma once

#include <sys/types.h>
#include <sys/uio.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <string_view>

#include "posix/place.h"

namespace forebay::posix {

constexpr int kMostTracked = 1 << 14;  // descriptors above are read as they are
extern std::atomic<bool> any_partial;
extern std::atomic<uint16_t> partial_of[kMostTracked];

inline bool MayBePartial(int fd) {
  return any_partial.load(std::memory_order_relaxed) && fd >= 0 && fd < kMostTracked &&
         partial_of[fd].load(std::memory_order_relaxed) != 0;
}

void TrackPartial(int fd, std::string_view path);
struct PartialFile {
  uint64_t device = 0;
  uint64_t inode = 0;
  uint64_t size = 0;
  size_t length = 0;
  char path[kMostPath];  // ends with a 0

  std::string_view view() const { return {path, length}; }
};
// Which one a descriptor is of; false: none.
bool PartialOf(int fd, PartialFile* out);
// The copy of the very file, open, when it is complete and may be used; else -1. Asks nobody.
int OpenCopyOf(const PartialFile& file);
// What close(), dup2() and the like do to it. The child of a vfork() has its parent's memory and
// descriptors of its own: it changes nothing here.
void ForgetPartial(int fd);
void ForgetPartials(unsigned first, unsigned last);
void SharePartial(int from, int to);

// As read(), pread(), readv() and preadv(); false: ask libc.
bool ReadPartial(int fd, const iovec* parts, int count, ssize_t* result);
bool ReadPartialAt(int fd, const iovec* parts, int count, off_t offset, ssize_t* result);

}  // namespace forebay::posix
