#include "posix/partial.h"

#include <fcntl.h>
#include <limits.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "files/client.h"
#include "files/raw_call.h"
#include "posix/libc.h"
#include "posix/memory.h"
#include "posix/place.h"

namespace forebay::posix {

constinit std::atomic<bool> any_partial = false;
constinit std::atomic<uint16_t> partial_of[kMostTracked] = {};

namespace {

using files::RawArgument;
using files::RawCall;

constexpr uint32_t kEntries = 64;
constexpr size_t kMostRead = 0x7ffff000;  // Linux's own bound

struct Who {
  uint64_t device = 0;
  uint64_t inode = 0;
  uint64_t size = 0;
  bool operator==(const Who&) const = default;
};

struct Entry {
  std::atomic<uint32_t> sequence = 0;  // odd: being written
  Who who;
  files::Client::Seen seen;
  size_t length = 0;
  char path[kMostPath] = {};
};

constinit Entry entries[kEntries] = {};
constinit std::atomic<uint32_t> next_entry = 0;
constinit std::atomic<int> owner = 0;  // the process that has tracked last

bool IsOwner() { return RawCall(SYS_getpid) == owner.load(std::memory_order_relaxed); }

// What a read needs, taken out of an entry.
struct File {
  Who who;
  Entry* entry = nullptr;
  size_t length = 0;
  char path[kMostPath];
  std::string_view view() const { return {path, length}; }
};

bool AskWho(int fd, Who* out) {
  struct statx stat {};
  // What the kernel knows will do: no message to the storage.
  if (RawCall(SYS_statx, fd, RawArgument(""), AT_EMPTY_PATH | AT_STATX_DONT_SYNC,
              STATX_TYPE | STATX_INO | STATX_SIZE, RawArgument(&stat)) != 0 ||
      !S_ISREG(stat.stx_mode)) {
    return false;
  }
  *out = {.device = (uint64_t{stat.stx_dev_major} << 32) | stat.stx_dev_minor,
          .inode = stat.stx_ino,
          .size = stat.stx_size};
  return true;
}

bool Take(Entry& entry, File* out) {
  const uint32_t before = entry.sequence.load(std::memory_order_acquire);
  if ((before & 1) != 0 || entry.length == 0 || entry.length >= kMostPath) return false;
  out->who = entry.who;
  out->entry = &entry;
  out->length = entry.length;
  if (out->length >= kMostPath) return false;
  std::memcpy(out->path, entry.path, out->length);
  std::atomic_thread_fence(std::memory_order_acquire);
  return entry.sequence.load(std::memory_order_relaxed) == before;
}

bool FileOf(int fd, File* out) {
  const uint16_t number = partial_of[fd].load(std::memory_order_acquire);
  Who now;
  if (number == 0 || number > kEntries || !Take(entries[number - 1], out) || !AskWho(fd, &now) ||
      now != out->who) {
    partial_of[fd].store(0, std::memory_order_relaxed);
    return false;
  }
  return true;
}

// What there is of `bytes` from `offset` on, or -errno.
ssize_t ReadAt(int fd, const File& file, char* out, size_t bytes, uint64_t offset) {
  size_t done = 0;
  while (done < bytes) {
    const uint64_t at = offset + done;
    if (at >= file.who.size && done > 0) break;
    int64_t got = -EAGAIN;
    size_t want = bytes - done;
    if (at < file.who.size) {
      want = want < file.who.size - at ? want : static_cast<size_t>(file.who.size - at);
      want = files::Client::Piece(at, want);
      got = TheClient().ReadPart(file.view(), out + done, want, at, &file.entry->seen);
    }
    if (got <= 0) {
      got = libc.pread(fd, out + done, want, static_cast<off_t>(at));
      if (got < 0) return done > 0 ? static_cast<ssize_t>(done) : -errno;
      if (got == 0) break;
    }
    done += static_cast<size_t>(got);
  }
  return static_cast<ssize_t>(done);
}

bool Sum(const iovec* parts, int count, size_t* total) {
  *total = 0;
  if (count <= 0 || count > IOV_MAX ||
      !Readable(parts, static_cast<size_t>(count) * sizeof(iovec))) {
    return false;
  }
  for (int i = 0; i < count; ++i) {
    if (parts[i].iov_len > kMostRead - *total) return false;
    *total += parts[i].iov_len;
  }
  return *total > 0;
}

ssize_t ReadParts(int fd, const File& file, const iovec* parts, int count, uint64_t offset) {
  ssize_t done = 0;
  for (int i = 0; i < count; ++i) {
    if (parts[i].iov_len == 0) continue;
    const ssize_t got = ReadAt(fd, file, static_cast<char*>(parts[i].iov_base), parts[i].iov_len,
                               offset + static_cast<uint64_t>(done));
    if (got < 0) return done > 0 ? done : got;
    done += got;
    if (static_cast<size_t>(got) < parts[i].iov_len) break;
  }
  return done;
}

ssize_t Result(ssize_t got, int kept) {
  errno = got < 0 ? static_cast<int>(-got) : kept;
  return got < 0 ? -1 : got;
}

}  // namespace

[[gnu::noinline]] void TrackPartial(int fd, std::string_view path) {
  Who who;
  if (fd < 0 || fd >= kMostTracked || path.empty() || path.size() >= kMostPath ||
      !AskWho(fd, &who)) {
    return;
  }
  uint16_t number = 0;
  for (uint16_t i = 0; i < kEntries && number == 0; ++i) {
    File file;
    if (entries[i].length == path.size() && entries[i].who == who && Take(entries[i], &file) &&
        file.who == who && file.view() == path) {
      number = static_cast<uint16_t>(i + 1);
    }
  }
  if (number == 0) {
    const uint32_t i = next_entry.fetch_add(1, std::memory_order_relaxed) % kEntries;
    Entry& entry = entries[i];
    uint32_t before = entry.sequence.load(std::memory_order_relaxed);
    if ((before & 1) != 0 ||
        !entry.sequence.compare_exchange_strong(before, before + 1, std::memory_order_acq_rel)) {
      return;
    }
    std::atomic_thread_fence(std::memory_order_release);
    entry.who = who;
    entry.seen.block.store(0, std::memory_order_relaxed);
    entry.length = path.size();
    std::memcpy(entry.path, path.data(), path.size());
    entry.sequence.store(before + 2, std::memory_order_release);
    number = static_cast<uint16_t>(i + 1);
  }
  owner.store(static_cast<int>(RawCall(SYS_getpid)), std::memory_order_relaxed);
  partial_of[fd].store(number, std::memory_order_release);
  any_partial.store(true, std::memory_order_release);
}

bool PartialOf(int fd, PartialFile* out) {
  File file;
  if (!MayBePartial(fd) || !FileOf(fd, &file)) return false;
  out->device = file.who.device;
  out->inode = file.who.inode;
  out->size = file.who.size;
  out->length = file.length;
  std::memcpy(out->path, file.path, file.length);
  out->path[file.length] = 0;
  return true;
}

int OpenCopyOf(const PartialFile& file) {
  char name[files::Client::kMostCopyPath];
  if (!TheClient().CopyPath(file.view(), name, sizeof(name))) return -1;
  long fd = -EINTR;
  while (fd == -EINTR) {
    fd = RawCall(SYS_openat, AT_FDCWD, RawArgument(name), O_RDONLY | O_CLOEXEC, 0);
  }
  if (fd < 0) return -1;
  const auto copy = static_cast<int>(fd);
  files::Identity identity;
  const struct stat& stat = identity.stat;
  if (IdentityOf(copy, &identity) && stat.st_ino == file.inode &&
      static_cast<uint64_t>(stat.st_size) == file.size &&
      ((uint64_t{major(stat.st_dev)} << 32) | minor(stat.st_dev)) == file.device &&
      IsCurrent(copy, file.path)) {
    return copy;
  }
  RawCall(SYS_close, copy);
  return -1;
}

void ForgetPartial(int fd) {
  if (MayBePartial(fd) && IsOwner()) partial_of[fd].store(0, std::memory_order_relaxed);
}

void ForgetPartials(unsigned first, unsigned last) {
  if (!any_partial.load(std::memory_order_relaxed) || !IsOwner()) return;
  for (unsigned fd = first; fd <= last && fd < kMostTracked; ++fd) {
    partial_of[fd].store(0, std::memory_order_relaxed);
  }
}

void SharePartial(int from, int to) {
  if (!any_partial.load(std::memory_order_relaxed) || to < 0 || to >= kMostTracked) return;
  const bool known = from >= 0 && from < kMostTracked;
  const uint16_t number = known ? partial_of[from].load(std::memory_order_acquire) : 0;
  if (partial_of[to].load(std::memory_order_relaxed) == number || !IsOwner()) return;
  partial_of[to].store(number, std::memory_order_release);
}

bool ReadPartial(int fd, const iovec* parts, int count, ssize_t* result) {
  const int kept = errno;
  File file;
  size_t total = 0;
  if (!Sum(parts, count, &total) || !FileOf(fd, &file)) return false;
  // The range is claimed first, in one step of the kernel: whoever shares this description, also in
  // another process, gets another range. What turns out not to be there is given back.
  const auto claim = static_cast<long>(total);
  const long end = RawCall(SYS_lseek, fd, claim, SEEK_CUR);
  if (end < claim) return false;
  const ssize_t got = ReadParts(fd, file, parts, count, static_cast<uint64_t>(end - claim));
  const long back = claim - (got > 0 ? got : 0);
  if (back > 0) RawCall(SYS_lseek, fd, -back, SEEK_CUR);
  *result = Result(got, kept);
  return true;
}

bool ReadPartialAt(int fd, const iovec* parts, int count, off_t offset, ssize_t* result) {
  const int kept = errno;
  File file;
  size_t total = 0;
  if (offset < 0 || !Sum(parts, count, &total) || !FileOf(fd, &file)) return false;
  *result = Result(ReadParts(fd, file, parts, count, static_cast<uint64_t>(offset)), kept);
  return true;
}

}  // namespace forebay::posix
