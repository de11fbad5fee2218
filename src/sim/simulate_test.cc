#include "sim/simulate.h"

#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <vector>

#include "base/rng.h"
#include "core/sampler.h"

namespace forebay::sim {
namespace {

// Figures that divide evenly: one rank of eight samples of 1 MB, computing 10 MB/s, from a source
// of 20 MB/s; preprocessing and staging cost nothing to speak of.
Scenario Tiny() {
  Scenario s;
  s.staging_mb = 4;
  s.staging_mb_per_s = 1e12;
  s.staging_threads = 1;
  s.network_mb_per_s = 40;
  s.source = {{1, 20}};
  s.samples = 8;
  s.sample_mb = 1;
  s.compute_mb_per_s = 10;
  s.preprocess_mb_per_s = 1e12;
  s.batch = 1;
  s.epochs = 2;
  s.seed = 7;
  return s;
}

Scenario Pair() {
  Scenario s = Tiny();
  s.nodes = 2;
  s.tiers = {{"memory", 4, 400, 1}};
  s.source = {{1, 5}};
  return s;
}

Outcome Simulated(const Scenario& scenario, Policy policy) {
  Result<Simulation> simulation = Simulation::Make(scenario);
  EXPECT_TRUE(simulation) << simulation.status().ToString();
  Result<Outcome> outcome = simulation->Run(policy);
  EXPECT_TRUE(outcome) << outcome.status().ToString();
  return *outcome;
}

double Seconds(const Scenario& scenario, Policy policy) {
  return Simulated(scenario, policy).seconds;
}

constexpr double kClose = 1e-6;

TEST(Simulation, LowerBoundIsComputeAlone) {
  EXPECT_NEAR(Seconds(Tiny(), Policy::kLowerBound), 2 * 8 * 0.1, kClose);
  Scenario two = Tiny();
  two.nodes = 2;
  EXPECT_NEAR(Seconds(two, Policy::kLowerBound), 2 * 4 * 0.1, kClose);
  EXPECT_EQ(Simulated(two, Policy::kLowerBound).source_mb, 0);
}

TEST(Simulation, NaiveReadsThenComputes) {
  EXPECT_NEAR(Seconds(Tiny(), Policy::kNaive), 2 * 8 * (0.05 + 0.1), kClose);
  Scenario two = Tiny();
  two.nodes = 2;
  two.source = {{1, 20}, {2, 30}};  // 15 MB/s for each of two
  EXPECT_NEAR(Seconds(two, Policy::kNaive), 2 * 4 * (1.0 / 15 + 0.1), kClose);
  EXPECT_NEAR(Simulated(two, Policy::kNaive).source_mb, 16, kClose);
}

TEST(Simulation, StagingBufferHidesAFastSource) {
  // Only the first sample is waited for.
  EXPECT_NEAR(Seconds(Tiny(), Policy::kStagingBuffer), 0.05 + 16 * 0.1, kClose);
}

TEST(Simulation, StagingBufferIsBoundByASlowSource) {
  Scenario s = Tiny();
  s.source = {{1, 5}};
  EXPECT_NEAR(Seconds(s, Policy::kStagingBuffer), 16 * 0.2 + 0.1, kClose);
  EXPECT_NEAR(Simulated(s, Policy::kStagingBuffer).stall_seconds, 16 * 0.2 + 0.1 - 1.6, kClose);
}

TEST(Simulation, DoubleBufferStartsAnewEveryEpoch) {
  EXPECT_NEAR(Seconds(Tiny(), Policy::kDoubleBuffer), 2 * (0.05 + 8 * 0.1), kClose);
}

TEST(Simulation, PreprocessingAndStagingWritesCountAsTheStudySays) {
  Scenario s = Tiny();
  s.preprocess_mb_per_s = 4;  // 0.25 s a sample, above 0.125 s of the write
  s.staging_mb_per_s = 8;
  EXPECT_NEAR(Seconds(s, Policy::kStagingBuffer), 16 * (0.05 + 0.25) + 0.1, kClose);
  s.preprocess_mb_per_s = 1e12;
  EXPECT_NEAR(Seconds(s, Policy::kStagingBuffer), 16 * (0.05 + 0.125) + 0.1, kClose);
}

TEST(Simulation, StudyAccountingGivesEveryThreadTheWholeSource) {
  Scenario s = Tiny();
  s.source = {{1, 5}};
  s.staging_threads = 2;
  s.staging_mb_per_s = 1e12;
  EXPECT_NEAR(Seconds(s, Policy::kStagingBuffer), 16 * 0.2 + 0.1, kClose);
  s.accounting = Accounting::kStudy;
  EXPECT_NEAR(Seconds(s, Policy::kStagingBuffer), 0.1 + 16 * 0.1, kClose);
}

TEST(Simulation, LruKeepsWhatFitsAndLosesTheRest) {
  Scenario s = Tiny();
  s.tiers = {{"memory", 8, 1e12, 1}};
  s.source = {{1, 5}};
  const Outcome all = Simulated(s, Policy::kLru);
  EXPECT_NEAR(all.source_mb, 8, kClose);
  EXPECT_NEAR(all.seconds, 8 * 0.2 + 0.1 + 8 * 0.1, kClose);
  // Half the data set: C + (1 - C) ln(1 - C) = 15.3 % hits, where a fixed set would have 50 %.
  s.samples = 100'000;
  s.tiers = {{"memory", 50'000, 1e12, 1}};
  EXPECT_NEAR(Simulated(s, Policy::kLru).local_mb / 100'000, 0.1534, 0.005);
  EXPECT_NEAR(Simulated(s, Policy::kMonarch).local_mb / 100'000, 0.5, 0.005);
}

TEST(Simulation, MonarchReadsOtherNodesSamplesFromTheSource) {
  Scenario s = Pair();
  s.samples = 100'000;
  s.tiers = {{"memory", 100'000, 400, 1}};
  // In the second epoch a node has half of what it reads.
  EXPECT_NEAR(Simulated(s, Policy::kMonarch).local_mb / 100'000, 0.5, 0.01);
}

TEST(Simulation, ShardingKeepsItsPart) {
  const Outcome out = Simulated(Pair(), Policy::kSharding);
  EXPECT_FALSE(out.global_shuffle);
  EXPECT_NEAR(out.source_mb, 8, kClose);
  EXPECT_NEAR(out.local_mb, 8, kClose);
  // Two ranks share 5 MB/s, and the second epoch comes from memory.
  EXPECT_NEAR(out.seconds, (4 * 0.4 + 0.1) + (0.0025 + 4 * 0.1), kClose);
}

TEST(Simulation, DeepIoStagesItsMemoryFirst) {
  Scenario s = Pair();
  s.tiers = {{"memory", 1, 400, 1}};
  s.staging_mb = 1;  // two samples a rank, four of eight in all
  const Outcome ordered = Simulated(s, Policy::kDeepIoOrdered);
  EXPECT_NEAR(ordered.staging_seconds, 2 * 2 / 5.0, kClose);
  EXPECT_NEAR(ordered.source_mb, 4 + 2 * 4, kClose);
  EXPECT_EQ(ordered.read_share, 1);
  const Outcome opportunistic = Simulated(s, Policy::kDeepIoOpportunistic);
  EXPECT_NEAR(opportunistic.source_mb, 4, kClose);
  EXPECT_NEAR(opportunistic.read_share, 0.5, kClose);
}

TEST(Simulation, ParallelStagingCopiesFirst) {
  Scenario s = Pair();
  s.tiers = {{"memory", 8, 400, 1}};
  const Outcome all = Simulated(s, Policy::kParallelStaging);
  EXPECT_NEAR(all.staging_seconds, 2 * 8 / 5.0, kClose);
  EXPECT_NEAR(all.seconds, 3.2 + 0.0025 + 8 * 0.1, kClose);
  EXPECT_EQ(all.read_share, 1);
  s.tiers[0].mb = 4;
  EXPECT_NEAR(Simulated(s, Policy::kParallelStaging).read_share, 0.5, kClose);
}

TEST(Simulation, LbannReadsOnceAndNeedsTheMemory) {
  const Outcome dynamic = Simulated(Pair(), Policy::kLbannDynamic);
  EXPECT_NEAR(dynamic.source_mb, 8, kClose);
  EXPECT_NEAR(dynamic.local_mb + dynamic.peer_mb, 8, kClose);
  const Outcome preload = Simulated(Pair(), Policy::kLbannPreload);
  EXPECT_NEAR(preload.staging_seconds, 8 / 5.0, kClose);
  EXPECT_NEAR(preload.source_mb, 8, kClose);
  Scenario small = Pair();
  small.tiers[0].mb = 1;
  small.staging_mb = 1;
  EXPECT_FALSE(Simulated(small, Policy::kLbannDynamic).infeasible.empty());
  EXPECT_FALSE(Simulated(small, Policy::kLbannPreload).infeasible.empty());
}

TEST(Simulation, LocalityMovesOnlyTheImbalance) {
  Scenario s = Pair();
  s.samples = 1000;
  s.batch = 100;
  s.tiers[0].mb = 500;
  const Outcome out = Simulated(s, Policy::kLocality);
  EXPECT_NEAR(out.source_mb, 1000, kClose);
  EXPECT_GT(out.local_mb, 900);
  EXPECT_LT(out.peer_mb, 100);
  EXPECT_GT(out.peer_mb, 0);
}

TEST(Simulation, ForebayReadsEachSampleOnceWhereTheClusterHoldsAll) {
  const Outcome out = Simulated(Pair(), Policy::kForebay);
  EXPECT_EQ(out.uncovered_share, 0);
  EXPECT_NEAR(out.source_mb, 8, kClose);
  // 4 x 0.4 s from the source, then from memory here (2.5 ms) or there (25 ms).
  EXPECT_LT(out.seconds, 4 * 0.4 + 4 * 0.1 + 0.1 + 0.025 + kClose);
  EXPECT_GE(out.seconds, 4 * 0.4 + 4 * 0.1 + 0.1);
}

TEST(Simulation, NoPfsLeavesSamplesOut) {
  Scenario s = Pair();
  s.nodes = 4;
  s.samples = 20'000;
  s.epochs = 90;
  s.max_accesses = 100'000;
  s.tiers[0].mb = 5'000;
  // The study's own figure for four ranks.
  EXPECT_NEAR(Simulated(s, Policy::kNoPfs).uncovered_share, 0.179, 0.01);
  EXPECT_EQ(Simulated(s, Policy::kForebay).uncovered_share, 0);
}

TEST(Simulation, OrderIsTheSamplers) {
  Scenario s = Tiny();
  s.samples = 37;
  Result<Simulation> simulation = Simulation::Make(s);
  ASSERT_TRUE(simulation);
  SamplerSpec spec;
  spec.size = 37;
  spec.seed = s.seed;
  spec.world = 4;
  for (uint32_t e = 0; e < 3; ++e) {
    const std::span<const SampleId> order = simulation->Order(e);
    for (spec.rank = 0; spec.rank < 4; ++spec.rank) {
      const std::vector<SampleId> of_rank = EpochOrder(spec, e);
      for (size_t i = 0; i < of_rank.size(); ++i) {
        ASSERT_EQ(of_rank[i], order[(4 * i + spec.rank) % 37]);
      }
    }
  }
}

TEST(Simulation, LastSimulatedEpochStandsForTheRest) {
  Scenario s = Tiny();
  s.epochs = 50;
  s.max_accesses = 24;
  const Outcome out = Simulated(s, Policy::kDoubleBuffer);
  EXPECT_EQ(out.simulated_epochs, 3u);
  EXPECT_NEAR(out.seconds, 50 * (0.05 + 8 * 0.1), kClose);
}

TEST(Simulation, BarrierWaitsForTheSlowestRank) {
  Scenario s = Tiny();
  s.samples = 4000;
  s.nodes = 4;
  s.sample_sigma_mb = 0.5;
  Scenario large = s;
  large.batch = 100;
  // The bound has the barrier, too; a larger batch evens the sizes out.
  EXPECT_GT(Seconds(s, Policy::kLowerBound), 1.2 * Seconds(large, Policy::kLowerBound));
}

TEST(Simulation, SourceCurve) {
  Scenario s = Tiny();
  s.source = {{2, 100}, {4, 300}};
  EXPECT_EQ(s.SourceRate(1), 50);
  EXPECT_EQ(s.SourceRate(2), 100);
  EXPECT_EQ(s.SourceRate(3), 200);
  EXPECT_EQ(s.SourceRate(400), 300);
}

TEST(Simulation, WrongScenariosAreErrors) {
  const std::vector<std::function<void(Scenario&)>> mistakes = {
      [](Scenario& s) { s.nodes = 0; },
      [](Scenario& s) { s.samples = 0; },
      [](Scenario& s) {
        s.source = {{2, 1}, {1, 1}};
      },
      [](Scenario& s) { s.source.clear(); },
      [](Scenario& s) { s.compute_mb_per_s = 0; },
      [](Scenario& s) {
        s.tiers = {{"x", -1, 1, 1}};
      },
      [](Scenario& s) {
        s.tiers = {{"slow", 1, 1, 1}, {"fast", 1, 2, 1}};
      },
      [](Scenario& s) { s.sample_mb = 5000; },
      [](Scenario& s) { s.batch = 0; },
  };
  for (const auto& mistake : mistakes) {
    Scenario s = Tiny();
    mistake(s);
    EXPECT_FALSE(Simulation::Make(s));
  }
  EXPECT_FALSE(ParsePolicy("fastest"));
}

TEST(Simulation, ProgressStops) {
  Result<Simulation> simulation = Simulation::Make(Pair());
  ASSERT_TRUE(simulation);
  for (int i = 0; i < kPolicies; ++i) {
    const Result<Outcome> stopped =
        simulation->Run(static_cast<Policy>(i), [](uint64_t, uint64_t) { return false; });
    ASSERT_FALSE(stopped);
    EXPECT_EQ(stopped.error().code(), Code::kCancelled);
  }
}

Scenario Random(SplitMix64& rng) {
  Scenario s = Tiny();
  s.nodes = static_cast<uint32_t>(1 + rng.Below(6));
  s.ranks_per_node = static_cast<uint32_t>(1 + rng.Below(3));
  s.samples = static_cast<uint32_t>(200 + rng.Below(2000));
  s.batch = static_cast<uint32_t>(1 + rng.Below(8));
  s.epochs = static_cast<uint32_t>(2 + rng.Below(6));
  s.seed = rng.Next();
  s.staging_threads = static_cast<uint32_t>(1 + rng.Below(8));
  s.staging_mb = 20;
  s.preprocess_mb_per_s = 5 + 100 * rng.Uniform();
  s.source = {{1, 2 + 20 * rng.Uniform()}, {16, 25 + 100 * rng.Uniform()}};
  s.network_mb_per_s = 10 + 300 * rng.Uniform();
  const double share = s.samples / static_cast<double>(s.nodes);
  s.tiers = {{"memory", 2 * share * rng.Uniform(), 1000, 4},
             {"nvme", 2 * share * rng.Uniform(), 50 + 200 * rng.Uniform(), 2}};
  if (rng.Below(2) == 0) s.accounting = Accounting::kStudy;
  return s;
}

double LogUniform(SplitMix64& rng, double low, double high) {
  return low * std::pow(high / low, rng.Uniform());
}

// Source, network, tiers and compute of all speeds, also such that the source is the fastest.
Scenario OfAllSpeeds(SplitMix64& rng) {
  Scenario s = Random(rng);
  s.samples = static_cast<uint32_t>(30 + rng.Below(120));
  for (TierSpec& tier : s.tiers) {
    tier.mb = 2.0 * s.samples / s.nodes * rng.Uniform();
    tier.threads = static_cast<double>(1 + rng.Below(8));
  }
  s.tiers[0].mb_per_s = LogUniform(rng, 10, 2000);
  s.tiers[1].mb_per_s = s.tiers[0].mb_per_s * LogUniform(rng, 0.02, 1);
  if (rng.Below(4) == 0) s.tiers.pop_back();
  s.staging_mb = LogUniform(rng, 2, 200);
  s.staging_mb_per_s = LogUniform(rng, 20, 1e5);
  s.preprocess_mb_per_s = LogUniform(rng, 3, 1e4);
  s.compute_mb_per_s = LogUniform(rng, 3, 300);
  const double alone = LogUniform(rng, 1, 100);
  s.source = {{1, alone}, {LogUniform(rng, 2, 64), alone * LogUniform(rng, 0.5, 32)}};
  s.network_mb_per_s = LogUniform(rng, 3, 1000);
  if (rng.Below(3) == 0) s.sample_sigma_mb = 0.5 * rng.Uniform();
  return s;
}

TEST(Simulation, NothingBeatsTheBound) {
  SplitMix64 rng(11);
  for (int round = 0; round < 100; ++round) {
    Scenario s = OfAllSpeeds(rng);
    s.sample_sigma_mb = 0;  // those that deal samples anew may be luckier at the barriers
    Result<Simulation> simulation = Simulation::Make(s);
    ASSERT_TRUE(simulation);
    const double bound = simulation->Run(Policy::kLowerBound)->seconds;
    for (int i = 0; i < kPolicies; ++i) {
      const Outcome out = *simulation->Run(static_cast<Policy>(i));
      if (out.infeasible.empty()) {
        ASSERT_GE(out.seconds, bound * (1 - 1e-9)) << round;
      }
    }
  }
}

// Nothing here is about memory or threads: a part of them will do where each takes ten times as
// long.
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr int kScenarios = 420;
#elif defined(__clang__)
#if __has_feature(address_sanitizer) || __has_feature(thread_sanitizer)
constexpr int kScenarios = 420;
#else
constexpr int kScenarios = 2100;
#endif
#else
constexpr int kScenarios = 2100;
#endif

TEST(Simulation, NoPfsNeverBeatsForebay) {
  SplitMix64 rng(11);
  std::array<int, 3> chosen{};
  for (int round = 0; round < kScenarios; ++round) {
    const Scenario s = round % 50 == 0 ? Random(rng) : OfAllSpeeds(rng);
    Result<Simulation> simulation = Simulation::Make(s);
    ASSERT_TRUE(simulation);
    const Outcome forebay = *simulation->Run(Policy::kForebay);
    EXPECT_LE(forebay.seconds, simulation->Run(Policy::kNoPfs)->seconds * 1.001) << round;
    EXPECT_LE(forebay.seconds, simulation->Run(Policy::kStagingBuffer)->seconds * 1.001) << round;
    ++chosen[static_cast<size_t>(forebay.plan)];
  }
  // The choice is for the odd case, where the source is as fast as the tiers.
  EXPECT_GE(chosen[static_cast<size_t>(Plan::kByNode)], kScenarios * 85 / 100);
  EXPECT_GT(chosen[static_cast<size_t>(Plan::kByRank)], 0);
  EXPECT_GT(chosen[static_cast<size_t>(Plan::kNone)], 0);
}

TEST(Simulation, MoreRoomIsNeverSlowerForForebay) {
  SplitMix64 rng(12);
  for (int round = 0; round < 20; ++round) {
    Scenario s = Random(rng);
    s.tiers[1].mb = 0;
    double last = 1e300;
    for (double share : {0.0, 0.25, 0.5, 0.75, 1.05, 1.5, 3.0}) {
      s.tiers[0].mb = share * s.samples / s.nodes;
      const double seconds = Seconds(s, Policy::kForebay);
      EXPECT_LE(seconds, last * (1 + 1e-9)) << "round " << round << " share " << share;
      last = seconds;
    }
  }
}

TEST(Simulation, SameScenarioSameAnswer) {
  SplitMix64 rng(13);
  Scenario s = Random(rng);
  s.sample_sigma_mb = 0.3;
  for (int i = 0; i < kPolicies; ++i) {
    const Outcome a = Simulated(s, static_cast<Policy>(i));
    const Outcome b = Simulated(s, static_cast<Policy>(i));
    EXPECT_EQ(a.seconds, b.seconds);
    EXPECT_EQ(a.source_mb, b.source_mb);
    EXPECT_EQ(a.epoch_seconds, b.epoch_seconds);
  }
}

}  // namespace
}  // namespace forebay::sim
