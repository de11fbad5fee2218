#include "tier/folder_files.h"

#include <dirent.h>
#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cstdio>
#include <memory>
#include <optional>
#include <string_view>
#include <utility>

#include "base/crc32c.h"
#include "base/trusted_files.h"
#include "tier/folder_lock.h"
#include "tier/folder_log.h"

namespace forebay {
namespace {

constexpr const char* kWriting = "writing";
constexpr const char* kRun = "run";
constexpr const char* kLinks = "run/copies";
constexpr size_t kCheckedAtOnce = 256 << 10;

// Exactly `digits` lower-case hex digits.
template <typename T>
std::optional<T> ParseHex(std::string_view text, size_t digits) {
  if (text.size() != digits || text.find_first_of("ABCDEF+-") != text.npos) return std::nullopt;
  T value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + digits, value, 16);
  if (error != std::errc() || end != text.data() + digits) return std::nullopt;
  return value;
}

// The names in a folder; empty when it cannot be read.
class Listing {
 public:
  explicit Listing(int at, const char* name) {
    OwnedFd fd(openat(at, name, O_RDONLY | O_DIRECTORY | O_CLOEXEC | O_NOFOLLOW));
    if (fd.valid()) dir_ = fdopendir(fd.get());
    if (dir_ != nullptr) (void)fd.Release();
  }
  ~Listing() {
    if (dir_ != nullptr) closedir(dir_);
  }
  Listing(const Listing&) = delete;
  Listing& operator=(const Listing&) = delete;

  int fd() const { return dir_ == nullptr ? -1 : dirfd(dir_); }
  const char* Next() {
    const dirent* entry = dir_ == nullptr ? nullptr : readdir(dir_);
    return entry == nullptr ? nullptr : entry->d_name;
  }

 private:
  DIR* dir_ = nullptr;
};

// Moves past `n` bytes.
void Advance(std::span<iovec>& parts, size_t n) {
  while (!parts.empty()) {
    iovec& part = parts.front();
    const size_t here = std::min(n, part.iov_len);
    part.iov_base = static_cast<std::byte*>(part.iov_base) + here;
    part.iov_len -= here;
    n -= here;
    if (part.iov_len > 0) return;
    parts = parts.subspan(1);
  }
}

int WriteAll(int fd, std::span<iovec> parts, uint64_t offset) {
  Advance(parts, 0);
  while (!parts.empty()) {
    const ssize_t n =
        pwritev(fd, parts.data(), static_cast<int>(std::min<size_t>(parts.size(), 64)),
                static_cast<off_t>(offset));
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) return n < 0 ? errno : EIO;
    offset += static_cast<uint64_t>(n);
    Advance(parts, static_cast<size_t>(n));
  }
  return 0;
}

// The name of a copy in a file of its own, of this format or an older one.
bool IsCopy(std::string_view file) {
  const std::string_view name = file.substr(0, file.find('.'));
  const bool ours = file.ends_with(".bin") || file.ends_with(".fb");
  return ours && (ParseHex<uint32_t>(name, 8) ||
                  (name.size() == 24 && ParseHex<uint64_t>(name.substr(0, 16), 16) &&
                   ParseHex<uint32_t>(name.substr(16), 8)));
}

// The folders above a copy's file.
int MakeFoldersAbove(int folder, const CopyName& name) {
  for (const size_t slash : {size_t{16}, size_t{16 + 1 + 2}}) {
    CopyName above = name;
    above[slash] = '\0';
    if (const int error = MakeTrustedFolder(folder, above.data()); error != 0) return error;
  }
  return 0;
}

int Publish(int folder, const char* temporary, const CopyName& name) {
  if (renameat(folder, temporary, folder, name.data()) == 0) return 0;
  if (errno != ENOENT) return errno;
  if (const int error = MakeFoldersAbove(folder, name); error != 0) return error;
  return renameat(folder, temporary, folder, name.data()) == 0 ? 0 : errno;
}

// Whether the file's bytes, from `start` on, are the copy's. -1: errno tells.
int HasBytesOf(int fd, const CopyEntry& copy, uint64_t start) {
  const auto buffer = std::make_unique_for_overwrite<std::byte[]>(kCheckedAtOnce);
  uint32_t crc = 0;
  uint64_t at = 0;
  while (at < copy.length) {
    const ssize_t n = pread(fd, buffer.get(), std::min<uint64_t>(kCheckedAtOnce, copy.length - at),
                            static_cast<off_t>(start + at));
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) return -1;
    if (n == 0) break;
    crc = Crc32c({buffer.get(), static_cast<size_t>(n)}, crc);
    at += static_cast<uint64_t>(n);
  }
  return at == copy.length && crc == copy.crc ? 1 : 0;
}

CopyRead WhyNotOpened(int error) {
  if (error == EPERM) return CopyRead::kDamaged;  // whatever lies there is not what we wrote
  return error == ENOENT || error == ENOTDIR ? CopyRead::kGone : CopyRead::kFailed;
}

// Names that the file face gives: 32 digits, with an ending while it writes.
bool IsSecondName(std::string_view name) {
  return name.ends_with(".tmp") ||
         (name.size() >= 32 && ParseHex<uint64_t>(name.substr(0, 16), 16) &&
          ParseHex<uint64_t>(name.substr(16, 16), 16) && (name.size() == 32 || name[32] == '.'));
}

void RemoveSecondNames(int folder, const char* name) {
  Listing all(folder, name);
  while (const char* file = all.Next()) {
    if (IsSecondName(file)) (void)unlinkat(all.fd(), file, 0);
  }
}

bool IsFolder(int folder, const char* name) {
  struct stat st {};
  return fstatat(folder, name, &st, AT_SYMLINK_NOFOLLOW) == 0 && S_ISDIR(st.st_mode);
}

}  // namespace

uint64_t BlockOf(int folder) {
  constexpr uint64_t kUsual = 4096;
  struct statvfs disk {};
  if (fstatvfs(folder, &disk) != 0) return kUsual;
  // Network file systems name the size of their requests.
  const auto block = static_cast<uint64_t>(disk.f_frsize);
  return block < 512 || block > (64 << 10) ? kUsual : block;
}

CopyName GroupName(uint64_t group) {
  CopyName name;
  std::snprintf(name.data(), name.size(), "%016llx", static_cast<unsigned long long>(group));
  return name;
}

CopyName FileName(const TierKey& key) {
  CopyName name;
  std::snprintf(name.data(), name.size(), "%016llx/%02x/%016llx%08x.bin",
                static_cast<unsigned long long>(key.group), static_cast<unsigned>(key.name >> 56),
                static_cast<unsigned long long>(key.name), key.check);
  return name;
}

CopyName SegmentName(uint64_t group, uint32_t segment) {
  CopyName name;
  std::snprintf(name.data(), name.size(), "%016llx/%08x.seg",
                static_cast<unsigned long long>(group), segment);
  return name;
}

CopyName NameOf(const TierKey& key, const CopyEntry& copy) {
  return copy.packed ? SegmentName(key.group, copy.segment) : FileName(key);
}

CopyRead ReadCopy(int folder, const TierKey& key, const CopyEntry& copy, std::span<std::byte> bytes,
                  int* error) {
  const CopyName name = NameOf(key, copy);
  const OwnedFd fd = OpenTrustedFile(folder, name.data(), O_RDONLY);
  if (!fd.valid()) {
    *error = errno;
    return WhyNotOpened(*error);
  }
  // Of a file one byte more is asked for: it must end where the copy does.
  std::byte beyond{};
  const size_t whole = bytes.size();
  const size_t most = whole + (copy.packed ? 0 : 1);
  size_t have = 0;
  while (have < most) {
    std::array<iovec, 2> both = {iovec{bytes.data(), bytes.size()}, iovec{&beyond, 1}};
    std::span<iovec> parts = std::span(both).first(copy.packed ? 1 : 2);
    Advance(parts, have);
    const ssize_t n = preadv(fd.get(), parts.data(), static_cast<int>(parts.size()),
                             static_cast<off_t>((copy.packed ? copy.offset : 0) + have));
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) {
      *error = errno;
      return CopyRead::kFailed;
    }
    if (n == 0) break;
    have += static_cast<size_t>(n);
    if (have == whole) break;  // one byte more would have come along
  }
  return have == whole && Crc32c(bytes) == copy.crc ? CopyRead::kGood : CopyRead::kDamaged;
}

CopyRead CheckCopy(int folder, const TierKey& key, const CopyEntry& copy, int* error) {
  const OwnedFd fd = OpenTrustedFile(folder, NameOf(key, copy).data(), O_RDONLY);
  struct stat st {};
  if (!fd.valid() || fstat(fd.get(), &st) != 0) {
    *error = errno;
    return WhyNotOpened(*error);
  }
  const auto size = static_cast<uint64_t>(st.st_size);
  const uint64_t start = copy.packed ? copy.offset : 0;
  if (copy.packed ? size < start + copy.length : size != copy.length) return CopyRead::kDamaged;
  const int right = HasBytesOf(fd.get(), copy, start);
  if (right < 0) *error = errno;
  return right < 0 ? CopyRead::kFailed : right > 0 ? CopyRead::kGood : CopyRead::kDamaged;
}

void TouchCopy(int folder, const TierKey& key, const CopyEntry& copy) {
  const OwnedFd fd = OpenTrustedFile(folder, NameOf(key, copy).data(), O_RDONLY);
  std::array<std::byte, 4096> some;
  if (!fd.valid()) return;
  // From the disk, not from memory: a dead disk's pages may still be there.
  const auto at = static_cast<off_t>(copy.packed ? copy.offset : 0);
  (void)posix_fadvise(fd.get(), at, static_cast<off_t>(some.size()), POSIX_FADV_DONTNEED);
  (void)!pread(fd.get(), some.data(), some.size(), at);
}

CopyRead LinkCopyOut(int folder, const TierKey& key, const CopyEntry& copy, bool check, int dir,
                     const char* name, int* error) {
  const CopyName own = FileName(key);
  const OwnedFd fd = OpenTrustedFile(folder, own.data(), O_RDONLY);
  struct stat opened {};
  if (!fd.valid() || fstat(fd.get(), &opened) != 0) {
    *error = errno;
    return WhyNotOpened(*error);
  }
  if (static_cast<uint64_t>(opened.st_size) != copy.length) return CopyRead::kDamaged;
  const int right = check ? HasBytesOf(fd.get(), copy, 0) : 1;
  if (right == 0) return CopyRead::kDamaged;
  struct stat linked {};
  if (right < 0 || linkat(folder, own.data(), dir, name, 0) != 0 ||
      fstatat(dir, name, &linked, AT_SYMLINK_NOFOLLOW) != 0) {
    *error = errno;
    return *error == ENOENT ? CopyRead::kGone : CopyRead::kFailed;
  }
  if (linked.st_ino == opened.st_ino && linked.st_dev == opened.st_dev) return CopyRead::kGood;
  (void)unlinkat(dir, name, 0);
  return CopyRead::kGone;
}

int LinkFileIn(int folder, const TierKey& key, int dir, const char* name) {
  const CopyName own = FileName(key);
  for (int attempt = 0; linkat(dir, name, folder, own.data(), 0) != 0; ++attempt) {
    int error = errno;
    if (attempt == 2) return error;
    if (error == ENOENT) {
      error = MakeFoldersAbove(folder, own);
    } else if (error == EEXIST) {
      // No record names it, or the copy would be held.
      error = unlinkat(folder, own.data(), 0) == 0 ? 0 : errno;
    }
    if (error != 0) return error;
  }
  return 0;
}

CopyName TemporaryName(uint64_t number) {
  CopyName name;
  std::snprintf(name.data(), name.size(), "%s/%d-%llu.tmp", kWriting, static_cast<int>(getpid()),
                static_cast<unsigned long long>(number));
  return name;
}

OwnedFd MakeTemporary(int folder, const CopyName& name) {
  constexpr int kFlags = O_WRONLY | O_CREAT | O_EXCL;
  OwnedFd file = OpenTrustedFile(folder, name.data(), kFlags);
  if (file.valid() || errno != ENOENT || MakeTrustedFolder(folder, kWriting) != 0) return file;
  return OpenTrustedFile(folder, name.data(), kFlags);
}

int WriteBytes(int fd, std::span<const std::byte> bytes, uint64_t offset) {
  iovec part{const_cast<std::byte*>(bytes.data()), bytes.size()};  // an iovec lacks the const
  return WriteAll(fd, std::span(&part, 1), offset);
}

int WriteFile(int folder, const TierKey& key, std::span<const std::byte> bytes, uint64_t number) {
  const CopyName temporary = TemporaryName(number);
  OwnedFd file = MakeTemporary(folder, temporary);
  if (!file.valid()) return errno;
  const int fd = file.Release();
  int error = WriteBytes(fd, bytes, 0);
  // Some file systems tell only now that there was no room.
  if (close(fd) != 0 && error == 0) error = errno;
  if (error == 0) error = Publish(folder, temporary.data(), FileName(key));
  if (error != 0) (void)unlinkat(folder, temporary.data(), 0);
  return error;
}

void RemoveCopy(int folder, const TierKey& key, const CopyEntry& copy) {
  const CopyName name = NameOf(key, copy);
  if (!copy.packed) {
    (void)unlinkat(folder, name.data(), 0);
    return;
  }
  if (copy.length == 0) return;
  const OwnedFd fd = OpenTrustedFile(folder, name.data(), O_WRONLY);
  if (!fd.valid()) return;
  (void)fallocate(fd.get(), FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, copy.offset, copy.length);
}

void RemoveGroup(int folder, uint64_t group) {
  const CopyName name = GroupName(group);
  {
    Listing below(folder, name.data());
    while (const char* entry = below.Next()) {
      const std::string_view text = entry;
      if (text.ends_with(".seg") && ParseHex<uint32_t>(text.substr(0, text.size() - 4), 8)) {
        (void)unlinkat(below.fd(), entry, 0);
      }
      // Two digits; in older formats eight.
      if (!ParseHex<uint32_t>(text, 2) && !ParseHex<uint32_t>(text, 8)) continue;
      {
        Listing page(below.fd(), entry);
        while (const char* file = page.Next()) {
          if (IsCopy(file)) (void)unlinkat(page.fd(), file, 0);
        }
      }
      (void)unlinkat(below.fd(), entry, AT_REMOVEDIR);
    }
  }
  (void)unlinkat(folder, name.data(), AT_REMOVEDIR);
}

namespace {

// False: it is to stop.
bool Judge(int folder, const char* name, FoundFile file,
           const std::function<Sweep(const FoundFile&)>& judge) {
  struct stat st {};
  if (fstatat(folder, name, &st, AT_SYMLINK_NOFOLLOW) != 0) return true;
  file.disk_bytes = static_cast<uint64_t>(st.st_blocks) * 512;
  const Sweep what = judge(file);
  if (what == Sweep::kRemove) (void)unlinkat(folder, name, 0);
  return what != Sweep::kStop;
}

}  // namespace

void SweepSegments(int folder, uint64_t group,
                   const std::function<Sweep(const FoundFile&)>& judge) {
  Listing below(folder, GroupName(group).data());
  while (const char* entry = below.Next()) {
    const std::string_view text = entry;
    if (!text.ends_with(".seg")) continue;
    const auto number = ParseHex<uint32_t>(text.substr(0, text.size() - 4), 8);
    if (number && !Judge(below.fd(), entry, {.key = {}, .segment = *number}, judge)) return;
  }
}

void SweepFiles(int folder, uint64_t group, const std::function<Sweep(const FoundFile&)>& judge) {
  Listing below(folder, GroupName(group).data());
  while (const char* entry = below.Next()) {
    if (!ParseHex<uint32_t>(entry, 2)) continue;
    {
      Listing page(below.fd(), entry);
      while (const char* file = page.Next()) {
        const std::string_view name = file;
        if (name.size() != 28 || !IsCopy(name)) continue;
        const TierKey key = {.group = group,
                             .name = *ParseHex<uint64_t>(name.substr(0, 16), 16),
                             .check = *ParseHex<uint32_t>(name.substr(16, 8), 8)};
        if (!Judge(page.fd(), file, {.key = key}, judge)) return;
      }
    }
    (void)unlinkat(below.fd(), entry, AT_REMOVEDIR);  // if it is empty now
  }
}

void RemoveLeftovers(int folder) {
  Listing left(folder, kWriting);
  while (const char* name = left.Next()) {
    if (std::string_view(name).ends_with(".tmp")) (void)unlinkat(left.fd(), name, 0);
  }
  RemoveSecondNames(folder, kLinks);
}

void RemoveRunFolder(int folder) {
  RemoveSecondNames(folder, kLinks);
  (void)unlinkat(folder, kLinks, AT_REMOVEDIR);
  {
    Listing run(folder, kRun);
    for (const char* name : {"table", "table.tmp", "boot", "lock"}) {
      (void)unlinkat(run.fd(), name, 0);
    }
  }
  (void)unlinkat(folder, kRun, AT_REMOVEDIR);
}

std::string ForeignName(int folder) {
  const auto there = [folder](const char* name) {
    return faccessat(folder, name, F_OK, AT_SYMLINK_NOFOLLOW) == 0;
  };
  if (there(FolderLock::kName) || FolderLog::LooksLikeOne(folder)) return "";
  for (const char* name : {FolderLog::kName, kWriting, kRun}) {
    if (there(name)) return name;
  }
  Listing all(folder, ".");
  while (const char* name = all.Next()) {
    if (ParseHex<uint64_t>(name, 16)) return name;
  }
  return "";
}

bool HoldsOldFiles(int folder) {
  return IsFolder(folder, "copies") && faccessat(folder, "lock", F_OK, AT_SYMLINK_NOFOLLOW) == 0 &&
         faccessat(folder, "boot", F_OK, AT_SYMLINK_NOFOLLOW) == 0;
}

std::string OldFilesRemedy(const std::string& folder) {
  return StrCat("the cache folder ", folder,
                " holds copies of an older Forebay's file service (lock, boot, copies/), which are "
                "not used; remove them with `forebay cache clear ",
                folder, "`, or name another folder");
}

int RemoveOldFiles(int folder) {
  const OwnedFd lock = OpenTrustedFile(folder, "lock", O_RDWR);
  if (lock.valid() && flock(lock.get(), LOCK_EX | LOCK_NB) != 0) return errno;
  RemoveSecondNames(folder, "copies");
  (void)unlinkat(folder, "copies", AT_REMOVEDIR);
  for (const char* name : {"table", "table.tmp", "boot", "lock"}) (void)unlinkat(folder, name, 0);
  return 0;
}

std::vector<uint64_t> GroupFolders(int folder) {
  std::vector<uint64_t> found;
  Listing all(folder, ".");
  while (const char* name = all.Next()) {
    const std::optional<uint64_t> group = ParseHex<uint64_t>(name, 16);
    struct stat st {};
    if (group && fstatat(all.fd(), name, &st, AT_SYMLINK_NOFOLLOW) == 0 && S_ISDIR(st.st_mode)) {
      found.push_back(*group);
    }
  }
  return found;
}

void TightenFolder(int folder) {
  struct stat st {};
  const bool shared = TrustedGroup(folder).has_value();
  const mode_t others = shared ? S_IRWXO : S_IRWXG | S_IRWXO;
  if (fstat(folder, &st) != 0 || (st.st_mode & others) == 0) return;
  const mode_t mode = shared ? 02770 : 0700;
  bool only_ours = true;
  Listing all(folder, ".");
  while (const char* name = all.Next()) {
    const std::string_view text = name;
    if (text == kWriting || text == kRun || ParseHex<uint64_t>(text, 16)) {
      const OwnedFd below(openat(all.fd(), name, O_RDONLY | O_DIRECTORY | O_CLOEXEC | O_NOFOLLOW));
      if (below.valid()) (void)fchmod(below.get(), mode);
    } else if (text != "." && text != ".." && text != FolderLock::kName &&
               text != FolderLog::kName) {
      only_ours = false;
    }
  }
  if (only_ours) (void)fchmod(folder, mode);
}

int SegmentWriter::Append(int folder, uint64_t group, std::span<iovec> parts, uint64_t bytes,
                          uint32_t* next, uint16_t* segment, uint32_t* offset) {
  auto it = open_.find(group);
  if (it != open_.end()) {
    struct stat st {};
    const bool there = fstat(it->second.fd.get(), &st) == 0 && st.st_nlink > 0;
    if (!there || it->second.end + bytes > kSegmentBytes) {
      open_.erase(it);
      it = open_.end();
    }
  }
  if (it == open_.end()) {
    Segment made;
    bool above = false;
    while (!made.fd.valid()) {
      if (*next > UINT16_MAX) return EMLINK;
      const CopyName name = SegmentName(group, *next);
      made.fd = OpenTrustedFile(folder, name.data(), O_WRONLY | O_CREAT | O_EXCL);
      if (made.fd.valid()) break;
      if (errno == EEXIST) {
        ++*next;
      } else if (errno == ENOENT && !std::exchange(above, true)) {
        if (const int error = MakeTrustedFolder(folder, GroupName(group).data()); error != 0) {
          return error;
        }
      } else {
        return errno;
      }
    }
    made.number = static_cast<uint16_t>((*next)++);
    if (open_.size() >= kMostOpen) open_.erase(open_.begin());
    it = open_.emplace(group, std::move(made)).first;
  }
  Segment& open = it->second;
  const int error = WriteAll(open.fd.get(), parts, open.end);
  if (error != 0) {
    (void)!ftruncate(open.fd.get(), static_cast<off_t>(open.end));
    return error;
  }
  *segment = open.number;
  *offset = static_cast<uint32_t>(open.end);
  open.end += bytes;
  return 0;
}

void SegmentWriter::Rewind(uint64_t group) {
  const auto it = open_.find(group);
  if (it == open_.end()) return;
  if (ftruncate(it->second.fd.get(), 0) == 0) {
    it->second.end = 0;
  } else {
    open_.erase(it);
  }
}

bool SegmentWriter::IsOpen(uint64_t group, uint16_t segment) const {
  const auto it = open_.find(group);
  return it != open_.end() && it->second.number == segment;
}

}  // namespace forebay
