#include "stage/governor.h"

#include <gtest/gtest.h>

#include <algorithm>

#include "stage/pause_allowance.h"
#include "stage/reads_under_way.h"

namespace forebay {
namespace {

// Storage that answers `room` reads at once, each after `base`; more than that queue.
void Drive(ReadGovernor& governor, double room, double base_ns, int reads, bool hungry) {
  for (int i = 0; i < reads; ++i) {
    const double inflight = static_cast<double>(governor.limit());
    governor.OnRead(static_cast<int64_t>(base_ns * std::max(1.0, inflight / room)), hungry);
  }
}

TEST(ReadGovernor, GrowsWhileTheStorageHasRoom) {
  ReadGovernor governor({4, 256, 32});
  Drive(governor, 1e9, 40e6, 1000, true);
  EXPECT_EQ(governor.limit(), 256u);
}

TEST(ReadGovernor, StopsNearWhatTheStorageTakes) {
  ReadGovernor governor({4, 256, 8});
  Drive(governor, 40, 1e6, 5000, true);
  EXPECT_GE(governor.limit(), 40u);
  EXPECT_LE(governor.limit(), 96u);
}

TEST(ReadGovernor, DoesNotGrowForAFedConsumer) {
  ReadGovernor governor({4, 256, 16});
  Drive(governor, 1e9, 40e6, 1000, false);
  EXPECT_EQ(governor.limit(), 16u);
}

TEST(ReadGovernor, ReopensWhenTheStorageSlowsDown) {
  ReadGovernor governor({4, 256, 16});
  Drive(governor, 20, 1e6, 3000, true);
  EXPECT_LE(governor.limit(), 64u);
  Drive(governor, 1e9, 20e6, 3000, true);  // latency up, but no queue: parallelism helps again
  EXPECT_EQ(governor.limit(), 256u);
}

TEST(ReadGovernor, FixedStaysFixed) {
  ReadGovernor governor({4, 256, 16});
  governor.Fix(12);
  Drive(governor, 1e9, 40e6, 1000, true);
  EXPECT_EQ(governor.limit(), 12u);
}

// ---- pauses for the cache folder

// Seconds of pause between `from` and `to`, asked every millisecond.
double Paused(PauseAllowance& pause, Nanos from, Nanos to) {
  Nanos paused = 0;
  for (Nanos now = from; now < to; now += kMilli) paused += pause.Ask(true, now) ? kMilli : 0;
  (void)pause.Ask(false, to);
  return static_cast<double>(paused) / kSecond;
}

TEST(PauseAllowance, OnePartInFifty) {
  PauseAllowance pause(0);
  EXPECT_FALSE(pause.Ask(true, 0));
  EXPECT_NEAR(Paused(pause, kMilli, 100 * kSecond), 2, 0.1);
}

TEST(PauseAllowance, ALongTimeWithoutPausesDoesNotAllowALongOne) {
  PauseAllowance pause(0);
  const Nanos late = 36000 * kSecond;
  EXPECT_LT(Paused(pause, late, late + 10 * kSecond), 1.5);
}

// ---- reads under way

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
  EXPECT_EQ(reads.depth(Place::kSource), 2u);
  EXPECT_EQ(reads.at(alone).depth, 2u);
  for (const uint64_t tag : {other, first, alone}) (void)reads.Remove(tag);
  EXPECT_EQ(reads.depth(Place::kSource), 0u);
  EXPECT_EQ(reads.size(), 0u);
}

TEST(ReadsUnderWay, TheOldestReadFromTheFolder) {
  ReadsUnderWay reads;
  ReadAction tier;
  tier.likely = Place::kTier;
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
