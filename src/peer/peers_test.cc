#include "peer/peers.h"

#include <gtest/gtest.h>

#include <bit>

#include "peer/peer_testing.h"

namespace forebay::peer {
namespace {

class PeersTest : public testing::PeerCluster {
 protected:
  // Nothing goes wrong here; a busy machine must not make it seem so.
  PeersTest() {
    options_.request_wait = 20 * kSecond;
    options_.join_wait = 20 * kSecond;
    options_.lease = 20 * kSecond;
  }
};

TEST_F(PeersTest, TwoNodesReadEachSampleOnceForBoth) {
  Start(2, 64 << 20, MakeFiles(300, 0, 30000));
  Epoch(0);
  EXPECT_EQ(SourceReads(), 300u) << Fates();
  Epoch(1);
  Epoch(2);
  EXPECT_EQ(SourceReads(), 300u) << Fates();
  EXPECT_TRUE(Within(5 * kSecond, [&] { return Seen(0, 1).reads > 0 && Seen(1, 0).served > 0; }));
  EXPECT_EQ(Seen(0, 1).state, "connected");
  EXPECT_EQ(Seen(0, 1).fault, "");
}

TEST_F(PeersTest, FourNodesThatHoldPartEachReadEachSampleOnce) {
  // 400 samples of 60 KiB are 24 MB; a node keeps a bit more than a quarter of them.
  engine_options_.memory_tier = 8 << 20;
  Start(4, 24 << 20, MakeFiles(400, 50000, 60000));
  for (uint64_t epoch = 0; epoch < 3; ++epoch) Epoch(epoch);
  EXPECT_EQ(SourceReads(), 400u) << Fates();
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

TEST_F(PeersTest, OverUcx) {
  const Result<std::string> version = UcxVersion();
  if (!version) GTEST_SKIP() << version.error().message();
  parts_.transport = [](TransportHandler& handler) {
    return MakeUcxTransport({.listen = "127.0.0.1:0"}, handler);
  };
  engine_options_.memory_tier = 16 << 20;
  Start(2, 48 << 20, MakeFiles(200, 0, 240000));
  for (uint64_t epoch = 0; epoch < 3; ++epoch) Epoch(epoch);
  EXPECT_EQ(SourceReads(), 200u) << Fates();
  EXPECT_GT(Sum("forebay_peer_reads_total"), 0u);
  // Its end is seen by the other, whose reads go on.
  Epoch(
      3, [&] { Kill(1); }, 1);
  EXPECT_TRUE(Within(5 * kSecond, [&] { return !Seen(0, 1).fault.empty(); }));
  Epoch(4);
}

TEST_F(PeersTest, WhereEverythingFitsAllReadsBecomeLocal) {
  Start(2, 64 << 20, MakeFiles(300, 10000, 30000));
  const auto all_local = [&] {
    uint64_t held = 0;
    for (One& one : nodes_) {
      for (const std::byte byte : one.engine->HeldBits(one.dataset)) {
        held += static_cast<uint64_t>(std::popcount(std::to_integer<unsigned>(byte)));
      }
    }
    return held == 600;
  };
  uint64_t epoch = 0;
  while (!all_local() && epoch < 40) Epoch(epoch++);
  ASSERT_TRUE(all_local());
  const uint64_t reads = Sum("forebay_peer_reads_total");
  for (uint64_t end = epoch + 3; epoch < end; ++epoch) Epoch(epoch);
  EXPECT_EQ(Sum("forebay_peer_reads_total"), reads);
  EXPECT_EQ(SourceReads(), 300u) << Fates();
}

TEST_F(PeersTest, ARateHoldsALinkBack) {
  options_.link_bytes_per_second = 4 << 20;
  engine_options_.memory_tier = 8 << 20;
  Start(2, 24 << 20, MakeFiles(100, 50000, 60000));
  const Nanos start = SteadyClock().Now();
  Epoch(0);
  // Each takes a quarter of 5.5 MB from the other.
  EXPECT_GT(SteadyClock().Now() - start, 200 * kMilli);
  EXPECT_EQ(SourceReads(), 100u) << Fates();
}

}  // namespace
}  // namespace forebay::peer
