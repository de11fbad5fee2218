#include "core/home_plan.h"

#include <algorithm>
#include <utility>

#include "base/rng.h"

namespace forebay {
namespace {

class Digester {
 public:
  void Add(uint64_t value) { state_ = SplitMix64(state_ ^ value).Next(); }
  uint64_t Take() const { return state_ == 0 ? 1 : state_; }

 private:
  uint64_t state_ = 0x686f6d65706c616e;
};

bool SameRooms(std::span<const NodeTiers> a, std::span<const NodeTiers> b) {
  return std::ranges::equal(a, b, [](const NodeTiers& x, const NodeTiers& y) {
    return x.memory == y.memory && x.nvme == y.nvme;
  });
}

bool SameOrder(const SamplerSpec& a, const SamplerSpec& b) {
  return a.size == b.size && a.shuffle == b.shuffle && a.seed == b.seed && a.world == b.world &&
         a.drop_last == b.drop_last && a.exchange == b.exchange &&
         a.ranks_per_node == b.ranks_per_node;
}

// Copies of what the node uses most, in the room beside what lives there; where that leaves some,
// of anything that fits.
std::vector<bool> Replicas(const PlacementOptions& options, const Placement& placement,
                           std::span<const uint32_t> lengths, uint32_t node,
                           const PlanInterrupt* interrupt) {
  const std::vector<uint8_t> planned = PlanReplicas(options, placement, lengths, node, interrupt);
  const NodeTiers &had = options.nodes[node], &used = placement.used()[node];
  uint64_t room = had.memory - used.memory + had.nvme - used.nvme;
  std::vector<bool> replicas(lengths.size());
  for (SampleId s = 0; s < lengths.size(); ++s) {
    if (planned[s] == kNoReplica) continue;
    replicas[s] = true;
    room -= lengths[s];
  }
  for (SampleId s = 0; s < lengths.size(); ++s) {
    if (lengths[s] <= room) replicas[s] = true;
  }
  return replicas;
}

}  // namespace

bool HomePlanSpec::operator==(const HomePlanSpec& other) const {
  return SameOrder(sampler, other.sampler) && epochs == other.epochs && horizon == other.horizon &&
         SameRooms(rooms, other.rooms);
}

std::optional<HomePlanSpec> HomePlanSpec::For(const DatasetUse& use, uint32_t node,
                                              std::vector<NodeTiers> rooms) {
  const SamplerSpec& sampler = use.sampler;
  const uint64_t nodes = rooms.size();
  if (use.epochs == 0 || use.epoch >= use.epochs || sampler.exchange != 0 ||
      sampler.ranks_per_node == 0 || sampler.rank / sampler.ranks_per_node != node ||
      sampler.world != nodes * sampler.ranks_per_node) {
    return std::nullopt;
  }
  HomePlanSpec spec{.sampler = sampler,
                    .epochs = use.epochs,
                    .horizon = use.epoch / kMaxHorizonEpochs,
                    .rooms = std::move(rooms)};
  spec.sampler.rank = 0;
  const PlacementOptions options = spec.Options();
  if (!options.Validate().ok() || ChosenRule(options) == PlacementRule::kHash) return std::nullopt;
  return spec;
}

PlacementOptions HomePlanSpec::Options() const {
  PlacementOptions options;
  options.sampler = sampler;
  // Longer ones are counted to the end of the last horizon.
  options.epochs = static_cast<uint32_t>(std::min<uint64_t>(epochs, UINT32_MAX));
  options.ranks_per_node = sampler.ranks_per_node;
  options.nodes = rooms;
  return options;
}

uint64_t HomePlanBytes(const HomePlanSpec& spec) {
  // Homes, a bit, and, from the second horizon on, the plan before.
  const uint64_t kept = 2 + 1 + (spec.horizon > 0 ? 4 : 0);
  return PlanBytes(spec.Options()) + kept * spec.sampler.size;
}

Result<std::shared_ptr<const HomePlan>> PlanHomes(const HomePlanSpec& spec,
                                                  std::span<const uint32_t> lengths, uint32_t node,
                                                  const PlanInterrupt* interrupt) {
  PlacementOptions options = spec.Options();
  Result<Placement> placement = PlanPlacement(options, lengths, interrupt);
  for (uint64_t h = 0; h < spec.horizon && placement; ++h) {
    options = options.Next();
    placement = ExtendPlacement(*placement, options, lengths, interrupt);
  }
  if (!placement) return placement.error();
  auto plan = std::make_shared<HomePlan>();
  Digester digester;
  for (size_t n = 0; n < spec.rooms.size(); ++n) {
    const NodeTiers &had = spec.rooms[n], &used = placement->used()[n];
    plan->free.push_back({had.memory - used.memory, had.nvme - used.nvme});
    digester.Add(had.memory);
    digester.Add(had.nvme);
  }
  plan->homes.reserve(lengths.size());
  for (const uint32_t code : placement->codes()) {
    const bool nowhere = code == Placement::kNowhere;
    plan->homes.push_back(nowhere ? HomePlan::kNowhere : static_cast<uint16_t>(code >> 1));
    digester.Add(plan->homes.back());
  }
  plan->digest = digester.Take();
  plan->replicas = Replicas(options, *placement, lengths, node, interrupt);
  if (interrupt != nullptr && interrupt->Stopped()) {
    return Status(Code::kCancelled, "the plan is not wanted any more");
  }
  return std::shared_ptr<const HomePlan>(std::move(plan));
}

}  // namespace forebay
