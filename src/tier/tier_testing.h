// What the tests of tiers share.
#pragma once

#include <gtest/gtest.h>
#include <poll.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "base/clock.h"
#include "base/crc32c.h"
#include "base/rng.h"
#include "tier/folder_tier.h"
#include "tier/tier.h"

namespace forebay::tier_testing {

namespace fs = std::filesystem;
using Bytes = std::vector<std::byte>;
using Kind = TierOp::Kind;

inline constexpr Nanos kLong = 60 * kSecond;

// The bytes that a key stands for, of a length that is the key's too.
inline Bytes BytesOf(const TierKey& key, size_t most = 20'000) {
  SplitMix64 rng(key.group * 1'000'003 + key.name);
  const uint64_t draw = rng.Below(8);
  // None, one for a file of its own, and small ones.
  Bytes bytes(draw == 0 ? 0 : draw == 1 ? (64 << 10) + rng.Below(40'000) : rng.Below(most));
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

// A user that the tests are not, where they run as root.
inline constexpr uid_t kStranger = 65534;

// Root is that user until the end of the block; another user stays who she is.
class AsStranger {
 public:
  AsStranger() { EXPECT_TRUE(!root_ || seteuid(kStranger) == 0); }
  ~AsStranger() { EXPECT_TRUE(!root_ || seteuid(0) == 0); }
  AsStranger(const AsStranger&) = delete;
  AsStranger& operator=(const AsStranger&) = delete;

 private:
  const bool root_ = geteuid() == 0;
};

inline bool WaitReadable(const Tier& tier) {
  pollfd waiting{tier.event_fd(), POLLIN, 0};
  return poll(&waiting, 1, 60'000) == 1;
}

inline std::map<uint64_t, TierDone> Collect(Tier& tier, size_t count) {
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

inline TierDone DoOne(Tier& tier, const TierOp& op) {
  EXPECT_EQ(tier.Submit(std::span(&op, 1)), 1u);
  return std::move(Collect(tier, 1)[op.tag]);
}
inline TierDone Put(Tier& tier, const TierKey& key, Bytes bytes) {
  return DoOne(tier,
               {.tag = 1, .kind = Kind::kPut, .key = key, .bytes = bytes, .crc = Crc32c(bytes)});
}
inline TierDone Put(Tier& tier, const TierKey& key) { return Put(tier, key, BytesOf(key)); }
inline TierDone Get(Tier& tier, const TierKey& key, Bytes& bytes) {
  return DoOne(tier, {.tag = 2, .kind = Kind::kGet, .key = key, .bytes = bytes});
}
inline TierDone Drop(Tier& tier, const TierKey& key) {
  return DoOne(tier, {.tag = 3, .kind = Kind::kDrop, .key = key, .bytes = {}});
}
// A hit must bring the key's bytes; returns whether it was one.
inline bool Hits(Tier& tier, const TierKey& key) {
  const Bytes truth = BytesOf(key);
  Bytes bytes(truth.size(), std::byte{0x5a});
  const TierDone done = Get(tier, key, bytes);
  if (done.hit) {
    EXPECT_TRUE(bytes == truth) << "wrong bytes for sample " << key.name;
    EXPECT_EQ(done.crc, Crc32c(truth));
  }
  return done.hit;
}

inline std::shared_ptr<FolderStore> OpenStore(const std::string& folder,
                                              uint64_t capacity = 64 << 20) {
  // The tests put one by one and wait for each.
  auto store = FolderStore::Open({.folder = folder,
                                  .capacity_bytes = capacity,
                                  .block_bytes = 1,
                                  .file_bytes = 64 << 10,
                                  .gather = 100 * kMicro});
  EXPECT_TRUE(store.has_value()) << store.status().ToString();
  EXPECT_TRUE((*store)->WaitScanned(kLong));
  return *std::move(store);
}

inline std::unique_ptr<Tier> OpenFolder(const std::string& folder, uint64_t capacity = 64 << 20,
                                        size_t max_in_flight = 64) {
  auto tier = FolderStore::MakeTier(OpenStore(folder, capacity), max_in_flight);
  EXPECT_TRUE(tier.has_value()) << tier.status().ToString();
  return *std::move(tier);
}

// For a folder that another store writes to.
inline std::unique_ptr<Tier> OpenReader(const std::string& folder, Nanos take_over_every) {
  auto store = FolderStore::Open({.folder = folder,
                                  .capacity_bytes = 64 << 20,
                                  .block_bytes = 1,
                                  .file_bytes = 64 << 10,
                                  .follow_every = kMilli,
                                  .take_over_every = take_over_every,
                                  .gather = 100 * kMicro});
  EXPECT_TRUE(store.has_value()) << store.status().ToString();
  EXPECT_TRUE((*store)->WaitScanned(kLong));
  return *FolderStore::MakeTier(*std::move(store), 64);
}

// What the files and folders below `path` take of the disk; one with two names once.
inline uint64_t DiskUse(const std::string& path) {
  std::map<ino_t, uint64_t> blocks;
  const auto add = [&](const fs::path& each) {
    struct stat st {};
    if (lstat(each.c_str(), &st) == 0) blocks[st.st_ino] = static_cast<uint64_t>(st.st_blocks);
  };
  add(path);
  for (const auto& entry : fs::recursive_directory_iterator(path)) add(entry.path());
  uint64_t sum = 0;
  for (const auto& [inode, count] : blocks) sum += count * 512;
  return sum;
}

// What this process has in memory.
inline uint64_t ResidentBytes() {
  std::ifstream statm("/proc/self/statm");
  uint64_t total = 0;
  uint64_t resident = 0;
  statm >> total >> resident;
  return resident * static_cast<uint64_t>(sysconf(_SC_PAGESIZE));
}

// What other threads or processes are about to do.
template <typename Holds>
bool Soon(const Holds& holds) {
  for (int i = 0; i < 10'000 && !holds(); ++i) usleep(1000);
  return holds();
}

}  // namespace forebay::tier_testing
