// EpochLog: what each epoch of a stream has cost, as its batches are handed out. Kept by whoever
// hands them out: the engine, a port to one, a pipeline.
#pragma once

#include <cstdint>
#include <deque>
#include <vector>

#include "base/nanos.h"
#include "metrics/stall.h"

namespace forebay {

// An epoch has an entry from its first batch or wait on. Not safe for concurrent use.
class EpochLog {
 public:
  // The consumer asks for what comes next, which begins an epoch unless one is under way.
  void Begin(Nanos now);
  bool under_way() const { return under_way_; }
  // A batch is handed out. `timed`: the time since the one before it is kept, too.
  void Count(uint64_t epoch, uint64_t samples, uint64_t bytes, Nanos now, bool timed = true);
  void Waited(StallCause cause, Nanos waited);
  // A wait behind what was handed out last.
  void WaitedAfter(StallCause cause, Nanos waited);
  // The epoch under way is over, by itself or by a seek. Its entry; null: it has none.
  EpochStats* End(Nanos now);
  // No epoch has begun after all: the stream is over.
  void EndOfStream();
  // Finished epochs and the one under way, oldest first: the last 1,000.
  std::vector<EpochStats> Stats(Nanos now) const;
  // Whether the last entry is of the epoch under way.
  bool has_current() const { return has_entry_; }

 private:
  EpochStats& Current();

  std::deque<EpochStats> epochs_;
  bool under_way_ = false;
  bool has_entry_ = false;  // the epoch under way does
  Nanos start_ = 0;
  Nanos last_handout_ = 0;
};

}  // namespace forebay
