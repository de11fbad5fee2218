// Placement: which node and which of its tiers should hold each sample.
//
// A pure function of the sampler, the nodes' capacities and the samples' lengths: every node
// computes the same answer alone, and finding a sample is an array look-up. As much of the data set
// as the cluster can hold is placed once; copies are for the room that is left. docs/placement.md
// explains the rules and proves what they reach.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "base/status.h"
#include "catalog/catalog.h"
#include "core/sampler.h"

namespace forebay {

// Epochs that are counted when their number is not known.
inline constexpr uint32_t kHorizonEpochs = 90;
// Epochs that are counted at most: two bytes each keep a plan below 256 bytes a sample.
inline constexpr uint32_t kMaxHorizonEpochs = 96;
// Frequency decides when it is expected to make this share of the accesses more local than chance.
inline constexpr double kMinLocalityGain = 0.025;

// Bytes of a node's tiers: what they may hold, or what they hold.
struct NodeTiers {
  uint64_t memory = 0;
  uint64_t nvme = 0;
};

enum class TierLevel : uint8_t { kMemory = 0, kNvme = 1 };

struct CopyPlace {
  uint32_t node = 0;
  TierLevel tier = TierLevel::kMemory;
  bool operator==(const CopyPlace&) const = default;
};

enum class PlacementRule : uint8_t {
  kAuto,       // by frequency where that gains kMinLocalityGain, by hash elsewhere
  kFrequency,  // with the node that uses the sample most
  kHash,       // evenly, by the hash of the sample's number
};

struct PlacementOptions {
  SamplerSpec sampler;       // its rank does not matter
  uint64_t first_epoch = 0;  // of the horizon
  uint32_t epochs = 0;       // from first_epoch to the end of training; 0: not known
  // Rank r runs on node node_of_rank[r], or on r / ranks_per_node where node_of_rank is empty.
  uint32_t ranks_per_node = 1;
  std::vector<uint32_t> node_of_rank;
  std::vector<NodeTiers> nodes;
  PlacementRule rule = PlacementRule::kAuto;

  Status Validate() const;
  uint32_t NodeOf(uint32_t rank) const {
    return node_of_rank.empty() ? rank / ranks_per_node : node_of_rank[rank];
  }
  // Epochs that the plan counts.
  uint32_t Horizon() const;
  // The options of the horizon after this one.
  PlacementOptions Next() const;
};

// Says whether a plan is still wanted; asked now and then by the thread that plans.
class PlanInterrupt {
 public:
  virtual ~PlanInterrupt() = default;
  virtual bool Stopped() const = 0;
};

struct PlacementStats {
  PlacementRule rule = PlacementRule::kHash;  // the one that was taken, never kAuto
  uint32_t horizon = 0;
  uint64_t samples = 0;
  uint64_t bytes = 0;
  uint64_t covered_samples = 0;
  uint64_t covered_bytes = 0;
  uint64_t memory_samples = 0;
  uint64_t memory_bytes = 0;
  // Accesses of the horizon by the node that holds the sample; counted by kFrequency only.
  uint64_t local_accesses = 0;
  // Most bytes that planning had allocated at once, the caller's lengths included.
  uint64_t peak_bytes = 0;
};

// Immutable after planning; safe for concurrent use by multiple threads.
class Placement {
 public:
  // Nothing: the cluster has no room for this sample.
  std::optional<CopyPlace> Locate(SampleId sample) const {
    const uint32_t code = codes_[sample];
    if (code == kNowhere) return std::nullopt;
    return CopyPlace{code >> 1, static_cast<TierLevel>(code & 1)};
  }
  uint32_t size() const { return static_cast<uint32_t>(codes_.size()); }
  const PlacementStats& stats() const { return stats_; }
  // Bytes placed in each node's tiers.
  std::span<const NodeTiers> used() const { return used_; }
  // One word a sample: node * 2 + tier, or kNowhere.
  static constexpr uint32_t kNowhere = UINT32_MAX;
  std::span<const uint32_t> codes() const { return codes_; }
  // What the plan occupies from now on.
  uint64_t KeptBytes() const;

 private:
  friend class PlacementPlanner;
  Placement() = default;

  std::vector<uint32_t> codes_;
  std::vector<NodeTiers> used_;
  PlacementStats stats_;
};

// Plans the horizon that starts at options.first_epoch. lengths[s]: the room that sample s takes in
// a tier (a tier that rounds up wants rounded lengths). A sample stays without a place only when no
// tier of any node has room left for it. kCancelled once `interrupt` says so.
Result<Placement> PlanPlacement(const PlacementOptions& options, std::span<const uint32_t> lengths,
                                const PlanInterrupt* interrupt = nullptr);

// Plans the next horizon. What `previous` covers stays covered, so that no sample is read from the
// source again; samples only move to the nodes that will use them most. Where the new packing would
// leave one out, and by hash, it is the previous plan.
Result<Placement> ExtendPlacement(const Placement& previous, const PlacementOptions& next,
                                  std::span<const uint32_t> lengths,
                                  const PlanInterrupt* interrupt = nullptr);

// The rule that PlanPlacement takes; never kAuto.
PlacementRule ChosenRule(const PlacementOptions& options);

// What PlanPlacement by frequency and PlanReplicas allocate at most, `lengths` included.
uint64_t PlanBytes(const PlacementOptions& options);

// How often each sample is used on `node` in the horizon. Repeats that pad an epoch to a multiple
// of the world size are not counted, here nor in the plan.
std::vector<uint16_t> NodeFrequency(const PlacementOptions& options, uint32_t node,
                                    const PlanInterrupt* interrupt = nullptr);

// What `node` may keep beside its part of the placement, in the room that this leaves there: copies
// of what it uses most often, the most often used in memory. Each node decides for itself; the
// others need not know. One byte a sample: a TierLevel, or kNoReplica.
inline constexpr uint8_t kNoReplica = 255;
std::vector<uint8_t> PlanReplicas(const PlacementOptions& options, const Placement& placement,
                                  std::span<const uint32_t> lengths, uint32_t node,
                                  const PlanInterrupt* interrupt = nullptr);

// Share of the horizon's accesses that are made on the node that holds the sample.
double LocalShare(const PlacementOptions& options, const Placement& placement);

// The share to expect when each sample lies with the node that uses it most and the ranks are
// spread evenly; 1 / nodes is what chance gives.
double ExpectedLocalShare(uint32_t nodes, uint32_t epochs);

}  // namespace forebay
