// The performance simulator: how long a job takes under each policy, in virtual time.
//
// Exact accesses: every rank reads what the sampler (core/sampler.h) gives it, sample by sample. A
// rank consumes a sample at max(available, end of the previous one), and all ranks meet at a
// barrier after every batch. Threads, clocks and I/O are only figures. docs/simulator.md has the
// formulas and the model of each policy.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "base/status.h"
#include "catalog/catalog.h"
#include "sim/holders.h"
#include "sim/scenario.h"

namespace forebay::sim {

// What Forebay's planner chooses from, by the time that it predicts for the job.
enum class Plan : uint8_t {
  kByNode,  // core/placement.h, and second copies in spare room
  kByRank,  // each rank keeps what it reads most often, alone
  kNone,    // nothing is kept: the source is faster than the tiers
};

struct Outcome {
  Policy policy = Policy::kLowerBound;
  std::string infeasible;      // why the policy cannot run this scenario; nothing below then counts
  double seconds = 0;          // of the job, staging before it included
  double staging_seconds = 0;  // before the first batch
  std::vector<double> epoch_seconds;  // of the simulated epochs
  uint32_t simulated_epochs = 0;
  uint32_t planned_epochs = 0;  // that frequencies were counted over; 0: the policy counts none
  double stall_seconds = 0;     // that a rank waited for samples, mean, in the simulated epochs
  // Read in the simulated epochs and while staging, by all ranks, in MB.
  double source_mb = 0;
  double peer_mb = 0;
  double local_mb = 0;
  double read_share = 1;       // of the data set that training can ever see
  bool global_shuffle = true;  // false: a rank sees only its own part of the data set
  double uncovered_share = 0;  // of the samples that no tier keeps; NoPFS and Forebay
  Plan plan = Plan::kByNode;   // Forebay
};

// (accesses done, accesses in all); false stops the run with kCancelled.
using ProgressFn = std::function<bool(uint64_t done, uint64_t total)>;

// One scenario; policies run one after the other. Used by one thread.
class Simulation {
 public:
  static Result<Simulation> Make(Scenario scenario);

  // Forebay predicts the job under each Plan and takes the fastest.
  Result<Outcome> Run(Policy policy, const ProgressFn& progress = nullptr);

  const Scenario& scenario() const { return scenario_; }
  uint32_t simulated_epochs() const { return simulated_; }
  // What the ranks read in an epoch: rank r takes the elements r, r + world, ...
  std::span<const SampleId> Order(uint32_t epoch);
  double SizeMb(SampleId sample) const {
    return sizes_.empty() ? scenario_.sample_mb : static_cast<double>(sizes_[sample]);
  }

 private:
  explicit Simulation(Scenario scenario);
  Result<Outcome> RunOne(Policy policy, const ProgressFn& progress);

  Scenario scenario_;
  uint32_t simulated_ = 0;
  std::vector<float> sizes_;                   // empty: all alike
  std::vector<std::vector<SampleId>> orders_;  // of the epochs asked for so far, where they fit
  std::vector<SampleId> order_;                // of the epoch asked for last, elsewhere
};

}  // namespace forebay::sim
