#include "core/capacity.h"

#include <gtest/gtest.h>

#include <algorithm>

#include "base/rng.h"

namespace forebay::control {
namespace {

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
