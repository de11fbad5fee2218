#include "catalog/sizer.h"

#include <gtest/gtest.h>
#include <poll.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <filesystem>
#include <memory>
#include <numeric>
#include <set>
#include <thread>
#include <vector>

#include "base/thread_annotations.h"
#include "catalog/catalog.h"
#include "catalog/test_data.h"

namespace forebay {
namespace {

using testing::TempFolder;

constexpr Nanos kLong = 60 * kSecond;

// Lookups that the test lets through; what they do outlives a Sizer that leaves them behind.
struct Storage {
  Mutex mutex;
  std::condition_variable changed;
  std::vector<SampleId> asked GUARDED_BY(mutex);
  std::set<SampleId> hangs GUARDED_BY(mutex);
  std::set<SampleId> missing GUARDED_BY(mutex);
  std::vector<uint32_t> set;  // by the Sizer, under its own lock
  std::atomic<int> finished = 0;

  Result<uint32_t> Look(SampleId s) {
    MutexLock lock(mutex);
    asked.push_back(s);
    changed.notify_all();
    changed.wait(lock.native(), [&]() NO_THREAD_SAFETY_ANALYSIS { return !hangs.contains(s); });
    if (missing.contains(s)) return Status(Code::kNotFound, StrCat("sample ", s));
    return s * 10;
  }
  void Hang(const std::set<SampleId>& samples) {
    MutexLock lock(mutex);
    hangs = samples;
    changed.notify_all();
  }
  void Lose(const std::set<SampleId>& samples) {
    MutexLock lock(mutex);
    missing = samples;
  }
  void AwaitAsked(size_t n) {
    MutexLock lock(mutex);
    changed.wait(lock.native(), [&]() NO_THREAD_SAFETY_ANALYSIS { return asked.size() >= n; });
  }
  std::vector<SampleId> Asked() {
    MutexLock lock(mutex);
    return asked;
  }
};

std::unique_ptr<Sizer> Make(const std::shared_ptr<Storage>& storage, size_t n, size_t threads) {
  storage->set.assign(n, 0);
  return std::make_unique<Sizer>(Sizer::Work{
      .samples = n,
      .threads = threads,
      .look = [storage](SampleId s) -> Result<Sizer::Size> {
        const Result<uint32_t> length = storage->Look(s);
        if (!length) return length.error();
        return Sizer::Size{.length = *length, .mtime_ns = 0};
      },
      .set = [storage](SampleId s, const Sizer::Size& size) { storage->set[s] = size.length; },
      .finish = [storage](const Status&) { ++storage->finished; }});
}

// Waits on the descriptor, as an engine does, until so many were found.
std::vector<Sizer::Found> ReapAll(Sizer& sizer, size_t n) {
  std::vector<Sizer::Found> all, some;
  while (all.size() < n) {
    pollfd fd = {sizer.event_fd(), POLLIN, 0};
    (void)poll(&fd, 1, 100);  // few are told together: a driver looks again by itself
    sizer.Reap(&some);
    std::move(some.begin(), some.end(), std::back_inserter(all));
  }
  return all;
}

TEST(Sizer, NothingIsLookedUpBeforeSomebodyNeedsIt) {
  auto storage = std::make_shared<Storage>();
  {
    auto sizer = Make(storage, 10, 4);
    ASSERT_TRUE(sizer->Attach());
    sizer->SetAhead(0);
    EXPECT_FALSE(sizer->complete());
  }
  EXPECT_TRUE(storage->Asked().empty());
  EXPECT_EQ(storage->finished, 0);
}

TEST(Sizer, WaitLooksUpAll) {
  auto storage = std::make_shared<Storage>();
  auto sizer = Make(storage, 1000, 8);
  ASSERT_TRUE(sizer->Wait(kLong).ok());
  EXPECT_TRUE(sizer->complete());
  EXPECT_EQ(storage->finished, 1);
  for (SampleId s = 0; s < 1000; ++s) EXPECT_EQ(storage->set[s], s * 10);
  EXPECT_TRUE(sizer->Wait(0).ok());
  EXPECT_EQ(storage->Asked().size(), 1000u);
}

TEST(Sizer, WaitHasABound) {
  auto storage = std::make_shared<Storage>();
  storage->Hang({3});
  auto sizer = Make(storage, 10, 4);
  EXPECT_EQ(sizer->Wait(kMilli).code(), Code::kUnavailable);
  storage->Hang({});
  EXPECT_TRUE(sizer->Wait(kLong).ok());
}

TEST(Sizer, OrdersComeFirstAndWhatIsWaitedForBeforeThem) {
  auto storage = std::make_shared<Storage>();
  storage->Hang({90});
  auto sizer = Make(storage, 100, 1);
  ASSERT_TRUE(sizer->Attach());
  const std::vector<SampleId> order = {90, 5, 50, 7};
  sizer->Follow(0, 1, order);
  storage->AwaitAsked(1);  // the only thread is busy with 90
  const std::vector<SampleId> wanted = {33};
  sizer->Want(wanted);
  const std::vector<SampleId> next_epoch = {7, 60, 5};
  sizer->Follow(0, 1, next_epoch);
  storage->Hang({});
  const std::vector<Sizer::Found> found = ReapAll(*sizer, 100);
  const std::vector<SampleId> expected = {90, 33, 5, 50, 7, 60, 0, 1, 2};
  std::vector<SampleId> got;
  for (size_t i = 0; i < expected.size(); ++i) got.push_back(found[i].sample);
  EXPECT_EQ(got, expected);
  EXPECT_EQ(found.size(), 100u);
  for (const Sizer::Found& f : found) EXPECT_EQ(f.length, f.sample * 10);
  EXPECT_TRUE(sizer->Wait(kLong).ok());
}

TEST(Sizer, StreamsTakeTurnsAndANewOrderTakesThePlaceOfTheOld) {
  auto storage = std::make_shared<Storage>();
  storage->Hang({0});
  auto sizer = Make(storage, 20, 1);
  ASSERT_TRUE(sizer->Attach());
  const std::vector<SampleId> first = {0, 1, 2, 3}, second = {10, 11, 12, 13};
  sizer->Follow(0, 1, first);
  storage->AwaitAsked(1);
  sizer->Follow(1, 1, second);
  const std::vector<SampleId> after_seek = {7, 8, 9};
  sizer->Follow(0, 2, after_seek);
  storage->Hang({});
  ReapAll(*sizer, 20);
  std::vector<SampleId> asked = storage->Asked();
  asked.resize(7);
  std::sort(asked.begin() + 1, asked.end());
  EXPECT_EQ(asked, (std::vector<SampleId>{0, 7, 8, 9, 10, 11, 12}));
}

TEST(Sizer, AFailedLookupIsToldAndTriedAgainWhenWanted) {
  auto storage = std::make_shared<Storage>();
  storage->Lose({4});
  auto sizer = Make(storage, 10, 2);
  ASSERT_TRUE(sizer->Attach());
  std::vector<SampleId> order(10);
  std::iota(order.begin(), order.end(), 0);
  sizer->Follow(0, 1, order);
  for (const Sizer::Found& f : ReapAll(*sizer, 10)) EXPECT_EQ(f.status.ok(), f.sample != 4);
  ASSERT_TRUE(sizer->Wait(kLong).ok());
  EXPECT_EQ(sizer->first_error().message(), "sample 4");
  storage->Lose({});
  const std::vector<SampleId> wanted = {4};
  sizer->Want(wanted);
  const std::vector<Sizer::Found> again = ReapAll(*sizer, 1);
  EXPECT_TRUE(again[0].status.ok());
  EXPECT_EQ(again[0].length, 40u);
  EXPECT_EQ(storage->finished, 1);
}

TEST(Sizer, OneEngineAtATimeAndTheNextLearnsWhatIsKnown) {
  auto storage = std::make_shared<Storage>();
  storage->Hang({1});
  auto sizer = Make(storage, 2, 1);
  ASSERT_TRUE(sizer->Attach());
  EXPECT_FALSE(sizer->Attach());
  const std::vector<SampleId> order = {0, 1};
  sizer->Follow(0, 1, order);
  EXPECT_EQ(ReapAll(*sizer, 1)[0].sample, 0u);
  sizer->Detach();
  ASSERT_TRUE(sizer->Attach());
  EXPECT_EQ(ReapAll(*sizer, 1)[0].sample, 0u);
  storage->Hang({});
  EXPECT_TRUE(sizer->Wait(kLong).ok());
}

// A dead mount must not hang the exit.
TEST(Sizer, ALookupThatHangsIsLeftBehind) {
  auto storage = std::make_shared<Storage>();
  storage->Hang({0});
  auto sizer = Make(storage, 4, 1);
  EXPECT_EQ(sizer->Wait(kMilli).code(), Code::kUnavailable);
  storage->AwaitAsked(1);
  sizer.reset();
  EXPECT_EQ(storage->finished, 0);
  storage->Hang({});  // the thread ends, and does nothing more
}

TEST(Sizer, AForkedChildHasNone) {
  auto storage = std::make_shared<Storage>();
  storage->Hang({0});
  auto sizer = Make(storage, 4, 2);
  EXPECT_EQ(sizer->Wait(kMilli).code(), Code::kUnavailable);
  const pid_t child = fork();
  if (child == 0) {
    const bool refused = sizer->Wait(kLong).code() == Code::kCancelled && !sizer->Attach();
    sizer.reset();
    _exit(refused ? 0 : 1);
  }
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0);
  storage->Hang({});
  EXPECT_TRUE(sizer->Wait(kLong).ok());
}

// ---- catalogs

BuildOptions Later() {
  BuildOptions options;
  options.sizes_later = true;
  return options;
}

std::unique_ptr<Catalog> Build(const std::string& path, const BuildOptions& options = {}) {
  auto catalog = BuildCatalog(path, options);
  EXPECT_TRUE(catalog) << catalog.status().ToString();
  return catalog ? std::move(*catalog) : nullptr;
}

void ExpectSameImage(const Catalog& a, const Catalog& b) {
  EXPECT_EQ(a.fingerprint(), b.fingerprint());
  EXPECT_EQ(a.total_bytes(), b.total_bytes());
  EXPECT_EQ(a.max_length(), b.max_length());
  EXPECT_TRUE(std::ranges::equal(a.image(), b.image()));
}

TEST(SizesLater, TheCatalogIsTheSameByteForByte) {
  TempFolder t;
  for (int i = 0; i < 200; ++i) {
    t.Write(StrCat("data/c", i % 7, "/", i, ".bin"), std::string(static_cast<size_t>(i * 3), 'x'));
  }
  t.Write("data/c1/deep/er/1.bin", "1");
  t.Write("elsewhere/2.bin", "22");
  t.Link(t / "elsewhere", "data/c2/link");
  t.Link(t / "elsewhere/2.bin", "data/c3/link.bin");
  t.Write("flat/a", "a");
  t.Write("flat/b", "");
  t.Link(t / "elsewhere/2.bin", "flat/c");
  for (const char* name : {"data", "flat"}) {
    SCOPED_TRACE(name);
    const auto now = Build(t / name);
    const auto later = Build(t / name, Later());
    ASSERT_NE(later->sizer(), nullptr);
    EXPECT_FALSE(later->complete());
    ASSERT_EQ(later->size(), now->size());
    for (SampleId s = 0; s < now->size(); ++s) {
      EXPECT_EQ(later->SampleName(s), now->SampleName(s));
      EXPECT_EQ(later->label(s), now->label(s));
    }
    EXPECT_FALSE(later->complete()) << "names and labels need no sizes";
    ExpectSameImage(*later, *now);
    EXPECT_TRUE(later->complete());
    EXPECT_EQ(testing::Touch(*later), testing::Touch(*now));
    EXPECT_TRUE(later->Verify(nullptr).ok());
  }
}

TEST(SizesLater, MoreFoldersThanStayOpen) {
  TempFolder t;
  for (int i = 0; i < 300; ++i) t.Write(StrCat("data/c", i, "/x.bin"), std::string(i % 50, 'x'));
  ExpectSameImage(*Build(t / "data", Later()), *Build(t / "data"));
}

TEST(SizesLater, ShardsAreScannedAsEver) {
  TempFolder t;
  t.Write("data/a.tar", testing::TarMember("k.bin", "data") + testing::TarEnd());
  const auto catalog = Build(t / "data", Later());
  EXPECT_EQ(catalog->sizer(), nullptr);
  EXPECT_TRUE(catalog->complete());
  EXPECT_EQ(catalog->total_bytes(), 4u);
}

TEST(SizesLater, ALinkThatLeadsNowhereEndsTheBuild) {
  TempFolder t;
  t.Write("data/c/1.bin", "1");
  t.Link(t / "gone", "data/c/2.bin");
  const auto catalog = BuildCatalog(t / "data", Later());
  ASSERT_FALSE(catalog);
  EXPECT_NE(catalog.error().message().find("2.bin"), std::string::npos);
}

TEST(SizesLater, AFileThatVanishesIsNamedAndTheRestIsThere) {
  TempFolder t;
  for (int i = 0; i < 10; ++i) t.Write(StrCat("data/c/", i, ".bin"), "12345");
  auto catalog = Build(t / "data", Later());
  const std::string file = t / "saved.catalog";
  catalog->SaveWhenComplete(file);
  std::filesystem::remove(t / "data/c/3.bin");
  ASSERT_TRUE(catalog->WaitComplete().ok());
  EXPECT_EQ(catalog->total_bytes(), 45u);
  EXPECT_EQ(catalog->length(3), 0u);
  EXPECT_EQ(catalog->sizer()->first_error().code(), Code::kNotFound);
  EXPECT_NE(catalog->sizer()->first_error().message().find("data/c/3.bin"), std::string::npos);
  EXPECT_FALSE(std::filesystem::exists(file));
  EXPECT_NE(catalog->SaveNote().find("3.bin"), std::string::npos);
  EXPECT_FALSE(catalog->Save(file).ok());
}

TEST(SizesLater, IsSavedWhenComplete) {
  TempFolder t;
  for (int i = 0; i < 10; ++i) t.Write(StrCat("data/c/", i, ".bin"), "12345");
  const std::string file = t / "cache/saved.catalog";
  {
    auto catalog = Build(t / "data", Later());
    catalog->SaveWhenComplete(file);
  }
  EXPECT_FALSE(std::filesystem::exists(file)) << "it never was complete";
  auto catalog = Build(t / "data", Later());
  catalog->SaveWhenComplete(file);
  ASSERT_TRUE(catalog->WaitComplete().ok());
  EXPECT_EQ(catalog->SaveNote(), "");
  const auto loaded = Catalog::Load(file);
  ASSERT_TRUE(loaded) << loaded.status().ToString();
  ExpectSameImage(**loaded, *catalog);
  EXPECT_TRUE((*loaded)->CheckFresh().ok());
}

TEST(SizesLater, WhatIsNeededFirstIsLookedAtBeforeAnybodyReads) {
  TempFolder t;
  ::setenv("FOREBAY_CACHE_DIR", (t / "catalogs").c_str(), 1);
  for (int i = 0; i < 500; ++i) {
    t.Write(StrCat("data/c", i % 5, "/", i, ".bin"), std::string(static_cast<size_t>(i % 50), 'x'));
  }
  ASSERT_TRUE(OpenOrBuild(t / "data", {}));
  BuildOptions options = Later();
  const std::vector<SampleId> first = {400, 3, 77};
  options.first_needed = [&](size_t samples) {
    EXPECT_EQ(samples, 500u);
    return first;
  };
  auto opened = OpenOrBuild(t / "data", options);
  ASSERT_TRUE(opened) << opened.status().ToString();
  ASSERT_FALSE(opened->rebuilt);
  Sizer* sizer = opened->catalog->sizer();
  ASSERT_NE(sizer, nullptr);
  ASSERT_TRUE(sizer->Attach());
  // No stream has told its order: nothing else is looked at.
  std::set<SampleId> found;
  std::vector<Sizer::Found> some;
  for (const Nanos until = SteadyClock().Now() + kLong;
       found.size() < first.size() && SteadyClock().Now() < until;) {
    pollfd fd = {sizer->event_fd(), POLLIN, 0};
    (void)poll(&fd, 1, 100);
    sizer->Reap(&some);
    for (const Sizer::Found& f : some) found.insert(f.sample);
  }
  EXPECT_EQ(found, std::set(first.begin(), first.end()));
  sizer->SetAhead(0);
  EXPECT_FALSE(opened->catalog->complete());

  // A catalog that is old is built again, whatever was looked at for it.
  t.Write("data/c1/new.bin", "new");
  options.first_needed = [](size_t samples) {
    std::vector<SampleId> all(samples);
    std::iota(all.begin(), all.end(), 0);
    return all;
  };
  opened = OpenOrBuild(t / "data", options);
  ASSERT_TRUE(opened) << opened.status().ToString();
  EXPECT_TRUE(opened->rebuilt);
  EXPECT_EQ(opened->catalog->size(), 501u);
  ::unsetenv("FOREBAY_CACHE_DIR");
}

}  // namespace
}  // namespace forebay
