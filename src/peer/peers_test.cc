#include "peer/peers.h"

#include <gtest/gtest.h>

#include <array>
#include <bit>
#include <chrono>

#include "base/crc32c.h"
#include "peer/peer_source.h"
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

TEST_F(PeersTest, WhatLivesHereAndFindsNoRoomIsTold) {
  engine_options_.memory_tier = 12 << 20;
  const auto catalog = MakeFiles(400, 50000, 60000);
  Prepare(2);
  for (uint32_t node = 0; node < 2; ++node) Begin(node, 24 << 20);
  Use(0, catalog, 4);
  // Four batches of 3.5 MB and more: half of its memory goes to them.
  Use(1, catalog, 64);
  const auto unkept = [&](uint32_t node) {
    return Value(*nodes_[node].engine, "forebay_peer_unkept_bytes");
  };
  ASSERT_TRUE(Within(10 * kSecond, [&] { return unkept(1) > 0; }));
  EXPECT_TRUE(Within(10 * kSecond, [&] {
    return nodes_[1].engine->Cluster().health.find("raise memory=") != std::string::npos;
  })) << nodes_[1].engine->Cluster().health;
  EXPECT_EQ(unkept(0), 0u);
  EXPECT_EQ(nodes_[0].engine->Cluster().health, "");
}

// Listed files have the same names and sizes on both nodes, and are not the same.
TEST_F(PeersTest, ListedFilesOfOtherTimesAreAnotherDataSet) {
  MakeFiles(60, 1000, 3000);
  std::vector<std::string> paths;
  for (uint32_t i = 0; i < 60; ++i) paths.push_back(StrCat(root_, "/data/", 100000 + i, ".bin"));
  const auto listed = [&] {
    auto built = BuildFileList(paths, {});
    EXPECT_TRUE(built) << built.status().ToString();
    return std::shared_ptr<const Catalog>(*std::move(built));
  };
  options_.join_wait = 200 * kMilli;
  Prepare(2);
  for (uint32_t node = 0; node < 2; ++node) Begin(node, 64 << 20);
  Use(0, listed());
  std::filesystem::last_write_time(
      paths[7], std::filesystem::last_write_time(paths[7]) + std::chrono::seconds(1));
  Use(1, listed());
  Epoch(0);
  EXPECT_EQ(Sum("forebay_peer_reads_total"), 0u);
  EXPECT_GE(SourceReads(), 60u);
}

TEST_F(PeersTest, ASourceGoesWithAnswersThatNobodyTook) {
  const auto catalog = MakeFiles(40, 100, 100);
  Registry registry;
  Metric& avoided = registry.AddMechanism("test", "a test").AddCounter("avoided", "a test");
  const auto exchange = std::make_shared<Exchange>(kSecond, kSecond, true, avoided);
  exchange->Open([] {});
  std::shared_ptr<PeerDataset> dataset = *PeerDataset::Make(0, catalog, 0, SteadyClock().Now());
  View view{.version = 1, .nodes = 2, .members = {}};
  for (uint32_t node = 0; node < 2; ++node) {
    Member member;
    member.node = node;
    member.memory = 1 << 20;
    view.members.push_back(member);
  }
  Directory plan(0, Engine::TierLengths(*catalog));
  plan.OnView(view);
  dataset->SetPlan(plan);
  dataset->SetReach(1, Reach::kReady);
  auto source = PeerSource::Make(exchange, dataset, *MakeNullSource(16));
  ASSERT_TRUE(source);
  std::array<std::array<std::byte, 100>, 3> bytes{};
  std::vector<SourceRead> reads;
  for (SampleId s = 0; reads.size() < 3; ++s) {
    if (plan.Locate(s).home != 1) continue;
    reads.push_back({.tag = s, .sample = s, .dest = bytes[reads.size()]});
  }
  ASSERT_EQ((*source)->Submit(reads), 3u);
  std::vector<Ask> asks;
  std::vector<std::shared_ptr<PeerDataset>> datasets;
  exchange->Take(&asks, &datasets);
  ASSERT_EQ(asks.size(), 3u);
  for (const Ask& ask : asks) {
    const Answer answer{.slot = ask.slot, .outcome = Outcome::kArrived, .crc = Crc32c(ask.dest)};
    dataset->Deliver({&answer, 1});
  }
  std::array<SourceDone, 1> done;
  ASSERT_EQ((*source)->Reap(done), 1u);
  source->reset();  // must not wait for the two others to come again
}

TEST_F(PeersTest, WithoutCoordinationEachReadsForItself) {
  options_.coordinate = false;
  Start(2, 64 << 20, MakeFiles(100, 1000, 3000));
  for (uint64_t epoch = 0; epoch < 4; ++epoch) Epoch(epoch);
  EXPECT_GT(SourceReads(), 150u);
  EXPECT_EQ(Seen(0, 1).reads, 0u);
}

class PeersOverTest : public PeersTest, public ::testing::WithParamInterface<const char*> {};

INSTANTIATE_TEST_SUITE_P(, PeersOverTest, ::testing::Values("tcp", "tls", "ucx"),
                         [](const auto& one) { return std::string(one.param); });

TEST_P(PeersOverTest, ReadEachSampleOnceAndOutliveADeadOne) {
  const TransportKind kind = *ParseTransportKind(GetParam());
  const Result<std::string> there = kind == TransportKind::kUcx   ? UcxVersion()
                                    : kind == TransportKind::kTls ? TlsVersion()
                                                                  : Result<std::string>("");
  if (!there) GTEST_SKIP() << there.error().message();
  parts_.transport = [kind](TransportHandler& handler) {
    std::string trust;
    const TransportOptions options{.listen = "127.0.0.1:0", .tls_key = std::string(32, 'k')};
    auto made = MakeTransport(kind, options, handler, &trust);
    EXPECT_EQ(trust.empty(), kind != TransportKind::kUcx) << trust;
    return made;
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
