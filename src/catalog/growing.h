// What a growing catalog holds: files in the order in which they were added, cut into samples.
//
// Storage never moves and nothing is ever taken out, so readers need no lock: they see a sample's
// record whole once they know its number, from size() or from whoever added it.
#pragma once

#include <array>
#include <atomic>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "base/status.h"
#include "base/thread_annotations.h"
#include "catalog/catalog.h"

namespace forebay {

// Grows in pieces of twice the size each. One thread at a time appends; what it has appended is
// read by threads that were told of it.
template <typename T>
class StableArray {
 public:
  const T& operator[](size_t index) const {
    const Location at = LocationOf(index);
    return pieces_[at.piece][at.index];
  }
  void Append(T value) {
    const Location at = LocationOf(size_);
    if (pieces_[at.piece] == nullptr) {
      pieces_[at.piece] = std::make_unique<T[]>(kFirst << at.piece);
    }
    pieces_[at.piece][at.index] = std::move(value);
    ++size_;
  }
  size_t size() const { return size_; }  // the appending thread's

 private:
  static constexpr size_t kFirst = 1024;
  struct Location {
    size_t piece;
    size_t index;
  };
  static Location LocationOf(size_t index) {
    const auto piece = static_cast<size_t>(std::bit_width(index / kFirst + 1) - 1);
    return {piece, index - ((size_t{1} << piece) - 1) * kFirst};
  }

  std::array<std::unique_ptr<T[]>, 23> pieces_;  // for 2^32 and more
  size_t size_ = 0;
};

// Safe for concurrent use by multiple threads.
class GrowingFiles {
 public:
  explicit GrowingFiles(std::string root);

  Result<Appended> Append(const NewFile& file) EXCLUDES(mutex_);
  std::optional<Appended> Find(const NewFile& file) const EXCLUDES(mutex_);

  // Pairs with the release in Append: what was added before is seen.
  size_t size() const { return size_.load(std::memory_order_acquire); }
  size_t object_count() const { return object_count_.load(std::memory_order_acquire); }
  size_t folder_count() const { return folder_count_.load(std::memory_order_acquire); }
  uint64_t total_bytes() const { return total_bytes_.load(std::memory_order_relaxed); }
  uint32_t max_length() const { return max_length_.load(std::memory_order_relaxed); }

  Extent extent(SampleId sample) const;
  ObjectId object(SampleId sample) const { return samples_[sample]; }
  uint64_t ObjectSize(ObjectId object) const { return objects_[object].size; }
  int64_t ObjectTime(ObjectId object) const { return objects_[object].mtime_ns; }
  bool IsRepeated(ObjectId object) const { return objects_[object].repeated; }
  uint32_t ObjectBlock(ObjectId object) const { return objects_[object].block; }
  uint32_t folder(ObjectId object) const { return objects_[object].folder; }
  std::string_view ObjectName(ObjectId object) const { return objects_[object].name; }
  std::string_view FolderBelow(uint32_t folder) const { return folders_[folder]; }
  std::string SampleName(SampleId sample) const;

  // As Catalog's.
  void OpenFile(ObjectId object, HeldFile file) EXCLUDES(held_mutex_);
  void CloseFile(ObjectId object) EXCLUDES(held_mutex_);
  HeldFile OpenedFile(ObjectId object) const EXCLUDES(held_mutex_);

 private:
  struct Object {
    uint64_t size = 0;
    int64_t mtime_ns = 0;
    std::string_view name;
    uint32_t folder = 0;
    uint32_t block = 0;
    SampleId first = 0;
    bool repeated = false;
  };

  uint32_t FolderNumber(std::string_view below) REQUIRES(mutex_);
  // The entry of an equal file, or the end.
  using Known = std::unordered_multimap<uint64_t, ObjectId>;
  Known::const_iterator FindKnown(std::string_view below, const NewFile& file) const
      REQUIRES(mutex_);
  // A copy that stays.
  std::string_view Keep(std::string_view text) REQUIRES(mutex_);

  const std::string root_;

  mutable Mutex mutex_;             // of who appends
  Known known_ GUARDED_BY(mutex_);  // by a hash of all that Find compares; of equal files the last
  std::unordered_map<std::string_view, uint32_t> folder_numbers_ GUARDED_BY(mutex_);
  std::vector<std::unique_ptr<char[]>> text_ GUARDED_BY(mutex_);
  size_t text_left_ GUARDED_BY(mutex_) = 0;  // of the last piece
  char* text_next_ GUARDED_BY(mutex_) = nullptr;

  // Written with mutex_ held, beyond what readers know of.
  StableArray<ObjectId> samples_;
  StableArray<Object> objects_;
  StableArray<std::string_view> folders_;  // paths below the root

  struct Held {
    HeldFile file;
    uint32_t users = 0;
  };
  mutable Mutex held_mutex_;
  std::unordered_map<ObjectId, Held> held_ GUARDED_BY(held_mutex_);

  std::atomic<size_t> size_{0};
  std::atomic<size_t> object_count_{0};
  std::atomic<size_t> folder_count_{0};
  std::atomic<uint64_t> total_bytes_{0};
  std::atomic<uint32_t> max_length_{0};
};

}  // namespace forebay
