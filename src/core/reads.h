// Reads: which reads are started, from which origin and together with which others, and what comes
// of them. A part of Scheduler. Pure.
//
// What leases miss goes first, then look-ahead. Neighbours in one shard are read in one request (a
// group) where that pays. A read that hangs may be raced by a second one into memory of its own;
// the loser's memory is taken until it ends. What comes from the source is charged to the job.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <optional>
#include <unordered_map>
#include <vector>

#include "core/actions.h"
#include "core/arena.h"
#include "core/lookahead.h"
#include "core/residency.h"
#include "core/store_queue.h"

namespace forebay {

class Reads {
 public:
  static constexpr uint64_t kHedgeOneIn = 200;

  Reads(size_t max_samples, Arena& arena, Residency& residency, StoreQueue& stores,
        Lookahead& lookahead, SchedulerCommon& common)
      : max_samples_(max_samples),
        arena_(arena),
        residency_(residency),
        stores_(stores),
        lookahead_(lookahead),
        common_(common) {}

  // Look-ahead's reads start while fewer bytes than these are in flight for this node; 0: no bound.
  void SetFlightBytes(uint64_t most) { most_flight_bytes_ = most; }
  // Requests under way that hang: what a consumer waits for may pass them.
  void SetHanging(size_t requests) { hanging_ = requests; }
  // At most one read in so many is hedged; 0: none.
  void SetHedging(uint64_t one_in) { hedge_one_in_ = one_in; }

  // Which reads of what the second tier has the source may get.
  void SetSourceExtra(SourceExtra extra) { source_extra_ = extra; }
  // For measurements: this share of what the second tier has comes from the source, whatever either
  // costs.
  void SetFixedSplit(double share) { fixed_split_ = share; }

  // A sample that has memory is to be read before look-ahead's. `charge`: it comes from the source.
  void Ask(ReadAction read, bool charge);
  // Those that were asked for, for this node, and not started.
  size_t asked() const { return asked_.size(); }
  // Whether reads of the data set have been asked for and not started yet.
  bool AskedOf(DatasetId d) const;
  // Whether one more may start for a consumer of this node.
  bool HasRoom(size_t limit) const;
  // Starts what was asked for, then what look-ahead finds, at most `limit` requests in all.
  void StartAsked(size_t limit, std::vector<ReadAction>* out);
  void StartAhead(size_t limit, std::vector<ReadAction>* out);
  enum class Outcome : uint8_t {
    kArrived,  // the sample is there
    kFailed,   // it is absent
    kNone,     // another read of the sample goes on, or has ended before
  };
  Outcome OnDone(const ReadAction& read, bool ok, uint32_t crc, Origin from);

  // Two reads of its sample were started; it may have lost.
  bool Raced(const ReadAction& read) const {
    return orphans_.contains(read.serial) || races_.contains(Key(read.dataset, read.sample));
  }
  // Whether a second read of a sample whose read hangs may start, but for its memory. `left`: in a
  // place that was left.
  bool MayHedge(const ReadAction& hanging, bool left) const;
  // It starts, into `block`.
  ReadAction Hedge(const ReadAction& hanging, Arena::Block block, bool left);

  // Something is under way that frees memory or fills a lease when it ends. Reads that lost a race
  // may never end.
  bool Moving() const {
    return in_flight_ > orphans_.size() || !asked_.empty() || !asked_serving_.empty() ||
           stores_.Moving();
  }
  size_t in_flight() const { return in_flight_; }    // samples being read
  size_t requests() const { return requests_; }      // groups counted once
  size_t peer_reads() const { return peer_reads_; }  // for this node, likely from another one
  // Memory of second and lost reads.
  uint64_t raced_bytes() const;
  // Whether each race is for a sample that is being read; for tests.
  bool RacesAreForReads() const;

 private:
  using Entry = Residency::Entry;
  using State = Residency::State;
  // Two reads of one sample under way; the entry has the first one's block.
  struct Race {
    uint32_t first = 0;
    uint32_t second = 0;
    Arena::Block second_block = Arena::kNone;
  };
  class Group;
  static uint64_t Key(DatasetId d, SampleId s) { return uint64_t{d} << 32 | s; }
  static bool FromPeer(const ReadAction& read) {
    return !read.serving && read.likely == Origin::kPeer;
  }
  Entry& entry(DatasetId d, SampleId s) { return residency_.dataset(d).entries[s]; }
  Origin ChooseOrigin(DatasetId d, SampleId s);
  bool PassBy(const ReadCosts& costs);
  void AddRequest(const ReadAction& read);
  void EndRequest(const ReadAction& read);
  uint32_t NewSerial();
  void Start(const ReadAction& action, std::vector<ReadAction>* out);
  // Adds to a look-ahead read the neighbours worth reading with it.
  void StartGroup(StreamId id, const ReadAction& action, size_t* budget,
                  std::vector<ReadAction>* out);
  void JoinSurroundings(StreamId id, Group* group);
  void JoinOrder(StreamId id, Group* group, size_t* budget);
  bool MayJoin(const Residency::Dataset& dataset, SampleId s) const;
  // In the second tier, which is asked.
  bool FromTier(uint8_t flags) const {
    return (flags & Residency::kInTier) != 0 && !common_.tier_left;
  }
  bool FitsMemory() const;
  void Charge(ReadAction& read);
  void SettleCharge(const ReadAction& read, bool ok, Origin from);
  bool SettleRace(const ReadAction& read, bool ok);

  const size_t max_samples_;
  Arena& arena_;
  Residency& residency_;
  StoreQueue& stores_;
  Lookahead& lookahead_;
  SchedulerCommon& common_;
  uint64_t hedge_one_in_ = kHedgeOneIn;
  size_t hanging_ = 0;
  size_t in_flight_ = 0;
  size_t requests_ = 0;
  std::array<size_t, 3> requests_at_{};  // of requests_, by where they will likely be answered
  SourceExtra source_extra_ = SourceExtra::kLate;
  PlaceChoice choice_;
  std::optional<double> fixed_split_;
  double split_due_ = 0;         // of fixed_split_, that the source has not got yet
  size_t serving_requests_ = 0;  // of requests_
  uint64_t flight_bytes_ = 0;    // being read for this node
  uint64_t most_flight_bytes_ = 0;
  size_t peer_reads_ = 0;  // of in_flight_
  uint32_t next_serial_ = 1;
  uint32_t next_group_ = 1;
  std::deque<ReadAction> asked_;
  std::deque<ReadAction> asked_serving_;                // for other nodes
  std::unordered_map<uint32_t, uint32_t> group_left_;   // members still being read
  std::unordered_map<uint64_t, Race> races_;            // by Key()
  std::unordered_map<uint32_t, Arena::Block> orphans_;  // of lost races, by serial
};

}  // namespace forebay
