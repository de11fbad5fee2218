#include "core/division.h"

#include <gtest/gtest.h>

#include <cmath>
#include <string>
#include <vector>

#include "base/rng.h"

namespace forebay::control {
namespace {

StageSummary Stage(std::string node, std::string job, double bytes, double operations = 0) {
  StageSummary stage;
  stage.node = std::move(node);
  stage.job = std::move(job);
  stage.demand = {bytes, operations};
  return stage;
}

Policy Shares(double a, double b) {
  Policy policy;
  for (const auto& [name, share] : {std::pair<std::string, double>("a", a), {"b", b}}) {
    JobRule& rule = policy.jobs.emplace_back();
    rule.match = name;
    rule.share = share;
  }
  return policy;
}

TEST(Division, JobsByShareAndNodesByDemand) {
  const std::vector<StageSummary> stages = {Stage("1", "a", kUnlimited), Stage("2", "a", 10),
                                            Stage("1", "b", kUnlimited)};
  const auto limits = DivideSource(Shares(3, 1), stages, {100, kUnlimited});
  EXPECT_NEAR(limits[0].bytes_per_s, 65, 1e-6);
  EXPECT_NEAR(limits[1].bytes_per_s, 10, 1e-6);
  EXPECT_NEAR(limits[2].bytes_per_s, 25, 1e-6);
  EXPECT_EQ(limits[0].operations_per_s, kUnlimited);
}

TEST(Division, AnIdleJobKeepsAFootInTheDoor) {
  const std::vector<StageSummary> stages = {Stage("1", "a", 0), Stage("1", "b", kUnlimited)};
  const auto limits = DivideSource(Shares(3, 1), stages, {100, kUnlimited});
  EXPECT_NEAR(limits[0].bytes_per_s, 0.75, 1e-6);
  EXPECT_NEAR(limits[1].bytes_per_s, 99.25, 1e-6);
}

TEST(Division, WhatNobodyAsksForIsHandedOut) {
  const std::vector<StageSummary> stages = {Stage("1", "a", 10), Stage("1", "b", 10)};
  const auto limits = DivideSource(Shares(3, 1), stages, {100, kUnlimited});
  EXPECT_NEAR(limits[0].bytes_per_s, 10 + 60, 1e-6);
  EXPECT_NEAR(limits[1].bytes_per_s, 10 + 20, 1e-6);
}

TEST(Division, MinimaAndMaximaHoldForAJobOnAllNodes) {
  Policy policy = Shares(1, 1);
  policy.jobs[0].max_bandwidth = 30;
  policy.jobs[1].min_operations = 80;
  const std::vector<StageSummary> stages = {
      Stage("1", "a", kUnlimited, kUnlimited), Stage("2", "a", kUnlimited, kUnlimited),
      Stage("1", "b", 20, kUnlimited), Stage("3", "b", 20, kUnlimited)};
  const auto limits = DivideSource(policy, stages, {100, 100});
  EXPECT_NEAR(limits[0].bytes_per_s + limits[1].bytes_per_s, 30, 1e-6);
  EXPECT_NEAR(limits[2].bytes_per_s + limits[3].bytes_per_s, 70, 1e-6);
  EXPECT_NEAR(limits[0].operations_per_s + limits[1].operations_per_s, 20, 1e-6);
  EXPECT_NEAR(limits[2].operations_per_s, 40, 1e-6);
}

TEST(Division, WithoutAKnownCapacityOnlyMaximaBind) {
  Policy policy = Shares(1, 1);
  policy.jobs[0].max_bandwidth = 30;
  const std::vector<StageSummary> stages = {Stage("1", "a", kUnlimited), Stage("2", "a", 0),
                                            Stage("1", "b", 0)};
  const auto limits = DivideSource(policy, stages, {});
  EXPECT_NEAR(limits[0].bytes_per_s + limits[1].bytes_per_s, 30, 1e-6);
  EXPECT_GT(limits[1].bytes_per_s, 0);
  EXPECT_EQ(limits[2].bytes_per_s, kUnlimited);
}

TEST(Division, NobodyIsShutOutAndNothingIsOverbooked) {
  const char* names[] = {"a", "b", "c", "d"};
  for (uint64_t seed = 0; seed < 500; ++seed) {
    SplitMix64 rng(seed);
    Policy policy = Shares(1 + rng.Uniform() * 10, 1);
    policy.jobs[0].priority = static_cast<int32_t>(rng.Below(3));
    if (rng.Below(2) == 0) policy.jobs[1].min_bandwidth = rng.Uniform() * 150;
    std::vector<StageSummary> stages;
    for (uint64_t i = 0; i < 1 + rng.Below(20); ++i) {
      stages.push_back(Stage(std::to_string(i), names[rng.Below(4)],
                             rng.Below(3) == 0 ? kUnlimited : rng.Uniform() * 50));
    }
    double sum = 0;
    for (const RateLimits& limit : DivideSource(policy, stages, {100, kUnlimited})) {
      EXPECT_GT(limit.bytes_per_s, 0) << seed;
      sum += limit.bytes_per_s;
    }
    EXPECT_NEAR(sum, 100, 1e-6) << seed;
  }
  EXPECT_TRUE(DivideSource({}, {}, {1, 1}).empty());
}

TEST(Division, WhatIsHandedOutBeyondTheCapacityIsTheLargestJobs) {
  std::vector<StageSummary> stages = {Stage("1", "a", kUnlimited), Stage("2", "b", kUnlimited)};
  Policy policy = Shares(3, 1);
  auto limits = DivideSource(policy, stages, {100, kUnlimited}, {10, 0});
  EXPECT_NEAR(limits[0].bytes_per_s, 85, 1e-6);
  EXPECT_NEAR(limits[1].bytes_per_s, 25, 1e-6);
  policy.jobs[0].max_bandwidth = 80;
  limits = DivideSource(policy, stages, {100, kUnlimited}, {10, 0});
  EXPECT_NEAR(limits[0].bytes_per_s, 80, 1e-6);
  EXPECT_NEAR(limits[1].bytes_per_s, 30, 1e-6);
  stages[0].demand.bytes_per_s = 50;  // and no more
  limits = DivideSource(policy, stages, {100, kUnlimited}, {10, 0});
  EXPECT_NEAR(limits[0].bytes_per_s, 50, 1e-6);
  EXPECT_NEAR(limits[1].bytes_per_s, 60, 1e-6);
  // A node's engine keeps the proportion of its jobs.
  stages = {Stage("1", "a", kUnlimited), Stage("1", "b", kUnlimited), Stage("2", "a", kUnlimited)};
  limits = DivideSource(Shares(3, 1), stages, {100, kUnlimited}, {10, 0});
  EXPECT_NEAR(limits[0].bytes_per_s + limits[2].bytes_per_s, 82.5, 1e-6);
  EXPECT_NEAR(limits[1].bytes_per_s, 27.5, 1e-6);
}

}  // namespace
}  // namespace forebay::control
