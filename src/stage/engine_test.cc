#include "stage/engine.h"

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <thread>

#include "catalog/test_data.h"
#include "source/delay_source.h"
#include "source/fault_source.h"
#include "source/null_source.h"
#include "stage/early_samples.h"

namespace forebay {
namespace {

namespace fs = std::filesystem;

// A folder of files whose bytes are FillNullSample's, so that every source agrees on them.
class EngineTest : public ::testing::Test {
 protected:
  void SetUp() override {
    char name[] = "/tmp/forebay_engine_XXXXXX";
    ASSERT_NE(mkdtemp(name), nullptr);
    root_ = name;
  }
  void TearDown() override { fs::remove_all(root_); }

  std::shared_ptr<const Catalog> MakeFiles(uint32_t n, uint32_t low, uint32_t high) {
    SplitMix64 rng(n);
    std::vector<std::string> paths;
    const std::string dir = root_ + "/" + std::to_string(n) + "_" + std::to_string(high);
    fs::create_directories(dir);
    for (uint32_t i = 0; i < n; ++i) {
      std::vector<std::byte> bytes(low + rng.Below(high - low + 1));
      FillNullSample(i, bytes);
      paths.push_back(dir + "/" + std::to_string(i));
      std::ofstream(paths.back(), std::ios::binary)
          .write(reinterpret_cast<const char*>(bytes.data()),
                 static_cast<std::streamsize>(bytes.size()));
    }
    auto built = BuildFileList(paths, {});
    EXPECT_TRUE(built) << built.status().ToString();
    return std::shared_ptr<const Catalog>(*std::move(built));
  }

  // A folder of such files whose sizes are not known yet.
  std::shared_ptr<const Catalog> MakeUnsized(uint32_t n, uint32_t low, uint32_t high) {
    SplitMix64 rng(n);
    const std::string dir = root_ + "/unsized" + std::to_string(high);
    fs::create_directories(dir);
    for (uint32_t i = 0; i < n; ++i) {
      std::vector<std::byte> bytes(low + rng.Below(high - low + 1));
      FillNullSample(i, bytes);
      std::ofstream(StrCat(dir, "/", 100000 + i), std::ios::binary)
          .write(reinterpret_cast<const char*>(bytes.data()),
                 static_cast<std::streamsize>(bytes.size()));
    }
    BuildOptions options;
    options.sizes_later = true;
    auto built = BuildCatalog(dir, options);
    EXPECT_TRUE(built) << built.status().ToString();
    EXPECT_FALSE((*built)->complete());
    return std::shared_ptr<const Catalog>(*std::move(built));
  }

  // The same bytes in one tar file.
  std::shared_ptr<const Catalog> MakeShard(uint32_t n, uint32_t length,
                                           EarlySink* early = nullptr) {
    std::string shard;
    for (uint32_t i = 0; i < n; ++i) {
      std::vector<std::byte> bytes(length);
      FillNullSample(i, bytes);
      shard += testing::TarMember(
          StrCat("s", 100000 + i, ".bin"),
          std::string(reinterpret_cast<const char*>(bytes.data()), bytes.size()));
    }
    shard += testing::TarEnd();
    const std::string dir = root_ + "/shards";
    fs::create_directories(dir);
    std::ofstream(dir + "/a.tar", std::ios::binary)
        .write(shard.data(), static_cast<std::streamsize>(shard.size()));
    BuildOptions options;
    options.early = early;
    auto built = BuildCatalog(dir, options);
    EXPECT_TRUE(built) << built.status().ToString();
    return std::shared_ptr<const Catalog>(*std::move(built));
  }

  static EnginePtr Make(uint64_t memory, bool verify = false) {
    EngineOptions options;
    options.memory = memory;
    options.verify = verify;
    options.release_wait = 300 * kMilli;
    auto engine = Engine::Create(options);
    EXPECT_TRUE(engine) << engine.status().ToString();
    // A read that a busy machine holds up is not raced: reads are counted here.
    EXPECT_TRUE((*engine)->registry().SetKnob("hedge_one_in", 0).ok());
    return *std::move(engine);
  }

  static StreamOptions Shape(DatasetId d, uint32_t n, uint32_t batch, uint64_t seed) {
    StreamOptions options;
    options.shape.dataset = d;
    options.shape.batch_size = batch;
    options.sampler.size = n;
    options.sampler.seed = seed;
    return options;
  }

  static uint64_t Value(Engine& engine, std::string_view metric) {
    for (const Registry::Sample& sample : engine.registry().Snapshot()) {
      if (sample.name == metric) return sample.value;
    }
    ADD_FAILURE() << "no metric " << metric;
    return 0;
  }

  static void CheckBytes(const Engine& engine, const BatchLoan& loan) {
    for (size_t i = 0; i < loan.samples.size(); ++i) {
      std::vector<std::byte> expected(loan.lengths[i]);
      if (expected.empty()) continue;  // memcmp takes no null
      FillNullSample(loan.samples[i], expected);
      ASSERT_EQ(std::memcmp(engine.base() + loan.offsets[i], expected.data(), expected.size()), 0)
          << "sample " << loan.samples[i];
    }
  }

  // Consumes one epoch and checks order and bytes.
  static void CheckEpoch(Engine& engine, StreamId s, const SamplerSpec& spec, uint64_t epoch) {
    const auto order = EpochOrder(spec, epoch);
    size_t at = 0;
    while (true) {
      BatchLoan loan;
      auto taken = engine.Take(s, 20 * kSecond, &loan);
      ASSERT_TRUE(taken) << taken.status().ToString();
      ASSERT_NE(*taken, TakeKind::kPending) << engine.WaitingFor(s);
      if (*taken != TakeKind::kBatch) break;
      ASSERT_EQ(loan.epoch, epoch);
      for (size_t i = 0; i < loan.samples.size(); ++i) ASSERT_EQ(loan.samples[i], order[at + i]);
      CheckBytes(engine, loan);
      at += loan.samples.size();
      ASSERT_TRUE(engine.Release(loan.lease).ok());
    }
    ASSERT_EQ(at, order.size());
  }

  std::string root_;
};

TEST_F(EngineTest, ReadsEachFileOnceAndServesLaterEpochsFromMemory) {
  auto catalog = MakeFiles(200, 0, 20000);
  EnginePtr engine = Make(64 << 20);
  auto d = engine->AddDataset(catalog);
  ASSERT_TRUE(d);
  const StreamOptions options = Shape(*d, 200, 7, 3);
  auto s = engine->OpenStream(options);
  ASSERT_TRUE(s);
  for (uint64_t epoch = 0; epoch < 3; ++epoch) CheckEpoch(*engine, *s, options.sampler, epoch);
  const auto stats = engine->Stats(*s);
  ASSERT_EQ(stats.size(), 3u);
  EXPECT_EQ(stats[0].source_reads + stats[1].source_reads + stats[2].source_reads, 200u);
  EXPECT_EQ(stats[2].source_reads, 0u);
  EXPECT_EQ(stats[1].samples, 200u);
  EXPECT_EQ(stats[1].batches, 29u);
}

TEST_F(EngineTest, BeginsBeforeSizesAreKnown) {
  auto catalog = MakeUnsized(300, 0, 20000);
  EnginePtr engine = Make(64 << 20);
  auto d = engine->AddDataset(catalog);
  ASSERT_TRUE(d);
  const StreamOptions options = Shape(*d, 300, 7, 3);
  auto s = engine->OpenStream(options);
  ASSERT_TRUE(s);
  for (uint64_t epoch = 0; epoch < 2; ++epoch) CheckEpoch(*engine, *s, options.sampler, epoch);
  EXPECT_EQ(Value(*engine, "forebay_source_reads_total"), 300u);
  ASSERT_TRUE(catalog->WaitComplete().ok());
  EXPECT_EQ(catalog->length(299), fs::file_size(catalog->ObjectPath(299)));
}

TEST_F(EngineTest, SizesThatComeLateFitASmallBudgetToo) {
  auto catalog = MakeUnsized(300, 100000, 200000);  // about 45 MB
  EnginePtr engine = Make(12 << 20);
  auto d = engine->AddDataset(catalog);
  ASSERT_TRUE(d);
  StreamOptions options = Shape(*d, 300, 5, 3);
  auto first = engine->OpenStream(options);
  // The second waits until all sizes are known.
  StreamOptions pieces = Shape(*d, 300, 5, 4);
  pieces.shape.contiguous = true;
  auto second = engine->OpenStream(pieces);
  ASSERT_TRUE(first && second);
  EXPECT_TRUE(catalog->complete());
  CheckEpoch(*engine, *first, options.sampler, 0);
  ASSERT_TRUE(engine->CloseStream(*first).ok());
  CheckEpoch(*engine, *second, pieces.sampler, 0);
}

TEST_F(EngineTest, AFileWithoutASizeFailsItsBatchUntilItIsBack) {
  auto catalog = MakeUnsized(40, 1000, 2000);
  const std::string victim = catalog->ObjectPath(17);
  fs::rename(victim, root_ + "/aside");
  EnginePtr engine = Make(16 << 20);
  auto d = engine->AddDataset(catalog);
  ASSERT_TRUE(d);
  StreamOptions options = Shape(*d, 40, 5, 3);
  options.sampler.shuffle = false;
  auto s = engine->OpenStream(options);
  BatchLoan loan;
  for (uint64_t batch = 0; batch < 3; ++batch) {
    ASSERT_EQ(*engine->Take(*s, 20 * kSecond, &loan), TakeKind::kBatch);
    EXPECT_EQ(loan.index, batch);
    ASSERT_TRUE(engine->Release(loan.lease).ok());
  }
  for (int i = 0; i < 2; ++i) {
    const auto failed = engine->Take(*s, 20 * kSecond, &loan);
    ASSERT_FALSE(failed);
    EXPECT_EQ(failed.error().code(), Code::kNotFound);
    EXPECT_NE(failed.error().message().find(victim), std::string::npos);
  }
  fs::rename(root_ + "/aside", victim);
  ASSERT_EQ(*engine->Take(*s, 20 * kSecond, &loan), TakeKind::kBatch);
  EXPECT_EQ(loan.index, 3u);
  CheckBytes(*engine, loan);
  ASSERT_TRUE(engine->Release(loan.lease).ok());
}

TEST_F(EngineTest, OneCatalogWithoutSizesForTwoEngines) {
  auto catalog = MakeUnsized(100, 1000, 2000);
  for (int round = 0; round < 2; ++round) {
    EnginePtr a = Make(16 << 20);
    EnginePtr b = Make(16 << 20);
    auto first = a->AddDataset(catalog);
    auto second = b->AddDataset(catalog);
    ASSERT_TRUE(first && second);
    EXPECT_TRUE(catalog->complete());
    const StreamOptions options = Shape(*first, 100, 7, 3);
    auto s = a->OpenStream(options);
    auto t = b->OpenStream(options);
    ASSERT_TRUE(s && t);
    CheckEpoch(*a, *s, options.sampler, 0);
    CheckEpoch(*b, *t, options.sampler, 0);
  }
}

// A daemon lives for weeks: what it does in a step must not grow with all streams that ever were.
TEST_F(EngineTest, WhatAScanHasReadIsNotReadAgain) {
  constexpr uint32_t kCount = 300;
  EnginePtr engine = Make(64 << 20);
  EarlySamples early(*engine);
  auto catalog = MakeShard(kCount, 3000, &early);
  // Small samples are read in large pieces, so all of them came by.
  ASSERT_EQ(early.size(), kCount);
  auto d = engine->AddDataset(catalog, nullptr, &early);
  ASSERT_TRUE(d) << d.status().ToString();
  EXPECT_EQ(Value(*engine, "forebay_source_reads_total"), kCount);
  fs::remove_all(root_ + "/shards");
  const StreamOptions options = Shape(*d, kCount, 7, 3);
  auto s = engine->OpenStream(options);
  ASSERT_TRUE(s);
  for (uint64_t epoch = 0; epoch < 2; ++epoch) CheckEpoch(*engine, *s, options.sampler, epoch);
  EXPECT_EQ(Value(*engine, "forebay_source_reads_total"), kCount);
}

TEST_F(EngineTest, WhatAScanHasReadTakesFreeMemoryAloneAndGivesItBack) {
  constexpr uint32_t kCount = 2000;
  EnginePtr engine = Make(16 << 20);
  const uint64_t before = Value(*engine, "forebay_stage_arena_used_bytes");
  {
    EarlySamples dropped(*engine);
    (void)MakeShard(kCount, 20000, &dropped);  // 40 MB
    EXPECT_GT(dropped.size(), 100u);
    EXPECT_LT(dropped.size(), kCount / 2);
  }
  EXPECT_EQ(Value(*engine, "forebay_stage_arena_used_bytes"), before);
  EarlySamples early(*engine);
  auto catalog = MakeShard(kCount, 20000, &early);
  auto d = engine->AddDataset(catalog, nullptr, &early);
  ASSERT_TRUE(d) << d.status().ToString();
  const StreamOptions options = Shape(*d, kCount, 16, 3);
  auto s = engine->OpenStream(options);
  ASSERT_TRUE(s);
  for (uint64_t epoch = 0; epoch < 2; ++epoch) CheckEpoch(*engine, *s, options.sampler, epoch);
}

TEST_F(EngineTest, WhatAScanHasReadGivesWayToTheTablesOfItsDataSet) {
  // A few large samples fill the memory; the tables are those of many small ones.
  std::string shard;
  uint32_t count = 0;
  const auto add = [&](size_t bytes) {
    shard += testing::TarMember(StrCat("s", 100000 + count++, ".bin"), std::string(bytes, 'x'));
  };
  for (int i = 0; i < 400; ++i) add(20000);
  for (int i = 0; i < 12000; ++i) add(1);
  fs::create_directories(root_ + "/shards");
  std::ofstream(root_ + "/shards/a.tar", std::ios::binary) << shard << testing::TarEnd();
  EnginePtr engine = Make(8 << 20);
  EarlySamples early(*engine);
  BuildOptions options;
  options.early = &early;
  auto built = BuildCatalog(root_ + "/shards", options);
  ASSERT_TRUE(built) << built.status().ToString();
  ASSERT_GT(early.size(), 100u);
  ASSERT_LT(early.size(), count / 2);
  const std::shared_ptr<const Catalog> catalog(*std::move(built));
  auto d = engine->AddDataset(catalog, nullptr, &early);
  EXPECT_TRUE(d) << d.status().ToString();
}

TEST_F(EngineTest, NumbersOfClosedStreamsAreUsedAgain) {
  auto catalog = MakeFiles(40, 0, 2000);
  EnginePtr engine = Make(16 << 20);
  auto d = engine->AddDataset(catalog);
  ASSERT_TRUE(d);
  auto first = engine->OpenStream(Shape(*d, 40, 4, 99));
  ASSERT_TRUE(first);
  BatchLoan held;
  ASSERT_TRUE(engine->Take(*first, 20 * kSecond, &held));
  ASSERT_TRUE(engine->CloseStream(*first).ok());
  StreamId largest = 0;
  SplitMix64 rng(1);
  for (uint64_t seed = 0; seed < 300; ++seed) {
    StreamOptions options = Shape(*d, 40, 4, seed);
    options.shape.contiguous = seed % 3 == 0;
    auto s = engine->OpenStream(options);
    ASSERT_TRUE(s);
    EXPECT_NE(*s, *first);  // whose batch is not given back
    largest = std::max(largest, *s);
    // Closed with its order, its reads or its batches under way, or after all of them.
    if (rng.Below(3) == 0) CheckEpoch(*engine, *s, options.sampler, 0);
    BatchLoan loan;
    if (rng.Below(2) == 0 && *engine->Take(*s, 20 * kSecond, &loan) == TakeKind::kBatch) {
      CheckBytes(*engine, loan);
      ASSERT_TRUE(engine->Release(loan.lease).ok());
    }
    ASSERT_TRUE(engine->CloseStream(*s).ok());
    EXPECT_EQ(engine->Take(*s, 0, &loan).status().code(), Code::kCancelled);
  }
  EXPECT_LT(largest, 100u);
  CheckBytes(*engine, held);
  ASSERT_TRUE(engine->Release(held.lease).ok());
  EXPECT_EQ(Value(*engine, "forebay_stage_leases"), 0u);
}

TEST_F(EngineTest, ASmallBudgetFailsNothing) {
  auto catalog = MakeFiles(300, 100000, 200000);  // about 45 MB
  EnginePtr engine = Make(12 << 20);
  auto d = engine->AddDataset(catalog);
  ASSERT_TRUE(d);
  for (bool contiguous : {false, true}) {
    StreamOptions options = Shape(*d, 300, 5, 3);
    options.shape.contiguous = contiguous;
    auto s = engine->OpenStream(options);
    ASSERT_TRUE(s);
    for (uint64_t epoch = 0; epoch < 2; ++epoch) CheckEpoch(*engine, *s, options.sampler, epoch);
    ASSERT_TRUE(engine->CloseStream(*s).ok());
  }
}

TEST_F(EngineTest, ContiguousBatchesLieInOnePiece) {
  auto catalog = MakeFiles(100, 1, 5000);
  EnginePtr engine = Make(32 << 20);
  auto d = engine->AddDataset(catalog);
  StreamOptions options = Shape(*d, 100, 8, 1);
  options.shape.contiguous = true;
  auto s = engine->OpenStream(options);
  ASSERT_TRUE(s);
  BatchLoan loan;
  auto taken = engine->Take(*s, 10 * kSecond, &loan);
  ASSERT_TRUE(taken);
  ASSERT_EQ(*taken, TakeKind::kBatch);
  for (size_t i = 1; i < loan.offsets.size(); ++i) {
    EXPECT_EQ(loan.offsets[i], loan.offsets[i - 1] + loan.lengths[i - 1]);
  }
  CheckBytes(*engine, loan);
}

// A copy needs a hole as large as a batch; samples of many sizes leave none between them.
TEST_F(EngineTest, ContiguousBatchesAreALargeShareOfASmallBudget) {
  auto catalog = MakeFiles(400, 50000, 250000);  // 60 MB, batches of 5 MB
  EnginePtr engine = Make(40 << 20);
  auto d = engine->AddDataset(catalog);
  StreamOptions options = Shape(*d, 400, 32, 1);
  options.shape.contiguous = true;
  auto s = engine->OpenStream(options);
  ASSERT_TRUE(s) << s.status().ToString();
  for (uint64_t epoch = 0; epoch < 3; ++epoch) CheckEpoch(*engine, *s, options.sampler, epoch);
}

TEST_F(EngineTest, TooLargeABatchNamesBothSizes) {
  auto catalog = MakeFiles(64, 400000, 400000);
  EnginePtr engine = Make(16 << 20);
  auto d = engine->AddDataset(catalog);
  auto s = engine->OpenStream(Shape(*d, 64, 64, 0));
  BatchLoan loan;
  auto taken = engine->Take(*s, 5 * kSecond, &loan);
  ASSERT_FALSE(taken);
  EXPECT_EQ(taken.error().code(), Code::kResourceExhausted);
  EXPECT_NE(taken.error().message().find(std::to_string(16 << 20)), std::string::npos);
  EXPECT_NE(taken.error().message().find("256"), std::string::npos) << taken.error().message();
}

TEST_F(EngineTest, UnreleasedBatchesEndInAnErrorNotAHang) {
  auto catalog = MakeFiles(100, 400000, 400000);
  EnginePtr engine = Make(12 << 20);
  auto d = engine->AddDataset(catalog);
  auto s = engine->OpenStream(Shape(*d, 100, 4, 0));
  Status error;
  int taken_batches = 0;
  // In short slices, as a caller that looks for signals does.
  for (int i = 0; i < 200 && error.ok(); ++i) {
    BatchLoan loan;
    auto taken = engine->Take(*s, 20 * kMilli, &loan);
    if (!taken) error = taken.error();
    if (taken && *taken == TakeKind::kBatch) ++taken_batches;
  }
  EXPECT_EQ(error.code(), Code::kResourceExhausted);
  // Not the one that waits.
  const std::string held = StrCat(taken_batches, " batches that were not released");
  EXPECT_NE(error.message().find(held), std::string::npos) << error.message();
  EXPECT_NE(error.message().find("del batch"), std::string::npos);
}

TEST_F(EngineTest, AVanishedFileIsNamedAndTheNextAskGoesOn) {
  auto catalog = MakeFiles(20, 100, 200);
  const std::string victim = catalog->ObjectPath(catalog->extent(5).object);
  fs::rename(victim, victim + ".away");
  EnginePtr engine = Make(16 << 20);
  auto d = engine->AddDataset(catalog);
  const StreamOptions options = Shape(*d, 20, 20, 0);
  auto s = engine->OpenStream(options);
  BatchLoan loan;
  auto taken = engine->Take(*s, 10 * kSecond, &loan);
  ASSERT_FALSE(taken);
  EXPECT_NE(taken.error().message().find(victim), std::string::npos) << taken.error().message();
  fs::rename(victim + ".away", victim);
  taken = engine->Take(*s, 10 * kSecond, &loan);
  ASSERT_TRUE(taken) << taken.status().ToString();
  ASSERT_EQ(*taken, TakeKind::kBatch);
  CheckBytes(*engine, loan);
}

TEST_F(EngineTest, FlippedBitsAreReadAgain) {
  auto catalog = MakeFiles(300, 1, 3000);
  auto inner = MakeNullSource(64);
  FaultOptions faults;
  faults.flip = 0.02;
  auto source = FaultSource::Make(*std::move(inner), faults);
  ASSERT_TRUE(source);
  EnginePtr engine = Make(16 << 20, true);
  auto d = engine->AddDataset(catalog, *std::move(source));
  const StreamOptions options = Shape(*d, 300, 10, 0);
  auto s = engine->OpenStream(options);
  CheckEpoch(*engine, *s, options.sampler, 0);
  uint64_t corrupt = 0;
  for (const Registry::Sample& m : engine->registry().Snapshot()) {
    if (m.name == "forebay_source_corrupt_samples_total") corrupt = m.value;
  }
  EXPECT_GT(corrupt, 0u);
}

TEST_F(EngineTest, AReadThatHangsDoesNotHangTheExit) {
  auto catalog = MakeFiles(10, 100, 100);
  FaultOptions faults;
  faults.hang = 1.0;
  auto source = FaultSource::Make(*MakeNullSource(16), faults);
  ASSERT_TRUE(source);
  EnginePtr engine = Make(16 << 20);
  auto d = engine->AddDataset(catalog, *std::move(source));
  auto s = engine->OpenStream(Shape(*d, 10, 2, 0));
  BatchLoan loan;
  auto taken = engine->Take(*s, 50 * kMilli, &loan);
  ASSERT_TRUE(taken);
  EXPECT_EQ(*taken, TakeKind::kPending);
  EXPECT_NE(engine->WaitingFor(*s).find("source: "), std::string::npos);
  engine.reset();  // leaves the stuck reads behind after two seconds
}

TEST_F(EngineTest, ManyConsumersOneEngine) {
  auto catalog = MakeFiles(150, 1000, 30000);
  EnginePtr engine = Make(12 << 20);
  auto d = engine->AddDataset(catalog);
  std::vector<std::jthread> threads;
  for (uint64_t seed = 0; seed < 4; ++seed) {
    const StreamOptions options = Shape(*d, 150, 3 + static_cast<uint32_t>(seed), seed);
    auto s = engine->OpenStream(options);
    ASSERT_TRUE(s);
    threads.emplace_back([&engine, options, id = *s] {
      for (uint64_t epoch = 0; epoch < 3; ++epoch) CheckEpoch(*engine, id, options.sampler, epoch);
    });
  }
}

TEST_F(EngineTest, SeveralConsumersOfOneStreamShareItsBatches) {
  auto catalog = MakeFiles(120, 1000, 3000);
  EnginePtr engine = Make(12 << 20);
  auto d = engine->AddDataset(catalog);
  StreamOptions options = Shape(*d, 120, 1, 1);
  options.shape.epochs = 1;
  auto s = engine->OpenStream(options);
  std::atomic<int> batches{0};
  {
    std::vector<std::jthread> threads;
    for (int i = 0; i < 3; ++i) {
      threads.emplace_back([&] {
        while (true) {
          BatchLoan loan;
          auto taken = engine->Take(*s, 10 * kSecond, &loan);
          ASSERT_TRUE(taken);
          ASSERT_NE(*taken, TakeKind::kPending);
          if (*taken == TakeKind::kEndOfStream) return;
          if (*taken != TakeKind::kBatch) continue;
          CheckBytes(*engine, loan);
          batches.fetch_add(1);
          ASSERT_TRUE(engine->Release(loan.lease).ok());
        }
      });
    }
  }
  EXPECT_EQ(batches.load(), 120);
}

TEST_F(EngineTest, SeekResumesAndARankStartsWhereItSays) {
  auto catalog = MakeFiles(100, 10, 100);
  EnginePtr engine = Make(16 << 20);
  auto d = engine->AddDataset(catalog);
  StreamOptions options = Shape(*d, 100, 5, 8);
  options.sampler.world = 2;
  options.sampler.rank = 1;
  auto s = engine->OpenStream(options);
  ASSERT_TRUE(engine->Seek(*s, 4, 40).ok());
  EXPECT_EQ(engine->Seek(*s, 4, 41).code(), Code::kInvalidArgument);
  const auto order = EpochOrder(options.sampler, 4);
  BatchLoan loan;
  auto taken = engine->Take(*s, 10 * kSecond, &loan);
  ASSERT_TRUE(taken);
  EXPECT_EQ(loan.samples[0], order[20]);
  EXPECT_EQ(loan.epoch, 4u);
}

TEST_F(EngineTest, DeclaredOrderIsFollowedAndCheckedForRange) {
  auto catalog = MakeFiles(10, 10, 100);
  EnginePtr engine = Make(16 << 20);
  auto d = engine->AddDataset(catalog);
  StreamOptions options;
  options.shape.dataset = *d;
  options.shape.batch_size = 4;
  options.declared = true;
  auto s = engine->OpenStream(options);
  EXPECT_EQ(engine->Declare(*s, 0, {0, 10}, true).code(), Code::kInvalidArgument);
  ASSERT_TRUE(engine->Declare(*s, 0, {9, 9, 0, 3, 3}, true).ok());
  BatchLoan loan;
  ASSERT_EQ(*engine->Take(*s, 10 * kSecond, &loan), TakeKind::kBatch);
  EXPECT_EQ(loan.samples, (std::vector<SampleId>{9, 9, 0, 3}));
  ASSERT_EQ(*engine->Take(*s, 10 * kSecond, &loan), TakeKind::kBatch);
  EXPECT_EQ(loan.samples, (std::vector<SampleId>{3}));
  EXPECT_EQ(*engine->Take(*s, 10 * kSecond, &loan), TakeKind::kEndOfEpoch);
  EXPECT_EQ(*engine->Take(*s, 10 * kSecond, &loan), TakeKind::kEndOfStream);
}

TEST_F(EngineTest, SingleSamplesGoOnFromEpochToEpoch) {
  constexpr uint32_t kFiles = 40;
  const EnginePtr engine = Make(16 << 20);
  const auto dataset = engine->AddDataset(MakeFiles(kFiles, 100, 1000));
  ASSERT_TRUE(dataset);
  StreamOptions options;
  options.shape.dataset = *dataset;
  options.shape.itemised = true;
  options.declared = true;
  const auto stream = engine->OpenStream(options);
  ASSERT_TRUE(stream);
  std::vector<SampleId> order(kFiles);
  for (SampleId s = 0; s < kFiles; ++s) order[s] = kFiles - 1 - s;
  ASSERT_TRUE(engine->Declare(*stream, 0, order, false).ok());
  for (uint64_t epoch = 0; epoch < 3; ++epoch) {
    // The next one is known before this one ends.
    ASSERT_TRUE(engine->Declare(*stream, epoch + 1, order, false).ok());
    for (const SampleId sample : order) {
      BatchLoan loan;
      LeaseId lease = kNoLease;
      ASSERT_TRUE(engine->Fetch(*stream, sample, 20 * kSecond, &lease, &loan));
      EXPECT_EQ(loan.samples, std::vector<SampleId>{sample});
      ASSERT_TRUE(engine->Release(loan.lease).ok());
    }
  }
  const std::vector<EpochStats> stats = engine->Stats(*stream);
  ASSERT_EQ(stats.size(), 1u) << "only a Seek ends them";
  EXPECT_EQ(stats[0].samples, 3 * kFiles);
  EXPECT_TRUE(stats[0].batch_us.empty()) << "they would grow for ever";
}

TEST_F(EngineTest, AForkedChildLeavesTheParentsEngineAlone) {
  auto catalog = MakeFiles(50, 1000, 3000);
  EnginePtr engine = Make(16 << 20);
  auto d = engine->AddDataset(catalog);
  const StreamOptions options = Shape(*d, 50, 5, 8);
  auto s = engine->OpenStream(options);
  const pid_t child = fork();
  if (child == 0) {
    BatchLoan loan;
    const bool refused = !engine->Take(*s, kSecond, &loan).has_value();
    engine.reset();
    _exit(refused ? 0 : 1);
  }
  int status = -1;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
  CheckEpoch(*engine, *s, options.sampler, 0);
}

TEST_F(EngineTest, KeptSamplesGiveWayToWhatIsLentAndTheMemoryComesBack) {
  EnginePtr engine = Make(32 << 20);
  auto d = engine->AddDataset(MakeFiles(300, 50000, 90000));
  ASSERT_TRUE(d);
  const StreamOptions options = Shape(*d, 300, 10, 3);
  auto s = engine->OpenStream(options);
  ASSERT_TRUE(s);
  CheckEpoch(*engine, *s, options.sampler, 0);
  const auto metric = [&](const char* name) {
    for (const Registry::Sample& sample : engine->registry().Snapshot()) {
      if (sample.name == name) return sample.value;
    }
    return ~uint64_t{0};
  };
  const uint64_t kept = metric("forebay_stage_kept_bytes");
  EXPECT_GT(kept, uint64_t{15} << 20);
  {
    auto too_much = engine->Lend(40 << 20);
    ASSERT_FALSE(too_much);
    EXPECT_EQ(too_much.error().code(), Code::kResourceExhausted);
    EXPECT_NE(too_much.error().message().find("raise memory="), std::string::npos);
    EXPECT_EQ(metric("forebay_stage_kept_bytes"), kept);
    auto left_too_little = engine->Lend(20 << 20, 20 << 20);
    EXPECT_FALSE(left_too_little);
    Result<MemoryShare> share = engine->Lend(20 << 20);
    // Reads that are under way hold their places for a moment.
    for (int i = 0; !share && i < 1000; ++i) {
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
      share = engine->Lend(20 << 20);
    }
    ASSERT_TRUE(share) << share.status().ToString();
    EXPECT_LE(metric("forebay_stage_kept_bytes"), uint64_t{10} << 20);
    CheckEpoch(*engine, *s, options.sampler, 1);
    EXPECT_FALSE(engine->Lend(20 << 20));
  }
  CheckEpoch(*engine, *s, options.sampler, 2);
  EXPECT_GE(metric("forebay_stage_kept_bytes"), kept / 2);
  CheckEpoch(*engine, *s, options.sampler, 3);
}

// One read in 400 takes five seconds; a second one ends the wait for it.
TEST_F(EngineTest, ADataSetFindsRoomAmongTheReadsOfOthers) {
  constexpr uint32_t kSamples = 300;
  const auto first = MakeFiles(kSamples, 60000, 65000);
  const auto second = MakeFiles(20, 1000, 2000);
  auto engine = Make(16 << 20);
  DelayOptions slow;
  slow.storage = *StorageSettings::Parse("read_ms=150");
  auto delayed = DelaySource::Make(*MakePosixSource(*first, {}), slow);
  ASSERT_TRUE(delayed) << delayed.status().ToString();
  auto d = engine->AddDataset(first, *std::move(delayed));
  ASSERT_TRUE(d) << d.status().ToString();
  const std::vector<KnobSetting> fill = {{"source_reads_in_flight", 32},
                                         {"read_ahead_bytes", 12 << 20}};
  EXPECT_TRUE(engine->registry().Apply(fill).ok());
  auto stream = engine->OpenStream(Shape(*d, kSamples, 20, 1));
  ASSERT_TRUE(stream) << stream.status().ToString();
  // Batches hold most of the arena, reads of the next ones the rest.
  std::vector<BatchLoan> loans(8);
  for (BatchLoan& loan : loans) {
    auto taken = engine->Take(*stream, 5 * kSecond, &loan);
    ASSERT_TRUE(taken) << taken.status().ToString();
  }
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  EXPECT_GT(engine->in_flight(), 0u);
  auto added = engine->AddDataset(second);
  EXPECT_TRUE(added) << added.status().ToString();
  for (const BatchLoan& loan : loans) {
    CheckBytes(*engine, loan);
    EXPECT_TRUE(engine->Release(loan.lease).ok());
  }
}

TEST_F(EngineTest, NoLateComerTakesWhatTheNextBatchNeeds) {
  constexpr uint32_t kSamples = 300;
  const auto catalog = MakeFiles(kSamples, 60000, 65000);
  auto engine = Make(16 << 20);
  auto d = engine->AddDataset(catalog);
  ASSERT_TRUE(d) << d.status().ToString();
  const StreamOptions shape = Shape(*d, kSamples, 100, 1);
  auto stream = engine->OpenStream(shape);
  ASSERT_TRUE(stream) << stream.status().ToString();
  CheckEpoch(*engine, *stream, shape.sampler, 0);
  EXPECT_FALSE(engine->Lend(8 << 20)) << "a batch has 6 MB";
  auto share = engine->Lend(2 << 20);
  EXPECT_TRUE(share) << share.status().ToString();
  CheckEpoch(*engine, *stream, shape.sampler, 1);
}

TEST_F(EngineTest, AReadThatHangsIsRacedByAnother) {
  constexpr uint32_t kSamples = 1200;
  auto catalog = MakeFiles(kSamples, 500, 4000);
  DelayOptions slow;
  slow.open_each = false;
  slow.storage.read = 5 * kMilli;
  slow.storage.jitter = 0.2;
  slow.storage.tail_prob = 1.0 / 400;
  slow.storage.tail_mult = 1000;
  auto posix = MakePosixSource(*catalog, {});
  ASSERT_TRUE(posix);
  auto source = DelaySource::Make(*std::move(posix), slow);
  ASSERT_TRUE(source);
  EngineOptions options;
  options.memory = 32 << 20;
  options.keep = false;
  auto engine = Engine::Create(options);
  ASSERT_TRUE(engine);
  auto d = (*engine)->AddDataset(catalog, *std::move(source));
  ASSERT_TRUE(d);
  const StreamOptions shape = Shape(*d, kSamples, 8, 3);
  auto s = (*engine)->OpenStream(shape);
  ASSERT_TRUE(s);
  for (uint64_t epoch = 0; epoch < 2; ++epoch) CheckEpoch(**engine, *s, shape.sampler, epoch);
  // About six reads hang; each would cost its batch five seconds, were it waited for. A machine so
  // busy that other reads seem to hang races those, too, and may have none left for one that does.
  int waited_for = 0;
  for (const EpochStats& epoch : (*engine)->Stats(*s)) {
    for (const uint32_t us : epoch.batch_us) waited_for += us * kMicro > 4 * kSecond ? 1 : 0;
  }
  EXPECT_LE(waited_for, 1);
  const uint64_t hedged = Value(**engine, "forebay_source_hedged_reads_total");
  EXPECT_GE(hedged, 1u);
  // The epochs that follow are read ahead, and some of that may be under way.
  const uint64_t reads = Value(**engine, "forebay_source_reads_total") + options.max_in_flight;
  EXPECT_LE(hedged, 2 + 1 + reads / 200);
}

// Groups of neighbours through a cache folder, at one and the same time.
TEST_F(EngineTest, SmallSamplesOfAShardAreStagedInTheFolder) {
  constexpr uint32_t kSamples = 6000;
  auto catalog = MakeShard(kSamples, 600);
  for (const bool verify : {false, true}) {
    EngineOptions options;
    options.memory = 32 << 20;
    options.keep = false;
    options.verify = verify;
    options.cache_folder = root_ + (verify ? "/cache1" : "/cache0");
    options.cache_bytes = 64 << 20;
    auto engine = Engine::Create(options);
    ASSERT_TRUE(engine);
    auto d = (*engine)->AddDataset(catalog);
    ASSERT_TRUE(d);
    const StreamOptions shape = Shape(*d, kSamples, 64, 3);
    auto s = (*engine)->OpenStream(shape);
    ASSERT_TRUE(s);
    for (uint64_t epoch = 0; epoch < 3; ++epoch) {
      CheckEpoch(**engine, *s, shape.sampler, epoch);
    }
    EXPECT_LT(Value(**engine, "forebay_source_requests_total"),
              Value(**engine, "forebay_source_reads_total"));
    // The tar headers that lie between neighbours were read, too.
    EXPECT_GT(Value(**engine, "forebay_source_read_bytes_total"),
              600 * Value(**engine, "forebay_source_reads_total"));
    EXPECT_GT(Value(**engine, "forebay_tier_hits_total"), kSamples / 2);
  }
}

// Groups, races, errors, flipped bits and Seek, for three kinds of stream at one time: whatever
// ends late or fails, what is handed out is right.
TEST_F(EngineTest, WhatIsHandedOutIsRightWhateverHappensToItsReads) {
  constexpr uint32_t kSamples = 3000;
  auto catalog = MakeShard(kSamples, 3000);
  DelayOptions slow;
  slow.open_each = false;
  slow.storage.read = 500 * kMicro;
  slow.storage.jitter = 0.3;
  slow.storage.tail_prob = 1.0 / 2000;
  slow.storage.tail_mult = 600;
  auto delay = DelaySource::Make(*MakePosixSource(*catalog, {}), slow);
  ASSERT_TRUE(delay);
  auto source = FaultSource::Make(*std::move(delay), {.error = 0.01, .flip = 0.01});
  ASSERT_TRUE(source);
  EngineOptions options;
  options.memory = 8 << 20;
  options.memory_tier = 512 << 10;
  options.verify = true;
  auto engine = Engine::Create(options);
  ASSERT_TRUE(engine);
  auto d = (*engine)->AddDataset(catalog, *std::move(source));
  ASSERT_TRUE(d);
  std::vector<std::thread> consumers;
  const Nanos until = SteadyClock().Now() + 1500 * kMilli;
  for (uint64_t kind = 0; kind < 3; ++kind) {
    StreamOptions shape = Shape(*d, kSamples, 16, kind);
    shape.shape.contiguous = kind == 1;
    shape.shape.itemised = kind == 2;
    shape.sampler.shuffle = kind != 0;  // in order: neighbours go together
    auto s = (*engine)->OpenStream(shape);
    ASSERT_TRUE(s);
    consumers.emplace_back([&, kind, shape, stream = *s] {
      SplitMix64 rng(kind);
      uint64_t batches = 0;
      size_t at = 0;
      uint64_t epoch = 0;
      std::vector<SampleId> order = EpochOrder(shape.sampler, 0);
      while (SteadyClock().Now() < until) {
        if (at == order.size()) {
          order = EpochOrder(shape.sampler, ++epoch);
          at = 0;
        }
        BatchLoan loan;
        LeaseId lease = kNoLease;
        auto taken = kind == 2 ? (*engine)->Fetch(stream, order[at], 20 * kSecond, &lease, &loan)
                               : (*engine)->Take(stream, 20 * kSecond, &loan);
        if (!taken) {
          ASSERT_EQ(taken.error().code(), Code::kUnavailable) << taken.error().ToString();
          if (lease != kNoLease) (void)(*engine)->Release(lease);
          continue;
        }
        if (*taken == TakeKind::kEndOfEpoch) continue;
        ASSERT_EQ(*taken, TakeKind::kBatch) << (*engine)->WaitingFor(stream);
        for (const SampleId sample : loan.samples) ASSERT_EQ(sample, order[at++]);
        CheckBytes(**engine, loan);
        if (rng.Below(4) == 0) usleep(500);
        CheckBytes(**engine, loan);  // nobody has written to it meanwhile
        ASSERT_TRUE((*engine)->Release(loan.lease).ok());
        if (kind != 2 && ++batches % 40 == 0) {
          at = 16 * rng.Below(order.size() / 16);
          ASSERT_TRUE((*engine)->Seek(stream, epoch, at).ok());
        }
      }
    });
  }
  for (std::thread& consumer : consumers) consumer.join();
  EXPECT_LT(Value(**engine, "forebay_source_requests_total"),
            Value(**engine, "forebay_source_reads_total"));
  EXPECT_GT(Value(**engine, "forebay_source_corrupt_samples_total"), 0u);
}

}  // namespace
}  // namespace forebay
