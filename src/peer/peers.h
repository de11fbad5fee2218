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
#include "transport/choose.h"

namespace forebay::peer {

struct PeerOptions {
  ClusterSpec cluster;
  Nanos lease = 5 * kSecond;         // a silent peer is dead after so long
  Nanos request_wait = 2 * kSecond;  // a request without an answer goes to the source
  Nanos join_wait = 10 * kSecond;    // reads wait so long, at most, for the first whole view
  bool coordinate = true;            // false: every node reads for itself (to show the difference)
  bool by_use = true;  // homes by use where the order is known to its end (docs/decisions/0065)
  TransportKind transport = TransportKind::kAuto;
  uint64_t bytes_per_second = 0;       // out of this node, all links together; 0: no limit
  uint64_t link_bytes_per_second = 0;  // to one peer; 0: no limit
  Status Validate() const;
};

// What this node has seen of another one, for reports and `forebay status`.
using PeerStatus = PeerReport;

class Peers {
 public:
  // Must be made before the engine's first data set, and destroyed before the engine. Returns at
  // once; nothing is asked of peers before the first view.
  static Result<std::unique_ptr<Peers>> Attach(Engine& engine, const PeerOptions& options);
  virtual ~Peers() = default;
  virtual std::vector<PeerStatus> Seen() const = 0;
  // "4 nodes by torchrun's variables, tcp at 10.0.0.1:7421".
  virtual std::string Describe() const = 0;
  // Whom its transport trusts beyond the job's members, for a log; empty: nobody.
  virtual std::string Trust() const { return ""; }
};

}  // namespace forebay::peer
