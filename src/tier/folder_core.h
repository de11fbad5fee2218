// What the threads of a folder store share.
//
// One mutex guards the index, the queues and the completions; files are touched without it. Reader
// threads serve gets. One background thread reads the log and then does everything that changes the
// folder, in order: so the log's order is the order of what happened, and a run of small samples is
// one write. Where another process writes, it follows that process's log instead, and becomes the
// writer when that process has ended.
#pragma once

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "base/owned.h"
#include "base/thread_annotations.h"
#include "tier/folder_files.h"
#include "tier/folder_index.h"
#include "tier/folder_lock.h"
#include "tier/folder_log.h"
#include "tier/folder_tier.h"

namespace forebay {

// What a tier waits for; guarded by the core's mutex.
struct FolderPort {
  explicit FolderPort(OwnedFd fd) : event_fd(std::move(fd)) {}
  const OwnedFd event_fd;
  std::deque<TierDone> done;
  size_t in_flight = 0;  // accepted and not reaped
  size_t running = 0;    // in a thread
};

// A file that somebody else has written.
struct AdoptedFile {
  int dir = -1;
  const char* name = nullptr;
  uint64_t length = 0;
  bool linked = false;  // its name stays, until ReleaseCopy
  uint32_t stamp = 0;   // of the file that it is a copy of; 0: not known
};

class FolderCore {
 public:
  // `health` not ok: only read, and why. Else `lock` is held.
  FolderCore(const FolderTierOptions& options, OwnedFd folder, FolderLock lock, Status health);

  pid_t creator() const { return creator_; }
  const std::string& folder() const { return options_.folder; }
  void Unlock() { lock_.Unlock(); }

  // ---- threads
  void RunReader() EXCLUDES(mutex_);
  void RunBackground() EXCLUDES(mutex_);
  void Started() EXCLUDES(mutex_);
  void Leave() EXCLUDES(mutex_);
  // True: all threads are about to end.
  bool Stop(Nanos at_most) EXCLUDES(mutex_);
  bool WaitScanned(Nanos at_most) EXCLUDES(mutex_);

  // ---- a disk that does not answer, as FolderStore
  size_t threads() const { return options_.threads; }
  Nanos SilentSince() const EXCLUDES(mutex_);
  void PassBy(bool pass) EXCLUDES(mutex_);
  // True: every reader is in a read already.
  bool QueueProbe() EXCLUDES(mutex_);
  void Watch() EXCLUDES(mutex_);
  bool passed_by() const EXCLUDES(mutex_) {
    MutexLock lock(mutex_);
    return passed_by_;
  }
  std::optional<Nanos> TakeProbe() EXCLUDES(mutex_);

  // ---- tiers
  size_t Submit(FolderPort& port, std::span<const TierOp> ops, size_t most) EXCLUDES(mutex_);
  size_t Reap(FolderPort& port, std::span<TierDone> out) EXCLUDES(mutex_);
  void Close(FolderPort& port) EXCLUDES(mutex_);
  void Use(uint64_t group, const std::string& path) EXCLUDES(mutex_);
  void AskedForAll(uint64_t group) EXCLUDES(mutex_);
  void Unuse(uint64_t group) EXCLUDES(mutex_);
  bool Has(const TierKey& key) EXCLUDES(mutex_);
  uint32_t StampOfCopy(const TierKey& key) const EXCLUDES(mutex_);
  bool HasRoom(uint64_t bytes) const EXCLUDES(mutex_);
  uint64_t used_bytes() const EXCLUDES(mutex_);
  uint64_t BytesFor(uint64_t copies, uint64_t bytes, bool as_files) const EXCLUDES(mutex_);
  uint64_t capacity_bytes() const EXCLUDES(mutex_);
  void SetQuota(uint64_t bytes) EXCLUDES(mutex_);
  void SetAside(uint64_t bytes) EXCLUDES(mutex_);
  TierDone Get(const TierOp& op) EXCLUDES(mutex_);
  TierStats stats() const EXCLUDES(mutex_);
  Status health() const EXCLUDES(mutex_);
  std::string note() const EXCLUDES(mutex_);

  // ---- copies as files (folder_links.cc)
  Status LinkCopy(const TierKey& key, uint64_t length, int dir, const char* name) EXCLUDES(mutex_);
  void ReleaseCopy(const TierKey& key) EXCLUDES(mutex_);
  std::vector<TierKey> TakeUnlinks() EXCLUDES(mutex_);
  Status AdoptFile(const TierKey& key, const AdoptedFile& file, uint32_t crc, bool reserved)
      EXCLUDES(mutex_);
  Status Reserve(uint64_t length) EXCLUDES(mutex_);
  void Unreserve(uint64_t length) EXCLUDES(mutex_);
  void DropNow(const TierKey& key) EXCLUDES(mutex_);

 private:
  // What somebody waits for the background thread to do.
  struct Call {
    enum class What : uint8_t { kAdopt, kUnpack, kReserve, kDrop };
    What what = What::kDrop;
    AdoptedFile file = {};  // kAdopt; kReserve: its length
    bool reserved = false;  // kAdopt: room for it
    // The file's, as the caller may have gone.
    OwnedFd dir = {};
    std::string name = {};
    bool done = false;
    bool abandoned = false;  // nobody waits for it any more
    Status status = {};
  };
  struct Job {
    TierOp op;
    FolderPort* port = nullptr;  // null: the store's own, a call, or a probe
    bool watches = false;        // a probe whose answer is owed, see Watch()
    uint64_t given_up = 0;       // kGet: given_up_ when it began
    std::shared_ptr<Call> call =
        nullptr;         // the only one of its batch; shared with who waits for it
    bool taken = false;  // kDrop: the entry is busy for it already, and was `copy`
    CopyEntry copy;
    TierDone done = {};
    uint64_t length() const { return call == nullptr ? op.bytes.size() : call->file.length; }
  };
  // A put whose bytes are written, or about to be.
  struct Pending {
    Job* job = nullptr;
    CopyEntry copy;
    uint64_t charge = 0;  // of reserved_
  };

  void Finish(FolderPort& port, TierDone done) REQUIRES(mutex_);
  // Gets that are asked for and not given up, and what Watch() asked.
  size_t Owed() const REQUIRES(mutex_) { return gets_.size() + reading_ - lost_; }
  void Probe(const TierKey& key, bool watches) EXCLUDES(mutex_);

  uint64_t Block() const EXCLUDES(mutex_) {
    MutexLock lock(mutex_);
    return index_.block();
  }
  bool Packed(uint64_t length) const { return length < options_.file_bytes; }
  bool Packed(const Job& job) const {
    return job.call == nullptr && !job.op.as_file && Packed(job.op.bytes.size());
  }
  // A job for the background thread.
  void Enqueue(Job job) REQUIRES(mutex_);
  // Enough waits to be worth a wake-up.
  bool Enough() const REQUIRES(mutex_);
  // What may be held now.
  uint64_t Limit() const REQUIRES(mutex_) { return std::min(capacity_bytes_, quota_); }
  // What the folder takes beside its copies: the rest of its log, folders, what others have in it.
  uint64_t Overhead() const REQUIRES(mutex_);
  uint64_t Used() const REQUIRES(mutex_) { return index_.used() + Overhead(); }
  bool Fits(uint64_t charge) const REQUIRES(mutex_) {
    return Used() + reserved_ + charge <= Limit();
  }
  // What to reserve for a put.
  uint64_t ChargeOf(const TierKey& key, uint64_t length, bool packed) REQUIRES(mutex_);
  // The copy is not held any more; the background thread removes it.
  void DropLater(const TierKey& key) REQUIRES(mutex_);
  // A copy that has a second name: whoever gave it is to remove it. `bytes` stay taken until then.
  void WantUnlinked(const TierKey& key, uint64_t bytes) REQUIRES(mutex_);
  // Out of the index; a second name keeps its bytes.
  void ClearCopy(const TierKey& key, uint32_t length) REQUIRES(mutex_);

  // ---- calls (folder_links.cc)
  // kUnavailable: the folder is only read, or its disk does not answer. Then the call may be made
  // later all the same.
  Status Ask(Job job, const std::shared_ptr<Call>& call) EXCLUDES(mutex_);
  // False: the log is not read by then.
  bool AwaitScan(MutexLock& lock, std::chrono::steady_clock::time_point until) REQUIRES(mutex_);
  Status Hangs() const;
  void RunCall(Job& job) EXCLUDES(mutex_);
  Status Unpack(TierKey key) EXCLUDES(mutex_);
  void EndCall(Job& job) REQUIRES(mutex_);
  Status NoRoom(uint64_t length) const;
  static bool MayNotLink(int error);
  // A copy in a segment as a file, in the log too.
  int MakeFile(const TierKey& key, const CopyEntry& file, std::span<const std::byte> bytes)
      EXCLUDES(mutex_);
  Status LinkFailed(const TierKey& key, const CopyEntry& copy, CopyRead why, int error, bool had)
      REQUIRES(mutex_);

  // ---- the background thread (folder_writes.cc)
  void Load(bool writer) EXCLUDES(mutex_);
  void LoadAsWriter(Result<FolderLog> log, int error) EXCLUDES(mutex_);
  void LoadDone() EXCLUDES(mutex_);
  Result<FolderLog> NewLog() EXCLUDES(mutex_);
  // After a power loss the log may lack what the folder holds, and name what it dropped: what no
  // record speaks of goes, and the rest is made to fit.
  void SweepAfterPowerLoss() EXCLUDES(mutex_);
  // Until it is the writer, or is to stop.
  void Follow() EXCLUDES(mutex_);
  void AnswerAsReader() REQUIRES(mutex_);
  void ReadOthersLog() EXCLUDES(mutex_);
  void ReplaceIndex(FolderIndex fresh) REQUIRES(mutex_);
  bool TakeOver() EXCLUDES(mutex_);
  void Write() EXCLUDES(mutex_);
  // One batch of what others have asked for, with `wait` once there is some. False: it is to end.
  bool WriteBatch(bool wait) EXCLUDES(mutex_);
  bool stopping() const EXCLUDES(mutex_);
  void AwaitBatch(MutexLock& lock) REQUIRES(mutex_);
  void Gather(MutexLock& lock) REQUIRES(mutex_);
  void RunBatch(std::span<Job> jobs) EXCLUDES(mutex_);
  void NoteUses(std::vector<std::pair<uint64_t, std::string>> uses) EXCLUDES(mutex_);
  // What must go before the next put can be admitted.
  struct Leaving {
    std::optional<uint64_t> group;
    std::vector<Job> copies;
    std::vector<LogRecord> stamped = {};  // for the log: copies that were found to be right
  };
  size_t AdmitPuts(std::span<Job> jobs, std::vector<Pending>* admitted, Leaving* leaving)
      EXCLUDES(mutex_);
  // What must go so that `charge` fits; false: nothing may.
  bool ChooseLeaving(uint64_t charge, Leaving* leaving) REQUIRES(mutex_);
  void Remove(Leaving& leaving) EXCLUDES(mutex_);
  // True: so much is reserved.
  bool MakeRoom(uint64_t charge) EXCLUDES(mutex_);
  void Evict(uint64_t group) EXCLUDES(mutex_);
  // Copies that nobody here needs, until `bytes` are free or there are no more.
  std::vector<Job> TakeSpare(uint64_t bytes) REQUIRES(mutex_);
  void WritePacked(std::span<Pending> puts) EXCLUDES(mutex_);
  int WriteTogether(std::span<Pending> puts) EXCLUDES(mutex_);
  void Publish(std::span<Pending> puts) EXCLUDES(mutex_);
  void Fail(Pending& put, int error) EXCLUDES(mutex_);
  void Drop(Job& job) EXCLUDES(mutex_);
  // After a copy was taken out of the index: segments and folders that are empty now.
  void RemoveEmpty(const TierKey& key, const CopyEntry& copy) EXCLUDES(mutex_);
  // Writes a log of what the index has when the old one is mostly about what is gone.
  void TidyLog() EXCLUDES(mutex_);
  // Errors after which the next write may do better.
  static bool MayPassSoon(int error);
  // Whether writing can be tried again.
  bool MayRetry() const REQUIRES(mutex_) { return writer_ && !writing_ && retry_at_ != 0; }
  void Retry() EXCLUDES(mutex_);
  int AppendLog(std::span<LogRecord> records) EXCLUDES(mutex_);
  // 0: the lock is ours, again if need be. Asked before anything in the folder is changed: a writer
  // that has lost it touches nothing, as another one may have taken over.
  int HoldLock();
  // The same; if it is not, nothing is written any more.
  bool MayTouch() EXCLUDES(mutex_);
  // `error`: 0 when it is no use to try again.
  void StopWriting(Status why, int error = 0) REQUIRES(mutex_);

  const FolderTierOptions options_;
  const OwnedFd folder_;
  const pid_t creator_ = getpid();

  // The background thread's own.
  FolderLock lock_;
  std::optional<FolderLog> log_;
  // The lock is a new one, or something is gone that the log names: the log is written anew before
  // the next record.
  bool log_behind_ = false;
  SegmentWriter segments_;
  uint64_t next_temporary_ = 0;

  mutable Mutex mutex_;
  std::condition_variable reads_;
  std::condition_variable writes_;
  std::condition_variable idle_;   // scan done, a thread left, or a port has nothing running
  std::condition_variable calls_;  // a call is done
  FolderIndex index_ GUARDED_BY(mutex_);
  std::deque<Job> gets_ GUARDED_BY(mutex_);  // bounded by the ports, and a probe
  size_t readers_ GUARDED_BY(mutex_) = 0;
  size_t reading_ GUARDED_BY(mutex_) = 0;      // readers in a get or a probe
  size_t lost_ GUARDED_BY(mutex_) = 0;         // of these, that nobody waits for
  uint64_t given_up_ GUARDED_BY(mutex_) = 0;   // times that gets were
  Nanos silent_since_ GUARDED_BY(mutex_) = 0;  // while Owed()
  bool passed_by_ GUARDED_BY(mutex_) = false;
  TierKey probe_key_ GUARDED_BY(mutex_);  // the last that was asked for
  std::optional<Nanos> probe_took_ GUARDED_BY(mutex_);
  std::deque<Job> others_ GUARDED_BY(mutex_);  // bounded by the ports, and by damaged copies
  std::vector<std::pair<uint64_t, std::string>> uses_ GUARDED_BY(mutex_);
  size_t alive_ GUARDED_BY(mutex_) = 0;
  bool scanned_ GUARDED_BY(mutex_) = false;
  bool stopping_ GUARDED_BY(mutex_) = false;
  uint64_t queued_bytes_ GUARDED_BY(mutex_) = 0;  // of others_
  bool urgent_ GUARDED_BY(mutex_) = false;        // others_ has a drop
  bool idle_writer_ GUARDED_BY(mutex_) = true;    // the first job wakes the background thread
  bool writer_ GUARDED_BY(mutex_);                // the flock is ours
  bool writing_ GUARDED_BY(mutex_);
  Status health_ GUARDED_BY(mutex_);
  std::string note_ GUARDED_BY(mutex_);
  uint64_t reserved_ GUARDED_BY(mutex_) = 0;    // for puts under way
  uint64_t capacity_bytes_ GUARDED_BY(mutex_);  // 0 until the scan is done, when it is to be chosen
  uint64_t chosen_bytes_ GUARDED_BY(mutex_) = 0;  // the capacity while the folder can be written
  uint64_t quota_ GUARDED_BY(mutex_) = ~uint64_t{0};
  uint64_t aside_ GUARDED_BY(mutex_) = 0;
  uint64_t log_bytes_ GUARDED_BY(mutex_) = 0;
  Nanos retry_at_ GUARDED_BY(mutex_) = 0;  // 0: never
  // Copies whose second name somebody was told to remove, or will be, and what those take that are
  // not held any more.
  std::map<std::pair<uint64_t, uint32_t>, uint64_t> unlinking_ GUARDED_BY(mutex_);
  uint64_t unlinking_bytes_ GUARDED_BY(mutex_) = 0;
  std::vector<TierKey> unlinks_ GUARDED_BY(mutex_);  // not told yet
  TierStats stats_ GUARDED_BY(mutex_);
};

}  // namespace forebay
