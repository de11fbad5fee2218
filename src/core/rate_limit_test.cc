#include "core/rate_limit.h"

#include <gtest/gtest.h>

#include <vector>

namespace forebay {
namespace {

// Reads as fast as they are admitted from `from` to `to`; bytes that were let through.
double Drain(RateLimiter& limiter, uint64_t bytes, Nanos from, Nanos to) {
  double taken = 0;
  Nanos now = from;
  while (now < to) {
    const Nanos when = limiter.Admit(bytes, now);
    if (when <= now) {
      taken += static_cast<double>(bytes);
    } else {
      now = when;
    }
  }
  return taken;
}

TEST(RateLimiter, WithoutLimitsEverythingStartsAtOnce) {
  RateLimiter limiter;
  for (int i = 0; i < 1000; ++i) EXPECT_EQ(limiter.Admit(1 << 30, i), i);
  EXPECT_FALSE(limiter.TakeHeldBack());
}

TEST(RateLimiter, TheRateHoldsForAnySize) {
  for (const uint64_t bytes : {uint64_t{1000}, uint64_t{100'000}, uint64_t{30'000'000}}) {
    RateLimiter limiter({1e8, kUnlimited});
    const double taken = Drain(limiter, bytes, 0, 10 * kSecond);
    EXPECT_GE(taken, 1e9 - 1);
    EXPECT_LE(taken, 1e9 + 5e6 + static_cast<double>(bytes)) << bytes;
    EXPECT_TRUE(limiter.TakeHeldBack());
    EXPECT_FALSE(limiter.TakeHeldBack());
  }
}

TEST(RateLimiter, OperationsBindWhereReadsAreSmall) {
  RateLimiter limiter({1e9, 100});
  EXPECT_NEAR(Drain(limiter, 1000, 0, 10 * kSecond) / 1000, 1005, 2);
}

TEST(RateLimiter, UnusedTokensAreBounded) {
  RateLimiter limiter({1e6, kUnlimited});
  EXPECT_EQ(limiter.Admit(1000, 0), 0);
  const Nanos later = 100 * kSecond;
  double burst = 0;
  while (limiter.Admit(1000, later) <= later) burst += 1000;
  EXPECT_NEAR(burst, 1e6 * 0.05, 2000);
}

TEST(RateLimiter, ARefusalChargesNothing) {
  RateLimiter limiter({1e6, kUnlimited});
  limiter.Admit(1'000'000, 0);
  const Nanos when = limiter.Admit(500, 0);
  EXPECT_GT(when, 0);
  for (int i = 0; i < 100; ++i) EXPECT_EQ(limiter.Admit(500, 0), when);
  EXPECT_EQ(limiter.Admit(500, when), when);
}

TEST(RateLimiter, LimitsChangeWithoutAJump) {
  RateLimiter limiter({1e8, kUnlimited});
  Drain(limiter, 10'000, 0, kSecond);
  limiter.SetLimits({1e6, kUnlimited}, kSecond);
  // The burst of the old rate is gone: 50 ms of the new one at most.
  EXPECT_LE(Drain(limiter, 10'000, kSecond, 2 * kSecond), 1.05e6 + 10'000);
  limiter.SetLimits({1e8, kUnlimited}, 2 * kSecond);
  // And a faster rate begins now, it does not count for the past.
  EXPECT_LE(Drain(limiter, 10'000, 2 * kSecond, 3 * kSecond), 1e8 + 20'000);
  limiter.SetLimits({}, 3 * kSecond);
  EXPECT_EQ(limiter.Admit(1 << 30, 3 * kSecond), 3 * kSecond);
  limiter.SetLimits({1e6, kUnlimited}, 3 * kSecond);
  EXPECT_LE(Drain(limiter, 1000, 3 * kSecond, 4 * kSecond), 1e6 + 2000);
}

TEST(RateLimiter, SettingTheSameLimitsOftenGivesNothing) {
  RateLimiter limiter({1e6, 1000});
  double taken = 0;
  for (Nanos now = 0; now < kSecond; now += kMilli) {
    limiter.SetLimits({1e6 + static_cast<double>(now % 2), 1000}, now);
    while (limiter.Admit(500, now) <= now) taken += 500;
  }
  EXPECT_NEAR(taken, 525'000, 2000);  // 1000 operations of 500 bytes and the burst
}

TEST(RateLimiter, ARateOfNothing) {
  RateLimiter limiter({0, kUnlimited});
  EXPECT_EQ(limiter.Admit(1, 5), kNeverReady);
  limiter.SetLimits({1e6, kUnlimited}, 10);
  EXPECT_EQ(limiter.Admit(1, 10), 10);
}

TEST(RateLimiter, AClockThatGoesBackGivesNothing) {
  RateLimiter limiter({1e6, kUnlimited});
  limiter.Admit(1'000'000, kSecond);
  const Nanos when = limiter.Admit(1, kSecond);
  EXPECT_EQ(limiter.Admit(1, kSecond / 2), when);
  EXPECT_EQ(limiter.Admit(1, kSecond), when);
}

TEST(RateLimiter, ManyAtOnceAndBack) {
  RateLimiter limiter({1e6, kUnlimited});
  const std::vector<uint64_t> sizes(100, 10'000);
  Nanos again = 0;
  EXPECT_EQ(limiter.AdmitMany(sizes, 0, &again), 6u);  // 50,000 bytes, and one into debt
  EXPECT_EQ(again, 10 * kMilli);
  limiter.GiveBack(10'000);
  EXPECT_EQ(limiter.Admit(10'000, 0), 0);
  EXPECT_EQ(limiter.AdmitMany({}, 0, &again), 0u);
}

}  // namespace
}  // namespace forebay
