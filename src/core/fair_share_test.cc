#include "core/fair_share.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <numeric>
#include <vector>

#include "base/rng.h"

namespace forebay::control {
namespace {

double Sum(const std::vector<double>& values) {
  return std::accumulate(values.begin(), values.end(), 0.0);
}

double Want(const Claim& claim) { return std::min(claim.demand, claim.cap); }

std::vector<Claim> RandomClaims(SplitMix64& rng, double scale) {
  std::vector<Claim> claims(1 + rng.Below(12));
  for (Claim& claim : claims) {
    claim.demand = rng.Below(5) == 0 ? kUnlimited : rng.Below(5) == 0 ? 0 : rng.Uniform() * scale;
    claim.weight = rng.Below(3) == 0 ? 1 : 0.1 + rng.Uniform() * 10;
    if (rng.Below(3) == 0) claim.guarantee = rng.Uniform() * scale / 4;
    if (rng.Below(3) == 0) claim.cap = rng.Uniform() * scale;
    claim.priority = static_cast<int32_t>(rng.Below(3)) - 1;
  }
  return claims;
}

TEST(FairShare, SharesFollowWeights) {
  const std::vector<double> given =
      DivideFairly(100, std::vector<Claim>{{kUnlimited, 3}, {kUnlimited, 1}});
  EXPECT_DOUBLE_EQ(given[0], 75);
  EXPECT_DOUBLE_EQ(given[1], 25);
}

TEST(FairShare, WhatOneLeavesTheOthersTakeByWeight) {
  const std::vector<double> given =
      DivideFairly(100, std::vector<Claim>{{10, 3}, {kUnlimited, 2}, {kUnlimited, 1}});
  EXPECT_DOUBLE_EQ(given[0], 10);
  EXPECT_DOUBLE_EQ(given[1], 60);
  EXPECT_DOUBLE_EQ(given[2], 30);
}

TEST(FairShare, AGuaranteeCountsTowardsTheShare) {
  const std::vector<double> given =
      DivideFairly(100, std::vector<Claim>{{kUnlimited, 1, 40}, {kUnlimited, 1}});
  EXPECT_DOUBLE_EQ(given[0], 50);
  const std::vector<double> more =
      DivideFairly(100, std::vector<Claim>{{kUnlimited, 1, 80}, {kUnlimited, 1}});
  EXPECT_DOUBLE_EQ(more[0], 80);
  EXPECT_DOUBLE_EQ(more[1], 20);
}

TEST(FairShare, AHigherClassComesFirstAfterAllGuarantees) {
  const std::vector<double> given = DivideFairly(
      100, std::vector<Claim>{{kUnlimited, 1, 20, kUnlimited, 0}, {70, 1, 0, kUnlimited, 1}});
  EXPECT_DOUBLE_EQ(given[0], 30);
  EXPECT_DOUBLE_EQ(given[1], 70);
  const std::vector<double> greedy = DivideFairly(
      100,
      std::vector<Claim>{{kUnlimited, 1, 20, kUnlimited, 0}, {kUnlimited, 1, 0, kUnlimited, 1}});
  EXPECT_DOUBLE_EQ(greedy[0], 20);
  EXPECT_DOUBLE_EQ(greedy[1], 80);
}

TEST(FairShare, GuaranteesThatDoNotFitAreCutAlike) {
  const std::vector<double> given = DivideFairly(
      60, std::vector<Claim>{{kUnlimited, 9, 80}, {kUnlimited, 1, 40}, {kUnlimited, 5}});
  EXPECT_DOUBLE_EQ(given[0], 40);
  EXPECT_DOUBLE_EQ(given[1], 20);
  EXPECT_DOUBLE_EQ(given[2], 0);
}

TEST(FairShare, WithoutAKnownCapacityOnlyCapsBind) {
  const std::vector<double> given =
      DivideFairly(kUnlimited, std::vector<Claim>{{kUnlimited, 1, 0, 7}, {5}, {kUnlimited}});
  EXPECT_EQ(given, (std::vector<double>{7, 5, kUnlimited}));
}

TEST(FairShare, NonsenseCountsAsNothing) {
  const double nan = std::numeric_limits<double>::quiet_NaN();
  const std::vector<double> given =
      DivideFairly(10, std::vector<Claim>{{nan}, {-5}, {kUnlimited, nan}, {4, 1, nan, nan}});
  EXPECT_EQ(given, (std::vector<double>{0, 0, 10, 0}));
  EXPECT_EQ(DivideFairly(nan, std::vector<Claim>{{1}}), std::vector<double>{0});
  EXPECT_TRUE(DivideFairly(10, {}).empty());
}

// The properties that define the division, on random claims.
TEST(FairShare, RandomClaims) {
  for (uint64_t seed = 0; seed < 3000; ++seed) {
    SCOPED_TRACE(seed);
    SplitMix64 rng(seed);
    const double scale = 1e3 * (1 + static_cast<double>(rng.Below(1'000'000)));
    const double capacity = rng.Below(20) == 0 ? 0 : rng.Uniform() * scale * 4;
    const std::vector<Claim> claims = RandomClaims(rng, scale);
    const std::vector<double> given = DivideFairly(capacity, claims);
    ASSERT_EQ(given.size(), claims.size());
    const double tiny = 1e-9 * (capacity + scale);

    double guaranteed = 0;
    double wanted = 0;
    for (const Claim& claim : claims) {
      guaranteed += std::min(Want(claim), claim.guarantee);
      wanted += Want(claim);
    }
    EXPECT_LE(Sum(given), capacity + tiny);
    EXPECT_GE(Sum(given), std::min(capacity, wanted) - tiny) << "not work conserving";
    for (size_t i = 0; i < claims.size(); ++i) {
      EXPECT_GE(given[i], 0);
      EXPECT_LE(given[i], Want(claims[i]) + tiny);
      if (guaranteed <= capacity) {
        EXPECT_GE(given[i], std::min(Want(claims[i]), claims[i].guarantee) - tiny);
      }
      if (guaranteed > capacity || given[i] >= Want(claims[i]) - tiny) continue;
      // A claim that wants more could take it only from one that holds no more than its guarantee,
      // comes before it, or has no more of its weight's part.
      for (size_t j = 0; j < claims.size(); ++j) {
        if (j == i || given[j] <= std::min(Want(claims[j]), claims[j].guarantee) + tiny) continue;
        EXPECT_GE(claims[j].priority, claims[i].priority) << i << " " << j;
        if (claims[j].priority == claims[i].priority) {
          EXPECT_LE(given[j] / claims[j].weight, given[i] / claims[i].weight * (1 + 1e-9) + tiny)
              << i << " " << j;
        }
      }
    }
  }
}

TEST(FairShare, TheOrderOfClaimsDoesNotMatter) {
  SplitMix64 rng(7);
  std::vector<Claim> claims = RandomClaims(rng, 100);
  while (claims.size() < 6) claims = RandomClaims(rng, 100);
  std::vector<double> given = DivideFairly(150, claims);
  std::reverse(claims.begin(), claims.end());
  std::reverse(given.begin(), given.end());
  const std::vector<double> turned = DivideFairly(150, claims);
  for (size_t i = 0; i < given.size(); ++i) EXPECT_NEAR(given[i], turned[i], 1e-9);
}

TEST(FairShare, ManyJobs) {
  SplitMix64 rng(1);
  std::vector<Claim> claims(10'000);
  for (Claim& claim : claims) claim = {rng.Uniform() * 1e6, 1 + rng.Uniform(), rng.Uniform() * 1e5};
  const std::vector<double> given = DivideFairly(2e9, claims);
  EXPECT_NEAR(Sum(given), 2e9, 1);
}

}  // namespace
}  // namespace forebay::control
