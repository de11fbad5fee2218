// Homes by use among live nodes: who knows how training ends plans, and all switch together.
#include <gtest/gtest.h>

#include "peer/peer_testing.h"

namespace forebay::peer {
namespace {

class PeerPlan : public testing::PeerCluster {
 protected:
  static constexpr uint64_t kEpochs = 8;

  // Nothing goes wrong here; a busy machine must not make it seem so.
  PeerPlan() {
    options_.request_wait = 20 * kSecond;
    options_.join_wait = 20 * kSecond;
    options_.lease = 20 * kSecond;
  }

  size_t Planned() { return Sum("forebay_peer_planned_datasets"); }
};

// 400 samples of 64 KiB; a node has room for 1.2 quarters of them.
TEST_F(PeerPlan, SamplesLiveWithTheNodeThatUsesThemMost) {
  engine_options_.memory_tier = 400 * (64 << 10) * 12 / 40;
  epochs_ = kEpochs;
  const auto catalog = MakeFiles(400, 65000, 65000);
  Prepare(4);
  for (uint32_t node = 0; node < 4; ++node) Begin(node, 24 << 20);
  for (uint32_t node = 0; node < 4; ++node) Use(node, catalog);
  // What was read before the plan was in use moves to its new homes as these use it.
  Epoch(0);
  ASSERT_TRUE(Within(20 * kSecond, [&] { return Planned() == 4; }));
  for (uint64_t epoch = 1; epoch < kEpochs / 2; ++epoch) Epoch(epoch);
  const uint64_t before = Sum("forebay_peer_reads_total");
  for (uint64_t epoch = kEpochs / 2; epoch < kEpochs; ++epoch) Epoch(epoch);
  // By chance a quarter is local.
  const double asked = static_cast<double>(Sum("forebay_peer_reads_total") - before);
  EXPECT_EQ(SourceReads(), 400u) << Fates();
  EXPECT_LT(asked, 0.65 * 400 * kEpochs / 2) << Fates();
}

TEST_F(PeerPlan, ADeathCostsWhatTheDeadHadAndWhoComesBackUsesThePlan) {
  engine_options_.memory_tier = 400 * (64 << 10) * 16 / 40;
  epochs_ = kEpochs;
  const auto catalog = MakeFiles(400, 65000, 65000);
  Prepare(4);
  for (uint32_t node = 0; node < 4; ++node) Begin(node, 32 << 20);
  for (uint32_t node = 0; node < 4; ++node) Use(node, catalog);
  Epoch(0);
  ASSERT_TRUE(Within(20 * kSecond, [&] { return Planned() == 4; }));
  for (uint64_t epoch = 1; epoch < 4; ++epoch) Epoch(epoch);
  const uint64_t dead = Value(*nodes_[3].engine, "forebay_source_reads_total");
  EXPECT_EQ(SourceReads(), 400u) << Fates();
  Kill(3);
  registrar_->SetAlive(3, false);
  for (uint64_t epoch = 4; epoch < 6; ++epoch) Epoch(epoch, nullptr, 3);
  // No more than it had room for.
  EXPECT_LE(SourceReads() + dead, 400u + 160u) << Fates();
  Begin(3, 32 << 20);
  Use(3, catalog);
  CheckEpoch(nodes_[3], 0);
  EXPECT_TRUE(Within(20 * kSecond, [&] { return Planned() == 4; }));
  for (uint64_t epoch = 6; epoch < kEpochs; ++epoch) Epoch(epoch, nullptr, 3);
  CheckEpoch(nodes_[3], 1);
}

TEST_F(PeerPlan, WithoutAnEndItIsTheHash) {
  Start(2, 64 << 20, MakeFiles(100, 1000, 3000));
  for (uint64_t epoch = 0; epoch < 3; ++epoch) Epoch(epoch);
  EXPECT_EQ(Planned(), 0u);
  EXPECT_EQ(SourceReads(), 100u) << Fates();
}

TEST_F(PeerPlan, NodesThatDisagreeStayWithTheHash) {
  const auto catalog = MakeFiles(200, 1000, 3000);
  Prepare(2);
  for (uint32_t node = 0; node < 2; ++node) Begin(node, 64 << 20);
  for (uint32_t node = 0; node < 2; ++node) {
    epochs_ = kEpochs + node;
    Use(node, catalog);
  }
  for (uint64_t epoch = 0; epoch < 3; ++epoch) Epoch(epoch);
  EXPECT_EQ(Planned(), 0u);
  EXPECT_EQ(SourceReads(), 200u) << Fates();
}

}  // namespace
}  // namespace forebay::peer
