// What the performance simulator is told: a cluster, its storage, a data set and a job.
//
// Rates are in MB/s and sizes in MB of 2^20 bytes; times are in seconds.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/status.h"

namespace forebay::sim {

// What p0 staging threads of one worker get together.
enum class Accounting : uint8_t {
  // They share what the source, the link and a class give: bandwidth is conserved, and the
  // source's curve counts reads in flight.
  kConserving,
  // The formulas of the NoPFS study as printed: each thread alone gets t(workers)/workers, r_j/p_j
  // or the whole link, so p0 threads get p0 times as much. The source's curve counts workers.
  kStudy,
};

// A storage class of a node; the first one is memory, a second one is local storage.
struct TierSpec {
  std::string name;
  double mb = 0;
  double mb_per_s = 0;
  double threads = 1;  // that reach mb_per_s
};

struct Scenario {
  uint32_t nodes = 1;
  uint32_t ranks_per_node = 1;  // they share the node's classes and link
  std::vector<TierSpec> tiers;  // of a node

  double staging_mb = 0;         // of a rank
  double staging_mb_per_s = 0;   // write rate of all its threads
  uint32_t staging_threads = 1;  // p0

  double network_mb_per_s = 0;                      // of a node
  std::vector<std::pair<double, double>> source;    // (readers, MB/s of all), readers rising
  Accounting accounting = Accounting::kConserving;  // see there

  uint32_t samples = 0;
  double sample_mb = 0;        // mean
  double sample_sigma_mb = 0;  // standard deviation, of a log-normal distribution

  double compute_mb_per_s = 0;     // c, of a rank
  double preprocess_mb_per_s = 0;  // beta, of one staging thread
  uint32_t batch = 1;              // of a rank
  uint32_t epochs = 1;
  uint64_t seed = 0;
  // Accesses simulated a policy; beyond them the last simulated epoch stands for the rest.
  uint64_t max_accesses = 100'000'000;

  Status Validate() const;

  uint32_t World() const { return nodes * ranks_per_node; }
  double DatasetMb() const { return sample_mb * samples; }
  double NodeMb() const;
  // The source's rate for `readers` at a time: linear between the points, proportional before the
  // first, constant after the last.
  double SourceRate(double readers) const;
};

enum class Policy : uint8_t {
  kLowerBound,
  kNaive,
  kStagingBuffer,
  kDoubleBuffer,
  kLru,
  kSharding,
  kDeepIoOrdered,
  kDeepIoOpportunistic,
  kParallelStaging,
  kLbannDynamic,
  kLbannPreload,
  kLocality,
  kMonarch,
  kNoPfs,
  kForebay,
};
inline constexpr int kPolicies = 15;

// As scenario files write it, and as a person reads it.
std::string_view PolicyName(Policy policy);
std::string_view PolicyTitle(Policy policy);
Result<Policy> ParsePolicy(std::string_view name);

}  // namespace forebay::sim
