// A cache folder for people: what it holds, checked and cleared. No threads; reads the log once.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "base/owned.h"
#include "base/status.h"
#include "tier/folder_index.h"
#include "tier/folder_lock.h"
#include "tier/folder_log.h"

namespace forebay {

struct CachedDataset {
  uint64_t dataset = 0;
  std::string path;  // empty: not known
  uint64_t samples = 0;
  uint64_t bytes = 0;
  int64_t last_used_s = 0;  // since 1970; 0: not known
};

// Not safe for concurrent use.
class FolderAdmin {
 public:
  // To change the folder takes its lock; kUnavailable names the process that has it. kNotFound: no
  // such folder, or no cache in it.
  static Result<FolderAdmin> Open(const std::string& folder, bool change);

  // Not empty: the content is of another format, and only ClearAll can deal with it.
  const std::string& foreign() const { return foreign_; }
  std::vector<CachedDataset> datasets() const;
  uint64_t used_bytes() const { return index_.used(); }
  uint64_t limit_bytes() const { return index_.limit(); }
  // "process 123 on host", empty when nobody writes. Ourselves are somebody.
  std::string writer() const { return FolderLock::Holder(fd_.get()); }

  // The samples of a data set that are held, in order.
  std::vector<uint32_t> Samples(uint64_t dataset) const { return index_.Samples(dataset); }
  // False: the copy is gone, torn or has a wrong checksum. `bytes` is what was read.
  Result<bool> Check(uint64_t dataset, uint32_t sample, uint64_t* bytes);
  Status Drop(uint64_t dataset, uint32_t sample);
  Status Clear(uint64_t dataset);
  // Of whatever format. Files that are not ours stay.
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
