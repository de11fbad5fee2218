// Copies of what a node uses later come to it while its link is idle.
#include <gtest/gtest.h>

#include <memory>
#include <numeric>
#include <set>
#include <string>
#include <vector>

#include "core/directory.h"
#include "peer/peer_testing.h"

namespace forebay::peer {
namespace {

constexpr uint32_t kLarge = 6, kSmall = 100, kSamples = kLarge + kSmall;
constexpr uint32_t kLargeBytes = 1 << 20, kSmallBytes = 6000;
constexpr SampleId kFirst = kSamples - 1;  // read before the others

// Two nodes with room for three large samples and all small ones each, so that the other's large
// ones are never kept. Node 1 is to use the large ones first: read-ahead stops at the second that
// it cannot keep, in front of all small ones.
class PullTest : public testing::PeerCluster {
 protected:
  PullTest() {
    options_.request_wait = 20 * kSecond;
    options_.join_wait = 20 * kSecond;
    options_.lease = 20 * kSecond;
    engine_options_.memory_tier = 39 * (uint64_t{kLargeBytes} / 10);
    engine_options_.read_ahead = 64 << 10;
  }

  void Begin() {
    const std::string dir = root_ + "/data";
    std::filesystem::create_directories(dir);
    for (SampleId s = 0; s < kSamples; ++s) {
      std::vector<std::byte> bytes(Length(s));
      FillNullSample(s, bytes);
      std::ofstream(StrCat(dir, "/", 100000 + s, ".bin"), std::ios::binary)
          .write(reinterpret_cast<const char*>(bytes.data()),
                 static_cast<std::streamsize>(bytes.size()));
    }
    const auto catalog = Open();
    Prepare(2);
    for (uint32_t node = 0; node < 2; ++node) PeerCluster::Begin(node, 24 << 20);
    for (One& one : nodes_) {
      ASSERT_TRUE(one.engine->registry().SetKnob("peer_pull", 0).ok());
      auto dataset = one.engine->AddDataset(catalog);
      ASSERT_TRUE(dataset) << dataset.status().ToString();
      one.dataset = *dataset;
    }
    // One is read when both have a plan of where samples live, and it is the same.
    const StreamId stream = Declare({kFirst});
    TakeOne(stream, kFirst);
    ASSERT_TRUE(nodes_[1].engine->CloseStream(stream).ok());
    Directory plan(1, Engine::TierLengths(*catalog));
    plan.OnView(registrar_->Current(-1));
    for (SampleId s = 0; s < kSamples; ++s) {
      if (plan.Locate(s).home == 0) theirs_.insert(s);
    }
    for (SampleId s = 0; s < kLarge; ++s) {
      ASSERT_EQ(plan.ShareOf(s), theirs_.contains(s) ? KeepShare::kNone : KeepShare::kHome) << s;
    }
  }

  static uint32_t Length(SampleId sample) { return sample < kLarge ? kLargeBytes : kSmallBytes; }

  // What node 1 will use.
  StreamId Declare(std::vector<SampleId> order) {
    StreamOptions options;
    options.shape.dataset = nodes_[1].dataset;
    options.declared = true;
    auto stream = nodes_[1].engine->OpenStream(options);
    EXPECT_TRUE(stream) << stream.status().ToString();
    EXPECT_TRUE(nodes_[1].engine->Declare(*stream, 0, std::move(order), true).ok());
    return *stream;
  }

  void TakeOne(StreamId stream, SampleId expected) {
    Engine& engine = *nodes_[1].engine;
    BatchLoan loan;
    auto taken = engine.Take(stream, 20 * kSecond, &loan);
    ASSERT_TRUE(taken) << taken.status().ToString();
    ASSERT_EQ(*taken, TakeKind::kBatch) << engine.WaitingFor(stream);
    ASSERT_EQ(loan.samples, std::vector<SampleId>{expected});
    std::vector<std::byte> bytes(Length(expected));
    FillNullSample(expected, bytes);
    ASSERT_EQ(loan.lengths[0], bytes.size());
    ASSERT_EQ(std::memcmp(engine.base() + loan.offsets[0], bytes.data(), bytes.size()), 0);
    ASSERT_TRUE(engine.Release(loan.lease).ok());
  }

  // Small samples that the node has, but for the first one that was read.
  std::set<SampleId> HeldSmall(uint32_t node) {
    std::set<SampleId> held;
    const std::vector<std::byte> bits = nodes_[node].engine->HeldBits(nodes_[node].dataset);
    for (SampleId s = kLarge; s < kFirst; ++s) {
      if ((std::to_integer<unsigned>(bits[s / 8]) >> (s % 8) & 1) != 0) held.insert(s);
    }
    return held;
  }

  std::set<SampleId> theirs_;  // what lives with node 0
};

TEST_F(PullTest, AnIdleLinkBringsWhatReadAheadCannotReach) {
  Begin();
  Engine& engine = *nodes_[1].engine;
  std::vector<SampleId> order(kFirst);
  std::iota(order.begin(), order.end(), 0);
  const StreamId stream = Declare(order);
  std::set<SampleId> wanted;
  for (SampleId s = kLarge; s < kFirst; ++s) {
    if (theirs_.contains(s)) wanted.insert(s);
  }
  ASSERT_GT(wanted.size(), 20u);
  ASSERT_LT(wanted.size(), kSmall - 20u);
  // The stream waits with its first sample; nobody takes it.
  ASSERT_TRUE(
      Within(10 * kSecond, [&] { return engine.Upcoming(nodes_[1].dataset, 1).size() == 1; }));
  EXPECT_EQ(HeldSmall(1), std::set<SampleId>{});
  EXPECT_EQ(Value(engine, "forebay_peer_pulled_samples_total"), 0u);

  ASSERT_TRUE(engine.registry().SetKnob("peer_pull", 1).ok());
  EXPECT_TRUE(Within(10 * kSecond, [&] { return HeldSmall(1) == wanted; }))
      << HeldSmall(1).size() << " of " << wanted.size();
  EXPECT_EQ(HeldSmall(0), wanted) << "their home has read them";
  EXPECT_TRUE(Within(10 * kSecond, [&] {
    return Value(engine, "forebay_peer_pulled_samples_total") == wanted.size();
  }));

  // They are used from here, and nothing was read twice.
  const uint64_t served = Value(*nodes_[0].engine, "forebay_peer_served_samples_total");
  for (const SampleId s : order) TakeOne(stream, s);
  const uint64_t large = kLarge / 2 - (theirs_.contains(0) ? 1 : 0);
  EXPECT_LE(Value(*nodes_[0].engine, "forebay_peer_served_samples_total") - served, large);
  EXPECT_EQ(SourceReads(), kSamples) << Fates();
}

}  // namespace
}  // namespace forebay::peer
