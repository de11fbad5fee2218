#include "catalog/growing.h"

#include <algorithm>
#include <cstring>
#include <functional>
#include <limits>
#include <utility>

#include "base/rng.h"
#include "catalog/paths.h"

namespace forebay {
namespace {

constexpr size_t kTextPiece = size_t{64} << 10;
constexpr uint64_t kMostSamples = std::numeric_limits<SampleId>::max();

// The path below the root; empty where it is not below it, or not in its normal form.
std::string_view Below(std::string_view root, std::string_view path) {
  if (!path.starts_with(root)) return "";
  path.remove_prefix(root.size());
  if (root.back() != '/') {
    if (path.empty() || path.front() != '/') return "";
    path.remove_prefix(1);
  }
  return IsPathBelow(path) ? path : "";
}

uint64_t HashOf(std::string_view below, const NewFile& file) {
  uint64_t hash = std::hash<std::string_view>()(below);
  for (const uint64_t word :
       {file.size, static_cast<uint64_t>(file.mtime_ns), uint64_t{file.block}}) {
    hash = SplitMix64(hash ^ word).Next();
  }
  return hash;
}

}  // namespace

uint64_t NewFile::samples() const {
  return block == 0 || size == 0 ? 1 : size / block + (size % block != 0 ? 1 : 0);
}

GrowingFiles::GrowingFiles(std::string root) : root_(std::move(root)) {
  MutexLock lock(mutex_);
  (void)FolderNumber("");
}

Result<Appended> GrowingFiles::Append(const NewFile& file) {
  const std::string_view below = Below(root_, file.path);
  if (below.empty()) {
    return Status(Code::kInvalidArgument, StrCat(file.path,
                                                 " is not the absolute path, without "
                                                 "\".\" and \"..\", of a file below ",
                                                 root_));
  }
  if (file.block == 0 && file.size > std::numeric_limits<uint32_t>::max()) {
    return Status(Code::kInvalidArgument,
                  StrCat(file.path, " has ", file.size,
                         " bytes; one sample has less than 4 GiB, so it needs blocks"));
  }
  MutexLock lock(mutex_);
  const uint64_t count = file.samples();
  const size_t first = samples_.size();
  if (count > kMostSamples - first) {
    return Status(Code::kResourceExhausted,
                  StrCat("the data set has ", first, " samples and no numbers for ", count,
                         " more, of ", file.path));
  }
  const size_t slash = below.rfind('/');
  const bool in_root = slash == std::string_view::npos;
  Object object;
  object.size = file.size;
  object.mtime_ns = file.mtime_ns;
  object.name = Keep(in_root ? below : below.substr(slash + 1));
  object.folder = FolderNumber(in_root ? "" : below.substr(0, slash));
  object.block = file.block;
  object.first = static_cast<SampleId>(first);
  const auto number = static_cast<ObjectId>(objects_.size());
  const auto known = FindKnown(below, file);
  object.repeated = known != known_.end();
  if (object.repeated) known_.erase(known);
  known_.emplace(HashOf(below, file), number);
  objects_.Append(object);
  for (uint64_t i = 0; i < count; ++i) samples_.Append(number);
  const uint64_t longest = file.block == 0 ? file.size : std::min<uint64_t>(file.size, file.block);
  total_bytes_.fetch_add(file.size, std::memory_order_relaxed);
  max_length_.store(std::max(max_length(), static_cast<uint32_t>(longest)),
                    std::memory_order_relaxed);
  object_count_.store(objects_.size(), std::memory_order_release);
  size_.store(samples_.size(), std::memory_order_release);
  return Appended{.first = object.first, .count = static_cast<uint32_t>(count)};
}

std::optional<Appended> GrowingFiles::Find(const NewFile& file) const {
  const std::string_view below = Below(root_, file.path);
  if (below.empty()) return std::nullopt;
  MutexLock lock(mutex_);
  const auto known = FindKnown(below, file);
  if (known == known_.end()) return std::nullopt;
  return Appended{.first = objects_[known->second].first,
                  .count = static_cast<uint32_t>(file.samples())};
}

GrowingFiles::Known::const_iterator GrowingFiles::FindKnown(std::string_view below,
                                                            const NewFile& file) const {
  const auto [first, last] = known_.equal_range(HashOf(below, file));
  const auto equal = std::find_if(first, last, [&](const auto& known) {
    const Object& object = objects_[known.second];
    return object.size == file.size && object.mtime_ns == file.mtime_ns &&
           object.block == file.block && JoinPath(folders_[object.folder], object.name) == below;
  });
  return equal == last ? known_.end() : equal;
}

Extent GrowingFiles::extent(SampleId sample) const {
  Extent extent;
  extent.object = samples_[sample];
  const Object& object = objects_[extent.object];
  extent.offset = uint64_t{sample - object.first} * object.block;
  extent.whole_object = object.block == 0 || object.size == 0;
  const uint64_t left = object.size - extent.offset;
  extent.length =
      static_cast<uint32_t>(object.block == 0 ? left : std::min<uint64_t>(left, object.block));
  return extent;
}

std::string GrowingFiles::SampleName(SampleId sample) const {
  const Extent e = extent(sample);
  std::string name = JoinPath(FolderBelow(folder(e.object)), ObjectName(e.object));
  return e.whole_object ? name : StrCat(name, "@", e.offset);
}

void GrowingFiles::OpenFile(ObjectId object, HeldFile file) {
  MutexLock lock(held_mutex_);
  Held& held = held_[object];
  ++held.users;
  held.file = std::move(file);
}

void GrowingFiles::CloseFile(ObjectId object) {
  HeldFile last;  // closed without the lock: that may cost a round trip to the storage
  MutexLock lock(held_mutex_);
  const auto found = held_.find(object);
  if (found == held_.end() || --found->second.users > 0) return;
  last = std::move(found->second.file);
  held_.erase(found);
}

HeldFile GrowingFiles::OpenedFile(ObjectId object) const {
  MutexLock lock(held_mutex_);
  const auto found = held_.find(object);
  return found == held_.end() ? HeldFile() : found->second.file;
}

uint32_t GrowingFiles::FolderNumber(std::string_view below) {
  const auto found = folder_numbers_.find(below);
  if (found != folder_numbers_.end()) return found->second;
  const auto number = static_cast<uint32_t>(folders_.size());
  const std::string_view kept = Keep(below);
  folders_.Append(kept);
  folder_numbers_.emplace(kept, number);
  folder_count_.store(folders_.size(), std::memory_order_release);
  return number;
}

std::string_view GrowingFiles::Keep(std::string_view text) {
  if (text.empty()) return "";
  if (text.size() > text_left_) {
    const size_t bytes = std::max(kTextPiece, text.size());
    text_.push_back(std::make_unique_for_overwrite<char[]>(bytes));
    text_next_ = text_.back().get();
    text_left_ = bytes;
  }
  char* const at = text_next_;
  std::memcpy(at, text.data(), text.size());
  text_next_ += text.size();
  text_left_ -= text.size();
  return {at, text.size()};
}

}  // namespace forebay
