// The engine's side of a cluster: a source that asks others, shares, and streams that serve.
#include <gtest/gtest.h>
#include <poll.h>
#include <unistd.h>

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <map>
#include <thread>

#include "base/crc32c.h"
#include "base/files_testing.h"
#include "source/null_source.h"
#include "stage/engine.h"

namespace forebay {
namespace {

namespace fs = std::filesystem;

// Samples below `remote` come from node 3, the rest from the inner source.
class FakePeers final : public Source {
 public:
  FakePeers(std::unique_ptr<Source> inner, const std::atomic<uint32_t>& remote)
      : inner_(std::move(inner)), remote_(remote) {}
  size_t Submit(std::span<const SourceRead> reads) override {
    for (const SourceRead& read : reads) by_tag_[read.tag] = read;
    const size_t taken = inner_->Submit(reads);
    for (const SourceRead& read : reads.subspan(taken)) by_tag_.erase(read.tag);
    return taken;
  }
  size_t Reap(std::span<SourceDone> out) override {
    const size_t n = inner_->Reap(out);
    for (SourceDone& done : out.first(n)) {
      const SourceRead read = by_tag_.extract(done.tag).mapped();
      if (read.sample < remote_ && !read.skip_tier) done.peer = 3;
    }
    return n;
  }
  int event_fd() const override { return inner_->event_fd(); }
  size_t capacity() const override { return inner_->capacity(); }
  std::string Describe() const override { return "peers, " + inner_->Describe(); }
  int32_t Elsewhere(SampleId sample) const override { return sample < remote_ ? 3 : -1; }

 private:
  const std::unique_ptr<Source> inner_;
  const std::atomic<uint32_t>& remote_;
  std::map<uint64_t, SourceRead> by_tag_;
};

class EngineCluster : public ::testing::Test {
 protected:
  static constexpr uint32_t kSamples = 200;
  static constexpr uint32_t kBytes = 20'000;

  void SetUp() override {
    char name[] = "/tmp/forebay_cluster_XXXXXX";
    ASSERT_NE(mkdtemp(name), nullptr);
    root_ = name;
    fs::create_directories(root_ + "/data");
    for (uint32_t i = 0; i < kSamples; ++i) {
      std::vector<std::byte> bytes(kBytes);
      FillNullSample(i, bytes);
      std::ofstream(StrCat(root_, "/data/", 1000 + i), std::ios::binary)
          .write(reinterpret_cast<const char*>(bytes.data()),
                 static_cast<std::streamsize>(bytes.size()));
      WrittenLongAgo(StrCat(root_, "/data/", 1000 + i));
    }
    auto built = BuildCatalog(root_ + "/data", {});
    ASSERT_TRUE(built) << built.status().ToString();
    catalog_ = std::shared_ptr<const Catalog>(*std::move(built));
  }
  void TearDown() override {
    engine_.reset();
    fs::remove_all(root_);
  }

  void Start(uint64_t memory_tier = 0, bool folder = false) {
    EngineOptions options;
    options.memory = 32 << 20;
    options.memory_tier = memory_tier;
    if (folder) options.cache_folder = root_ + "/cache";
    auto engine = Engine::Create(options);
    ASSERT_TRUE(engine) << engine.status().ToString();
    engine_ = *std::move(engine);
    // A read that a busy machine holds up is not raced: reads are counted here.
    EXPECT_TRUE(engine_->registry().SetKnob("hedge_one_in", 0).ok());
    engine_->SetSourceWrap(
        [this](DatasetId dataset, const std::shared_ptr<const Catalog>& catalog,
               std::unique_ptr<Source> inner) -> Result<std::unique_ptr<Source>> {
          EXPECT_EQ(engine_->shared_catalog(dataset), nullptr);  // it is not there yet
          EXPECT_EQ(catalog->size(), kSamples);
          if (!early_.empty()) engine_->SetShare(dataset, early_);
          return std::unique_ptr<Source>(new FakePeers(std::move(inner), remote_));
        });
    auto dataset = engine_->AddDataset(catalog_);
    ASSERT_TRUE(dataset) << dataset.status().ToString();
    dataset_ = *dataset;
  }

  StreamId Train() {
    StreamOptions options;
    options.shape.dataset = dataset_;
    options.shape.batch_size = 10;
    options.sampler.size = kSamples;
    auto stream = engine_->OpenStream(options);
    EXPECT_TRUE(stream);
    return *stream;
  }

  void Epoch(StreamId stream) {
    size_t samples = 0;
    while (true) {
      BatchLoan loan;
      auto taken = engine_->Take(stream, 20 * kSecond, &loan);
      ASSERT_TRUE(taken) << taken.status().ToString();
      ASSERT_NE(*taken, TakeKind::kPending) << engine_->WaitingFor(stream);
      if (*taken != TakeKind::kBatch) break;
      for (size_t i = 0; i < loan.samples.size(); ++i) Check(loan, i);
      samples += loan.samples.size();
      ASSERT_TRUE(engine_->Release(loan.lease).ok());
    }
    EXPECT_EQ(samples, kSamples);
  }

  void Check(const BatchLoan& loan, size_t i) {
    std::vector<std::byte> expected(loan.lengths[i]);
    FillNullSample(loan.samples[i], expected);
    ASSERT_EQ(std::memcmp(engine_->base() + loan.offsets[i], expected.data(), expected.size()), 0);
  }

  uint64_t Value(std::string_view metric) {
    for (const Registry::Sample& sample : engine_->registry().Snapshot()) {
      if (sample.name == metric) return sample.value;
    }
    ADD_FAILURE() << "no metric " << metric;
    return 0;
  }

  std::vector<SampleId> Held() const {
    const std::vector<std::byte> bits = engine_->HeldBits(dataset_);
    std::vector<SampleId> held;
    for (SampleId s = 0; s < kSamples; ++s) {
      if ((bits[s / 8] >> (s % 8) & std::byte{1}) != std::byte{0}) held.push_back(s);
    }
    return held;
  }

  std::string root_;
  std::shared_ptr<const Catalog> catalog_;
  std::atomic<uint32_t> remote_ = 0;
  std::vector<uint8_t> early_;
  EnginePtr engine_;
  DatasetId dataset_ = 0;
};

TEST_F(EngineCluster, WhatPeersGiveIsCountedAsTheirs) {
  remote_ = 150;
  Start();
  const StreamId stream = Train();
  Epoch(stream);
  const std::vector<EpochStats> stats = engine_->Stats(stream);
  ASSERT_EQ(stats.size(), 1u);
  EXPECT_EQ(stats[0].peer_reads, 150u);
  EXPECT_EQ(stats[0].peer_bytes, 150u * kBytes);
  EXPECT_EQ(stats[0].source_reads, 50u);
  EXPECT_EQ(Value("forebay_peer_reads_total"), 150u);
  EXPECT_EQ(Value("forebay_peer_read_bytes_total"), 150u * kBytes);
  EXPECT_EQ(Value("forebay_source_reads_total"), 50u);
  EXPECT_EQ(Value("forebay_source_requests_total"), 50u);
  Epoch(stream);
  EXPECT_EQ(engine_->Stats(stream)[1].peer_reads, 0u) << "all of it is kept";
}

TEST_F(EngineCluster, TheCacheFolderLiesBeforePeers) {
  remote_ = 150;
  Start(1 << 20, true);
  const StreamId stream = Train();
  // A copy that the folder was too busy for is made by a later epoch.
  for (int i = 0; i < 200 && Value("forebay_tier_writes_total") < kSamples; ++i) {
    Epoch(stream);
    usleep(20'000);
  }
  EXPECT_GE(Value("forebay_peer_reads_total"), 150u);
  engine_.reset();
  Start(1 << 20, true);
  Epoch(Train());
  EXPECT_EQ(Value("forebay_peer_reads_total"), 0u);
  EXPECT_EQ(Value("forebay_source_reads_total"), 0u);
  EXPECT_GE(Value("forebay_tier_hits_total"), kSamples);
}

TEST_F(EngineCluster, TheShareHoldsFromTheStartAndCanChange) {
  early_.assign(kSamples, static_cast<uint8_t>(KeepShare::kNone));
  for (SampleId s = 0; s < 20; ++s) early_[s] = static_cast<uint8_t>(KeepShare::kHome);
  Start(8 << 20);
  EXPECT_TRUE(engine_->TakeHeldChanges(dataset_).got.empty());
  const StreamId stream = Train();
  Epoch(stream);
  EXPECT_EQ(Held().size(), 20u);
  EXPECT_EQ(Held().back(), 19u);
  EXPECT_EQ(engine_->TakeHeldChanges(dataset_).got.size(), 20u);
  std::vector<uint8_t> share(kSamples, static_cast<uint8_t>(KeepShare::kReplica));
  engine_->SetShare(dataset_, share);
  Epoch(stream);
  EXPECT_EQ(Held().size(), kSamples);
  engine_->SetShare(dataset_ + 7, {});  // of nobody: harmless
}

TEST_F(EngineCluster, AServingStreamFetchesWithoutAnyonesStall) {
  Start();
  auto serving = engine_->OpenServing(dataset_);
  ASSERT_TRUE(serving);
  BatchLoan loan;
  EXPECT_FALSE(engine_->Take(*serving, 0, &loan)) << "it has no order";
  std::vector<LeaseId> leases(kSamples, kNoLease);
  size_t done = 0;
  const Nanos until = SteadyClock().Now() + 20 * kSecond;
  while (done < kSamples && SteadyClock().Now() < until) {
    for (SampleId s = 0; s < kSamples; ++s) {
      if (leases[s] == ~LeaseId{0}) continue;
      auto taken = engine_->Fetch(*serving, s, 0, &leases[s], &loan);
      ASSERT_TRUE(taken) << taken.status().ToString();
      if (*taken == TakeKind::kPending) continue;
      ASSERT_EQ(*taken, TakeKind::kBatch);
      Check(loan, 0);
      ASSERT_EQ(loan.crcs.size(), 1u);
      EXPECT_EQ(loan.crcs[0], Crc32c({engine_->base() + loan.offsets[0], loan.lengths[0]}));
      ASSERT_TRUE(engine_->Release(loan.lease).ok());
      leases[s] = ~LeaseId{0};
      ++done;
    }
    if (done == kSamples) break;
    // Whatever is pending ends with this descriptor.
    pollfd wait{engine_->serving_fd(), POLLIN, 0};
    ASSERT_EQ(poll(&wait, 1, 10'000), 1);
    uint64_t count = 0;
    ASSERT_EQ(read(engine_->serving_fd(), &count, sizeof count), 8);
  }
  EXPECT_EQ(done, kSamples);
  EXPECT_EQ(Value("forebay_source_reads_total"), kSamples);
  EXPECT_EQ(Value("forebay_stage_samples_total"), 0u) << "no consumer had any";
  EXPECT_EQ(Value("forebay_stall_source_nanoseconds_total"), 0u);
  EXPECT_TRUE(engine_->Stats(*serving).empty());
  // A consumer finds what was read for others.
  const StreamId stream = Train();
  Epoch(stream);
  EXPECT_EQ(Value("forebay_source_reads_total"), kSamples);
  EXPECT_TRUE(engine_->CloseStream(*serving).ok());
}

TEST_F(EngineCluster, ServesWhileItTrains) {
  std::vector<uint8_t> share(kSamples, static_cast<uint8_t>(KeepShare::kNone));
  for (SampleId s = 0; s < 50; ++s) share[s] = static_cast<uint8_t>(KeepShare::kHome);
  early_ = share;
  Start(2 << 20);
  auto serving = engine_->OpenServing(dataset_);
  ASSERT_TRUE(serving);
  std::jthread server([&](std::stop_token stop) {
    std::vector<std::pair<SampleId, LeaseId>> pending;
    SampleId next = 0;
    BatchLoan loan;
    while (!stop.stop_requested()) {
      while (pending.size() < 30) pending.emplace_back(next++ % kSamples, kNoLease);
      std::erase_if(pending, [&](auto& asked) {
        auto taken = engine_->Fetch(*serving, asked.first, 0, &asked.second, &loan);
        EXPECT_TRUE(taken);
        if (!taken || *taken != TakeKind::kBatch) return false;
        Check(loan, 0);
        EXPECT_TRUE(engine_->Release(loan.lease).ok());
        return true;
      });
      pollfd wait{engine_->serving_fd(), POLLIN, 0};
      poll(&wait, 1, 10);
      uint64_t count = 0;
      (void)!read(engine_->serving_fd(), &count, sizeof count);
    }
    for (const auto& [sample, lease] : pending) {
      if (lease == kNoLease) continue;
      EXPECT_TRUE(engine_->Release(lease).ok());
    }
  });
  const StreamId stream = Train();
  for (int epoch = 0; epoch < 3; ++epoch) Epoch(stream);
  server.request_stop();
  server.join();
  EXPECT_TRUE(engine_->CloseStream(*serving).ok());
  for (SampleId s = 0; s < 50; ++s) EXPECT_EQ(Held().at(s), s);
}

TEST_F(EngineCluster, SaysWhatItHasRoomForAndWhoElseIsThere) {
  Start(4 << 20, true);
  const NodeRoom room = engine_->TierRoom();
  EXPECT_GE(room.memory, uint64_t{3} << 20);
  EXPECT_LE(room.memory, uint64_t{4} << 20);
  EXPECT_GT(room.folder, 0u);
  const std::vector<uint32_t> lengths = engine_->TierLengths(dataset_);
  ASSERT_EQ(lengths.size(), kSamples);
  EXPECT_GE(lengths[0], kBytes);
  EXPECT_EQ(engine_->Cluster().nodes, 0u);
  engine_->SetClusterReport([] {
    ClusterReport report;
    report.nodes = 4;
    report.peers.resize(3);
    return report;
  });
  EXPECT_EQ(engine_->Cluster().peers.size(), 3u);
  engine_->SetClusterReport(nullptr);
  EXPECT_EQ(engine_->Cluster().nodes, 0u);
}

TEST_F(EngineCluster, AWaitForAPeerNamesIt) {
  remote_ = kSamples;
  EngineOptions options;
  options.memory = 32 << 20;
  auto engine = Engine::Create(options);
  ASSERT_TRUE(engine);
  engine_ = *std::move(engine);
  // A peer that does not answer for long.
  class Silent final : public Source {
   public:
    Silent(std::unique_ptr<Source> inner, const std::atomic<bool>& silent)
        : inner_(std::move(inner)), silent_(silent) {}
    size_t Submit(std::span<const SourceRead> reads) override { return inner_->Submit(reads); }
    size_t Reap(std::span<SourceDone> out) override { return silent_ ? 0 : inner_->Reap(out); }
    int event_fd() const override { return inner_->event_fd(); }
    size_t capacity() const override { return inner_->capacity(); }
    std::string Describe() const override { return "silent"; }
    int32_t Elsewhere(SampleId) const override { return 2; }

   private:
    const std::unique_ptr<Source> inner_;
    const std::atomic<bool>& silent_;
  };
  std::atomic<bool> silent = true;
  engine_->SetSourceWrap([&](DatasetId, const std::shared_ptr<const Catalog>&,
                             std::unique_ptr<Source> inner) -> Result<std::unique_ptr<Source>> {
    return std::unique_ptr<Source>(new Silent(std::move(inner), silent));
  });
  dataset_ = *engine_->AddDataset(catalog_);
  const StreamId stream = Train();
  BatchLoan loan;
  EXPECT_EQ(*engine_->Take(stream, 50 * kMilli, &loan), TakeKind::kPending);
  EXPECT_EQ(engine_->WaitingFor(stream).substr(0, 15), "peer (node 2): ");
  EXPECT_GT(Value("forebay_stall_peer_nanoseconds_total"), 0u);
  silent = false;
  EXPECT_EQ(*engine_->Take(stream, 20 * kSecond, &loan), TakeKind::kBatch);
  engine_.reset();
}

}  // namespace
}  // namespace forebay
