// A tier in a folder with a size limit, whose content outlives the job.
//
//   <folder>/forebay.lock   flock: one writer a folder, others only read; says who writes. When it
//                           ends, one of the others is the next
//   <folder>/index.log      what is held where (folder_log.h)
//   <folder>/<group>/...    the copies (folder_files.h)
//   <folder>/writing/...    what is being written
//   <folder>/run/...        of the file face: second names of copies, which programs open
//
// A copy counts once the log names it, and the log names it once its bytes are written: a process
// that dies leaves whole copies and some bytes that nobody looks at. Nothing is synced to the disk
// but a new lock. After a power loss a copy may be torn; its checksum tells, before it is read and
// before its first second name, and the sample is fetched from the source again. The first writer
// of another start of the machine removes what no record speaks of.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
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
  // Not empty: a group, by name or number, whose members share the folder on purpose. Each of them
  // chooses what the others read from it.
  std::string group = {};
  // What the folder may take of the disk, in blocks, its log and folders included; `du` stays below
  // it. 0: four fifths of what the disk has free and the folder holds already.
  uint64_t capacity_bytes = 0;
  // What the disk rounds a file up to. 0: as the file system says. 1: only the bytes of samples
  // count, and 40 more for each.
  uint64_t block_bytes = 0;
  // Samples of so many bytes have a file of their own, whose descriptor can be handed out; smaller
  // ones are packed.
  uint64_t file_bytes = 256 << 10;
  size_t threads = 4;                   // that read; one more writes
  Nanos follow_every = kSecond;         // where another process writes: look for what it has added
  Nanos take_over_every = 3 * kSecond;  // and try to become the writer, should that one have ended
  // After a write failed for want of room, on a read-only or failing disk: try again.
  Nanos retry_every = 30 * kSecond;
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
  // Memory that the store takes for each sample it holds: 36 bytes, in a table that is 7/16 to 7/8
  // full.
  static constexpr size_t kBytesASample = 64;

  // The log is read in the background; until that is done nothing is written. A folder that cannot
  // be written, or has another writer, is read until it can, or that writer has ended; health()
  // tells. Fails when the folder cannot be opened at all, or when others could have put copies into
  // it.
  static Result<std::shared_ptr<FolderStore>> Open(const FolderTierOptions& options);
  // The same, unless the disk hangs: nullptr when it has answered nobody for `patience`, neither
  // this nor who looks meanwhile whether it answers. A thread is left behind, which closes what it
  // has opened when the disk answers.
  static Result<std::shared_ptr<FolderStore>> OpenUnlessHung(const FolderTierOptions& options,
                                                             Nanos patience);
  // Reads a little of what there is of the folder's path, and so waits for its disk.
  static void Look(const std::string& folder);
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
  // A data set that grows says so at once: it asks for each file as it comes.
  void AskedForAll(uint64_t group);
  // Ends one Use. When nobody uses the group any more its copies make room for others, but for
  // those that have a second name (LinkCopy).
  void Unuse(uint64_t group);
  // ---- A disk that does not answer.
  //
  // Since when (SteadyClock) the disk owes an answer to a get of a tier or to Watch(); 0: it owes
  // none.
  Nanos SilentSince() const;
  // For those who read copies by themselves, so that no get would tell of a disk that hangs: a
  // thread reads a little of a copy, unless the disk owes an answer already or is passed by.
  void Watch();
  bool passed_by() const;
  // Gets that no thread has begun, and those that come while it is passed by, are misses that were
  // not looked for. Those that have begun are not waited for any more: they end when they can.
  void PassBy(bool pass);
  // One thread: looks whether the disk answers, by reading a little of a copy. Not before the last
  // one was taken.
  void StartProbe();
  // How long it took to be answered; nothing: it is under way.
  std::optional<Nanos> TakeProbe();

  // True: all content is known.
  bool WaitScanned(Nanos at_most) const;

  bool Has(const TierKey& key) const;
  uint32_t StampOfCopy(const TierKey& key) const;
  // Whether it is held, without a claim to it.
  bool Holds(const TierKey& key) const { return Has({.name = key.name, .check = key.check}); }
  // Fills `bytes`, which have exactly the copy's length. Waits for the disk. False: a miss.
  bool Read(const TierKey& key, std::span<std::byte> bytes);

  // ---- Copies as files. These calls wait for the disk. Only the folder's writer can: elsewhere
  // they are kUnavailable, and so they are where the disk does not answer for ten seconds, or is
  // passed by.
  //
  // Gives the copy the further name `name` in the folder `dir`, without a read of the source. Its
  // bytes are those that were put: unless this process wrote or read them, they are checked first.
  // Whoever gives the name may change mode (others must not be able to write) and extended
  // attributes of the file, and never its bytes. A copy that has such a name is never given up to
  // make room: see TakeUnlinks.
  // kNotFound: no such copy, or a damaged one, which is dropped. kAlreadyExists: the name is taken.
  // kResourceExhausted: the copy was packed, and there is no room to make it a file.
  // kUnimplemented: no links between the two folders (another file system, or one without hard
  // links, or too many links).
  Status LinkCopy(const TierKey& key, uint64_t length, int dir, const char* name);
  // The name that LinkCopy or AdoptFile knows is removed: the copy may be given up again. Without
  // effect for one that had none.
  void ReleaseCopy(const TierKey& key);
  // Copies whose second name is in the way: room is needed and nobody needs them, or they were
  // damaged or dropped. Whoever gave the names removes them, then calls ReleaseCopy for each; only
  // then their bytes count as free. Never the same one twice until it was released.
  std::vector<TierKey> TakeUnlinks();
  // Makes a complete file of this user, which lies on the same file system, a copy; nobody writes
  // to it any more. Its name stays, and counts as LinkCopy's. Ok too when the store has the copy
  // already: then the file is none of its (st_nlink tells). `reserved`: Reserve was called for it,
  // which this ends. `stamp`: the change time of the file that it is a copy of. kResourceExhausted:
  // no room for it.
  Status AdoptFile(const TierKey& key, int dir, const char* name, uint64_t length, uint32_t crc,
                   bool reserved = false, uint32_t stamp = 0);
  // Room for a file that somebody is about to write into this folder: what nobody needs is given up
  // for it. kResourceExhausted: there is none.
  Status Reserve(uint64_t length);
  void Unreserve(uint64_t length);
  // When it returns, no later call finds the copy.
  void Drop(const TierKey& key);
  // Bytes of other files in the folder, which count against the capacity.
  void SetAside(uint64_t bytes);

  // What the folder takes of the disk.
  uint64_t used_bytes() const;
  // The same, about, with nothing in it but so many copies of so many bytes together.
  uint64_t BytesFor(uint64_t copies, uint64_t bytes, bool as_files = false) const;
  uint64_t capacity_bytes() const;
  // From now on no copy is taken that would make the folder hold more than this; 0: no such bound.
  // What it holds stays. A store that another process writes for is bound by that one.
  void SetQuota(uint64_t bytes);
  TierStats stats() const;
  // Ok: it takes copies, unless it is full; else why it does not.
  Status health() const;
  // It only reads because another process writes to the folder.
  bool follows() const { return follows_ && !health().ok(); }
  // What was found and mended when the folder was opened, in a sentence; mostly nothing.
  std::string note() const;

 private:
  explicit FolderStore(std::shared_ptr<FolderCore> core);
  friend class FolderTier;

  // Shared with the threads, which may have to be left behind.
  std::shared_ptr<FolderCore> core_;
  std::vector<std::thread> threads_;
  bool follows_ = false;  // when it was opened; constant after that
};

}  // namespace forebay
