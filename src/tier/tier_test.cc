// One conformance suite for every Tier, and what is particular to the folder.
#include "tier/tier.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <signal.h>
#include <sys/mount.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <filesystem>
#include <map>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "base/clock.h"
#include "base/crc32c.h"
#include "base/owned.h"
#include "base/rng.h"
#include "tier/folder_tier.h"
#include "tier/memory_tier.h"

namespace forebay {
namespace {

namespace fs = std::filesystem;
using Bytes = std::vector<std::byte>;
using Kind = TierOp::Kind;

constexpr Nanos kLong = 60 * kSecond;

// The bytes that a key stands for, of a length that is the key's too.
Bytes BytesOf(const TierKey& key, size_t most = 20'000) {
  SplitMix64 rng(key.dataset * 1'000'003 + key.sample);
  Bytes bytes(rng.Below(8) == 0 ? 0 : rng.Below(most));
  for (std::byte& b : bytes) b = static_cast<std::byte>(rng.Next());
  return bytes;
}

class TempFolder {
 public:
  TempFolder() {
    std::string pattern = testing::TempDir() + "forebay_tier_XXXXXX";
    EXPECT_NE(mkdtemp(pattern.data()), nullptr);
    path_ = pattern;
  }
  ~TempFolder() {
    std::error_code ignored;
    fs::remove_all(path_, ignored);
  }
  const std::string& path() const { return path_; }
  // Copies of samples, in no order.
  std::vector<fs::path> Copies() const { return Files(".fb"); }
  std::vector<fs::path> Files(const std::string& extension) const {
    std::vector<fs::path> found;
    std::error_code ignored;
    for (const auto& entry : fs::recursive_directory_iterator(path_, ignored)) {
      if (entry.path().extension() == extension) found.push_back(entry.path());
    }
    return found;
  }

 private:
  std::string path_;
};

bool WaitReadable(const Tier& tier) {
  pollfd waiting{tier.event_fd(), POLLIN, 0};
  return poll(&waiting, 1, 60'000) == 1;
}

std::map<uint64_t, TierDone> Collect(Tier& tier, size_t count) {
  std::map<uint64_t, TierDone> all;
  std::vector<TierDone> out(5);
  while (all.size() < count) {
    if (!WaitReadable(tier)) {
      ADD_FAILURE() << "only " << all.size() << " of " << count << " completed";
      return all;
    }
    const size_t n = tier.Reap(out);
    for (size_t i = 0; i < n; ++i) {
      const uint64_t tag = out[i].tag;
      EXPECT_TRUE(all.emplace(tag, std::move(out[i])).second) << "twice: " << tag;
    }
  }
  EXPECT_EQ(tier.Reap(out), 0u);
  return all;
}

TierDone DoOne(Tier& tier, const TierOp& op) {
  EXPECT_EQ(tier.Submit(std::span(&op, 1)), 1u);
  return std::move(Collect(tier, 1)[op.tag]);
}
TierDone Put(Tier& tier, const TierKey& key, Bytes bytes) {
  return DoOne(tier,
               {.tag = 1, .kind = Kind::kPut, .key = key, .bytes = bytes, .crc = Crc32c(bytes)});
}
TierDone Put(Tier& tier, const TierKey& key) { return Put(tier, key, BytesOf(key)); }
TierDone Get(Tier& tier, const TierKey& key, Bytes& bytes) {
  return DoOne(tier, {.tag = 2, .kind = Kind::kGet, .key = key, .bytes = bytes});
}
TierDone Drop(Tier& tier, const TierKey& key) {
  return DoOne(tier, {.tag = 3, .kind = Kind::kDrop, .key = key, .bytes = {}});
}
// A hit must bring the key's bytes; returns whether it was one.
bool Hits(Tier& tier, const TierKey& key) {
  const Bytes truth = BytesOf(key);
  Bytes bytes(truth.size(), std::byte{0x5a});
  const TierDone done = Get(tier, key, bytes);
  if (done.hit) {
    EXPECT_TRUE(bytes == truth) << "wrong bytes for sample " << key.sample;
    EXPECT_EQ(done.crc, Crc32c(truth));
  }
  return done.hit;
}

std::shared_ptr<FolderStore> OpenStore(const std::string& folder, uint64_t capacity = 64 << 20) {
  auto store = FolderStore::Open({.folder = folder, .capacity_bytes = capacity});
  EXPECT_TRUE(store.has_value()) << store.status().ToString();
  EXPECT_TRUE((*store)->WaitScanned(kLong));
  return *std::move(store);
}

std::unique_ptr<Tier> OpenFolder(const std::string& folder, uint64_t capacity = 64 << 20,
                                 size_t max_in_flight = 64) {
  auto tier = FolderStore::MakeTier(OpenStore(folder, capacity), max_in_flight);
  EXPECT_TRUE(tier.has_value()) << tier.status().ToString();
  return *std::move(tier);
}

// ---- every tier

struct Made {
  std::string name;
  std::unique_ptr<Tier> (*make)(const std::string& folder, uint64_t bytes, size_t max_in_flight);
};

class TierTest : public testing::TestWithParam<Made> {
 protected:
  std::unique_ptr<Tier> Make(uint64_t bytes = 64 << 20, size_t max_in_flight = 64) {
    return GetParam().make(folder_.path(), bytes, max_in_flight);
  }
  TempFolder folder_;
};

TEST_P(TierTest, PutGetDrop) {
  auto tier = Make();
  const TierKey key{7, 3};
  EXPECT_FALSE(tier->Has(key));
  EXPECT_FALSE(Hits(*tier, key));
  const TierDone put = Put(*tier, key);
  EXPECT_TRUE(put.stored);
  EXPECT_TRUE(put.status.ok()) << put.status.ToString();
  EXPECT_TRUE(tier->Has(key));
  EXPECT_TRUE(Hits(*tier, key));
  EXPECT_TRUE(Hits(*tier, key)) << "a get takes nothing away";
  EXPECT_FALSE(tier->Has({8, 3}));
  EXPECT_FALSE(tier->Has({7, 4}));
  EXPECT_GE(tier->used_bytes(), BytesOf(key).size());
  EXPECT_TRUE(Drop(*tier, key).status.ok());
  EXPECT_FALSE(tier->Has(key));
  EXPECT_FALSE(Hits(*tier, key));
  EXPECT_EQ(tier->used_bytes(), 0u);
  EXPECT_TRUE(Drop(*tier, key).status.ok()) << "nothing to drop is no error";
  EXPECT_TRUE(Put(*tier, key).stored) << "dropped, it can come back";
  EXPECT_TRUE(Hits(*tier, key));
  EXPECT_TRUE(tier->health().ok());
  EXPECT_FALSE(tier->Describe().empty());
  const TierStats stats = tier->stats();
  EXPECT_EQ(stats.hits, 3u);
  EXPECT_EQ(stats.misses, 2u);
  EXPECT_EQ(stats.writes, 2u);
  EXPECT_EQ(stats.damaged, 0u);
}

TEST_P(TierTest, EmptyAndExtremeKeys) {
  auto tier = Make();
  for (const TierKey key : {TierKey{0, 0}, TierKey{~uint64_t{0}, ~uint32_t{0}}}) {
    EXPECT_TRUE(Put(*tier, key, {}).stored);
    Bytes none;
    EXPECT_TRUE(Get(*tier, key, none).hit);
  }
}

TEST_P(TierTest, APutOfAHeldKeyChangesNothing) {
  auto tier = Make();
  const TierKey key{7, 3};
  EXPECT_TRUE(Put(*tier, key).stored);
  const uint64_t used = tier->used_bytes();
  EXPECT_TRUE(Put(*tier, key, Bytes(5000)).stored);
  EXPECT_EQ(tier->used_bytes(), used);
  EXPECT_TRUE(Hits(*tier, key));
}

TEST_P(TierTest, FullIsAValue) {
  auto tier = Make(64 << 10);
  EXPECT_EQ(tier->capacity_bytes(), 64u << 10);
  EXPECT_FALSE(tier->HasRoom(65 << 10));
  EXPECT_TRUE(tier->HasRoom(10'000));
  uint32_t stored = 0;
  for (uint32_t i = 0; i < 20; ++i) {
    const TierDone done = Put(*tier, {1, i}, Bytes(10'000));
    EXPECT_TRUE(done.status.ok()) << done.status.ToString();
    stored += done.stored ? 1 : 0;
    EXPECT_EQ(tier->Has({1, i}), done.stored);
    EXPECT_LE(tier->used_bytes(), tier->capacity_bytes());
  }
  EXPECT_GE(stored, 5u);
  EXPECT_LE(stored, 6u);
  EXPECT_EQ(tier->stats().full, 20 - stored);
  EXPECT_FALSE(tier->HasRoom(10'000));
  Drop(*tier, {1, 0});
  EXPECT_TRUE(tier->HasRoom(10'000));
  EXPECT_TRUE(Put(*tier, {1, 99}, Bytes(10'000)).stored) << "a drop makes room";
  Bytes bytes(10'000);
  EXPECT_TRUE(Get(*tier, {1, 1}, bytes).hit) << "full, it serves what it has";
}

TEST_P(TierTest, AWrongChecksumIsAMissAndTheCopyGoes) {
  auto tier = Make();
  const TierKey key{7, 3};
  Bytes bytes(1000, std::byte{1});
  EXPECT_TRUE(DoOne(*tier, {.tag = 1, .kind = Kind::kPut, .key = key, .bytes = bytes, .crc = 12345})
                  .stored);
  const TierDone done = Get(*tier, key, bytes);
  EXPECT_FALSE(done.hit);
  EXPECT_TRUE(done.status.ok());
  EXPECT_FALSE(tier->Has(key));
  EXPECT_EQ(tier->stats().damaged, 1u);
  EXPECT_EQ(tier->used_bytes(), 0u);
  EXPECT_TRUE(Put(*tier, key).stored);
  EXPECT_TRUE(Hits(*tier, key));
}

TEST_P(TierTest, AnotherLengthIsAMiss) {
  auto tier = Make();
  EXPECT_TRUE(Put(*tier, {1, 1}, Bytes(100)).stored);
  Bytes longer(101);
  EXPECT_FALSE(Get(*tier, {1, 1}, longer).hit);
  EXPECT_FALSE(tier->Has({1, 1}));
}

TEST_P(TierTest, SubmitTakesAPrefixAndReapNeverBlocks) {
  auto tier = Make(1 << 20, 3);
  EXPECT_EQ(tier->capacity(), 3u);
  std::vector<TierDone> out(8);
  EXPECT_EQ(tier->Reap(out), 0u);
  Bytes bytes(10);
  std::vector<TierOp> ops;
  for (uint32_t i = 0; i < 5; ++i) {
    ops.push_back(
        {.tag = i, .kind = Kind::kPut, .key = {1, i}, .bytes = bytes, .crc = Crc32c(bytes)});
  }
  EXPECT_EQ(tier->Submit(ops), 3u);
  EXPECT_EQ(tier->Submit(std::span(ops).subspan(3)), 0u);
  EXPECT_EQ(Collect(*tier, 3).size(), 3u);
  EXPECT_EQ(tier->Submit(std::span(ops).subspan(3)), 2u);
  EXPECT_EQ(Collect(*tier, 2).size(), 2u);
  pollfd waiting{tier->event_fd(), POLLIN, 0};
  EXPECT_EQ(poll(&waiting, 1, 0), 0);
}

// Puts, gets and drops of few keys, many in flight: a hit is always whole and right.
TEST_P(TierTest, ManyInFlightFromASeed) {
  auto tier = Make(200'000, 16);
  SplitMix64 rng(11);
  std::map<uint64_t, std::pair<TierOp, Bytes>> flying;
  std::vector<TierDone> out(7);
  uint64_t hits = 0;
  constexpr uint64_t kOps = 3000;
  uint64_t next = 0;
  uint64_t finished = 0;
  while (finished < kOps) {
    while (next < kOps) {
      const TierKey key{1 + rng.Below(2), static_cast<uint32_t>(rng.Below(20)) * 700};
      const uint64_t draw = rng.Below(10);
      const Kind kind = draw < 4 ? Kind::kPut : draw < 9 ? Kind::kGet : Kind::kDrop;
      auto& [op, bytes] = flying[next];
      bytes = kind == Kind::kDrop ? Bytes() : BytesOf(key);
      const uint32_t crc = Crc32c(bytes);
      if (kind == Kind::kGet) std::fill(bytes.begin(), bytes.end(), std::byte{0});
      op = {.tag = next, .kind = kind, .key = key, .bytes = bytes, .crc = crc};
      if (tier->Submit(std::span(&op, 1)) == 0) {
        flying.erase(next);
        break;
      }
      ++next;
    }
    ASSERT_TRUE(WaitReadable(*tier));
    const size_t n = tier->Reap(out);
    for (const TierDone& done : std::span(out).first(n)) {
      const auto it = flying.find(done.tag);
      ASSERT_NE(it, flying.end()) << "twice: " << done.tag;
      ASSERT_TRUE(done.status.ok()) << done.status.ToString();
      if (done.hit) {
        ++hits;
        ASSERT_TRUE(it->second.second == BytesOf(it->second.first.key));
      }
      flying.erase(it);
    }
    finished += n;
    ASSERT_LE(tier->used_bytes(), tier->capacity_bytes());
  }
  EXPECT_GT(hits, 100u);
  EXPECT_EQ(tier->stats().damaged, 0u);
  EXPECT_EQ(tier->stats().hits, hits);
}

TEST_P(TierTest, DestructionWithOpsInFlight) {
  auto tier = Make();
  std::vector<Bytes> buffers(30, Bytes(200'000));
  std::vector<TierOp> ops;
  for (uint32_t i = 0; i < 30; ++i) {
    ops.push_back({.tag = i,
                   .kind = i % 3 == 0 ? Kind::kGet : Kind::kPut,
                   .key = {1, i / 2},
                   .bytes = buffers[i],
                   .crc = Crc32c(buffers[i])});
  }
  EXPECT_EQ(tier->Submit(ops), 30u);
  tier.reset();
  buffers.clear();
}

TEST_P(TierTest, ForkedChildDestroysWithoutWaiting) {
  auto tier = Make();
  EXPECT_TRUE(Put(*tier, {1, 1}).stored);
  const pid_t child = fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    alarm(30);
    tier.reset();
    _exit(0);
  }
  int status = -1;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << status;
  EXPECT_TRUE(Hits(*tier, {1, 1}));
  EXPECT_TRUE(Put(*tier, {1, 2}).stored);
}

INSTANTIATE_TEST_SUITE_P(
    All, TierTest,
    testing::Values(Made{"memory",
                         [](const std::string&, uint64_t bytes, size_t max_in_flight) {
                           return *MakeMemoryTier(bytes, max_in_flight);
                         }},
                    Made{"folder",
                         [](const std::string& folder, uint64_t bytes, size_t max_in_flight) {
                           return OpenFolder(folder, bytes, max_in_flight);
                         }}),
    [](const testing::TestParamInfo<Made>& made) { return made.param.name; });

// ---- the folder

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

TEST_F(FolderTierTest, EachBitIsChecked) {
  Fill(1);
  const std::vector<fs::path> copies = folder_.Copies();
  ASSERT_EQ(copies.size(), 1u);
  const auto size = static_cast<off_t>(fs::file_size(copies[0]));
  ASSERT_GT(size, 100);
  SplitMix64 rng(1);
  std::vector<off_t> places;
  for (off_t i = 0; i < 32; ++i) places.push_back(i);
  for (int i = 0; i < 8; ++i) places.push_back(32 + static_cast<off_t>(rng.Below(size - 32)));
  for (const off_t place : places) {
    {
      const OwnedFd fd(open(copies[0].c_str(), O_RDWR));
      std::byte b{};
      ASSERT_EQ(pread(fd.get(), &b, 1, place), 1);
      b ^= std::byte{1} << rng.Below(8);
      ASSERT_EQ(pwrite(fd.get(), &b, 1, place), 1);
    }
    auto tier = OpenFolder(folder_.path());
    EXPECT_TRUE(tier->Has({9, 0}));
    EXPECT_FALSE(Hits(*tier, {9, 0})) << "byte " << place;
    EXPECT_EQ(tier->stats().damaged, 1u);
    EXPECT_TRUE(folder_.Copies().empty());
    EXPECT_TRUE(Put(*tier, {9, 0}).stored) << "fetched again, it is stored again";
    EXPECT_TRUE(Hits(*tier, {9, 0}));
  }
}

TEST_F(FolderTierTest, TornAndLongFiles) {
  Fill(1);
  const fs::path copy = folder_.Copies().at(0);
  const auto whole = static_cast<off_t>(fs::file_size(copy));
  for (const off_t size : {off_t{0}, off_t{31}, off_t{32}, whole - 1, whole + 1}) {
    // Before the start, and under a tier that knew it whole.
    ASSERT_EQ(truncate(copy.c_str(), size), 0);
    {
      auto tier = OpenFolder(folder_.path());
      EXPECT_FALSE(Hits(*tier, {9, 0})) << size;
      ASSERT_TRUE(Put(*tier, {9, 0}).stored);
      ASSERT_TRUE(Hits(*tier, {9, 0}));
      ASSERT_EQ(truncate(copy.c_str(), size), 0);
      EXPECT_FALSE(Hits(*tier, {9, 0})) << size;
      EXPECT_EQ(tier->used_bytes(), 0u);
      ASSERT_TRUE(Put(*tier, {9, 0}).stored);
    }
  }
}

TEST_F(FolderTierTest, ACopyUnderAnotherNameIsNotBelieved) {
  {
    auto tier = OpenFolder(folder_.path());
    ASSERT_TRUE(Put(*tier, {9, 0}, Bytes(100)).stored);
  }
  const fs::path copy = folder_.Copies().at(0);
  fs::rename(copy, copy.parent_path() / "00000001.fb");
  auto tier = OpenFolder(folder_.path());
  Bytes bytes(100);
  EXPECT_TRUE(tier->Has({9, 1}));
  EXPECT_FALSE(Get(*tier, {9, 1}, bytes).hit);
}

TEST_F(FolderTierTest, StrangersAreLeftAlone) {
  Fill(1);
  const fs::path page = folder_.Copies().at(0).parent_path();
  const std::vector<fs::path> strangers = {folder_.path() + "/notes.txt",
                                           page / "readme.fb",
                                           page / "0000000A.fb",
                                           page / "00000401.fb",
                                           page.parent_path() / "x",
                                           folder_.path() + "/writing/mine",
                                           folder_.path() + "/0123456789abcdef"};
  for (const fs::path& stranger : strangers) {
    const OwnedFd fd(open(stranger.c_str(), O_WRONLY | O_CREAT, 0600));
    ASSERT_TRUE(fd.valid()) << stranger;
    ASSERT_EQ(write(fd.get(), "text", 4), 4);
  }
  fs::create_directories(page / "00000005.fb");
  fs::create_symlink("/etc/passwd", page / "00000006.fb");
  auto tier = OpenFolder(folder_.path());
  EXPECT_TRUE(Hits(*tier, {9, 0}));
  for (const uint32_t sample : {5u, 6u, 10u, 0x401u}) EXPECT_FALSE(tier->Has({9, sample}));
  for (const fs::path& stranger : strangers) EXPECT_TRUE(fs::exists(stranger)) << stranger;
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

TEST_F(FolderTierTest, DataSetsThatNobodyUsesMakeRoom) {
  constexpr uint64_t kCapacity = 40 * 4096;
  {
    auto tier = OpenFolder(folder_.path(), kCapacity);
    for (uint32_t i = 0; i < 30; ++i) ASSERT_TRUE(Put(*tier, {1, i * 1024}, Bytes(100)).stored);
    ASSERT_TRUE(Put(*tier, {2, 0}, Bytes(100)).stored);
  }
  auto store = OpenStore(folder_.path(), kCapacity);
  store->Use(2);
  auto tier = *FolderStore::MakeTier(store, 4);
  EXPECT_TRUE(tier->HasRoom(100));
  for (uint32_t i = 0; i < 39; ++i) {
    EXPECT_TRUE(Put(*tier, {3, i}, Bytes(100)).stored) << i;
    EXPECT_LE(tier->used_bytes(), kCapacity);
  }
  EXPECT_FALSE(tier->HasRoom(100));
  EXPECT_FALSE(Put(*tier, {3, 99}, Bytes(100)).stored) << "what is used is never given up";
  EXPECT_TRUE(tier->Has({2, 0}));
  EXPECT_EQ(folder_.Copies().size(), 40u);
  EXPECT_FALSE(fs::exists(folder_.path() + "/0000000000000001"));
}

TEST_F(FolderTierTest, AFullDisk) {
  const std::string mounted = folder_.path() + "/disk";
  fs::create_directories(mounted);
  if (mount("none", mounted.c_str(), "tmpfs", 0, "size=256k") != 0) {
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
  if (mount("none", mounted.c_str(), "tmpfs", 0, "size=1m") != 0) {
    GTEST_SKIP() << "NOT TESTED: mounting a tmpfs: " << strerror(errno);
  }
  {
    auto tier = OpenFolder(mounted);
    ASSERT_TRUE(Put(*tier, {9, 1}).stored);
  }
  EXPECT_EQ(mount("none", mounted.c_str(), "tmpfs", MS_REMOUNT | MS_RDONLY, "size=1m"), 0);
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

// A child fills the tier and is killed; whatever is found afterwards is right, and nothing that
// the child saw stored is lost.
TEST_F(FolderTierTest, KilledWritersLeaveNoWrongByte) {
  const char* text = std::getenv("FOREBAY_SEEDS");
  const int seeds = text == nullptr ? 20 : std::atoi(text);
  size_t found = 0;
  for (int seed = 0; seed < seeds; ++seed) {
    SplitMix64 rng(static_cast<uint64_t>(seed));
    int pipes[2];
    ASSERT_EQ(pipe2(pipes, O_CLOEXEC), 0);
    const OwnedFd from(pipes[0]);
    OwnedFd to(pipes[1]);
    const auto dataset = static_cast<uint64_t>(seed % 3);
    const pid_t child = fork();
    ASSERT_GE(child, 0);
    if (child == 0) {
      alarm(60);
      auto tier = OpenFolder(folder_.path(), 8 << 20, 8);
      for (uint32_t i = 0;; ++i) {
        const TierKey key{dataset, i % 400};
        if (!tier->Has(key) && !Put(*tier, key).stored) _exit(1);
        (void)!write(to.get(), &i, sizeof i);
        // Others come and go.
        const TierKey brief{dataset, 1000 + i % 5};
        if (tier->Has(brief)) Drop(*tier, brief);
        if (!Put(*tier, brief).stored) _exit(2);
      }
    }
    to.Reset();
    std::set<uint32_t> stored;
    uint32_t i = 0;
    const uint64_t most = 1 + rng.Below(600);
    for (uint64_t n = 0; n < most && read(from.get(), &i, sizeof i) == sizeof i; ++n) {
      stored.insert(i % 400);
    }
    usleep(static_cast<useconds_t>(rng.Below(2000)));
    ASSERT_EQ(kill(child, SIGKILL), 0);
    int status = 0;
    ASSERT_EQ(waitpid(child, &status, 0), child);
    ASSERT_TRUE(WIFSIGNALED(status)) << "seed " << seed << " status " << status;
    auto tier = OpenFolder(folder_.path(), 8 << 20);
    ASSERT_TRUE(tier->health().ok()) << tier->health().ToString();
    EXPECT_TRUE(folder_.Files(".tmp").empty());
    for (uint32_t s = 0; s < 1005; ++s) {
      const bool had = tier->Has({dataset, s});
      const bool hit = Hits(*tier, {dataset, s});
      EXPECT_EQ(had, hit) << "seed " << seed << ": a copy that is visible is whole";
      EXPECT_TRUE(hit || !stored.contains(s)) << "seed " << seed << " lost sample " << s;
      found += hit ? 1 : 0;
    }
    EXPECT_EQ(tier->stats().damaged, 0u) << "seed " << seed;
  }
  EXPECT_GT(found, static_cast<size_t>(seeds));
}

}  // namespace
}  // namespace forebay
