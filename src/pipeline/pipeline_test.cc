#include "pipeline/pipeline.h"

#include <gtest/gtest.h>
#include <pthread.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstring>
#include <filesystem>
#include <fstream>
#include <set>
#include <thread>

#include "base/rng.h"
#include "core/sampler.h"
#include "source/delay_source.h"

namespace forebay {
namespace {

namespace fs = std::filesystem;

constexpr uint32_t kItems = 64;  // numbers of a sample's array

// A folder of .npy files: every number of sample i is i.
class PipelineTest : public ::testing::Test {
 protected:
  void SetUp() override {
    char name[] = "/tmp/forebay_pipeline_XXXXXX";
    ASSERT_NE(mkdtemp(name), nullptr);
    root_ = name;
  }
  void TearDown() override { fs::remove_all(root_); }

  static std::string Npy(uint32_t value, uint32_t items = kItems) {
    std::string header =
        StrCat("{'descr': '<u4', 'fortran_order': False, 'shape': (", items, ",), }");
    header.resize(117, ' ');
    header += '\n';
    std::string file("\x93NUMPY\x01\x00\x76\x00", 10);
    file += header;
    for (uint32_t i = 0; i < items; ++i) file.append(reinterpret_cast<const char*>(&value), 4);
    return file;
  }

  // Samples of `broken` end in the middle.
  std::shared_ptr<const Catalog> MakeFiles(uint32_t n, const std::set<uint32_t>& broken = {},
                                           const std::string& prefix = "") {
    std::vector<std::string> paths;
    for (uint32_t i = 0; i < n; ++i) {
      std::string file = Npy(i, items_);
      if (broken.contains(i)) file.resize(file.size() / 2);
      paths.push_back(StrCat(root_, "/", prefix, i));
      std::ofstream(paths.back(), std::ios::binary) << file;
    }
    auto built = BuildFileList(paths, {});
    EXPECT_TRUE(built) << built.status().ToString();
    return std::shared_ptr<const Catalog>(*std::move(built));
  }

  void MakeEngine(uint32_t n, uint64_t memory, const std::set<uint32_t>& broken = {},
                  std::unique_ptr<Source> source = nullptr) {
    EngineOptions options;
    options.memory = memory;
    options.max_in_flight = 16;
    options.decode_threads = 3;
    options.release_wait = 200 * kMilli;
    auto engine = Engine::Create(options);
    ASSERT_TRUE(engine) << engine.status().ToString();
    engine_ = *std::move(engine);
    // A read that a busy machine holds up is not raced: reads are counted here.
    EXPECT_TRUE(engine_->registry().SetKnob("hedge_one_in", 0).ok());
    auto dataset = engine_->AddDataset(MakeFiles(n, broken), std::move(source));
    ASSERT_TRUE(dataset) << dataset.status().ToString();
    stream_.shape.dataset = *dataset;
    stream_.shape.batch_size = 8;
    stream_.sampler.size = n;
    stream_.sampler.seed = 5;
  }

  Result<PipelinePtr> Make(bool skip = false) {
    PipelineOptions options;
    options.decode.kind = DecodeOptions::Kind::kArray;
    options.decode.dtype = "<u4";
    options.decode.shape = {items_};
    options.skip_corrupt = skip;
    options.release_wait = 200 * kMilli;
    return Pipeline::Make(*engine_, stream_, options);
  }

  static TakeKind Take(Pipeline& pipeline, FinishedBatch* batch) {
    auto taken = pipeline.Take(10 * kSecond, batch);
    EXPECT_TRUE(taken) << taken.status().ToString();
    return taken ? *taken : TakeKind::kPending;
  }

  static void CheckBytes(const FinishedBatch& batch) {
    for (size_t i = 0; i < batch.samples.size(); ++i) {
      uint32_t numbers[kItems];
      std::memcpy(numbers, batch.data + i * sizeof numbers, sizeof numbers);
      for (uint32_t number : numbers) ASSERT_EQ(number, batch.samples[i]);
    }
  }

  // The samples of one epoch, in order, from where the pipeline stands; every byte checked.
  static std::vector<SampleId> Epoch(Pipeline& pipeline) {
    std::vector<SampleId> seen;
    FinishedBatch batch;
    while (Take(pipeline, &batch) == TakeKind::kBatch) {
      CheckBytes(batch);
      seen.insert(seen.end(), batch.samples.begin(), batch.samples.end());
      pipeline.Release(batch.slab);
    }
    return seen;
  }

  std::string root_;
  uint32_t items_ = kItems;
  EnginePtr engine_;
  StreamOptions stream_;
};

TEST_F(PipelineTest, GivesTheSamplersOrderOverEpochs) {
  MakeEngine(100, 32 << 20);
  auto pipeline = Make();
  ASSERT_TRUE(pipeline) << pipeline.status().ToString();
  for (uint64_t epoch = 0; epoch < 3; ++epoch) {
    EXPECT_EQ(Epoch(**pipeline), EpochOrder(stream_.sampler, epoch, 0));
  }
  const std::vector<EpochStats> stats = (*pipeline)->Stats();
  ASSERT_EQ(stats.size(), 3U);
  for (uint64_t epoch = 0; epoch < 3; ++epoch) {
    EXPECT_EQ(stats[epoch].epoch, epoch);
    EXPECT_EQ(stats[epoch].batches, 13U);
    EXPECT_EQ(stats[epoch].samples, 100U);
    EXPECT_EQ(stats[epoch].batch_us.size(), 13U);
    EXPECT_LE(stats[epoch].total_wait_ns(), stats[epoch].wall_ns);
  }
  EXPECT_EQ(stats[0].source_reads + stats[1].source_reads + stats[2].source_reads, 100U);
}

TEST_F(PipelineTest, EndsAfterTheLastEpoch) {
  MakeEngine(20, 32 << 20);
  stream_.shape.epochs = 1;
  auto pipeline = Make();
  ASSERT_TRUE(pipeline) << pipeline.status().ToString();
  EXPECT_EQ(Epoch(**pipeline).size(), 20U);
  FinishedBatch batch;
  EXPECT_EQ(Take(**pipeline, &batch), TakeKind::kEndOfStream);
  EXPECT_EQ(Take(**pipeline, &batch), TakeKind::kEndOfStream);
}

TEST_F(PipelineTest, SeeksWhileBatchesAreUnderWay) {
  MakeEngine(100, 32 << 20);
  auto pipeline = Make();
  ASSERT_TRUE(pipeline) << pipeline.status().ToString();
  SplitMix64 rng(1);
  for (int round = 0; round < 50; ++round) {
    const uint64_t epoch = rng.Below(4);
    const uint64_t position = rng.Below(100);
    ASSERT_TRUE((*pipeline)->Seek(epoch, position).ok());
    const std::vector<SampleId> expected = EpochOrder(stream_.sampler, epoch, position);
    FinishedBatch batch;
    std::vector<SampleId> seen;
    const uint64_t batches = rng.Below(14);
    for (uint64_t i = 0; i < batches && Take(**pipeline, &batch) == TakeKind::kBatch; ++i) {
      CheckBytes(batch);
      EXPECT_EQ(batch.epoch, epoch);
      seen.insert(seen.end(), batch.samples.begin(), batch.samples.end());
      (*pipeline)->Release(batch.slab);
    }
    ASSERT_LE(seen.size(), expected.size());
    EXPECT_EQ(seen, std::vector<SampleId>(expected.begin(),
                                          expected.begin() + static_cast<int64_t>(seen.size())));
  }
}

TEST_F(PipelineTest, ReportsTheFirstBadSampleAndStaysThere) {
  MakeEngine(40, 32 << 20, {3, 7, 11});
  stream_.sampler.shuffle = false;
  auto pipeline = Make();
  ASSERT_TRUE(pipeline) << pipeline.status().ToString();
  FinishedBatch batch;
  for (int again = 0; again < 2; ++again) {
    auto taken = (*pipeline)->Take(10 * kSecond, &batch);
    ASSERT_FALSE(taken);
    EXPECT_EQ(taken.error().code(), Code::kDataLoss);
    EXPECT_NE(taken.error().message().find(root_ + "/3: "), std::string::npos)
        << taken.error().message();
  }
  ASSERT_TRUE((*pipeline)->Seek(0, 16).ok());
  EXPECT_EQ(Epoch(**pipeline).size(), 24U);
}

TEST_F(PipelineTest, SkipsBadSamplesAndWholeBatchesOfThem) {
  std::set<uint32_t> broken{3, 39};
  for (uint32_t i = 8; i < 24; ++i) broken.insert(i);  // batches 1 and 2
  MakeEngine(40, 32 << 20, broken);
  stream_.sampler.shuffle = false;
  auto pipeline = Make(true);
  ASSERT_TRUE(pipeline) << pipeline.status().ToString();
  std::vector<uint64_t> stands_for;
  std::vector<SampleId> seen;
  FinishedBatch batch;
  while (Take(**pipeline, &batch) == TakeKind::kBatch) {
    CheckBytes(batch);
    stands_for.push_back(batch.batches);
    seen.insert(seen.end(), batch.samples.begin(), batch.samples.end());
    (*pipeline)->Release(batch.slab);
  }
  EXPECT_EQ(stands_for, (std::vector<uint64_t>{1, 3, 1}));
  std::vector<SampleId> expected;
  for (uint32_t i = 0; i < 40; ++i) {
    if (!broken.contains(i)) expected.push_back(i);
  }
  EXPECT_EQ(seen, expected);
  EXPECT_EQ((*pipeline)->skipped(), broken.size());  // though the next epoch is under way already
  EXPECT_NE((*pipeline)->LastSkipped().find(root_), std::string::npos);
}

TEST_F(PipelineTest, ConsumersThatHoldMoreGetMoreUpToTheBudget) {
  MakeEngine(4000, 8 << 20);
  stream_.shape.batch_size = 1000;
  auto pipeline = Make();
  ASSERT_TRUE(pipeline) << pipeline.status().ToString();
  std::vector<size_t> held;
  Status full;
  FinishedBatch batch;
  while (full.ok()) {
    auto taken = (*pipeline)->Take(10 * kSecond, &batch);
    if (!taken) {
      full = taken.error();
    } else if (*taken == TakeKind::kBatch) {
      held.push_back(batch.slab);
    }
    ASSERT_LT(held.size(), 100U) << "256 KB a batch out of 8 MiB";
  }
  EXPECT_EQ(full.code(), Code::kResourceExhausted);
  EXPECT_NE(full.message().find("let go of earlier batches"), std::string::npos);
  EXPECT_GT(held.size(), 4U);
  EXPECT_EQ(std::set<size_t>(held.begin(), held.end()).size(), held.size());
  (*pipeline)->Release(held.front());
  EXPECT_EQ(Take(**pipeline, &batch), TakeKind::kBatch);
}

TEST_F(PipelineTest, ABatchBeyondTheBudgetIsRefusedAtOnce) {
  MakeEngine(100, 8 << 20);
  stream_.shape.batch_size = 50;
  items_ = 1 << 20;
  auto pipeline = Make();
  ASSERT_FALSE(pipeline);
  EXPECT_EQ(pipeline.error().code(), Code::kResourceExhausted);
  EXPECT_NE(pipeline.error().message().find("raise memory="), std::string::npos);
}

TEST_F(PipelineTest, WaitsAreChargedToTheSlowSource) {
  DelayOptions slow;
  slow.open_each = false;
  slow.storage.read = 20 * kMilli;
  const auto catalog = MakeFiles(48);
  auto source = DelaySource::Make(*MakePosixSource(*catalog, {}), slow);
  ASSERT_TRUE(source);
  MakeEngine(48, 32 << 20, {}, *std::move(source));
  auto pipeline = Make();
  ASSERT_TRUE(pipeline) << pipeline.status().ToString();
  EXPECT_EQ(Epoch(**pipeline).size(), 48U);
  const EpochStats stats = (*pipeline)->Stats().front();
  EXPECT_GT(stats.wait_ns[static_cast<size_t>(StallCause::kSource)], stats.total_wait_ns() / 2);
  (*pipeline)->ChargeCopy(7 * kMilli);
  EXPECT_EQ((*pipeline)->Stats().back().wait_ns[static_cast<size_t>(StallCause::kCopy)],
            7 * kMilli);
}

TEST_F(PipelineTest, StopsWhileBatchesAreHeldAndDecoded) {
  for (int round = 0; round < 20; ++round) {
    MakeEngine(100, 32 << 20);
    auto pipeline = Make();
    ASSERT_TRUE(pipeline) << pipeline.status().ToString();
    FinishedBatch batch;
    if (round % 2 == 0) {
      ASSERT_EQ(Take(**pipeline, &batch), TakeKind::kBatch);
    }
    (*pipeline)->Stop();
    if (round % 2 == 0) {
      CheckBytes(batch);
      (*pipeline)->Release(batch.slab);
    }
    EXPECT_FALSE((*pipeline)->Take(0, &batch));
  }
}

TEST_F(PipelineTest, AForkedChildIsTurnedAway) {
  MakeEngine(16, 32 << 20);
  auto pipeline = Make();
  ASSERT_TRUE(pipeline) << pipeline.status().ToString();
  const pid_t child = fork();
  if (child == 0) {
    FinishedBatch batch;
    const auto taken = (*pipeline)->Take(kSecond, &batch);
    const bool refused = !taken && taken.error().code() == Code::kCancelled;
    (*pipeline)->Release(0);
    (*pipeline)->Stop();
    pipeline->reset();
    _exit(refused ? 0 : 1);
  }
  int status = 1;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
  EXPECT_EQ(Epoch(**pipeline).size(), 16U);
}

TEST_F(PipelineTest, TwoPipelinesShareTheThreads) {
  MakeEngine(200, 64 << 20);
  auto first = Make();
  auto second = Make();
  ASSERT_TRUE(first && second);
  std::vector<SampleId> seen;
  std::jthread other([&] { seen = Epoch(**second); });
  EXPECT_EQ(Epoch(**first), EpochOrder(stream_.sampler, 0, 0));
  other.join();
  EXPECT_EQ(seen, EpochOrder(stream_.sampler, 0, 0));
}

TEST_F(PipelineTest, ABatchBeyondTheDataSetTakesTheDataSetsMemory) {
  MakeEngine(100, 8 << 20);
  stream_.shape.batch_size = 1 << 20;
  auto pipeline = Make();
  ASSERT_TRUE(pipeline) << pipeline.status().ToString();
  EXPECT_EQ(Epoch(**pipeline), EpochOrder(stream_.sampler, 0, 0));
}

// No batch is full, so every epoch is empty: the feeder must not run through them without end.
TEST_F(PipelineTest, EpochsWithoutBatchesAreNotTakenWithoutBound) {
  MakeEngine(5, 32 << 20);
  stream_.shape.drop_last = true;
  auto pipeline = Make();
  ASSERT_TRUE(pipeline) << pipeline.status().ToString();
  FinishedBatch batch;
  for (int i = 0; i < 3; ++i) EXPECT_EQ(Take(**pipeline, &batch), TakeKind::kEndOfEpoch);
  std::this_thread::sleep_for(std::chrono::milliseconds(100));
  EXPECT_LT(engine_->Stats((*pipeline)->stream()).size(), 50U);
  for (int i = 0; i < 50; ++i) EXPECT_EQ(Take(**pipeline, &batch), TakeKind::kEndOfEpoch);
}

TEST_F(PipelineTest, SeveralThreadsMayStopAtOnce) {
  MakeEngine(50, 32 << 20);
  for (int round = 0; round < 50; ++round) {
    auto pipeline = Make();
    ASSERT_TRUE(pipeline) << pipeline.status().ToString();
    std::vector<std::jthread> threads;
    for (int i = 0; i < 4; ++i) threads.emplace_back([&] { (*pipeline)->Stop(); });
    threads.clear();
    FinishedBatch batch;
    EXPECT_FALSE((*pipeline)->Take(0, &batch));
  }
}

TEST_F(PipelineTest, AReadThatFailedIsTriedAgain) {
  MakeEngine(40, 32 << 20);
  stream_.sampler.shuffle = false;
  fs::rename(root_ + "/3", root_ + "/gone");
  auto pipeline = Make();
  ASSERT_TRUE(pipeline) << pipeline.status().ToString();
  FinishedBatch batch;
  for (int again = 0; again < 2; ++again) {
    auto taken = (*pipeline)->Take(10 * kSecond, &batch);
    ASSERT_FALSE(taken);
    EXPECT_NE(taken.error().message().find(root_ + "/3"), std::string::npos);
  }
  fs::rename(root_ + "/gone", root_ + "/3");
  Result<TakeKind> taken = (*pipeline)->Take(10 * kSecond, &batch);
  if (!taken) taken = (*pipeline)->Take(10 * kSecond, &batch);  // tried before the file was back
  ASSERT_TRUE(taken) << taken.status().ToString();
  EXPECT_EQ(batch.index, 0U);
  CheckBytes(batch);
  (*pipeline)->Release(batch.slab);
  EXPECT_EQ(Epoch(**pipeline).size(), 32U);
}

// Batches of 3 MiB out of 16: four finished ones would leave no room to read the next.
TEST_F(PipelineTest, FinishedBatchesLeaveRoomForReading) {
  items_ = (3 << 20) / 4;
  MakeEngine(8, 16 << 20);
  stream_.shape.batch_size = 1;
  auto pipeline = Make();
  ASSERT_TRUE(pipeline) << pipeline.status().ToString();
  std::vector<size_t> held;
  FinishedBatch batch;
  for (int i = 0; i < 40; ++i) {
    const TakeKind kind = Take(**pipeline, &batch);
    if (kind != TakeKind::kBatch) continue;
    held.push_back(batch.slab);
    if (held.size() < 2) continue;
    (*pipeline)->Release(held.front());
    held.erase(held.begin());
  }
  // More than fits is held: an error that a release ends.
  Status full;
  for (int i = 0; i < 10 && full.ok(); ++i) {
    auto taken = (*pipeline)->Take(10 * kSecond, &batch);
    if (!taken) full = taken.error();
    if (taken && *taken == TakeKind::kBatch) held.push_back(batch.slab);
  }
  EXPECT_NE(full.message().find("let go of earlier batches"), std::string::npos) << full.ToString();
  for (const size_t slab : held) (*pipeline)->Release(slab);
  EXPECT_NE(Take(**pipeline, &batch), TakeKind::kPending);
}

// Another loader's batches leave no room to read ahead. That is nobody's error until somebody
// waits for it.
TEST_F(PipelineTest, MemoryThatOthersHoldIsAnErrorOnlyForWhoWaits) {
  items_ = (1 << 20) / 4;
  MakeEngine(16, 16 << 20);
  stream_.shape.batch_size = 1;
  auto other = engine_->AddDataset(MakeFiles(16, {}, "other"));
  ASSERT_TRUE(other) << other.status().ToString();
  auto pipeline = Make();
  ASSERT_TRUE(pipeline) << pipeline.status().ToString();
  StreamOptions views;
  views.shape.dataset = *other;
  views.sampler.size = 16;
  auto stream = engine_->OpenStream(views);
  ASSERT_TRUE(stream) << stream.status().ToString();
  FinishedBatch batch;
  std::vector<LeaseId> leases;
  auto hold_all = [&] {
    while (true) {
      BatchLoan loan;
      auto taken = engine_->Take(*stream, 10 * kSecond, &loan);
      if (!taken) break;
      if (*taken == TakeKind::kBatch) leases.push_back(loan.lease);
    }
  };
  hold_all();
  // What was finished before comes; then there is nothing.
  Result<TakeKind> taken = TakeKind::kBatch;
  while (taken && *taken != TakeKind::kPending) {
    taken = (*pipeline)->Take(100 * kMilli, &batch);
    if (taken && *taken == TakeKind::kBatch) (*pipeline)->Release(batch.slab);
    if (leases.size() < 16) hold_all();
  }
  ASSERT_TRUE(taken) << taken.status().ToString();
  std::this_thread::sleep_for(std::chrono::milliseconds(500));  // nobody waits
  for (int i = 0; i < 2; ++i) {
    EXPECT_TRUE(engine_->Release(leases.back()).ok());
    leases.pop_back();
  }
  EXPECT_EQ(Take(**pipeline, &batch), TakeKind::kBatch);
  CheckBytes(batch);
  (*pipeline)->Release(batch.slab);
  hold_all();
  Status full;
  for (int i = 0; i < 100 && full.ok(); ++i) {
    taken = (*pipeline)->Take(kSecond, &batch);
    if (!taken) full = taken.error();
    if (taken && *taken == TakeKind::kBatch) (*pipeline)->Release(batch.slab);
    hold_all();
  }
  EXPECT_NE(full.message().find("were not released"), std::string::npos) << full.ToString();
  for (const LeaseId lease : leases) EXPECT_TRUE(engine_->Release(lease).ok());
  EXPECT_EQ(Take(**pipeline, &batch), TakeKind::kBatch);
}

TEST_F(PipelineTest, AStoppedPipelineGivesBackAllButTheBatchesOnLoan) {
  items_ = (1 << 20) / 4;
  MakeEngine(16, 16 << 20);
  stream_.shape.batch_size = 1;
  auto pipeline = Make();
  ASSERT_TRUE(pipeline) << pipeline.status().ToString();
  FinishedBatch first;
  ASSERT_EQ(Take(**pipeline, &first), TakeKind::kBatch);
  FinishedBatch batch;
  for (int i = 0; i < 3; ++i) ASSERT_EQ(Take(**pipeline, &batch), TakeKind::kBatch);  // held too
  EXPECT_FALSE(engine_->Lend(10 << 20));
  (*pipeline)->Stop();
  (*pipeline)->Release(batch.slab);
  // Reads that the closed stream had under way end first.
  const Nanos until = SteadyClock().Now() + 10 * kSecond;
  while (!engine_->Lend(9 << 20) && SteadyClock().Now() < until) usleep(1000);
  EXPECT_TRUE(engine_->Lend(9 << 20));
  CheckBytes(first);
}

// Whoever keeps the object of a closed loader, in an exception's traceback say, keeps no memory.
TEST_F(PipelineTest, StoppedPipelinesHoldNoPartOfTheBudget) {
  MakeEngine(16, 32 << 20);
  std::vector<PipelinePtr> stopped;
  for (int i = 0; i < 20; ++i) {  // 3 MiB each for three decoders
    auto pipeline = Make();
    ASSERT_TRUE(pipeline) << i << ": " << pipeline.status().ToString();
    FinishedBatch batch;
    ASSERT_EQ(Take(**pipeline, &batch), TakeKind::kBatch);
    (*pipeline)->Release(batch.slab);
    (*pipeline)->Stop();
    stopped.push_back(*std::move(pipeline));
  }
}

// Another loader's reads fill the arena and cannot be taken back while they are under way.
TEST_F(PipelineTest, WaitsForReadsThatFillTheMemory) {
  items_ = (1 << 20) / 4;
  MakeEngine(4, 16 << 20);
  stream_.shape.batch_size = 1;
  DelayOptions slow;
  slow.open_each = false;
  slow.storage.read = 100 * kMilli;
  const auto catalog = MakeFiles(64, {}, "slow");
  auto source = DelaySource::Make(*MakePosixSource(*catalog, {}), slow);
  ASSERT_TRUE(source);
  auto other = engine_->AddDataset(catalog, *std::move(source));
  ASSERT_TRUE(other) << other.status().ToString();
  StreamOptions views;
  views.shape.dataset = *other;
  views.sampler.size = 64;
  ASSERT_TRUE(engine_->OpenStream(views));
  // A machine that stands still for as long as a read takes misses them.
  const Nanos until = SteadyClock().Now() + 5 * kSecond;
  while (engine_->in_flight() < 12 && SteadyClock().Now() < until) std::this_thread::yield();
  auto pipeline = Make();
  ASSERT_TRUE(pipeline) << pipeline.status().ToString();
  EXPECT_EQ(Epoch(**pipeline).size(), 4U);
}

// In a child of its own: no further thread can start there, because its stack finds no room.
TEST_F(PipelineTest, AThreadThatDoesNotStartIsAnError) {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  GTEST_SKIP() << "sanitizers map more than the limit";
#elif defined(__has_feature)
#if __has_feature(address_sanitizer) || __has_feature(thread_sanitizer)
  GTEST_SKIP() << "sanitizers map more than the limit";
#endif
#endif
  for (const bool pool_runs : {false, true}) {
    const pid_t child = fork();
    if (child == 0) {
      MakeEngine(16, 32 << 20);
      PipelinePtr earlier;
      if (pool_runs) earlier = *Make();
      pthread_attr_t usual, huge;
      pthread_getattr_default_np(&usual);
      pthread_getattr_default_np(&huge);
      pthread_attr_setstacksize(&huge, size_t{1} << 36);
      struct rlimit before {};
      getrlimit(RLIMIT_AS, &before);
      const struct rlimit low { rlim_t{1} << 35, before.rlim_max };
      setrlimit(RLIMIT_AS, &low);
      pthread_setattr_default_np(&huge);
      auto refused = Make();
      pthread_setattr_default_np(&usual);
      setrlimit(RLIMIT_AS, &before);
      if (refused || refused.error().code() != Code::kResourceExhausted) _exit(1);
      auto pipeline = Make();
      if (!pipeline || Epoch(**pipeline).size() != 16) _exit(2);
      if (pool_runs && Epoch(*earlier).size() != 16) _exit(3);
      earlier.reset();
      pipeline->reset();
      engine_.reset();
      _exit(0);
    }
    int status = 1;
    ASSERT_EQ(waitpid(child, &status, 0), child);
    EXPECT_EQ(status, 0) << "pool_runs " << pool_runs;
  }
}

}  // namespace
}  // namespace forebay
