// One conformance suite for every Tier.
#include "tier/tier.h"

#include <gtest/gtest.h>
#include <poll.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "base/crc32c.h"
#include "base/rng.h"
#include "tier/memory_tier.h"
#include "tier/tier_testing.h"

namespace forebay {
namespace {

using namespace tier_testing;

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
  EXPECT_TRUE(tier->Has({8, 3})) << "the name tells, whichever group it was put for";
  EXPECT_FALSE(tier->Has({7, 3, 1}));
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

TEST_P(TierTest, AnotherStampComparesAndReplaces) {
  const TierKey key{7, 3};
  const auto put = [&](Tier& tier, Bytes bytes, uint32_t stamp) {
    const TierOp op{.tag = 1,
                    .kind = TierOp::Kind::kPut,
                    .key = key,
                    .bytes = bytes,
                    .crc = Crc32c(bytes),
                    .stamp = stamp};
    return DoOne(tier, op).stored;
  };
  for (const size_t size : {size_t{5000}, size_t{600} << 10}) {  // packed, and a file
    auto tier = Make();
    (void)Drop(*tier, key);
    Bytes bytes(size, std::byte{1});
    EXPECT_EQ(tier->StampOfCopy(key), 0u);
    EXPECT_TRUE(put(*tier, bytes, 0));
    EXPECT_EQ(tier->StampOfCopy(key), 0u);
    EXPECT_TRUE(put(*tier, bytes, 11));
    EXPECT_EQ(tier->StampOfCopy(key), 11u) << "the same bytes";
    EXPECT_EQ(tier->stats().writes, 1u);
    EXPECT_TRUE(put(*tier, Bytes(size, std::byte{2}), 0));
    EXPECT_TRUE(Get(*tier, key, bytes).hit);
    EXPECT_EQ(bytes.back(), std::byte{1}) << "nothing is known that says otherwise";
    EXPECT_TRUE(put(*tier, Bytes(size, std::byte{2}), 12));
    EXPECT_EQ(tier->StampOfCopy(key), 12u);
    EXPECT_TRUE(Get(*tier, key, bytes).hit);
    EXPECT_EQ(bytes.back(), std::byte{2});
    if (GetParam().name != "folder") continue;
    tier = nullptr;
    tier = Make();
    EXPECT_EQ(tier->StampOfCopy(key), 12u) << "it is in the log";
    EXPECT_TRUE(Get(*tier, key, bytes).hit);
    EXPECT_EQ(bytes.back(), std::byte{2});
  }
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
  auto tier = Make(600'000, 16);
  SplitMix64 rng(11);
  std::map<uint64_t, std::pair<TierOp, Bytes>> flying;
  std::vector<TierDone> out(7);
  uint64_t hits = 0;
  constexpr uint64_t kOps = 3000;
  uint64_t next = 0;
  uint64_t finished = 0;
  while (finished < kOps) {
    while (next < kOps) {
      const auto group = static_cast<uint32_t>(1 + rng.Below(2));
      const TierKey key{group, rng.Below(20) * 700, group};
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

}  // namespace
}  // namespace forebay
