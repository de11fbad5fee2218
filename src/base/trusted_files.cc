#include "base/trusted_files.h"

#include <fcntl.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstdio>
#include <utility>

#if __has_include(<linux/openat2.h>)
#include <linux/openat2.h>
#endif

namespace forebay {
namespace {

constexpr mode_t kForOthers = S_IRWXG | S_IRWXO;
constexpr mode_t kOthersWrite = S_IWGRP | S_IWOTH;

// With a slash at its end a link would be followed.
std::string WithoutSlashes(std::string path) {
  while (path.size() > 1 && path.back() == '/') path.pop_back();
  return path;
}

int OpenBelow(int folder, const char* name, int flags, mode_t mode) {
  int fd = -1;
#ifdef RESOLVE_NO_SYMLINKS
  open_how how = {};
  how.flags = static_cast<uint64_t>(flags);
  how.mode = mode;
  how.resolve = RESOLVE_NO_SYMLINKS;
  do {
    fd = static_cast<int>(syscall(SYS_openat2, folder, name, &how, sizeof how));
  } while (fd < 0 && errno == EINTR);
  // Before Linux 5.6 there is none, and old container policies refuse it: then only the last
  // component is kept from being a link.
  if (fd >= 0 || (errno != ENOSYS && errno != EPERM)) return fd;
#endif
  do {
    fd = openat(folder, name, flags, mode);
  } while (fd < 0 && errno == EINTR);
  return fd;
}

// A file system may answer reads of a non-blocking descriptor with EAGAIN where others would wait.
void MakeBlocking(int fd, int flags) { (void)fcntl(fd, F_SETFL, flags & ~O_NONBLOCK); }

OwnedFd Refused(int error) {
  errno = error;
  return OwnedFd();
}

}  // namespace

int MakeFolders(const std::string& folder, mode_t mode, mode_t above) {
  if (folder.empty() || mkdir(folder.c_str(), mode) == 0 || errno == EEXIST) return 0;
  if (errno != ENOENT) return errno;
  const std::string plain = WithoutSlashes(folder);
  const size_t slash = plain.find_last_of('/');
  if (slash == std::string::npos || slash == 0) return ENOENT;
  if (const int error = MakeFolders(plain.substr(0, slash), above, above); error != 0) return error;
  return mkdir(plain.c_str(), mode) == 0 || errno == EEXIST ? 0 : errno;
}

std::string OwnerAndMode(const struct stat& st) {
  std::array<char, 64> text = {};
  std::snprintf(text.data(), text.size(), "user %u, mode %04o", st.st_uid,
                static_cast<unsigned>(st.st_mode & 07777));
  return text.data();
}

Result<OwnedFd> OpenPrivateFolder(const std::string& path, std::string_view what, bool make) {
  const std::string plain = WithoutSlashes(path);
  constexpr int kFlags = O_RDONLY | O_DIRECTORY | O_CLOEXEC | O_NOFOLLOW;
  OwnedFd folder(open(plain.c_str(), kFlags));
  if (!folder.valid() && errno == ENOENT && make) {
    if (const int error = MakePrivateFolder(plain); error != 0) {
      return ErrnoStatus(error, StrCat("make the ", what, " ", path));
    }
    folder = OwnedFd(open(plain.c_str(), kFlags));
  }
  struct stat st = {};
  if (!folder.valid()) {
    int error = errno;
    if (lstat(plain.c_str(), &st) == 0 && S_ISLNK(st.st_mode)) {
      if (st.st_uid != geteuid() && st.st_uid != 0) {
        return Status(
            Code::kPermissionDenied,
            StrCat("the ", what, " ", path, " is another user's symbolic link (user ", st.st_uid,
                   "), who would choose what is read from it; name the folder it leads "
                   "to, or a folder of your own"));
      }
      folder = OwnedFd(open(plain.c_str(), kFlags & ~O_NOFOLLOW));
      error = errno;
    }
    if (!folder.valid()) return ErrnoStatus(error, StrCat("open the ", what, " ", path));
  }
  if (fstat(folder.get(), &st) != 0) return ErrnoStatus(errno, StrCat("stat ", path));
  const std::string below = StrCat(plain, "/forebay-", geteuid());
  if (st.st_uid != geteuid()) {
    return Status(Code::kPermissionDenied,
                  StrCat("the ", what, " ", path, " is another user's (", OwnerAndMode(st),
                         "; this process is user ", geteuid(),
                         "), who would choose what is read from it; name a folder of your own, "
                         "such as ",
                         below, ", or take this one over: chown -R ", geteuid(), " ", path));
  }
  if ((st.st_mode & kOthersWrite) != 0) {
    const bool shared = (st.st_mode & S_ISVTX) != 0;
    return Status(Code::kPermissionDenied,
                  StrCat("others may write to the ", what, " ", path, " (", OwnerAndMode(st),
                         ") and would choose what is read from it; ",
                         shared ? "" : StrCat("chmod go-w ", path, ", or "),
                         "name a folder below it, such as ", below));
  }
  return folder;
}

OwnedFd OpenPrivateFile(int folder, const char* name, int flags) {
  flags |= O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK | O_NOCTTY;
  OwnedFd fd(OpenBelow(folder, name, flags, (flags & O_CREAT) != 0 ? 0600 : 0));
  if (!fd.valid()) {
    // A link, a FIFO without a reader, a socket, a dead device, a folder.
    const bool other = errno == ELOOP || errno == ENXIO || errno == ENODEV || errno == EISDIR;
    return Refused(other ? EPERM : errno);
  }
  struct stat st = {};
  if (fstat(fd.get(), &st) != 0) return Refused(errno);
  if (!S_ISREG(st.st_mode) || st.st_uid != geteuid() || (st.st_mode & kOthersWrite) != 0) {
    fd.Reset();
    return Refused(EPERM);
  }
  if ((st.st_mode & kForOthers) != 0 && (flags & O_ACCMODE) != O_RDONLY) {
    (void)fchmod(fd.get(), 0600);
  }
  MakeBlocking(fd.get(), flags);
  return fd;
}

OwnedFd OpenRegularFile(const char* path) {
  constexpr int kFlags = O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY;
  OwnedFd fd;
  do {
    fd = OwnedFd(open(path, kFlags));
  } while (!fd.valid() && errno == EINTR);
  if (!fd.valid()) return Refused(errno == ENXIO || errno == ENODEV ? ESPIPE : errno);
  // The type of an open file does not change: there is no need to ask the storage for it.
  struct statx found = {};
  mode_t mode = 0;
  if (statx(fd.get(), "", AT_EMPTY_PATH | AT_STATX_DONT_SYNC, STATX_TYPE, &found) == 0) {
    mode = found.stx_mode;
  } else {
    struct stat st = {};
    if (fstat(fd.get(), &st) != 0) return Refused(errno);
    mode = st.st_mode;
  }
  if (!S_ISREG(mode)) {
    fd.Reset();
    return Refused(S_ISDIR(mode) ? EISDIR : ESPIPE);
  }
  MakeBlocking(fd.get(), kFlags);
  return fd;
}

}  // namespace forebay
