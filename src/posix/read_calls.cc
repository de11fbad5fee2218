#include <fcntl.h>
#include <stdio.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

#include <cerrno>

#include "files/raw_call.h"
#include "posix/calls.h"
#include "posix/libc.h"
#include "posix/mapping.h"
#include "posix/partial.h"
#include "posix/place.h"

namespace forebay::posix {
namespace {

constexpr int kOnlyMark = 4;  // CLOSE_RANGE_CLOEXEC: they stay open until exec

// Whether the source and `out` lie in one file system, and the copy `in` in another.
bool OnlyTheCopyIsFar(int in, int out) {
  files::Identity identity;
  struct stat stat {};
  return IdentityOf(in, &identity) &&
         files::RawCall(SYS_fstat, out, files::RawArgument(&stat)) == 0 &&
         stat.st_dev == identity.stat.st_dev;
}

// One piece, by memory: what was copied, or -1.
ssize_t CopyPiece(int in, off_t* in_at, int out, off_t* out_at, size_t bytes) {
  char buffer[16 << 10];
  const size_t most = bytes < sizeof(buffer) ? bytes : sizeof(buffer);
  const ssize_t got =
      in_at != nullptr ? libc.pread(in, buffer, most, *in_at) : libc.read(in, buffer, most);
  if (got <= 0) return got;
  const auto piece = static_cast<size_t>(got);
  const ssize_t put =
      out_at != nullptr ? pwrite(out, buffer, piece, *out_at) : write(out, buffer, piece);
  const ssize_t done = put > 0 ? put : 0;
  if (in_at == nullptr && done < got) lseek(in, done - got, SEEK_CUR);
  if (in_at != nullptr) *in_at += done;
  if (out_at != nullptr) *out_at += done;
  return put;
}

// stdio reads past us in small pieces; what is read at once beyond its buffer is worth a call.
constexpr size_t kBulk = 64 << 10;
constexpr int kInBackup = 0x100;  // _IO_IN_BACKUP: characters that were pushed back come first

// What there is of `bytes`, after what the stream has in its buffer; its lock is held.
size_t ReadBulk(FILE* stream, char* out, size_t bytes) {
  const auto buffered = static_cast<size_t>(stream->_IO_read_end - stream->_IO_read_ptr);
  size_t done = 0;
  if (buffered > 0) {
    done = libc.fread_unlocked(out, 1, buffered < bytes ? buffered : bytes, stream);
    if (done < buffered || done == bytes) return done;
  }
  // It keeps nothing, and does not believe to know where its descriptor is.
  if (fflush_unlocked(stream) != 0) return done;
  const iovec part{.iov_base = out + done, .iov_len = bytes - done};
  ssize_t got = 0;
  if (ReadPartial(fileno(stream), &part, 1, &got) && got > 0) done += static_cast<size_t>(got);
  return done;
}

}  // namespace

size_t ReadStream(void* out, size_t size, size_t count, _IO_FILE* stream, bool unlocked) {
  size_t bytes = 0;
  if (!any_partial.load(std::memory_order_relaxed) || stream == nullptr ||
      __builtin_mul_overflow(size, count, &bytes) || bytes < kBulk || !MayBePartial(fileno(stream)))
      [[likely]] {
    return unlocked ? libc.fread_unlocked(out, size, count, stream)
                    : libc.fread(out, size, count, stream);
  }
  if (!unlocked) flockfile(stream);
  size_t done = 0;
  if ((stream->_flags & kInBackup) == 0 && feof_unlocked(stream) == 0 && fwide(stream, 0) <= 0) {
    done = ReadBulk(stream, static_cast<char*>(out), bytes);
  }
  // The end, errors and what else there is are libc's to tell.
  if (done < bytes) {
    done += libc.fread_unlocked(static_cast<char*>(out) + done, 1, bytes - done, stream);
  }
  if (!unlocked) funlockfile(stream);
  return done == bytes ? count : done / size;
}

[[gnu::hot]] long Read(int fd, void* out, size_t bytes) {
  MoveMappings();
  if (MayBePartial(fd)) [[unlikely]] {
    const iovec part{.iov_base = out, .iov_len = bytes};
    ssize_t result = 0;
    if (ReadPartial(fd, &part, 1, &result)) return result;
  }
  if (CallsAlone()) [[likely]]
    return DirectCall(SYS_read, fd, files::RawArgument(out), static_cast<long>(bytes));
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

long CopyRange(int in, long* in_at, int out, long* out_at, size_t bytes, unsigned flags) {
  const ssize_t copied = libc.copy_file_range(in, in_at, out, out_at, bytes, flags);
  if (copied >= 0 || errno != EXDEV) return copied;
  if (flags != 0 || !OnlyTheCopyIsFar(in, out)) {
    errno = EXDEV;
    return -1;
  }
  size_t done = 0;
  while (done < bytes) {
    const ssize_t piece = CopyPiece(in, in_at, out, out_at, bytes - done);
    if (piece < 0 && done == 0) return -1;
    if (piece <= 0) break;
    done += static_cast<size_t>(piece);
  }
  return static_cast<long>(done);
}

[[gnu::hot]] int Close(int fd) {
  MoveMappings();
  ForgetPartial(fd);
  if (CallsAlone()) [[likely]]
    return static_cast<int>(DirectCall(SYS_close, fd));
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
