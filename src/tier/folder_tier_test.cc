// What is particular to the folder among tiers.
#include "tier/folder_tier.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/mount.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstdlib>
#include <filesystem>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "base/clock.h"
#include "base/crc32c.h"
#include "base/owned.h"
#include "base/rng.h"
#include "tier/folder_admin.h"
#include "tier/folder_log.h"
#include "tier/held_page_testing.h"
#include "tier/tier_testing.h"

namespace forebay {
namespace {

using namespace tier_testing;

class FolderTierTest : public testing::Test {
 protected:
  // Stores samples 0 to count - 1 of data set 9.
  void Fill(uint32_t count) {
    auto tier = OpenFolder(folder_.path());
    for (uint32_t i = 0; i < count; ++i) ASSERT_TRUE(Put(*tier, {9, i}).stored);
  }
  TempFolder folder_;
};

TEST_F(FolderTierTest, TheNextJobFindsTheContent) {
  uint64_t used = 0;
  {
    auto tier = OpenFolder(folder_.path());
    for (uint32_t i = 0; i < 40; ++i) ASSERT_TRUE(Put(*tier, {9, i * 100}).stored);
    used = tier->used_bytes();
  }
  auto tier = OpenFolder(folder_.path());
  EXPECT_EQ(tier->used_bytes(), used);
  for (uint32_t i = 0; i < 40; ++i) EXPECT_TRUE(Hits(*tier, {9, i * 100}));
  EXPECT_FALSE(tier->Has({9, 1}));
  EXPECT_TRUE(Put(*tier, {9, 1}).stored);
}

TEST_F(FolderTierTest, ChoosesACapacity) {
  auto tier = OpenFolder(folder_.path(), 0);
  EXPECT_GT(tier->capacity_bytes(), 0u);
  EXPECT_TRUE(Put(*tier, {9, 1}).stored);
}

// One small sample, which is packed, and a large one, which has a file.
constexpr TierKey kSmall{9, 1};
constexpr TierKey kLarge{9, 2};
Bytes SmallBytes() { return Bytes(5'000, std::byte{1}); }
Bytes LargeBytes() { return Bytes(70'000, std::byte{2}); }

void FlipBit(const fs::path& path, off_t place, uint64_t bit) {
  const OwnedFd fd(open(path.c_str(), O_RDWR));
  std::byte b{};
  ASSERT_EQ(pread(fd.get(), &b, 1, place), 1);
  b ^= std::byte{1} << bit;
  ASSERT_EQ(pwrite(fd.get(), &b, 1, place), 1);
}

TEST_F(FolderTierTest, AFileIsTheSampleAndNothingElse) {
  auto tier = OpenFolder(folder_.path());
  ASSERT_TRUE(Put(*tier, kSmall, SmallBytes()).stored);
  ASSERT_TRUE(Put(*tier, kLarge, LargeBytes()).stored);
  const auto file = folder_.Files(".bin").at(0);
  EXPECT_EQ(file.string(), folder_.path() + "/0000000000000009/00/000000000000000200000000.bin");
  EXPECT_EQ(fs::file_size(file), LargeBytes().size());
  EXPECT_EQ(fs::file_size(folder_.Files(".seg").at(0)), SmallBytes().size());
  EXPECT_EQ(tier->used_bytes(), 5'000u + 70'000u + 2 * 40u);
}

TEST_F(FolderTierTest, EachBitIsChecked) {
  SplitMix64 rng(1);
  for (int round = 0; round < 20; ++round) {
    {
      auto tier = OpenFolder(folder_.path());
      ASSERT_TRUE(Put(*tier, kSmall, SmallBytes()).stored);
      ASSERT_TRUE(Put(*tier, kLarge, LargeBytes()).stored);
    }
    for (const std::string extension : {".seg", ".bin"}) {
      for (const fs::path& path : folder_.Files(extension)) {
        const auto size = static_cast<off_t>(fs::file_size(path));
        FlipBit(path,
                round == 0   ? 0
                : round == 1 ? size - 1
                             : static_cast<off_t>(rng.Below(size)),
                rng.Below(8));
      }
    }
    auto tier = OpenFolder(folder_.path());
    Bytes small(5'000);
    Bytes large(70'000);
    EXPECT_TRUE(tier->Has(kSmall) && tier->Has(kLarge));
    EXPECT_FALSE(Get(*tier, kSmall, small).hit);
    EXPECT_FALSE(Get(*tier, kLarge, large).hit);
    EXPECT_EQ(tier->stats().damaged, 2u);
    EXPECT_EQ(tier->used_bytes(), 0u);
    ASSERT_TRUE(Put(*tier, kSmall, SmallBytes()).stored) << "fetched again, it is stored again";
    ASSERT_TRUE(Put(*tier, kLarge, LargeBytes()).stored);
    EXPECT_TRUE(Get(*tier, kSmall, small).hit);
    EXPECT_TRUE(Get(*tier, kLarge, large).hit);
    EXPECT_TRUE(small == SmallBytes() && large == LargeBytes());
    Drop(*tier, kSmall);
    Drop(*tier, kLarge);
    EXPECT_TRUE(folder_.Files(".bin").empty());
    EXPECT_LE(folder_.Files(".seg").size(), 1u) << "empty segments go, but for the open one";
  }
}

TEST_F(FolderTierTest, TornAndLongFiles) {
  for (const off_t size : {off_t{0}, off_t{31}, off_t{4096}, off_t{69'999}, off_t{70'001}}) {
    auto tier = OpenFolder(folder_.path());
    Bytes bytes(70'000);
    ASSERT_TRUE(Put(*tier, kLarge, LargeBytes()).stored);
    const fs::path copy = folder_.Files(".bin").at(0);
    ASSERT_TRUE(Get(*tier, kLarge, bytes).hit);
    ASSERT_EQ(truncate(copy.c_str(), size), 0);
    EXPECT_FALSE(Get(*tier, kLarge, bytes).hit) << size;
    EXPECT_EQ(tier->used_bytes(), 0u);
    ASSERT_TRUE(Put(*tier, kLarge, LargeBytes()).stored);
    tier.reset();
    // And before the start.
    ASSERT_EQ(truncate(copy.c_str(), size), 0);
    tier = OpenFolder(folder_.path());
    EXPECT_FALSE(Get(*tier, kLarge, bytes).hit) << size;
    EXPECT_EQ(tier->stats().damaged, 1u);
  }
}

TEST_F(FolderTierTest, CopiesThatChangedPlacesAreNotBelieved) {
  {
    auto tier = OpenFolder(folder_.path());
    ASSERT_TRUE(Put(*tier, kLarge, LargeBytes()).stored);
    ASSERT_TRUE(Put(*tier, {9, 3}, Bytes(70'000, std::byte{3})).stored);
  }
  const fs::path page = folder_.Files(".bin").at(0).parent_path();
  fs::rename(page / "000000000000000200000000.bin", page / "000000000000000300000000.bin");
  auto tier = OpenFolder(folder_.path());
  Bytes bytes(70'000);
  EXPECT_FALSE(Get(*tier, kLarge, bytes).hit);
  EXPECT_FALSE(Get(*tier, {9, 3}, bytes).hit);
  EXPECT_EQ(tier->stats().damaged, 1u) << "the other one is gone";
}

TEST_F(FolderTierTest, StrangersAreLeftAlone) {
  {
    auto tier = OpenFolder(folder_.path());
    ASSERT_TRUE(Put(*tier, kLarge, LargeBytes()).stored);
  }
  const fs::path page = folder_.Files(".bin").at(0).parent_path();
  const std::vector<fs::path> strangers = {
      folder_.path() + "/notes.txt",         page / "readme.bin",
      page / "00000000000000000000000A.bin", page.parent_path() / "x",
      folder_.path() + "/writing/mine",      folder_.path() + "/0123456789abcdef"};
  for (const fs::path& stranger : strangers) {
    const OwnedFd fd(open(stranger.c_str(), O_WRONLY | O_CREAT, 0600));
    ASSERT_TRUE(fd.valid()) << stranger;
    ASSERT_EQ(write(fd.get(), "text", 4), 4);
  }
  fs::create_symlink("/etc/passwd", page / "000000000000000600000000.bin");
  {
    auto tier = OpenFolder(folder_.path());
    Bytes bytes(70'000);
    EXPECT_TRUE(Get(*tier, kLarge, bytes).hit);
    EXPECT_FALSE(tier->Has({9, 6}));
  }
  // Also when the data set is evicted.
  auto tier = OpenFolder(folder_.path(), 80'000);
  EXPECT_TRUE(Put(*tier, {10, 0}, LargeBytes()).stored);
  EXPECT_FALSE(tier->Has(kLarge));
  for (const fs::path& stranger : strangers) EXPECT_TRUE(fs::exists(stranger)) << stranger;
  EXPECT_TRUE(fs::exists("/etc/passwd"));
}

TEST_F(FolderTierTest, AnOlderFormatIsCleared) {
  const std::string page = folder_.path() + "/0000000000000007/00000000";
  fs::create_directories(page);
  const OwnedFd fd(open((page + "/00000001.fb").c_str(), O_WRONLY | O_CREAT, 0600));
  ASSERT_EQ(write(fd.get(), "old", 3), 3);
  // What tells a cache from a folder of the user's.
  const OwnedFd lock(open((folder_.path() + "/forebay.lock").c_str(), O_WRONLY | O_CREAT, 0600));
  {
    auto store = OpenStore(folder_.path());
    EXPECT_TRUE(store->health().ok()) << store->health().ToString();
    EXPECT_NE(store->note().find("another format"), std::string::npos) << store->note();
    EXPECT_FALSE(store->Has({7, 1}));
    EXPECT_FALSE(fs::exists(folder_.path() + "/0000000000000007"));
    auto tier = *FolderStore::MakeTier(store, 4);
    EXPECT_TRUE(Put(*tier, {7, 1}).stored);
  }
  EXPECT_EQ(OpenStore(folder_.path())->note(), "");
  EXPECT_TRUE(OpenStore(folder_.path())->Has({7, 1}));
}

TEST_F(FolderTierTest, ALogOfAnotherVersionIsAnOlderFormat) {
  Fill(5);
  FlipBit(folder_.path() + "/index.log", 7, 1);
  auto store = OpenStore(folder_.path());
  EXPECT_TRUE(store->health().ok());
  EXPECT_NE(store->note().find("another format"), std::string::npos) << store->note();
  EXPECT_EQ(store->used_bytes(), 0u);
}

TEST_F(FolderTierTest, ADataSetFolderThatIsGoneIsForgotten) {
  Fill(5);
  fs::remove_all(folder_.path() + "/0000000000000009");
  EXPECT_EQ(OpenStore(folder_.path())->used_bytes(), 0u);
}

TEST_F(FolderTierTest, SmallSamplesAreOneWrite) {
  auto tier = OpenFolder(folder_.path(), 64 << 20, 300);
  std::vector<Bytes> all;
  std::vector<TierOp> ops;
  for (uint32_t i = 0; i < 300; ++i) all.push_back(Bytes(1000 + i, static_cast<std::byte>(i)));
  for (uint32_t i = 0; i < 300; ++i) {
    ops.push_back(
        {.tag = i, .kind = Kind::kPut, .key = {9, i}, .bytes = all[i], .crc = Crc32c(all[i])});
  }
  ASSERT_EQ(tier->Submit(ops), 300u);
  for (const auto& [tag, done] : Collect(*tier, 300)) EXPECT_TRUE(done.stored) << tag;
  EXPECT_EQ(folder_.Files(".seg").size(), 1u);
  for (uint32_t i = 0; i < 300; ++i) {
    Bytes bytes(1000 + i);
    ASSERT_TRUE(Get(*tier, {9, i}, bytes).hit) << i;
    ASSERT_TRUE(bytes == all[i]) << i;
  }
}

TEST_F(FolderTierTest, LeftoversOfDeadWritersGo) {
  Fill(1);
  const std::string left = folder_.path() + "/writing/1-5.tmp";
  ASSERT_TRUE(OwnedFd(open(left.c_str(), O_WRONLY | O_CREAT, 0600)).valid());
  auto tier = OpenFolder(folder_.path());
  EXPECT_FALSE(fs::exists(left));
}

TEST_F(FolderTierTest, OneWriterTheOthersRead) {
  Fill(3);
  auto writer = OpenFolder(folder_.path());
  auto reader = OpenFolder(folder_.path());
  EXPECT_TRUE(writer->health().ok());
  EXPECT_EQ(reader->health().code(), Code::kUnavailable);
  EXPECT_NE(reader->health().message().find("another process writes"), std::string::npos);
  EXPECT_FALSE(reader->HasRoom(10));
  const TierDone put = Put(*reader, {9, 100});
  EXPECT_FALSE(put.stored);
  EXPECT_TRUE(put.status.ok());
  EXPECT_TRUE(Hits(*reader, {9, 0}));
  EXPECT_TRUE(Hits(*writer, {9, 0}));
  // What the writer drops is a miss for the others.
  Drop(*writer, {9, 0});
  EXPECT_TRUE(reader->Has({9, 0}));
  EXPECT_FALSE(Hits(*reader, {9, 0}));
  EXPECT_FALSE(reader->Has({9, 0}));
  // A reader leaves files alone.
  Drop(*reader, {9, 1});
  EXPECT_TRUE(Hits(*writer, {9, 1}));
  writer.reset();
  reader.reset();
  EXPECT_TRUE(OpenFolder(folder_.path())->health().ok()) << "the lock went with the writer";
}

TEST_F(FolderTierTest, TiersOfOneStoreShareItsContent) {
  auto store = OpenStore(folder_.path());
  auto a = *FolderStore::MakeTier(store, 4);
  auto b = *FolderStore::MakeTier(store, 4);
  store.reset();
  EXPECT_TRUE(Put(*a, {9, 1}).stored);
  EXPECT_TRUE(Hits(*b, {9, 1}));
  a.reset();
  EXPECT_TRUE(Hits(*b, {9, 1}));
}

TEST_F(FolderTierTest, AReaderFollowsTheWriter) {
  auto writer = OpenFolder(folder_.path());
  auto reader = OpenReader(folder_.path(), kLong);
  for (uint32_t i = 0; i < 50; ++i) {
    ASSERT_TRUE(Put(*writer, {9, i}).stored);
    ASSERT_TRUE(Soon([&] { return reader->Has({9, i}); })) << i;
    EXPECT_TRUE(Hits(*reader, {9, i})) << i;
  }
  Drop(*writer, {9, 7});
  EXPECT_TRUE(Soon([&] { return !reader->Has({9, 7}); }));
  // The next writer may write the log anew.
  writer.reset();
  FlipBit(folder_.path() + "/index.log", 40, 1);
  writer = OpenFolder(folder_.path());
  ASSERT_TRUE(Put(*writer, {9, 100}).stored);
  EXPECT_TRUE(Soon([&] { return reader->Has({9, 100}); }));
  EXPECT_TRUE(Hits(*reader, {9, 100}) && Hits(*reader, {9, 1}));
  EXPECT_EQ(reader->used_bytes(), writer->used_bytes());
  EXPECT_EQ(reader->capacity_bytes(), reader->used_bytes());
}

TEST_F(FolderTierTest, AReaderBecomesTheWriter) {
  auto writer = OpenFolder(folder_.path());
  for (uint32_t i = 0; i < 30; ++i) ASSERT_TRUE(Put(*writer, {9, i}).stored);
  auto reader = OpenReader(folder_.path(), kMilli);
  auto other = OpenReader(folder_.path(), kMilli);
  Drop(*reader, {9, 3});  // out of its own index only
  ASSERT_TRUE(Put(*writer, {9, 30}).stored);
  usleep(20'000);
  EXPECT_EQ(reader->health().code(), Code::kUnavailable) << "while the writer lives";
  EXPECT_TRUE(writer->health().ok());
  writer.reset();
  ASSERT_TRUE(Soon([&] { return reader->health().ok() || other->health().ok(); }));
  Tier& next = reader->health().ok() ? *reader : *other;
  Tier& last = reader->health().ok() ? *other : *reader;
  ASSERT_TRUE(Soon([&] { return next.HasRoom(100'000); }));
  EXPECT_FALSE(last.health().ok()) << "one writer";
  for (uint32_t i = 0; i <= 30; ++i) EXPECT_TRUE(Hits(next, {9, i})) << i;
  EXPECT_EQ(next.stats().damaged, 0u);
  for (uint32_t i = 31; i < 60; ++i) ASSERT_TRUE(Put(next, {9, i}).stored) << i;
  Drop(next, {9, 5});
  EXPECT_EQ(next.capacity_bytes(), 64u << 20);
  ASSERT_TRUE(Soon([&] { return last.Has({9, 59}) && !last.Has({9, 5}); }));
  const uint64_t used = next.used_bytes();
  reader.reset();
  other.reset();
  auto store = OpenStore(folder_.path());
  EXPECT_EQ(store->note(), "");
  EXPECT_EQ(store->used_bytes(), used);
  auto tier = *FolderStore::MakeTier(store, 4);
  for (uint32_t i = 0; i < 60; ++i) EXPECT_EQ(Hits(*tier, {9, i}), i != 5) << i;
}

TEST_F(FolderTierTest, AQuotaBindsWhatComesAndLeavesWhatIsThere) {
  auto opened =
      FolderStore::Open({.folder = folder_.path(), .capacity_bytes = 400'000, .block_bytes = 1});
  ASSERT_TRUE(opened.has_value());
  (*opened)->Use(1, "/data/one");
  auto tier = *FolderStore::MakeTier(*opened, 4);
  ASSERT_TRUE(Put(*tier, {1, 0}, Bytes(100'000)).stored);
  (*opened)->SetQuota(50'000);
  EXPECT_FALSE(Put(*tier, {1, 1}, Bytes(10'000)).stored);
  EXPECT_FALSE(tier->HasRoom(10'000));
  EXPECT_TRUE(tier->Has({1, 0}));
  (*opened)->SetQuota(200'000);
  EXPECT_TRUE(Put(*tier, {1, 2}, Bytes(50'000)).stored);
  EXPECT_FALSE(Put(*tier, {1, 3}, Bytes(100'000)).stored);
  (*opened)->SetQuota(0);
  EXPECT_TRUE(Put(*tier, {1, 4}, Bytes(100'000)).stored);
}

TEST_F(FolderTierTest, TheNextWriterKnowsWhatItsJobUses) {
  auto writer = OpenFolder(folder_.path(), 100'000);
  ASSERT_TRUE(Put(*writer, {1, 0, 1}, Bytes(50'000)).stored);
  ASSERT_TRUE(Put(*writer, {2, 0, 2}, Bytes(40'000)).stored);
  auto opened = FolderStore::Open({.folder = folder_.path(),
                                   .capacity_bytes = 100'000,
                                   .block_bytes = 1,
                                   .follow_every = kMilli,
                                   .take_over_every = kMilli});
  ASSERT_TRUE(opened.has_value());
  (*opened)->Use(1, "/data/one");
  writer.reset();
  ASSERT_TRUE(Soon([&] { return (*opened)->health().ok(); }));
  auto tier = *FolderStore::MakeTier(*opened, 4);
  EXPECT_TRUE(Put(*tier, {3, 0, 3}, Bytes(45'000)).stored);
  EXPECT_TRUE(tier->Has({1, 0, 1})) << "used here";
  EXPECT_FALSE(tier->Has({2, 0, 2})) << "was the writer's";
  tier.reset();
  opened->reset();
  const auto admin = FolderAdmin::Open(folder_.path(), false);
  ASSERT_TRUE(admin.has_value());
  EXPECT_EQ(admin->groups().at(0).path, "/data/one");
}

// Two processes must never append to one log.
TEST_F(FolderTierTest, AWriterWhoseLockWasRemovedGivesWay) {
  auto first = OpenFolder(folder_.path());
  ASSERT_TRUE(Put(*first, {9, 1}).stored);
  fs::remove(folder_.path() + "/forebay.lock");
  auto second = OpenFolder(folder_.path());
  ASSERT_TRUE(second->health().ok());
  ASSERT_TRUE(Put(*second, {9, 2}).stored);
  EXPECT_FALSE(Put(*first, {9, 3}).stored);
  EXPECT_FALSE(first->health().ok());
  EXPECT_TRUE(Hits(*first, {9, 1}));
  second.reset();
  EXPECT_TRUE(OpenStore(folder_.path())->Has({9, 2}));
}

TEST_F(FolderTierTest, AWriterThatLostItsLockTouchesNothing) {
  const Bytes small(5'000, std::byte{7});
  const Bytes large(100'000, std::byte{9});  // has a file of its own
  {
    auto before = OpenFolder(folder_.path());
    ASSERT_TRUE(Put(*before, {8, 1, 8}, small).stored);
    ASSERT_TRUE(Put(*before, {8, 2, 8}, large).stored);
  }
  auto first = OpenFolder(folder_.path(), 300'000);
  ASSERT_TRUE(Put(*first, {9, 1}, small).stored);
  ASSERT_TRUE(Put(*first, {9, 2}, large).stored);
  fs::remove(folder_.path() + "/forebay.lock");
  auto second = OpenFolder(folder_.path());
  ASSERT_TRUE(Put(*second, {9, 3}, large).stored);
  // Removals, a sample that the other has, too, and one for which data set 8 would have to leave.
  Drop(*first, {9, 1});
  Drop(*first, {9, 2});
  EXPECT_FALSE(Put(*first, {9, 3}, large).stored);
  EXPECT_FALSE(Put(*first, {9, 4}, Bytes(150'000)).stored);
  EXPECT_FALSE(first->health().ok());
  for (const TierKey key :
       {TierKey{8, 1, 8}, TierKey{8, 2, 8}, TierKey{9, 1}, TierKey{9, 2}, TierKey{9, 3}}) {
    Bytes bytes(key.name == 1 ? small.size() : large.size());
    EXPECT_TRUE(Get(*second, key, bytes).hit) << key.group << " " << key.name;
  }
}

TEST_F(FolderTierTest, DataSetsThatNobodyUsesMakeRoom) {
  constexpr uint64_t kCapacity = 40 * 140;
  {
    auto tier = OpenFolder(folder_.path(), kCapacity);
    for (uint32_t i = 0; i < 30; ++i) ASSERT_TRUE(Put(*tier, {1, i * 1024, 1}, Bytes(100)).stored);
    ASSERT_TRUE(Put(*tier, {2, 0, 2}, Bytes(100)).stored);
  }
  auto store = OpenStore(folder_.path(), kCapacity);
  store->Use(2, "/data/two");
  auto tier = *FolderStore::MakeTier(store, 4);
  EXPECT_TRUE(tier->HasRoom(100));
  for (uint32_t i = 0; i < 39; ++i) {
    EXPECT_TRUE(Put(*tier, {3, i, 3}, Bytes(100)).stored) << i;
    EXPECT_LE(tier->used_bytes(), kCapacity);
  }
  EXPECT_FALSE(tier->HasRoom(100));
  EXPECT_FALSE(Put(*tier, {3, 99, 3}, Bytes(100)).stored) << "what is used is never given up";
  EXPECT_TRUE(tier->Has({2, 0, 2}));
  EXPECT_FALSE(fs::exists(folder_.path() + "/0000000000000001"));
  EXPECT_EQ(folder_.Files(".seg").size(), 2u);
  tier.reset();
  store.reset();
  store = OpenStore(folder_.path(), kCapacity);
  EXPECT_EQ(store->used_bytes(), kCapacity) << "the log says the same";
}

TEST_F(FolderTierTest, CopiesThatNobodyNeedsMakeRoom) {
  constexpr uint64_t kCapacity = 20 * 1040;
  {
    auto tier = OpenFolder(folder_.path(), kCapacity);
    for (uint32_t i = 0; i < 20; ++i) ASSERT_TRUE(Put(*tier, {9, i}, Bytes(1000)).stored);
  }
  auto store = OpenStore(folder_.path(), kCapacity);
  store->Use(9, "/data/nine");
  auto tier = *FolderStore::MakeTier(store, 4);
  // Half of the files have changed: they have other names now.
  for (uint32_t i = 0; i < 10; ++i) ASSERT_TRUE(tier->Has({9, i}));
  EXPECT_FALSE(Put(*tier, {9, 100}, Bytes(1000)).stored) << "the rest may be needed yet";
  store->AskedForAll(9);
  EXPECT_TRUE(tier->HasRoom(1000));
  for (uint32_t i = 0; i < 10; ++i) {
    EXPECT_TRUE(Put(*tier, {9, 100 + i}, Bytes(1000)).stored) << i;
    EXPECT_LE(tier->used_bytes(), kCapacity);
  }
  EXPECT_FALSE(tier->HasRoom(1000));
  EXPECT_FALSE(Put(*tier, {9, 200}, Bytes(1000)).stored);
  for (uint32_t i = 0; i < 10; ++i) {
    Bytes bytes(1000);
    EXPECT_TRUE(Get(*tier, {9, i}, bytes).hit);
    EXPECT_TRUE(Get(*tier, {9, 100 + i}, bytes).hit);
    EXPECT_FALSE(tier->Has({9, 10 + i}));
  }
  tier.reset();
  store.reset();
  store = OpenStore(folder_.path(), kCapacity);
  EXPECT_TRUE(store->Has({9, 5}) && store->Has({9, 105}) && !store->Has({9, 15}))
      << "the log says the same";
}

TEST_F(FolderTierTest, TheDataSetNamedLongestAgoGoesFirst) {
  constexpr uint64_t kCapacity = 3 * 10'040;
  {
    auto log = FolderLog::Create(OwnedFd(open(folder_.path().c_str(), O_RDONLY)).get(),
                                 [](const FolderLog::Emit& emit) {
                                   emit(UseRecord(1, 2000));
                                   emit(UseRecord(2, 1000));
                                   emit(UseRecord(3, 3000));
                                 });
    ASSERT_TRUE(log.has_value()) << log.status().ToString();
    auto tier = OpenFolder(folder_.path(), kCapacity);
    for (uint64_t d = 1; d <= 3; ++d)
      ASSERT_TRUE(Put(*tier, {d, 0, static_cast<uint32_t>(d)}, Bytes(10'000)).stored);
  }
  auto tier = OpenFolder(folder_.path(), kCapacity);
  ASSERT_TRUE(Put(*tier, {4, 0, 4}, Bytes(10'000)).stored);
  EXPECT_TRUE(tier->Has({1, 0, 1}) && !tier->Has({2, 0, 2}) && tier->Has({3, 0, 3}));
  ASSERT_TRUE(Put(*tier, {4, 1, 4}, Bytes(10'000)).stored);
  EXPECT_TRUE(!tier->Has({1, 0, 1}) && tier->Has({3, 0, 3}));
}

TEST_F(FolderTierTest, AFullDisk) {
  const std::string mounted = folder_.path() + "/disk";
  fs::create_directories(mounted);
  if (mount("none", mounted.c_str(), "tmpfs", 0, "size=256k,mode=0700") != 0) {
    GTEST_SKIP() << "NOT TESTED: mounting a small tmpfs: " << strerror(errno);
  }
  {
    auto tier = OpenFolder(mounted, 64 << 20);
    uint32_t stored = 0;
    bool told = false;
    for (uint32_t i = 0; i < 40; ++i) {
      const TierDone done = Put(*tier, {9, i}, Bytes(20'000, std::byte{3}));
      stored += done.stored ? 1 : 0;
      if (done.stored) continue;
      EXPECT_EQ(done.status.ok(), told) << "said once: " << done.status.ToString();
      told = true;
      EXPECT_FALSE(tier->HasRoom(1));
    }
    EXPECT_GE(stored, 5u);
    EXPECT_LT(stored, 13u);
    EXPECT_EQ(tier->health().code(), Code::kResourceExhausted) << tier->health().ToString();
    EXPECT_NE(tier->health().message().find(mounted), std::string::npos);
    EXPECT_EQ(tier->capacity_bytes(), tier->used_bytes()) << "shrunk to what it has";
    for (uint32_t i = 0; i < stored; ++i) {
      Bytes bytes(20'000);
      EXPECT_TRUE(Get(*tier, {9, i}, bytes).hit);
      EXPECT_TRUE(bytes == Bytes(20'000, std::byte{3}));
    }
    EXPECT_TRUE(fs::is_empty(mounted + "/writing"));
  }
  EXPECT_EQ(umount(mounted.c_str()), 0);
}

// The mode of its folders is changed: a mount with files open for writing cannot be.
TEST_F(FolderTierTest, AFolderThatBecomesReadOnlyWhileItIsUsed) {
  // Root may write to what is read-only.
  ASSERT_TRUE(geteuid() != 0 || chown(folder_.path().c_str(), kStranger, kStranger) == 0);
  AsStranger stranger;
  auto tier = OpenFolder(folder_.path());
  for (uint32_t i = 0; i < 5; ++i) ASSERT_TRUE(Put(*tier, {9, i}).stored);
  std::vector<fs::path> folders = {folder_.path()};
  for (const auto& entry : fs::recursive_directory_iterator(folder_.path())) {
    if (entry.is_directory()) folders.push_back(entry.path());
  }
  for (const fs::path& each : folders) ASSERT_EQ(chmod(each.c_str(), 0555), 0);
  const TierDone first = Put(*tier, {9, 100}, LargeBytes());
  const TierDone second = Put(*tier, {9, 101}, LargeBytes());
  const bool hits = Hits(*tier, {9, 1}) && Hits(*tier, {9, 2});
  Drop(*tier, {9, 1});
  const bool dropped = !tier->Has({9, 1});
  for (const fs::path& each : folders) ASSERT_EQ(chmod(each.c_str(), 0755), 0);
  EXPECT_FALSE(first.stored || second.stored);
  EXPECT_FALSE(first.status.ok());
  EXPECT_TRUE(second.status.ok()) << "said once";
  EXPECT_TRUE(hits && dropped);
  EXPECT_FALSE(tier->health().ok());
  EXPECT_FALSE(tier->HasRoom(1));
  EXPECT_EQ(tier->capacity_bytes(), tier->used_bytes());
  EXPECT_TRUE(Hits(*tier, {9, 2}));
}

// As when the kernel lets a write wait because too many pages are dirty.
TEST_F(FolderTierTest, AWriteThatHangsHoldsUpNobody) {
  auto tier = OpenFolder(folder_.path());
  HeldPage held;
  if (!held.ready()) GTEST_SKIP() << "NOT TESTED: userfaultfd: " << strerror(errno);
  ASSERT_TRUE(Put(*tier, kLarge, LargeBytes()).stored);
  const TierOp hangs{
      .tag = 100, .kind = Kind::kPut, .key = {9, 100}, .bytes = held.bytes(), .crc = 0};
  ASSERT_EQ(tier->Submit(std::span(&hangs, 1)), 1u);
  ASSERT_TRUE(held.SomebodyWaits());
  Bytes small = SmallBytes();
  for (uint32_t i = 10; i < 30; ++i) {
    const TierOp put{.tag = i, .kind = Kind::kPut, .key = {9, i}, .bytes = small, .crc = 0};
    ASSERT_EQ(tier->Submit(std::span(&put, 1)), 1u);
  }
  EXPECT_TRUE(tier->HasRoom(1000));
  EXPECT_FALSE(tier->Has({9, 100})) << "its bytes are not written";
  Bytes large(LargeBytes().size());
  EXPECT_TRUE(Get(*tier, kLarge, large).hit);
  EXPECT_TRUE(large == LargeBytes());
  ASSERT_TRUE(held.Fill());
  for (const auto& [tag, done] : Collect(*tier, 21)) EXPECT_TRUE(done.stored) << tag;
  EXPECT_TRUE(tier->Has({9, 100}));
}

// ---- a disk that does not answer

// Reads that hang, as many as there are threads for them: into memory that is not there yet.
class HungReads {
 public:
  explicit HungReads(Tier& tier, uint64_t first_tag = 100) {
    for (uint64_t i = 0; i < kThreads; ++i) {
      if (!pages[i].ready()) return;
      const TierOp get{
          .tag = first_tag + i, .kind = Kind::kGet, .key = kPage, .bytes = pages[i].bytes()};
      EXPECT_EQ(tier.Submit(std::span(&get, 1)), 1u);
    }
    for (HeldPage& page : pages) hung = page.SomebodyWaits();
  }
  void End() {
    for (HeldPage& page : pages) EXPECT_TRUE(page.Fill());
  }

  static constexpr size_t kThreads = 4;
  static constexpr TierKey kPage = {9, 77};
  std::array<HeldPage, kThreads> pages;
  bool hung = false;
};

TEST_F(FolderTierTest, ReadsThatHangArePassedBy) {
  auto store = OpenStore(folder_.path());
  auto tier = *FolderStore::MakeTier(store, 64);
  Bytes page(4096, std::byte{7});
  ASSERT_TRUE(Put(*tier, HungReads::kPage, page).stored);
  ASSERT_TRUE(Put(*tier, kLarge, LargeBytes()).stored);
  EXPECT_EQ(store->SilentSince(), 0) << "it owes nothing";
  const Nanos before = SteadyClock().Now();
  HungReads reads(*tier);
  if (!reads.hung) GTEST_SKIP() << "NOT TESTED: userfaultfd: " << strerror(errno);
  EXPECT_GE(store->SilentSince(), before);
  Bytes large(LargeBytes().size());
  const TierOp waits{.tag = 1, .kind = Kind::kGet, .key = kLarge, .bytes = large};
  ASSERT_EQ(tier->Submit(std::span(&waits, 1)), 1u);

  store->PassBy(true);
  EXPECT_EQ(store->SilentSince(), 0) << "nobody waits for it";
  const TierOp late{.tag = 2, .kind = Kind::kGet, .key = kLarge, .bytes = large};
  ASSERT_EQ(tier->Submit(std::span(&late, 1)), 1u);
  for (const auto& [tag, done] : Collect(*tier, 2)) {
    EXPECT_FALSE(done.hit) << tag;
    EXPECT_TRUE(done.passed && done.status.ok()) << tag;
  }
  EXPECT_EQ(store->stats().misses, 0u);
  EXPECT_TRUE(tier->Has(kLarge)) << "its copy is there all the same";
  EXPECT_TRUE(Put(*tier, {9, 5}).stored) << "the writer has a thread of its own";

  // A thread in the place of those that hang sees that the disk answers, and goes on reading.
  store->StartProbe();
  std::optional<Nanos> took;
  while (!(took = store->TakeProbe())) poll(nullptr, 0, 1);
  store->PassBy(false);
  EXPECT_TRUE(Get(*tier, kLarge, large).hit);
  EXPECT_TRUE(large == LargeBytes());
  EXPECT_EQ(store->SilentSince(), 0) << "those that were given up count no more";
  reads.End();
  for (const auto& [tag, done] : Collect(*tier, HungReads::kThreads)) EXPECT_TRUE(done.hit) << tag;
  EXPECT_EQ(store->SilentSince(), 0);
}

// Programs read copies by themselves: no get of a tier tells that the disk hangs.
TEST_F(FolderTierTest, ADiskThatNobodyAsksIsWatched) {
  auto store = OpenStore(folder_.path());
  auto tier = *FolderStore::MakeTier(store, 64);
  Bytes page(4096, std::byte{7});
  ASSERT_TRUE(Put(*tier, HungReads::kPage, page).stored);
  store->Watch();
  while (store->SilentSince() != 0) poll(nullptr, 0, 1);  // answered
  HungReads reads(*tier);
  if (!reads.hung) GTEST_SKIP() << "NOT TESTED: userfaultfd: " << strerror(errno);
  // Nobody waits for these any more.
  store->PassBy(true);
  EXPECT_TRUE(store->passed_by());
  store->Watch();
  EXPECT_EQ(store->SilentSince(), 0) << "one that is passed by has probes";
  store->PassBy(false);
  EXPECT_EQ(store->SilentSince(), 0);
  const Nanos before = SteadyClock().Now();
  store->Watch();
  const Nanos since = store->SilentSince();
  EXPECT_GE(since, before);
  store->Watch();
  EXPECT_EQ(store->SilentSince(), since) << "one at a time";
  EXPECT_FALSE(store->TakeProbe());
  reads.End();
  for (const auto& [tag, done] : Collect(*tier, HungReads::kThreads)) EXPECT_TRUE(done.hit) << tag;
  while (store->SilentSince() != 0) poll(nullptr, 0, 1);
  EXPECT_FALSE(store->TakeProbe()) << "that is for whoever started one";
}

// Who asks for a copy as a file waits for the writer, which hangs.
TEST_F(FolderTierTest, CallsAreNotWaitedForWhileItIsPassedBy) {
  auto store = OpenStore(folder_.path());
  auto tier = *FolderStore::MakeTier(store, 64);
  Bytes small = SmallBytes();
  ASSERT_TRUE(Put(*tier, {9, 1}, small).stored);
  HeldPage held;
  if (!held.ready()) GTEST_SKIP() << "NOT TESTED: userfaultfd: " << strerror(errno);
  const TierOp hangs{
      .tag = 100, .kind = Kind::kPut, .key = {9, 100}, .bytes = held.bytes(), .crc = 0};
  ASSERT_EQ(tier->Submit(std::span(&hangs, 1)), 1u);
  ASSERT_TRUE(held.SomebodyWaits());
  const OwnedFd dir(open(folder_.path().c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  Status linked;
  Status room;
  std::thread links([&] { linked = store->LinkCopy({9, 1}, small.size(), dir.get(), "second"); });
  std::thread reserves([&] { room = store->Reserve(1000); });
  std::thread drops([&] { store->Drop({9, 1}); });
  store->PassBy(true);
  links.join();
  reserves.join();
  drops.join();
  EXPECT_EQ(linked.code(), Code::kUnavailable) << linked.ToString();
  EXPECT_EQ(room.code(), Code::kUnavailable) << room.ToString();
  EXPECT_NE(room.message().find(folder_.path()), std::string::npos);
  EXPECT_FALSE(tier->Has({9, 1})) << "dropped, as far as anybody can see";
  ASSERT_TRUE(held.Fill());
  EXPECT_TRUE(Collect(*tier, 1)[100].stored);
  store->PassBy(false);
  // What was asked for in vain has left nothing behind.
  EXPECT_TRUE(store->Reserve(1000).ok());
  store->Unreserve(1000);
  EXPECT_FALSE(tier->Has({9, 1}));
  EXPECT_TRUE(Put(*tier, {9, 1}, small).stored);
  EXPECT_TRUE(store->LinkCopy({9, 1}, small.size(), dir.get(), "second").ok());
  EXPECT_EQ(unlinkat(dir.get(), "second", 0), 0);
}

// Where a large sample does not fit any more, smaller ones still do.
TEST_F(FolderTierTest, TheLimitIsUsedToTheFull) {
  constexpr uint64_t kCapacity = 24 << 20;
  const auto size_of = [](uint32_t sample) {
    SplitMix64 rng(sample);
    const uint64_t draw = rng.Below(40);
    if (draw == 0) return (512 << 10) + rng.Below(1 << 20);
    return draw < 30 ? 100'000 + rng.Below(20'000) : 2'000 + rng.Below(20'000);
  };
  auto opened = FolderStore::Open(
      {.folder = folder_.path(), .capacity_bytes = kCapacity, .gather = 100 * kMicro});
  ASSERT_TRUE(opened.has_value());
  auto store = *std::move(opened);
  ASSERT_TRUE(store->WaitScanned(kLong));
  auto tier = *FolderStore::MakeTier(store, 4);
  uint64_t held = 0;
  for (uint32_t i = 0; i < 500; ++i) {
    const uint64_t size = size_of(i);
    const bool room = tier->HasRoom(size);
    const bool stored = room && Put(*tier, {9, i}, Bytes(size, std::byte{7})).stored;
    EXPECT_EQ(stored, room);
    held += stored ? size : 0;
  }
  EXPECT_GE(static_cast<double>(held), 0.99 * kCapacity);
  EXPECT_LE(tier->used_bytes(), kCapacity);
  EXPECT_LE(DiskUse(folder_.path()), kCapacity);
  EXPECT_FALSE(folder_.Files(".bin").empty() || folder_.Files(".seg").empty());
}

TEST_F(FolderTierTest, AFileSizeLimitSkipsOnlyWhatIsTooLarge) {
  auto tier = OpenFolder(folder_.path());
  rlimit before{};
  ASSERT_EQ(getrlimit(RLIMIT_FSIZE, &before), 0);
  rlimit small = before;
  small.rlim_cur = 10'000;
  ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &small), 0);
  const TierDone large = Put(*tier, {9, 0}, Bytes(50'000));
  const TierDone fits = Put(*tier, {9, 1}, Bytes(5'000));
  ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &before), 0);
  EXPECT_FALSE(large.stored);
  EXPECT_FALSE(large.status.ok());
  EXPECT_TRUE(fits.stored);
  EXPECT_TRUE(tier->health().ok());
  EXPECT_TRUE(folder_.Files(".tmp").empty());
}

TEST_F(FolderTierTest, AFolderThatVanishes) {
  auto tier = OpenFolder(folder_.path());
  for (uint32_t i = 0; i < 5; ++i) ASSERT_TRUE(Put(*tier, {9, i}).stored);
  fs::remove_all(folder_.path());
  for (uint32_t i = 0; i < 5; ++i) EXPECT_FALSE(Hits(*tier, {9, i}));
  EXPECT_EQ(tier->used_bytes(), 0u);
  EXPECT_FALSE(Put(*tier, {9, 7}).stored);
  EXPECT_FALSE(Put(*tier, {9, 8}).stored);
  EXPECT_FALSE(tier->health().ok());
  EXPECT_EQ(tier->capacity_bytes(), 0u);
}

TEST_F(FolderTierTest, AFolderThatIsEmptiedFillsAgain) {
  auto tier = OpenFolder(folder_.path());
  ASSERT_TRUE(Put(*tier, {9, 1}).stored);
  for (const auto& entry : fs::directory_iterator(folder_.path())) fs::remove_all(entry.path());
  EXPECT_FALSE(Hits(*tier, {9, 1}));
  EXPECT_TRUE(Put(*tier, {9, 1}).stored);
  EXPECT_TRUE(Hits(*tier, {9, 1}));
  EXPECT_TRUE(tier->health().ok()) << tier->health().ToString();
}

// The folders below are made by whichever write needs them first.
TEST_F(FolderTierTest, WritesThatStartTogetherAllLand) {
  auto tier = OpenFolder(folder_.path());
  for (uint32_t round = 0; round < 50; ++round) {
    for (const auto& entry : fs::directory_iterator(folder_.path())) fs::remove_all(entry.path());
    Bytes bytes(10);
    std::vector<TierOp> ops;
    for (uint32_t i = 0; i < 16; ++i) {
      ops.push_back(
          {.tag = i, .kind = Kind::kPut, .key = {round, i}, .bytes = bytes, .crc = Crc32c(bytes)});
    }
    ASSERT_EQ(tier->Submit(ops), 16u);
    for (const auto& [tag, done] : Collect(*tier, 16)) {
      ASSERT_TRUE(done.stored) << "round " << round << ": " << done.status.ToString();
    }
  }
}

TEST_F(FolderTierTest, AReadOnlyFolder) {
  const std::string mounted = folder_.path() + "/disk";
  fs::create_directories(mounted);
  if (mount("none", mounted.c_str(), "tmpfs", 0, "size=1m,mode=0700") != 0) {
    GTEST_SKIP() << "NOT TESTED: mounting a tmpfs: " << strerror(errno);
  }
  {
    auto tier = OpenFolder(mounted);
    ASSERT_TRUE(Put(*tier, {9, 1}).stored);
  }
  EXPECT_EQ(mount("none", mounted.c_str(), "tmpfs", MS_REMOUNT | MS_RDONLY, "size=1m,mode=0700"),
            0);
  {
    auto tier = OpenFolder(mounted);
    EXPECT_FALSE(tier->health().ok());
    EXPECT_TRUE(Hits(*tier, {9, 1}));
    const TierDone put = Put(*tier, {9, 2});
    EXPECT_FALSE(put.stored);
    EXPECT_TRUE(put.status.ok());
  }
  EXPECT_EQ(umount(mounted.c_str()), 0);
}

TEST_F(FolderTierTest, AFolderThatCannotBe) {
  const std::string file = folder_.path() + "/file";
  ASSERT_TRUE(OwnedFd(open(file.c_str(), O_WRONLY | O_CREAT, 0600)).valid());
  for (const std::string& path : {file, file + "/below"}) {
    const auto store = FolderStore::Open({.folder = path});
    ASSERT_FALSE(store.has_value());
    EXPECT_NE(store.error().message().find(path), std::string::npos) << store.error().ToString();
  }
  EXPECT_EQ(FolderStore::Open({}).status().code(), Code::kInvalidArgument);
}

}  // namespace
}  // namespace forebay
