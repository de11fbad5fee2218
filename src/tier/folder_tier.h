// A tier in a folder with a size limit, whose content outlives the job.
//
//   <folder>/forebay.lock                          flock: one writer a folder, others only read
//   <folder>/writing/<pid>-<n>.tmp                 copies being written
//   <folder>/<dataset>/<sample / 1024>/<sample>.fb whole copies, numbers as 16, 8 and 8 hex digits
//
// A copy is a header (magic, key, length, checksum) and the sample's bytes, written under
// `writing/` and renamed: a process that dies leaves either a whole copy or a file that the next
// writer removes. Nothing is synced to the disk. After a power loss a copy may be torn; its
// checksum tells, and the sample is fetched from the source again.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "base/clock.h"
#include "base/status.h"
#include "tier/tier.h"

namespace forebay {

struct FolderTierOptions {
  std::string folder;  // made, with its parents, when it does not exist
  // On the disk, each copy rounded up to blocks of 4 KiB. 0: four fifths of what the disk has free
  // and the folder holds already.
  uint64_t capacity_bytes = 0;
  size_t threads = 4;  // half of them, at least one, may be writing
  Status Validate() const;
};

// Safe for concurrent use by multiple threads.
class FolderStore {
 public:
  // Content is looked for in the background; until that is done nothing is written. A folder that
  // cannot be written, or has another writer, is read; health() tells. Fails when the folder cannot
  // be opened at all.
  static Result<std::shared_ptr<FolderStore>> Open(const FolderTierOptions& options);
  // Threads that hang in the kernel for more than two seconds are left behind.
  ~FolderStore();
  FolderStore(const FolderStore&) = delete;
  FolderStore& operator=(const FolderStore&) = delete;

  // A tier of its own queue over the shared content. It keeps `store` alive: the tiers of several
  // data sets share one store, and go in no particular order.
  static Result<std::unique_ptr<Tier>> MakeTier(std::shared_ptr<FolderStore> store,
                                                size_t max_in_flight);

  // Copies of this data set are never dropped to make room. Those of data sets that nobody has
  // named, here, are: least recently used first. Any op of a tier names its data set too.
  void Use(uint64_t dataset);
  // True: all content is known.
  bool WaitScanned(Nanos at_most) const;

  bool Has(const TierKey& key) const;
  uint64_t used_bytes() const;
  uint64_t capacity_bytes() const;
  TierStats stats() const;
  Status health() const;

 private:
  class Core;
  friend class FolderTier;
  explicit FolderStore(std::shared_ptr<Core> core);

  // Shared with the threads, which may have to be left behind.
  std::shared_ptr<Core> core_;
  std::vector<std::thread> threads_;
};

}  // namespace forebay
