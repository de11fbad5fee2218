// HomePlan: the homes of one data set's samples by who uses them, where the order is known.
//
// A pure function of what every node of a job knows alike: the sampler, the last epoch, each node's
// room and the samples' lengths. The digest proves to another node that it has the same one.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "base/status.h"
#include "core/placement.h"
#include "core/sampler.h"

namespace forebay {

// How the streams of one node use a data set.
struct DatasetUse {
  SamplerSpec sampler;  // of one of its ranks
  uint64_t epochs = 0;  // training ends with epoch epochs - 1
  uint64_t epoch = 0;   // the one that is being used
};

// What a plan is made from, beside the lengths. Alike on every node.
struct HomePlanSpec {
  SamplerSpec sampler;  // as rank 0
  uint64_t epochs = 0;
  uint64_t horizon = 0;  // epochs from horizon * kMaxHorizonEpochs on are counted
  std::vector<NodeTiers> rooms;
  bool operator==(const HomePlanSpec&) const;

  // Nothing: the use says too little for `node` (ranks that exchange samples, or lie elsewhere), or
  // the hash is as good.
  static std::optional<HomePlanSpec> For(const DatasetUse& use, uint32_t node,
                                         std::vector<NodeTiers> rooms);
  PlacementOptions Options() const;  // of the first horizon
};

struct HomePlan {
  static constexpr uint16_t kNowhere = UINT16_MAX;

  std::vector<uint16_t> homes;  // by sample
  std::vector<bool> replicas;   // what the node keeps beside what lives there
  std::vector<NodeTiers> free;  // of each node, beside what lives there
  uint64_t digest = 0;          // of homes and rooms; never 0
};

// The plan of spec.horizon as `node` wants it: its replicas are its own matter. Horizons before it
// are planned in turn, so that who comes late gets the same one. kCancelled by `interrupt`.
Result<std::shared_ptr<const HomePlan>> PlanHomes(const HomePlanSpec& spec,
                                                  std::span<const uint32_t> lengths, uint32_t node,
                                                  const PlanInterrupt* interrupt = nullptr);

// Bytes that PlanHomes has allocated at most, the plan and the lengths included.
uint64_t HomePlanBytes(const HomePlanSpec& spec);

}  // namespace forebay
