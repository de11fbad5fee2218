#include "files/run_folder.h"

#include <dirent.h>
#include <fcntl.h>
#include <linux/fs.h>
#include <stdlib.h>
#include <sys/file.h>
#include <sys/ioctl.h>
#include <sys/stat.h>
#include <sys/xattr.h>
#include <unistd.h>

#include <cerrno>
#include <memory>
#include <string_view>
#include <utility>

#include "base/trusted_files.h"
#include "files/identity.h"

namespace forebay::files {
namespace {

template <typename See>
void EachName(int folder, See see) {
  const int copy = openat(folder, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (copy < 0) return;
  const std::unique_ptr<DIR, int (*)(DIR*)> list(fdopendir(copy), closedir);
  if (list == nullptr) {
    close(copy);
    return;
  }
  while (const dirent* found = readdir(list.get())) {
    const std::string_view name(found->d_name);
    if (name != "." && name != "..") see(*found);
  }
}

// Makes RUN/copies, in a block group of its own where the file system is ext4: that puts the inodes
// of files into their folder's group, and there passes by those that were given up in the last
// minutes, one after the other. Copies of a run that came soon after another took 0.7 ms longer
// each (1,200 files: first epoch 1.4 s instead of 0.55). A folder in one that is marked as the top
// of a hierarchy gets a group by a hash of its name, and keeps it under another name. False: errno
// says why not.
bool MakeCopies(int run, const std::string& path) {
  const std::string top = StrCat(path, "/spread");
  std::string chosen = StrCat(top, "/XXXXXX");
  bool moved = false;
  (void)mkdirat(run, "spread", 0700);
  if (const OwnedFd spread(openat(run, "spread", O_RDONLY | O_DIRECTORY | O_CLOEXEC | O_NOFOLLOW));
      spread.valid()) {
    int flags = 0;
    if (ioctl(spread.get(), FS_IOC_GETFLAGS, &flags) == 0) {
      flags |= FS_TOPDIR_FL;
      if (ioctl(spread.get(), FS_IOC_SETFLAGS, &flags) == 0 && mkdtemp(chosen.data()) != nullptr) {
        moved = renameat(AT_FDCWD, chosen.c_str(), run, "copies") == 0;
        if (!moved) rmdir(chosen.c_str());
      }
    }
  }
  unlinkat(run, "spread", AT_REMOVEDIR);
  return moved || mkdirat(run, "copies", 0700) == 0 || errno == EEXIST;
}

}  // namespace

Result<RunFolder> RunFolder::Open(const std::string& path) {
  RunFolder out;
  out.path_ = path;
  if (mkdir(path.c_str(), 0700) != 0 && errno != EEXIST) {
    return ErrnoStatus(errno, StrCat("making the cache folder ", path));
  }
  Result<OwnedFd> folder = OpenPrivateFolder(path, "cache folder", false);
  if (!folder) return folder.error();
  out.folder_ = *std::move(folder);
  out.lock_ = OpenPrivateFile(out.folder_.get(), "lock", O_RDWR | O_CREAT);
  if (!out.lock_.valid()) return ErrnoStatus(errno, StrCat("opening ", path, "/lock"));
  if (flock(out.lock_.get(), LOCK_EX | LOCK_NB) != 0) {
    return Status(Code::kUnavailable, StrCat("another file service uses the cache folder ", path));
  }
  if (!MakeCopies(out.folder_.get(), path)) {
    return ErrnoStatus(errno, StrCat("making ", path, "/copies"));
  }
  out.copies_ =
      OwnedFd(openat(out.folder_.get(), "copies", O_RDONLY | O_DIRECTORY | O_CLOEXEC | O_NOFOLLOW));
  if (!out.copies_.valid()) return ErrnoStatus(errno, StrCat("opening ", path, "/copies"));
  FOREBAY_RETURN_IF_ERROR(out.CheckAttributes());
  out.Sweep();
  // Of an older Forebay, which had its table here.
  for (const char* name : {"table", "table.tmp"}) unlinkat(out.folder_.get(), name, 0);
  return out;
}

Status RunFolder::CheckAttributes() const {
  constexpr const char* kTried = "try.tmp";
  const OwnedFd file(
      openat(copies_.get(), kTried, O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK, 0600));
  if (!file.valid()) return ErrnoStatus(errno, StrCat("writing into ", path_, "/copies"));
  const int failed = fsetxattr(file.get(), kIdentityName, "x", 1, 0) == 0 ? 0 : errno;
  unlinkat(copies_.get(), kTried, 0);
  if (failed == 0) return Status();
  if (failed == EOPNOTSUPP || failed == EPERM) {
    return Status(Code::kUnimplemented,
                  StrCat("the file system of the cache folder ", path_,
                         " has no extended attributes (user.*), which copies need; name a folder "
                         "on a local disk (ext4, xfs, btrfs), such as --cache=/var/tmp/forebay"));
  }
  return ErrnoStatus(failed, StrCat("setting an extended attribute in ", path_, "/copies"));
}

void RunFolder::Sweep() const {
  EachName(copies_.get(), [&](const dirent& found) { unlinkat(copies_.get(), found.d_name, 0); });
}

bool RunFolder::InPlace() const {
  const auto same = [](int ours, const std::string& path) {
    struct stat open = {};
    struct stat named = {};
    return fstat(ours, &open) == 0 && stat(path.c_str(), &named) == 0 &&
           named.st_dev == open.st_dev && named.st_ino == open.st_ino;
  };
  return same(lock_.get(), StrCat(path_, "/lock")) && same(copies_.get(), StrCat(path_, "/copies"));
}

void RunFolder::Leave() {
  struct stat named = {};
  struct stat ours = {};
  const bool at_path = stat(path_.c_str(), &named) == 0 && fstat(folder_.get(), &ours) == 0 &&
                       named.st_dev == ours.st_dev && named.st_ino == ours.st_ino;
  Sweep();
  unlinkat(folder_.get(), "copies", AT_REMOVEDIR);
  unlinkat(folder_.get(), "lock", 0);
  if (at_path) rmdir(path_.c_str());  // another's of that name stays
}

}  // namespace forebay::files
