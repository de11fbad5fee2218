#include "metrics/epoch_log.h"

#include <gtest/gtest.h>

namespace forebay {
namespace {

TEST(EpochLog, CountsBatchesWaitsAndTime) {
  EpochLog log;
  log.Begin(100 * kMicro);
  log.Begin(150 * kMicro);  // asked again, while it waits
  log.Waited(StallCause::kSource, 20 * kMicro);
  log.Count(7, 4, 400, 160 * kMicro);
  log.Count(7, 2, 200, 200 * kMicro);
  const auto now = log.Stats(210 * kMicro);
  ASSERT_EQ(now.size(), 1u);
  EXPECT_EQ(now[0].wall_ns, 110 * kMicro);
  const EpochStats* const ended = log.End(220 * kMicro);
  ASSERT_NE(ended, nullptr);
  EXPECT_EQ(ended->epoch, 7u);
  EXPECT_EQ(ended->batches, 2u);
  EXPECT_EQ(ended->samples, 6u);
  EXPECT_EQ(ended->bytes, 600u);
  EXPECT_EQ(ended->wall_ns, 120 * kMicro);
  EXPECT_EQ(ended->total_wait_ns(), 20 * kMicro);
  EXPECT_EQ(ended->batch_us, (std::vector<uint32_t>{60, 40}));
  EXPECT_FALSE(log.under_way());
}

TEST(EpochLog, AnEpochWithoutABatchOrAWaitHasNoEntry) {
  EpochLog log;
  log.Begin(1);
  EXPECT_TRUE(log.under_way());
  EXPECT_EQ(log.End(2), nullptr);
  log.Begin(3);
  log.EndOfStream();
  EXPECT_TRUE(log.Stats(4).empty());
  EXPECT_FALSE(log.under_way());
}

TEST(EpochLog, TheEndOfTheStreamIsNoEpoch) {
  EpochLog log;
  log.Begin(0);
  log.Count(0, 1, 1, kMicro, false);
  EXPECT_NE(log.End(kMicro), nullptr);
  log.Begin(2 * kMicro);
  log.Waited(StallCause::kPlan, kMicro);
  log.EndOfStream();
  log.WaitedAfter(StallCause::kCopy, 5);
  const auto stats = log.Stats(9 * kMicro);
  ASSERT_EQ(stats.size(), 1u);
  EXPECT_TRUE(stats[0].batch_us.empty());
  EXPECT_EQ(stats[0].wait_ns[static_cast<size_t>(StallCause::kCopy)], 5);
  EXPECT_EQ(stats[0].total_wait_ns(), 5);
}

TEST(EpochLog, KeepsTheLastThousand) {
  EpochLog log;
  for (uint64_t epoch = 0; epoch < 1500; ++epoch) {
    log.Begin(0);
    log.Count(epoch, 1, 1, 0);
    (void)log.End(0);
  }
  const auto stats = log.Stats(0);
  ASSERT_EQ(stats.size(), 1000u);
  EXPECT_EQ(stats.front().epoch, 500u);
}

}  // namespace
}  // namespace forebay
