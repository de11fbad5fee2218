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
  double LocalShare(uint64_t samples, uint64_t epochs) {
    const auto all = static_cast<double>(samples * epochs);
    return 1 - static_cast<double>(Sum("forebay_peer_reads_total")) / all;
  }
};

// 400 samples of 64 KiB; a node has room for 1.2 quarters of them.
TEST_F(PeerPlan, SamplesLiveWithTheNodeThatUsesThemMost) {
  engine_options_.memory_tier = 400 * (64 << 10) * 12 / 40;
  epochs_ = kEpochs;
  const auto catalog = MakeFiles(400, 65000, 65000);
  Prepare(4);
  for (uint32_t node = 0; node < 4; ++node) Begin(node, 24 << 20);
  for (uint32_t node = 0; node < 4; ++node) Use(node, catalog);
  ASSERT_TRUE(Within(20 * kSecond, [&] { return Planned() == 4; }));
  for (uint64_t epoch = 0; epoch < kEpochs; ++epoch) Epoch(epoch);
  EXPECT_EQ(SourceReads(), 400u) << Fates();
  // By chance a quarter is local, and a little more with what is kept beside it.
  EXPECT_GT(LocalShare(400, kEpochs), 0.45) << Fates();
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
