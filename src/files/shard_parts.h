// ShardParts: the bytes of a shard (a tar, a TFRecord file) from what the store holds of its
// samples. Where they lie is told by the catalogs that were saved when the data set was listed; a
// copy's name has the file's size and time in it, so an old catalog finds nothing wrong.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "base/clock.h"
#include "base/status.h"
#include "base/thread_annotations.h"
#include "catalog/catalog.h"
#include "tier/copy_names.h"
#include "tier/folder_tier.h"

namespace forebay::files {

// Safe for concurrent use by multiple threads.
class ShardParts {
 public:
  // `store` outlives it.
  explicit ShardParts(FolderStore& store) : store_(store) {}

  struct File {
    const std::string& path;  // without links in it
    uint64_t size = 0;
    int64_t mtime_ns = 0;
  };
  // Headers, padding and samples that the store has not are read from `fd`, the file, which may be
  // O_PATH. False: that would be about as much as to read all, or it failed.
  bool Read(const File& file, int fd, uint64_t offset, uint64_t bytes, std::vector<std::byte>* out)
      EXCLUDES(mutex_);
  // The file is about to change: it is read from its source from now on.
  void Forget(const std::string& path) EXCLUDES(mutex_);

 private:
  struct Listing {
    explicit Listing(std::shared_ptr<const Catalog> listed);
    std::shared_ptr<const Catalog> catalog;  // shared with `names`
    CopyNames names;
    std::map<std::string, ObjectId, std::less<>> objects;  // by path without links
  };
  struct Looked {
    std::shared_ptr<const Listing> listing;  // null: nobody has listed it. Shared with readers
    Nanos at = 0;
  };
  // A sample that is held.
  struct Part {
    uint64_t offset = 0;
    uint32_t length = 0;
    TierKey key;
  };

  std::shared_ptr<const Listing> ListingOf(const std::string& path) EXCLUDES(mutex_);
  std::vector<Part> Held(const File& file, uint64_t offset, uint64_t bytes) EXCLUDES(mutex_);

  FolderStore& store_;
  std::atomic<Nanos> gap_ns_ = 0;  // a read between samples, of late; pairs with nothing
  Mutex mutex_;
  std::map<std::string, Looked, std::less<>> listings_ GUARDED_BY(mutex_);  // by folder
  std::set<std::string, std::less<>> changing_ GUARDED_BY(mutex_);
};

}  // namespace forebay::files
