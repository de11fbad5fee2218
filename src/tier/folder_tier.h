// A tier in a folder with a size limit, whose content outlives the job.
//
//   <folder>/forebay.lock   flock: one writer a folder, others only read; says who writes. When it
//                           ends, one of the others is the next
//   <folder>/index.log      what is held where (folder_log.h)
//   <folder>/<group>/...    the copies (folder_files.h)
//   <folder>/writing/...    what is being written
//
// A copy counts once the log names it, and the log names it once its bytes are written: a process
// that dies leaves whole copies and some bytes that nobody looks at. Nothing is synced to the disk.
// After a power loss a copy may be torn; its checksum tells, and the sample is fetched from the
// source again.
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
  // Made, with its parents, when it does not exist. One that exists is this user's, and nobody else
  // may write to it (OpenPrivateFolder).
  std::string folder;
  // Bytes of samples, and 40 more for each. What the disk rounds files up by is not counted: half a
  // block for each sample in a file of its own. 0: four fifths of what the disk has free and the
  // folder holds already.
  uint64_t capacity_bytes = 0;
  // Samples of so many bytes have a file of their own, whose descriptor can be handed out; smaller
  // ones are packed.
  uint64_t file_bytes = 256 << 10;
  size_t threads = 4;                   // that read; one more writes
  Nanos follow_every = kSecond;         // where another process writes: look for what it has added
  Nanos take_over_every = 3 * kSecond;  // and try to become the writer, should that one have ended
  // Puts are written together, so many bytes at a time: when half of them wait, or after `gather`.
  // Whoever puts should be able to have twice as many in flight. 1 MiB is enough for all there is
  // to gain.
  uint64_t batch_bytes = 256 << 10;
  Nanos gather = 5 * kMilli;
  Status Validate() const;
};

class FolderCore;

// Safe for concurrent use by multiple threads.
class FolderStore {
 public:
  // Memory that the store takes for each sample it holds: 28 bytes, in a table that is 7/16 to 7/8
  // full.
  static constexpr size_t kBytesASample = 48;
  // What a copy takes of the capacity beside its bytes.
  static constexpr size_t kOverheadASample = 40;

  // The log is read in the background; until that is done nothing is written. A folder that cannot
  // be written, or has another writer, is read until it can, or that writer has ended; health()
  // tells. Fails when the folder cannot be opened at all, or when others could have put copies into
  // it.
  static Result<std::shared_ptr<FolderStore>> Open(const FolderTierOptions& options);
  // Threads that hang in the kernel for more than two seconds are left behind.
  ~FolderStore();
  FolderStore(const FolderStore&) = delete;
  FolderStore& operator=(const FolderStore&) = delete;

  // A tier of its own queue over the shared content. It keeps `store` alive: the tiers of several
  // data sets share one store, and go in no particular order.
  static Result<std::unique_ptr<Tier>> MakeTier(std::shared_ptr<FolderStore> store,
                                                size_t max_in_flight);

  // Copies of this group are not dropped to make room for others. Those of groups that nobody has
  // named, here, are: least recently used first. Any op of a tier names its group, too. `path` is
  // where the data lie, for people who list the folder.
  void Use(uint64_t group, const std::string& path = "");
  // All that is needed of the group has been asked for (Has): what else it holds, of files that
  // changed or are gone, is dropped when room is needed, after the groups that nobody named.
  void AskedForAll(uint64_t group);
  // True: all content is known.
  bool WaitScanned(Nanos at_most) const;

  bool Has(const TierKey& key) const;
  uint64_t used_bytes() const;
  uint64_t capacity_bytes() const;
  // From now on no copy is taken that would make the folder hold more than this; 0: no such bound.
  // What it holds stays. A store that another process writes for is bound by that one.
  void SetQuota(uint64_t bytes);
  TierStats stats() const;
  Status health() const;
  // What was found and mended when the folder was opened, in a sentence; mostly nothing.
  std::string note() const;

 private:
  explicit FolderStore(std::shared_ptr<FolderCore> core);
  friend class FolderTier;

  // Shared with the threads, which may have to be left behind.
  std::shared_ptr<FolderCore> core_;
  std::vector<std::thread> threads_;
};

}  // namespace forebay
