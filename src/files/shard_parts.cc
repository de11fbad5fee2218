#include "files/shard_parts.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <span>
#include <utility>

#include "base/owned.h"
#include "catalog/paths.h"

namespace forebay::files {
namespace {

constexpr Nanos kLookAgain = 5 * kSecond;  // whether somebody has listed the folder by now
// A block of a file has all of a sample read and checked for it: larger ones would be read again
// for too many blocks.
constexpr uint32_t kLongest = 8 << 20;
constexpr uint64_t kPage = 4096;           // what a read of a few bytes costs a source at least
constexpr Nanos kMostWait = 250 * kMilli;  // for what lies between the samples of a block

bool ReadFully(int fd, std::span<std::byte> out, uint64_t offset) {
  while (!out.empty()) {
    const ssize_t n = pread(fd, out.data(), out.size(), static_cast<off_t>(offset));
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) return false;
    offset += static_cast<uint64_t>(n);
    out = out.subspan(static_cast<size_t>(n));
  }
  return true;
}

bool IsShards(const Catalog& catalog) {
  return catalog.format() == Format::kWebDataset || catalog.format() == Format::kTfRecord;
}

std::shared_ptr<const Catalog> LoadShards(const std::string& path) {
  for (const char* format : {"", "webdataset", "tfrecord"}) {
    BuildOptions options;
    options.format = format;
    std::shared_ptr<const Catalog> catalog = LoadSaved(path, options);
    if (catalog != nullptr && IsShards(*catalog)) return catalog;
  }
  return nullptr;
}

}  // namespace

ShardParts::Listing::Listing(std::shared_ptr<const Catalog> listed)
    : catalog(std::move(listed)), names(catalog) {
  for (ObjectId object = 0; object < catalog->object_count(); ++object) {
    objects.emplace(catalog->ObjectPath(object), object);
  }
}

std::shared_ptr<const ShardParts::Listing> ShardParts::ListingOf(const std::string& path) {
  const std::string folder(DirName(path));
  const Nanos now = SteadyClock().Now();
  const MutexLock lock(mutex_);
  if (changing_.contains(path)) return nullptr;
  Looked& looked = listings_[folder];
  const bool known = looked.listing != nullptr && looked.listing->objects.contains(path);
  if (known || (looked.at != 0 && now - looked.at < kLookAgain)) return looked.listing;
  looked = {nullptr, now};
  // The data set is the file itself, its folder, or one that this lies in.
  for (std::string_view at = path; at.size() > 1; at = DirName(at)) {
    std::shared_ptr<const Catalog> catalog = LoadShards(std::string(at));
    if (catalog == nullptr) continue;
    looked.listing = std::make_shared<Listing>(std::move(catalog));
    if (looked.listing->objects.contains(path)) break;
  }
  return looked.listing;
}

std::vector<ShardParts::Part> ShardParts::Held(const File& file, uint64_t offset, uint64_t bytes) {
  const std::shared_ptr<const Listing> listing = ListingOf(file.path);
  if (listing == nullptr) return {};
  const auto found = listing->objects.find(file.path);
  if (found == listing->objects.end()) return {};
  const ObjectId object = found->second;
  const Catalog& catalog = *listing->catalog;
  const auto size = static_cast<SampleId>(catalog.size());
  if (catalog.ObjectSize(object) != file.size || catalog.ObjectTime(object) != file.mtime_ns) {
    return {};
  }
  // Samples lie in the order of their objects and offsets.
  const auto before = [&](SampleId sample) {
    const Extent extent = catalog.extent(sample);
    return extent.object < object ||
           (extent.object == object && extent.offset + extent.length <= offset);
  };
  SampleId first = 0;
  for (SampleId count = size; count > 0;) {
    const SampleId half = count / 2;
    if (before(first + half)) {
      first += half + 1;
      count -= half + 1;
    } else {
      count = half;
    }
  }
  std::vector<Part> out;
  uint64_t end = 0;
  for (SampleId sample = first; sample != size; ++sample) {
    const Extent extent = catalog.extent(sample);
    if (extent.object != object || extent.offset >= offset + bytes) break;
    if (extent.offset < end) return {};
    end = extent.offset + extent.length;
    if (extent.length == 0 || extent.length > kLongest) continue;
    const TierKey key = listing->names.Of(sample);
    if (store_.Holds(key)) out.push_back({extent.offset, extent.length, key});
  }
  return out;
}

bool ShardParts::Read(const File& file, int fd, uint64_t offset, uint64_t bytes,
                      std::vector<std::byte>* out) {
  const std::vector<Part> parts = Held(file, offset, bytes);
  if (parts.empty()) return false;
  const uint64_t end = offset + bytes;
  uint64_t held = 0;
  for (const Part& part : parts) {
    held += std::min(part.offset + part.length, end) - std::max(part.offset, offset);
  }
  const auto gaps = static_cast<Nanos>(parts.size() + 1);
  if (bytes - held + (parts.size() + 1) * kPage > bytes * 3 / 4) return false;
  const Nanos expected = gap_ns_;
  if (gaps * expected > kMostWait) {
    gap_ns_ = expected - expected / 16;  // it may do better some day
    return false;
  }
  OwnedFd readable;
  if ((fcntl(fd, F_GETFL) & O_PATH) != 0) {
    readable = OwnedFd(open(StrCat("/proc/self/fd/", fd).c_str(), O_RDONLY | O_CLOEXEC));
    if (!readable.valid()) return false;
    fd = readable.get();
  }
  (void)posix_fadvise(fd, 0, 0, POSIX_FADV_RANDOM);  // a header is not worth more than itself
  out->resize(bytes);
  const auto to = [&](uint64_t from, uint64_t until) {
    return std::span(*out).subspan(from - offset, until - from);
  };
  uint64_t at = offset;
  Nanos waited = 0;
  const auto read_gap = [&](uint64_t until) {
    const Nanos since = SteadyClock().Now();
    const bool all = ReadFully(fd, to(at, until), at);
    waited += SteadyClock().Now() - since;
    return all;
  };
  std::vector<std::byte> sample;
  for (const Part& part : parts) {
    const uint64_t from = std::max(part.offset, offset);
    const uint64_t until = std::min(part.offset + part.length, end);
    if (!read_gap(from)) return false;
    if (until - from == part.length) {
      if (!store_.Read(part.key, to(from, until))) return false;
    } else {
      sample.resize(part.length);
      if (!store_.Read(part.key, sample)) return false;
      std::memcpy(to(from, until).data(), sample.data() + (from - part.offset), until - from);
    }
    at = until;
  }
  if (!read_gap(end)) return false;
  gap_ns_ = (expected + waited / gaps) / 2;
  return true;
}

void ShardParts::Forget(const std::string& path) {
  const MutexLock lock(mutex_);
  const auto looked = listings_.find(DirName(path));
  if (looked == listings_.end() || looked->second.listing == nullptr) return;
  if (looked->second.listing->objects.contains(path)) changing_.insert(path);
}

}  // namespace forebay::files
