#include "core/locality.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <vector>

#include "base/rng.h"
#include "core/home.h"

namespace forebay {
namespace {

using Order = std::vector<SampleId>;

SamplerSpec Spec(uint32_t size, uint32_t world, uint32_t batch, uint32_t ranks_per_node = 1) {
  SamplerSpec spec;
  spec.size = size;
  spec.world = world;
  spec.seed = 5;
  spec.exchange = batch;
  spec.ranks_per_node = ranks_per_node;
  return spec;
}

// What all ranks take in their step `k` after global position `start`, sorted.
Order GlobalBatch(SamplerSpec spec, uint64_t epoch, uint64_t start, size_t k, uint32_t batch) {
  Order all;
  for (spec.rank = 0; spec.rank < spec.world; ++spec.rank) {
    const Order mine = EpochOrder(spec, epoch, start);
    const size_t begin = std::min(mine.size(), k * batch);
    const size_t end = std::min(mine.size(), begin + batch);
    all.insert(all.end(), mine.begin() + static_cast<ptrdiff_t>(begin),
               mine.begin() + static_cast<ptrdiff_t>(end));
  }
  std::sort(all.begin(), all.end());
  return all;
}

TEST(Locality, GlobalBatchesAreExactlyTheSampler) {
  SplitMix64 rng(3);
  for (int round = 0; round < 60; ++round) {
    const auto batch = static_cast<uint32_t>(1 + rng.Below(9));
    SamplerSpec local =
        Spec(static_cast<uint32_t>(1 + rng.Below(200)), static_cast<uint32_t>(1 + rng.Below(12)),
             batch, static_cast<uint32_t>(1 + rng.Below(4)));
    local.seed = rng.Next();
    local.drop_last = rng.Below(2) == 1;
    local.shuffle = rng.Below(4) != 0;
    SamplerSpec plain = local;
    plain.exchange = 0;
    const uint64_t start = rng.Below(local.TotalSize() + 1) / local.world * local.world;
    const size_t steps = local.RankSize() / batch + 2;
    for (size_t k = 0; k < steps; ++k) {
      ASSERT_EQ(GlobalBatch(local, 7, start, k, batch), GlobalBatch(plain, 7, start, k, batch));
    }
    for (local.rank = 0; local.rank < local.world; ++local.rank) {
      plain.rank = local.rank;
      ASSERT_EQ(EpochOrder(local, 7, start).size(), EpochOrder(plain, 7, start).size());
    }
  }
}

TEST(Locality, GoesOnInTheMiddleAndAtAnotherWorldSize) {
  // 240 samples a step on 4, 3 and 5 nodes.
  const SamplerSpec four = Spec(5000, 4, 60);
  SamplerSpec rank = four;
  for (rank.rank = 0; rank.rank < 4; ++rank.rank) {
    const Order whole = EpochOrder(rank, 1), rest = EpochOrder(rank, 1, 720);
    ASSERT_EQ(rest, Order(whole.begin() + 180, whole.end()));
  }
  const SamplerSpec three = Spec(5000, 3, 80), five = Spec(5000, 5, 48);
  for (size_t k = 0; k < 17; ++k) {
    const Order expected = GlobalBatch(four, 1, 720, k, 60);
    ASSERT_EQ(GlobalBatch(three, 1, 720, k, 80), expected) << k;
    ASSERT_EQ(GlobalBatch(five, 1, 720, k, 48), expected) << k;
  }
}

TEST(Locality, MostSamplesAreReadWhereTheyLive) {
  const uint64_t epoch = 2;
  // Four nodes with a rank each, 64 samples a rank; chance gives a quarter.
  EXPECT_GT(LocalShare(Spec(20000, 4, 64), epoch), 0.93);
  EXPECT_GT(LocalShare(Spec(20000, 16, 16, 4), epoch), 0.93);
  EXPECT_GT(LocalShare(Spec(20000, 8, 8), epoch), 0.8);
  SamplerSpec plain = Spec(20000, 4, 0);
  EXPECT_NEAR(LocalShare(plain, epoch), 0.25, 0.02);
  EXPECT_EQ(LocalShare(Spec(500, 4, 10, 4), epoch), 1);  // one node
}

TEST(Locality, NoBatchCouldBeMoreLocal) {
  SplitMix64 rng(9);
  constexpr uint32_t kWorld = 7, kRanks = 2, kNodes = 4;  // the last node has one rank
  Exchange exchange(kWorld, kRanks);
  for (int round = 0; round < 50; ++round) {
    const size_t each = 1 + rng.Below(20);
    Order batch(each * kWorld);
    for (SampleId& s : batch) s = static_cast<SampleId>(rng.Below(100000));
    std::vector<uint32_t> owner(batch.size());
    exchange.Assign(batch, owner);
    std::vector<size_t> at_home(kNodes), local(kNodes), got(kWorld);
    for (size_t i = 0; i < batch.size(); ++i) {
      const uint32_t home = HomeOf(batch[i], kNodes).node;
      ++at_home[home];
      ++got[owner[i]];
      if (owner[i] / kRanks == home) ++local[home];
    }
    for (const size_t count : got) ASSERT_EQ(count, each);
    for (uint32_t n = 0; n < kNodes; ++n) {
      ASSERT_EQ(local[n], std::min(at_home[n], each * (n == 3 ? 1 : kRanks)));
    }
  }
}

// Frozen: nodes with different builds must agree on who gets what.
TEST(Locality, GoldenVectors) {
  SamplerSpec spec = Spec(24, 3, 4);
  EXPECT_EQ(EpochOrder(spec, 0), (Order{11, 6, 10, 3, 20, 21, 1, 18}));
  spec.rank = 2;
  EXPECT_EQ(EpochOrder(spec, 0), (Order{0, 16, 2, 12, 22, 14, 15, 7}));
}

}  // namespace
}  // namespace forebay
