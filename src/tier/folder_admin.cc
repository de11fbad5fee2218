#include "tier/folder_admin.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <utility>

#include "base/trusted_files.h"
#include "tier/copy_names.h"
#include "tier/folder_files.h"

namespace forebay {

Result<FolderAdmin> FolderAdmin::Open(const std::string& folder, bool change,
                                      const std::string& group) {
  Result<OwnedFd> fd = OpenPrivateFolder(folder, "cache folder", false, group);
  if (!fd) return fd.error();
  FolderAdmin admin(folder, *std::move(fd));
  const int at = admin.fd_.get();
  // Nothing is locked, listed or removed in a folder that never was a cache.
  const bool old = HoldsOldFiles(at);
  if (!old && faccessat(at, FolderLock::kName, F_OK, AT_SYMLINK_NOFOLLOW) != 0) {
    return Status(Code::kNotFound,
                  StrCat(folder, " is no cache folder: it has no ", FolderLock::kName));
  }
  TightenFolder(at);
  if (change) {
    const int error = admin.lock_.Take(at);
    if (error == EWOULDBLOCK) {
      return Status(Code::kUnavailable, StrCat("the cache folder ", folder, " is in use: ",
                                               FolderLock::Holder(at), " writes to it"));
    }
    if (error != 0) {
      return FolderLock::Describe(error, folder, StrCat("lock the cache folder ", folder));
    }
    RemoveLeftovers(at);
  }
  admin.change_ = change;
  admin.index_ = FolderIndex(BlockOf(at));
  Result<FolderLog> log = FolderLog::Open(at, change);
  if (log) {
    const int error = log->ReadNew([&admin](std::span<const LogRecord> records) {
      for (const LogRecord& record : records) admin.index_.Apply(record);
    });
    if (error != 0) return ErrnoStatus(error, StrCat("read ", folder, "/", FolderLog::kName));
    if (change) (void)log->Cut();
    admin.log_.push_back(*std::move(log));
  } else if (old && log.error().code() == Code::kNotFound) {
    admin.foreign_ = OldFilesRemedy(folder);
  } else if (log.error().code() == Code::kDataLoss ||
             (log.error().code() == Code::kNotFound && !GroupFolders(at).empty())) {
    admin.foreign_ = StrCat("the cache folder ", folder, " is of another format");
  } else if (log.error().code() != Code::kNotFound) {
    return log.error();
  }
  return admin;
}

std::vector<CachedGroup> FolderAdmin::groups() const {
  std::vector<CachedGroup> all;
  for (const FolderIndex::Group& group : index_.groups()) {
    if (group.copies == 0) continue;
    all.push_back({group.id, group.path, group.copies, group.bytes, group.last_used_s});
  }
  return all;
}

FolderAdmin::Held FolderAdmin::HeldOf(const std::shared_ptr<const Catalog>& catalog) const {
  const CopyNames names(catalog);
  Held held;
  for (SampleId sample = 0; sample < catalog->size(); ++sample) {
    const CopyEntry* copy = index_.Find(names.Of(sample));
    if (copy == nullptr || !copy->held()) continue;
    ++held.copies;
    held.bytes += copy->length;
  }
  return held;
}

std::string FolderAdmin::FileOf(const TierKey& key) const {
  const CopyEntry* copy = index_.Find(key);
  if (copy == nullptr || !copy->held() || copy->packed != 0) return "";
  TierKey at = key;
  at.group = index_.IdOf(*copy);
  return StrCat(folder_, "/", FileName(at).data());
}

Result<bool> FolderAdmin::Check(const TierKey& key, uint64_t* bytes) {
  const CopyEntry* copy = std::as_const(index_).Find(key);
  *bytes = 0;
  if (copy == nullptr || !copy->held()) return false;
  TierKey at = key;
  at.group = index_.IdOf(*copy);
  int error = 0;
  const CopyRead read = CheckCopy(fd_.get(), at, *copy, &error);
  *bytes = copy->length;
  if (read == CopyRead::kFailed) {
    return ErrnoStatus(error, StrCat("read ", folder_, "/", NameOf(at, *copy).data()));
  }
  return read == CopyRead::kGood;
}

Result<FolderAdmin::Compared> FolderAdmin::Compare(const Catalog& catalog, const TierKey& key,
                                                   SampleId sample, uint64_t* bytes) {
  const CopyEntry* copy = std::as_const(index_).Find(key);
  *bytes = 0;
  if (copy == nullptr || !copy->held()) return Compared::kNone;
  const Result<bool> good = Check(key, bytes);
  if (!good) return good.error();
  const Extent extent = catalog.extent(sample);
  if (!*good || copy->length != extent.length) return Compared::kDiffers;
  TierKey place = key;
  place.group = index_.IdOf(*copy);
  buffer_.resize(copy->length);
  int error = 0;
  if (ReadCopy(fd_.get(), place, *copy, buffer_, &error) != CopyRead::kGood) {
    return Compared::kDiffers;
  }
  const std::string path = catalog.ObjectPath(extent.object);
  const OwnedFd file = OpenRegularFile(path.c_str());
  if (!file.valid()) return ErrnoStatus(errno, path);
  std::vector<std::byte> found(extent.length);
  size_t at = 0;
  while (at < found.size()) {
    const ssize_t n = ::pread(file.get(), found.data() + at, found.size() - at,
                              static_cast<off_t>(extent.offset + at));
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) return ErrnoStatus(errno, path);
    if (n == 0) break;
    at += static_cast<size_t>(n);
  }
  *bytes += at;
  const bool same = at == found.size() && found == buffer_;
  return same ? Compared::kSame : Compared::kDiffers;
}

Status FolderAdmin::Append(const LogRecord& record) {
  if (!change_) return Status(Code::kInternal, "the cache folder was opened to be read");
  LogRecord copy = record;
  const int error = log_.empty() ? ENOENT : log_[0].Append(std::span(&copy, 1));
  if (error == 0) return Status();
  return ErrnoStatus(error, StrCat("write ", folder_, "/", FolderLog::kName));
}

Status FolderAdmin::Drop(const TierKey& key) {
  const CopyEntry* found = std::as_const(index_).Find(key);
  if (found == nullptr || !found->held()) return Status();
  const CopyEntry copy = *found;
  LogRecord record = index_.RecordOf(key, copy);
  record.kind = LogRecord::Kind::kDrop;
  TierKey at = key;
  at.group = record.group;
  FOREBAY_RETURN_IF_ERROR(Append(record));
  index_.Clear(key);
  RemoveCopy(fd_.get(), at, copy);
  return Status();
}

Status FolderAdmin::Clear(uint64_t group) {
  LogRecord record;
  record.group = group;
  record.kind = LogRecord::Kind::kForget;
  FOREBAY_RETURN_IF_ERROR(Append(record));
  RemoveGroup(fd_.get(), group);
  index_.Forget(group);
  return Status();
}

Status FolderAdmin::ClearAll() {
  if (!change_) return Status(Code::kInternal, "the cache folder was opened to be read");
  if (HoldsOldFiles(fd_.get()) && RemoveOldFiles(fd_.get()) != 0) {
    return Status(Code::kUnavailable,
                  StrCat("the cache folder ", folder_,
                         " is in use by the file service of an older Forebay; end its programs"));
  }
  const uint64_t limit = index_.limit();
  // First the empty log: what the log names is there.
  index_ = FolderIndex(index_.block());
  index_.set_limit(limit);
  Result<FolderLog> log =
      FolderLog::Create(fd_.get(), [this](const FolderLog::Emit& emit) { index_.Write(emit); });
  if (!log) return Status(log.error().code(), StrCat(folder_, ": ", log.error().message()));
  log_.clear();
  log_.push_back(*std::move(log));
  foreign_.clear();
  for (const uint64_t group : GroupFolders(fd_.get())) RemoveGroup(fd_.get(), group);
  RemoveRunFolder(fd_.get());
  return Status();
}

}  // namespace forebay
