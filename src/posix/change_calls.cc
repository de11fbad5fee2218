#include <fcntl.h>
#include <sys/stat.h>
#include <sys/time.h>
#include <utime.h>

#include <cerrno>

#include "files/raw_call.h"
#include "posix/calls.h"
#include "posix/change.h"
#include "posix/libc.h"
#include "posix/memory.h"
#include "posix/place.h"

namespace forebay::posix {
namespace {

using What = Change::What;

What FileOr(bool name) { return name ? What::kName : What::kFile; }
What AttributesOr(bool name) { return name ? What::kName : What::kAttributes; }

// A folder that its owner may not search shows none of its files, so none of their copies either.
What OfMode(unsigned mode) { return (mode & S_IXUSR) != 0 ? What::kAttributes : What::kFile; }

// Changes what a descriptor stands for: of a copy, the source by its path.
template <typename OfPath, typename OfFd>
int ChangeOf(int fd, What what, OfPath of_path, OfFd of_fd) {
  files::Identity identity;
  if (IdentityOf(fd, &identity)) {
    struct stat now {};
    if (files::RawCall(SYS_newfstatat, AT_FDCWD, files::RawArgument(identity.path),
                       files::RawArgument(&now), 0) != 0 ||
        now.st_dev != identity.stat.st_dev || now.st_ino != identity.stat.st_ino) {
      errno = ESTALE;  // the name is another file's by now: better none than that one
      return -1;
    }
    const Change change(AT_FDCWD, identity.path, what);
    return of_path(identity.path);
  }
  const Change change(fd, what);
  return of_fd();
}

}  // namespace

int ChangeFolder(const char* path) {
  const int result = libc.chdir(path);
  if (result == 0) FolderChanged();
  return result;
}

int ChangeFolderTo(int fd) {
  const int result = libc.fchdir(fd);
  if (result == 0) FolderChanged();
  return result;
}

int ChangeRoot(const char* path) {
  const int result = libc.chroot(path);
  if (result == 0) RootChanged();
  return result;
}

int Rename(const char* from, const char* to) {
  const Change one(AT_FDCWD, from, What::kTree);
  const Change other(AT_FDCWD, to, What::kTree);
  return libc.rename(from, to);
}

int RenameAt(int folder, const char* from, int to_folder, const char* to, unsigned flags,
             bool with_flags) {
  const Change one(folder, from, What::kTree);
  const Change other(to_folder, to, What::kTree);
  return with_flags ? libc.renameat2(folder, from, to_folder, to, flags)
                    : libc.renameat(folder, from, to_folder, to);
}

int Unlink(const char* path) {
  const Change change(AT_FDCWD, path, What::kName);
  return libc.unlink(path);
}

int UnlinkAt(int folder, const char* path, int flags) {
  const Change change(folder, path, (flags & AT_REMOVEDIR) != 0 ? What::kTree : What::kName);
  return libc.unlinkat(folder, path, flags);
}

int RemoveFolder(const char* path) {
  const Change change(AT_FDCWD, path, What::kTree);
  return libc.rmdir(path);
}

int Remove(const char* path) {
  const Change change(AT_FDCWD, path, What::kTree);
  return libc.remove(path);
}

int Link(const char* from, const char* to) {
  const Change one(AT_FDCWD, from, What::kName);
  const Change other(AT_FDCWD, to, What::kName);
  return libc.link(from, to);
}

int LinkAt(int folder, const char* from, int to_folder, const char* to, int flags) {
  files::Identity source;
  if ((flags & AT_EMPTY_PATH) != 0 && IsEmptyPath(from) && folder >= 0 &&
      IdentityOf(folder, &source)) {
    return LinkAt(AT_FDCWD, source.path, to_folder, to, 0);
  }
  if ((flags & AT_SYMLINK_FOLLOW) != 0) from = PathOfSource(folder, from, &source);
  const Change one(folder, from, FileOr((flags & AT_SYMLINK_FOLLOW) == 0));
  const Change other(to_folder, to, What::kName);
  return libc.linkat(folder, from, to_folder, to, flags);
}

int SymLink(const char* target, const char* path) {
  const Change change(AT_FDCWD, path, What::kNewLink);
  return libc.symlink(target, path);
}

int SymLinkAt(const char* target, int folder, const char* path) {
  const Change change(folder, path, What::kNewLink);
  return libc.symlinkat(target, folder, path);
}

int Truncate(const char* path, long size) {
  files::Identity source;
  path = PathOfSource(AT_FDCWD, path, &source);
  const Change change(AT_FDCWD, path, What::kFile);
  return libc.truncate(path, size);
}

int ChangeMode(const char* path, unsigned mode) {
  files::Identity source;
  path = PathOfSource(AT_FDCWD, path, &source);
  const Change change(AT_FDCWD, path, OfMode(mode));
  return libc.chmod(path, mode);
}

int ChangeModeOf(int fd, unsigned mode) {
  return ChangeOf(
      fd, OfMode(mode), [&](const char* path) { return libc.chmod(path, mode); },
      [&] { return libc.fchmod(fd, mode); });
}

int ChangeModeAt(int folder, const char* path, unsigned mode, int flags) {
  files::Identity source;
  if ((flags & AT_SYMLINK_NOFOLLOW) == 0) path = PathOfSource(folder, path, &source);
  const Change change(folder, path,
                      (flags & AT_SYMLINK_NOFOLLOW) != 0 ? What::kName : OfMode(mode));
  return libc.fchmodat(folder, path, mode, flags);
}

int ChangeModeOfLink(const char* path, unsigned mode) {
  const Change change(AT_FDCWD, path, What::kName);
  return libc.lchmod(path, mode);
}

int ChangeOwner(const char* path, unsigned user, unsigned group) {
  files::Identity source;
  path = PathOfSource(AT_FDCWD, path, &source);
  const Change change(AT_FDCWD, path, What::kAttributes);
  return libc.chown(path, user, group);
}

int ChangeOwnerOf(int fd, unsigned user, unsigned group) {
  return ChangeOf(
      fd, What::kAttributes, [&](const char* path) { return libc.chown(path, user, group); },
      [&] { return libc.fchown(fd, user, group); });
}

int ChangeOwnerOfLink(const char* path, unsigned user, unsigned group) {
  const Change change(AT_FDCWD, path, What::kName);
  return libc.lchown(path, user, group);
}

int ChangeOwnerAt(int folder, const char* path, unsigned user, unsigned group, int flags) {
  if ((flags & AT_EMPTY_PATH) != 0 && IsEmptyPath(path) && folder >= 0) {
    return ChangeOf(
        folder, What::kAttributes,
        [&](const char* source) { return libc.chown(source, user, group); },
        [&] { return libc.fchownat(folder, path, user, group, flags); });
  }
  files::Identity copied;
  if ((flags & AT_SYMLINK_NOFOLLOW) == 0) path = PathOfSource(folder, path, &copied);
  const Change change(folder, path, AttributesOr((flags & AT_SYMLINK_NOFOLLOW) != 0));
  return libc.fchownat(folder, path, user, group, flags);
}

int SetTime(const char* path, const utimbuf* times) {
  files::Identity source;
  path = PathOfSource(AT_FDCWD, path, &source);
  const Change change(AT_FDCWD, path, What::kAttributes);
  return libc.utime(path, times);
}

int SetTimes(const char* path, const timeval* times) {
  files::Identity source;
  path = PathOfSource(AT_FDCWD, path, &source);
  const Change change(AT_FDCWD, path, What::kAttributes);
  return libc.utimes(path, times);
}

int SetTimesOfLink(const char* path, const timeval* times) {
  const Change change(AT_FDCWD, path, What::kName);
  return libc.lutimes(path, times);
}

int SetTimesOf(int fd, const timeval* times) {
  return ChangeOf(
      fd, What::kAttributes, [&](const char* path) { return libc.utimes(path, times); },
      [&] { return libc.futimes(fd, times); });
}

int SetTimesAt(int folder, const char* path, const timeval* times) {
  if (path == nullptr) return SetTimesOf(folder, times);
  const Change change(folder, path, What::kAttributes);
  return libc.futimesat(folder, path, times);
}

int SetExactTimesOf(int fd, const timespec* times) {
  return ChangeOf(
      fd, What::kAttributes,
      [&](const char* path) { return libc.utimensat(AT_FDCWD, path, times, 0); },
      [&] { return libc.futimens(fd, times); });
}

int SetExactTimesAt(int folder, const char* path, const timespec* times, int flags) {
  if ((path == nullptr || IsEmptyPath(path)) && folder >= 0) {
    return ChangeOf(
        folder, What::kAttributes,
        [&](const char* source) { return libc.utimensat(AT_FDCWD, source, times, 0); },
        [&] { return libc.utimensat(folder, path, times, flags); });
  }
  files::Identity copied;
  if ((flags & AT_SYMLINK_NOFOLLOW) == 0) path = PathOfSource(folder, path, &copied);
  const Change change(folder, path, AttributesOr((flags & AT_SYMLINK_NOFOLLOW) != 0));
  return libc.utimensat(folder, path, times, flags);
}

int SetAttribute(const char* path, const char* name, const void* value, size_t bytes, int flags) {
  files::Identity source;
  path = PathOfSource(AT_FDCWD, path, &source);
  const Change change(AT_FDCWD, path, What::kAttributes);
  return libc.setxattr(path, name, value, bytes, flags);
}

int SetAttributeOfLink(const char* path, const char* name, const void* value, size_t bytes,
                       int flags) {
  const Change change(AT_FDCWD, path, What::kName);
  return libc.lsetxattr(path, name, value, bytes, flags);
}

int SetAttributeOf(int fd, const char* name, const void* value, size_t bytes, int flags) {
  return ChangeOf(
      fd, What::kAttributes,
      [&](const char* path) { return libc.setxattr(path, name, value, bytes, flags); },
      [&] { return libc.fsetxattr(fd, name, value, bytes, flags); });
}

int RemoveAttribute(const char* path, const char* name) {
  files::Identity source;
  path = PathOfSource(AT_FDCWD, path, &source);
  const Change change(AT_FDCWD, path, What::kAttributes);
  return libc.removexattr(path, name);
}

int RemoveAttributeOfLink(const char* path, const char* name) {
  const Change change(AT_FDCWD, path, What::kName);
  return libc.lremovexattr(path, name);
}

int RemoveAttributeOf(int fd, const char* name) {
  return ChangeOf(
      fd, What::kAttributes, [&](const char* path) { return libc.removexattr(path, name); },
      [&] { return libc.fremovexattr(fd, name); });
}

}  // namespace forebay::posix
