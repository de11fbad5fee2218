#include <fcntl.h>
#include <stdio.h>
#include <sys/uio.h>

#include "posix/calls.h"
#include "posix/libc.h"
#include "posix/partial.h"

namespace forebay::posix {
namespace {

constexpr int kOnlyMark = 4;  // CLOSE_RANGE_CLOEXEC: they stay open until exec

}  // namespace

long Read(int fd, void* out, size_t bytes) {
  if (MayBePartial(fd)) [[unlikely]] {
    const iovec part{.iov_base = out, .iov_len = bytes};
    ssize_t result = 0;
    if (ReadPartial(fd, &part, 1, &result)) return result;
  }
  return libc.read(fd, out, bytes);
}

long ReadAt(int fd, void* out, size_t bytes, long offset) {
  if (MayBePartial(fd)) [[unlikely]] {
    const iovec part{.iov_base = out, .iov_len = bytes};
    ssize_t result = 0;
    if (ReadPartialAt(fd, &part, 1, offset, &result)) return result;
  }
  return libc.pread(fd, out, bytes, offset);
}

long ReadVector(int fd, const iovec* parts, int count) {
  ssize_t result = 0;
  if (MayBePartial(fd) && ReadPartial(fd, parts, count, &result)) return result;
  return libc.readv(fd, parts, count);
}

long ReadVectorAt(int fd, const iovec* parts, int count, long offset) {
  ssize_t result = 0;
  if (MayBePartial(fd) && ReadPartialAt(fd, parts, count, offset, &result)) return result;
  return libc.preadv(fd, parts, count, offset);
}

long ReadVectorAt2(int fd, const iovec* parts, int count, long offset, int flags) {
  ssize_t result = 0;
  if (MayBePartial(fd) && flags == 0) {
    if (offset == -1 ? ReadPartial(fd, parts, count, &result)
                     : ReadPartialAt(fd, parts, count, offset, &result)) {
      return result;
    }
  }
  return libc.preadv2(fd, parts, count, offset, flags);
}

int Close(int fd) {
  ForgetPartial(fd);
  return libc.close(fd);
}

int CloseRange(unsigned first, unsigned last, int flags) {
  if ((flags & kOnlyMark) == 0) ForgetPartials(first, last);
  return libc.close_range(first, last, flags);
}

void CloseFrom(int first) {
  ForgetPartials(first < 0 ? 0 : static_cast<unsigned>(first), kMostTracked);
  libc.closefrom(first);
}

int CloseStream(_IO_FILE* stream) {
  if (stream != nullptr && any_partial.load(std::memory_order_relaxed)) {
    ForgetPartial(fileno(stream));
  }
  return libc.fclose(stream);
}

int Duplicate(int fd) {
  const int copy = libc.dup(fd);
  SharePartial(fd, copy);
  return copy;
}

int DuplicateTo(int from, int to) {
  const int result = libc.dup2(from, to);
  if (from != to) SharePartial(from, result);
  return result;
}

int DuplicateWith(int from, int to, int flags) {
  const int result = libc.dup3(from, to, flags);
  SharePartial(from, result);
  return result;
}

int Control(int fd, int command, void* argument) {
  const int result = libc.fcntl(fd, command, argument);
  if (command == F_DUPFD || command == F_DUPFD_CLOEXEC) SharePartial(fd, result);
  return result;
}

}  // namespace forebay::posix
