// Whatever happens to a peer, every sample comes, with the right bytes, within a bound, and the
// peer at fault is named.
#include <gtest/gtest.h>

#include <atomic>

#include "peer/peer_testing.h"

namespace forebay::peer {
namespace {

class PeerFaultsTest : public testing::PeerCluster {
 protected:
  PeerFaultsTest() {
    options_.request_wait = 300 * kMilli;
    options_.join_wait = 2 * kSecond;
    options_.lease = 500 * kMilli;
  }
  // For what is not about time: a busy machine is not at fault.
  void BePatient() {
    options_.request_wait = 20 * kSecond;
    options_.join_wait = 20 * kSecond;
    options_.lease = 20 * kSecond;
  }
  // Generous: the machine may be busy. A bound that is missed would be seen by its order.
  static constexpr Nanos kBound = 5 * kSecond;

  bool Connected(uint32_t a, uint32_t b) {
    return Within(kBound, [&] { return Seen(a, b).state == "connected"; });
  }
};

TEST_F(PeerFaultsTest, APeerThatIsKilled) {
  engine_options_.memory_tier = 8 << 20;
  Start(3, 24 << 20, MakeFiles(300, 50000, 60000));
  Epoch(0);
  const Nanos longest = Epoch(
      1, [&] { Kill(2); }, 2);
  EXPECT_LT(longest, kBound);
  EXPECT_TRUE(Within(kBound, [&] { return !Seen(0, 2).fault.empty(); }));
  EXPECT_GT(registrar_->suspected(2), 0);
  // Once everybody knows, the others share what it had.
  registrar_->SetAlive(2, false);
  EXPECT_TRUE(Within(kBound, [&] { return Seen(0, 2).state == "dead"; }));
  Epoch(2);
  EXPECT_EQ(Seen(1, 2).state, "dead");
}

TEST_F(PeerFaultsTest, APeerThatComesBack) {
  engine_options_.memory_tier = 8 << 20;
  const auto catalog = MakeFiles(200, 50000, 60000);
  Start(2, 24 << 20, catalog);
  Epoch(0);
  Kill(1);
  registrar_->SetAlive(1, false);
  Epoch(1);
  const uint64_t before = Value(*nodes_[0].engine, "forebay_peer_reads_total");
  Begin(1, 24 << 20);
  Use(1, catalog);
  ASSERT_TRUE(Connected(0, 1));
  ASSERT_TRUE(Connected(1, 0));
  ASSERT_TRUE(nodes_[1].engine->Seek(nodes_[1].stream, 2, 0).ok());
  // On a busy machine an answer may be late, and its sample be read from the source.
  const auto reads = [&] { return Value(*nodes_[0].engine, "forebay_peer_reads_total"); };
  for (uint64_t epoch = 2; epoch < 4 || (epoch < 40 && reads() == before); ++epoch) Epoch(epoch);
  EXPECT_GT(reads(), before);
}

TEST_F(PeerFaultsTest, OneThatIsOnlySuspectedIsTriedAgain) {
  Start(2, 24 << 20, MakeFiles(20, 1000, 2000));
  ASSERT_TRUE(Connected(0, 1));
  network_.Cut("n0", "n1");
  registrar_->SetAlive(1, false, true);
  ASSERT_TRUE(Within(kBound, [&] { return Seen(0, 1).state == "dead"; }));
  // Tried once a lease, in vain so far.
  poll(nullptr, 0, 700);
  EXPECT_EQ(Seen(0, 1).state, "dead");
  network_.Heal("n0", "n1");
  EXPECT_TRUE(Within(2 * kBound, [&] { return Seen(0, 1).state == "connected"; }));
  EXPECT_TRUE(Within(kBound, [&] { return registrar_->alive(1); }));
}

TEST_F(PeerFaultsTest, ALinkThatIsCut) {
  engine_options_.memory_tier = 8 << 20;
  Start(2, 24 << 20, MakeFiles(280, 50000, 60000));
  Epoch(0);
  ASSERT_TRUE(Connected(0, 1));
  const Nanos longest = Epoch(1, [&] { network_.Cut("n0", "n1"); });
  EXPECT_LT(longest, kBound);
  EXPECT_TRUE(Within(kBound, [&] { return !Seen(0, 1).fault.empty(); }));
  EXPECT_TRUE(Within(kBound, [&] { return Seen(0, 1).state != "connected"; }));
  Epoch(2);
  network_.Heal("n0", "n1");
  ASSERT_TRUE(Connected(0, 1));
  ASSERT_TRUE(Connected(1, 0));
  const uint64_t before = Sum("forebay_peer_reads_total");
  const auto reads = [&] { return Sum("forebay_peer_reads_total"); };
  for (uint64_t epoch = 3; epoch < 8 || (epoch < 40 && reads() == before); ++epoch) Epoch(epoch);
  EXPECT_GT(reads(), before);
}

// A machine that stands still: it is left before a single request has taken too long, and named.
TEST_F(PeerFaultsTest, APeerThatIsSilentIsLeft) {
  options_.request_wait = 6 * kSecond;
  options_.lease = 60 * kSecond;
  engine_options_.memory_tier = 8 << 20;
  Start(2, 24 << 20, MakeFiles(280, 50000, 60000));
  Epoch(0);
  ASSERT_TRUE(Connected(0, 1));
  EXPECT_EQ(nodes_[0].engine->Cluster().health, "");
  Nanos longest = Epoch(1, [&] { network_.Cut("n0", "n1"); });
  // It is silent only for those who ask it, and all of this epoch may have come before.
  const auto named = [&] { return Seen(0, 1).fault.starts_with("silent for"); };
  const Nanos until = SteadyClock().Now() + 4 * kBound;
  uint64_t epoch = 2;
  while (!named() && SteadyClock().Now() < until) longest = std::max(longest, Epoch(epoch++));
  EXPECT_TRUE(named()) << Fates();
  EXPECT_LT(longest, kBound) << "less than what a request may take";
  EXPECT_EQ(Value(*nodes_[0].engine, "forebay_peer_timeouts_total"), 0u);
  EXPECT_TRUE(Within(kBound, [&] {
    return nodes_[0].engine->Cluster().health.starts_with("node 1 at n1 does not answer");
  })) << nodes_[0].engine->Cluster().health;
  Epoch(epoch);
  network_.Heal("n0", "n1");
  ASSERT_TRUE(Within(4 * kBound, [&] { return Seen(0, 1).state == "connected"; }));
  EXPECT_TRUE(Within(kBound, [&] { return nodes_[0].engine->Cluster().health.empty(); }));
}

TEST_F(PeerFaultsTest, APeerThatBecomesSlow) {
  engine_options_.memory_tier = 8 << 20;
  Start(2, 24 << 20, MakeFiles(200, 50000, 60000));
  Epoch(0);
  Nanos longest = Epoch(1, [&] { network_.SetRate("n1", 100000); });
  // A peer is slow only for those who ask it, and all of this epoch may have come before.
  const auto named = [&] { return !Seen(0, 1).fault.empty(); };
  const Nanos until = SteadyClock().Now() + 4 * kBound;
  for (uint64_t epoch = 2; !named() && SteadyClock().Now() < until; ++epoch) {
    longest = std::max(longest, Epoch(epoch));
  }
  EXPECT_LT(longest, kBound);
  EXPECT_TRUE(named()) << Fates();
}

TEST_F(PeerFaultsTest, BytesThatAreWrong) {
  BePatient();
  engine_options_.memory_tier = 8 << 20;
  Start(2, 24 << 20, MakeFiles(200, 10000, 60000));
  network_.CorruptEvery("n1", 5);
  Epoch(0);
  Epoch(1);
  EXPECT_TRUE(Within(kBound, [&] { return Seen(0, 1).corrupt > 0; }));
  EXPECT_EQ(Seen(0, 1).fault, "sent wrong bytes");
  EXPECT_EQ(Seen(1, 0).corrupt, 0u);
  EXPECT_EQ(Seen(1, 0).fault, "");
}

TEST_F(PeerFaultsTest, ASenderThatDamagesItsReplies) {
  BePatient();
  parts_.corrupt_every = 7;
  engine_options_.memory_tier = 8 << 20;
  Start(2, 24 << 20, MakeFiles(200, 1000, 60000));
  Epoch(0);
  Epoch(1);
  EXPECT_TRUE(Within(kBound, [&] { return Seen(0, 1).corrupt > 0 && Seen(1, 0).corrupt > 0; }));
}

TEST_F(PeerFaultsTest, AStrangerGetsNothing) {
  Prepare(2);
  Begin(0, 64 << 20);
  parts_.secret = std::string(32, 'x');
  Begin(1, 64 << 20);
  const auto catalog = MakeFiles(60, 1000, 3000);
  Use(0, catalog);
  Use(1, catalog);
  Epoch(0);
  EXPECT_TRUE(Within(kBound, [&] { return Seen(0, 1).state == "refused"; }));
  EXPECT_EQ(Seen(0, 1).fault, "node 1 does not know the job's secret");
  EXPECT_EQ(Sum("forebay_peer_served_samples_total"), 0u);
  EXPECT_GE(SourceReads(), 60u);
}

TEST_F(PeerFaultsTest, ADataSetThatANodeAddsLater) {
  BePatient();
  Prepare(2);
  Begin(0, 64 << 20);
  Begin(1, 64 << 20);
  const auto catalog = MakeFiles(100, 1000, 30000);
  Use(0, catalog);
  std::jthread late([&] {
    poll(nullptr, 0, 300);
    Use(1, catalog);
    CheckEpoch(nodes_[1], 0);
  });
  CheckEpoch(nodes_[0], 0);
  late.join();
  EXPECT_EQ(SourceReads(), 100u);
}

TEST_F(PeerFaultsTest, ADataSetThatOthersDoNotHave) {
  options_.join_wait = 300 * kMilli;
  Prepare(2);
  Begin(0, 64 << 20);
  Begin(1, 64 << 20);
  Use(0, MakeFiles(100, 1000, 30000));
  Nanos longest = 0;
  CheckEpoch(nodes_[0], 0, &longest);
  EXPECT_LT(longest, kBound);
}

TEST_F(PeerFaultsTest, ANodeThatNeverComes) {
  engine_options_.memory_tier = 2 << 20;
  engine_options_.read_ahead = 1 << 20;
  options_.join_wait = 300 * kMilli;
  Prepare(3);
  Begin(0, 24 << 20);
  Begin(1, 24 << 20);
  const auto catalog = MakeFiles(200, 10000, 20000);
  Use(0, catalog);
  Use(1, catalog);
  EXPECT_LT(Epoch(0), kBound);
  ASSERT_TRUE(Connected(0, 1));
  ASSERT_TRUE(Connected(1, 0));
  // The two that are there share the data set.
  uint64_t epoch = 1;
  while (Sum("forebay_peer_reads_total") == 0 && epoch < 50) Epoch(epoch++);
  EXPECT_GT(Sum("forebay_peer_reads_total"), 0u);
}

TEST_F(PeerFaultsTest, SamplesThatNobodyHasRoomFor) {
  BePatient();
  // Two times 2 MB for 10 MB.
  engine_options_.memory_tier = 2 << 20;
  Start(2, 24 << 20, MakeFiles(200, 50000, 60000));
  for (uint64_t epoch = 0; epoch < 3; ++epoch) EXPECT_LT(Epoch(epoch), kBound);
  EXPECT_EQ(Sum("forebay_peer_timeouts_total"), 0u);
  // What one of them keeps is read once.
  EXPECT_LT(SourceReads(), 3 * 200u);
}

TEST_F(PeerFaultsTest, PeersThatGoBeforeTheEngine) {
  engine_options_.memory_tier = 8 << 20;
  Start(2, 24 << 20, MakeFiles(200, 50000, 60000));
  Epoch(0);
  const Nanos longest = Epoch(1, [&] { nodes_[1].peers.reset(); });
  EXPECT_LT(longest, kBound);
  Epoch(2, [&] { nodes_[0].peers.reset(); });
}

}  // namespace
}  // namespace forebay::peer
