// Scheduler: decides what is read, where it lands in the arena, what stays and what goes.
//
// Pure: events in, actions out; no clock, no thread, no I/O. One thread at a time (the engine holds
// its mutex). The same code runs under the engine, under virtual time in tests and in simulators.
//
// It is the face of these parts, each of which uses only those before it:
//   Arena       the memory, and what of it is set aside,
//   Residency   which samples are in memory and why; which of them stay,
//   StoreQueue  copies of samples for the second tier,
//   Lookahead   the streams' orders and how far each is planned,
//   Reads       which reads start, from where and with which others; what comes of them,
//   Leases      what consumers asked for and hold; room for it.
// Here is what concerns several of them: events that one tells to another, and why a lease waits.
//
// Lengths may come after the data set (OnLengths). Look-ahead stops at the first sample without
// one; a lease that has such a sample asks for its length and stays pending.
//
// A data set may grow (AppendSamples). A sample whose file changed is invalidated: it is dead from
// then on, its number is never used again, and what was read of it is given to nobody who asks
// later. Leases that have it keep it until they are released.
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
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "catalog/catalog.h"
#include "core/actions.h"
#include "core/arena.h"
#include "core/job_table.h"
#include "core/leases.h"
#include "core/lookahead.h"
#include "core/reads.h"
#include "core/residency.h"
#include "core/store_queue.h"
#include "metrics/stall.h"

namespace forebay {

class Scheduler {
 public:
  using Options = SchedulerOptions;
  using Counters = SchedulerCounters;
  using Take = Leases::Take;
  using Handout = Leases::Handout;

  explicit Scheduler(const Options& options);
  Scheduler(const Scheduler&) = delete;
  Scheduler& operator=(const Scheduler&) = delete;

  // `metadata_bytes` are set aside in the arena, untouched: what the tables take elsewhere counts
  // against the same budget. kNoRoom when they do not fit.
  static constexpr DatasetId kNoRoom = ~DatasetId{0};
  DatasetId AddDataset(std::span<const uint32_t> lengths, uint64_t metadata_bytes = 0);
  // `samples` whose lengths OnLengths will tell; until it has told some, they count as `guess`
  // each.
  DatasetId AddUnsized(size_t samples, uint32_t guess) {
    return residency_.Add(Residency::Dataset::Unsized(samples, guess));
  }
  // More samples at the data set's end. False: `metadata_bytes`, as above, find no room, and there
  // are no more. `shares`: as for SetShare, of these; empty: all that lived here so far, and these,
  // do.
  bool AppendSamples(DatasetId dataset, std::span<const uint32_t> lengths,
                     uint64_t metadata_bytes = 0, std::span<const uint8_t> shares = {});
  // The sample's bytes are not its file's any more: no tier holds it, look-ahead passes it by, what
  // is being read or copied of it is not kept, and whoever waits or asks for it gets kFailed. Its
  // length is known.
  void Invalidate(DatasetId dataset, SampleId sample);
  size_t sample_count(DatasetId dataset) const {
    return residency_.datasets()[dataset].entries.size();
  }
  bool Invalidated(DatasetId dataset, SampleId sample) const { return entry(dataset, sample).dead; }
  // Takes `bytes` of the arena away for memory that its user holds elsewhere, in blocks whose place
  // does not matter; false, with nothing taken, when kept samples and look-ahead cannot make room,
  // or when fewer than `leave` bytes would be left for samples.
  bool SetAside(uint64_t bytes, std::vector<Arena::Block>* blocks, uint64_t leave = 0);
  void ReturnAside(std::span<const Arena::Block> blocks);
  // Whether so much could be set aside were nothing pinned or being read.
  bool MaySetAside(uint64_t bytes, uint64_t leave = 0) const {
    const uint64_t usable = arena_.usable();
    return leave <= usable && bytes <= usable - leave;
  }
  // Memory for a sample whose data set is yet to be added, set aside until Adopt or ReturnAside;
  // kNone when what is free does not do. Nothing is given up for it.
  Arena::Block AllotEarly(uint32_t length) { return arena_.SetAside(length); }
  // What AllotEarly would still give to `samples` more, and leave room for their tables and others.
  uint64_t EarlyRoom(uint64_t samples) const;
  // The block holds the sample's bytes. It is kept where that is allowed, else given up.
  void Adopt(DatasetId dataset, SampleId sample, Arena::Block block, uint32_t crc) {
    residency_.Adopt(dataset, sample, block, crc);
  }
  uint64_t block_offset(Arena::Block block) const { return arena_.offset(block); }
  uint64_t block_bytes(Arena::Block block) const { return arena_.size(block); }
  // The data set's second tier; for grouped reads, where its samples lie. Both before the first
  // stream over it; the tier once more when it has grown.
  void SetTier(DatasetId dataset, const TierShape& tier) {
    residency_.dataset(dataset).tier = tier;
  }
  void SetLayout(DatasetId dataset, std::shared_ptr<const Catalog> catalog) {
    residency_.dataset(dataset).layout = std::move(catalog);
  }
  void SetCosts(DatasetId dataset, const ReadCosts& costs) {
    residency_.dataset(dataset).costs = costs;
  }
  // Whoever fetches its samples keeps them: the memory tier does not, and the second tier only what
  // other nodes asked for. Before the first stream over it.
  void SetPassing(DatasetId dataset) { residency_.dataset(dataset).passing = true; }
  // Tells which samples a read would ask another node for. Such reads are no load on the source.
  void SetElsewhere(DatasetId dataset, Residency::IsElsewhere elsewhere) {
    residency_.dataset(dataset).elsewhere = std::move(elsewhere);
  }
  // What may be kept: one KeepShare a sample, or empty for everything. What is kept against it goes
  // when room is needed, before anything else does.
  void SetShare(DatasetId dataset, std::vector<uint8_t> share) {
    residency_.SetShare(dataset, std::move(share));
  }
  // Bytes that the folder can still take; copies in excess of the node's share leave enough for
  // what lives here.
  void SetFolderRoom(uint64_t bytes) { stores_.SetFolderRoom(bytes); }
  // Whether the memory tier or the folder has the sample.
  bool Held(DatasetId dataset, SampleId sample) const {
    return residency_.datasets()[dataset].Held(sample);
  }
  // Bit s: Held(s).
  std::vector<std::byte> HeldBits(DatasetId dataset) const {
    return residency_.datasets()[dataset].HeldBits();
  }
  // Since the last call; at the first one, everything held is new.
  HeldChanges TakeHeldChanges(DatasetId dataset) {
    return residency_.dataset(dataset).TakeHeldChanges();
  }
  // What streams of this node will use beyond their windows, is not here and would be kept. What
  // lives here comes last: peers seldom have it, and it must not hide what they have.
  std::vector<SampleId> Upcoming(DatasetId dataset, size_t most) const {
    return lookahead_.Upcoming(dataset, most);
  }
  // Whether memory and the second tier take samples that they do not hold.
  void SetAdmission(bool memory, bool tier) {
    common_.admit_memory = memory;
    common_.admit_tier = tier;
  }
  static constexpr uint64_t kHedgeOneIn = Reads::kHedgeOneIn;
  // At most one read in so many is hedged; 0: none.
  void SetHedging(uint64_t one_in) { reads_.SetHedging(one_in); }
  // Changes Options::keep_bytes; a tier that holds more than that gives up what is not in use.
  void SetKeepBytes(uint64_t bytes) { residency_.SetKeepBytes(bytes); }
  // Limits of a job that has streams, and of all jobs together. A job whose quota of the memory
  // tier shrinks gives up what is not in use.
  void SetJobLimits(std::string_view job, const JobLimits& limits);
  void SetSourceLimits(RateLimits limits) { common_.jobs.SetNodeLimits(limits, common_.now); }
  // Time passes: call it before NextReads, which hands out what has become due.
  void Advance(Nanos now);
  // When NextReads would start reads that are held back now.
  Nanos wake_at() const { return common_.jobs.wake_at(); }
  // Of jobs that have streams; their `held_back` since the last call.
  bool jobs_limited() const { return common_.jobs.AnyLimited(); }
  std::vector<JobStats> TakeJobStats() { return common_.jobs.TakeStats(); }
  Nanos held_time() const { return common_.jobs.held_total(); }
  // `closed`: its number is used again. It must be Unused().
  StreamId OpenStream(const StreamShape& shape, std::optional<StreamId> closed = std::nullopt);
  // Closed, and no lease of it is left.
  bool Unused(StreamId stream) const {
    return !lookahead_.streams()[stream].open && leases_.consumer(stream).leases == 0;
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
  uint64_t generation(StreamId stream) const { return lookahead_.streams().at(stream).generation; }

  // The stream's next batch. kPending: ask again after the next event (the lease is being filled).
  // kEndOfEpoch is returned once between epochs. Fills `out` with kReady and kFailed; after kFailed
  // the next call tries the same batch again.
  Take TakeBatch(StreamId stream, Handout* out) { return leases_.TakeBatch(stream, out); }
  // One sample by number. `*lease` is kNoLease at first, and names the pending lease on later
  // calls.
  Take FetchSample(StreamId stream, SampleId sample, LeaseId* lease, Handout* out) {
    return leases_.FetchSample(stream, sample, lease, out);
  }
  // Gives back a ready lease, or cancels a pending one.
  void Release(LeaseId lease) { leases_.Release(lease); }

  // The most bytes that look-ahead may have in flight and ready together, in all streams; streams
  // share them evenly. Each may plan its next batch all the same, and samples that will be kept do
  // not count: their memory is taken either way.
  void SetReadAheadBytes(uint64_t bytes) { lookahead_.SetReadAheadBytes(bytes); }
  // Requests under way that hang: what a consumer waits for may pass them.
  void SetHanging(size_t requests) { reads_.SetHanging(requests); }
  // Reads to start now, at most `in_flight_limit` requests under way in all, what leases miss
  // first. Without `look_ahead` only that. Appends to `out`.
  void NextReads(size_t in_flight_limit, std::vector<ReadAction>* out, bool look_ahead = true) {
    leases_.NextReads(in_flight_limit, out, look_ahead);
  }
  // Moves out copies and orders that have become due since the last call.
  std::vector<CopyAction> NextCopies() { return leases_.TakeCopies(); }
  std::vector<OrderAction> NextOrders() { return lookahead_.TakeOrders(); }
  // Samples whose lengths consumers wait for, each until OnLengths tells it.
  std::vector<SizeAction> NextSizes() { return leases_.TakeSizes(); }

  // `from` is where the bytes came from in the end.
  void OnReadDone(const ReadAction& read, bool ok, uint32_t crc, Place from);
  void OnReadDone(DatasetId dataset, SampleId sample, bool ok, uint32_t crc) {
    OnReadDone(PlaceOf(dataset, sample), ok, crc, Place::kSource);
  }
  // Some lengths of a data set are known. Where one cannot be had, the batch that needs it fails,
  // and the next ask tries again.
  void OnLengths(DatasetId dataset, std::span<const SampleLength> lengths);
  // The second tier holds the sample now.
  void OnStored(DatasetId dataset, SampleId sample) { residency_.SetInTier(dataset, sample, true); }

  // ---- Copies for the second tier.
  //
  // The one that has waited longest; false: none waits.
  bool FirstStore(StoreAction* out) { return stores_.First(out); }
  // The driver takes it: its bytes stay where they are until OnStoreTaken.
  void BeginStore(const StoreAction& store) { stores_.Begin(store); }
  // They were copied elsewhere.
  void OnStoreTaken(const StoreAction& store) { stores_.OnTaken(store); }
  // `stored`: the second tier has it. It may end before it was taken.
  void OnStoreEnded(DatasetId dataset, SampleId sample, bool stored);
  // Its copy was begun and has not ended.
  bool Storing(DatasetId dataset, SampleId sample) const {
    return stores_.Writing(dataset, sample);
  }
  // Copies that wait to be taken, or were and have not ended.
  size_t copies_under_way() const { return stores_.under_way(); }
  // The second tier has ended none for Options::copy_patience: nobody waits for it now.
  bool copies_hang() const { return stores_.hangs(); }
  Nanos copy_patience() const { return stores_.patience(); }
  // Of samples that are in memory only because their copy waits.
  uint64_t held_bytes() const { return residency_.bytes().storing; }

  // A second read from the source of a sample whose read hangs; false when there is no memory for
  // it, second reads and lost ones would hold more than an eighth of what there is for samples, the
  // sample has been read or raced already, or as many were hedged as may be.
  bool Hedge(const ReadAction& hanging, ReadAction* out);
  void OnCopyDone(LeaseId lease) { leases_.OnCopyDone(lease); }

  // Where a sample that is being read lands.
  ReadAction PlaceOf(DatasetId dataset, SampleId sample) const;

  // Whether a pending lease of the stream became ready, failed, or may now find room, since it was
  // last asked.
  bool IsDue(StreamId stream) const { return leases_.consumer(stream).due; }
  // Grows with every such change; tells several consumers of one stream apart.
  uint64_t Changes(StreamId stream) const { return leases_.consumer(stream).changes; }
  // The same for one lease of an itemised stream, whose consumers wait each for their own.
  // kNoLease: for one that is yet to be asked for.
  uint64_t LeaseChanges(StreamId stream, LeaseId lease) const {
    return leases_.Changes(stream, lease);
  }
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

  size_t stream_count() const { return lookahead_.streams().size(); }
  size_t in_flight() const { return reads_.in_flight(); }  // samples being read
  size_t requests() const { return reads_.requests(); }    // groups counted once
  // Samples of the data set without a length.
  size_t unsized(DatasetId dataset) const { return residency_.datasets()[dataset].unsized; }
  // Of those that have one, how many were not used yet; fewer where samples are read repeatedly.
  size_t SizedAhead(DatasetId dataset) const {
    const Residency::Dataset& d = residency_.datasets()[dataset];
    const uint64_t sized = d.entries.size() - d.unsized;
    return static_cast<size_t>(sized - std::min(sized, d.allotted));
  }
  // Samples of the data set that no tier holds.
  uint64_t uncovered(DatasetId dataset) const { return residency_.datasets()[dataset].uncovered; }
  uint64_t used_bytes() const { return arena_.used(); }
  uint64_t kept_bytes() const { return residency_.bytes().kept; }
  // The most that the memory tier takes, as things are.
  uint64_t keep_quota() const { return residency_.keep_quota(); }
  // Of home samples that no tier holds: memory and folder both leave room for them.
  uint64_t reserved_bytes() const { return residency_.bytes().reserved; }
  // Of leases of serving streams that have memory.
  uint64_t serving_bytes() const { return leases_.serving_bytes(); }
  // Samples that are neither kept nor pinned nor only waiting for their copy: there or being read,
  // and those that are there.
  uint64_t ahead_bytes() const { return residency_.bytes().ahead; }
  uint64_t ready_bytes() const { return residency_.bytes().ready; }
  // Of one batch of each stream that has something to read.
  uint64_t batch_bytes() const { return lookahead_.batch_bytes(); }
  uint64_t capacity() const { return arena_.capacity(); }
  uint64_t leased_bytes() const { return leases_.leased_bytes(); }
  size_t lease_count() const { return leases_.leases().size(); }
  const Counters& counters() const { return common_.counters; }

  // Bytes of bookkeeping for a data set of n samples, so that the engine can charge the budget.
  static uint64_t MetadataBytes(uint64_t samples) { return samples * Residency::kBytesPerSample; }

  // Checks every invariant; for tests. Empty when all hold.
  std::string CheckInvariants() const;

 private:
  using Entry = Residency::Entry;
  using Lease = Leases::Lease;
  using SampleState = Residency::State;

  const Entry& entry(DatasetId d, SampleId s) const { return residency_.datasets()[d].entries[s]; }
  const Lease& lease(LeaseId id) const { return leases_.leases().at(id); }
  void MarkWaiting();
  StallCause CauseOf(const Lease& lease) const;
  // A length that it asked for has not come yet.
  bool AwaitsLength(const Lease& lease) const;
  using Counts = std::vector<std::vector<uint32_t>>;  // by data set and sample
  std::string CheckLeases(Counts* pins, uint64_t* used) const;
  std::string CheckDataset(DatasetId d, Residency::Bytes* bytes) const;
  std::string CheckEntry(DatasetId d, SampleId s, uint32_t pins, uint32_t ahead) const;
  std::string CheckBytes(const Residency::Bytes& bytes) const;

  SchedulerCommon common_;
  Arena arena_;
  Residency residency_;
  StoreQueue stores_;
  Lookahead lookahead_;
  Reads reads_;
  Leases leases_;
};

}  // namespace forebay
