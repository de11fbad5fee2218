// Data sets that come and go: what each had is given back, whatever is still going on with it.
#include <dirent.h>
#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "base/files_testing.h"
#include "base/rng.h"
#include "catalog/test_data.h"
#include "source/delay_source.h"
#include "source/null_source.h"
#include "stage/engine.h"

namespace forebay {
namespace {

namespace fs = std::filesystem;

size_t CountIn(const char* folder) {
  size_t count = 0;
  DIR* const dir = opendir(folder);
  while (readdir(dir) != nullptr) ++count;
  closedir(dir);
  return count;
}

bool Eventually(const std::function<bool()>& condition) {
  for (int tries = 0; tries < 20'000; ++tries) {
    if (condition()) return true;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  return false;
}

class EngineDatasets : public ::testing::Test {
 protected:
  void SetUp() override {
    char name[] = "/tmp/forebay_datasets_XXXXXX";
    ASSERT_NE(mkdtemp(name), nullptr);
    root_ = name;
  }
  void TearDown() override { fs::remove_all(root_); }

  // Files whose bytes are FillNullSample's of the sample, if all of them are listed.
  std::shared_ptr<const Catalog> MakeFiles(uint32_t n, uint32_t length, const std::string& name) {
    std::vector<std::string> paths;
    fs::create_directories(root_ + "/" + name);
    for (uint32_t i = 0; i < n; ++i) {
      std::vector<std::byte> bytes(length);
      FillNullSample(i, bytes);
      paths.push_back(StrCat(root_, "/", name, "/", i));
      std::ofstream(paths.back(), std::ios::binary)
          .write(reinterpret_cast<const char*>(bytes.data()),
                 static_cast<std::streamsize>(bytes.size()));
      WrittenLongAgo(paths.back());
    }
    auto built = BuildFileList(paths, {});
    EXPECT_TRUE(built) << built.status().ToString();
    return std::shared_ptr<const Catalog>(*std::move(built));
  }

  std::shared_ptr<const Catalog> MakeShard(uint32_t n, uint32_t length, const std::string& name) {
    std::string shard;
    for (uint32_t i = 0; i < n; ++i) {
      std::vector<std::byte> bytes(length);
      FillNullSample(i, bytes);
      shard += testing::TarMember(
          StrCat("s", 100000 + i, ".bin"),
          std::string(reinterpret_cast<const char*>(bytes.data()), bytes.size()));
    }
    shard += testing::TarEnd();
    fs::create_directories(root_ + "/" + name);
    std::ofstream(root_ + "/" + name + "/a.tar", std::ios::binary)
        .write(shard.data(), static_cast<std::streamsize>(shard.size()));
    auto built = BuildCatalog(root_ + "/" + name, {});
    EXPECT_TRUE(built) << built.status().ToString();
    return std::shared_ptr<const Catalog>(*std::move(built));
  }

  static EnginePtr Make(uint64_t memory, const std::string& cache = {}) {
    EngineOptions options;
    options.memory = memory;
    options.cache_folder = cache;
    if (!cache.empty()) options.cache_bytes = uint64_t{256} << 20;
    auto engine = Engine::Create(options);
    EXPECT_TRUE(engine) << engine.status().ToString();
    EXPECT_TRUE((*engine)->registry().SetKnob("hedge_one_in", 0).ok());
    return *std::move(engine);
  }

  static StreamOptions Shape(DatasetId d, uint32_t n, uint32_t batch, uint64_t seed = 1) {
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

  static void CheckLoan(const Engine& engine, const BatchLoan& loan) {
    for (size_t i = 0; i < loan.samples.size(); ++i) {
      std::vector<std::byte> expected(loan.lengths[i]);
      FillNullSample(loan.samples[i], expected);
      ASSERT_EQ(std::memcmp(engine.base() + loan.offsets[i], expected.data(), expected.size()), 0)
          << "sample " << loan.samples[i];
    }
  }

  // How many samples one epoch had.
  static size_t ReadEpoch(Engine& engine, StreamId stream) {
    size_t samples = 0;
    while (true) {
      BatchLoan loan;
      const auto taken = engine.Take(stream, 60 * kSecond, &loan);
      EXPECT_TRUE(taken) << taken.status().ToString();
      if (!taken || *taken != TakeKind::kBatch) return samples;
      CheckLoan(engine, loan);
      samples += loan.samples.size();
      EXPECT_TRUE(engine.Release(loan.lease).ok());
    }
  }

  static size_t UseOnce(Engine& engine, const std::shared_ptr<const Catalog>& catalog,
                        const std::string& key) {
    const auto dataset = engine.AddDataset(catalog, nullptr, nullptr, key);
    EXPECT_TRUE(dataset) << dataset.status().ToString();
    if (!dataset) return 0;
    const auto n = static_cast<uint32_t>(catalog->size());
    const auto stream = engine.OpenStream(Shape(*dataset, n, 8));
    EXPECT_TRUE(stream) << stream.status().ToString();
    const size_t samples = ReadEpoch(engine, *stream);
    EXPECT_TRUE(engine.CloseStream(*stream).ok());
    EXPECT_TRUE(engine.CloseDataset(*dataset).ok());
    return samples;
  }

  // The file's change time moves, which takes a tick of the kernel's clock; nothing else does.
  static void ChangeAttributes(const std::string& path) {
    struct stat before = {};
    struct stat now = {};
    ASSERT_EQ(stat(path.c_str(), &before), 0);
    do {
      ASSERT_EQ(chmod(path.c_str(), before.st_mode & 07777), 0);
      ASSERT_EQ(stat(path.c_str(), &now), 0);
    } while (now.st_ctim.tv_sec == before.st_ctim.tv_sec &&
             now.st_ctim.tv_nsec == before.st_ctim.tv_nsec);
  }
  // The same files, looked at now.
  static std::shared_ptr<const Catalog> Look(const Catalog& catalog) {
    std::vector<std::string> paths;
    for (SampleId s = 0; s < catalog.size(); ++s) {
      paths.push_back(catalog.ObjectPath(catalog.object(s)));
    }
    auto built = BuildFileList(paths, {});
    EXPECT_TRUE(built) << built.status().ToString();
    return std::shared_ptr<const Catalog>(*std::move(built));
  }
  // The same as it was saved: nobody has looked at its files.
  std::shared_ptr<const Catalog> Saved(const Catalog& catalog) const {
    const std::string file = root_ + "/saved.catalog";
    EXPECT_TRUE(catalog.Save(file).ok());
    auto loaded = Catalog::Load(file);
    EXPECT_TRUE(loaded) << loaded.status().ToString();
    EXPECT_TRUE((*loaded)->LacksStamps());
    return std::shared_ptr<const Catalog>(*std::move(loaded));
  }

  std::string root_;
};

TEST_F(EngineDatasets, AThousandCostWhatTenDo) {
  const EnginePtr engine = Make(uint64_t{24} << 20);
  const auto files = MakeFiles(40, 2000, "files");
  const auto shard = MakeShard(40, 2000, "shard");
  const auto given_back = [&] { return engine->open_datasets() == 0; };
  size_t threads = 0;
  size_t descriptors = 0;
  uint64_t arena = 0;
  size_t numbers = 0;
  for (int i = 0; i < 1000; ++i) {
    ASSERT_EQ(UseOnce(*engine, i % 2 == 0 ? files : shard, StrCat("k", i)), 40u) << i;
    if (i != 9 && i != 999) continue;
    ASSERT_TRUE(Eventually(given_back));
    // Descriptors of shards are closed by a thread that then ends.
    size_t now = 0;
    ASSERT_TRUE(Eventually([&] {
      now = CountIn("/proc/self/task");
      return i == 9 || (now <= threads && CountIn("/proc/self/fd") <= descriptors);
    })) << now
        << " threads, " << CountIn("/proc/self/fd") << " descriptors";
    if (i == 9) {
      // The pool may grow to as many as reads of one data set can use.
      threads = engine->in_flight_limit() + 64 + now;
      descriptors = CountIn("/proc/self/fd") + 2;
      arena = Value(*engine, "forebay_stage_arena_used_bytes");
      numbers = engine->dataset_count();
    }
  }
  EXPECT_LE(Value(*engine, "forebay_stage_arena_used_bytes"), arena + (uint64_t{1} << 20));
  EXPECT_LE(engine->dataset_count(), numbers + 2);
  // What closed ones have kept is for others to take.
  EXPECT_TRUE(engine->Lend(uint64_t{16} << 20, 0, 10 * kSecond));
}

TEST_F(EngineDatasets, AnEqualOneFindsWhatWasKept) {
  const EnginePtr engine = Make(uint64_t{32} << 20);
  const auto catalog = MakeFiles(50, 3000, "files");
  EXPECT_EQ(UseOnce(*engine, catalog, "a"), 50u);
  EXPECT_EQ(Value(*engine, "forebay_source_reads_total"), 50u);
  ASSERT_TRUE(Eventually([&] { return engine->open_datasets() == 0; }));
  EXPECT_EQ(UseOnce(*engine, catalog, "a"), 50u);
  EXPECT_EQ(Value(*engine, "forebay_source_reads_total"), 50u);
  // Whether it is closed by then or not.
  EXPECT_EQ(UseOnce(*engine, catalog, "a"), 50u);
  EXPECT_EQ(Value(*engine, "forebay_source_reads_total"), 50u);
  EXPECT_EQ(UseOnce(*engine, catalog, "b"), 50u);
  EXPECT_EQ(Value(*engine, "forebay_source_reads_total"), 100u);
  EXPECT_EQ(UseOnce(*engine, catalog, ""), 50u);
  EXPECT_EQ(UseOnce(*engine, catalog, ""), 50u);
  EXPECT_EQ(Value(*engine, "forebay_source_reads_total"), 200u);
}

TEST_F(EngineDatasets, OfAClosedOneOnlyFilesWithAnotherChangeTimeAreReadAgain) {
  for (const bool looked : {true, false}) {
    SCOPED_TRACE(looked);
    const EnginePtr engine = Make(uint64_t{32} << 20);
    const auto made = MakeFiles(50, 3000, "files");
    const auto first = looked ? made : Saved(*made);
    EXPECT_EQ(UseOnce(*engine, first, "a"), 50u);
    EXPECT_EQ(UseOnce(*engine, Look(*made), "a"), 50u);
    EXPECT_EQ(Value(*engine, "forebay_source_reads_total"), 50u);
    ASSERT_TRUE(Eventually([&] { return engine->open_datasets() == 0; }));
    ChangeAttributes(made->ObjectPath(7));
    ChangeAttributes(made->ObjectPath(33));
    for (int again = 0; again < 3; ++again) {
      EXPECT_EQ(UseOnce(*engine, Look(*made), "a"), 50u);
      EXPECT_EQ(Value(*engine, "forebay_source_reads_total"), 52u);
    }
    // Who does not look believes what is there.
    EXPECT_EQ(UseOnce(*engine, Saved(*made), "a"), 50u);
    EXPECT_EQ(Value(*engine, "forebay_source_reads_total"), 52u);
    ASSERT_TRUE(Eventually([&] { return engine->open_datasets() == 0; }));
    ChangeAttributes(made->ObjectPath(8));
    EXPECT_EQ(UseOnce(*engine, Look(*made), "a"), 50u);
    EXPECT_EQ(Value(*engine, "forebay_source_reads_total"), 53u);
  }
}

TEST_F(EngineDatasets, AnOpenOneIsSharedByWhoHasSeenTheSameChangeTimes) {
  for (const bool looked : {true, false}) {
    SCOPED_TRACE(looked);
    const EnginePtr engine = Make(uint64_t{32} << 20);
    const auto made = MakeFiles(50, 3000, "files");
    const auto first = engine->AddDataset(looked ? made : Saved(*made), nullptr, nullptr, "a");
    ASSERT_TRUE(first);
    const auto stream = engine->OpenStream(Shape(*first, 50, 8));
    ASSERT_TRUE(stream);
    EXPECT_EQ(ReadEpoch(*engine, *stream), 50u);
    const auto same = Look(*made);
    const auto second = engine->AddDataset(same, nullptr, nullptr, "a");
    ASSERT_TRUE(second);
    EXPECT_EQ(*first, *second);
    EXPECT_EQ(engine->UseDataset("a", same->StampsHash()), *first);
    ChangeAttributes(made->ObjectPath(7));
    const auto now = Look(*made);
    EXPECT_NE(now->StampsHash(), same->StampsHash());
    EXPECT_EQ(engine->UseDataset("a", now->StampsHash()), std::nullopt);
    const auto third = engine->AddDataset(now, nullptr, nullptr, "a");
    ASSERT_TRUE(third);
    EXPECT_NE(*third, *first);
    EXPECT_EQ(engine->UseDataset("a", now->StampsHash()), *third);
    const auto fourth = engine->AddDataset(Look(*made), nullptr, nullptr, "a");
    ASSERT_TRUE(fourth);
    EXPECT_EQ(*fourth, *third);
  }
}

// A read that began before the look of who shares the data set brings bytes of before it.
TEST_F(EngineDatasets, AReadUnderWayIsNotOlderThanALaterLook) {
  const EnginePtr engine = Make(uint64_t{32} << 20);
  const auto made = MakeFiles(1, 3000, "files");
  const std::string path = made->ObjectPath(0);
  struct stat st = {};
  ASSERT_EQ(stat(path.c_str(), &st), 0);
  const timespec times[2] = {st.st_atim, st.st_mtim};
  const auto write = [&](uint32_t filling) {
    std::vector<std::byte> bytes(3000);
    FillNullSample(filling, bytes);
    std::fstream(path, std::ios::binary | std::ios::in | std::ios::out)
        .write(reinterpret_cast<const char*>(bytes.data()), 3000);
    ASSERT_EQ(utimensat(AT_FDCWD, path.c_str(), times, 0), 0);
    ChangeAttributes(path);
  };
  write(1);
  const auto saved = Saved(*made);
  auto slow = MakeDelayedSource(*saved, "read_ms=400");
  ASSERT_TRUE(slow);
  const auto first = engine->AddDataset(saved, *std::move(slow), nullptr, "a");
  ASSERT_TRUE(first);
  const auto stream = engine->OpenStream(Shape(*first, 1, 1));
  ASSERT_TRUE(stream);
  BatchLoan loan;
  const auto pending = engine->Take(*stream, 200 * kMilli, &loan);
  ASSERT_TRUE(pending);
  ASSERT_EQ(*pending, TakeKind::kPending);  // it has read the file by now, and is held back
  write(0);
  const auto second = engine->AddDataset(Look(*made), nullptr, nullptr, "a");
  ASSERT_TRUE(second);
  EXPECT_EQ(*second, *first);
  const auto late = engine->OpenStream(Shape(*second, 1, 1));
  ASSERT_TRUE(late);
  EXPECT_EQ(ReadEpoch(*engine, *late), 1u);
  EXPECT_EQ(ReadEpoch(*engine, *stream), 1u);
}

TEST_F(EngineDatasets, WhatIsKeptOfClosedOnesLeavesFirst) {
  const EnginePtr engine = Make(uint64_t{16} << 20);
  const auto first = MakeFiles(60, 100'000, "first");
  const auto second = MakeFiles(80, 100'000, "second");
  EXPECT_EQ(UseOnce(*engine, first, "first"), 60u);
  ASSERT_TRUE(Eventually([&] { return engine->open_datasets() == 0; }));
  EXPECT_GT(Value(*engine, "forebay_stage_kept_bytes"), 0u);
  // All of the second is kept, as if the first had never been there.
  const auto dataset = engine->AddDataset(second, nullptr, nullptr, "second");
  ASSERT_TRUE(dataset);
  const auto stream = engine->OpenStream(Shape(*dataset, 80, 8));
  ASSERT_TRUE(stream);
  EXPECT_EQ(ReadEpoch(*engine, *stream), 80u);
  EXPECT_EQ(Value(*engine, "forebay_source_reads_total"), 140u);
  EXPECT_EQ(ReadEpoch(*engine, *stream), 80u);
  EXPECT_EQ(Value(*engine, "forebay_source_reads_total"), 140u);
}

TEST_F(EngineDatasets, ItStaysUntilItsBatchesAreReleased) {
  const EnginePtr engine = Make(uint64_t{32} << 20);
  const auto catalog = MakeFiles(30, 5000, "files");
  const auto dataset = engine->AddDataset(catalog, nullptr, nullptr, "a");
  ASSERT_TRUE(dataset);
  const auto stream = engine->OpenStream(Shape(*dataset, 30, 10));
  ASSERT_TRUE(stream);
  // Its stream keeps it, too.
  ASSERT_TRUE(engine->CloseDataset(*dataset).ok());
  EXPECT_FALSE(engine->CloseDataset(*dataset).ok());
  EXPECT_EQ(ReadEpoch(*engine, *stream), 30u);
  BatchLoan loan;
  const auto taken = engine->Take(*stream, 60 * kSecond, &loan);
  ASSERT_TRUE(taken);
  ASSERT_EQ(*taken, TakeKind::kBatch);
  ASSERT_TRUE(engine->CloseStream(*stream).ok());
  EXPECT_EQ(UseOnce(*engine, MakeFiles(200, 5000, "others"), "b"), 200u);
  ASSERT_TRUE(Eventually([&] { return engine->open_datasets() == 1; }));
  CheckLoan(*engine, loan);
  EXPECT_EQ(engine->Take(*stream, 0, &loan).error().code(), Code::kCancelled);
  EXPECT_EQ(engine->Seek(*stream, 0, 0).code(), Code::kCancelled);
  EXPECT_FALSE(engine->Stats(*stream).empty());
  ASSERT_TRUE(engine->Release(loan.lease).ok());
  EXPECT_TRUE(Eventually([&] { return engine->open_datasets() == 0; }));
  EXPECT_EQ(engine->OpenStream(Shape(*dataset, 30, 10)).error().code(), Code::kInvalidArgument);
  EXPECT_EQ(engine->shared_catalog(*dataset), nullptr);
}

TEST_F(EngineDatasets, ClosedWhileReadsAreUnderWay) {
  const EnginePtr engine = Make(uint64_t{32} << 20);
  const auto catalog = MakeFiles(100, 3000, "files");
  for (int round = 0; round < 20; ++round) {
    auto source = MakeDelayedSource(*catalog, "open_ms=2,read_ms=2,bandwidth_mb=50");
    ASSERT_TRUE(source);
    const auto dataset = engine->AddDataset(catalog, *std::move(source));
    ASSERT_TRUE(dataset);
    const auto stream = engine->OpenStream(Shape(*dataset, 100, 10, static_cast<uint64_t>(round)));
    ASSERT_TRUE(stream);
    BatchLoan loan;
    const auto taken = engine->Take(*stream, 60 * kSecond, &loan);  // the others are being read
    ASSERT_TRUE(taken);
    if (round % 2 == 0) {
      ASSERT_TRUE(engine->Release(loan.lease).ok());
    }
    ASSERT_TRUE(engine->CloseDataset(*dataset).ok());
    ASSERT_TRUE(engine->CloseStream(*stream).ok());
    if (round % 2 != 0) {
      ASSERT_TRUE(engine->Release(loan.lease).ok());
    }
  }
  EXPECT_TRUE(Eventually([&] { return engine->open_datasets() == 0; }));
}

// A consumer waits for a batch whose reads are not all started, and goes.
TEST_F(EngineDatasets, ClosedWhileReadsWaitForARequest) {
  const EnginePtr engine = Make(uint64_t{32} << 20);
  ASSERT_TRUE(engine->registry().SetKnob("source_reads_in_flight", 1).ok());
  const auto catalog = MakeFiles(100, 3000, "files");
  for (int round = 0; round < 10; ++round) {
    auto source = MakeDelayedSource(*catalog, "open_ms=1,read_ms=1,bandwidth_mb=50");
    ASSERT_TRUE(source);
    const auto dataset = engine->AddDataset(catalog, *std::move(source));
    ASSERT_TRUE(dataset);
    const auto stream = engine->OpenStream(Shape(*dataset, 100, 50, static_cast<uint64_t>(round)));
    ASSERT_TRUE(stream);
    BatchLoan loan;
    (void)engine->Take(*stream, 5 * kMilli, &loan);
    ASSERT_TRUE(engine->CloseStream(*stream).ok());
    ASSERT_TRUE(engine->CloseDataset(*dataset).ok());
  }
  EXPECT_TRUE(Eventually([&] { return engine->open_datasets() == 0; }));
}

TEST_F(EngineDatasets, TwoWhoAddTheSameShareIt) {
  const EnginePtr engine = Make(uint64_t{32} << 20);
  const auto catalog = MakeFiles(20, 1000, "files");
  for (int round = 0; round < 50; ++round) {
    std::array<DatasetId, 4> ids{};
    {
      std::vector<std::jthread> threads;
      for (DatasetId& id : ids) {
        threads.emplace_back(
            [&] { id = *engine->AddDataset(catalog, nullptr, nullptr, StrCat("k", round)); });
      }
    }
    for (const DatasetId id : ids) EXPECT_EQ(id, ids[0]);
    EXPECT_EQ(engine->UseDataset(StrCat("k", round)), ids[0]);
    for (size_t i = 0; i <= ids.size(); ++i) EXPECT_TRUE(engine->CloseDataset(ids[0]).ok());
    EXPECT_FALSE(engine->CloseDataset(ids[0]).ok());
  }
}

// Whatever is closed in which order, by whom: right bytes, and nothing is left.
TEST_F(EngineDatasets, ManyThreadsOpenAndCloseAtRandom) {
  const EnginePtr engine = Make(uint64_t{24} << 20, root_ + "/cache");
  std::vector<std::shared_ptr<const Catalog>> catalogs;
  for (int i = 0; i < 4; ++i) {
    catalogs.push_back(MakeFiles(60, 20'000, StrCat("files", i)));
    catalogs.push_back(MakeShard(60, 9000, StrCat("shard", i)));
  }
  std::vector<std::jthread> threads;
  for (uint64_t t = 0; t < 4; ++t) {
    threads.emplace_back([&, t] {
      SplitMix64 rng(t);
      for (int round = 0; round < 40; ++round) {
        const size_t which = rng.Below(catalogs.size());
        const auto dataset =
            engine->AddDataset(catalogs[which], nullptr, nullptr, StrCat("k", which));
        ASSERT_TRUE(dataset) << dataset.status().ToString();
        const bool early = rng.Below(2) == 0;
        const auto stream = engine->OpenStream(Shape(*dataset, 60, 6, rng.Next()));
        ASSERT_TRUE(stream) << stream.status().ToString();
        if (early) {
          ASSERT_TRUE(engine->CloseDataset(*dataset).ok());
        }
        std::vector<BatchLoan> loans(rng.Below(4));
        for (BatchLoan& loan : loans) {
          const auto taken = engine->Take(*stream, 60 * kSecond, &loan);
          ASSERT_TRUE(taken) << taken.status().ToString();
        }
        if (rng.Below(2) == 0) {
          ASSERT_TRUE(engine->CloseStream(*stream).ok());
        }
        for (const BatchLoan& loan : loans) {
          CheckLoan(*engine, loan);
          ASSERT_TRUE(engine->Release(loan.lease).ok());
        }
        ASSERT_TRUE(engine->CloseStream(*stream).ok());
        if (!early) {
          ASSERT_TRUE(engine->CloseDataset(*dataset).ok());
        }
      }
    });
  }
  threads.clear();
  EXPECT_TRUE(Eventually([&] { return engine->open_datasets() == 0; }));
}

}  // namespace
}  // namespace forebay
