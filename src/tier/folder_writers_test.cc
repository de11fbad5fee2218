// Two writers of one folder: a file system whose locks exclude nobody (NFS without a lock service).
#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cstdio>
#include <filesystem>
#include <memory>
#include <string>
#include <utility>

#include "base/owned.h"
#include "base/rng.h"
#include "tier/folder_tier.h"
#include "tier/tier_testing.h"

namespace {

bool locks_exclude = true;

}  // namespace

// In the place of the C library's, for this program.
extern "C" int flock(int fd, int operation) noexcept {
  if (!locks_exclude) return 0;
  return static_cast<int>(syscall(SYS_flock, fd, operation));
}

namespace forebay {
namespace {

using namespace tier_testing;

constexpr uint64_t kGroups = 4;
constexpr uint64_t kNames = 30;
constexpr uint64_t kCapacity = 600'000;  // of a group and a half

TierKey KeyOf(uint64_t group, uint64_t sample) { return {group, group * 1000 + sample}; }

// Reads a second name of the copy, as programs do.
void ExpectLinked(FolderStore& store, const OwnedFd& links, const TierKey& key) {
  const Bytes truth = BytesOf(key);
  const std::string name = StrCat(getpid());
  if (!store.LinkCopy(key, truth.size(), links.get(), name.c_str()).ok()) return;
  const OwnedFd fd(openat(links.get(), name.c_str(), O_RDONLY));
  Bytes bytes(truth.size() + 1);
  EXPECT_EQ(read(fd.get(), bytes.data(), bytes.size()), static_cast<ssize_t>(truth.size()));
  bytes.pop_back();
  EXPECT_TRUE(bytes == truth) << "wrong bytes in a link to sample " << key.name;
  EXPECT_EQ(unlinkat(links.get(), name.c_str(), 0), 0);
  store.ReleaseCopy(key);
}

struct Outcome {
  bool stored = false;  // while the other one had opened the folder, too
  bool hit = false;
};

// One of two processes; each leaves what it has when the other one is there, too.
Outcome Write(const std::string& folder, const OwnedFd& links, uint64_t seed, int say, int hear) {
  SplitMix64 rng(seed);
  Outcome out;
  for (int round = 0; round < 12; ++round) {
    const auto store = OpenStore(folder, kCapacity);
    const auto tier = *FolderStore::MakeTier(store, 64);
    const uint64_t own = 1 + rng.Below(kGroups);
    if (round == 0) {
      char word = 'w';
      EXPECT_EQ(write(say, &word, 1), 1);
      EXPECT_EQ(read(hear, &word, 1), 1);
      out.stored = Put(*tier, KeyOf(own, seed)).stored;
    }
    for (int i = 0; i < 60; ++i) {
      const TierKey key =
          KeyOf(rng.Below(4) == 0 ? 1 + rng.Below(kGroups) : own, rng.Below(kNames));
      const uint64_t what = rng.Below(8);
      if (what < 3) {
        (void)Put(*tier, key);
      } else if (what < 6) {
        out.hit |= Hits(*tier, key);
      } else if (what == 6) {
        (void)Drop(*tier, key);
      } else {
        ExpectLinked(*store, links, key);
      }
    }
  }
  return out;
}

TEST(FolderWritersTest, TwoAtOnceLoseCopiesAndServeNoWrongByte) {
  // One of them may find no room for its first copy beside the other's, or writes no more by then.
  int both = 0;
  for (uint64_t seed = 0; seed < 60 && (seed < 6 || both == 0); ++seed) {
    const TempFolder folder;
    const std::string cache = folder.path() + "/cache";
    fs::create_directory(folder.path() + "/links");
    const OwnedFd links(open((folder.path() + "/links").c_str(), O_RDONLY | O_DIRECTORY));
    std::array<int, 2> there{};
    std::array<int, 2> back{};
    ASSERT_EQ(pipe(there.data()), 0);
    ASSERT_EQ(pipe(back.data()), 0);
    locks_exclude = false;
    const pid_t other = fork();
    ASSERT_GE(other, 0);
    if (other == 0) {
      const Outcome out = Write(cache, links, 2 * seed, there[1], back[0]);
      fflush(stdout);
      _exit((testing::Test::HasFailure() ? 1 : 0) + (out.stored ? 2 : 0) + (out.hit ? 4 : 0));
    }
    const Outcome out = Write(cache, links, 2 * seed + 1, back[1], there[0]);
    int status = -1;
    ASSERT_EQ(waitpid(other, &status, 0), other);
    ASSERT_TRUE(WIFEXITED(status)) << status;
    const int others = WEXITSTATUS(status);
    EXPECT_EQ(others & 1, 0) << "see what the other process printed";
    EXPECT_TRUE(out.stored || (others & 2) != 0) << "neither is the writer";
    EXPECT_TRUE(out.hit || (others & 4) != 0) << "nothing was kept";
    both += out.stored && (others & 2) != 0 ? 1 : 0;
    locks_exclude = true;
    for (const int fd : {there[0], there[1], back[0], back[1]}) close(fd);
    // Who comes later, alone, finds a folder that works.
    const auto tier = OpenFolder(cache, 64 << 20);
    for (uint64_t group = 1; group <= kGroups; ++group) {
      for (uint64_t sample = 0; sample < kNames; ++sample) (void)Hits(*tier, KeyOf(group, sample));
    }
    EXPECT_TRUE(tier->health().ok()) << tier->health().ToString();
    EXPECT_TRUE(Put(*tier, KeyOf(9, 1)).stored);
    EXPECT_TRUE(Hits(*tier, KeyOf(9, 1)));
  }
  EXPECT_GT(both, 0) << "there were never two writers";
}

}  // namespace
}  // namespace forebay
