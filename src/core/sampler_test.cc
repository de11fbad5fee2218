#include "core/sampler.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <vector>

namespace forebay {
namespace {

using Order = std::vector<SampleId>;

// Golden vectors from PyTorch 2.13: g.manual_seed(seed); torch.randperm(n, generator=g).
TEST(RandPerm, GoldenVectors) {
  Mt19937 seven(7);
  EXPECT_EQ(RandPerm(10, seven), (Order{5, 0, 3, 4, 1, 7, 9, 6, 8, 2}));
  Mt19937 again(7);
  EXPECT_EQ(RandPerm(0, again), Order{});
  EXPECT_EQ(RandPerm(1, again), Order{0});
  EXPECT_EQ(RandPerm(10, again), (Order{5, 0, 3, 4, 1, 7, 9, 6, 8, 2}));
}

TEST(RandPerm, TheOneForManySamplesIsInsideOut) {
  for (const uint32_t n : {0u, 1u, 2u, 63u, 64u, 65u, 1000u}) {
    Mt19937 rng(7);
    Mt19937 again(7);
    Order plain;
    for (uint32_t i = 0; i < n; ++i) {
      const uint64_t high = again.Next();
      const auto at = static_cast<size_t>((high << 32 | again.Next()) % (i + 1));
      plain.push_back(i);
      plain[i] = plain[at];
      plain[at] = i;
    }
    ASSERT_EQ(InsideOutPerm(n, rng), plain) << n;
    ASSERT_EQ(rng.Next(), again.Next()) << n;
  }
}

TEST(DistributedSampler, EveryRankTogetherIsThePaddedPermutation) {
  SplitMix64 rng(3);
  for (int round = 0; round < 200; ++round) {
    SamplerSpec spec;
    spec.size = static_cast<uint32_t>(1 + rng.Below(50));
    spec.world = static_cast<uint32_t>(1 + rng.Below(70));
    spec.seed = rng.Next();
    spec.drop_last = rng.Below(2) == 1;
    spec.shuffle = rng.Below(4) != 0;
    ASSERT_TRUE(spec.Validate().ok());
    std::vector<int> seen(spec.size);
    uint64_t total = 0;
    for (spec.rank = 0; spec.rank < spec.world; ++spec.rank) {
      const Order order = EpochOrder(spec, 5);
      ASSERT_EQ(order.size(), spec.RankSize());
      total += order.size();
      for (SampleId s : order) ++seen[s];
    }
    ASSERT_EQ(total, spec.TotalSize());
    const auto [low, high] = std::minmax_element(seen.begin(), seen.end());
    ASSERT_LE(*high - *low, 1);
  }
}

TEST(DistributedSampler, ResumeAtAnotherWorldSizeContinuesTheGlobalOrder) {
  SamplerSpec one;
  one.size = 1000;
  one.seed = 11;
  const Order global = EpochOrder(one, 2);
  SamplerSpec four = one;
  four.world = 4;
  for (four.rank = 0; four.rank < 4; ++four.rank) {
    const Order rest = EpochOrder(four, 2, 640);
    for (size_t i = 0; i < rest.size(); ++i) ASSERT_EQ(rest[i], global[640 + four.rank + 4 * i]);
  }
  EXPECT_TRUE(EpochOrder(one, 2, 1000).empty());
}

TEST(RankOrders, RanksShareOnePermutation) {
  RankOrders orders;
  SamplerSpec spec;
  spec.size = 101;
  spec.world = 4;
  for (uint64_t epoch = 0; epoch < 3; ++epoch) {
    for (spec.rank = 0; spec.rank < 4; ++spec.rank) {
      ASSERT_EQ(orders.Order(spec, epoch, 0), EpochOrder(spec, epoch));
      ASSERT_EQ(orders.Order(spec, epoch, 40), EpochOrder(spec, epoch, 40));
    }
  }
  EXPECT_EQ(orders.computed(), 3u);
  spec.rank = 0;
  for (const uint32_t size : {100u, 101u}) {  // another data set, and back
    spec.size = size;
    ASSERT_EQ(orders.Order(spec, 2, 0), EpochOrder(spec, 2));
  }
  orders.Forget();
  ASSERT_EQ(orders.Order(spec, 2, 0), EpochOrder(spec, 2));
  EXPECT_EQ(orders.computed(), 6u);
  spec.shuffle = false;
  ASSERT_EQ(orders.Order(spec, 2, 0), EpochOrder(spec, 2));
  EXPECT_TRUE(orders.Order(spec, 2, 1000).empty());
  EXPECT_EQ(orders.computed(), 6u);
}

TEST(DistributedSampler, BadRankIsAnError) {
  SamplerSpec spec;
  spec.size = 10;
  spec.rank = 2;
  spec.world = 2;
  EXPECT_EQ(spec.Validate().code(), Code::kInvalidArgument);
}

TEST(TorchGenerator, DamagedStateIsAnError) {
  EXPECT_FALSE(TorchGenerator::FromState(std::vector<std::byte>(100)).has_value());
  EXPECT_FALSE(TorchGenerator::FromState(std::vector<std::byte>(5056)).has_value());
}

}  // namespace
}  // namespace forebay
