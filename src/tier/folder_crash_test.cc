// Writers that are killed at random moments.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <fstream>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "base/crc32c.h"
#include "base/owned.h"
#include "base/rng.h"
#include "tier/folder_index.h"
#include "tier/folder_log.h"
#include "tier/tier_testing.h"

namespace forebay {
namespace {

using namespace tier_testing;

// The samples of a data set that the folder's log names, as it lies there.
std::vector<uint32_t> NamedByTheLog(const std::string& path, uint64_t group) {
  const OwnedFd folder(open(path.c_str(), O_RDONLY | O_DIRECTORY));
  Result<FolderLog> log = FolderLog::Open(folder.get(), false);
  FolderIndex index;
  if (!log) return {};  // killed before it made one
  EXPECT_EQ(log->ReadNew([&index](std::span<const LogRecord> records) {
    for (const LogRecord& record : records) index.Apply(record);
  }),
            0);
  std::vector<uint32_t> named;
  for (const TierKey& key : index.Keys(group)) named.push_back(static_cast<uint32_t>(key.name));
  return named;
}

// A child fills the tier and is killed; whatever is found afterwards is right, and nothing that
// was whole is fetched again: neither what the child saw stored, nor what the log names.
TEST(FolderCrashTest, KilledWritersLeaveNoWrongByte) {
  const TempFolder folder_;
  constexpr uint64_t kCapacity = 12 << 20;  // one data set and a half: the others are evicted
  const char* text = std::getenv("FOREBAY_SEEDS");
  const int seeds = text == nullptr ? 20 : std::atoi(text);
  size_t found = 0;
  for (int seed = 0; seed < seeds; ++seed) {
    SplitMix64 rng(static_cast<uint64_t>(seed));
    int pipes[2];
    ASSERT_EQ(pipe2(pipes, O_CLOEXEC), 0);
    const OwnedFd from(pipes[0]);
    OwnedFd to(pipes[1]);
    const auto dataset = static_cast<uint32_t>(seed % 3);
    const auto key = [dataset](uint32_t sample) { return TierKey{dataset, sample, dataset}; };
    const pid_t child = fork();
    ASSERT_GE(child, 0);
    if (child == 0) {
      alarm(60);
      auto tier = OpenFolder(folder_.path(), kCapacity, 16);
      for (uint32_t i = 0;; i += 8) {
        std::vector<Bytes> all;
        std::vector<TierOp> ops;
        for (uint32_t s = i; s < i + 8; ++s) all.push_back(BytesOf(key(s % 400)));
        for (uint32_t s = 0; s < 8; ++s) {
          ops.push_back({.tag = s,
                         .kind = Kind::kPut,
                         .key = key((i + s) % 400),
                         .bytes = all[s],
                         .crc = Crc32c(all[s])});
        }
        if (tier->Submit(ops) != 8) _exit(1);
        for (const auto& [tag, done] : Collect(*tier, 8)) {
          if (!done.stored) _exit(2);
          const uint32_t sample = (i + static_cast<uint32_t>(tag)) % 400;
          (void)!write(to.get(), &sample, sizeof sample);
        }
        // Others come and go.
        const TierKey brief = key(1000 + i / 8 % 5);
        if (tier->Has(brief)) Drop(*tier, brief);
        if (!Put(*tier, brief).stored) _exit(3);
      }
    }
    to.Reset();
    std::set<uint32_t> stored;
    uint32_t i = 0;
    const uint64_t most = 1 + rng.Below(600);
    for (uint64_t n = 0; n < most && read(from.get(), &i, sizeof i) == sizeof i; ++n) {
      stored.insert(i);
    }
    usleep(static_cast<useconds_t>(rng.Below(2000)));
    ASSERT_EQ(kill(child, SIGKILL), 0);
    int status = 0;
    ASSERT_EQ(waitpid(child, &status, 0), child);
    ASSERT_TRUE(WIFSIGNALED(status)) << "seed " << seed << " status " << status;
    const std::vector<uint32_t> named = NamedByTheLog(folder_.path(), dataset);
    auto tier = OpenFolder(folder_.path(), kCapacity);
    ASSERT_TRUE(tier->health().ok()) << tier->health().ToString();
    EXPECT_TRUE(folder_.Files(".tmp").empty());
    for (uint32_t s = 0; s < 1005; ++s) {
      const bool had = tier->Has(key(s));
      const bool hit = Hits(*tier, key(s));
      EXPECT_EQ(had, hit) << "seed " << seed << ": a copy that is visible is whole";
      EXPECT_TRUE(hit || !stored.contains(s)) << "seed " << seed << " lost sample " << s;
      found += hit ? 1 : 0;
    }
    for (const uint32_t s : named) {
      EXPECT_TRUE(Hits(*tier, key(s))) << "seed " << seed << " lost sample " << s;
    }
    EXPECT_GE(named.size(), stored.size()) << "seed " << seed;
    EXPECT_EQ(NamedByTheLog(folder_.path(), dataset), named) << "seed " << seed;
    EXPECT_EQ(tier->stats().damaged, 0u) << "seed " << seed;
  }
  EXPECT_GT(found, static_cast<size_t>(seeds));
}

// ---- what a power loss leaves: records are lost that files have, or had

class FolderPowerLossTest : public testing::Test {
 protected:
  std::shared_ptr<FolderStore> OpenInBlocks(uint64_t capacity) const {
    auto store = FolderStore::Open({.folder = cache(),
                                    .capacity_bytes = capacity,
                                    .file_bytes = 64 << 10,
                                    .gather = 100 * kMicro});
    EXPECT_TRUE(store.has_value()) << store.status().ToString();
    EXPECT_TRUE((*store)->WaitScanned(kLong));
    return *std::move(store);
  }
  void PutMany(const std::shared_ptr<FolderStore>& store, uint64_t from, uint64_t to) const {
    auto tier = *FolderStore::MakeTier(store, 16);
    for (uint64_t s = from; s < to; ++s) ASSERT_TRUE(Put(*tier, {9, s}).stored);
  }
  std::string cache() const { return folder_.path() + "/cache"; }
  std::string Log() const { return cache() + "/index.log"; }
  void StartTheMachineAnew() const {
    std::ofstream(cache() + "/forebay.lock", std::ios::trunc) << "process 1 on host\nboot 00\n";
  }

  TempFolder folder_;
};

TEST_F(FolderPowerLossTest, WhatNoRecordSpeaksOfGoes) {
  uint64_t synced = 0;
  {
    auto store = OpenInBlocks(64 << 20);
    PutMany(store, 0, 40);
    synced = fs::file_size(Log());
  }
  // The next job begins a new segment, and its records are lost.
  { PutMany(OpenInBlocks(64 << 20), 40, 200); }
  ASSERT_GT(fs::file_size(Log()), synced);
  fs::resize_file(Log(), synced);
  const uint64_t before = DiskUse(cache());
  {
    // The machine was not started anew: nobody looks.
    auto store = OpenInBlocks(64 << 20);
    PutMany(store, 1000, 1001);
    EXPECT_GE(DiskUse(cache()), before);
  }
  StartTheMachineAnew();
  auto store = OpenInBlocks(64 << 20);
  PutMany(store, 1001, 1002);  // after the background thread has looked
  EXPECT_TRUE(Soon([&] { return DiskUse(cache()) <= store->used_bytes(); })) << DiskUse(cache());
  EXPECT_LT(DiskUse(cache()), before);
  auto tier = *FolderStore::MakeTier(store, 16);
  for (uint64_t s = 0; s < 40; ++s) EXPECT_TRUE(Hits(*tier, {9, s})) << s;
  for (uint64_t s = 40; s < 200; ++s) EXPECT_FALSE(Hits(*tier, {9, s})) << s;
  EXPECT_EQ(store->stats().damaged, 0u);
}

TEST_F(FolderPowerLossTest, ASegmentWithBytesThatNoRecordSpeaksOfIsGivenUp) {
  uint64_t synced = 0;
  {
    auto store = OpenInBlocks(64 << 20);
    PutMany(store, 0, 4);
    synced = fs::file_size(Log());
    PutMany(store, 4, 300);
  }
  fs::resize_file(Log(), synced);
  StartTheMachineAnew();
  auto store = OpenInBlocks(64 << 20);
  PutMany(store, 1000, 1001);
  EXPECT_TRUE(Soon([&] { return DiskUse(cache()) <= store->used_bytes(); })) << DiskUse(cache());
}

TEST_F(FolderPowerLossTest, WhatWasDroppedAndIsBackIsMadeToFit) {
  constexpr uint64_t kSmaller = 1 << 20;
  { PutMany(OpenInBlocks(64 << 20), 0, 200); }
  StartTheMachineAnew();
  auto store = OpenInBlocks(kSmaller);
  EXPECT_TRUE(Soon([&] { return store->used_bytes() <= kSmaller; })) << store->used_bytes();
  store->Drop({9, 0});  // after the background thread has done it
  EXPECT_TRUE(Soon([&] { return DiskUse(cache()) <= kSmaller; })) << DiskUse(cache());
}

// Its records would count again as soon as the group had a folder.
TEST_F(FolderPowerLossTest, AFolderThatIsGoneDoesNotComeBackWithItsRecords) {
  { PutMany(OpenInBlocks(64 << 20), 0, 100); }
  for (const auto& each : fs::directory_iterator(cache())) {
    if (each.path().filename().string().size() == 16) fs::remove_all(each.path());
  }
  { PutMany(OpenInBlocks(64 << 20), 100, 101); }
  EXPECT_EQ(NamedByTheLog(cache(), 9), std::vector<uint32_t>{100});
}

// Writes bytes into a new file; ends the process where it cannot.
void MakeFile(int dir, const std::string& name, const Bytes& bytes) {
  const OwnedFd fd(openat(dir, name.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600));
  if (write(fd.get(), bytes.data(), bytes.size()) != static_cast<ssize_t>(bytes.size())) _exit(4);
}

// A child makes files of packed copies, adopts files and drops some, for ever; says when a copy has
// become a file.
[[noreturn]] void LinkForEver(const std::string& folder, int to) {
  alarm(60);
  auto store = OpenStore(folder);
  auto tier = *FolderStore::MakeTier(store, 16);
  fs::create_directories(folder + "/run/copies");
  const OwnedFd links(open((folder + "/run/copies").c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  for (uint32_t i = 0;; ++i) {
    const TierKey packed{9, i};
    if (!Put(*tier, packed).stored) _exit(1);
    const std::string name = std::string(32 - std::to_string(i).size(), '0') + std::to_string(i);
    if (!store->LinkCopy(packed, BytesOf(packed).size(), links.get(), name.c_str()).ok()) _exit(2);
    (void)!write(to, &i, sizeof i);
    const TierKey adopted{9, 100'000 + i};
    const Bytes bytes = BytesOf(adopted);
    MakeFile(links.get(), name + ".part", bytes);
    if (!store
             ->AdoptFile(adopted, links.get(), (name + ".part").c_str(), bytes.size(),
                         Crc32c(bytes))
             .ok()) {
      _exit(3);
    }
    if (i % 3 == 0) {
      store->Drop(adopted);
      for (const TierKey& gone : store->TakeUnlinks()) store->ReleaseCopy(gone);
    }
  }
}

TEST(FolderCrashTest, KilledWhileCopiesBecomeFiles) {
  const char* text = std::getenv("FOREBAY_SEEDS");
  const int seeds = text == nullptr ? 10 : std::atoi(text) / 2;
  for (int seed = 0; seed < seeds; ++seed) {
    const TempFolder folder;
    SplitMix64 rng(static_cast<uint64_t>(seed));
    int pipes[2];
    ASSERT_EQ(pipe2(pipes, O_CLOEXEC), 0);
    const OwnedFd from(pipes[0]);
    OwnedFd to(pipes[1]);
    const pid_t child = fork();
    ASSERT_GE(child, 0);
    if (child == 0) LinkForEver(folder.path(), to.get());
    to.Reset();
    uint32_t last = 0;
    const uint64_t most = 1 + rng.Below(60);
    for (uint64_t n = 0; n < most; ++n) {
      ASSERT_EQ(read(from.get(), &last, sizeof last), static_cast<ssize_t>(sizeof last));
    }
    usleep(static_cast<useconds_t>(rng.Below(3000)));
    ASSERT_EQ(kill(child, SIGKILL), 0);
    int status = 0;
    ASSERT_EQ(waitpid(child, &status, 0), child);
    ASSERT_TRUE(WIFSIGNALED(status)) << "seed " << seed << " status " << status;
    const std::vector<uint32_t> named = NamedByTheLog(folder.path(), 9);
    auto tier = OpenFolder(folder.path());
    EXPECT_TRUE(folder.Files(".tmp").empty());
    EXPECT_TRUE(fs::is_empty(folder.path() + "/run/copies")) << "names of a dead process";
    for (const uint32_t s : named) {
      EXPECT_TRUE(Hits(*tier, {9, s})) << "seed " << seed << " lost sample " << s;
    }
    for (uint32_t s = 0; s <= last; ++s) {
      EXPECT_TRUE(Hits(*tier, {9, s})) << "seed " << seed << " lost sample " << s;
    }
    EXPECT_EQ(tier->stats().damaged, 0u) << "seed " << seed;
  }
}

// A job that shares the folder goes on where the killed writer was.
TEST(FolderCrashTest, AReaderTakesOverFromAKilledWriter) {
  const char* text = std::getenv("FOREBAY_SEEDS");
  const int seeds = text == nullptr ? 5 : std::atoi(text) / 4;
  for (int seed = 0; seed < seeds; ++seed) {
    const TempFolder folder;
    SplitMix64 rng(static_cast<uint64_t>(seed));
    int pipes[2];
    ASSERT_EQ(pipe2(pipes, O_CLOEXEC), 0);
    const OwnedFd from(pipes[0]);
    OwnedFd to(pipes[1]);
    const pid_t child = fork();
    ASSERT_GE(child, 0);
    if (child == 0) {
      alarm(60);
      auto tier = OpenFolder(folder.path());
      for (uint32_t i = 0;; ++i) {
        if (!Put(*tier, {9, i}).stored) _exit(1);
        (void)!write(to.get(), &i, sizeof i);
      }
    }
    to.Reset();
    uint32_t last = 0;
    const uint64_t most = 1 + rng.Below(100);
    const auto next = [&] { return read(from.get(), &last, sizeof last) == sizeof last; };
    ASSERT_TRUE(next());
    auto reader = OpenReader(folder.path(), kMilli);
    EXPECT_FALSE(reader->health().ok());
    for (uint64_t n = 0; n < most && next(); ++n) {
    }
    usleep(static_cast<useconds_t>(rng.Below(2000)));
    ASSERT_EQ(kill(child, SIGKILL), 0);
    ASSERT_EQ(waitpid(child, nullptr, 0), child);
    const std::vector<uint32_t> named = NamedByTheLog(folder.path(), 9);
    EXPECT_GT(named.size(), last);
    ASSERT_TRUE(Soon([&] { return reader->HasRoom(100'000); })) << reader->health().ToString();
    for (const uint32_t s : named) {
      EXPECT_TRUE(Hits(*reader, {9, s})) << "seed " << seed << " lost sample " << s;
    }
    EXPECT_EQ(reader->stats().damaged, 0u) << "seed " << seed;
    for (uint32_t s = 0; s < 5; ++s) {
      EXPECT_TRUE(Put(*reader, {9, static_cast<uint32_t>(named.size()) + s}).stored);
    }
    reader.reset();
    EXPECT_EQ(NamedByTheLog(folder.path(), 9).size(), named.size() + 5) << "seed " << seed;
  }
}

}  // namespace
}  // namespace forebay
