// A cache folder on a disk whose power is lost at random moments.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "base/crc32c.h"
#include "base/owned.h"
#include "base/rng.h"
#include "powerloss/power_loss_disk.h"
#include "tier/folder_lock.h"
#include "tier/folder_tier.h"
#include "tier/tier_testing.h"

namespace forebay::powerloss {
namespace {

using namespace tier_testing;

constexpr uint64_t kCapacity = 3 << 20;
constexpr uint64_t kFileBytes = 16 << 10;
constexpr uint64_t kSamples = 300;
constexpr uint64_t kOperations = 200;
// What a segment may take more than its copies before it is given up.
constexpr uint64_t kSegmentSlack = 64 << 10;

// Records of what was dropped lengthen the log of a full folder until it is written anew.
constexpr uint64_t kLogSlack = 4 * kBlock;

int Seeds() {
  const char* text = std::getenv("FOREBAY_SEEDS");
  return text == nullptr ? 20 : std::max(10, std::atoi(text) / 4);
}

TierKey KeyOf(uint64_t sample) {
  return {.group = 1 + sample % 2, .name = sample * 0x9e3779b97f4a7c15, .check = 7};
}

std::shared_ptr<FolderStore> Open(const std::string& folder) {
  auto store = FolderStore::Open({.folder = folder,
                                  .capacity_bytes = kCapacity,
                                  .file_bytes = kFileBytes,
                                  .threads = 1,
                                  .batch_bytes = 64 << 10,
                                  .gather = 100 * kMicro});
  EXPECT_TRUE(store.has_value()) << store.status().ToString();
  if (!store) return nullptr;
  EXPECT_TRUE((*store)->WaitScanned(kLong));
  return *std::move(store);
}

std::string ReadAll(int dir, const std::string& name) {
  const OwnedFd fd(openat(dir, name.c_str(), O_RDONLY | O_CLOEXEC));
  std::string out;
  std::vector<char> buffer(64 << 10);
  while (fd.valid()) {
    const ssize_t n = read(fd.get(), buffer.data(), buffer.size());
    if (n <= 0) break;
    out.append(buffer.data(), static_cast<size_t>(n));
  }
  return out;
}

bool Same(const std::string& text, const Bytes& bytes) {
  return std::ranges::equal(std::as_bytes(std::span(text)), bytes);
}

// One job on the folder: it puts, links, adopts, drops and starts anew. It has done its work when
// the power is lost, or is in the middle of it.
class Job {
 public:
  Job(std::string folder, uint64_t seed) : folder_(std::move(folder)), rng_(seed) { Start(); }

  void Run(uint64_t operations) {
    for (uint64_t i = 0; i < operations && store_ != nullptr; ++i) {
      const uint64_t draw = rng_.Below(100);
      if (draw < 60) {
        (void)Put(*tier_, Next());
      } else if (draw < 75) {
        Hand(Next());
      } else if (draw < 85) {
        Adopt(Next());
      } else if (draw < 97) {
        store_->Drop(Next());
        for (const TierKey& gone : store_->TakeUnlinks()) {
          (void)unlinkat(links_.get(), LinkName(gone).c_str(), 0);
          store_->ReleaseCopy(gone);
        }
      } else {
        Start();
      }
    }
  }

  // Whatever the folder gives out is a sample's bytes, as a copy and as a file. How many it has.
  size_t CheckAll() {
    size_t held = 0;
    for (uint64_t sample = 0; sample < kSamples; ++sample) {
      const TierKey key = KeyOf(sample);
      // Half of them first as a file: a read would find out what is torn.
      if (rng_.Below(2) == 0) held += Hand(key) ? 1 : 0;
      held += Hits(*tier_, key) ? 1 : 0;
    }
    return held;
  }

  FolderStore& store() { return *store_; }
  Tier& tier() { return *tier_; }

 private:
  TierKey Next() { return KeyOf(rng_.Below(kSamples)); }

  static std::string LinkName(const TierKey& key) {
    const std::string digits = std::to_string(key.name);
    return std::string(32 - digits.size(), '0') + digits;
  }

  void Start() {
    tier_.reset();
    store_.reset();
    store_ = Open(folder_);
    if (store_ == nullptr) return;
    tier_ = *FolderStore::MakeTier(store_, 16);
    store_->Use(1, "/data/one");
    store_->Use(2, "/data/two");
    fs::create_directories(folder_ + "/run/copies");
    links_ = OwnedFd(open((folder_ + "/run/copies").c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  }

  // As a program gets it: nobody checks the bytes on their way.
  bool Hand(const TierKey& key) {
    const Bytes truth = BytesOf(key);
    const std::string name = LinkName(key);
    const Status linked = store_->LinkCopy(key, truth.size(), links_.get(), name.c_str());
    if (!linked.ok()) return false;
    EXPECT_TRUE(Same(ReadAll(links_.get(), name), truth)) << "torn file of sample " << key.name;
    (void)unlinkat(links_.get(), name.c_str(), 0);
    store_->ReleaseCopy(key);
    return true;
  }

  void Adopt(const TierKey& key) {
    const Bytes truth = BytesOf(key);
    const std::string name = LinkName(key) + ".part";
    {
      const OwnedFd fd(
          openat(links_.get(), name.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600));
      if (write(fd.get(), truth.data(), truth.size()) != static_cast<ssize_t>(truth.size())) return;
    }
    (void)store_->AdoptFile(key, links_.get(), name.c_str(), truth.size(), Crc32c(truth));
    (void)unlinkat(links_.get(), name.c_str(), 0);
    store_->ReleaseCopy(key);
  }

  const std::string folder_;
  SplitMix64 rng_;
  std::shared_ptr<FolderStore> store_;
  std::unique_ptr<Tier> tier_;
  OwnedFd links_;
};

class PowerLossTest : public testing::Test {
 protected:
  void SetUp() override {
    if (geteuid() != 0) GTEST_SKIP() << "NOT TESTED: only root can mount";
    NewDisk();
    if (disk_ == nullptr) GTEST_SKIP() << "NOT TESTED: there is no FUSE";
  }
  void NewDisk() {
    disk_.reset();
    auto disk = PowerLossDisk::Mount(mountpoint_.path());
    if (disk) disk_ = *std::move(disk);
  }
  std::string cache() const { return mountpoint_.path() + "/cache"; }
  // To the cache the machine has started anew.
  void ForgetBoot() const {
    const std::string lock = cache() + "/" + FolderLock::kName;
    if (fs::exists(lock)) std::ofstream(lock, std::ios::trunc) << "process 1 on host\n";
  }

  TempFolder mountpoint_;
  std::unique_ptr<PowerLossDisk> disk_;
};

// The disk itself: what was synced stays, what was not may be lost.
TEST_F(PowerLossTest, SyncedBytesAndNamesStay) {
  size_t lost = 0;
  for (uint64_t seed = 0; seed < 20; ++seed) {
    const std::string folder = mountpoint_.path() + "/" + std::to_string(seed);
    fs::create_directory(folder);
    OwnedFd root(open(mountpoint_.path().c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
    OwnedFd dir(open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
    const std::string text(10'000, 'x');
    for (const char* name : {"synced", "not"}) {
      const OwnedFd fd(openat(dir.get(), name, O_WRONLY | O_CREAT | O_CLOEXEC, 0600));
      ASSERT_EQ(write(fd.get(), text.data(), text.size()), static_cast<ssize_t>(text.size()));
      if (name[0] != 's') continue;
      ASSERT_EQ(fsync(fd.get()), 0);
      ASSERT_EQ(fsync(dir.get()), 0);
      ASSERT_EQ(fsync(root.get()), 0);
    }
    EXPECT_EQ(ReadAll(dir.get(), "not"), text);
    // Nothing of it may be open.
    dir.Reset();
    root.Reset();
    ASSERT_TRUE(disk_->Restart(seed).ok());
    const OwnedFd again(open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
    EXPECT_EQ(ReadAll(again.get(), "synced"), text) << "seed " << seed;
    lost += ReadAll(again.get(), "not") != text ? 1 : 0;
  }
  EXPECT_GT(lost, 5u);
  EXPECT_LT(lost, 20u);
}

// ---- a disk that takes no more writes

class FailingDiskTest : public PowerLossTest {
 protected:
  std::shared_ptr<FolderStore> OpenRetrying() const {
    auto store = FolderStore::Open({.folder = cache(),
                                    .capacity_bytes = kCapacity,
                                    .file_bytes = kFileBytes,
                                    .threads = 1,
                                    .retry_every = kMilli,
                                    .gather = 100 * kMicro});
    EXPECT_TRUE(store.has_value()) << store.status().ToString();
    EXPECT_TRUE((*store)->WaitScanned(kLong));
    return *std::move(store);
  }
};

TEST_F(FailingDiskTest, SaysWhyItTakesNoCopiesAndTriesAgain) {
  const auto store = OpenRetrying();
  auto tier = *FolderStore::MakeTier(store, 4);
  uint64_t sample = 0;
  for (const size_t bytes : {size_t{1000}, 2 * kFileBytes}) {  // packed, and as a file
    for (const int error : {ENOSPC, EDQUOT, EROFS, EIO}) {
      SCOPED_TRACE(StrCat(strerror(error), ", ", bytes, " bytes"));
      const TierKey before{.group = 1, .name = ++sample};
      ASSERT_TRUE(Put(*tier, before, Bytes(bytes)).stored);
      disk_->FailChanges(error);
      const TierKey failing{.group = 1, .name = ++sample};
      EXPECT_FALSE(Put(*tier, failing, Bytes(bytes)).stored);
      const Status health = store->health();
      EXPECT_FALSE(health.ok());
      EXPECT_NE(health.message().find(cache()), std::string::npos) << health.message();
      EXPECT_NE(health.message().find(strerror(error)), std::string::npos) << health.message();
      Bytes found(bytes, std::byte{1});
      EXPECT_TRUE(Get(*tier, before, found).hit && found == Bytes(bytes));
      disk_->FailChanges(0);
      EXPECT_TRUE(Soon([&] { return store->health().ok(); })) << store->health().ToString();
      EXPECT_TRUE(Put(*tier, failing, Bytes(bytes)).stored);
    }
  }
}

// What the log could not say when room was made, it says before the next record.
TEST_F(FailingDiskTest, ALogThatCannotBeWrittenWhileRoomIsMade) {
  for (const bool whole_groups : {true, false}) {
    SCOPED_TRACE(whole_groups ? "groups leave" : "copies leave");
    NewDisk();
    ASSERT_NE(disk_, nullptr);
    constexpr size_t kLarge = 100'000;
    uint64_t first = 0;  // that came, of the old ones
    {
      const auto store = OpenRetrying();
      auto tier = *FolderStore::MakeTier(store, 4);
      while (first < 1000 && Put(*tier, {.group = 1, .name = first}, Bytes(kLarge)).stored) ++first;
      ASSERT_GT(first, 10u);
      ASSERT_LT(first, 1000u);
    }
    uint64_t left = 0;
    uint64_t used = 0;
    {
      const auto store = OpenRetrying();
      auto tier = *FolderStore::MakeTier(store, 4);
      if (!whole_groups) {
        store->Use(1);
        store->AskedForAll(1);
      }
      disk_->FailChanges(EIO, "index.log");
      EXPECT_FALSE(Put(*tier, {.group = 2, .name = 5000}, Bytes(kLarge)).stored);
      EXPECT_NE(store->health().message().find(cache()), std::string::npos);
      disk_->FailChanges(0);
      EXPECT_TRUE(Soon([&] { return store->health().ok(); })) << store->health().ToString();
      EXPECT_TRUE(
          Soon([&] { return Put(*tier, {.group = 2, .name = 5001}, Bytes(kLarge)).stored; }));
      for (uint64_t s = 0; s < first; ++s) left += store->Holds({.group = 1, .name = s}) ? 1 : 0;
      EXPECT_LT(left, first);
      used = store->used_bytes();
    }
    // The next job finds what this one had, and nothing else.
    const auto store = OpenRetrying();
    auto tier = *FolderStore::MakeTier(store, 4);
    uint64_t named = 0;
    for (uint64_t s = 0; s < first; ++s) {
      const TierKey key{.group = 1, .name = s};
      if (!store->Holds(key)) continue;
      ++named;
      Bytes found(kLarge);
      EXPECT_TRUE(Get(*tier, key, found).hit) << s;
    }
    EXPECT_EQ(named, left);
    EXPECT_LE(store->used_bytes(), used + kBlock);
    EXPECT_TRUE(store->Holds({.group = 2, .name = 5001}));
  }
}

// However little of a new cache is left, it is known as one.
TEST_F(PowerLossTest, ANewFolderOpensAgain) {
  for (uint64_t seed = 0; seed < 100; ++seed) {
    SCOPED_TRACE(StrCat("seed ", seed));
    NewDisk();
    ASSERT_NE(disk_, nullptr);
    { Job(cache(), seed).Run(5); }
    ASSERT_TRUE(disk_->Restart(seed).ok());
    Job job(cache(), seed);
    ASSERT_FALSE(HasFailure());
    EXPECT_TRUE(Put(job.tier(), {.group = 1, .name = 77, .check = 1}).stored);
  }
}

TEST_F(PowerLossTest, NoWrongByteAfterAPowerLoss) {
  const int seeds = Seeds();
  size_t held = 0;
  size_t damaged = 0;
  for (int seed = 0; seed < seeds; ++seed) {
    SCOPED_TRACE(StrCat("seed ", seed));
    NewDisk();
    ASSERT_NE(disk_, nullptr);
    SplitMix64 rng(static_cast<uint64_t>(seed) + 1000);
    // Twice: the second time what survived the first is on the disk for good.
    for (int life = 0; life < 2; ++life) {
      disk_->LosePowerAfter(1 + rng.Below(life == 0 && rng.Below(4) == 0 ? 40 : 1500), rng.Next());
      {
        Job job(cache(), rng.Next());
        job.Run(kOperations);
      }
      ASSERT_TRUE(disk_->Restart(rng.Next()).ok());
      ForgetBoot();
      Job job(cache(), rng.Next());
      ASSERT_FALSE(HasFailure());
      EXPECT_TRUE(job.store().health().ok()) << job.store().health().ToString();
      held += job.CheckAll();
      damaged += job.store().stats().damaged;
      for (uint64_t sample = 0; sample < kSamples; sample += 3) job.store().Drop(KeyOf(sample));
      // It takes new copies, and stays within its limit.
      const TierKey fresh{.group = 1, .name = 77, .check = static_cast<uint32_t>(life)};
      EXPECT_TRUE(Put(job.tier(), fresh).stored);
      EXPECT_TRUE(Hits(job.tier(), fresh));
      job.Run(3 * kOperations);  // until it is full
      EXPECT_LE(job.store().used_bytes(), kCapacity + kLogSlack);
      const uint64_t slack = kLogSlack + kSegmentSlack * mountpoint_.Files(".seg").size();
      EXPECT_TRUE(Soon([&] { return DiskUse(cache()) <= kCapacity + slack; })) << DiskUse(cache());
    }
    ASSERT_FALSE(HasFailure());
  }
  EXPECT_GT(held, static_cast<size_t>(seeds)) << "the power loss took everything";
  EXPECT_GT(damaged, 0u) << "the power loss took nothing";
}

}  // namespace
}  // namespace forebay::powerloss
