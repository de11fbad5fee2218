// Data sets of the engine that grow while streams fetch from them, and files that change.
#include <gtest/gtest.h>
#include <sys/stat.h>

#include <atomic>
#include <cstring>
#include <filesystem>
#include <map>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "base/rng.h"
#include "catalog/paths.h"
#include "catalog/test_data.h"
#include "source/delay_source.h"
#include "source/null_source.h"
#include "stage/engine.h"

namespace forebay {
namespace {

namespace fs = std::filesystem;

// Programs under one root, and the engine of their node. With `true` it has a cache folder.
class GrowingEngine : public ::testing::TestWithParam<bool> {
 protected:
  void SetUp() override { Start(); }

  void Start(bool keep = true) {
    engine_.reset();
    EngineOptions options;
    options.memory = 16 << 20;
    options.keep = keep;
    if (GetParam()) {
      options.cache_folder = folder_ / "cache";
      options.cache_bytes = 64 << 20;
    }
    auto engine = Engine::Create(options);
    ASSERT_TRUE(engine) << engine.status().ToString();
    engine_ = *std::move(engine);
    EXPECT_TRUE(engine_->registry().SetKnob("hedge_one_in", 0).ok());
    const auto dataset = engine_->AddGrowing(Catalog::Growing(folder_ / "data"));
    ASSERT_TRUE(dataset) << dataset.status().ToString();
    dataset_ = *dataset;
  }

  StreamId Open() {
    StreamOptions options;
    options.shape.dataset = dataset_;
    options.shape.itemised = true;
    options.declared = true;
    const auto stream = engine_->OpenStream(options);
    EXPECT_TRUE(stream) << stream.status().ToString();
    return *stream;
  }

  // Files as they are now.
  std::vector<Appended> Append(const std::vector<std::string>& paths, uint32_t block = 0) {
    std::vector<NewFile> files;
    for (const std::string& path : paths) {
      struct stat st {};
      EXPECT_EQ(::stat(path.c_str(), &st), 0) << path;
      files.push_back({path, static_cast<uint64_t>(st.st_size), MtimeNs(st), block});
    }
    std::vector<Appended> out;
    const Status status = engine_->AppendSamples(dataset_, files, &out);
    EXPECT_TRUE(status.ok()) << status.ToString();
    EXPECT_EQ(out.size(), files.size());
    return out;
  }

  std::string Write(const std::string& name, const std::string& content) const {
    return folder_.Write("data/" + name, content);
  }

  Result<std::string> Fetch(StreamId stream, SampleId sample) {
    BatchLoan loan;
    LeaseId lease = kNoLease;
    const Result<TakeKind> taken = engine_->Fetch(stream, sample, 30 * kSecond, &lease, &loan);
    if (!taken) {
      if (lease != kNoLease) (void)engine_->Release(lease);
      return taken.error();
    }
    EXPECT_EQ(*taken, TakeKind::kBatch) << engine_->WaitingFor(stream);
    std::string text(reinterpret_cast<const char*>(loan.base + loan.offsets[0]), loan.lengths[0]);
    EXPECT_TRUE(engine_->Release(loan.lease).ok());
    return text;
  }

  uint64_t Value(std::string_view metric) const {
    for (const Registry::Sample& sample : engine_->registry().Snapshot()) {
      if (sample.name == metric) return sample.value;
    }
    ADD_FAILURE() << "no metric " << metric;
    return 0;
  }

  testing::TempFolder folder_;
  EnginePtr engine_;
  DatasetId dataset_ = 0;
};

INSTANTIATE_TEST_SUITE_P(All, GrowingEngine, ::testing::Bool(),
                         [](const ::testing::TestParamInfo<bool>& folder) {
                           return std::string(folder.param ? "folder" : "memory");
                         });

TEST_P(GrowingEngine, FilesAreFetchedAsTheyAreMet) {
  const StreamId stream = Open();
  EXPECT_FALSE(Fetch(stream, 0)) << "there is none yet";
  const std::string large(10'000, 'x');
  const std::vector<Appended> first = Append({Write("a/1", "one"), Write("2", "")});
  EXPECT_EQ(*Fetch(stream, first[0].first), "one");
  EXPECT_EQ(*Fetch(stream, first[1].first), "");
  const Appended blocks = Append({Write("large", large)}, 4096)[0];
  ASSERT_EQ(blocks.count, 3u);
  EXPECT_EQ(*Fetch(stream, blocks.first + 2), large.substr(8192));
  EXPECT_EQ(*Fetch(stream, blocks.first), large.substr(0, 4096));
  EXPECT_EQ(*Fetch(stream, first[0].first), "one");
  EXPECT_EQ(engine_->shared_catalog(dataset_)->size(), 5u);
}

TEST_P(GrowingEngine, AnOrderMayNameFilesThatCameAfterTheStreamWasOpened) {
  const StreamId stream = Open();
  std::vector<std::string> paths;
  for (int i = 0; i < 50; ++i) {
    paths.push_back(Write(std::to_string(i), "content " + std::to_string(i)));
  }
  ASSERT_FALSE(engine_->Declare(stream, 0, {0}, false).ok()) << "not there yet";
  Append(paths);
  std::vector<SampleId> order;
  for (SampleId s = 0; s < 50; ++s) order.push_back(49 - s);
  ASSERT_TRUE(engine_->Declare(stream, 0, order, false).ok());
  Append({Write("undeclared", "more")});
  EXPECT_EQ(*Fetch(stream, 50), "more");
  for (const SampleId s : order) EXPECT_EQ(*Fetch(stream, s), "content " + std::to_string(s));
  EXPECT_EQ(Value("forebay_source_reads_total"), 51u);
}

// Whether its copy is still being written, or there already.
TEST_P(GrowingEngine, AFileThatChangedIsNeverServedUnderItsOldNumber) {
  const StreamId stream = Open();
  for (uint64_t i = 0; i < 20; ++i) {
    const std::string name = StrCat("file", i);
    const std::string path = Write(name, "old");
    struct stat st {};
    ASSERT_EQ(::stat(path.c_str(), &st), 0);
    const Appended old = Append({path})[0];
    EXPECT_EQ(*Fetch(stream, old.first), "old");
    while (GetParam() && i % 2 == 0 && Value("forebay_tier_copies_under_way") > 0)
      std::this_thread::yield();
    ASSERT_TRUE(engine_->Invalidate(dataset_, old.first, old.count).ok());
    Write(name, "new");
    // Even where neither size nor time tells: the copies have the same name.
    const timespec times[2] = {st.st_atim, st.st_mtim};
    ASSERT_EQ(::utimensat(AT_FDCWD, path.c_str(), times, 0), 0);
    const auto dead = Fetch(stream, old.first);
    ASSERT_FALSE(dead);
    EXPECT_EQ(dead.error().code(), Code::kChanged);
    EXPECT_NE(dead.error().message().find(path), std::string::npos);
    const Appended fresh = Append({path})[0];
    EXPECT_EQ(fresh.first, old.first + 1);
    EXPECT_EQ(*Fetch(stream, fresh.first), "new");
    EXPECT_TRUE(engine_->Invalidate(dataset_, old.first, 1).ok()) << "once more changes nothing";
    EXPECT_EQ(*Fetch(stream, fresh.first), "new");
  }
}

TEST_P(GrowingEngine, ABatchOnLoanStaysWhatItWas) {
  const StreamId stream = Open();
  const Appended file = Append({Write("file", "old")})[0];
  BatchLoan loan;
  LeaseId lease = kNoLease;
  ASSERT_EQ(*engine_->Fetch(stream, file.first, 30 * kSecond, &lease, &loan), TakeKind::kBatch);
  ASSERT_TRUE(engine_->Invalidate(dataset_, file.first, 1).ok());
  std::vector<std::string> others;
  for (int i = 0; i < 100; ++i) others.push_back(Write(std::to_string(i), "another"));
  for (const Appended& other : Append(others)) EXPECT_EQ(*Fetch(stream, other.first), "another");
  EXPECT_EQ(std::memcmp(loan.base + loan.offsets[0], "old", 3), 0);
  EXPECT_TRUE(engine_->Release(loan.lease).ok());
}

TEST_P(GrowingEngine, ARestartFindsTheCopiesOfEachFile) {
  std::vector<std::string> paths;
  std::string large(300'000, 'y');
  for (int i = 0; i < 40; ++i) {
    paths.push_back(Write(StrCat(i % 3, "/", i), "content " + std::to_string(i)));
  }
  paths.push_back(Write("large", large));
  {
    const StreamId stream = Open();
    for (const std::string& path : paths) (void)*Fetch(stream, Append({path})[0].first);
    EXPECT_EQ(Value("forebay_source_reads_total"), 41u);
  }
  Start();
  const StreamId stream = Open();
  std::reverse(paths.begin(), paths.end());
  std::vector<Appended> found = Append(paths);
  EXPECT_EQ(*Fetch(stream, found[0].first), large);
  for (int i = 1; i <= 40; ++i) {
    EXPECT_EQ(*Fetch(stream, found[static_cast<size_t>(i)].first),
              "content " + std::to_string(40 - i));
  }
  EXPECT_EQ(Value("forebay_source_reads_total"), GetParam() ? 0u : 41u);
  // What was dropped is not found by the next one either.
  ASSERT_TRUE(engine_->Invalidate(dataset_, found[0].first, 1).ok());
  Start();
  found = Append(paths);
  EXPECT_EQ(*Fetch(Open(), found[0].first), large);
  EXPECT_EQ(Value("forebay_source_reads_total"), 1u);
}

TEST_P(GrowingEngine, WhatDoesNotGrowSaysSo) {
  const auto fixed = BuildFileList(std::vector<std::string>{Write("x", "x")}, {});
  ASSERT_TRUE(fixed);
  const auto grows = engine_->AddDataset(Catalog::Growing("/none"));
  ASSERT_FALSE(grows);
  EXPECT_EQ(grows.error().code(), Code::kInvalidArgument);
  const std::vector<NewFile> file = {{"/none/x", 1, 1, 0}};
  std::vector<Appended> out;
  EXPECT_EQ(engine_->AppendSamples(7, file, &out).code(), Code::kInvalidArgument);
  EXPECT_EQ(engine_->AppendSamples(dataset_, file, &out).code(), Code::kInvalidArgument);
  EXPECT_TRUE(out.empty());
  EXPECT_EQ(engine_->Invalidate(dataset_, 0, 1).code(), Code::kInvalidArgument);
  StreamOptions batches;
  batches.shape.dataset = dataset_;
  batches.declared = true;
  EXPECT_EQ(engine_->OpenStream(batches).error().code(), Code::kInvalidArgument);
}

TEST_P(GrowingEngine, TheFilesBeforeABadOneStay) {
  const std::string good = Write("good", "good");
  struct stat st {};
  ASSERT_EQ(::stat(good.c_str(), &st), 0);
  const NewFile file{good, 4, MtimeNs(st), 0};
  const std::vector<NewFile> files = {file, {"/elsewhere", 4, 1, 0}, file};
  std::vector<Appended> out;
  EXPECT_EQ(engine_->AppendSamples(dataset_, files, &out).code(), Code::kInvalidArgument);
  ASSERT_EQ(out.size(), 1u);
  EXPECT_EQ(*Fetch(Open(), out[0].first), "good");
}

TEST_P(GrowingEngine, AFileThatIsMetAgainHasTheSamplesOfBefore) {
  const StreamId stream = Open();
  const std::string path = Write("file", std::string(10'000, 'x'));
  const std::string other = Write("other", "y");
  const Appended first = Append({path}, 4096)[0];
  ASSERT_EQ(first.count, 3u);
  const std::vector<Appended> again = Append({other, path, other}, 4096);
  EXPECT_EQ(again[1].first, first.first);
  EXPECT_EQ(again[1].count, 3u);
  EXPECT_EQ(again[2].first, again[0].first) << "twice in one call";
  EXPECT_NE(Append({path})[0].first, first.first) << "another way to cut it";
  EXPECT_EQ(engine_->shared_catalog(dataset_)->size(), 5u);
  EXPECT_EQ(*Fetch(stream, first.first), std::string(4096, 'x'));
  // A part of it is enough.
  ASSERT_TRUE(engine_->Invalidate(dataset_, first.first + 2, 1).ok());
  const Appended fresh = Append({path}, 4096)[0];
  EXPECT_EQ(fresh.first, 5u);
  EXPECT_EQ(Append({path}, 4096)[0].first, fresh.first);
}

// Neither of what the file was when it was met, nor kept for it.
TEST_P(GrowingEngine, AFileThatWasReplacedUnnoticedIsNotTakenForTheOldOne) {
  const StreamId stream = Open();
  const std::string path = Write("file", "old");
  const Appended old = Append({path})[0];
  Write("file", "new");
  const timespec times[2] = {{.tv_sec = 5, .tv_nsec = 0}, {.tv_sec = 5, .tv_nsec = 1}};
  ASSERT_EQ(::utimensat(AT_FDCWD, path.c_str(), times, 0), 0);
  const auto changed = Fetch(stream, old.first);
  ASSERT_FALSE(changed);
  EXPECT_EQ(changed.error().code(), Code::kChanged) << changed.error().ToString();
  EXPECT_EQ(*Fetch(stream, Append({path})[0].first), "new");
}

TEST_P(GrowingEngine, TablesAreWithinTheBudget) {
  std::vector<NewFile> files(1000, NewFile{.path = "", .size = 1, .mtime_ns = 1});
  std::vector<std::string> paths;
  for (int i = 0; i < 1000; ++i) paths.push_back(folder_ / StrCat("data/", i));
  for (size_t i = 0; i < files.size(); ++i) files[i].path = paths[i];
  const uint64_t before = Value("forebay_stage_arena_used_bytes");
  std::vector<Appended> out;
  ASSERT_TRUE(engine_->AppendSamples(dataset_, files, &out).ok());
  Open();
  const uint64_t after = Value("forebay_stage_arena_used_bytes");
  EXPECT_GE(after - before, 4096 * 80u) << "a step, not each of them";
  const auto change = [&] {
    for (NewFile& file : files) ++file.mtime_ns;
  };
  change();
  ASSERT_TRUE(engine_->AppendSamples(dataset_, files, &out).ok());
  Open();
  EXPECT_EQ(Value("forebay_stage_arena_used_bytes"), after);
  Status status;
  for (int i = 0; i < 1000 && status.ok(); ++i) {
    change();
    status = engine_->AppendSamples(dataset_, files, &out);
  }
  EXPECT_EQ(status.code(), Code::kResourceExhausted) << status.ToString();
}

// Several programs open, read, announce and rewrite files of one node at one time. Each file's
// content is its name and a version; who opens one after a change was answered must not see an
// older version.
TEST_P(GrowingEngine, ManyProgramsAtOnce) {
  Start(/*keep=*/false);
  constexpr size_t kFiles = 60;
  struct File {
    Mutex mutex;
    std::string path;
    uint64_t version GUARDED_BY(mutex) = 0;
    Appended samples GUARDED_BY(mutex);
  };
  std::vector<File> files(kFiles);
  const auto content = [](size_t i, uint64_t version) {
    return StrCat("file ", i, " version ", 1'000'000 + version, std::string(i * 50, '.'));
  };
  for (size_t i = 0; i < kFiles; ++i) {
    files[i].path = Write(StrCat(i % 5, "/", i), content(i, 0));
    MutexLock lock(files[i].mutex);
    files[i].samples = Append({files[i].path})[0];
  }
  std::vector<std::thread> programs;
  for (uint64_t p = 0; p < 4; ++p) {
    programs.emplace_back([&, p] {
      SplitMix64 rng(p);
      const StreamId stream = Open();
      for (uint64_t step = 0; step < 400; ++step) {
        const size_t i = rng.Below(kFiles);
        File& file = files[i];
        if (rng.Below(10) == 0) {
          // Who writes holds the file: others see it before or after.
          MutexLock lock(file.mutex);
          ASSERT_TRUE(engine_->Invalidate(dataset_, file.samples.first, file.samples.count).ok());
          ++file.version;
          Write(StrCat(i % 5, "/", i), content(i, file.version));
          file.samples = Append({file.path})[0];
          continue;
        }
        if (rng.Below(20) == 0) {
          std::vector<SampleId> order;
          const size_t size = engine_->shared_catalog(dataset_)->size();
          for (int n = 0; n < 20; ++n) order.push_back(static_cast<SampleId>(rng.Below(size)));
          ASSERT_TRUE(engine_->Declare(stream, step, order, false).ok());
        }
        SampleId sample = 0;
        uint64_t version = 0;
        {
          MutexLock lock(file.mutex);
          sample = file.samples.first;
          version = file.version;
        }
        const Result<std::string> got = Fetch(stream, sample);
        if (got) {
          ASSERT_EQ(*got, content(i, version));
        } else {
          // Somebody has changed it meanwhile, or is about to append it.
          ASSERT_TRUE(got.error().code() == Code::kChanged) << got.error().ToString();
        }
      }
    });
  }
  for (std::thread& program : programs) program.join();
  EXPECT_GT(engine_->shared_catalog(dataset_)->size(), kFiles);
}

}  // namespace
}  // namespace forebay
