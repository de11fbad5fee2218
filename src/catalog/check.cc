// Whether a catalog still tells the truth: CheckFresh by times, Verify by reading.
#include <fcntl.h>
#include <sys/stat.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <map>
#include <utility>

#include "base/crc32c.h"
#include "base/thread_annotations.h"
#include "catalog/byte_reader.h"
#include "catalog/catalog_impl.h"
#include "catalog/lister.h"
#include "catalog/parallel.h"
#include "catalog/paths.h"
#include "catalog/shard.h"

namespace forebay {
namespace {

constexpr size_t kThreads = 64;
// Below this many stats the threads cost more than they save, on local disks at least.
constexpr size_t kSerialStats = 64;
constexpr size_t kListedProblems = 5;
constexpr size_t kVerifyRead = size_t{4} << 20;

// What was found wrong, the first few in words. Safe for concurrent use.
class Problems {
 public:
  void Add(uint64_t order, Status status) EXCLUDES(mutex_) {
    MutexLock lock(mutex_);
    ++count_;
    listed_.emplace(order, std::move(status));
    if (listed_.size() > kListedProblems) listed_.erase(std::prev(listed_.end()));
  }

  Status ToStatus() EXCLUDES(mutex_) {
    MutexLock lock(mutex_);
    if (count_ == 0) return Status();
    std::string text = StrCat(count_, count_ == 1 ? " problem" : " problems");
    for (const auto& [order, status] : listed_) text.append("\n  ").append(status.message());
    if (count_ > listed_.size()) text.append("\n  ...");
    return Status(listed_.begin()->second.code(), std::move(text));
  }

 private:
  Mutex mutex_;
  uint64_t count_ GUARDED_BY(mutex_) = 0;
  std::multimap<uint64_t, Status> listed_ GUARDED_BY(mutex_);
};

Status SizeOnDisk(const std::string& path, uint64_t expected) {
  struct stat st;
  if (::stat(path.c_str(), &st) != 0) {
    if (errno == ENOENT) return Status(Code::kChanged, StrCat(path, " is gone"));
    return ErrnoStatus(errno, StrCat("stat ", path));
  }
  if (!S_ISREG(st.st_mode)) return Status(Code::kChanged, StrCat(path, " is no longer a file"));
  const auto size = static_cast<uint64_t>(st.st_size);
  if (size == expected) return Status();
  return Status(Code::kChanged, StrCat(path, " has ", size, " bytes, the catalog says ", expected));
}

}  // namespace

Status Catalog::CheckTimes() const {
  const ImageView& view = impl_->view;
  const bool shards = view.IsShards();
  const size_t n = shards ? view.objects.size() : view.folders.size();
  std::atomic<size_t> first_changed = n;
  const auto path_of = [&](size_t i) {
    return shards ? ObjectPath(static_cast<ObjectId>(i))
                  : impl_->FolderPath(static_cast<uint32_t>(i));
  };
  const auto check = [&](size_t i) -> Status {
    const std::string path = path_of(i);
    struct stat st;
    bool same = ::stat(path.c_str(), &st) == 0;
    if (!same && errno != ENOENT && errno != ENOTDIR) {
      return ErrnoStatus(errno, StrCat("stat ", path));
    }
    if (same && shards) {
      same = MtimeNs(st) == view.times[view.folders.size() + i] &&
             static_cast<uint64_t>(st.st_size) == view.objects[i].size;
    } else if (same) {
      same = MtimeNs(st) == view.times[i];
    }
    if (same) return Status();
    size_t lowest = first_changed.load(std::memory_order_relaxed);
    while (i < lowest && !first_changed.compare_exchange_weak(lowest, i)) {
    }
    return Status();
  };
  if (n <= kSerialStats) {
    for (size_t i = 0; i < n; ++i) FOREBAY_RETURN_IF_ERROR(check(i));
  } else {
    FOREBAY_RETURN_IF_ERROR(ParallelFor(n, kThreads, check, nullptr));
  }
  if (const size_t i = first_changed.load(); i < n) {
    return Status(Code::kChanged, StrCat(path_of(i), " changed after the catalog was built"));
  }
  return Status();
}

Status Catalog::CheckShards() const {
  if (format() != Format::kWebDataset && format() != Format::kTfRecord) return Status();
  const Status same = CheckTimes();
  if (same.code() != Code::kChanged) return same;
  return Status(Code::kChanged, StrCat(same.message(), "; run `forebay index --rebuild ", root(),
                                       "`, or give the path instead of the catalog"));
}

Status Catalog::CheckFresh() const {
  const ImageView& view = impl_->view;
  // The sizes of listed files are checked when they are read; listing them again would cost what
  // building did.
  if (format() == Format::kFileList || format() == Format::kGrowing) return Status();
  FOREBAY_RETURN_IF_ERROR(CheckTimes());
  const bool shards = view.IsShards();
  const size_t n = view.objects.size();
  if (!shards || (view.header->flags & kFlagSingleShard) != 0) return Status();

  // A file that is no shard may come and go; only when the folder's time differs is it listed.
  struct stat st;
  if (::stat(root().c_str(), &st) != 0) return PathError(errno, root());
  if (MtimeNs(st) == view.times[0]) return Status();
  Result<FolderListing> listing = ListFolder(root(), kThreads, nullptr);
  if (!listing) return listing.error();
  const bool tar = format() == Format::kWebDataset;
  size_t next = 0;
  for (const std::string& name : listing->files) {
    if (!(tar ? IsTarName(name) : IsTfRecordName(name))) continue;
    if (next == n || name != view.ObjectName(static_cast<ObjectId>(next))) {
      return Status(Code::kChanged,
                    StrCat(JoinPath(root(), name), " was added after the catalog was built"));
    }
    ++next;
  }
  return Status();
}

namespace {

// Compares a shard as it lies on storage now with samples [begin, end) of the catalog.
Status CompareShard(const Catalog& catalog, const ImageView& view, const std::string& path,
                    const ShardIndex& index, size_t begin, size_t end) {
  const auto differs = [&](size_t sample) {
    return Status(Code::kChanged, StrCat(path, ": sample ", sample, " (",
                                         catalog.SampleName(static_cast<SampleId>(sample)),
                                         ") is not where the catalog says"));
  };
  if (index.samples.size() != end - begin) {
    return Status(Code::kChanged, StrCat(path, " holds ", index.samples.size(),
                                         " samples, the catalog says ", end - begin));
  }
  for (size_t i = begin; i < end; ++i) {
    const ShardIndex::Sample& now = index.samples[i - begin];
    const SampleRecord& then = view.samples[i];
    if (now.offset != then.offset() || now.length != then.length || now.label != then.label) {
      return differs(i);
    }
    if (catalog.format() == Format::kTfRecord) {
      if (now.crc != then.aux) return differs(i);
      continue;
    }
    const std::vector<std::string>& names = index.schemas[now.schema];
    const std::vector<FieldView> fields = catalog.Fields(static_cast<SampleId>(i));
    if (index.Key(i - begin) != view.Key(static_cast<SampleId>(i)) ||
        names.size() != fields.size()) {
      return differs(i);
    }
    for (size_t f = 0; f < fields.size(); ++f) {
      const FieldRecord& field = index.fields[now.first_field + f];
      if (names[f] != fields[f].name || field.offset != fields[f].offset ||
          field.length != fields[f].length) {
        return differs(i);
      }
    }
  }
  return Status();
}

}  // namespace

Status Catalog::Verify(const std::function<bool(uint64_t done, uint64_t total)>& progress) const {
  if (format() == Format::kGrowing) {
    return Status(Code::kUnimplemented,
                  StrCat("the files met below ", root(), " are checked as they are read"));
  }
  FOREBAY_RETURN_IF_ERROR(WaitComplete());
  const ImageView& view = impl_->view;
  Problems problems;
  std::atomic<uint64_t> done = 0;
  std::atomic<bool> stopped = false;
  Pace pace;
  const auto tick = [&] {
    if (!progress || !pace.Due() || progress(done, size())) return true;
    stopped.store(true, std::memory_order_relaxed);
    return false;
  };
  const auto running = [&] { return !stopped.load(std::memory_order_relaxed); };

  if (!view.IsShards()) {
    const auto check = [&](size_t i) -> Status {
      const auto object = static_cast<ObjectId>(i);
      Status status = SizeOnDisk(ObjectPath(object), ObjectSize(object));
      if (!status.ok()) problems.Add(i, std::move(status));
      ++done;
      return Status();
    };
    FOREBAY_RETURN_IF_ERROR(ParallelFor(object_count(), kThreads, check, tick));
    return problems.ToStatus();
  }

  // Builders write a shard's samples next to each other; a foreign image may not.
  std::vector<size_t> bounds(object_count() + 1, size());
  bounds[0] = 0;
  for (size_t i = 0, object = 0; i < size(); ++i) {
    if (view.samples[i].object < object) {
      return Status(Code::kDataLoss, "the catalog's samples are not in the order of its shards");
    }
    while (object < view.samples[i].object) bounds[++object] = i;
  }
  const auto check_records = [&](FileReader& reader, size_t begin, size_t end) -> Status {
    std::vector<std::byte> buffer;
    for (size_t i = begin; i < end && running(); ++i) {
      const Extent extent = this->extent(static_cast<SampleId>(i));
      uint32_t crc = 0;
      for (uint64_t at = 0; at < extent.length;) {
        buffer.resize(std::min<uint64_t>(kVerifyRead, extent.length - at));
        Result<size_t> got = reader.ReadAt(extent.offset + at, buffer);
        if (!got) return got.error();
        if (*got < buffer.size()) {
          return Status(Code::kDataLoss, StrCat(reader.name(), " was cut off while it was read"));
        }
        crc = Crc32c(buffer, crc);
        at += buffer.size();
      }
      if (crc != extent.crc) {
        problems.Add(i, Status(Code::kDataLoss,
                               StrCat(reader.name(), ": offset ", extent.offset, ": record of ",
                                      extent.length, " bytes does not match its checksum")));
      }
      ++done;
    }
    return Status();
  };
  const auto check_shard = [&](size_t o) -> Status {
    const auto object = static_cast<ObjectId>(o);
    const std::string path = ObjectPath(object);
    FOREBAY_RETURN_IF_ERROR(SizeOnDisk(path, ObjectSize(object)));
    Result<FileReader> reader = FileReader::Open(path);
    if (!reader) return reader.error();
    const bool tar = format() == Format::kWebDataset;
    Result<ShardIndex> index = tar ? ScanTar(*reader, running) : ScanTfRecord(*reader, running);
    if (!index) return index.error();
    FOREBAY_RETURN_IF_ERROR(CompareShard(*this, view, path, *index, bounds[o], bounds[o + 1]));
    if (tar) {
      done += bounds[o + 1] - bounds[o];
      return Status();
    }
    return check_records(*reader, bounds[o], bounds[o + 1]);
  };
  const auto check = [&](size_t o) -> Status {
    Status status = check_shard(o);
    if (!status.ok()) problems.Add(bounds[o], std::move(status));
    return Status();
  };
  FOREBAY_RETURN_IF_ERROR(ParallelFor(object_count(), kThreads, check, tick));
  return problems.ToStatus();
}

}  // namespace forebay
