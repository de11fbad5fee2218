#include "control/rate_limit.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <vector>

#include "base/rng.h"

namespace forebay::control {
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
  EXPECT_EQ(limiter.Admit(1, 5), kNever);
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

// A source, two jobs with limits from the estimate: what the daemon does, in virtual time.
struct Loaded {
  SourceCapacity capacity;
  Nanos now = 0;

  // Demand without bound for `seconds`; the source gives `rate` at most, with `noise`.
  double Run(double seconds, double rate, double noise = 0, uint64_t seed = 1) {
    SplitMix64 rng(seed);
    const Nanos tick = 50 * kMilli;
    double total = 0;
    for (Nanos end = now + static_cast<Nanos>(seconds * kSecond); now < end;) {
      now += tick;
      const double can = rate * (1 - noise * rng.Uniform());
      const double given =
          std::min(can, capacity.Allowance()) * static_cast<double>(tick) / kSecond;
      total += given;
      capacity.Observe(given, true, now);
    }
    return total / seconds;
  }
  void Idle(double seconds) {
    now += static_cast<Nanos>(seconds * kSecond);
    capacity.Observe(0, false, now);
  }
};

TEST(SourceCapacity, UnknownUntilDemandWasUnmet) {
  SourceCapacity capacity;
  EXPECT_FALSE(capacity.Estimate());
  EXPECT_EQ(capacity.Allowance(), kUnlimited);
  for (Nanos now = 0; now < 10 * kSecond; now += 100 * kMilli) capacity.Observe(1e6, false, now);
  EXPECT_FALSE(capacity.Estimate());
}

TEST(SourceCapacity, FindsTheRate) {
  Loaded loaded;
  EXPECT_GT(loaded.Run(1, 1e9), 0.99e9);
  EXPECT_NEAR(*loaded.capacity.Estimate(), 1e9, 1e7);
  EXPECT_GT(loaded.Run(20, 1e9), 0.99e9);
  EXPECT_NEAR(*loaded.capacity.Estimate(), 1e9, 1e7);
}

TEST(SourceCapacity, NoiseDoesNotWearItDown) {
  for (uint64_t seed = 1; seed <= 20; ++seed) {
    Loaded loaded;
    loaded.Run(60, 1e9, 0.3, seed);
    EXPECT_GT(loaded.Run(10, 1e9, 0.3, seed + 100), 0.78e9) << seed;  // the mean is 0.85
  }
}

TEST(SourceCapacity, ASlowerSourceIsSeenWithinSeconds) {
  Loaded loaded;
  loaded.Run(10, 1e9);
  loaded.Run(6, 1e8);
  EXPECT_LT(*loaded.capacity.Estimate(), 1.3e8);
}

TEST(SourceCapacity, AFasterSourceReopensIt) {
  Loaded loaded;
  loaded.Run(10, 1e8);
  loaded.Run(6, 1e9);
  EXPECT_GT(*loaded.capacity.Estimate(), 0.95e9);
}

TEST(SourceCapacity, TimeWithoutLoadFadesNothingUntilItIsForgotten) {
  Loaded loaded;
  loaded.Run(5, 1e8);
  const double before = *loaded.capacity.Estimate();
  loaded.Idle(30);
  EXPECT_EQ(*loaded.capacity.Estimate(), before);
  loaded.Idle(31);
  EXPECT_EQ(loaded.capacity.Allowance(), kUnlimited);
  loaded.Run(1, 1e9);
  EXPECT_NEAR(*loaded.capacity.Estimate(), 1e9, 1e7);
}

TEST(SourceCapacity, AWindowWithMetDemandTellsNothing) {
  Loaded loaded;
  loaded.Run(5, 1e9);
  for (int i = 0; i < 100; ++i) {
    loaded.now += 100 * kMilli;
    loaded.capacity.Observe(1e6, true, loaded.now);  // a hundredth
    loaded.now += 50 * kMilli;
    loaded.capacity.Observe(0, false, loaded.now);
  }
  EXPECT_NEAR(*loaded.capacity.Estimate(), 1e9, 3e7);
}

TEST(SourceCapacity, TakesOverAnEstimate) {
  SourceCapacity capacity;
  capacity.Assume(5e8, 0);
  EXPECT_EQ(*capacity.Estimate(), 5e8);
  capacity.Assume(0, 0);
  EXPECT_EQ(*capacity.Estimate(), 5e8);
}

TEST(EstimateDemand, HeldBackMeansWithoutBound) {
  EXPECT_EQ(EstimateDemand(100, true), kUnlimited);
  EXPECT_EQ(EstimateDemand(100, false), 125);
}

}  // namespace
}  // namespace forebay::control
