#include "tier/folder_lock.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <climits>
#include <cstdio>

#include "base/boot_id.h"
#include "base/trusted_files.h"

namespace forebay {
namespace {

// As the lock says it; empty where the machine does not tell.
std::string BootLine() {
  const BootId boot = ReadBootId();
  if (!boot.known()) return "";
  std::array<char, 64> line = {};
  std::snprintf(line.data(), line.size(), "boot %016llx%016llx\n",
                static_cast<unsigned long long>(boot.high),
                static_cast<unsigned long long>(boot.low));
  return line.data();
}

std::string TextOf(int fd) {
  std::array<char, 512> text = {};
  const ssize_t n = pread(fd, text.data(), text.size(), 0);
  return std::string(text.data(), n > 0 ? static_cast<size_t>(n) : 0);
}

}  // namespace

int FolderLock::Take(int folder) {
  OwnedFd fd = OpenTrustedFile(folder, kName, O_RDWR | O_CREAT);
  if (!fd.valid()) return errno;
  // Whoever asks for the holder has it for a moment.
  for (int attempt = 0; flock(fd.get(), LOCK_EX | LOCK_NB) != 0; ++attempt) {
    if (errno != EWOULDBLOCK || attempt == 3) return errno;
    usleep(2000);
  }
  fd_ = std::move(fd);
  const std::string boot = BootLine();
  const std::string before = TextOf(fd_.get());
  same_boot_ = !boot.empty() && before.ends_with("\n" + boot);
  Write(same_boot_);
  if (before.empty()) {
    (void)fsync(fd_.get());
    (void)fsync(folder);
  }
  return 0;
}

void FolderLock::Write(bool swept) {
  // A file that has another name, too, may be somebody's.
  struct stat st {};
  if (fstat(fd_.get(), &st) != 0 || st.st_nlink > 1) return;
  std::array<char, HOST_NAME_MAX + 1> host = {};
  (void)gethostname(host.data(), host.size() - 1);
  const std::string text =
      StrCat("process ", getpid(), " on ", host.data(), "\n", swept ? BootLine() : "");
  // For people, and to save time: a lock that cannot say who holds it is one all the same.
  (void)!ftruncate(fd_.get(), 0);
  (void)!pwrite(fd_.get(), text.data(), text.size(), 0);
}

void FolderLock::NoteSwept() {
  same_boot_ = true;
  Write(true);
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
  const OwnedFd fd = OpenTrustedFile(folder, kName, O_RDONLY);
  if (!fd.valid()) return "";
  if (flock(fd.get(), LOCK_SH | LOCK_NB) == 0) {
    flock(fd.get(), LOCK_UN);
    return "";
  }
  const std::string text = TextOf(fd.get());
  const std::string holder = text.substr(0, text.find('\n'));
  return holder.empty() ? "another process" : holder;
}

}  // namespace forebay
