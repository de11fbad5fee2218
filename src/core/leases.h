// Leases: what consumers have asked for and hold. A part of Scheduler. Pure.
//
// A lease is made when a consumer asks and becomes ready when its last sample has arrived. What it
// misses is read ahead of everything else. When memory is short for it, room is made, in this
// order: look-ahead farthest from use is taken back, the memory tier gives up samples, leases that
// nobody waits for yet give up theirs, then those of younger streams. While a consumer finds no
// room, younger ones start nothing. So the oldest waiting stream always gets on.
//
// Other nodes ask through serving streams, which take free memory within a bound, and stand behind
// every consumer of this node.
#pragma once

#include <algorithm>
#include <cassert>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <unordered_map>
#include <vector>

#include "core/actions.h"
#include "core/allocator.h"
#include "core/arena.h"
#include "core/lookahead.h"
#include "core/reads.h"
#include "core/residency.h"
#include "core/store_queue.h"

namespace forebay {

class Leases {
 public:
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

  enum class Kind : uint8_t {
    kPlain,       // samples where they lie
    kContiguous,  // copied into one piece
    kServing,     // for another node
  };
  // Which follows which:
  //
  //   kGathering --> kReady --> kHandedOut                 plain, serving
  //   kGathering --> kCopying --> kReady --> kHandedOut    contiguous
  //                  kCopying --> kCancelled               released meanwhile
  //
  // Before its copy begins, and before it is handed out, a lease may be made to start over, with
  // kGathering, by one that needs its memory. What exists:
  //
  //   state        kind         missing      pinned           block
  //   kGathering   any          some         all others       none; contiguous: or reserved
  //   kGathering   contiguous   none         all              none; reserved
  //   kCopying     contiguous   none         all              being written
  //   kCancelled   contiguous   none         all              being written, freed after that
  //   kReady       contiguous   none         none             complete
  //   kReady       others       none         all              none
  //   kHandedOut   as kReady
  enum class State : uint8_t { kGathering, kCopying, kCancelled, kReady, kHandedOut };
  // Who waits for it. It goes on after the lease has become ready, until it is handed out.
  enum class Demand : uint8_t {
    kNone,     // prepared ahead of the consumer
    kWanted,   // a consumer asked for it
    kBlocked,  // and, when it was last tried, there was no room
  };

  struct Lease {
    StreamId stream = 0;
    DatasetId dataset = 0;
    uint64_t epoch = 0;
    uint64_t index = 0;
    std::vector<SampleId> samples;
    std::vector<SampleId> missing;  // not pinned yet; a repeated sample stands here repeatedly
    uint64_t bytes = 0;
    Arena::Block block = Arena::kNone;  // contiguous copy
    Kind kind = Kind::kPlain;
    State state = State::kGathering;
    Demand demand = Demand::kNone;
    // Each of these may be set with any other.
    bool throttled = false;  // missed samples that wait for the job's share, when last tried
    bool unsized = false;    // has a sample without a length; `bytes` is too small
    bool restarted = false;  // has given up its samples to gather them anew
    bool reserved = false;   // contiguous: the copy's place was asked for before the samples
    bool in_region = false;  // contiguous: `block` lies in the stream's region
    bool counted = false;    // itemised: a fetch of the stream's order
    bool admitted = false;   // serving: counts in serving_bytes()
    uint64_t changes = 0;    // grows when it became ready, failed, or may find room

    bool serving() const { return kind == Kind::kServing; }
    bool wanted() const { return demand != Demand::kNone; }
    bool blocked() const { return demand == Demand::kBlocked; }
    bool ready() const { return state == State::kReady || state == State::kHandedOut; }
    bool copying() const { return state == State::kCopying || state == State::kCancelled; }
    // Its samples are not pinned any more.
    bool copied() const { return kind == Kind::kContiguous && ready(); }
    bool Misses(DatasetId d, SampleId s) const {
      return dataset == d && std::find(missing.begin(), missing.end(), s) != missing.end();
    }
    static constexpr bool MayFollow(State from, State to) {
      switch (from) {
        case State::kGathering:
          return to == State::kGathering || to == State::kCopying || to == State::kReady;
        case State::kCopying:
          return to == State::kReady || to == State::kCancelled;
        case State::kCancelled:
          return to == State::kCancelled;
        case State::kReady:
          return to == State::kGathering || to == State::kHandedOut;
        case State::kHandedOut:  // it was asked for once more
          return to == State::kHandedOut;
      }
      return false;
    }
    void MoveTo(State to) {
      assert(MayFollow(state, to));
      state = to;
    }
    void SetBlocked(bool blocked) {
      if (wanted()) demand = blocked ? Demand::kBlocked : Demand::kWanted;
    }
    // missing[i] is pinned.
    void OnPinned(size_t i) {
      missing[i] = missing.back();
      missing.pop_back();
      BecomeReady();
    }
    void BecomeReady() {
      if (missing.empty() && kind != Kind::kContiguous) MoveTo(State::kReady);
    }
  };

  // The consumers' side of a stream.
  struct Consumer {
    std::deque<LeaseId> queue;  // leases not handed out yet, in order (contiguous: several)
    size_t leases = 0;
    // A pending lease became ready, failed, or may find room, since it was last asked for.
    bool due = false;
    uint64_t changes = 0;         // grows with every such change
    uint64_t changes_of_all = 0;  // of those, the ones that are not of a single lease
    // Contiguous streams copy into a region of their own: holes between single samples would hardly
    // ever be as large as a batch.
    Arena::Block region = Arena::kNone;
    ArenaAllocator copies{0};
  };

  Leases(Arena& arena, Residency& residency, StoreQueue& stores, Lookahead& lookahead, Reads& reads,
         SchedulerCommon& common)
      : arena_(arena),
        residency_(residency),
        stores_(stores),
        lookahead_(lookahead),
        reads_(reads),
        common_(common) {}

  // For a new stream, or for one that has the number of a closed one. Contiguous: makes its region.
  void Open(StreamId id, const StreamShape& shape);
  // Cancels leases that still wait.
  void CancelWaiting(StreamId id);
  void FreeRegionIfUnused(StreamId id);
  const Consumer& consumer(StreamId id) const { return consumers_[id]; }

  // The stream's next batch. kPending: ask again after the next event (the lease is being filled).
  // kEndOfEpoch is returned once between epochs. Fills `out` with kReady and kFailed; after kFailed
  // the next call tries the same batch again.
  Take TakeBatch(StreamId id, Handout* out);
  // One sample by number. `*lease` is kNoLease at first, and names the pending lease on later
  // calls.
  Take FetchSample(StreamId id, SampleId sample, LeaseId* lease, Handout* out);
  // Gives back a ready lease, or cancels a pending one.
  void Release(LeaseId id);
  // Appends reads to start now, at most `limit` requests under way in all, what leases miss first.
  // Without `look_ahead` only that.
  void NextReads(size_t limit, std::vector<ReadAction>* out, bool look_ahead = true);
  // Moves out copies that have become due since the last call.
  std::vector<CopyAction> TakeCopies();
  // Samples whose lengths consumers wait for, each until OnLengths tells it.
  std::vector<SizeAction> TakeSizes();

  // The sample has become resident, or could not be read.
  void OnRead(DatasetId d, SampleId s, bool ok);
  void OnCopyDone(LeaseId id);
  // The sample is dead: whoever misses it is told so.
  void OnInvalidated(DatasetId d, SampleId s);
  // Lengths of the data set are known; `failed`: some could not be had.
  void OnLengths(DatasetId d, bool failed);
  // Its consumers look again: `id`'s, those of every pending lease, those who miss the sample.
  void MarkDue(StreamId id);
  // Grows with every change that may end the wait for this lease; kNoLease: for one that is yet to
  // be asked for.
  uint64_t Changes(StreamId stream, LeaseId id) const;
  void MarkAllDue();
  void MarkDueFor(DatasetId d, SampleId s);
  // Memory was given back: a place for a copy is worth another try.
  void OnRoom();

  // Room that copies for the second tier have which wait to be taken.
  enum class DueRoom : uint8_t { kAwait, kTake };
  // Makes a hole of `bytes`; false: it cannot be had now. `for_stream`: younger ones give way.
  bool MakeRoom(uint64_t bytes, StreamId for_stream, DueRoom due = DueRoom::kAwait);

  // With something missing or to be copied, by number.
  const std::vector<LeaseId>& pending() const { return pending_; }
  const std::unordered_map<LeaseId, Lease>& leases() const { return leases_; }
  uint64_t leased_bytes() const { return leased_bytes_; }
  struct Held {
    size_t count = 0;     // handed out and not released
    uint64_t bytes = 0;   // of those
    uint64_t wanted = 0;  // by the batch that its consumer waits for
    uint64_t piece = 0;   // the largest sample of it that is missing
  };
  Held HeldBeside(StreamId id) const;
  // Of leases of serving streams that have memory.
  uint64_t serving_bytes() const { return serving_bytes_; }
  bool CopiesWait() const { return !copies_.empty(); }

 private:
  using Entry = Residency::Entry;
  using SampleState = Residency::State;
  Entry& entry(DatasetId d, SampleId s) { return residency_.dataset(d).entries[s]; }
  Arena::Block MakeRegion(const StreamShape& shape);
  void MarkDue(Lease& lease);
  LeaseId Add(Lease lease);
  uint64_t BytesOf(const Lease& lease) const;
  // Pins what is resident of a new lease; the rest is missing.
  void Gather(Lease& lease);
  Take Finish(LeaseId id, Lease& lease, Handout* out);
  void Fill(const Lease& lease, Handout* out) const;
  bool FindFailure(const Lease& lease, Handout* out);
  void Unpin(const Lease& lease);
  void StartOver(Lease& lease);
  void Drop(LeaseId id);

  // Whether a serving stream may have the lease's memory, which counts from then on.
  bool Admit(Lease& lease);
  bool MustYield(const Lease& lease) const;
  void AskMissing(Lease& lease);
  bool AskBlocked(std::vector<LeaseId>& blocked);
  bool AskThrottled(LeaseId id);
  bool Allot(const Lease& lease, SampleId s);
  bool MayStealFrom(const Lease& lease, StreamId for_stream) const;
  bool StealOne(StreamId for_stream);

  void StartCopyIfDue(LeaseId id, Lease& lease);
  uint64_t CopyOffset(const Lease& lease) const;
  void FreeCopy(Lease& lease);
  void ReserveCopy(Lease& lease, uint64_t bytes);

  Arena& arena_;
  Residency& residency_;
  StoreQueue& stores_;
  Lookahead& lookahead_;
  Reads& reads_;
  SchedulerCommon& common_;
  std::vector<Consumer> consumers_;
  std::unordered_map<LeaseId, Lease> leases_;
  std::vector<LeaseId> pending_;
  LeaseId next_lease_ = 1;
  uint64_t leased_bytes_ = 0;
  uint64_t serving_bytes_ = 0;
  bool in_turn_ = false;         // reads of limited jobs start only in their turn
  StreamId next_throttled_ = 0;  // whose turn it is
  bool may_steal_ = true;
  std::vector<CopyAction> copies_;
  std::vector<SizeAction> sizes_;
};

}  // namespace forebay
