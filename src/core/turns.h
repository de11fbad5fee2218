// Whose request is served next. Pure: the caller passes the time.
//
// Peers take turns, so that one that asks for much cannot keep the others waiting; rates of single
// links and of all together hold requests back. Every queue is bounded.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <optional>
#include <vector>

#include "base/nanos.h"
#include "catalog/catalog.h"
#include "core/rate_limit.h"

namespace forebay::peer {

struct Turn {
  uint32_t node = 0;
  uint32_t dataset = 0;  // this node's number
  uint32_t request = 0;
  SampleId sample = 0;
  uint64_t bytes = 0;
  bool held_only = false;
  bool urgent = false;      // a consumer waits for it
  uint64_t connection = 0;  // that it came by; its answer goes nowhere else
  uint64_t plan = 0;        // digest of the asker's homes; 0: by hash
};

// Not safe for concurrent use.
class Turns {
 public:
  static constexpr size_t kMostWaiting = 4096;  // of one peer

  explicit Turns(uint32_t nodes) : queues_(nodes) {}

  // Bytes a second; 0: no limit.
  void SetRates(uint64_t all, uint64_t link, Nanos now);
  // Urgent ones stand before the others of their peer. False: the peer's queue is full.
  bool Add(const Turn& turn);
  // The next one that may go, of at most `room` bytes. What is larger than `room` waits with all
  // behind it, so that large samples come to their turn, too.
  std::optional<Turn> Next(uint64_t room, Nanos now);
  void Cancel(uint32_t node, uint32_t request);
  void Drop(uint32_t node);
  size_t waiting() const { return waiting_; }
  // When Next may have one that a rate holds back; kNeverReady: none is.
  Nanos ready_at() const { return waiting_ == 0 ? kNeverReady : ready_at_; }

 private:
  struct Queue {
    std::deque<Turn> turns;
    TokenBucket rate;
  };
  std::vector<Queue> queues_;
  std::deque<uint32_t> ring_;  // nodes that have requests waiting, next first
  TokenBucket rate_;
  size_t waiting_ = 0;
  Nanos ready_at_ = kNeverReady;
};

}  // namespace forebay::peer
