// Engine: owns the budget, the arena, the sources and many streams, and runs the scheduler.
//
// All sample memory is one memfd, addressed by offsets, so that another process can map it. One
// thread (the loop) talks to the sources; one makes the orders of coming epochs; a few copy batches
// of contiguous streams. Consumers call from any thread.
#pragma once

#include <poll.h>

#include <array>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include "base/clock.h"
#include "base/owned.h"
#include "base/status.h"
#include "base/thread_annotations.h"
#include "catalog/catalog.h"
#include "catalog/sizer.h"
#include "core/cost_model.h"
#include "core/home_plan.h"
#include "core/place_watch.h"
#include "core/reads_under_way.h"
#include "core/sampler.h"
#include "core/scheduler.h"
#include "core/stream_options.h"
#include "core/tuner.h"
#include "core/tuner_log.h"
#include "decode/pool.h"
#include "metrics/epoch_log.h"
#include "metrics/registry.h"
#include "metrics/stall.h"
#include "source/source.h"
#include "stage/mechanisms.h"
#include "stage/peer_report.h"
#include "stage/shared_sources.h"
#include "tier/folder_tier.h"
#include "tier/tiered_source.h"

namespace forebay {

struct EngineOptions {
  // Bytes for everything the engine holds: arena, tables, stacks. 0: DefaultBudget().
  uint64_t memory = 0;
  size_t max_in_flight = 256;  // source reads
  size_t in_flight = 0;        // fixed number instead of the tuner's; 0: tuned
  uint64_t read_ahead = 0;     // bytes, fixed instead of the tuner's; 0: tuned
  TunePolicy tuner = TunePolicy::kForebay;
  std::string tuner_log;  // what the tuner saw and decided goes to this file; empty: nowhere
  PosixSourceOptions::Io io = PosixSourceOptions::Io::kAuto;
  size_t copy_threads = 2;
  size_t decode_threads = 0;  // the most that decode; 0: one for each processor
  bool keep = true;           // samples stay in memory for later epochs
  uint64_t memory_tier = 0;   // the most bytes that stay so; 0: all that read-ahead leaves
  bool verify = false;        // check each sample's bytes once more as they arrive; costs a pass
  // How long a consumer waits for memory that only its own unreleased batches hold.
  Nanos release_wait = 10 * kSecond;
  // Samples read from posix sources are copied into this folder and read from there by later epochs
  // and jobs; empty: there is none. Catalogs without modification times do without.
  std::string cache_folder;
  uint64_t cache_bytes = 0;  // as FolderTierOptions::capacity_bytes
  std::string cache_group;   // as FolderTierOptions::group
  // False: the engine has no thread of its own for reads and orders, and goes on in Step only. For
  // simulators; then there is no cache folder, no contiguous stream, and no wait but of 0.
  bool own_threads = true;
  Status Validate() const;
};

// A batch on loan: nobody touches its memory until it is released.
struct BatchLoan {
  LeaseId lease = kNoLease;
  StreamId stream = 0;
  DatasetId dataset = 0;
  uint64_t epoch = 0;
  // Of the batch in its epoch, also where the stream began or was sought to inside of it: the batch
  // at `position` has the number position / (batch size * world). Declared orders count from where
  // they begin.
  uint64_t index = 0;
  const std::byte* base = nullptr;  // of the arena that it lies in
  std::vector<SampleId> samples;
  std::vector<uint64_t> offsets;  // from `base`
  std::vector<uint32_t> lengths;
  std::vector<uint32_t> crcs;  // CRC-32C of each; of serving streams only
};

// Bytes that the node's tiers may keep.
struct NodeRoom {
  uint64_t memory = 0;
  uint64_t folder = 0;
};

// Puts another source before the one that it is given, which it owns from then on.
using SourceWrap = std::function<Result<std::unique_ptr<Source>>(
    DatasetId dataset, std::shared_ptr<const Catalog> catalog, std::unique_ptr<Source> inner)>;

enum class TakeKind : uint8_t { kBatch, kPending, kEndOfEpoch, kEndOfStream };

// Files of one data set that were found changed since they were looked at.
struct ChangedFilesOf {
  uint64_t count = 0;
  std::string last;  // the one that was found last, in words; empty: none
};

class EarlySamples;
class Engine;

// A part of the engine's budget that its holder uses elsewhere; the destructor gives it back. Must
// not outlive the engine.
class MemoryShare {
 public:
  MemoryShare() = default;
  MemoryShare(Engine& engine, std::vector<ArenaAllocator::Block> blocks)
      : engine_(&engine), blocks_(std::move(blocks)) {}
  MemoryShare(MemoryShare&& other) noexcept
      : engine_(std::exchange(other.engine_, nullptr)), blocks_(std::move(other.blocks_)) {}
  MemoryShare& operator=(MemoryShare&& other) noexcept {
    std::swap(engine_, other.engine_);
    std::swap(blocks_, other.blocks_);
    return *this;
  }
  ~MemoryShare();

 private:
  Engine* engine_ = nullptr;
  std::vector<ArenaAllocator::Block> blocks_;
};

// Deletes an engine in the process that made it; in a forked child its threads do not exist and its
// locks may be held by them, so it is left alone.
struct EngineDelete {
  void operator()(Engine* engine) const;
};
using EnginePtr = std::unique_ptr<Engine, EngineDelete>;

class Engine {
 public:
  static Result<EnginePtr> Create(const EngineOptions& options);
  // Stops the threads. Reads that hang in the kernel for more than two seconds are left behind with
  // the memory they write to, so that a dead mount cannot hang the exit.
  ~Engine();

  // `source` null: a posix source over the catalog. `early`: what its scan has read already.
  // The catalog may still lack lengths: they are taken over as they become known, in the order in
  // which streams need them. Where that cannot be (peers, another engine that reads the same
  // catalog) the call waits for them.
  //
  // Whoever adds a data set is a user of it, until CloseDataset. `key`: equal data sets have the
  // same; one that is open under it gets another user, and one that was closed lately is taken up
  // again with what memory still keeps of it (then `source` is used, and `early` is not). Empty:
  // always another one. Files whose change time is another one than that one's count as changed: of
  // a closed one memory forgets them, beside an open one there is another data set of that key.
  Result<DatasetId> AddDataset(std::shared_ptr<const Catalog> catalog,
                               std::unique_ptr<Source> source = nullptr,
                               EarlySamples* early = nullptr, const std::string& key = {});
  // One user fewer. Open streams keep it as well, so that who only reads from a stream may close
  // the data set as soon as that is open. Without users, and once its streams are closed, their
  // batches released, and reads and copies under way have ended, the data set gives back all that
  // it has: source, tables, its part of the budget, its number. What memory keeps of it stays for a
  // while, where there is room for it beside everything that is open, for AddDataset with the same
  // key.
  Status CloseDataset(DatasetId dataset);
  // One more user of the data set that is open under the key; nothing: none is. Never waits.
  // `stamps`: Catalog::StampsHash of who asks, not 0: the files must be known to be those.
  std::optional<DatasetId> UseDataset(const std::string& key, uint64_t stamps = 0);
  // Whether AddDataset would find it. `parked`: also one that is closed.
  bool KnowsDataset(const std::string& key, bool parked) const;
  // Another key for a data set; where another one has that already, nothing happens.
  void RenameDataset(const std::string& key, const std::string& to);
  // The same for a catalog that grows, which only this engine appends to from then on. Its streams
  // hand out single samples: they are itemised, or serve other nodes.
  Result<DatasetId> AddGrowing(std::shared_ptr<Catalog> catalog,
                               std::unique_ptr<Source> source = nullptr);
  // Adds files to such a data set, and one entry for each to `out`. One that it has already, with
  // this size, time and block, has the samples of before, unless they were invalidated. Copies that
  // the cache folder has are used. An error is of the first file that is not in `out`; those before
  // it stay.
  Status AppendSamples(DatasetId dataset, std::span<const NewFile> files,
                       std::vector<Appended>* out);
  // The file of these samples has changed, or is about to. Once this has returned nobody who asks
  // gets the old bytes: a Fetch of such a sample is kChanged, and the cache folder has no copy
  // under its name. Batches on loan stay as they are. The file, as it is then, is appended anew.
  // kUnavailable: the cache folder hangs and may still have a copy.
  Status Invalidate(DatasetId dataset, SampleId first, uint32_t count);
  // Residency::Dataset::passing; before the first stream over it.
  Status SetPassing(DatasetId dataset);
  Result<StreamId> OpenStream(const StreamOptions& options);
  // Until every length of the data set was looked up.
  Status WaitSized(DatasetId dataset);
  // Its number names another stream some time later.
  Status CloseStream(StreamId stream);
  // The next batch is the one at `position` (global, counted over all ranks) of `epoch`.
  Status Seek(StreamId stream, uint64_t epoch, uint64_t position);
  // Declared streams: one more epoch is known.
  Status Declare(StreamId stream, uint64_t epoch, std::vector<SampleId> order, bool last);

  // Waits at most `wait` for the stream's next batch; kPending when it is not there by then. An
  // error leaves the stream where it is: the next call tries the same batch again.
  Result<TakeKind> Take(StreamId stream, Nanos wait, BatchLoan* out);
  // One sample. `*lease` is kNoLease on the first call and names the pending request on later ones.
  Result<TakeKind> Fetch(StreamId stream, SampleId sample, Nanos wait, LeaseId* lease,
                         BatchLoan* out);
  Status Release(LeaseId lease);

  // ---- The cluster: for peer/peers.h, which puts itself between the tiers and the source.
  //
  // Applied to the source of every data set added from now on, below the cache folder. The data set
  // has its number already, and exists once AddDataset has returned.
  void SetSourceWrap(SourceWrap wrap);
  // What the node's tiers may keep: one KeepShare a sample, or empty for everything. At any time;
  // for a data set that is being added it holds from the start.
  void SetShare(DatasetId dataset, std::vector<uint8_t> share);
  // The same of some samples.
  void ChangeShares(DatasetId dataset, std::span<const std::pair<SampleId, KeepShare>> changes);
  // A hidden stream for other nodes' requests: Fetch with no wait, many leases at once, in any
  // order. It takes free memory only, an eighth at most, never from what lives here, and stands
  // behind this node's consumers; its waits are nobody's stall. A fetch that finds no memory stays
  // pending: whoever asked gives up after a while (Release).
  Result<StreamId> OpenServing(DatasetId dataset);
  // Readable when a pending fetch of any serving stream may have ended; the caller reads it empty,
  // then asks again for all that are pending.
  int serving_fd() const { return serving_fd_.get(); }
  // Bit s: memory tier or folder have sample s.
  std::vector<std::byte> HeldBits(DatasetId dataset) const;
  // Since the last call; at the first one, everything held is new.
  HeldChanges TakeHeldChanges(DatasetId dataset);
  // What this node's tiers can keep, less a margin.
  NodeRoom TierRoom() const;
  // What they can keep as things are now, without a margin: tables and streams took their part.
  uint64_t TierQuota() const;
  // What each sample takes of it.
  static std::vector<uint32_t> TierLengths(const Catalog& catalog);
  std::vector<uint32_t> TierLengths(DatasetId dataset) const;
  // How this node's streams use the data set; nothing: none has an order and an end of its own, or
  // they differ.
  std::optional<DatasetUse> UseOf(DatasetId dataset) const;
  // At most `most` samples that streams of this node will use beyond their windows, that are not
  // here and would be kept; those that live here last.
  std::vector<SampleId> Upcoming(DatasetId dataset, size_t most) const;
  // Who can tell of the cluster; null: nobody. The function is called by whoever asks for Cluster.
  void SetClusterReport(std::function<ClusterReport()> report);
  ClusterReport Cluster() const;

  // The threads that decode for all pipelines of this engine.
  DecodePool& decode_pool() { return decode_pool_; }
  // Lends `bytes` of the budget; kResourceExhausted when batches on loan stand in the way, or fewer
  // than `leave` bytes would be left for samples. Waits at most `wait` for reads under way, whose
  // memory cannot be had before they end.
  Result<MemoryShare> Lend(uint64_t bytes, uint64_t leave = 0, Nanos wait = 0);
  // For consumers that wait elsewhere: what the stream's next batch lacks, or the sample of a
  // pending Fetch, and where such a wait is counted.
  StallCause WaitCause(StreamId stream, LeaseId fetch = kNoLease) const;
  void CountStall(StallCause cause, Nanos waited);

  const std::byte* base() const { return arena_.data(); }
  uint64_t arena_bytes() const { return arena_.size(); }
  int arena_fd() const { return memfd_.get(); }
  uint64_t budget() const { return budget_; }
  // Null: there is no such data set, or it was closed.
  std::shared_ptr<const Catalog> shared_catalog(DatasetId dataset) const;
  Registry& registry() { return registry_; }
  // Numbers of data sets are below this; some may not be in use.
  size_t dataset_count() const;
  // That have users, or are not given back yet.
  size_t open_datasets() const;
  // For one driver that asks for many clients with no wait: after ArmProgress the descriptor
  // becomes readable once, as soon as anything happens that may end a pending Take or Fetch.
  int progress_fd() const { return progress_fd_.get(); }
  void ArmProgress() { progress_wanted_.store(true, std::memory_order_relaxed); }
  // kResourceExhausted while nothing but a Release can end the stream's wait.
  Status Blocked(StreamId stream) const;

  // Finished epochs and the current one, oldest first.
  std::vector<EpochStats> Stats(StreamId stream) const;
  // What the cache folder holds; null: there is none. Shared with the engine, which it may outlive.
  std::shared_ptr<FolderStore> cache_store() const {
    return cache_ == nullptr ? nullptr : cache_->store;
  }
  // Ok while there is no cache folder or it takes copies; else why it does not.
  Status CacheStatus() const;
  // The most bytes that the cache folder may hold; kNotFound without one.
  Result<uint64_t> CacheLimit() const;
  // That the cache folder hung or stopped taking copies, in a line each, with what to do; empty: it
  // never did. That another process writes to it is none.
  std::string CacheWarning() const;
  // Files that were found changed since they were looked at, in a line each, the first few; empty:
  // none. What is read of them from then on is what they hold, and is not copied.
  std::string ChangedFiles() const;
  // The same of the data set that a stream reads.
  ChangedFilesOf ChangedFiles(StreamId stream) const;
  // Is called for each line of CacheWarning() and ChangedFiles() as soon as there is one, and must
  // neither wait nor call back.
  void SetWarn(std::function<void(const std::string&)> warn);
  // What was mended when the cache folder was opened; mostly nothing.
  std::string CacheNote() const;
  // What jobs may take, while they have streams, and what they took. For one driver: `held_back` is
  // since the call before.
  void SetJobLimits(std::string_view job, const JobLimits& limits);
  std::vector<JobStats> TakeJobStats();
  // What a pending Take waits for, in words: "source: reading /data/x.jpg".
  std::string WaitingFor(StreamId stream) const;
  // Without own_threads: does what they would do now, if one of their descriptors is readable or
  // they are `due`. Returns for how long they would sleep then; 0: there is more to do; nothing:
  // they would not have woken.
  std::optional<Nanos> Step(bool due);
  // Source reads under way now / the limit.
  size_t in_flight() const;
  size_t in_flight_limit() const;

 private:
  struct DatasetState {
    enum class Use : uint8_t {
      kFree,        // the number may be used again from `free_at` on
      kAdding,      // somebody is in Add with it
      kOpen,        // has users
      kClosing,     // has none; streams, batches, reads or copies are left
      kParked,      // the memory tier has some of it, for who opens it again
      kGivingBack,  // that is being given up
    };
    Use use = Use::kFree;
    bool retiring = false;  // the source was told that it will not be read from any more
    uint32_t users = 0;
    uint32_t calls = 0;  // of functions that wait and use it then
    std::string key;
    Nanos parked_at = 0;
    Nanos free_at = 0;
    SampleId give_up_at = 0;
    // What was set aside for it, and for what its source has.
    std::vector<ArenaAllocator::Block> tables;
    std::vector<ArenaAllocator::Block> source_tables;
    std::shared_ptr<const Catalog> catalog;  // shared with the loaders that named it
    std::unique_ptr<Source> source;
    TieredSource* tiered = nullptr;    // the source, where it reads through the cache folder
    Sizer* sizer = nullptr;            // the catalog's, where lengths came later than the data set
    std::shared_ptr<Catalog> growing;  // the catalog, where it grows
    bool shared = false;               // with other nodes
    uint64_t paid_samples = 0;         // growing: that the tables set aside are for
    std::vector<SampleId> to_drop;     // copies for the loop thread to drop
    std::set<SampleId> dropping;       // those, and what the folder has not dropped yet
    std::set<SampleId> changed;        // that were read as something else than was looked at
    std::string last_changed;          // of these, in words
    // Catalog::ChangeStamp by object of the files whose bytes memory has; 0: of none, or not known.
    // The catalog's, or its own, where that has none and reads tell. Null: not of loose files.
    std::shared_ptr<std::vector<uint32_t>> stamps;
    uint64_t stamps_hash = 0;  // Catalog::StampsHash of those; 0: not known
    uint64_t mean_bytes = 0;
    uint64_t reads = 0;
    uint64_t read_bytes = 0;
    uint64_t peer_reads = 0;
    uint64_t peer_bytes = 0;
    // Loop thread only.
    size_t flying = 0;  // reads in the backlog, and with the source
    std::deque<ReadAction> backlog;
    OriginModel source_model;
    OriginModel tier_model;
    Nanos tier_answer = 0;  // what the folder's last one took
  };
  // A thread that waits for one sample.
  struct FetchWaiter {
    LeaseId lease = kNoLease;
    uint64_t seen = 0;  // of Leases::Changes
    std::condition_variable ready;
  };
  struct StreamState {
    StreamOptions options;
    bool open = true;
    size_t waiters = 0;             // threads at `ready`, and in `fetches`
    std::condition_variable ready;  // for who takes batches
    // Each is woken for its own sample: a file service has 64 of them.
    std::vector<FetchWaiter*> fetches;
    EpochLog epochs;
    Nanos last_ask = 0;
    Nanos blocked_since = -1;        // across calls: a caller may wait in short slices
    EpochStats at_start;             // the data set's reads when the epoch began
    EpochStats at_close;             // and when the stream was closed
    uint64_t announced_changes = 0;  // serving: of Leases::Consumer::changes
    // Where it was opened or sought to: the scheduler counts batches from there.
    uint64_t start_epoch = 0;
    uint64_t start_index = 0;
    void StartAt(uint64_t epoch, uint64_t position);
  };

  struct Cache {
    Cache(std::shared_ptr<FolderStore> folder, uint64_t buffer_bytes, Registry& registry)
        : store(std::move(folder)), buffer(buffer_bytes), metrics(registry) {}
    const std::shared_ptr<FolderStore> store;  // shared with the tiers of the data sets
    WriteBuffer buffer;
    TierMetrics metrics;
    PlaceWatch watch;   // loop thread only
    Nanos look_at = 0;  // loop thread only
  };

  explicit Engine(const EngineOptions& options, uint64_t budget, uint64_t arena_bytes);
  friend struct EngineDelete;
  friend class MemoryShare;
  void TakeBack(std::span<const ArenaAllocator::Block> blocks);
  // For EarlySamples. What AllotEarly gives lies in the arena; empty: no room.
  friend class EarlySamples;
  uint64_t EarlyRoom(uint64_t samples) const;
  std::span<std::byte> AllotEarly(uint32_t length, uint64_t samples, ArenaAllocator::Block* block);
  uint64_t EarlyRoomLocked(uint64_t samples) const REQUIRES(mutex_);
  void ReturnEarly(std::span<const ArenaAllocator::Block> blocks);
  void AdoptEarly(DatasetId dataset, const Catalog& catalog, EarlySamples& early) REQUIRES(mutex_);
  uint64_t LeastForStreams() const REQUIRES(mutex_);
  bool SetAsideSlowly(uint64_t bytes, Nanos until, std::vector<ArenaAllocator::Block>* blocks,
                      MutexLock& lock) REQUIRES(mutex_);
  // What is to be added. `number` is its own from the start.
  struct Adding {
    std::shared_ptr<const Catalog> catalog;
    std::shared_ptr<Catalog> growing;
    std::unique_ptr<Source> source;
    EarlySamples* early = nullptr;
    Sizer* sizer = nullptr;
    DatasetId number = 0;
    bool revived = false;      // its tables are there
    uint64_t stamps_hash = 0;  // Catalog::StampsHash, where all lengths are known
  };
  Result<DatasetId> Add(std::shared_ptr<const Catalog> catalog, std::shared_ptr<Catalog> growing,
                        std::unique_ptr<Source> source, EarlySamples* early,
                        const std::string& key);
  // The open data set of that key, with another user; else a number for a new one, or that of a
  // parked one.
  std::optional<DatasetId> UseOrReserve(const std::string& key, const Catalog& catalog,
                                        Adding* adding);
  // Whether memory has, or may get, bytes of other files than a catalog's look has found.
  static bool IsOfOthers(const DatasetState& dataset, const Catalog& catalog, uint64_t stamps_hash);
  // An open data set is used by who has looked at its files as well.
  static void TakeStamps(DatasetState& dataset, const Catalog& catalog, uint64_t stamps_hash);
  // True: the bytes may be of a file as it was before somebody's look; they are to be read again.
  static bool IsOlder(DatasetState& dataset, SampleId sample, uint32_t stamp);
  bool HasStreams(DatasetId dataset) const REQUIRES(mutex_);
  void ForgetOthers(DatasetId id, const DatasetState& dataset, const Catalog& catalog)
      REQUIRES(mutex_);
  Status AddReserved(Adding& adding);
  void Unreserve(const Adding& adding);
  // A data set that is there to be used.
  bool IsOpen(DatasetId dataset) const REQUIRES(mutex_) {
    return dataset < datasets_.size() && (datasets_[dataset].use == DatasetState::Use::kOpen ||
                                          datasets_[dataset].use == DatasetState::Use::kClosing);
  }
  // What a data set had that is destroyed without the lock.
  struct Retired {
    std::shared_ptr<const Catalog> catalog;
    std::shared_ptr<Catalog> growing;
    Residency::Dataset tables;
    std::unique_ptr<Source> source;  // goes before the catalog, to which it refers
  };
  // Loop thread: whether nothing of it is left anywhere.
  bool MayRetire(DatasetId id, const DatasetState& dataset) const REQUIRES(mutex_);
  // Loop thread: data sets without users, and parked ones whose time is over.
  void RetireUnused(Nanos now);
  void Retire(DatasetId id, DatasetState& dataset, Nanos now, std::vector<Retired>* gone)
      REQUIRES(mutex_);
  // Looks at a part of it. True: that was the last.
  bool GiveBack(DatasetId id, DatasetState& dataset, size_t most, Nanos now,
                std::vector<Retired>* gone) REQUIRES(mutex_);
  // False: none is.
  bool GiveBackParked(std::vector<Retired>* gone) REQUIRES(mutex_);
  // The folder for a data set of so many bytes in so many samples.
  TierShape ShapeOf(const TieredSource& tiered, uint64_t bytes, uint64_t samples,
                    bool growing) const;
  // Tables of a growing data set are paid for in such steps, not sample by sample.
  static uint64_t GrowthStep(uint64_t samples);
  // What the tables take for each sample of the data set.
  static uint64_t TableBytes(bool growing, bool tiered, bool shared);
  Status SetTablesAside(uint64_t samples, uint64_t bytes, EarlySamples* early,
                        std::vector<ArenaAllocator::Block>* blocks, MutexLock& lock)
      REQUIRES(mutex_);
  Result<DatasetState*> FindGrowing(DatasetId dataset) REQUIRES(mutex_);
  std::optional<Appended> FindSamples(DatasetId id, const DatasetState& dataset,
                                      const NewFile& file) const REQUIRES(mutex_);
  // Of a sample that is new in a growing data set.
  static uint8_t ShareOfNew(const DatasetState& dataset, SampleId sample);
  Status PayForSamples(DatasetId id, DatasetState& dataset, std::span<const NewFile> files,
                       MutexLock& lock) REQUIRES(mutex_);
  // What was appended to the catalog from `before` on is the scheduler's, too.
  void TakeOverSamples(DatasetId id, DatasetState& dataset, SampleId before) REQUIRES(mutex_);
  bool InvalidateRange(DatasetId id, DatasetState& dataset, SampleId first, SampleId end)
      REQUIRES(mutex_);
  // Loop thread: hands copies that must go to the folder.
  void DropCopies() REQUIRES(mutex_);
  void NotifyDue() REQUIRES(mutex_);
  static void NotifyAll(StreamState& stream);
  // kCancelled in a forked child.
  Status Alive() const;
  Status Start();
  // By number, null where there is no source; loop thread.
  void ListDatasets(std::vector<DatasetState*>* out) REQUIRES(mutex_);
  // What the loop thread has from one round to the next.
  struct LoopState {
    std::vector<DatasetState*> datasets;
    std::vector<pollfd> fds;
    std::vector<ReadAction> reads;
    ReadsUnderWay under_way;
    std::vector<std::pair<Sizer*, size_t>> unsized;  // and how many lengths are known ahead of use
    Nanos look_at = 0;
    Nanos tune_at = 0;
    Nanos held_until = kNeverReady;  // reads that wait for their share
  };
  void RunLoop(std::stop_token stop);
  // Returns how long the loop may sleep; 0: there is more to do.
  Nanos LoopRound(LoopState& at);
  // True: a descriptor has become readable.
  bool LoopSleep(LoopState& at, Nanos sleep);
  void RunPlanner(std::stop_token stop);
  // Makes the order that is asked for first. False: none is.
  bool PlanNext(RankOrders& orders);
  void RunCopier(std::stop_token stop);
  // `arrived_crc` is of the bytes in the arena; only with options.verify.
  void Finished(DatasetState& dataset, const ReadAction& read, SourceDone& done,
                uint32_t arrived_crc, Origin from) REQUIRES(mutex_);
  // Loop thread: takes what has arrived, starts what is due, races what hangs.
  bool ReapInto(std::span<DatasetState* const> datasets, ReadsUnderWay& under_way, bool* arrived);
  // Takes over lengths that have become known.
  void TakeLengths(DatasetId id, DatasetState& dataset) REQUIRES(mutex_);
  void StepTuner(Nanos now) REQUIRES(mutex_);
  // Planner thread: appends what has gathered to the log.
  void WriteTunerLog();
  void Learn(DatasetState& dataset, const ReadsUnderWay::Read& read, const SourceDone& done,
             Origin from);
  void UpdateCosts(DatasetId id, DatasetState& dataset, const ReadsUnderWay& under_way)
      REQUIRES(mutex_);
  bool StoreDue(std::span<DatasetState* const> datasets, bool* arrived);
  void SubmitBacklog(DatasetState& dataset, ReadsUnderWay& under_way);
  // When to look again.
  Nanos HedgeHanging(std::span<DatasetState* const> datasets, ReadsUnderWay& under_way, Nanos now);
  // Leaves the cache folder while its disk does not answer: what it has is read from the source,
  // also what it was asked for already.
  void WatchFolder(std::span<DatasetState* const> datasets, ReadsUnderWay& under_way, Nanos now);
  Nanos FolderPatience(std::span<DatasetState* const> datasets,
                       const ReadsUnderWay& under_way) const;
  void LeaveFolder(Nanos silent);
  static std::string TenthsOfSeconds(Nanos time);
  void ReturnToFolder();
  // What was set since the last call holds from here on.
  void ApplyKnobs() REQUIRES(mutex_);
  // Collects actions after any event; wakes whoever has work.
  void Collect() REQUIRES(mutex_);
  size_t InFlightLimit() const REQUIRES(mutex_);
  void WakeLoop();
  void FinishCopies();
  void NoteCopies() REQUIRES(mutex_);
  void NoteChanged(DatasetState& dataset, const ReadAction& read) REQUIRES(mutex_);
  // Warns when the cache folder has stopped taking copies.
  void NoteStopped() REQUIRES(mutex_);
  Status OpenCache();
  Result<std::unique_ptr<TieredSource>> ThroughCache(const std::shared_ptr<const Catalog>& catalog,
                                                     std::unique_ptr<Source> inner);
  void SignalProgress();
  // The number of a stream that is closed for long, to be used again.
  std::optional<StreamId> TakeClosed() REQUIRES(mutex_);
  Result<StreamState*> FindStream(StreamId stream) REQUIRES(mutex_);
  Status TooLarge(uint64_t bytes) const REQUIRES(mutex_);
  Status HeldByLeases(StreamId id) const REQUIRES(mutex_);
  Status Failure(StreamState& state, SampleId sample) REQUIRES(mutex_);
  // One ask of the scheduler: the next batch, or `sample` when `fetch` is given.
  Result<TakeKind> Ask(StreamId id, Nanos wait, LeaseId* fetch, SampleId sample, BatchLoan* out);
  static void CountReads(const DatasetState& dataset, EpochStats* stats);
  // What was read since the epoch began.
  void FillReads(const StreamState& state, EpochStats* stats) const REQUIRES(mutex_);
  void UpdateFolderRoom() REQUIRES(mutex_);
  void SignalServing() REQUIRES(mutex_);
  Result<StreamId> Open(const StreamOptions& options) REQUIRES(mutex_);
  void CloseEpoch(StreamState& state, Nanos now) REQUIRES(mutex_);
  void Account(StreamState& state, const BatchLoan& loan, Nanos now) REQUIRES(mutex_);

  // Constant after construction.
  const EngineOptions options_;
  const uint64_t budget_;
  const uint64_t fork_generation_;
  OwnedFd memfd_;
  Mapping arena_;
  OwnedFd wake_fd_;
  OwnedFd progress_fd_;
  OwnedFd serving_fd_;

  Registry registry_;
  Metric& reads_total_;
  Metric& read_bytes_total_;
  Metric& read_errors_total_;
  Metric& read_retries_total_;
  Metric& corrupt_total_;
  Metric& samples_total_;
  Metric& sample_bytes_total_;
  Metric& changed_total_;
  Metric& changed_files_gauge_;
  Metric& peer_reads_total_;
  Metric& peer_read_bytes_total_;
  Metric& arena_used_;
  Metric& arena_peak_;
  Metric& leases_;
  std::array<Metric*, kStallCauses> stall_;
  PrefetchMechanism prefetch_;
  ReadAheadMechanism read_ahead_;
  TunerMechanism tuning_;
  MemoryTierMechanism memory_tier_;
  CacheFolderMechanism cache_folder_;
  AdmissionMechanism admission_;
  HedgingMechanism hedging_;
  SourceLimitMechanism source_limit_;

  std::unique_ptr<Cache> cache_;      // constant after Create; null: no cache folder
  std::shared_ptr<ReaderPool> pool_;  // constant after Create; shared with the posix sources

  Mutex add_mutex_;  // before mutex_
  SourceWrap wrap_ GUARDED_BY(add_mutex_);
  std::atomic<bool> has_peers_{false};  // wrap_ is set

  // Beside mutex_: who reports takes locks of its own.
  mutable Mutex report_mutex_;
  std::function<ClusterReport()> report_ GUARDED_BY(report_mutex_);

  mutable Mutex mutex_;
  SharedSources remote_ GUARDED_BY(mutex_);
  Scheduler scheduler_ GUARDED_BY(mutex_);
  const std::unique_ptr<Tuner> tuner_ GUARDED_BY(mutex_);
  TuneMeter meter_ GUARDED_BY(mutex_);
  size_t fixed_reads_ GUARDED_BY(mutex_) = 0;    // 0: the tuner's
  uint64_t fixed_ahead_ GUARDED_BY(mutex_) = 0;  // 0: the tuner's
  Nanos tuner_stepped_ GUARDED_BY(mutex_) = 0;   // the tuner's last step,
  Nanos held_seen_ GUARDED_BY(mutex_) = 0;       // and JobTable::held_total then
  std::string tuner_lines_ GUARDED_BY(mutex_);
  OwnedFd tuner_log_;  // constant after Start
  // Deques: references stay valid while others are added. The loop thread reads the entries it has
  // seen under the lock without it; catalog and source change only when it retires them itself.
  std::deque<DatasetState> datasets_ GUARDED_BY(mutex_);
  std::condition_variable added_;  // a data set is not being added any more
  std::deque<StreamState> streams_ GUARDED_BY(mutex_);
  // Closed streams, oldest first. Every step looks at all streams: their number must not grow with
  // all that ever were.
  std::deque<StreamId> closed_ GUARDED_BY(mutex_);
  std::vector<StreamId> serving_ GUARDED_BY(mutex_);
  std::map<DatasetId, std::vector<uint8_t>> early_shares_ GUARDED_BY(mutex_);
  std::vector<ReadAction> outbox_ GUARDED_BY(mutex_);
  std::deque<OrderAction> order_work_ GUARDED_BY(mutex_);
  std::deque<CopyAction> copy_work_ GUARDED_BY(mutex_);
  std::map<std::pair<DatasetId, SampleId>, Status> failures_ GUARDED_BY(mutex_);
  std::map<uint32_t, int> rereads_ GUARDED_BY(mutex_);  // by serial: repeated for corrupt bytes
  std::condition_variable order_ready_;
  std::condition_variable copy_ready_;
  std::condition_variable dropped_;
  std::condition_variable room_;  // waited for with a bound; nobody notifies
  uint64_t knobs_seen_ GUARDED_BY(mutex_) = 0;
  bool closing_ GUARDED_BY(mutex_) = false;          // nothing is read ahead any more
  uint64_t copies_given_up_ GUARDED_BY(mutex_) = 0;  // that metrics know
  std::string cache_warning_ GUARDED_BY(mutex_);     // it hung
  std::string cache_stopped_ GUARDED_BY(mutex_);     // it takes no copies
  std::string changed_lines_ GUARDED_BY(mutex_);
  uint64_t changed_count_ GUARDED_BY(mutex_) = 0;
  std::function<void(const std::string&)> warn_ GUARDED_BY(mutex_);
  bool loop_awake_ GUARDED_BY(mutex_) = true;
  Nanos loop_until_ GUARDED_BY(mutex_) = 0;  // how long it sleeps for held reads
  bool copiers_started_ GUARDED_BY(mutex_) = false;
  // Ordered by mutex_: the driver arms before it asks, events signal after they changed the
  // scheduler.
  std::atomic<bool> progress_wanted_{false};

  std::unique_ptr<LoopState> stepped_;  // without threads; constant after Start
  std::jthread loop_;
  std::jthread planner_;
  std::vector<std::jthread> copiers_;
  DecodePool decode_pool_;  // starts its threads with the first pipeline
};

}  // namespace forebay
