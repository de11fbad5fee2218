// What an engine tells of its cluster: filled by peer/peers.h, shown by statistics and status.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace forebay {

// What this node has seen of another one.
struct PeerReport {
  uint32_t node = 0;
  std::string address;
  std::string state;    // "connected", "connecting", "silent", "dead", "refused"
  std::string fault;    // the last thing that went wrong, in words; empty: nothing did
  uint64_t faults = 0;  // how often something did
  uint64_t reads = 0;   // samples that came from it
  uint64_t bytes = 0;
  uint64_t served = 0;  // samples that it took from here
  uint64_t served_bytes = 0;
  uint64_t timeouts = 0;  // requests that went to the source instead, by reason
  uint64_t refused = 0;
  uint64_t corrupt = 0;
  uint64_t lost = 0;       // with their connection
  int64_t latency_ns = 0;  // typical, of a read; 0: not known
};

struct ClusterReport {
  uint32_t node = 0;   // this one
  uint32_t nodes = 0;  // of the job; 0: there are no peers
  bool coordinated = false;
  std::string description;  // "4 nodes by torchrun's variables, tcp at 10.0.0.1:7421"
  std::string health;       // why nothing new is known of the members, or, with 0 nodes, why there
                            // are no peers though they were meant to be; empty: all is well
  std::vector<PeerReport> peers;
};

}  // namespace forebay
