#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>

#include <cstring>

#include "files/raw_call.h"
#include "posix/calls.h"
#include "posix/change.h"
#include "posix/libc.h"
#include "posix/mapping.h"
#include "posix/memory.h"
#include "posix/partial.h"
#include "posix/place.h"

namespace forebay::posix {
namespace {

using files::Client;

// stdio reads past us, so a stream waits for the whole of a file that is being copied, up to here;
// a larger one is read from the source.
constexpr uint64_t kMostAwaited = 32 << 20;

// Whether the file of that name may change. One made by O_TMPFILE has no name, and the path is the
// folder's; should it get a name, that is told.
bool Writes(int flags) {
  return (flags & O_PATH) == 0 && (flags & O_TMPFILE) != O_TMPFILE &&
         ((flags & O_ACCMODE) != O_RDONLY || (flags & (O_CREAT | O_TRUNC)) != 0);
}

// In a call of its own: a program may have little stack.
[[gnu::noinline]] int OpenOnceWhole(std::string_view normal, int flags, uint64_t size) {
  if (size > kMostAwaited || !TheClient().AwaitAll(normal, size)) return -1;
  Client::Found found{};
  return TheClient().OpenCopy(normal, flags, &found);
}

// A copy's descriptor, or -1; then `partial` is the path of a file that is being copied.
int OpenInside(int folder, const char* path, int flags, bool whole, char (&room)[kMostPath],
               std::string_view* partial) {
  const std::string_view normal = Inside(folder, path, room);
  if (normal.empty()) return -1;
  Client::Found found{};
  uint64_t size = 0;
  int fd = TheClient().OpenCopy(normal, flags, &found, &size);
  if (found == Client::Found::kPartial) [[unlikely]] {
    if (whole) fd = OpenOnceWhole(normal, flags, size);
    if (fd < 0 && !TheClient().unwatched()) *partial = normal;
  }
  if (fd >= 0 && !IsCurrent(fd, normal.data())) [[unlikely]] {
    files::RawCall(SYS_close, fd);
    return -1;
  }
  return fd;
}

int LibcOpen(int folder, const char* path, int flags, unsigned mode) {
  if (CallsAlone()) [[likely]]
    return static_cast<int>(DirectCall(SYS_openat, folder, files::RawArgument(path), flags,
                                       NeedsMode(flags) ? mode : 0));
  return folder == AT_FDCWD ? libc.open(path, flags, mode) : libc.openat(folder, path, flags, mode);
}

[[gnu::noinline]] int OpenToWrite(int folder, const char* path, int flags, unsigned mode) {
  files::Identity room;
  path = PathOfSource(folder, path, &room);
  OpensToWrite(folder, path);
  const int fd = LibcOpen(folder, path, flags, mode);
  OpenedToWrite(fd);
  return fd;
}

// In one piece, and beside the others that are called often: the system call before it has pushed
// code out of the caches, and what is scattered takes longest to come back. Clang would take calls
// into it that have a path each on the stack.
#ifdef __clang__
[[gnu::noinline, gnu::hot]]
#else
[[gnu::noinline, gnu::flatten, gnu::hot]]
#endif
int OpenToRead(int folder, const char* path, int flags) {
  char room[kMostPath];
  std::string_view partial;
  int fd = OpenInside(folder, path, flags, false, room, &partial);
  if (fd >= 0) return fd;
  fd = LibcOpen(folder, path, flags, 0);
  if (!partial.empty() && fd >= 0) TrackPartial(fd, partial);
  return fd;
}

#ifdef SYS_openat2
struct OpenHow {
  uint64_t flags;
  uint64_t mode;
  uint64_t resolve;
};

long OpenAt2(const long (&a)[6]) {
  const auto* how = reinterpret_cast<const OpenHow*>(a[2]);
  const auto pass = [&] { return libc.syscall(SYS_openat2, a[0], a[1], a[2], a[3], a[4], a[5]); };
  if (static_cast<size_t>(a[3]) < sizeof(OpenHow) || !Readable(how, sizeof(OpenHow)) ||
      how->flags > INT32_MAX) {
    return pass();
  }
  const auto folder = static_cast<int>(a[0]);
  const auto* path = reinterpret_cast<const char*>(a[1]);
  const auto flags = static_cast<int>(how->flags);
  if (Writes(flags)) {
    OpensToWrite(folder, path);
    const long fd = pass();
    OpenedToWrite(static_cast<int>(fd));
    return fd;
  }
  if (how->resolve == 0 && how->mode == 0 && static_cast<size_t>(a[3]) == sizeof(OpenHow) &&
      (flags & ~Client::kFlags) == 0 && MayBeInside(folder, path)) {
    char room[kMostPath];
    std::string_view partial;
    const int fd = OpenInside(folder, path, flags, false, room, &partial);
    if (fd >= 0) return fd;
  }
  return pass();
}
#endif

// A stream of the copy, which is complete by now, in the place of one of the source.
FILE* WithCopy(FILE* stream, const char* mode) {
  PartialFile file;
  const int fd = PartialOf(fileno(stream), &file) ? OpenCopyOf(file) : -1;
  if (fd < 0) return stream;
  if (std::strchr(mode, 'e') == nullptr) files::RawCall(SYS_fcntl, fd, F_SETFD, 0);
  FILE* copy = libc.fdopen(fd, mode);
  if (copy == nullptr) {
    files::RawCall(SYS_close, fd);
    return stream;
  }
  CloseStream(stream);
  return copy;
}

}  // namespace

bool NeedsMode(int flags) { return (flags & O_CREAT) != 0 || (flags & O_TMPFILE) == O_TMPFILE; }

int CreateFlags() { return O_CREAT | O_WRONLY | O_TRUNC; }

[[gnu::hot]] int Open(int folder, const char* path, int flags, unsigned mode) {
  MoveMappings();
  if ((flags & ~Client::kFlags) == 0) [[likely]] {
    if (MayBeInside(folder, path)) [[unlikely]]
      return OpenToRead(folder, path, flags);
  } else if (Writes(flags)) {
    return OpenToWrite(folder, path, flags, mode);
  }
  return LibcOpen(folder, path, flags, mode);
}

_IO_FILE* OpenStream(const char* path, const char* mode) {
  if (mode == nullptr || path == nullptr) return libc.fopen(path, mode);
  if (mode[0] != 'r' || std::strchr(mode, '+') != nullptr) {
    files::Identity source;
    path = PathOfSource(AT_FDCWD, path, &source);
    OpensToWrite(AT_FDCWD, path);
    FILE* stream = libc.fopen(path, mode);
    if (stream != nullptr) OpenedToWrite(fileno(stream));
    return stream;
  }
  char room[kMostPath];
  std::string_view partial;
  if (MayBeInside(AT_FDCWD, path) && std::strchr(mode, ',') == nullptr) {
    const int flags = O_RDONLY | (std::strchr(mode, 'e') != nullptr ? O_CLOEXEC : 0);
    const int fd = OpenInside(AT_FDCWD, path, flags, true, room, &partial);
    if (fd >= 0) {
      FILE* stream = libc.fdopen(fd, mode);
      if (stream != nullptr) return stream;
      libc.close(fd);
    }
  }
  FILE* stream = libc.fopen(path, mode);
  if (partial.empty() || stream == nullptr) return stream;
  // The C++ library's streams open with fopen() and then read the descriptor.
  TrackPartial(fileno(stream), partial);
  if (!TheClient().ReadsDirectly(partial, fileno(stream))) return stream;
  return WithCopy(stream, mode);
}

_IO_FILE* ReopenStream(const char* path, const char* mode, _IO_FILE* stream) {
  const bool writes =
      path != nullptr && mode != nullptr && (mode[0] != 'r' || std::strchr(mode, '+') != nullptr);
  files::Identity source;
  if (writes) {
    path = PathOfSource(AT_FDCWD, path, &source);
    OpensToWrite(AT_FDCWD, path);
  }
  FILE* result = libc.freopen(path, mode, stream);
  if (writes && result != nullptr) OpenedToWrite(fileno(result));
  return result;
}

int MakeTemporary(char* pattern, int suffix, int flags, bool with_suffix, bool with_flags) {
  const int fd = with_suffix ? (with_flags ? libc.mkostemps(pattern, suffix, flags)
                                           : libc.mkstemps(pattern, suffix))
                             : (with_flags ? libc.mkostemp(pattern, flags) : libc.mkstemp(pattern));
  OpenedToWrite(fd);
  return fd;
}

int SpawnOpen(void* actions, int fd, const char* path, int flags, unsigned mode) {
  // The child opens it without us.
  if (Writes(flags)) const Change change(AT_FDCWD, path, Change::What::kFile);
  return libc.posix_spawn_file_actions_addopen(static_cast<posix_spawn_file_actions_t*>(actions),
                                               fd, path, flags, mode);
}

long SystemCall(long number, const long (&a)[6]) {
  MapsDirectly(number, a);
  const auto* path = reinterpret_cast<const char*>(a[1]);
  switch (number) {
#ifdef SYS_open
    case SYS_open:
      return Open(AT_FDCWD, reinterpret_cast<const char*>(a[0]), static_cast<int>(a[1]),
                  static_cast<unsigned>(a[2]));
#endif
    case SYS_openat:
      return Open(static_cast<int>(a[0]), path, static_cast<int>(a[2]),
                  static_cast<unsigned>(a[3]));
#ifdef SYS_openat2
    case SYS_openat2:
      return OpenAt2(a);
#endif
    case SYS_statx:
      return Statx(static_cast<int>(a[0]), path, static_cast<int>(a[2]),
                   static_cast<unsigned>(a[3]), reinterpret_cast<struct statx*>(a[4]));
#ifdef SYS_creat
    case SYS_creat:
      return Open(AT_FDCWD, reinterpret_cast<const char*>(a[0]), O_CREAT | O_WRONLY | O_TRUNC,
                  static_cast<unsigned>(a[1]));
#endif
#ifdef SYS_rename
    case SYS_rename:
      return Rename(reinterpret_cast<const char*>(a[0]), path);
#endif
#ifdef SYS_renameat
    case SYS_renameat:
      return RenameAt(static_cast<int>(a[0]), path, static_cast<int>(a[2]),
                      reinterpret_cast<const char*>(a[3]), 0, false);
#endif
#ifdef SYS_unlink
    case SYS_unlink:
      return Unlink(reinterpret_cast<const char*>(a[0]));
#endif
    case SYS_unlinkat:
      return UnlinkAt(static_cast<int>(a[0]), path, static_cast<int>(a[2]));
    case SYS_truncate:
      return Truncate(reinterpret_cast<const char*>(a[0]), a[1]);
    case SYS_chdir:
      return ChangeFolder(reinterpret_cast<const char*>(a[0]));
    case SYS_fchdir:
      return ChangeFolderTo(static_cast<int>(a[0]));
    case SYS_chroot:
      return ChangeRoot(reinterpret_cast<const char*>(a[0]));
#ifdef SYS_link
    case SYS_link:
      return Link(reinterpret_cast<const char*>(a[0]), path);
#endif
    case SYS_linkat:
      return LinkAt(static_cast<int>(a[0]), path, static_cast<int>(a[2]),
                    reinterpret_cast<const char*>(a[3]), static_cast<int>(a[4]));
#ifdef SYS_symlink
    case SYS_symlink:
      return SymLink(reinterpret_cast<const char*>(a[0]), path);
#endif
    case SYS_symlinkat:
      return SymLinkAt(reinterpret_cast<const char*>(a[0]), static_cast<int>(a[1]),
                       reinterpret_cast<const char*>(a[2]));
#ifdef SYS_rmdir
    case SYS_rmdir:
      return RemoveFolder(reinterpret_cast<const char*>(a[0]));
#endif
#ifdef SYS_chmod
    case SYS_chmod:
      return ChangeMode(reinterpret_cast<const char*>(a[0]), static_cast<unsigned>(a[1]));
#endif
    case SYS_fchmod:
      return ChangeModeOf(static_cast<int>(a[0]), static_cast<unsigned>(a[1]));
    case SYS_fchmodat:  // without flags
      return ChangeModeAt(static_cast<int>(a[0]), path, static_cast<unsigned>(a[2]), 0);
#ifdef SYS_fchmodat2
    case SYS_fchmodat2:
      return ChangeModeAt(static_cast<int>(a[0]), path, static_cast<unsigned>(a[2]),
                          static_cast<int>(a[3]));
#endif
    case SYS_execve:
      return ExecuteCall(a);
    case SYS_renameat2:
      return RenameAt(static_cast<int>(a[0]), path, static_cast<int>(a[2]),
                      reinterpret_cast<const char*>(a[3]), static_cast<unsigned>(a[4]), true);
    default:
      return libc.syscall(number, a[0], a[1], a[2], a[3], a[4], a[5]);
  }
}

}  // namespace forebay::posix
