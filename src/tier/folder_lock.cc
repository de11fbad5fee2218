#include "tier/folder_lock.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <climits>

#include "base/trusted_files.h"

namespace forebay {

int FolderLock::Take(int folder) {
  OwnedFd fd = OpenPrivateFile(folder, kName, O_RDWR | O_CREAT);
  if (!fd.valid()) return errno;
  // Whoever asks for the holder has it for a moment.
  for (int attempt = 0; flock(fd.get(), LOCK_EX | LOCK_NB) != 0; ++attempt) {
    if (errno != EWOULDBLOCK || attempt == 3) return errno;
    usleep(2000);
  }
  std::array<char, HOST_NAME_MAX + 1> host = {};
  (void)gethostname(host.data(), host.size() - 1);
  const std::string text = StrCat("process ", getpid(), " on ", host.data(), "\n");
  // For people only: a lock that cannot say who holds it is one all the same. A file that has
  // another name, too, may be somebody's.
  struct stat st {};
  if (fstat(fd.get(), &st) == 0 && st.st_nlink <= 1) {
    (void)!ftruncate(fd.get(), 0);
    (void)!pwrite(fd.get(), text.data(), text.size(), 0);
  }
  fd_ = std::move(fd);
  return 0;
}

void FolderLock::Unlock() {
  // A forked child may hold the same description open.
  if (fd_.valid()) flock(fd_.get(), LOCK_UN);
}

bool FolderLock::Held(int folder) const {
  struct stat ours {};
  struct stat named {};
  if (!fd_.valid() || fstat(fd_.get(), &ours) != 0 ||
      fstatat(folder, kName, &named, AT_SYMLINK_NOFOLLOW) != 0) {
    return false;
  }
  // To lock what is locked by the same description changes nothing.
  return ours.st_ino == named.st_ino && ours.st_dev == named.st_dev &&
         flock(fd_.get(), LOCK_EX | LOCK_NB) == 0;
}

Status FolderLock::Describe(int error, const std::string& folder, const std::string& what) {
  if (error != EPERM) return ErrnoStatus(error, what);
  return Status(Code::kPermissionDenied,
                StrCat(what, ": ", folder, "/", kName,
                       " is not a regular file of this user that nobody else may write to; remove "
                       "it"));
}

std::string FolderLock::Holder(int folder) {
  const OwnedFd fd = OpenPrivateFile(folder, kName, O_RDONLY);
  if (!fd.valid()) return "";
  if (flock(fd.get(), LOCK_SH | LOCK_NB) == 0) {
    flock(fd.get(), LOCK_UN);
    return "";
  }
  std::array<char, 512> text = {};
  const ssize_t n = pread(fd.get(), text.data(), text.size() - 1, 0);
  std::string holder(text.data(), n > 0 ? static_cast<size_t>(n) : 0);
  while (!holder.empty() && holder.back() == '\n') holder.pop_back();
  return holder.empty() ? "another process" : holder;
}

}  // namespace forebay
