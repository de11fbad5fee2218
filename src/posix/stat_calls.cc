#include <fcntl.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <type_traits>

#include "files/raw_call.h"
#include "posix/calls.h"
#include "posix/libc.h"
#include "posix/memory.h"
#include "posix/place.h"

namespace forebay::posix {
namespace {

using files::Identity;
using files::RawArgument;
using files::RawCall;

constexpr unsigned kKnownMask = STATX_BASIC_STATS | STATX_BTIME;

[[gnu::noinline]] bool StatInside(int folder, const char* path, bool follow, Identity* out) {
  char room[kMostPath];
  const std::string_view normal = Inside(folder, path, room);
  return !normal.empty() && IdentityAt(normal, follow, out);
}

[[gnu::noinline]] bool FillFromPath(int folder, const char* path, bool follow, struct stat* out) {
  Identity identity;
  if (!StatInside(folder, path, follow, &identity) || !Writable(out, sizeof(*out))) return false;
  *out = identity.stat;
  return true;
}

[[gnu::noinline]] void FillFromCopy(int fd, struct stat* out) {
  Identity identity;
  if (IdentityOfCopy(fd, &identity)) *out = identity.stat;
}

statx_timestamp Time(const timespec& time) {
  statx_timestamp out{};
  out.tv_sec = time.tv_sec;
  out.tv_nsec = static_cast<uint32_t>(time.tv_nsec);
  return out;
}

void Fill(const Identity& identity, struct statx* out) {
  const struct stat& from = identity.stat;
  out->stx_mask = STATX_BASIC_STATS;
  out->stx_blksize = static_cast<uint32_t>(from.st_blksize);
  out->stx_nlink = static_cast<uint32_t>(from.st_nlink);
  out->stx_uid = from.st_uid;
  out->stx_gid = from.st_gid;
  out->stx_mode = static_cast<uint16_t>(from.st_mode);
  out->stx_ino = from.st_ino;
  out->stx_size = static_cast<uint64_t>(from.st_size);
  out->stx_blocks = static_cast<uint64_t>(from.st_blocks);
  out->stx_atime = Time(from.st_atim);
  out->stx_mtime = Time(from.st_mtim);
  out->stx_ctime = Time(from.st_ctim);
  out->stx_btime = {};
  if (identity.birth_seconds != 0) {
    out->stx_mask |= STATX_BTIME;
    out->stx_btime.tv_sec = identity.birth_seconds;
    out->stx_btime.tv_nsec = identity.birth_nanoseconds;
  }
  out->stx_rdev_major = major(from.st_rdev);
  out->stx_rdev_minor = minor(from.st_rdev);
  out->stx_dev_major = major(from.st_dev);
  out->stx_dev_minor = minor(from.st_dev);
}

[[gnu::noinline]] bool FillFromPath(int folder, const char* path, bool follow, struct statx* out) {
  Identity identity;
  if (!StatInside(folder, path, follow, &identity) || !Writable(out, sizeof(*out))) return false;
  std::memset(out, 0, sizeof(*out));
  Fill(identity, out);
  return true;
}

[[gnu::noinline]] void FillFromCopy(int fd, struct statx* out) {
  Identity identity;
  if (IdentityOfCopy(fd, &identity)) Fill(identity, out);
}

// Of a path that names a descriptor.
template <typename Attributes>
[[gnu::noinline]] void FillFromName(const char* path, Attributes* out) {
  Identity identity;
  if (PathOfSource(AT_FDCWD, path, &identity) == path) return;
  if constexpr (std::is_same_v<Attributes, struct stat>) {
    *out = identity.stat;
  } else {
    Fill(identity, out);
  }
}

[[gnu::noinline]] bool AccessCopy(int folder, const char* path, int mode, bool effective) {
  char room[kMostPath];
  char copy[files::Client::kMostCopyPath];
  const std::string_view normal = Inside(folder, path, room);
  if (normal.empty() || !TheClient().CopyPath(normal, copy, sizeof(copy))) return false;
    // Copies are for all to read, but only their owner can come into the cache.
#ifdef SYS_faccessat2
  if (effective) {
    return RawCall(SYS_faccessat2, AT_FDCWD, RawArgument(copy), mode, AT_EACCESS) == 0;
  }
#endif
  return !effective && RawCall(SYS_faccessat, AT_FDCWD, RawArgument(copy), mode) == 0;
}

}  // namespace

bool KnownVersion(int version) {
  if (version == 0 || version == 1) return true;
  errno = EINVAL;
  return false;
}

int Stat(int folder, const char* path, struct stat* out, int flags) {
  if (MayBeInside(folder, path) && out != nullptr &&
      (flags & ~(AT_SYMLINK_NOFOLLOW | AT_NO_AUTOMOUNT)) == 0 &&
      FillFromPath(folder, path, (flags & AT_SYMLINK_NOFOLLOW) == 0, out)) {
    return 0;
  }
  if (folder == AT_FDCWD && flags == 0) {
    const int result = libc.stat(path, out);
    if (result == 0 && files::MayBeCopy(out->st_mode)) FillFromName(path, out);
    return result;
  }
  if (folder == AT_FDCWD && flags == AT_SYMLINK_NOFOLLOW) return libc.lstat(path, out);
  const int result = libc.fstatat(folder, path, out, flags);
  if (result == 0 && (flags & AT_EMPTY_PATH) != 0 && files::MayBeCopy(out->st_mode) &&
      (path == nullptr || path[0] == 0)) {
    FillFromCopy(folder, out);
  } else if (result == 0 && files::MayBeCopy(out->st_mode) && (flags & AT_SYMLINK_NOFOLLOW) == 0) {
    FillFromName(path, out);
  }
  return result;
}

int StatOf(int fd, struct stat* out) {
  const int result = libc.fstat(fd, out);
  if (result == 0 && files::MayBeCopy(out->st_mode)) FillFromCopy(fd, out);
  return result;
}

int Statx(int folder, const char* path, int flags, unsigned mask, struct statx* out) {
  constexpr int kHonoured = AT_SYMLINK_NOFOLLOW | AT_NO_AUTOMOUNT | AT_STATX_SYNC_TYPE;
  if (MayBeInside(folder, path) && out != nullptr && (flags & ~kHonoured) == 0 &&
      (flags & AT_STATX_FORCE_SYNC) == 0 && (mask & ~kKnownMask) == 0 &&
      FillFromPath(folder, path, (flags & AT_SYMLINK_NOFOLLOW) == 0, out)) {
    return 0;
  }
  const int result = libc.statx(folder, path, flags, mask, out);
  if (result == 0 && (flags & AT_EMPTY_PATH) != 0 && files::MayBeCopy(out->stx_mode) &&
      (path == nullptr || path[0] == 0)) {
    FillFromCopy(folder, out);
  } else if (result == 0 && files::MayBeCopy(out->stx_mode) && (flags & AT_SYMLINK_NOFOLLOW) == 0) {
    FillFromName(path, out);
  }
  return result;
}

int Access(int folder, const char* path, int mode, int flags, bool effective) {
  if (MayBeInside(folder, path) && (mode & ~R_OK) == 0 && (flags & ~AT_EACCESS) == 0 &&
      AccessCopy(folder, path, mode, effective || (flags & AT_EACCESS) != 0)) {
    return 0;
  }
  if (effective) return libc.eaccess(path, mode);
  if (folder == AT_FDCWD && flags == 0) return libc.access(path, mode);
  return libc.faccessat(folder, path, mode, flags);
}

int StatFs(int fd, struct statfs* out) {
  Identity identity;
  return IdentityOf(fd, &identity) ? libc.statfs(identity.path, out) : libc.fstatfs(fd, out);
}

int StatVfs(int fd, struct statvfs* out) {
  Identity identity;
  return IdentityOf(fd, &identity) ? libc.statvfs(identity.path, out) : libc.fstatvfs(fd, out);
}

long GetAttribute(int fd, const char* name, void* out, size_t bytes) {
  Identity identity;
  return IdentityOf(fd, &identity) ? libc.getxattr(identity.path, name, out, bytes)
                                   : libc.fgetxattr(fd, name, out, bytes);
}

long ListAttributes(int fd, char* out, size_t bytes) {
  Identity identity;
  return IdentityOf(fd, &identity) ? libc.listxattr(identity.path, out, bytes)
                                   : libc.flistxattr(fd, out, bytes);
}

}  // namespace forebay::posix
