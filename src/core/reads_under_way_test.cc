#include "core/reads_under_way.h"

#include <gtest/gtest.h>

#include <algorithm>

namespace forebay {
namespace {

// ---- pauses for the cache folder

// Seconds of pause between `from` and `to`, asked every millisecond.
TEST(ReadsUnderWay, WhileTheProcessWasStoppedNoReadBecameOld) {
  ReadsUnderWay reads;
  reads.Tick(kSecond);
  const uint64_t tag = reads.Add({}, kSecond, true);
  reads.Tick(kSecond + 100 * kMilli);
  EXPECT_EQ(reads.at(tag).start, kSecond) << "a slow round of the loop";
  reads.Tick(20 * kSecond);
  EXPECT_EQ(20 * kSecond - reads.at(tag).start, 100 * kMilli);
}

TEST(ReadsUnderWay, AGroupIsOneRequest) {
  ReadsUnderWay reads;
  const uint64_t first = reads.Add({.group = 7}, 0, true);
  const uint64_t other = reads.Add({.group = 7}, 0, false);
  const uint64_t alone = reads.Add({}, 0, true);
  EXPECT_EQ(reads.size(), 3u);
  EXPECT_EQ(reads.depth(Origin::kSource), 2u);
  EXPECT_EQ(reads.at(alone).depth, 2u);
  for (const uint64_t tag : {other, first, alone}) (void)reads.Remove(tag);
  EXPECT_EQ(reads.depth(Origin::kSource), 0u);
  EXPECT_EQ(reads.size(), 0u);
}

TEST(ReadsUnderWay, RequestsThatHang) {
  ReadsUnderWay reads;
  const uint64_t hanging = reads.Add({.group = 3}, 0, true);
  reads.Add({.group = 3}, 0, false);
  reads.Add({}, 400 * kMilli, true);
  reads.FindOldest(ReadsUnderWay::kHangs);
  EXPECT_EQ(reads.hanging(), 0u);
  reads.FindOldest(ReadsUnderWay::kHangs + kMilli);
  EXPECT_EQ(reads.hanging(), 1u) << "a group is one request";
  reads.Remove(hanging);
  reads.FindOldest(ReadsUnderWay::kHangs + 2 * kMilli);
  EXPECT_EQ(reads.hanging(), 0u);
}

TEST(ReadsUnderWay, TheOldestReadFromTheFolder) {
  ReadsUnderWay reads;
  ReadAction tier;
  tier.likely = Origin::kTier;
  const uint64_t first = reads.Add(tier, 10 * kMilli, true);
  const uint64_t second = reads.Add(tier, 30 * kMilli, true);
  reads.Add(ReadAction(), 0, true);  // the source's do not count
  EXPECT_EQ(reads.oldest_tier_age(), 0);
  reads.FindOldest(50 * kMilli);
  EXPECT_EQ(reads.oldest_tier_age(), 40 * kMilli);
  reads.Remove(first);
  reads.FindOldest(51 * kMilli);
  EXPECT_EQ(reads.oldest_tier_age(), 21 * kMilli);
  reads.Remove(second);
  EXPECT_EQ(reads.oldest_tier_age(), 0) << "it has answered";
}

}  // namespace
}  // namespace forebay
