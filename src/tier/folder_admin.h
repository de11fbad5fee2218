// A cache folder for people: what it holds, checked and cleared. No threads; reads the log once.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "base/owned.h"
#include "base/status.h"
#include "catalog/catalog.h"
#include "tier/folder_index.h"
#include "tier/folder_lock.h"
#include "tier/folder_log.h"

namespace forebay {

// The copies that were put for one data folder.
struct CachedGroup {
  uint64_t group = 0;
  std::string path;  // empty: not known
  uint64_t copies = 0;
  uint64_t bytes = 0;
  int64_t last_used_s = 0;  // since 1970; 0: not known
};

// Not safe for concurrent use.
class FolderAdmin {
 public:
  // To change the folder takes its lock; kUnavailable names the process that has it. kNotFound: no
  // such folder, or no cache in it.
  // `group`: as FolderTierOptions.
  static Result<FolderAdmin> Open(const std::string& folder, bool change,
                                  const std::string& group = "");

  // Not empty: the content is of another format, and only ClearAll can deal with it.
  const std::string& foreign() const { return foreign_; }
  std::vector<CachedGroup> groups() const;
  uint64_t used_bytes() const { return index_.used(); }
  uint64_t limit_bytes() const { return index_.limit(); }
  // "process 123 on host", empty when nobody writes. Ourselves are somebody.
  std::string writer() const { return FolderLock::Holder(fd_.get()); }

  // How much of a data set is held.
  struct Held {
    uint64_t copies = 0;
    uint64_t bytes = 0;
  };
  Held HeldOf(const std::shared_ptr<const Catalog>& catalog) const;
  // What is held of a group.
  std::vector<TierKey> Keys(uint64_t group) const { return index_.Keys(group); }
  // The copy's own file, below the folder; empty: it is packed, or there is none.
  std::string FileOf(const TierKey& key) const;
  // False: the copy is gone, torn or has a wrong checksum. `bytes` is what was read.
  Result<bool> Check(const TierKey& key, uint64_t* bytes);
  // Compares the copy of a sample with its file, both read; kNone: there is no copy. An error is of
  // the file.
  enum class Compared : uint8_t { kNone, kSame, kDiffers };
  Result<Compared> Compare(const Catalog& catalog, const TierKey& key, SampleId sample,
                           uint64_t* bytes);
  Status Drop(const TierKey& key);
  Status Clear(uint64_t group);
  // Of whatever format, and what the file face has in it. Files that are not ours stay.
  // kUnavailable: a file service of an older Forebay still uses the folder.
  Status ClearAll();

 private:
  FolderAdmin(std::string folder, OwnedFd fd) : folder_(std::move(folder)), fd_(std::move(fd)) {}
  Status Append(const LogRecord& record);

  std::string folder_;
  OwnedFd fd_;
  FolderLock lock_;
  bool change_ = false;
  std::string foreign_;
  FolderIndex index_;
  std::vector<FolderLog> log_;  // none or one
  std::vector<std::byte> buffer_;
};

}  // namespace forebay
