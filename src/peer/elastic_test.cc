// A job that is restarted on more or fewer nodes, with the cache folders of those that stay.
#include <gtest/gtest.h>

#include <set>
#include <vector>

#include "peer/peer_testing.h"

namespace forebay::peer {
namespace {

constexpr uint32_t kSamples = 480, kStep = 60;  // a step: the global batch of 3, 4 and 5 ranks

class ElasticTest : public testing::PeerCluster {
 protected:
  struct Where {
    uint64_t epoch = 0, position = 0;
  };

  // All ranks of one job from `at` on, one step after the other. Returns what they were given in
  // each step, all ranks together and sorted, and moves `at`.
  std::vector<std::vector<SampleId>> Steps(uint32_t nodes, int steps, Where* at) {
    Prepare(nodes);
    for (uint32_t node = 0; node < nodes; ++node) {
      engine_options_.cache_folder = StrCat(root_, "/cache", node);
      Begin(node, 64 << 20);
    }
    const auto catalog = Open();
    for (uint32_t node = 0; node < nodes; ++node) {
      auto dataset = nodes_[node].engine->AddDataset(catalog);
      EXPECT_TRUE(dataset) << dataset.status().ToString();
      nodes_[node].dataset = *dataset;
    }
    // Nobody has read anything: what is held is in the folders.
    missing_ = kSamples - Held(nodes).size();
    for (uint32_t node = 0; node < nodes; ++node) OpenRank(node, *at);
    std::vector<std::vector<SampleId>> got(static_cast<size_t>(steps));
    std::vector<std::vector<std::vector<SampleId>>> each(nodes, got);
    std::vector<std::jthread> ranks;
    for (uint32_t node = 0; node < nodes; ++node) {
      ranks.emplace_back([&, node] {
        for (auto& step : each[node]) TakeBatch(nodes_[node], &step);
      });
    }
    ranks.clear();
    for (size_t k = 0; k < got.size(); ++k) {
      for (const auto& rank : each) got[k].insert(got[k].end(), rank[k].begin(), rank[k].end());
      std::sort(got[k].begin(), got[k].end());
    }
    at->position += static_cast<uint64_t>(steps) * kStep;
    at->epoch += at->position / kSamples;
    at->position %= kSamples;
    return got;
  }

  void OpenRank(uint32_t node, const Where& at) {
    One& one = nodes_[node];
    const auto world = static_cast<uint32_t>(nodes_.size());
    StreamOptions options;
    options.shape.dataset = one.dataset;
    options.shape.batch_size = kStep / world;
    options.shape.first_epoch = at.epoch;
    options.shape.first_position = at.position;
    options.shape.epochs = 1;
    options.sampler.size = kSamples;
    options.sampler.seed = 7;
    options.sampler.world = world;
    options.sampler.rank = node;
    options.sampler.exchange = locality_ ? kStep / world : 0;
    auto stream = one.engine->OpenStream(options);
    ASSERT_TRUE(stream) << stream.status().ToString();
    one.stream = *stream;
  }

  static void TakeBatch(One& one, std::vector<SampleId>* samples) {
    BatchLoan loan;
    while (true) {
      auto taken = one.engine->Take(one.stream, 20 * kSecond, &loan);
      ASSERT_TRUE(taken) << taken.status().ToString();
      if (*taken == TakeKind::kEndOfEpoch) continue;
      ASSERT_EQ(*taken, TakeKind::kBatch) << one.engine->WaitingFor(one.stream);
      break;
    }
    for (size_t i = 0; i < loan.samples.size(); ++i) {
      std::vector<std::byte> expected(loan.lengths[i]);
      FillNullSample(loan.samples[i], expected);
      ASSERT_EQ(std::memcmp(one.engine->base() + loan.offsets[i], expected.data(), expected.size()),
                0)
          << "sample " << loan.samples[i];
    }
    *samples = loan.samples;
    ASSERT_TRUE(one.engine->Release(loan.lease).ok());
  }

  // Asks that a slow machine made fail.
  uint64_t Failed() {
    return Sum("forebay_peer_timeouts_total") + Sum("forebay_peer_refused_total") +
           Sum("forebay_peer_avoided_total") + Sum("forebay_source_hedged_reads_total");
  }

  void ExpectOnlyMissingWasRead() {
    // Once the source was read and answered much faster than the folder, as it may on a busy
    // machine, the scheduler passes the folder over.
    const uint64_t passed_over = missing_ == 0 ? 0 : kSamples / 4;
    EXPECT_LE(SourceReads(), missing_ + Failed() + passed_over);
  }

  // Samples that one of the first `nodes` nodes has.
  std::set<SampleId> Held(uint32_t nodes) {
    std::set<SampleId> held;
    for (uint32_t node = 0; node < nodes; ++node) {
      const std::vector<std::byte> bits = nodes_[node].engine->HeldBits(nodes_[node].dataset);
      for (SampleId s = 0; s < kSamples; ++s) {
        if ((std::to_integer<unsigned>(bits[s / 8]) >> (s % 8) & 1) != 0) held.insert(s);
      }
    }
    return held;
  }

  // Ends the job as a whole.
  void End() {
    for (One& one : nodes_) {
      one.peers.reset();
      one.engine.reset();
    }
    nodes_.clear();
  }

  // What the steps from `at` on must be, whatever the number of ranks.
  static std::vector<std::vector<SampleId>> Expected(int steps, Where at) {
    std::vector<std::vector<SampleId>> out;
    SamplerSpec whole;
    whole.size = kSamples;
    whole.seed = 7;
    for (int k = 0; k < steps; ++k) {
      const auto order = EpochOrder(whole, at.epoch);
      const auto begin = order.begin() + static_cast<ptrdiff_t>(at.position);
      out.emplace_back(begin, begin + kStep);
      std::sort(out.back().begin(), out.back().end());
      at.position += kStep;
      if (at.position == kSamples) at = {at.epoch + 1, 0};
    }
    return out;
  }

  void FourThenThreeThenFive();

  bool locality_ = false;
  size_t missing_ = 0;  // in all folders when the job began
};

void ElasticTest::FourThenThreeThenFive() {
  MakeFiles(kSamples, 10000, 12000);
  engine_options_.cache_bytes = uint64_t{kSamples} * 16384;
  Where at;
  // One epoch.
  auto expected = Expected(8, at);
  EXPECT_EQ(Steps(4, 8, &at), expected);
  EXPECT_EQ(missing_, kSamples);
  EXPECT_EQ(SourceReads(), kSamples);
  ASSERT_TRUE(Within(10 * kSecond, [&] { return Held(4).size() == kSamples; }));
  End();

  // The fourth is gone; the job ends in the middle of the epoch.
  expected = Expected(5, at);
  EXPECT_EQ(Steps(3, 5, &at), expected);
  EXPECT_GT(missing_, 0u);
  EXPECT_LT(missing_, kSamples / 2);
  ExpectOnlyMissingWasRead();
  End();

  // Two more, one of them with what it had before: the rest of the epoch.
  expected = Expected(3, at);
  EXPECT_EQ(Steps(5, 3, &at), expected);
  ExpectOnlyMissingWasRead();
  ASSERT_TRUE(Within(10 * kSecond, [&] { return Held(5).size() == kSamples; }));
  End();

  expected = Expected(8, at);
  EXPECT_EQ(Steps(5, 8, &at), expected);
  ExpectOnlyMissingWasRead();
}

TEST_F(ElasticTest, FourNodesThenThreeThenFive) { FourThenThreeThenFive(); }

TEST_F(ElasticTest, SoDoesAJobWithLocality) {
  locality_ = true;
  FourThenThreeThenFive();
}

}  // namespace
}  // namespace forebay::peer
