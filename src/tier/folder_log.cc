#include "tier/folder_log.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "base/crc32c.h"
#include "base/trusted_files.h"

namespace forebay {
namespace {

constexpr std::array<char, 8> kMagic = {'F', 'B', 'I', 'N', 'D', 'E', 'X', '2'};
constexpr size_t kPiece = 12;
constexpr size_t kAtOnce = 8192;  // records: 320 KiB

struct LogHeader {
  std::array<char, 8> magic = kMagic;
  uint32_t record_bytes = sizeof(LogRecord);
  std::array<uint32_t, 6> zero = {};
  uint32_t check = 0;
};
static_assert(sizeof(LogHeader) == sizeof(LogRecord));

template <typename T>
uint32_t CheckOf(const T& value) {
  return Crc32c(std::as_bytes(std::span(&value, 1)).first(offsetof(T, check)));
}

int WriteAt(int fd, std::span<const std::byte> bytes, uint64_t offset) {
  while (!bytes.empty()) {
    const ssize_t n = pwrite(fd, bytes.data(), bytes.size(), static_cast<off_t>(offset));
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) return n < 0 ? errno : EIO;
    bytes = bytes.subspan(static_cast<size_t>(n));
    offset += static_cast<uint64_t>(n);
  }
  return 0;
}

// Fewer bytes than asked for only at the end of the file. -1: errno tells.
ssize_t ReadAt(int fd, std::span<std::byte> bytes, uint64_t offset) {
  size_t have = 0;
  while (have < bytes.size()) {
    const ssize_t n =
        pread(fd, bytes.data() + have, bytes.size() - have, static_cast<off_t>(offset + have));
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) return -1;
    if (n == 0) break;
    have += static_cast<size_t>(n);
  }
  return static_cast<ssize_t>(have);
}

}  // namespace

LogRecord UseRecord(uint64_t group, int64_t seconds) {
  LogRecord record = LimitRecord(static_cast<uint64_t>(seconds));
  record.group = group;
  record.kind = LogRecord::Kind::kUse;
  return record;
}

LogRecord LimitRecord(uint64_t bytes) {
  LogRecord record;
  record.kind = LogRecord::Kind::kLimit;
  record.length = static_cast<uint32_t>(bytes);
  record.crc = static_cast<uint32_t>(bytes >> 32);
  return record;
}

LogRecord LostRecord(uint64_t group, uint16_t segment, uint64_t bytes) {
  LogRecord record = LimitRecord(bytes);
  record.group = group;
  record.segment = segment;
  record.kind = LogRecord::Kind::kLost;
  return record;
}

uint64_t ValueOf(const LogRecord& record) { return uint64_t{record.crc} << 32 | record.length; }

std::vector<LogRecord> PathRecords(uint64_t group, std::string_view path) {
  path = path.substr(0, kLongestPath);
  std::vector<LogRecord> pieces;
  do {
    const std::string_view piece = path.substr(0, kPiece);
    LogRecord record;
    record.group = group;
    record.kind = LogRecord::Kind::kPath;
    record.name = pieces.size();
    record.count = static_cast<uint8_t>(piece.size());
    std::memcpy(reinterpret_cast<char*>(&record) + offsetof(LogRecord, length), piece.data(),
                piece.size());
    pieces.push_back(record);
    path.remove_prefix(piece.size());
  } while (!path.empty());
  return pieces;
}

std::string_view PathPiece(const LogRecord& record) {
  static_assert(offsetof(LogRecord, offset) == offsetof(LogRecord, length) + 8);
  const char* text = reinterpret_cast<const char*>(&record) + offsetof(LogRecord, length);
  return {text, std::min<size_t>(record.count, kPiece)};
}

Result<FolderLog> FolderLog::Open(int folder, bool write) {
  OwnedFd fd = OpenTrustedFile(folder, kName, write ? O_RDWR : O_RDONLY);
  if (!fd.valid() && errno == EPERM) {
    return Status(Code::kDataLoss, StrCat(kName, " is not a regular file of this user"));
  }
  if (!fd.valid()) return ErrnoStatus(errno, StrCat("open ", kName));
  LogHeader header;
  const ssize_t n = ReadAt(fd.get(), std::as_writable_bytes(std::span(&header, 1)), 0);
  if (n < 0) return ErrnoStatus(errno, StrCat("read ", kName));
  if (static_cast<size_t>(n) < sizeof header || header.magic != kMagic ||
      header.record_bytes != sizeof(LogRecord) || header.check != CheckOf(header)) {
    return Status(Code::kDataLoss, StrCat(kName, " is not an index log of this version"));
  }
  return FolderLog(std::move(fd));
}

bool FolderLog::LooksLikeOne(int folder) {
  const OwnedFd fd = OpenTrustedFile(folder, kName, O_RDONLY);
  if (!fd.valid()) return false;
  std::array<char, sizeof(LogHeader)> head = {};
  const ssize_t n = ReadAt(fd.get(), std::as_writable_bytes(std::span(head)), 0);
  if (n < 0) return false;
  const std::string_view read(head.data(), static_cast<size_t>(n));
  return read.starts_with(std::string_view(kMagic.data(), kMagic.size() - 1)) ||
         read.find_first_not_of('\0') == std::string_view::npos;
}

Result<FolderLog> FolderLog::Create(int folder, const std::function<void(const Emit&)>& fill) {
  constexpr int kFlags = O_RDWR | O_CREAT | O_EXCL;
  (void)unlinkat(folder, kTemporary, 0);
  OwnedFd fd = OpenTrustedFile(folder, kTemporary, kFlags);
  if (!fd.valid() && errno == ENOENT) {
    if (const int error = MakeTrustedFolder(folder, "writing"); error != 0) {
      return ErrnoStatus(error, "mkdir writing");
    }
    fd = OpenTrustedFile(folder, kTemporary, kFlags);
  }
  if (!fd.valid()) return ErrnoStatus(errno, StrCat("open ", kTemporary));
  FolderLog log(std::move(fd));
  LogHeader header;
  header.check = CheckOf(header);
  int error = WriteAt(log.fd_.get(), std::as_bytes(std::span(&header, 1)), 0);
  std::vector<LogRecord> group;
  const auto flush = [&] {
    if (error == 0) error = log.Append(group);
    group.clear();
  };
  fill([&](const LogRecord& record) {
    group.push_back(record);
    if (group.size() == kAtOnce) flush();
  });
  flush();
  if (error == 0 && renameat(folder, kTemporary, folder, kName) != 0) error = errno;
  if (error != 0) {
    (void)unlinkat(folder, kTemporary, 0);
    return ErrnoStatus(error, StrCat("write ", kName));
  }
  return log;
}

int FolderLog::ReadNew(const std::function<void(std::span<const LogRecord>)>& take) {
  std::vector<LogRecord> group(kAtOnce);
  std::vector<LogRecord> good;
  uint64_t at = end_;
  uint64_t bad = 0;
  while (true) {
    const ssize_t n = ReadAt(fd_.get(), std::as_writable_bytes(std::span(group)), at);
    if (n < 0) return errno;
    const size_t whole = static_cast<size_t>(n) / sizeof(LogRecord);
    good.clear();
    for (const LogRecord& record : std::span(group).first(whole)) {
      at += sizeof(LogRecord);
      if (record.check != CheckOf(record)) {
        ++bad;
        continue;
      }
      damaged_ += std::exchange(bad, 0);
      good.push_back(record);
      end_ = at;
    }
    records_ += good.size();
    if (!good.empty()) take(good);
    if (whole < group.size() || bad >= kMostDamaged) return 0;
  }
}

bool FolderLog::Replaced(int folder) const {
  struct stat named {};
  struct stat held {};
  if (fstatat(folder, kName, &named, AT_SYMLINK_NOFOLLOW) != 0 || fstat(fd_.get(), &held) != 0) {
    return true;
  }
  return named.st_ino != held.st_ino || named.st_dev != held.st_dev ||
         static_cast<uint64_t>(held.st_size) < end_;
}

int FolderLog::Cut() { return ftruncate(fd_.get(), static_cast<off_t>(end_)) == 0 ? 0 : errno; }

int FolderLog::Append(std::span<LogRecord> records) {
  for (LogRecord& record : records) record.check = CheckOf(record);
  const std::span<const std::byte> bytes = std::as_bytes(records);
  const int error = WriteAt(fd_.get(), bytes, end_);
  if (error != 0) {
    (void)Cut();
    return error;
  }
  end_ += bytes.size();
  records_ += records.size();
  return 0;
}

bool FolderLog::Linked() const {
  struct stat st {};
  return fstat(fd_.get(), &st) == 0 && st.st_nlink > 0;
}

}  // namespace forebay
