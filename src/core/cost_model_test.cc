#include "core/cost_model.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <vector>

#include "base/rng.h"

namespace forebay {
namespace {

constexpr uint64_t kKiB = 1024;

// A storage whose answers depend on nothing but the read.
struct Simple {
  double fixed = 0;      // nanoseconds
  double per_byte = 0;   // nanoseconds
  double per_depth = 0;  // nanoseconds for each other read under way
  std::function<double(SplitMix64&)> noise = [](SplitMix64&) { return 1.0; };  // of mean 1

  double Mean(uint64_t bytes, size_t depth) const {
    return fixed + per_byte * static_cast<double>(bytes) +
           per_depth * static_cast<double>(depth - 1);
  }
  Nanos Draw(uint64_t bytes, size_t depth, SplitMix64& rng) const {
    return std::llround(Mean(bytes, depth) * noise(rng));
  }
};

double Uniform(SplitMix64& rng) { return 0.5 + rng.Uniform(); }
double Exponential(SplitMix64& rng) { return -std::log(1 - rng.Uniform()); }
// One read in a hundred takes ten times as long.
double Tailed(SplitMix64& rng) {
  const bool slow = rng.Uniform() < 0.01;
  return (0.7 + 0.6 * rng.Uniform()) * (slow ? 10 : 1) / 1.09;
}

// Half of the reads are answered by somebody's cache.
double Cached(SplitMix64& rng) {
  return (rng.Below(2) == 0 ? 0.2 : 1.8) * (0.8 + 0.4 * rng.Uniform());
}

uint64_t AnySize(SplitMix64& rng) { return 16 * kKiB + rng.Below(368 * kKiB); }

void Train(OriginModel& model, const Simple& storage, size_t depth, int reads, SplitMix64& rng) {
  for (int i = 0; i < reads; ++i) {
    const uint64_t bytes = AnySize(rng);
    model.OnRead(bytes, depth, storage.Draw(bytes, depth, rng));
  }
}

void ExpectClose(double got, double wanted, double share) {
  EXPECT_NEAR(got, wanted, share * wanted);
}

double AsDouble(Nanos latency) { return static_cast<double>(latency); }

// `depth` reads always in flight on storage with one pipe and a rate of operations.
struct Shared {
  double latency = 0;      // nanoseconds; the pipe works meanwhile
  double ns_per_byte = 0;  // of the pipe
  double ns_per_op = 0;    // between two operations
  bool bytes_after_latency = false;

  void Run(OriginModel& model, size_t depth, int reads, SplitMix64& rng,
           const std::function<uint64_t(SplitMix64&)>& size = AnySize) const {
    struct Flight {
      double end, begin;
      uint64_t bytes;
    };
    std::vector<Flight> flights;
    const auto later = [](const Flight& a, const Flight& b) { return a.end > b.end; };
    double now = 0;
    double pipe = 0;
    double ops = 0;
    const auto begin = [&] {
      const uint64_t bytes = size(rng);
      const double start = std::max(now, ops);
      ops = start + ns_per_op;
      const double moved = start + (bytes_after_latency ? latency : 0);
      pipe = std::max(pipe, moved) + ns_per_byte * static_cast<double>(bytes);
      const double answered = start + latency * (0.9 + 0.2 * rng.Uniform());
      flights.push_back({std::max(pipe, answered), now, bytes});
      std::push_heap(flights.begin(), flights.end(), later);
    };
    while (flights.size() < depth) begin();
    for (int i = 0; i < reads; ++i) {
      std::pop_heap(flights.begin(), flights.end(), later);
      const Flight done = flights.back();
      flights.pop_back();
      now = std::max(now, done.end);
      // The first ones met a storage that was idle.
      if (i >= static_cast<int>(2 * depth)) {
        model.OnRead(done.bytes, depth, std::llround(done.end - done.begin));
      }
      begin();
    }
  }
};

TEST(OriginModel, KnowsNothingAtFirst) {
  OriginModel model;
  EXPECT_FALSE(model.known());
  EXPECT_EQ(model.Tail(1000, 4), OriginModel::kNever);
  EXPECT_EQ(model.MergeGap(4), OriginModel::kMinGap);
  EXPECT_EQ(model.MergeBytes(4), OriginModel::kMinMerge);
  model.OnRead(1000, 1, kMilli);
  EXPECT_TRUE(model.known());
  EXPECT_EQ(model.Expect(1000, 1), kMilli);
  EXPECT_EQ(model.Expect(5000, 64), kMilli);
  EXPECT_DOUBLE_EQ(model.Rate(1000, 2), 2e6);
  EXPECT_EQ(model.Tail(1000, 1), OriginModel::kNever);
}

TEST(OriginModel, TakesAnyNumbers) {
  OriginModel model;
  for (int i = 0; i < 300; ++i) {
    model.OnRead(0, 0, 0);
    model.OnRead(~uint64_t{0}, ~size_t{0}, OriginModel::kNever);
  }
  EXPECT_GE(model.Expect(0, 0), 1);
  EXPECT_GE(model.Expect(~uint64_t{0}, ~size_t{0}), 1);
  EXPECT_GE(model.Tail(~uint64_t{0}, 1), 1);
  EXPECT_GE(model.MergeGap(0), OriginModel::kMinGap);
}

TEST(OriginModel, FindsTheFixedPartAndThatOfAByte) {
  for (uint64_t seed = 1; seed <= 20; ++seed) {
    SCOPED_TRACE(seed);
    SplitMix64 rng(seed);
    const Simple storage{.fixed = 2e6, .per_byte = 10, .noise = Uniform};
    OriginModel model;
    Train(model, storage, 1, 500, rng);
    Train(model, storage, 8, 3000, rng);
    const double small = AsDouble(model.Expect(32 * kKiB, 8));
    const double large = AsDouble(model.Expect(320 * kKiB, 8));
    ExpectClose(small, storage.Mean(32 * kKiB, 8), 0.1);
    ExpectClose(large, storage.Mean(320 * kKiB, 8), 0.1);
    ExpectClose((large - small) / (288 * kKiB), 10, 0.1);
    // 2 ms are worth 200,000 bytes.
    ExpectClose(static_cast<double>(model.MergeBytes(8)), 200000, 0.4);
  }
}

TEST(OriginModel, MeanUnderExponentialNoise) {
  for (uint64_t seed = 1; seed <= 20; ++seed) {
    SCOPED_TRACE(seed);
    SplitMix64 rng(seed);
    const Simple storage{.fixed = 1e6, .per_byte = 5, .noise = Exponential};
    OriginModel model;
    Train(model, storage, 4, 5000, rng);
    ExpectClose(AsDouble(model.Expect(200 * kKiB, 4)), storage.Mean(200 * kKiB, 4), 0.15);
  }
}

TEST(OriginModel, ReadsOfOneSizeDoNotTellTheCostOfAByte) {
  OriginModel model;
  SplitMix64 rng(5);
  const Simple storage{.fixed = 1e6, .per_byte = 5, .noise = Uniform};
  for (int i = 0; i < 2000; ++i) {
    model.OnRead(100 * kKiB, 1, storage.Draw(100 * kKiB, 1, rng));
  }
  EXPECT_EQ(model.Expect(kKiB, 1), model.Expect(1000 * kKiB, 1));
  EXPECT_EQ(model.MergeGap(1), OriginModel::kMinGap);
  EXPECT_EQ(model.MergeBytes(1), 200 * kKiB);  // one step, which shows it
  for (int i = 0; i < 2000; ++i) {
    const uint64_t bytes = (i % 4 == 0 ? 200 : 100) * kKiB;
    model.OnRead(bytes, 1, storage.Draw(bytes, 1, rng));
  }
  ExpectClose(static_cast<double>(model.MergeBytes(1)), 200000, 0.3);
}

TEST(OriginModel, LatencyThatGrowsWithDepth) {
  SplitMix64 rng(7);
  const Simple storage{.fixed = 1e6, .per_byte = 2, .per_depth = 5e5, .noise = Uniform};
  OriginModel model;
  for (int round = 0; round < 30; ++round) {
    for (const size_t depth : {1, 3, 4, 6, 16, 20, 64, 80}) Train(model, storage, depth, 60, rng);
  }
  for (const size_t depth : {1, 2, 4, 5, 8, 12, 24, 32, 50, 64}) {
    SCOPED_TRACE(depth);
    const double wanted = storage.Mean(100 * kKiB, depth);
    ExpectClose(AsDouble(model.Expect(100 * kKiB, depth)), wanted, 0.1);
    ExpectClose(model.Rate(100 * kKiB, depth),
                100.0 * kKiB * static_cast<double>(depth) / wanted * 1e9, 0.12);
  }
  // Nothing was seen beyond: as at the nearest depth.
  EXPECT_EQ(model.Expect(100 * kKiB, 4000), model.Expect(100 * kKiB, 300));
}

TEST(OriginModel, APipeThatIsFullGivesNoMoreToMoreReads) {
  SplitMix64 rng(8);
  const Shared storage{.latency = 5e6, .ns_per_byte = 5};  // 200 MB/s
  OriginModel model;
  for (const size_t depth : {1, 2, 4, 8, 16, 32, 64}) storage.Run(model, depth, 1000, rng);
  ExpectClose(model.Rate(200 * kKiB, 2), 2 * 200 * kKiB / 5e6 * 1e9, 0.1);
  ExpectClose(model.Rate(200 * kKiB, 32), 200e6, 0.1);
  ExpectClose(model.Rate(200 * kKiB, 64), 200e6, 0.1);
  // Unwanted bytes would only take the others' room; where the pipe idles they are free.
  EXPECT_LT(model.MergeGap(64), 30 * kKiB);
  EXPECT_GT(model.MergeGap(1), 200 * kKiB);
}

TEST(OriginModel, ReadsThatEachHaveTheirOwnPipeAreMerged) {
  SplitMix64 rng(9);
  const Simple storage{.fixed = 1e7, .per_byte = 10, .noise = Uniform};  // an object store
  OriginModel model;
  for (const size_t depth : {1, 4, 16, 64}) Train(model, storage, depth, 1000, rng);
  EXPECT_GT(model.MergeGap(64), 500 * kKiB);
  EXPECT_GT(model.MergeBytes(64), 500 * kKiB);
}

TEST(OriginModel, ALimitOfOperationsIsWorthMerging) {
  SplitMix64 rng(10);
  const Shared storage{.latency = 1e6, .ns_per_byte = 0.1, .ns_per_op = 1e6};
  OriginModel model;
  for (const size_t depth : {1, 4, 16, 64}) storage.Run(model, depth, 1000, rng);
  EXPECT_GT(model.MergeBytes(64), 1000 * kKiB);
}

TEST(OriginModel, FollowsAChangeWithin64Reads) {
  for (const auto& noise : {Uniform, Tailed}) {
    // Two reads of 64 that take ten times as long make up a quarter of the mean.
    const double close = noise == &Uniform ? 0.25 : 0.5;
    for (uint64_t seed = 1; seed <= 20; ++seed) {
      SCOPED_TRACE(seed);
      SplitMix64 rng(seed);
      const Simple fast{.fixed = 1e6, .per_byte = 1, .per_depth = 1e5, .noise = noise};
      const Simple slow{.fixed = 2e7, .per_byte = 20, .per_depth = 2e6, .noise = noise};
      OriginModel model;
      Train(model, fast, 2, 500, rng);
      Train(model, fast, 16, 500, rng);
      Train(model, slow, 16, 64, rng);
      ExpectClose(AsDouble(model.Expect(200 * kKiB, 16)), slow.Mean(200 * kKiB, 16), close);
      // No read was made there since; it went the same way.
      ExpectClose(AsDouble(model.Expect(200 * kKiB, 2)), slow.Mean(200 * kKiB, 2), 0.5);
      Train(model, slow, 16, 500, rng);
      Train(model, fast, 16, 64, rng);
      ExpectClose(AsDouble(model.Expect(200 * kKiB, 16)), fast.Mean(200 * kKiB, 16), close);
      ExpectClose(AsDouble(model.Expect(200 * kKiB, 2)), fast.Mean(200 * kKiB, 2), 0.7);
      // The slow reads of the transition are no part of what is usual.
      Train(model, fast, 16, 500, rng);
      EXPECT_LT(model.Tail(200 * kKiB, 16), 60 * fast.Mean(200 * kKiB, 16));
    }
  }
}

TEST(OriginModel, FollowsAChangeRightAfterAnother) {
  SplitMix64 rng(3);
  const Simple fast{.fixed = 1e6, .per_byte = 1, .noise = Uniform};
  const Simple slow{.fixed = 2e7, .per_byte = 1, .noise = Uniform};
  OriginModel model;
  Train(model, fast, 8, 60, rng);
  for (int round = 0; round < 10; ++round) {
    Train(model, slow, 8, 64, rng);
    ExpectClose(AsDouble(model.Expect(200 * kKiB, 8)), slow.Mean(200 * kKiB, 8), 0.35);
    Train(model, fast, 8, 64, rng);
    ExpectClose(AsDouble(model.Expect(200 * kKiB, 8)), fast.Mean(200 * kKiB, 8), 0.35);
  }
}

TEST(OriginModel, NoiseIsNoChange) {
  for (const auto& noise : {Uniform, Exponential, Tailed, Cached}) {
    SplitMix64 rng(4);
    const Simple storage{.fixed = 1e6, .per_byte = 2, .per_depth = 1e5, .noise = noise};
    OriginModel model;
    Train(model, storage, 1, 1000, rng);
    const double before = AsDouble(model.Expect(200 * kKiB, 1));
    // Every change that is believed by mistake would move what is known of the other depth.
    Train(model, storage, 32, 30000, rng);
    ExpectClose(AsDouble(model.Expect(200 * kKiB, 1)), before, 0.1);
  }
}

TEST(OriginModel, ADepthThatIsNoLongerUsedIsForgottenAtLast) {
  SplitMix64 rng(6);
  const Simple storage{.fixed = 1e6, .per_byte = 0, .per_depth = 1e6};
  OriginModel model;
  Train(model, storage, 1, 100, rng);
  Train(model, storage, 32, 60000, rng);
  EXPECT_LT(model.Expect(kKiB, 1), 2 * kMilli);
  Train(model, storage, 32, 10000, rng);
  EXPECT_EQ(model.Expect(kKiB, 1), model.Expect(kKiB, 32));
}

TEST(OriginModel, TheTailIsFarBeyondWhatReadsTake) {
  for (const auto& noise : {Uniform, Exponential, Tailed, Cached}) {
    for (uint64_t seed = 1; seed <= 5; ++seed) {
      SCOPED_TRACE(seed);
      SplitMix64 rng(seed);
      const Simple storage{.fixed = 1e6, .per_byte = 2, .noise = noise};
      OriginModel model;
      int beyond = 0;
      constexpr int kReads = 30000;
      for (int i = 0; i < kReads; ++i) {
        const uint64_t bytes = AnySize(rng);
        const size_t depth = 1 + rng.Below(20);
        const Nanos latency = storage.Draw(bytes, depth, rng);
        beyond += latency > model.Tail(bytes, depth) ? 1 : 0;
        model.OnRead(bytes, depth, latency);
      }
      EXPECT_LE(beyond, kReads / 1000);
      EXPECT_LT(AsDouble(model.Tail(100 * kKiB, 4)), 100 * storage.Mean(100 * kKiB, 4));
      // A few that hang do not become usual.
      for (int i = 0; i < 3; ++i) model.OnRead(100 * kKiB, 4, 100 * kSecond);
      Train(model, storage, 4, 100, rng);
      EXPECT_LT(AsDouble(model.Tail(100 * kKiB, 4)), 100 * storage.Mean(100 * kKiB, 4));
      ExpectClose(AsDouble(model.Expect(200 * kKiB, 4)), storage.Mean(200 * kKiB, 4), 0.3);
    }
  }
}

// Whatever the storage, what the model says of a depth that it saw is near what the reads took.
TEST(OriginModel, RandomStorages) {
  for (uint64_t seed = 1; seed <= 60; ++seed) {
    SCOPED_TRACE(seed);
    SplitMix64 rng(seed);
    const Shared storage{.latency = 1e4 * std::exp2(11 * rng.Uniform()),
                         .ns_per_byte = 0.05 * std::exp2(8 * rng.Uniform()),
                         .ns_per_op = rng.Below(3) == 0 ? 1e3 * std::exp2(8 * rng.Uniform()) : 0,
                         .bytes_after_latency = rng.Below(2) == 0};
    OriginModel model;
    for (int visit = 0; visit < 12; ++visit) {
      const auto depth = static_cast<size_t>(1 + rng.Below(uint64_t{2} << rng.Below(7)));
      storage.Run(model, depth, 800, rng);
      OriginModel alone;
      storage.Run(alone, depth, 4000, rng);
      for (const uint64_t bytes : {64 * kKiB, 200 * kKiB, 350 * kKiB}) {
        const double wanted = AsDouble(alone.Expect(bytes, depth));
        // Depths of one power of two share what is known.
        ExpectClose(AsDouble(model.Expect(bytes, depth)), wanted, 0.5);
        EXPECT_GT(model.Tail(bytes, depth), 7 * model.Expect(bytes, depth));
      }
      for (const size_t any : {1, 7, 100}) {
        EXPECT_GE(model.MergeGap(any), OriginModel::kMinGap);
        EXPECT_LE(model.MergeGap(any), OriginModel::kMaxGap);
        EXPECT_GE(model.MergeBytes(any), OriginModel::kMinMerge);
        EXPECT_LE(model.MergeBytes(any), OriginModel::kMaxMerge);
      }
    }
  }
}

}  // namespace
}  // namespace forebay
