// Coordination of many nodes: who reads what from the source and who serves whom, access by access.
//
// It runs the engine's own code for homes, reports and routes (core/directory.h, core/route.h) on
// the orders that the ranks really have; nothing is timed. For more nodes than a test bed has.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "base/status.h"
#include "sim/simulate.h"

namespace forebay::sim {

struct PeerRules {
  bool coordinate = true;  // false: every node reads for itself and keeps what it reads first
  bool locality = false;   // ranks exchange samples of a global batch (core/locality.h)
};

// The job runs so many epochs on so many nodes, and goes on in the next phase: nodes that stay keep
// what they hold, new ones hold nothing.
struct PeerPhase {
  uint32_t nodes = 1;
  uint32_t epochs = 1;
};

struct PeerEpoch {
  uint32_t nodes = 0;
  uint64_t reads = 0;  // of samples, by all ranks
  uint64_t local = 0;  // of these, from the rank's own node
  // MB from the source, and between nodes.
  double source_mb = 0;
  double peer_mb = 0;
  // What the busiest direction of all links carries, divided by what a node's ranks read on
  // average: in the epoch, and in a step (a global batch).
  double hottest_link = 0;
  double hottest_link_step = 0;
  double source_vs_dataset() const { return dataset_mb > 0 ? source_mb / dataset_mb : 0; }
  double local_share() const {
    return reads > 0 ? static_cast<double>(local) / static_cast<double>(reads) : 0;
  }
  double dataset_mb = 0;
};

// The job of `simulation`'s scenario (its data set, tiers, ranks a node, batch and seed) in these
// phases; one entry an epoch. kInvalidArgument where who holds what would take over 1 GiB.
Result<std::vector<PeerEpoch>> SimulatePeers(Simulation& simulation,
                                             std::span<const PeerPhase> phases,
                                             const PeerRules& rules,
                                             const ProgressFn& progress = nullptr);

}  // namespace forebay::sim
