// PlaceWatch: whether a place that copies are read from (a cache folder) is used, or left because
// it does not answer. Pure: times are handed in.
//
// A place that owes an answer and has given none for its patience is left: what it was asked for is
// read from the source, and nothing more is asked of it but one probe at a time. A probe that is
// answered in time brings it back. Pauses between probes double, also over a place that comes back
// only to fail again; one that has served for long starts anew.
#pragma once

#include "base/nanos.h"
#include "core/cost_model.h"

namespace forebay {

// Not safe for concurrent use.
class PlaceWatch {
 public:
  // What Patience lies between, unless the source itself takes longer. Less than the least may be a
  // thread that waits for a processor.
  static constexpr Nanos kLeastPatience = 500 * kMilli;
  static constexpr Nanos kMostPatience = kSecond;
  static constexpr Nanos kFirstPause = 250 * kMilli;
  static constexpr Nanos kLongestPause = 30 * kSecond;
  static constexpr Nanos kServedLong = 60 * kSecond;

  // How long the place may owe an answer. `tail`: what its reads never take (OriginModel::Tail);
  // `source`: what one of the source takes; 0: not known.
  static Nanos Patience(Nanos tail, Nanos source);

  bool left() const { return left_; }
  // `silent`: for how long it has owed an answer and given none. True: it is left from now on.
  bool Suspects(Nanos now, Nanos silent, Nanos patience);
  // A probe is to be sent now; at most one is under way.
  bool ProbeDue(Nanos now) const { return left_ && !probing_ && now >= probe_at_; }
  void OnProbeSent() { probing_ = true; }
  // It was answered, with the bytes or without, after `took`. True: the place is used again.
  bool OnProbeAnswered(Nanos now, Nanos took, Nanos patience);

 private:
  void PauseLonger();

  bool left_ = false;
  bool probing_ = false;
  Nanos used_since_ = 0;
  Nanos pause_ = 0;  // before the last probe; 0: none yet
  Nanos probe_at_ = 0;
};

}  // namespace forebay
