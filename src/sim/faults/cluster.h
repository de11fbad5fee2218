// A whole cluster in one thread on a virtual clock: the engines, peers and memberships of the
// product, with a simulated network, source and consumers, under a schedule of faults. An oracle
// looks at every batch, at every message, and at the end at what the nodes believe.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>

#include "base/clock.h"
#include "sim/faults/schedule.h"

namespace forebay::sim {

struct FaultRun {
  uint64_t seed = 0;                                // of the cluster, its data, and all chance
  std::optional<Schedule> schedule = std::nullopt;  // none: the seed's
  bool trace = false;                               // what happens goes to stdout
};

struct FaultOutcome {
  // What the oracle found first, as one word and in a line; empty: nothing.
  std::string violation;
  std::string what;
  Schedule schedule;
  // Two runs of one seed and schedule are the same in all of it.
  uint64_t hash = 0;
  uint64_t batches = 0;
  uint64_t source_reads = 0;
  uint64_t peer_reads = 0;
  uint64_t events = 0;
  Nanos virtual_time = 0;
  Nanos longest_wait = 0;  // of a consumer, beyond faults of its own source
  uint32_t nodes = 0;
  bool ok() const { return violation.empty(); }
};

FaultOutcome RunFaults(const FaultRun& run);

// The shortest schedule that is found to fail in the same way. `runs`: at most so many are tried.
Schedule Shrink(const FaultRun& run, const FaultOutcome& failed, int runs);

// The one command that does it again. `bug`: what was planted, or empty.
std::string ReplayCommand(uint64_t seed, const Schedule& schedule, const std::string& bug);

}  // namespace forebay::sim
