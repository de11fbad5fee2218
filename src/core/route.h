// Whom to ask for a sample. Pure: no clock, thread or I/O.
#pragma once

#include <cstdint>
#include <span>

#include "base/nanos.h"
#include "core/cost_model.h"
#include "core/directory.h"

namespace forebay::peer {

// What a node can be asked for, of one data set.
enum class Reach : uint8_t {
  kNone,         // dead, or its connection is gone
  kExpected,     // alive, and not yet connected or without the data set so far
  kUnannounced,  // can be asked; it has not said yet what it holds
  kReady,
};

struct Choice {
  enum class To : uint8_t {
    kSource,
    kPeer,
    kWait,  // for a home that is about to come
  };
  To to = To::kSource;
  uint32_t node = kNoNode;
  bool held_only = false;  // it is not the sample's home: it does not read it from the source
};

// `reach` by node. `may_wait`: the data set is new, its other homes may be about to come.
Choice Choose(const Found& found, uint32_t self, std::span<const Reach> reach, bool may_wait);

// Whether a peer has become so slow that the source is the better place. Never for one that answers
// as healthy peers do: the source is shared by all nodes. Not safe for concurrent use.
class PeerCost {
 public:
  static constexpr int kSlower = 4;  // than the source
  static constexpr Nanos kProbeEvery = 250 * kMilli;
  static constexpr int kMostRefused = 32;  // in a row

  // `healthy`: what an answer may take in any case. Nodes whose processors are all busy answer late
  // now and then; that is no reason to load the source.
  explicit PeerCost(Nanos healthy) : healthy_(healthy) {}

  void OnAsk(Nanos now);
  void OnAnswer(uint64_t bytes, size_t depth, Nanos latency, Nanos now);
  // Ended without bytes, at once or after a time that tells of the peer.
  void OnFailure(Nanos now);
  // The peer has other versions of the files, or no room: after many in a row it is asked for no
  // more than a probe.
  void OnRefused(Nanos now);
  void OnTimeout(uint64_t bytes, size_t depth, Nanos waited, Nanos now);
  size_t in_flight() const { return in_flight_; }
  // True: read from the source. Lets one through now and then, to see whether the peer is well
  // again.
  bool Avoid(uint64_t bytes, const OriginModel& source, size_t source_depth, Nanos now);

 private:
  // Whether one goes through now.
  bool Probe(Nanos now);

  const Nanos healthy_;
  OriginModel model_;
  size_t in_flight_ = 0;
  Nanos active_at_ = 0;  // the last answer, or the first ask after none was under way
  Nanos probed_ = 0;
  int refused_ = 0;  // since the last answer
};

}  // namespace forebay::peer
