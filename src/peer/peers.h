// Peers: this node's part in the cluster's cache.
//
// It stands between the engine's tiers and its source: a read of a sample that lives with another
// node asks that node, which reads it from the source once for everyone and keeps it. Whatever
// happens to a peer, a read ends as the source would end it. It also serves the others from the
// engine's memory, and tells them what this node holds.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "base/clock.h"
#include "base/status.h"
#include "peer/cluster.h"
#include "stage/engine.h"

namespace forebay::peer {

struct PeerOptions {
  ClusterSpec cluster;
  Nanos lease = 5 * kSecond;         // a silent peer is dead after so long
  Nanos request_wait = 2 * kSecond;  // a request without an answer goes to the source
  Nanos join_wait = 10 * kSecond;    // reads wait so long, at most, for the first whole view
  bool coordinate = true;            // false: every node reads for itself (to show the difference)
  uint64_t bytes_per_second = 0;     // out of this node, all links together; 0: no limit
  uint64_t link_bytes_per_second = 0;  // to one peer; 0: no limit
  Status Validate() const;
};

// What this node has seen of another one, for reports and `forebay status`.
struct PeerStatus {
  uint32_t node = 0;
  std::string address;
  std::string state;   // "connected", "connecting", "silent", "dead", "refused"
  std::string fault;   // the last thing that went wrong, in words; empty: nothing did
  uint64_t reads = 0;  // samples that came from it
  uint64_t bytes = 0;
  uint64_t served = 0;  // samples that it took from here
  uint64_t served_bytes = 0;
  uint64_t timeouts = 0;  // requests that went to the source instead, by reason
  uint64_t refused = 0;
  uint64_t corrupt = 0;
  uint64_t lost = 0;       // with their connection
  int64_t latency_ns = 0;  // typical, of a read; 0: not known
};

class Peers {
 public:
  // Must be made before the engine's first data set, and destroyed before the engine. Returns at
  // once; nothing is asked of peers before the first view.
  static Result<std::unique_ptr<Peers>> Attach(Engine& engine, const PeerOptions& options);
  virtual ~Peers() = default;
  virtual std::vector<PeerStatus> Seen() const = 0;
  // "4 nodes by torchrun's variables, ucx 1.13 (tcp) at 10.0.0.1:7421".
  virtual std::string Describe() const = 0;
};

}  // namespace forebay::peer
