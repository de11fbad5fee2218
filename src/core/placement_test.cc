#include "core/placement.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <functional>
#include <numeric>
#include <vector>

#include "base/rng.h"

namespace forebay {
namespace {

using Counts = std::vector<std::vector<uint32_t>>;  // [node][sample]

PlacementOptions World(uint32_t size, uint32_t world, uint32_t epochs,
                       std::vector<NodeTiers> nodes) {
  PlacementOptions options;
  options.sampler.size = size;
  options.sampler.world = world;
  options.epochs = epochs;
  options.ranks_per_node =
      (world + static_cast<uint32_t>(nodes.size()) - 1) / static_cast<uint32_t>(nodes.size());
  options.nodes = std::move(nodes);
  return options;
}

// Uses by node from what each rank's sampler yields, without the repeats that pad an epoch.
Counts CountUses(const PlacementOptions& options) {
  Counts counts(options.nodes.size(), std::vector<uint32_t>(options.sampler.size));
  for (uint32_t e = 0; e < options.Horizon(); ++e) {
    for (uint32_t r = 0; r < options.sampler.world; ++r) {
      SamplerSpec spec = options.sampler;
      spec.rank = r;
      const std::vector<SampleId> order = EpochOrder(spec, options.first_epoch + e);
      for (size_t i = 0; i < order.size(); ++i) {
        if (i * spec.world + r < spec.size) ++counts[options.NodeOf(r)][order[i]];
      }
    }
  }
  return counts;
}

// What must hold for every plan: capacities are kept, the statistics are those of the places, and
// who has no place fits nowhere.
void CheckPlan(const PlacementOptions& options, const std::vector<uint32_t>& lengths,
               const Placement& placement) {
  ASSERT_EQ(placement.size(), lengths.size());
  ASSERT_EQ(placement.used().size(), options.nodes.size());
  std::vector<NodeTiers> used(options.nodes.size());
  uint64_t covered = 0, covered_bytes = 0, memory = 0, memory_bytes = 0;
  for (SampleId s = 0; s < lengths.size(); ++s) {
    const std::optional<CopyPlace> place = placement.Locate(s);
    if (!place) continue;
    ++covered;
    covered_bytes += lengths[s];
    ASSERT_LT(place->node, used.size());
    if (place->tier == TierLevel::kMemory) {
      ++memory;
      memory_bytes += lengths[s];
      used[place->node].memory += lengths[s];
    } else {
      used[place->node].nvme += lengths[s];
    }
  }
  uint64_t most_free = 0;
  for (size_t n = 0; n < used.size(); ++n) {
    ASSERT_LE(used[n].memory, options.nodes[n].memory);
    ASSERT_LE(used[n].nvme, options.nodes[n].nvme);
    ASSERT_EQ(used[n].memory, placement.used()[n].memory);
    ASSERT_EQ(used[n].nvme, placement.used()[n].nvme);
    most_free = std::max({most_free, options.nodes[n].memory - used[n].memory,
                          options.nodes[n].nvme - used[n].nvme});
  }
  for (SampleId s = 0; s < lengths.size(); ++s) {
    ASSERT_TRUE(placement.Locate(s) || lengths[s] > most_free);
  }
  const PlacementStats& stats = placement.stats();
  ASSERT_EQ(stats.samples, lengths.size());
  ASSERT_EQ(stats.bytes, std::accumulate(lengths.begin(), lengths.end(), uint64_t{0}));
  ASSERT_EQ(stats.covered_samples, covered);
  ASSERT_EQ(stats.covered_bytes, covered_bytes);
  ASSERT_EQ(stats.memory_samples, memory);
  ASSERT_EQ(stats.memory_bytes, memory_bytes);
  ASSERT_NE(stats.rule, PlacementRule::kAuto);
  ASSERT_EQ(stats.horizon, options.Horizon());
}

// On each node nothing in NVMe is used more often than something in memory (equal lengths).
void CheckTierOrder(const Counts& counts, const Placement& placement) {
  for (uint32_t n = 0; n < counts.size(); ++n) {
    uint32_t least_memory = UINT32_MAX, most_nvme = 0;
    for (SampleId s = 0; s < placement.size(); ++s) {
      const std::optional<CopyPlace> place = placement.Locate(s);
      if (!place || place->node != n) continue;
      if (place->tier == TierLevel::kMemory) {
        least_memory = std::min(least_memory, counts[n][s]);
      } else {
        most_nvme = std::max(most_nvme, counts[n][s]);
      }
    }
    ASSERT_GE(least_memory, most_nvme) << "node " << n;
  }
}

uint64_t LocalUses(const Counts& counts, const Placement& placement) {
  uint64_t local = 0;
  for (SampleId s = 0; s < placement.size(); ++s) {
    if (const auto place = placement.Locate(s)) local += counts[place->node][s];
  }
  return local;
}

// Most local uses of all ways to place as many samples as there is room for.
uint64_t BestLocalUses(const Counts& counts, std::vector<uint64_t> slots, uint64_t skips) {
  const size_t size = counts[0].size();
  const std::function<uint64_t(size_t, uint64_t)> best = [&](size_t s, uint64_t left) -> uint64_t {
    if (s == size) return 0;
    uint64_t most = left > 0 ? best(s + 1, left - 1) : 0;
    for (size_t n = 0; n < slots.size(); ++n) {
      if (slots[n] == 0) continue;
      --slots[n];
      most = std::max(most, counts[n][s] + best(s + 1, left));
      ++slots[n];
    }
    return most;
  };
  return best(0, skips);
}

TEST(Placement, SmallWorldsAgainstAnOracle) {
  constexpr uint32_t kLength = 10;
  const std::vector<NodeTiers> kinds = {{0, 0}, {10, 0}, {0, 19}, {25, 10}, {10, 33}, {90, 90}};
  uint64_t worlds = 0, ours = 0, best = 0;
  for (uint32_t size = 1; size <= 5; ++size) {
    const std::vector<uint32_t> lengths(size, kLength);
    for (const uint32_t nodes : {1u, 2u, 3u}) {
      const auto ways = static_cast<size_t>(std::pow(kinds.size(), nodes));
      for (size_t way = 0; way < ways; ++way) {
        std::vector<NodeTiers> tiers;
        for (size_t n = 0, rest = way; n < nodes; ++n, rest /= kinds.size()) {
          tiers.push_back(kinds[rest % kinds.size()]);
        }
        for (const uint32_t epochs : {1u, 4u}) {
          PlacementOptions options = World(size, way % 2 == 0 ? nodes : 2 * nodes, epochs, tiers);
          options.sampler.seed = way;
          options.sampler.shuffle = way % 5 != 0;
          options.sampler.drop_last = way % 3 == 0;
          std::vector<uint64_t> slots;
          uint64_t room = 0;
          for (const NodeTiers& node : tiers) {
            slots.push_back(node.memory / kLength + node.nvme / kLength);
            room += slots.back();
          }
          const uint64_t coverable = std::min<uint64_t>(size, room);
          const Counts counts = CountUses(options);
          for (const auto rule : {PlacementRule::kFrequency, PlacementRule::kHash}) {
            options.rule = rule;
            const auto placement = PlanPlacement(options, lengths);
            ASSERT_TRUE(placement);
            ASSERT_NO_FATAL_FAILURE(CheckPlan(options, lengths, *placement));
            ASSERT_EQ(placement->stats().covered_samples, coverable);
            const auto again = PlanPlacement(options, lengths);
            ASSERT_TRUE(std::ranges::equal(again->codes(), placement->codes()));
            if (rule == PlacementRule::kHash) continue;
            ASSERT_NO_FATAL_FAILURE(CheckTierOrder(counts, *placement));
            const uint64_t local = LocalUses(counts, *placement);
            ASSERT_EQ(local, placement->stats().local_accesses);
            const uint64_t most = BestLocalUses(counts, slots, size - coverable);
            ASSERT_LE(local, most);
            ASSERT_GE(2 * local, most);
            ours += local;
            best += most;
          }
          ++worlds;
        }
      }
    }
  }
  EXPECT_GE(static_cast<double>(ours), 0.98 * static_cast<double>(best));
  std::printf("%llu worlds, local accesses %.4f of the best\n",
              static_cast<unsigned long long>(worlds),
              static_cast<double>(ours) / static_cast<double>(best));
}

TEST(Placement, WithRoomEverySampleLiesWhereItIsUsedMost) {
  for (uint64_t seed = 0; seed < 20; ++seed) {
    PlacementOptions options = World(500, 8, 12, std::vector<NodeTiers>(4, {300, 700}));
    options.sampler.seed = seed;
    const std::vector<uint32_t> lengths(500, 1);
    const Counts counts = CountUses(options);
    const auto placement = PlanPlacement(options, lengths);
    ASSERT_TRUE(placement);
    ASSERT_EQ(placement->stats().rule, PlacementRule::kFrequency);
    for (SampleId s = 0; s < 500; ++s) {
      const std::optional<CopyPlace> place = placement->Locate(s);
      ASSERT_TRUE(place);
      for (uint32_t n = 0; n < 4; ++n) ASSERT_GE(counts[place->node][s], counts[n][s]);
    }
    EXPECT_DOUBLE_EQ(LocalShare(options, *placement),
                     static_cast<double>(LocalUses(counts, *placement)) / (500 * 12));
  }
}

TEST(Placement, RandomWorldsOfUnequalSamplesAndNodes) {
  SplitMix64 rng(17);
  for (int round = 0; round < 400; ++round) {
    const auto nodes = static_cast<uint32_t>(1 + rng.Below(12));
    const auto world = static_cast<uint32_t>(nodes * (1 + rng.Below(4)));
    const auto size = static_cast<uint32_t>(rng.Below(600));
    std::vector<uint32_t> lengths(size);
    uint64_t bytes = 0;
    const bool equal = rng.Below(3) == 0;
    for (uint32_t& length : lengths) {
      length = static_cast<uint32_t>(equal ? 100 : rng.Below(200));
      bytes += length;
    }
    std::vector<NodeTiers> tiers(nodes);
    const uint64_t scale = 1 + 2 * (bytes / nodes) * (1 + rng.Below(3)) / 2;
    uint64_t capacity = 0;
    for (NodeTiers& node : tiers) {
      node = {rng.Below(scale), rng.Below(3) == 0 ? 0 : rng.Below(scale)};
      capacity += node.memory + node.nvme;
    }
    PlacementOptions options = World(size, world, static_cast<uint32_t>(rng.Below(8)), tiers);
    options.sampler.seed = rng.Next();
    options.sampler.drop_last = rng.Below(2) == 1;
    options.first_epoch = rng.Below(100);
    options.rule = static_cast<PlacementRule>(rng.Below(3));
    if (rng.Below(4) == 0) {
      for (uint32_t r = 0; r < world; ++r) {
        options.node_of_rank.push_back(static_cast<uint32_t>(rng.Below(nodes)));
      }
    }
    SCOPED_TRACE(StrCat("round ", round));
    const auto placement = PlanPlacement(options, lengths);
    ASSERT_TRUE(placement) << placement.error().ToString();
    ASSERT_NO_FATAL_FAILURE(CheckPlan(options, lengths, *placement));
    const uint64_t longest = size == 0 ? 0 : *std::ranges::max_element(lengths);
    // Each tier wastes less than one sample, so this much room is enough whatever the lengths are.
    if (capacity >= bytes + 2 * nodes * longest) {
      ASSERT_EQ(placement->stats().covered_samples, size);
    }
    if (equal && placement->stats().rule == PlacementRule::kFrequency) {
      ASSERT_NO_FATAL_FAILURE(CheckTierOrder(CountUses(options), *placement));
    }
  }
}

TEST(Placement, FrequenciesAreThoseOfTheSampler) {
  PlacementOptions options = World(101, 6, 7, std::vector<NodeTiers>(3));
  options.sampler.seed = 5;
  options.first_epoch = 2;
  const Counts counts = CountUses(options);
  uint64_t all = 0;
  for (uint32_t n = 0; n < 3; ++n) {
    const std::vector<uint16_t> frequency = NodeFrequency(options, n);
    ASSERT_TRUE(std::ranges::equal(frequency, counts[n]));
    all += std::accumulate(frequency.begin(), frequency.end(), uint64_t{0});
  }
  EXPECT_EQ(all, 101u * 7u);
}

TEST(Placement, GoldenVectors) {
  const std::vector<uint32_t> lengths = {5, 9, 3, 7, 4, 8, 6, 2, 9, 1, 5, 7};
  PlacementOptions options =
      World(12, 4, 6, std::vector<NodeTiers>{{10, 8}, {12, 0}, {0, 14}, {8, 6}});
  options.sampler.seed = 42;
  const auto codes = [&](PlacementRule rule) {
    options.rule = rule;
    const auto placement = PlanPlacement(options, lengths);
    return std::vector<int32_t>(placement->codes().begin(), placement->codes().end());
  };
  using Codes = std::vector<int32_t>;  // node * 2 + tier, -1: nowhere
  EXPECT_EQ(codes(PlacementRule::kFrequency), (Codes{0, -1, 6, -1, 0, 2, 1, 5, -1, 0, 6, 5}));
  EXPECT_EQ(codes(PlacementRule::kHash), (Codes{6, 2, 5, -1, 7, 1, 5, 0, -1, 0, 0, -1}));
}

TEST(Placement, TheRuleFollowsTheExpectedGain) {
  // 90 epochs: 4 nodes use their samples 30 % of the time instead of 25 %, 1,024 nodes 2 % instead
  // of 0.1 %.
  EXPECT_NEAR(ExpectedLocalShare(4, 90), 0.297, 0.005);
  EXPECT_NEAR(ExpectedLocalShare(1024, 90), 0.023, 0.002);
  EXPECT_DOUBLE_EQ(ExpectedLocalShare(1, 90), 1);
  EXPECT_DOUBLE_EQ(ExpectedLocalShare(7, 1), 1);
  const auto rule = [](uint32_t nodes, uint32_t epochs, bool shuffle) {
    PlacementOptions options = World(10, nodes, epochs, std::vector<NodeTiers>(nodes));
    options.sampler.shuffle = shuffle;
    return PlanPlacement(options, std::vector<uint32_t>(10, 1))->stats().rule;
  };
  EXPECT_EQ(rule(1, 90, true), PlacementRule::kHash);
  EXPECT_EQ(rule(4, 90, true), PlacementRule::kFrequency);
  EXPECT_EQ(rule(128, 90, true), PlacementRule::kFrequency);
  EXPECT_EQ(rule(1024, 90, true), PlacementRule::kHash);
  EXPECT_EQ(rule(1024, 5, true), PlacementRule::kFrequency);
  EXPECT_EQ(rule(1024, 90, false), PlacementRule::kFrequency);
}

TEST(Placement, LocalityGain) {
  const std::vector<uint32_t> lengths(20000, 1);
  for (const auto& [nodes, least] : {std::pair{2u, 0.53}, {4u, 0.29}, {16u, 0.10}, {64u, 0.045}}) {
    const PlacementOptions options =
        World(20000, nodes, 90, std::vector<NodeTiers>(nodes, {20000 / nodes / 4 + 1, 20000}));
    const auto placement = PlanPlacement(options, lengths);
    const double share = LocalShare(options, *placement);
    std::printf("%u nodes: %.4f of the accesses are local, by chance %.4f\n", nodes, share,
                1.0 / nodes);
    EXPECT_GT(share, least);
    EXPECT_NEAR(share, ExpectedLocalShare(nodes, 90), 0.02);
    PlacementOptions hashed = options;
    hashed.rule = PlacementRule::kHash;
    EXPECT_NEAR(LocalShare(hashed, *PlanPlacement(hashed, lengths)), 1.0 / nodes, 0.01);
  }
}

TEST(Placement, AnUnshuffledOrderIsAllLocal) {
  PlacementOptions options = World(1200, 8, 0, std::vector<NodeTiers>(4, {100, 200}));
  options.sampler.shuffle = false;
  const auto placement = PlanPlacement(options, std::vector<uint32_t>(1200, 1));
  EXPECT_EQ(placement->stats().covered_samples, 1200u);
  EXPECT_DOUBLE_EQ(LocalShare(options, *placement), 1);
}

TEST(Placement, TheHashFillsMemoryEvenlyBeforeNvme) {
  PlacementOptions options =
      World(100000, 4, 90, std::vector<NodeTiers>{{10000, 0}, {60000, 90000}, {60000, 0}, {0, 0}});
  options.rule = PlacementRule::kHash;
  const std::vector<uint32_t> lengths(100000, 1);
  const auto memory = PlanPlacement(options, lengths);
  EXPECT_NEAR(static_cast<double>(memory->used()[0].memory), 10000, 400);
  EXPECT_NEAR(static_cast<double>(memory->used()[1].memory), 45000, 1000);
  EXPECT_NEAR(static_cast<double>(memory->used()[2].memory), 45000, 1000);
  options.nodes = {{10000, 80000}, {30000, 20000}, {10000, 80000}, {0, 0}};
  const auto both = PlanPlacement(options, lengths);
  EXPECT_EQ(both->stats().covered_samples, 100000u);
  EXPECT_EQ(both->stats().memory_samples, 50000u);
  EXPECT_NEAR(static_cast<double>(both->used()[1].nvme), 16667, 1000);
}

TEST(Placement, AnExtendedHorizonKeepsWhatIsCovered) {
  SplitMix64 rng(23);
  int moved = 0, stayed = 0;
  for (int round = 0; round < 40; ++round) {
    const uint32_t size = 2000;
    std::vector<uint32_t> lengths(size, 50);
    if (round % 2 == 1) {
      for (uint32_t& length : lengths) length = static_cast<uint32_t>(1 + rng.Below(99));
    }
    // Room for a half, for just all of it, or for more than that.
    const uint64_t room = size * 50 / 8 * (1 + static_cast<uint64_t>(round % 3)) / 2;
    PlacementOptions options =
        World(size, 8, 0, std::vector<NodeTiers>(4, {room, room + room / 4}));
    options.sampler.seed = rng.Next();
    const auto first = PlanPlacement(options, lengths);
    const PlacementOptions next = options.Next();
    ASSERT_EQ(next.first_epoch, kHorizonEpochs);
    const auto second = ExtendPlacement(*first, next, lengths);
    ASSERT_TRUE(second);
    ASSERT_NO_FATAL_FAILURE(CheckPlan(next, lengths, *second));
    for (SampleId s = 0; s < size; ++s) {
      ASSERT_TRUE(!first->Locate(s) || second->Locate(s));
    }
    const bool same = std::ranges::equal(first->codes(), second->codes());
    ++(same ? stayed : moved);
    EXPECT_TRUE(same || LocalShare(next, *second) > LocalShare(next, *first));
    EXPECT_TRUE(!same || round % 2 == 1);  // equal lengths can always be packed again
    const auto again = ExtendPlacement(*first, next, lengths);
    ASSERT_TRUE(std::ranges::equal(again->codes(), second->codes()));
  }
  EXPECT_GE(moved, 20);
  std::printf("%d plans moved samples, %d stayed\n", moved, stayed);
}

TEST(Placement, ReplicasFillTheRoomThatIsLeft) {
  constexpr uint32_t kSize = 3000;
  const std::vector<uint32_t> lengths(kSize, 1);
  // Room for the data set once, one and a half times, and on every node.
  double before = 0;
  for (const uint64_t room : {1000u, 1500u, 3000u}) {
    const PlacementOptions options =
        World(kSize, 3, 20, std::vector<NodeTiers>(3, {room / 4, room - room / 4}));
    const auto placement = PlanPlacement(options, lengths);
    const Counts counts = CountUses(options);
    uint64_t local = 0, all = 0;
    for (uint32_t n = 0; n < 3; ++n) {
      const std::vector<uint8_t> replicas = PlanReplicas(options, *placement, lengths, n);
      NodeTiers used = placement->used()[n];
      uint32_t least_kept = UINT32_MAX, most_left = 0;
      for (SampleId s = 0; s < kSize; ++s) {
        const bool own = placement->Locate(s)->node == n;
        const bool copy = replicas[s] != kNoReplica;
        ASSERT_FALSE(own && copy);
        if (copy) ++(replicas[s] == 0 ? used.memory : used.nvme);
        if (own || copy) local += counts[n][s];
        all += counts[n][s];
        if (own) continue;
        if (copy) least_kept = std::min(least_kept, counts[n][s]);
        if (!copy) most_left = std::max(most_left, counts[n][s]);
      }
      ASSERT_LE(used.memory, options.nodes[n].memory);
      ASSERT_LE(used.nvme, options.nodes[n].nvme);
      ASSERT_GE(least_kept, most_left);
    }
    const double share = static_cast<double>(local) / static_cast<double>(all);
    EXPECT_GT(share, before);
    before = share;
  }
  EXPECT_DOUBLE_EQ(before, 1);
}

TEST(Placement, HorizonsOfKnownAndUnknownLength) {
  PlacementOptions options = World(10, 2, 0, std::vector<NodeTiers>(2));
  EXPECT_EQ(options.Horizon(), kHorizonEpochs);
  EXPECT_EQ(options.Next().epochs, 0u);
  options.epochs = 250;
  options.first_epoch = 3;
  EXPECT_EQ(options.Horizon(), kMaxHorizonEpochs);
  EXPECT_EQ(options.Next().first_epoch, 3u + kMaxHorizonEpochs);
  EXPECT_EQ(options.Next().epochs, 250u - kMaxHorizonEpochs);
  EXPECT_EQ(options.Next().Next().Horizon(), 250u - 2 * kMaxHorizonEpochs);
  // A plan by hash does not depend on the horizon.
  options.rule = PlacementRule::kHash;
  options.nodes.assign(2, {3, 1});
  const std::vector<uint32_t> lengths(10, 1);
  const auto plan = PlanPlacement(options, lengths);
  const auto extended = ExtendPlacement(*plan, options.Next(), lengths);
  EXPECT_TRUE(std::ranges::equal(plan->codes(), extended->codes()));
}

TEST(Placement, TheBytesOfAPlanAreCounted) {
  const std::vector<uint32_t> lengths(10000, 1);
  for (const auto& [nodes, id] : {std::pair{255u, 1u}, {256u, 2u}}) {
    PlacementOptions options = World(10000, nodes, 96, std::vector<NodeTiers>(nodes, {10, 30}));
    options.rule = PlacementRule::kFrequency;
    const auto placement = PlanPlacement(options, lengths);
    ASSERT_NO_FATAL_FAILURE(CheckPlan(options, lengths, *placement));
    EXPECT_EQ(placement->stats().covered_samples, 10000u);
    EXPECT_GE(placement->stats().peak_bytes, 10000u * (96 * id + 12));
    EXPECT_LE(placement->stats().peak_bytes, 10000u * 256);
    EXPECT_LE(placement->KeptBytes(), 10000u * 24);
  }
}

TEST(Placement, OptionsThatDoNotFitAreRefused) {
  const std::vector<uint32_t> lengths(10, 1);
  const auto refused = [&](const std::function<void(PlacementOptions&)>& change) {
    PlacementOptions options = World(10, 4, 2, std::vector<NodeTiers>(2, {5, 5}));
    change(options);
    const auto plan = PlanPlacement(options, lengths);
    return !plan && plan.error().code() == Code::kInvalidArgument;
  };
  EXPECT_FALSE(refused([](PlacementOptions&) {}));
  EXPECT_TRUE(refused([](PlacementOptions& o) { o.nodes.clear(); }));
  EXPECT_TRUE(refused([](PlacementOptions& o) { o.nodes.resize(1); }));
  EXPECT_TRUE(refused([](PlacementOptions& o) { o.ranks_per_node = 0; }));
  EXPECT_TRUE(refused([](PlacementOptions& o) { o.node_of_rank = {0, 1}; }));
  EXPECT_TRUE(refused([](PlacementOptions& o) { o.node_of_rank = {0, 1, 2, 0}; }));
  EXPECT_TRUE(refused([](PlacementOptions& o) { o.sampler.world = 0; }));
  EXPECT_TRUE(refused([](PlacementOptions& o) { o.sampler.size = 11; }));
  EXPECT_TRUE(refused([](PlacementOptions& o) { o.nodes[0].nvme = UINT64_MAX; }));
  const auto plan = PlanPlacement(World(10, 4, 2, std::vector<NodeTiers>(2, {5, 5})), lengths);
  EXPECT_FALSE(ExtendPlacement(*plan, World(9, 4, 2, std::vector<NodeTiers>(2, {5, 5})),
                               std::vector<uint32_t>(9, 1)));
}

}  // namespace
}  // namespace forebay
