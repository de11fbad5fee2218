// Lookahead: the streams' orders, and how far each is planned. A part of Scheduler. Pure.
//
// A stream's window are the positions that were planned and not taken yet. Its cursor moves ahead
// of what consumers take, over the end of an epoch into the next one, as far as memory allows; each
// position in the window is a reason for its sample to stay. Streams share what staging has evenly.
//
// Lengths may come after the data set. Look-ahead stops at the first sample without one.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <optional>
#include <unordered_map>
#include <vector>

#include "core/actions.h"
#include "core/arena.h"
#include "core/residency.h"
#include "core/store_queue.h"

namespace forebay {

class Lookahead {
 public:
  struct Epoch {
    uint64_t epoch = 0;
    std::vector<SampleId> order;
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
    size_t cursor_epoch = 0;  // next position to plan
    uint64_t cursor = 0;
    uint64_t blocked_at = 0;  // Arena::frees() when no room was found last
    // Itemised streams: planned minus fetched, by sample.
    std::unordered_map<SampleId, int32_t> outstanding;
    uint64_t fetched = 0;

    uint64_t window() const {  // positions planned and not taken
      if (shape.itemised) return outstanding.size();
      return cursor_epoch == 0 ? cursor - taken : epochs[0].order.size() - taken + cursor;
    }
  };
  struct Batch {
    uint64_t epoch = 0;
    uint64_t index = 0;
    std::vector<SampleId> samples;
  };
  enum class Next : uint8_t { kBatch, kEndOfEpoch, kUnknown };
  // The part of memory, and of what is not kept, that other nodes' requests may take.
  static constexpr uint64_t kServingOneIn = 8;

  Lookahead(Arena& arena, Residency& residency, const StoreQueue& stores, SchedulerCommon& common)
      : arena_(arena), residency_(residency), stores_(stores), common_(common) {}

  // `closed`: its number is used again. `job` was opened for the stream.
  StreamId Open(const StreamShape& shape, JobId job, std::optional<StreamId> closed);
  void Close(StreamId id);
  void Seek(StreamId id, uint64_t epoch, uint64_t first_position);
  // False: the answer comes too late.
  bool Extend(StreamId id, uint64_t generation, uint64_t epoch, std::vector<SampleId> order,
              bool last);
  void EndHorizon(StreamId id) { streams_[id].last_known = true; }
  // Orders that have become due since the last call.
  std::vector<OrderAction> TakeOrders();
  const std::vector<Stream>& streams() const { return streams_; }

  // What a consumer gets next.
  Next PeekNext(StreamId id) const;
  // With kBatch: its positions are not in the window any more.
  Batch TakeBatch(StreamId id);
  // With kEndOfEpoch: what is left of the epoch is dropped.
  void EndEpoch(StreamId id);
  // With kUnknown: whether nothing follows. If not, the order is asked for.
  bool AtEnd(StreamId id);
  // A sample of an itemised stream is fetched, and a fetch that is cancelled before it had its
  // sample was none.
  void OnFetch(StreamId id, SampleId s);
  void UndoFetch(StreamId id, SampleId s);

  // The most bytes that look-ahead may have in flight and ready together, in all streams; streams
  // share them evenly. Each may plan its next batch all the same, and samples that will be kept do
  // not count: their memory is taken either way.
  void SetReadAheadBytes(uint64_t bytes) { read_ahead_bytes_ = bytes; }
  // The stream whose turn it is.
  StreamId NextTurn() { return next_turn_++ % static_cast<StreamId>(streams_.size()); }
  // Whether there may be something to plan.
  bool MayAdvance(StreamId id) const {
    return streams_[id].open && streams_[id].blocked_at != arena_.frees();
  }
  // Plans positions until one needs a read (true, *out filled), or nothing more can be planned.
  // `joins`: it goes on with a request whose beginning the read-ahead limit has let through.
  bool Advance(StreamId id, ReadAction* out, size_t* budget, bool joins = false);
  // Whether `s` is what Advance would plan next.
  bool IsNext(StreamId id, SampleId s) const;
  // Takes back the position farthest from use, of the stream with the longest window.
  bool RetractOne();
  // Finds a block for an absent sample in what is free and within the staging share, and marks it
  // reading. `serving`: for another node; look-ahead leaves a part of that share to those.
  bool Allot(StreamId id, SampleId s, bool serving = false);
  // Whether the sample may be read now, as far as the job's limits go. What the folder has is free,
  // and so is what another node gives.
  bool MayRead(DatasetId d, SampleId s, JobId job);

  // What streams of this node will use beyond their windows, is not here and would be kept. What
  // lives here comes last: peers seldom have it, and it must not hide what they have.
  std::vector<SampleId> Upcoming(DatasetId d, size_t most) const;
  // Of one batch of each stream that has something to read.
  uint64_t batch_bytes() const;
  // Adds each stream's window to counts by data set and sample.
  void CountWindows(std::vector<std::vector<uint32_t>>* ahead) const;

 private:
  using Entry = Residency::Entry;
  using State = Residency::State;
  Entry& entry(DatasetId d, SampleId s) { return residency_.dataset(d).entries[s]; }
  void WantOrder(StreamId id);
  void Unplan(Stream& stream);
  void UnplanPosition(Stream& stream, SampleId s);
  // Calls `f` with each sample of the window, in order; not for itemised streams.
  template <typename F>
  static void ForWindow(const Stream& stream, F f);
  static void PopEpoch(Stream& stream);
  void PopFetched(StreamId id);
  bool MayReadAhead(const Stream& stream, SampleId s) const;
  bool StagingHasRoom(const Stream& stream, SampleId s, bool serving) const;
  size_t ActiveStreams() const;

  Arena& arena_;
  Residency& residency_;
  const StoreQueue& stores_;
  SchedulerCommon& common_;
  std::vector<Stream> streams_;
  size_t serving_streams_ = 0;
  StreamId next_turn_ = 0;  // round robin
  uint64_t read_ahead_bytes_ = ~uint64_t{0};
  std::vector<OrderAction> orders_;
};

}  // namespace forebay
