#include "peer/peers.h"

#include <gtest/gtest.h>

#include "peer/peer_testing.h"

namespace forebay::peer {
namespace {

using PeersTest = testing::PeerCluster;

TEST_F(PeersTest, TwoNodesReadEachSampleOnceForBoth) {
  Start(2, 64 << 20, MakeFiles(300, 0, 30000));
  Epoch(0);
  EXPECT_EQ(SourceReads(), 300u);
  Epoch(1);
  Epoch(2);
  EXPECT_EQ(SourceReads(), 300u);
  EXPECT_TRUE(Within(5 * kSecond, [&] { return Seen(0, 1).reads > 0 && Seen(1, 0).served > 0; }));
  EXPECT_EQ(Seen(0, 1).state, "connected");
  EXPECT_EQ(Seen(0, 1).fault, "");
}

TEST_F(PeersTest, FourNodesThatHoldPartEachReadEachSampleOnce) {
  // 400 samples of 60 KiB are 24 MB; a node keeps a bit more than a quarter of them.
  engine_options_.memory_tier = 8 << 20;
  Start(4, 24 << 20, MakeFiles(400, 50000, 60000));
  for (uint64_t epoch = 0; epoch < 3; ++epoch) Epoch(epoch);
  EXPECT_EQ(SourceReads(), 400u);
  EXPECT_EQ(Sum("forebay_peer_timeouts_total"), 0u);
  EXPECT_EQ(Sum("forebay_peer_refused_total"), 0u);
}

TEST_F(PeersTest, WithoutCoordinationEachReadsForItself) {
  options_.coordinate = false;
  Start(2, 64 << 20, MakeFiles(100, 1000, 3000));
  for (uint64_t epoch = 0; epoch < 4; ++epoch) Epoch(epoch);
  EXPECT_GT(SourceReads(), 150u);
  EXPECT_EQ(Seen(0, 1).reads, 0u);
}

}  // namespace
}  // namespace forebay::peer
