// Scheduler: decides what is read, where it lands in the arena, what stays and what goes.
//
// Pure: events in, actions out; no clock, no thread, no I/O. One thread at a time (the engine holds
// its mutex). The same code runs under the engine, under virtual time in tests and in simulators.
//
// It has these parts, each of which uses only those before it; callers ask them for what concerns
// one of them alone:
//   Arena       the memory, and what of it is set aside,
//   Residency   which samples are in memory and why; which of them stay,
//   StoreQueue  copies of samples for the second tier,
//   Lookahead   the streams' orders and how far each is planned,
//   Reads       which reads start, from where and with which others; what comes of them,
//   Leases      what consumers asked for and hold; room for it.
// Here is what concerns several of them: events that one tells to another. Why leases wait is said
// by Waits (core/waits.h).
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

#include <cstdint>
#include <optional>
#include <span>
#include <string_view>
#include <vector>

#include "core/actions.h"
#include "core/arena.h"
#include "core/job_table.h"
#include "core/leases.h"
#include "core/lookahead.h"
#include "core/reads.h"
#include "core/residency.h"
#include "core/store_queue.h"

namespace forebay {

class Scheduler {
 public:
  using Options = SchedulerOptions;
  using Counters = SchedulerCounters;
  using Take = Leases::Take;
  using Handout = Leases::Handout;

  // `remote` outlives it; null: every sample is read here.
  explicit Scheduler(const Options& options, const RemoteSamples* remote = nullptr);
  Scheduler(const Scheduler&) = delete;
  Scheduler& operator=(const Scheduler&) = delete;

  // ---- The parts. What concerns only one of them is asked of it.
  Arena& arena() { return arena_; }
  const Arena& arena() const { return arena_; }
  Residency& residency() { return residency_; }
  const Residency& residency() const { return residency_; }
  StoreQueue& stores() { return stores_; }
  const StoreQueue& stores() const { return stores_; }
  Lookahead& lookahead() { return lookahead_; }
  const Lookahead& lookahead() const { return lookahead_; }
  Reads& reads() { return reads_; }
  const Reads& reads() const { return reads_; }
  Leases& leases() { return leases_; }
  const Leases& leases() const { return leases_; }
  JobTable& jobs() { return common_.jobs; }
  const JobTable& jobs() const { return common_.jobs; }
  const Counters& counters() const { return common_.counters; }

  // ---- Data sets and memory.
  //
  // `metadata_bytes` are set aside in the arena, untouched: what the tables take elsewhere counts
  // against the same budget. kNoRoom when they do not fit.
  static constexpr DatasetId kNoRoom = ~DatasetId{0};
  DatasetId AddDataset(std::span<const uint32_t> lengths, uint64_t metadata_bytes = 0);
  // More samples at the data set's end. False: `metadata_bytes`, as above, find no room, and there
  // are no more. `shares`: as for Residency::SetShare, of these; empty: all that lived here so far,
  // and these, do.
  bool AppendSamples(DatasetId dataset, std::span<const uint32_t> lengths,
                     uint64_t metadata_bytes = 0, std::span<const uint8_t> shares = {});
  // The sample's bytes are not its file's any more: no tier holds it, look-ahead passes it by, what
  // is being read or copied of it is not kept, and whoever waits or asks for it gets kFailed. Its
  // length is known.
  void Invalidate(DatasetId dataset, SampleId sample);
  // Takes `bytes` of the arena away for memory that its user holds elsewhere, in blocks whose place
  // does not matter; false, with nothing taken, when kept samples and look-ahead cannot make room,
  // or when fewer than `leave` bytes would be left for samples.
  bool SetAside(uint64_t bytes, std::vector<Arena::Block>* blocks, uint64_t leave = 0);
  void ReturnAside(std::span<const Arena::Block> blocks);
  // Whether memory and the second tier take samples that they do not hold.
  void SetAdmission(bool memory, bool tier) {
    common_.admit_memory = memory;
    common_.admit_tier = tier;
  }
  // The second tier does not answer, or does again. What it has is read from the source meanwhile,
  // and no copy is waited for.
  void SetTierLeft(bool left);
  bool tier_left() const { return common_.tier_left; }
  // Limits of a job that has streams. When its quota of the memory tier shrinks, it gives up what
  // is not in use.
  void SetJobLimits(std::string_view job, const JobLimits& limits);

  // ---- Streams.
  //
  // `closed`: its number is used again. No lease of it is left.
  StreamId OpenStream(const StreamShape& shape, std::optional<StreamId> closed = std::nullopt);
  // Forgets the stream's window; its leases stay valid until released.
  void CloseStream(StreamId stream);
  // Starts over at an epoch and global position; leases that still wait are cancelled.
  void Seek(StreamId stream, uint64_t epoch, uint64_t first_position);
  // Answers an OrderAction. `last`: the stream ends after this epoch.
  void ExtendOrder(StreamId stream, uint64_t generation, uint64_t epoch,
                   std::vector<SampleId> order, bool last);
  // Declares that no epoch follows those known.
  void EndHorizon(StreamId stream);

  // ---- Events.
  //
  // Time passes: call it before NextReads, which hands out what has become due.
  void Advance(Nanos now);
  // `from` is where the bytes came from in the end.
  void OnReadDone(const ReadAction& read, bool ok, uint32_t crc, Origin from);
  // Some lengths of a data set are known. Where one cannot be had, the batch that needs it fails,
  // and the next ask tries again.
  void OnLengths(DatasetId dataset, std::span<const SampleLength> lengths);
  // A copy for the second tier. `stored`: the tier has it. It may end before it was taken.
  void OnStoreEnded(DatasetId dataset, SampleId sample, bool stored);
  // A second read from the source of a sample whose read hangs; false when there is no memory for
  // it, second reads and lost ones would hold more than an eighth of what there is for samples, the
  // sample has been read or raced already, or as many were hedged as may be. `left`: its place was
  // left; as many as hang there may be hedged, and hold half of the memory.
  bool Hedge(const ReadAction& hanging, ReadAction* out, bool left = false);

 private:
  void MarkWaiting();

  SchedulerCommon common_;
  Arena arena_;
  Residency residency_;
  StoreQueue stores_;
  Lookahead lookahead_;
  Reads reads_;
  Leases leases_;
};

}  // namespace forebay
