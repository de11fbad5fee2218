#include "base/trusted_files.h"

#include <fcntl.h>
#include <grp.h>
#include <sys/statfs.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <charconv>
#include <cstdio>
#include <utility>
#include <vector>

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

// "which ..."; who is trusted must be somebody, and this user one of them.
Result<gid_t> GroupOf(const std::string& name) {
  gid_t id = 0;
  const char* end = name.data() + name.size();
  const auto [at, error] = std::from_chars(name.data(), end, id);
  if (error != std::errc() || at != end) {
    std::vector<char> buffer(64 << 10);  // its members' names, which may be many
    struct group found = {};
    struct group* entry = nullptr;
    int failed = 0;
    while ((failed = getgrnam_r(name.c_str(), &found, buffer.data(), buffer.size(), &entry)) ==
               ERANGE &&
           buffer.size() < (64 << 20)) {
      buffer.resize(buffer.size() * 2);
    }
    if (failed != 0 || entry == nullptr) {
      return Status(Code::kInvalidArgument, "which this machine does not know (see getent group)");
    }
    id = found.gr_gid;
  }
  std::array<gid_t, 1024> groups = {};
  const int count = getgroups(static_cast<int>(groups.size()), groups.data());
  const auto last = groups.begin() + std::max(count, 0);
  if (geteuid() == 0 || id == getegid() || std::find(groups.begin(), last, id) != last) return id;
  return Status(Code::kPermissionDenied,
                StrCat("of which this process (user ", geteuid(), ") is not a member"));
}

// Whatever the umask is. False: errno tells.
bool ShareWith(int folder, gid_t group) {
  return fchown(folder, uid_t(-1), group) == 0 && fchmod(folder, 02770) == 0;
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

Result<OwnedFd> OpenPrivateFolder(const std::string& path, std::string_view what, bool make,
                                  const std::string& group) {
  const std::string plain = WithoutSlashes(path);
  std::optional<gid_t> trusted;
  if (!group.empty()) {
    Result<gid_t> found = GroupOf(group);
    if (!found)
      return Status(found.error().code(),
                    StrCat("the ", what, " ", path, " is to be shared with the group '", group,
                           "', ", found.error().message()));
    trusted = *found;
  }
  constexpr int kFlags = O_RDONLY | O_DIRECTORY | O_CLOEXEC | O_NOFOLLOW;
  OwnedFd folder(open(plain.c_str(), kFlags));
  if (!folder.valid() && errno == ENOENT && make) {
    if (const int error = MakePrivateFolder(plain); error != 0) {
      return ErrnoStatus(error, StrCat("make the ", what, " ", path));
    }
    folder = OwnedFd(open(plain.c_str(), kFlags));
    if (folder.valid() && trusted && !ShareWith(folder.get(), *trusted)) {
      return ErrnoStatus(errno, StrCat("give the ", what, " ", path, " to the group ", group));
    }
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
  if (trusted) {
    constexpr mode_t kGroupUses = S_IRWXG;
    const bool shared = st.st_gid == *trusted && (st.st_mode & kGroupUses) == kGroupUses;
    if (shared && (st.st_mode & (S_IWOTH | S_ISVTX)) == 0) return folder;
    return Status(Code::kPermissionDenied,
                  StrCat("the ", what, " ", path, " (", OwnerAndMode(st), ", group ", st.st_gid,
                         ") is not one that the group '", group,
                         "', and nobody else, may write to; let its owner say: chgrp -R ", group,
                         " ", path, " && chmod -R u=rwX,g=rwX,o= ", path, " && chmod g+s ", path,
                         ", or name one that is not there yet"));
  }
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
                         "name a folder below it, such as ", below,
                         (st.st_mode & (S_IWOTH | S_ISVTX)) != 0
                             ? ""
                             : ", or, if you trust everybody in its group, name that with "
                               "cache_group"));
  }
  return folder;
}

namespace {

OwnedFd OpenChecked(int folder, const char* name, int flags, bool shares) {
  flags |= O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK | O_NOCTTY;
  const bool writes = (flags & O_ACCMODE) != O_RDONLY;
  std::optional<gid_t> group;
  if (shares && writes) group = TrustedGroup(folder);
  OwnedFd fd(OpenBelow(folder, name, flags, (flags & O_CREAT) != 0 ? 0600 : 0));
  if (!fd.valid()) {
    // A link, a FIFO without a reader, a socket, a dead device, a folder.
    const bool other = errno == ELOOP || errno == ENXIO || errno == ENODEV || errno == EISDIR;
    return Refused(other ? EPERM : errno);
  }
  struct stat st = {};
  if (fstat(fd.get(), &st) != 0) return Refused(errno);
  const bool own = st.st_uid == geteuid();
  bool trusted = own && (st.st_mode & kOthersWrite) == 0;
  if (shares && !trusted && (st.st_mode & S_IWOTH) == 0) {
    if (!writes) group = TrustedGroup(folder);
    trusted = group && st.st_gid == *group;
  }
  if (!S_ISREG(st.st_mode) || !trusted) {
    fd.Reset();
    return Refused(EPERM);
  }
  if (writes && group && own) {
    if (st.st_gid != *group && fchown(fd.get(), uid_t(-1), *group) != 0) return Refused(errno);
    if ((st.st_mode & 07777) != 0660) (void)fchmod(fd.get(), 0660);
  } else if (writes && !group && (st.st_mode & kForOthers) != 0) {
    (void)fchmod(fd.get(), 0600);
  }
  MakeBlocking(fd.get(), flags);
  return fd;
}

}  // namespace

OwnedFd OpenPrivateFile(int folder, const char* name, int flags) {
  return OpenChecked(folder, name, flags, false);
}

OwnedFd OpenTrustedFile(int folder, const char* name, int flags) {
  return OpenChecked(folder, name, flags, true);
}

std::optional<gid_t> TrustedGroup(int folder) {
  struct stat st = {};
  if (fstat(folder, &st) != 0 || (st.st_mode & S_IWGRP) == 0) return std::nullopt;
  return st.st_gid;
}

int MakeTrustedFolder(int folder, const char* name) {
  if (mkdirat(folder, name, 0700) != 0) return errno == EEXIST ? 0 : errno;
  const std::optional<gid_t> group = TrustedGroup(folder);
  if (!group) return 0;
  const OwnedFd made(openat(folder, name, O_RDONLY | O_DIRECTORY | O_CLOEXEC | O_NOFOLLOW));
  return made.valid() && ShareWith(made.get(), *group) ? 0 : errno;
}

Result<SecretText> ReadSecretFile(const std::string& path, std::string_view what,
                                  std::string_view remedy, size_t longest) {
  SecretText out;
  do {
    out.file = OwnedFd(open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK));
  } while (!out.file.valid() && errno == EINTR);
  if (!out.file.valid()) {
    if (errno == ELOOP) {
      return Status(Code::kPermissionDenied,
                    StrCat(what, " ", path, " is a symbolic link", remedy));
    }
    return ErrnoStatus(errno, StrCat("opening ", what, " ", path));
  }
  struct stat st = {};
  if (fstat(out.file.get(), &st) != 0) return ErrnoStatus(errno, path);
  if (!S_ISREG(st.st_mode) || st.st_uid != geteuid() || (st.st_mode & kForOthers) != 0) {
    return Status(Code::kPermissionDenied,
                  StrCat(what, " ", path,
                         !S_ISREG(st.st_mode)     ? " is not a file"
                         : st.st_uid != geteuid() ? " is another user's"
                                                  : " can be read by others",
                         remedy));
  }
  out.text.resize(longest + 1);
  size_t size = 0;
  while (size < out.text.size()) {
    const ssize_t got = read(out.file.get(), out.text.data() + size, out.text.size() - size);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) return ErrnoStatus(errno, StrCat("reading ", what, " ", path));
    if (got == 0) break;
    size += static_cast<size_t>(got);
  }
  if (size > longest) {
    return Status(Code::kInvalidArgument,
                  StrCat(what, " ", path, " is longer than ", longest, " bytes", remedy));
  }
  out.text.resize(size);
  return out;
}

bool OnLocalFileSystem(int fd) {
  struct statfs at = {};
  return fstatfs(fd, &at) == 0 && IsLocalFileSystem(static_cast<uint32_t>(at.f_type));
}

bool IsLocalFileSystem(uint64_t magic) {
  // From linux/magic.h and the file systems themselves; the header of some distributions lacks a
  // few. FUSE is none of them: what is behind it is not known.
  switch (magic) {
    case 0xEF53:      // ext2, ext3, ext4
    case 0x58465342:  // XFS
    case 0x9123683E:  // btrfs
    case 0x01021994:  // tmpfs, memfd
    case 0x858458F6:  // ramfs
    case 0x958458F6:  // hugetlbfs
    case 0xF2F52010:  // f2fs
    case 0x2FC12FC1:  // ZFS
    case 0xCA451A4E:  // bcachefs
    case 0x794C7630:  // overlayfs, whose upper layer is local
    case 0x73717368:  // squashfs
      return true;
    default:
      return false;
  }
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
