#include "sim/peer_sim.h"

#include <gtest/gtest.h>

#include <utility>
#include <vector>

namespace forebay::sim {
namespace {

// `share` of the data set on each node, of 110 KiB a sample.
Simulation Job(uint32_t samples, double share, uint32_t batch = 64) {
  Scenario s;
  s.samples = samples;
  s.sample_mb = 110.0 / 1024;
  s.tiers = {{"memory", s.DatasetMb() * share, 1000, 1}};
  s.staging_mb = 100;
  s.staging_mb_per_s = 1000;
  s.network_mb_per_s = 1000;
  s.source = {{1, 100}};
  s.compute_mb_per_s = 100;
  s.preprocess_mb_per_s = 100;
  s.batch = batch;
  s.epochs = 3;
  s.seed = 4;
  return *Simulation::Make(s);
}

std::vector<PeerEpoch> EpochsOf(Simulation job, std::vector<PeerPhase> phases,
                                PeerRules rules = {}) {
  Result<std::vector<PeerEpoch>> out = SimulatePeers(job, phases, rules);
  EXPECT_TRUE(out) << out.error().ToString();
  return *std::move(out);
}

TEST(PeerSim, EachSampleIsReadOnceForTheWholeCluster) {
  for (const uint32_t nodes : {1u, 4u, 64u}) {
    const auto epochs = EpochsOf(Job(20000, 1.2 / nodes), {{nodes, 3}});
    ASSERT_EQ(epochs.size(), 3u);
    EXPECT_NEAR(epochs[0].source_vs_dataset(), 1, 1e-9) << nodes;
    EXPECT_EQ(epochs[1].source_mb, 0) << nodes;
    EXPECT_EQ(epochs[2].source_mb, 0) << nodes;
    EXPECT_EQ(epochs[2].reads, 20000u);
    // Room for a fifth more than its share: chance and some replicas.
    EXPECT_NEAR(epochs[2].local_share(), nodes == 1 ? 1 : 1.2 / nodes, 0.02);
    if (nodes > 1) {
      EXPECT_GT(epochs[2].hottest_link, 1 - 1.3 / nodes) << nodes;
      EXPECT_LT(epochs[2].hottest_link, 1.5) << nodes;
      EXPECT_GE(epochs[2].hottest_link_step, epochs[2].hottest_link);
    }
  }
}

TEST(PeerSim, WithoutCoordinationTheSourceIsReadAgainAndAgain) {
  const auto epochs =
      EpochsOf(Job(20000, 1.2 / 8), {{8, 3}}, {.coordinate = false, .locality = false});
  EXPECT_NEAR(epochs[0].source_vs_dataset(), 1, 1e-9);
  EXPECT_NEAR(epochs[2].source_vs_dataset(), 1 - 1.2 / 8, 0.02);
  EXPECT_EQ(epochs[2].peer_mb, 0);
  EXPECT_EQ(epochs[2].hottest_link, 0);
}

TEST(PeerSim, WhatDoesNotFitIsReadOnceAnEpoch) {
  const auto epochs = EpochsOf(Job(20000, 0.8 / 8), {{8, 3}});
  EXPECT_NEAR(epochs[0].source_vs_dataset(), 1, 1e-9);
  EXPECT_NEAR(epochs[2].source_vs_dataset(), 0.2, 0.01);
}

TEST(PeerSim, LocalityKeepsMostReadsOnTheirNode) {
  const PeerRules rules{.coordinate = true, .locality = true};
  const auto epochs = EpochsOf(Job(20000, 1.2 / 4), {{4, 3}}, rules);
  EXPECT_GT(epochs[1].local_share(), 0.9);
  EXPECT_LT(epochs[1].hottest_link, 0.1);
  EXPECT_NEAR(epochs[0].source_vs_dataset(), 1, 1e-9);
  EXPECT_EQ(epochs[1].source_mb, 0);
}

// Where everything fits everywhere, replicas make all reads local in the end.
TEST(PeerSim, SpareRoomFillsWithReplicas) {
  const auto epochs = EpochsOf(Job(2000, 1.01), {{4, 30}});
  EXPECT_NEAR(epochs[0].source_vs_dataset(), 1, 1e-9);
  EXPECT_GT(epochs[29].local_share(), 0.98);
  EXPECT_EQ(epochs[29].source_mb, 0);
}

TEST(PeerSim, ARestartReadsOnlyWhatIsLost) {
  const auto epochs = EpochsOf(Job(20000, 0.4), {{4, 2}, {3, 2}, {5, 2}});
  EXPECT_EQ(epochs[1].source_mb, 0);
  // A quarter lived with the node that is gone; some of it has replicas elsewhere.
  EXPECT_LT(epochs[2].source_vs_dataset(), 0.25);
  EXPECT_GT(epochs[2].source_vs_dataset(), 0.05);
  // A replica that gave way to a home's samples before its own home had asked for it.
  EXPECT_LT(epochs[3].source_vs_dataset(), 0.02);
  EXPECT_EQ(epochs[4].nodes, 5u);
  EXPECT_LT(epochs[4].source_vs_dataset(), 0.02);  // new nodes take from the others
  EXPECT_LT(epochs[5].source_vs_dataset(), 0.002);
}

TEST(PeerSim, WrongOrTooLargeIsRefused) {
  Simulation job = Job(100, 1);
  const std::vector<PeerPhase> none = {{0, 1}}, many = {{5000, 1}};
  EXPECT_FALSE(SimulatePeers(job, none, {}));
  EXPECT_FALSE(SimulatePeers(job, many, {}));
  const std::vector<PeerPhase> one = {{2, 3}};
  EXPECT_EQ(SimulatePeers(job, one, {}, [](uint64_t, uint64_t) { return false; }).error().code(),
            Code::kCancelled);
}

}  // namespace
}  // namespace forebay::sim
