// Scheduler: decides what is read, where it lands in the arena, what stays and what goes.
//
// Pure: events in, actions out; no clock, no thread, no I/O. One thread at a time (the engine holds
// its mutex). The same code runs under the engine, under virtual time in tests and in simulators.
//
// Every sample of a data set has an Entry: unsized, absent, reading or resident. References hold
// it:
//   ahead  positions of some stream's look-ahead window that will use it,
//   pins   leases that hand it out now (or will, once their missing samples have arrived),
//   kept   the memory tier holds it for later epochs,
//   due    its copy for the second tier waits to be taken, or, while there is room, to be written.
// A data set may have a second tier below memory, its folder. While the two together cannot hold
// everything, a sample lies in one of them only, so that they cover the most.
// A resident sample without any of the four is freed at once. Keeping the samples that were read
// first, and never replacing them, is optimal when each sample is used once an epoch: no policy can
// have more hits an epoch than the tier has room.
//
// What is read from the source for the second tier stays in memory until its writer has taken the
// bytes. A writer that falls behind so fills memory, and read-ahead, then consumers, wait for it:
// no copy is lost. A writer that hangs stops nobody for good: once no copy has ended for a while,
// those that wait are given up, and none is due until one ends. The next epoch makes up for them.
//
// Lengths may come after the data set (OnLengths). Look-ahead stops at the first sample without
// one; a lease that has such a sample asks for its length and stays pending.
//
// A read that hangs may be raced by a second one into memory of its own; the loser's memory is held
// until it ends. Neighbours in one shard are read in one request (a group) where that pays.
//
// A lease is made when a consumer asks and becomes ready when its last sample has arrived. What it
// misses is read ahead of everything else. When memory is short for it, room is made, in this
// order: look-ahead farthest from use is taken back, the memory tier gives up samples, leases that
// nobody waits for yet give up theirs, then those of younger streams. While a consumer finds no
// room, younger ones start nothing. So the oldest waiting stream always gets on.
//
// In a cluster a node keeps its share: first what lives with it, and copies of the rest only where
// room is left beside all of that. Other nodes ask through serving streams, which take free memory
// within a bound, or that of such copies, and stand behind every consumer of this node.
//
// Streams belong to jobs, which may be limited in what they read from the source. A read is held
// back before it has memory, so it takes none from others; streams of one job take turns.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <limits>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "catalog/catalog.h"
#include "core/allocator.h"
#include "core/job_table.h"
#include "metrics/stall.h"

namespace forebay {

using DatasetId = uint32_t;
using StreamId = uint32_t;
using LeaseId = uint64_t;
inline constexpr LeaseId kNoLease = 0;

enum class Place : uint8_t { kSource, kTier, kPeer };

// What a node of a cluster may keep of a data set, by sample: see SetShare.
enum class KeepShare : uint8_t {
  kNone = 0,     // others need the room
  kHome = 1,     // it lives here
  kReplica = 2,  // where room is left beside all that lives here
};

// What a node's tiers have taken and given up.
struct HeldChanges {
  std::vector<SampleId> got;
  std::vector<SampleId> lost;
};

struct ReadAction {
  DatasetId dataset = 0;
  SampleId sample = 0;
  uint64_t offset = 0;  // in the arena
  uint32_t length = 0;
  uint32_t serial = 0;            // tells the two reads of a race apart
  uint32_t group = 0;             // not 0: one request with its neighbours in `out` of that group
  uint64_t request_bytes = 0;     // of the file that its request reads; 0: `length`
  Place place = Place::kTier;     // kTier: from the folder if that has it, else from the source
  Place likely = Place::kSource;  // where it will come from, as far as is known
  bool store = false;             // what comes from the source is to be copied into the folder
  JobId job = kNoJob;             // whose share of the source it takes
  uint64_t charged = 0;           // of that share, in bytes; a group's first read has it all
  bool store_spare = false;       // `store`, though it does not live here
  bool urgent = false;            // a consumer waits for it
  bool serving = false;           // for other nodes: outside of the limit of reads at once
};

// The second tier of a data set.
struct TierShape {
  bool present = false;
  bool holds_all = false;           // large enough for every sample
  uint64_t largest = ~uint64_t{0};  // longest sample that it takes
};

// What reads of a data set cost, in any unit, and what it pays to read in one request.
struct ReadCosts {
  double tier = 0;  // 0: not known
  double source = 0;
  uint64_t merge_bytes = 0;  // largest request for several samples; 0: one each
  uint64_t merge_gap = 0;    // bytes between two samples worth reading through
};

// Give a copy of the sample to the second tier.
struct StoreAction {
  DatasetId dataset = 0;
  SampleId sample = 0;
  uint64_t offset = 0;  // in the arena
  uint32_t length = 0;
  uint32_t crc = 0;
};

// Copy the samples of a lease into its contiguous block.
struct CopyAction {
  LeaseId lease = kNoLease;
  uint64_t dest = 0;
  std::vector<uint64_t> from;
  std::vector<uint32_t> lengths;
};

struct OrderAction {
  StreamId stream = 0;
  uint64_t epoch = 0;
  uint64_t first_position = 0;  // global position to start from
  uint64_t generation = 0;      // an answer for an older generation is ignored
};

// A consumer waits for the sample's length.
struct SizeAction {
  DatasetId dataset = 0;
  SampleId sample = 0;
};

struct SampleLength {
  SampleId sample = 0;
  uint32_t length = 0;
  bool ok = true;  // false: it could not be had
};

struct StreamShape {
  DatasetId dataset = 0;
  uint32_t batch_size = 1;
  bool drop_last = false;   // drop an epoch's last batch when it is not full
  bool contiguous = false;  // batches are copied into one piece, ahead of time
  bool itemised = false;    // samples are fetched one by one, in roughly the declared order
  uint64_t first_epoch = 0;
  uint64_t first_position = 0;
  uint64_t epochs = 0;   // 0: the horizon is extended without end
  bool whole = false;    // each epoch uses every sample once
  std::string job = {};  // whose limits hold for it
  // Samples are fetched for other nodes, in any order, many at once.
  bool serving = false;
};

class Scheduler {
 public:
  struct Options {
    uint64_t arena_bytes = 0;
    uint64_t staging_bytes =
        0;                    // share that stays free of kept samples; 0: chosen from the streams
    bool keep = true;         // false: no memory tier (every sample is read for each use)
    uint64_t keep_bytes = 0;  // the most that the memory tier takes; 0: all that staging leaves
    // Samples that look-ahead may have under way, however few requests they are; a group is a
    // sixteenth of them at most, so that several are.
    size_t max_samples = size_t{1} << 20;
    // How long to wait for the second tier while it ends no copy.
    Nanos copy_patience = 5 * kSecond;
  };
  enum class Take : uint8_t { kReady, kPending, kEndOfEpoch, kEndOfStream, kFailed, kTooLarge };

  struct Handout {  // what a ready lease gives
    LeaseId lease = kNoLease;
    uint64_t epoch = 0;
    uint64_t index = 0;  // of the batch in its epoch
    std::vector<SampleId> samples;
    std::vector<uint64_t> offsets;
    std::vector<uint32_t> lengths;
    std::vector<uint32_t> crcs;  // CRC-32C of each; serving streams only
    SampleId failed = 0;         // with kFailed
    uint64_t bytes = 0;          // with kTooLarge: what the batch needs
  };

  struct Counters {
    uint64_t reads = 0, read_bytes = 0, failed_reads = 0;
    uint64_t hits = 0, hit_bytes = 0;  // resident when asked for
    uint64_t evicted = 0;              // kept samples given up
    uint64_t retracted = 0;            // look-ahead taken back
    uint64_t changed = 0;              // samples whose bytes differ from an earlier read
    uint64_t requests = 0;             // to the source; a group is one
    uint64_t hedged = 0;               // second reads of samples whose first one hangs
    uint64_t copies_given_up = 0;      // that waited for a second tier that hung, or took memory
  };

  explicit Scheduler(const Options& options);

  // `metadata_bytes` are set aside in the arena, untouched: what the tables take elsewhere counts
  // against the same budget. kNoRoom when they do not fit.
  static constexpr DatasetId kNoRoom = ~DatasetId{0};
  DatasetId AddDataset(std::span<const uint32_t> lengths, uint64_t metadata_bytes = 0);
  // `samples` whose lengths OnLengths will tell; until it has told some, they count as `guess`
  // each.
  DatasetId AddUnsized(size_t samples, uint32_t guess);
  // Takes `bytes` of the arena away for memory that its user holds elsewhere, in blocks whose place
  // does not matter; false, with nothing taken, when kept samples and look-ahead cannot make room,
  // or when fewer than `leave` bytes would be left for samples.
  bool SetAside(uint64_t bytes, std::vector<ArenaAllocator::Block>* blocks, uint64_t leave = 0);
  void ReturnAside(std::span<const ArenaAllocator::Block> blocks);
  // Whether so much could be set aside were nothing pinned or being read.
  bool MaySetAside(uint64_t bytes, uint64_t leave = 0) const {
    const uint64_t usable = UsableBytes();
    return leave <= usable && bytes <= usable - leave;
  }
  // Memory for a sample whose data set is yet to be added, set aside until Adopt or ReturnAside;
  // kNone when what is free does not do. Nothing is given up for it.
  ArenaAllocator::Block AllotEarly(uint32_t length);
  // What AllotEarly would still give to `samples` more, and leave room for their tables and others.
  uint64_t EarlyRoom(uint64_t samples) const;
  // The block holds the sample's bytes. It is kept where that is allowed, else given up.
  void Adopt(DatasetId dataset, SampleId sample, ArenaAllocator::Block block, uint32_t crc);
  uint64_t block_offset(ArenaAllocator::Block block) const { return arena_.offset(block); }
  uint64_t block_bytes(ArenaAllocator::Block block) const { return arena_.size(block); }
  // The data set's second tier; for grouped reads, where its samples lie. Both before the first
  // stream over it.
  void SetTier(DatasetId dataset, const TierShape& tier) { datasets_[dataset].tier = tier; }
  void SetLayout(DatasetId dataset, std::shared_ptr<const Catalog> catalog) {
    datasets_[dataset].layout = std::move(catalog);
  }
  void SetCosts(DatasetId dataset, const ReadCosts& costs) { datasets_[dataset].costs = costs; }
  // Tells which samples a read would ask another node for. Such reads are no load on the source.
  void SetElsewhere(DatasetId dataset, std::function<bool(SampleId)> elsewhere) {
    datasets_[dataset].elsewhere = std::move(elsewhere);
  }
  // What may be kept: one KeepShare a sample, or empty for everything. What is kept against it goes
  // when room is needed, before anything else does.
  void SetShare(DatasetId dataset, std::vector<uint8_t> share);
  // Bytes that the folder can still take; copies in excess of the node's share leave enough for
  // what lives here.
  void SetFolderRoom(uint64_t bytes) { folder_room_ = bytes; }
  // Whether the memory tier or the folder has the sample.
  bool Held(DatasetId dataset, SampleId sample) const {
    const Entry& e = entry(dataset, sample);
    return (e.flags & kInTier) || ((e.flags & kKept) && e.state == State::kResident);
  }
  // Bit s: Held(s).
  std::vector<std::byte> HeldBits(DatasetId dataset) const;
  // Since the last call; at the first one, everything held is new.
  HeldChanges TakeHeldChanges(DatasetId dataset);
  // What streams of this node will use beyond their windows, is not here and would be kept. What
  // lives here comes last: peers seldom have it, and it must not hide what they have.
  std::vector<SampleId> Upcoming(DatasetId dataset, size_t most) const;
  // Whether memory and the second tier take samples that they do not hold.
  void SetAdmission(bool memory, bool tier) {
    admit_memory_ = memory;
    admit_tier_ = tier;
  }
  static constexpr uint64_t kHedgeOneIn = 200;
  // At most one read in so many is hedged; 0: none.
  void SetHedging(uint64_t one_in) { hedge_one_in_ = one_in; }
  // Changes Options::keep_bytes; a tier that holds more than that gives up what is not in use.
  void SetKeepBytes(uint64_t bytes);
  // Limits of a job that has streams, and of all jobs together. A job whose quota of the memory
  // tier shrinks gives up what is not in use.
  void SetJobLimits(std::string_view job, const JobLimits& limits);
  void SetSourceLimits(RateLimits limits) { jobs_.SetNodeLimits(limits, now_); }
  // Time passes: call it before NextReads, which hands out what has become due.
  void Advance(Nanos now);
  // When NextReads would start reads that are held back now.
  Nanos wake_at() const { return jobs_.wake_at(); }
  // Of jobs that have streams; their `held_back` since the last call.
  std::vector<JobStats> TakeJobStats() { return jobs_.TakeStats(); }
  Nanos held_time() const { return jobs_.held_total(); }
  // `closed`: its number is used again. It must be Unused().
  StreamId OpenStream(const StreamShape& shape, std::optional<StreamId> closed = std::nullopt);
  // Closed, and no lease of it is left.
  bool Unused(StreamId stream) const {
    return !streams_[stream].open && streams_[stream].leases == 0;
  }
  // Forgets the stream's window; its leases stay valid until released.
  void CloseStream(StreamId stream);
  // Starts over at an epoch and global position; leases that still wait are cancelled.
  void Seek(StreamId stream, uint64_t epoch, uint64_t first_position);
  // Answers an OrderAction. `last`: the stream ends after this epoch.
  void ExtendOrder(StreamId stream, uint64_t generation, uint64_t epoch,
                   std::vector<SampleId> order, bool last);
  // Declares that no epoch follows those known.
  void EndHorizon(StreamId stream);
  uint64_t generation(StreamId stream) const { return streams_.at(stream).generation; }

  // The stream's next batch. kPending: ask again after the next event (the lease is being filled).
  // kEndOfEpoch is returned once between epochs. Fills `out` with kReady and kFailed; after kFailed
  // the next call tries the same batch again.
  Take TakeBatch(StreamId stream, Handout* out);
  // One sample by number. `*lease` is kNoLease at first, and names the pending lease on later
  // calls.
  Take FetchSample(StreamId stream, SampleId sample, LeaseId* lease, Handout* out);
  // Gives back a ready lease, or cancels a pending one.
  void Release(LeaseId lease);

  // The most bytes that look-ahead may have in flight and ready together, in all streams; streams
  // share them evenly. Each may plan its next batch all the same, and samples that will be kept do
  // not count: their memory is taken either way.
  void SetReadAheadBytes(uint64_t bytes) { read_ahead_bytes_ = bytes; }
  // Requests under way that hang: what a consumer waits for may pass them.
  void SetHanging(size_t requests) { hanging_ = requests; }
  // Reads to start now, at most `in_flight_limit` requests under way in all, what leases miss
  // first. Without `look_ahead` only that. Appends to `out`.
  void NextReads(size_t in_flight_limit, std::vector<ReadAction>* out, bool look_ahead = true);
  // Moves out copies and orders that have become due since the last call.
  std::vector<CopyAction> NextCopies();
  std::vector<OrderAction> NextOrders();
  // Samples whose lengths consumers wait for, each until OnLengths tells it.
  std::vector<SizeAction> NextSizes();

  // `from` is where the bytes came from in the end.
  void OnReadDone(const ReadAction& read, bool ok, uint32_t crc, Place from);
  void OnReadDone(DatasetId dataset, SampleId sample, bool ok, uint32_t crc) {
    OnReadDone(PlaceOf(dataset, sample), ok, crc, Place::kSource);
  }
  // Some lengths of a data set are known. Where one cannot be had, the batch that needs it fails,
  // and the next ask tries again.
  void OnLengths(DatasetId dataset, std::span<const SampleLength> lengths);
  // The second tier holds the sample now.
  void OnStored(DatasetId dataset, SampleId sample);

  // ---- Copies for the second tier.
  //
  // The one that has waited longest; false: none waits.
  bool FirstStore(StoreAction* out);
  // The driver takes it: its bytes stay where they are until OnStoreTaken.
  void BeginStore(const StoreAction& store);
  // They were copied elsewhere.
  void OnStoreTaken(const StoreAction& store);
  // `stored`: the second tier has it. It may end before it was taken.
  void OnStoreEnded(DatasetId dataset, SampleId sample, bool stored);
  // Copies that wait to be taken, or were and have not ended.
  size_t copies_under_way() const { return due_.size() + storing_.size(); }
  // The second tier has ended none for Options::copy_patience: nobody waits for it now.
  bool copies_hang() const { return copies_hang_; }
  Nanos copy_patience() const { return options_.copy_patience; }
  // Of samples that are in memory only because their copy waits.
  uint64_t held_bytes() const { return held_bytes_; }

  // A second read from the source of a sample whose read hangs; false when there is no memory for
  // it, second reads and lost ones would hold more than an eighth of what there is for samples, the
  // sample has been read or raced already, or as many were hedged as may be.
  bool Hedge(const ReadAction& hanging, ReadAction* out);
  void OnCopyDone(LeaseId lease);

  // Where a sample that is being read lands.
  ReadAction PlaceOf(DatasetId dataset, SampleId sample) const;

  // Whether a pending lease of the stream became ready, failed, or may now find room, since it was
  // last asked.
  bool IsDue(StreamId stream) const;
  // Grows with every such change; tells several consumers of one stream apart.
  uint64_t Changes(StreamId stream) const { return streams_[stream].changes; }
  // A sample that the stream's pending lease misses; false when there is none.
  bool FirstMissing(StreamId stream, DatasetId* dataset, SampleId* sample) const;
  // Why the stream's pending lease waits; with several, the oldest.
  StallCause WaitCause(StreamId stream) const;
  // Why this one does: consumers of an itemised stream wait each for their own.
  StallCause LeaseWaitCause(LeaseId lease) const;
  // Nothing is under way that could end the wait: only a Release can.
  bool OnlyReleaseHelps(StreamId stream) const;
  // A consumer waits for samples that are not there.
  bool Waiting() const;
  // Pending leases that a consumer waits for and only reads can fill.
  size_t WaitingForReads() const;

  size_t stream_count() const { return streams_.size(); }
  size_t in_flight() const { return in_flight_; }  // samples being read
  size_t requests() const { return requests_; }    // groups counted once
  // Samples of the data set without a length.
  size_t unsized(DatasetId dataset) const { return datasets_[dataset].unsized; }
  // Of those that have one, how many were not used yet; fewer where samples are read repeatedly.
  size_t SizedAhead(DatasetId dataset) const {
    const Dataset& d = datasets_[dataset];
    const uint64_t sized = d.entries.size() - d.unsized;
    return static_cast<size_t>(sized - std::min(sized, d.allotted));
  }
  // Samples of the data set that no tier holds.
  uint64_t uncovered(DatasetId dataset) const { return datasets_[dataset].uncovered; }
  uint64_t used_bytes() const { return arena_.used(); }
  uint64_t kept_bytes() const { return kept_bytes_; }
  // The most that the memory tier takes, as things are.
  uint64_t keep_quota() const;
  // Of home samples that no tier holds: memory and folder both leave room for them.
  uint64_t reserved_bytes() const { return reserved_bytes_; }
  // Of leases of serving streams that have memory.
  uint64_t serving_bytes() const { return serving_bytes_; }
  // Samples that are neither kept nor pinned nor only held for their copy: there or being read, and
  // those that are there.
  uint64_t ahead_bytes() const { return ahead_bytes_; }
  uint64_t ready_bytes() const { return ready_bytes_; }
  // Of one batch of each stream that has something to read.
  uint64_t batch_bytes() const;
  uint64_t capacity() const { return arena_.capacity(); }
  uint64_t leased_bytes() const { return leased_bytes_; }
  size_t lease_count() const { return leases_.size(); }
  const Counters& counters() const { return counters_; }

  // Bytes of bookkeeping for a data set of n samples, so that the engine can charge the budget.
  static uint64_t MetadataBytes(uint64_t samples) { return samples * kBytesPerSample; }

  // Checks every invariant; for tests. Empty when all hold.
  std::string CheckInvariants() const;

 private:
  enum class State : uint8_t { kUnsized, kAbsent, kReading, kResident };
  // Entry flags.
  static constexpr uint8_t kKept = 1;
  static constexpr uint8_t kUrgent = 2;  // the read or lookup under way was asked for by a lease
  static constexpr uint8_t kFailedSoon = 4;  // look-ahead read failed; the lease will try again
  static constexpr uint8_t kFailedNow = 8;   // an urgent read failed; the lease reports it
  static constexpr uint8_t kCrcKnown = 16;
  static constexpr uint8_t kSuspect = 32;   // the last read's checksum differed; read once more
  static constexpr uint8_t kInTier = 64;    // the second tier holds it, for all we know
  static constexpr uint8_t kCopyDue = 128;  // its copy for the second tier waits to be taken

  struct Entry {
    uint64_t offset = 0;
    ArenaAllocator::Block block = ArenaAllocator::kNone;
    uint32_t length = 0;
    uint16_t pins = 0;
    uint16_t ahead = 0;
    State state : 2 = State::kAbsent;
    bool storing : 1 = false;  // stays until its copy, which was begun, has ended
    uint8_t flags = 0;
    JobId owner = kNoJob;  // of a kept one: whose quota it takes
  };
  static_assert(sizeof(Entry) == 24);
  // Entry 24, checksum 4, allocator node 40, two epochs' orders and the permutation being made 12.
  static constexpr uint64_t kBytesPerSample = 80;

  struct Dataset {
    std::vector<Entry> entries;
    std::vector<uint32_t> crcs;
    uint64_t rounded_bytes = 0;  // of samples without a length: as if they had the others' mean
    uint64_t mean_rounded = 0;
    size_t unsized = 0;
    uint64_t sized_bytes = 0;  // rounded, of the others
    uint64_t allotted = 0;     // samples that were given memory so far
    SampleId clock_hand = 0;   // where the search for a kept sample to give up goes on
    // Samples that may be kept, and that neither memory keeps nor the second tier holds.
    uint64_t uncovered = 0;
    uint32_t tier_skips = 0;  // reads sent past a slow second tier since the last that was not
    TierShape tier;
    ReadCosts costs;
    std::shared_ptr<const Catalog> layout;
    std::function<bool(SampleId)> elsewhere;  // empty: nothing is
    std::vector<uint8_t> share;               // KeepShare by sample; empty: all may be kept
    // What TakeHeldChanges has told, and what may differ from it since; empty: never asked.
    std::vector<bool> told;
    std::vector<bool> is_touched;
    std::vector<SampleId> touched;
  };
  // Two reads of one sample under way; the entry has the first one's block.
  struct Race {
    uint32_t first = 0;
    uint32_t second = 0;
    ArenaAllocator::Block second_block = ArenaAllocator::kNone;
  };
  // A copy for the second tier, not begun yet; its sample has kCopyDue.
  struct Due {
    DatasetId dataset = 0;
    SampleId sample = 0;
    JobId job = kNoJob;  // whose share of the folder it takes
    bool spare = false;  // it does not live here
  };
  struct Epoch {
    uint64_t epoch = 0;
    std::vector<SampleId> order;
  };
  struct Lease {
    StreamId stream = 0;
    DatasetId dataset = 0;
    uint64_t epoch = 0;
    uint64_t index = 0;
    std::vector<SampleId> samples;
    std::vector<SampleId> missing;  // not pinned yet; a repeated sample stands here repeatedly
    uint64_t bytes = 0;
    ArenaAllocator::Block block = ArenaAllocator::kNone;  // contiguous copy
    bool in_region = false;  // `block` lies in the stream's region, not in the arena itself
    bool reserved = false;   // the copy's place was asked for before the samples
    bool wanted = false;     // a consumer asked for it
    bool blocked = false;    // wanted, and found no room
    bool held = false;       // misses samples that wait for the job's share of the source
    bool restarted = false;  // has given up its samples to gather them anew
    bool copy_wanted = false;
    bool copying = false;
    bool handed_out = false;
    bool released = false;  // given back while its copy was under way
    bool serving = false;
    bool unsized = false;   // has a sample without a length; `bytes` is too small
    bool admitted = false;  // serving: counts in serving_bytes_
    bool ready() const { return missing.empty() && !copy_wanted && !copying; }
  };
  struct Stream {
    StreamShape shape;
    JobId job = kNoJob;
    bool open = true;
    bool last_known = false;  // the horizon ends with the last of `epochs`
    bool order_asked = false;
    uint64_t next_epoch = 0;
    uint64_t next_first_position = 0;  // only the first epoch after a Seek starts inside
    uint64_t generation = 1;
    std::deque<Epoch> epochs;
    uint64_t taken = 0;  // positions of epochs.front() that leases have
    uint64_t batch_index = 0;
    size_t cursor_epoch = 0;  // look-ahead: next position to plan
    uint64_t cursor = 0;
    uint64_t blocked_at = 0;    // value of frees_ when look-ahead last found no room
    std::deque<LeaseId> queue;  // leases not handed out yet, in order (contiguous: several)
    bool due = false;
    uint64_t changes = 0;
    // Contiguous streams copy into a region of their own: holes between single samples would hardly
    // ever be as large as a batch.
    ArenaAllocator::Block region = ArenaAllocator::kNone;
    ArenaAllocator copies{0};
    size_t leases = 0;
    // Itemised streams: planned minus fetched, by sample.
    std::unordered_map<SampleId, int32_t> outstanding;
    uint64_t fetched = 0;

    uint64_t window() const {  // positions planned and not taken
      if (shape.itemised) return outstanding.size();
      return cursor_epoch == 0 ? cursor - taken : epochs[0].order.size() - taken + cursor;
    }
  };

  Entry& entry(DatasetId d, SampleId s) { return datasets_[d].entries[s]; }
  const Entry& entry(DatasetId d, SampleId s) const { return datasets_[d].entries[s]; }

  static void MarkDue(Stream& stream) {
    stream.due = true;
    ++stream.changes;
  }
  static constexpr uint16_t kMaxRefs = std::numeric_limits<uint16_t>::max();
  // Something is under way that frees memory or fills a lease when it ends. Reads that lost a race
  // may never end.
  bool Moving() const {
    return in_flight_ > orphans_.size() || !urgent_.empty() || !serving_urgent_.empty() ||
           CopiesMove();
  }
  bool CopiesMove() const { return !copies_hang_ && copies_under_way() > 0; }
  // Its copy is on its way into the second tier: read from there as soon as it has arrived, and not
  // from the source before.
  bool AwaitsStore(DatasetId d, SampleId s) const {
    return !copies_hang_ && !storing_.empty() && storing_.contains(Key(d, s));
  }
  void SetDue(const ReadAction& read);
  void ClearDue(const Due& due);
  void GiveUp(const Due& due);
  void GiveUpCopies();
  bool GiveUpOneHeld();
  void SetStoring(Entry& e, bool storing) {
    Uncount(e);
    e.storing = storing;
    Count(e);
  }
  bool FreeOneStoring();
  static bool FromPeer(const ReadAction& read) {
    return !read.serving && read.likely == Place::kPeer;
  }
  static uint64_t Key(DatasetId d, SampleId s) { return uint64_t{d} << 32 | s; }
  // Flags that decide whether a tier holds the sample change through these.
  void Keep(DatasetId d, SampleId s, JobId job);
  void Unkeep(DatasetId d, SampleId s);
  bool MayKeep(DatasetId d, SampleId s, uint64_t bytes, JobId job) const;
  // Keeps a sample that has a block, if it may be; copies of what lives elsewhere make room.
  void KeepIfMay(DatasetId d, SampleId s, JobId job);
  KeepShare ShareOf(DatasetId d, SampleId s) const {
    const std::vector<uint8_t>& share = datasets_[d].share;
    return share.empty() ? KeepShare::kHome : static_cast<KeepShare>(share[s]);
  }
  // Kept, and not living here.
  bool Spare(DatasetId d, SampleId s) const {
    return (entry(d, s).flags & kKept) && ShareOf(d, s) != KeepShare::kHome;
  }
  bool Elsewhere(DatasetId d, SampleId s) const {
    return datasets_[d].elsewhere && datasets_[d].elsewhere(s);
  }
  // Its cover by a tier changes, or its share does.
  void Uncover(DatasetId d, SampleId s);
  void Cover(DatasetId d, SampleId s);
  void Touch(DatasetId d, SampleId s);
  // Whether a serving stream may have the lease's memory, which counts from then on.
  bool Admit(Lease& lease);
  bool FolderMayTake(DatasetId d, SampleId s) const;
  // Whether the sample may be read now, as far as the job's limits go. What the folder has is free,
  // and so is what another node gives.
  bool MayRead(DatasetId d, SampleId s, JobId job) {
    return (entry(d, s).flags & kInTier) || !jobs_.Limited(job) || Elsewhere(d, s) ||
           jobs_.Ready(job, now_);
  }
  bool MayStore(DatasetId d, SampleId s, JobId job) const;
  void Charge(ReadAction& read);
  void SettleCharge(const ReadAction& read, bool ok, Place from);
  void MarkWaiting();
  void SetFlag(DatasetId d, SampleId s, uint8_t flag);
  void ClearFlag(DatasetId d, SampleId s, uint8_t flag);
  bool FitsMemory() const;
  static bool OnlyHeld(const Entry& e) {
    return ((e.flags & kCopyDue) || e.storing) && e.ahead == 0;
  }
  // What ahead_bytes_, ready_bytes_ and held_bytes_ count changes only between these two.
  void Uncount(const Entry& e);
  void Count(const Entry& e);
  void AddAhead(Entry& e, int32_t n) {
    Uncount(e);
    e.ahead = static_cast<uint16_t>(e.ahead + n);
    Count(e);
  }
  void Pin(Entry& e) {
    Uncount(e);
    ++e.pins;
  }
  void Unpin(DatasetId d, SampleId s) {
    Entry& e = entry(d, s);
    --e.pins;
    Count(e);
    MaybeFree(d, s);
  }
  bool WouldKeep(DatasetId d, SampleId s, JobId job) const;
  bool MayReadAhead(const Stream& stream, SampleId s) const;
  size_t ActiveStreams() const;
  Place ChoosePlace(DatasetId d, SampleId s);
  void Start(const ReadAction& action, std::vector<ReadAction>* out);
  // Adds to a look-ahead read the neighbours worth reading with it.
  void StartGroup(Stream& stream, const ReadAction& action, size_t* budget,
                  std::vector<ReadAction>* out);
  void LookAhead(size_t limit, std::vector<ReadAction>* out);
  bool MayJoin(const Dataset& dataset, SampleId s) const;
  bool SettleRace(const ReadAction& read, bool ok);
  void PopFetched(Stream& stream, StreamId id);
  void UndoFetch(Stream& stream, SampleId sample);
  void ChooseStaging();
  void MakeRegion(Stream& stream);
  static uint64_t LargestBatch(const Dataset& dataset, size_t batch_size);
  uint64_t UsableBytes() const;
  void FreeRegionIfUnused(Stream& stream);
  void MaybeFree(DatasetId d, SampleId s);
  void FreeBlock(DatasetId d, SampleId s);
  enum class Need : uint8_t { kAhead, kServing, kUrgent };
  bool Allot(DatasetId d, SampleId s, Need need, StreamId for_stream);
  // Room that copies hold which wait for the second tier.
  enum class HeldRoom : uint8_t { kAwait, kTake };
  bool MakeRoom(uint64_t bytes, StreamId for_stream, HeldRoom held = HeldRoom::kAwait);
  bool RetractOne();
  bool EvictOne(const JobId* job = nullptr);
  bool EvictAmong(const JobId* job, bool spare_only);
  bool LetSpareGo();
  bool MayStealFrom(const Lease& lease, StreamId for_stream) const;
  bool StealOne(StreamId for_stream);
  bool MustYield(const Lease& lease) const;
  void Unplan(Stream& stream);
  void UnplanPosition(Stream& stream, SampleId s);
  void DropWaiting(Stream& stream);
  void WantOrder(Stream& stream, StreamId id);
  // Plans positions until one needs a read (true, *out filled), or nothing more can be planned.
  // `joins`: it goes on with a request whose beginning the read-ahead limit has let through.
  bool AdvanceCursor(Stream& stream, ReadAction* out, size_t* budget, bool joins = false);
  LeaseId MakeBatchLease(StreamId id, Stream& stream);
  void AskMissing(LeaseId id, Lease& lease);
  void Unpin(const Lease& lease);
  void StartCopyIfDue(LeaseId id, Lease& lease);
  uint64_t BytesOf(const Lease& lease) const;
  // A length that it asked for has not come yet.
  bool AwaitsLength(const Lease& lease) const;
  uint64_t CopyOffset(const Lease& lease) const;
  void FreeCopy(Lease& lease);
  void ReserveCopy(Lease& lease, uint64_t bytes);
  void Fill(const Lease& lease, Handout* out) const;
  Take Finish(LeaseId id, Lease& lease, Handout* out);
  bool FindFailure(Lease& lease, Handout* out);
  StallCause CauseOf(const Lease& lease) const;
  void Drop(LeaseId id);

  Options options_;  // keep_bytes changes while running
  ArenaAllocator arena_;
  bool admit_memory_ = true;
  bool admit_tier_ = true;
  uint64_t hedge_one_in_ = kHedgeOneIn;
  uint64_t staging_bytes_ = 0;
  uint64_t kept_bytes_ = 0;
  uint64_t spare_bytes_ = 0;  // of those, what does not live here
  uint64_t reserved_bytes_ = 0;
  uint64_t serving_bytes_ = 0;
  size_t serving_streams_ = 0;
  size_t serving_requests_ = 0;  // of requests_
  size_t peer_reads_ = 0;        // of in_flight_: for this node, and likely from another one
  uint64_t folder_room_ = ~uint64_t{0};
  uint64_t storing_spare_ = 0;  // being read, and meant for the folder though it lives elsewhere
  std::deque<Due> due_;
  uint64_t due_spare_ = 0;                       // bytes of those that do not live here
  std::unordered_map<uint64_t, JobId> storing_;  // begun and not ended, by Key()
  std::unordered_set<uint64_t> taking_;          // of those, not taken yet: they are pinned
  uint64_t held_bytes_ = 0;
  Nanos copies_moved_ = 0;  // when one ended last, or the first of them became due
  bool copies_hang_ = false;
  uint64_t metadata_bytes_ = 0;
  uint64_t leased_bytes_ = 0;
  uint64_t ahead_bytes_ = 0;
  uint64_t ready_bytes_ = 0;
  uint64_t read_ahead_bytes_ = ~uint64_t{0};
  size_t hanging_ = 0;
  size_t in_flight_ = 0;
  size_t requests_ = 0;
  uint32_t next_serial_ = 1;
  uint32_t next_group_ = 1;
  std::unordered_map<uint32_t, uint32_t> group_left_;            // members still being read
  std::unordered_map<uint64_t, Race> races_;                     // by Key()
  std::unordered_map<uint32_t, ArenaAllocator::Block> orphans_;  // of lost races, by serial
  JobTable jobs_;
  Nanos now_ = 0;
  bool handing_out_ = false;  // reads of limited jobs start only in their turn
  StreamId next_held_ = 0;    // whose turn it is
  bool may_steal_ = true;
  uint64_t frees_ = 1;  // blocks freed so far: tells a stream that room may be there
  std::vector<Dataset> datasets_;
  std::vector<Stream> streams_;
  StreamId next_stream_ = 0;  // round robin
  std::unordered_map<LeaseId, Lease> leases_;
  std::vector<LeaseId> pending_;  // leases with something missing, by number
  LeaseId next_lease_ = 1;
  std::deque<ReadAction> urgent_;  // placed, not yet handed to the driver
  std::deque<ReadAction> serving_urgent_;
  std::vector<CopyAction> copies_;
  std::vector<OrderAction> orders_;
  std::vector<SizeAction> sizes_;
  Counters counters_;
};

}  // namespace forebay
