#include "core/tuner.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "core/tuner_log.h"

namespace forebay {
namespace {

constexpr int64_t kMs = 1'000'000;
constexpr uint64_t kFile = 100'000;

TEST(TuneMeter, CountsWaitsWhileTheyLast) {
  TuneMeter meter;
  meter.OnWaiting(2, 10 * kMs);
  meter.OnWaiting(1, 15 * kMs);
  TuneObservation seen = meter.Observe({.consumers = 1}, 25 * kMs);
  EXPECT_EQ(seen.stall_ns, static_cast<uint64_t>(20 * kMs));
  EXPECT_EQ(seen.consumers, 1u);
  meter.OnWaiting(0, 26 * kMs);
  seen = meter.Observe({.consumers = 1}, 100 * kMs);
  EXPECT_EQ(seen.stall_ns, static_cast<uint64_t>(21 * kMs));
}

TEST(TuneMeter, TheLeastIsOfEachStep) {
  TuneMeter meter;
  meter.OnRequest(5 * kMs, Origin::kSource);
  meter.OnRequest(3 * kMs, Origin::kSource);
  meter.OnBytes(2 * kFile, Origin::kSource);
  meter.OnTake(kFile, 700);
  meter.OnTake(kFile, 300);
  TuneObservation seen = meter.Observe({.ready_bytes = 900}, 1);
  EXPECT_EQ(seen.reads, 2u);
  EXPECT_EQ(seen.read_bytes, 2 * kFile);
  EXPECT_EQ(seen.latency_ns, static_cast<uint64_t>(8 * kMs));
  EXPECT_EQ(seen.latency_low_ns, static_cast<uint64_t>(3 * kMs));
  EXPECT_EQ(seen.ready_low_bytes, 300u);
  EXPECT_EQ(seen.takes, 2u);
  seen = meter.Observe({.ready_bytes = 900}, 2);
  EXPECT_EQ(seen.latency_low_ns, 0u);
  EXPECT_EQ(seen.ready_low_bytes, 900u);
}

TEST(TuneMeter, HitsAreToldApart) {
  TuneMeter meter;
  meter.OnRequest(5 * kMs, Origin::kSource);
  meter.OnRequest(1 * kMs, Origin::kTier);
  meter.OnBytes(2 * kFile, Origin::kSource);
  meter.OnBytes(kFile, Origin::kTier);
  const TuneObservation seen = meter.Observe({}, 1);
  EXPECT_EQ(seen.reads, 2u);
  EXPECT_EQ(seen.hits, 1u);
  EXPECT_EQ(seen.read_bytes, 3 * kFile);
  EXPECT_EQ(seen.hit_bytes, kFile);
  EXPECT_EQ(seen.latency_ns, static_cast<uint64_t>(6 * kMs));
  EXPECT_EQ(seen.latency_low_ns, static_cast<uint64_t>(5 * kMs)) << "of the source";
}

// A storage of fixed latency and a consumer of fixed pace, step by step: enough to see what a rule
// makes of what it is told.
struct Observed {
  TuneObservation seen;
  // 20 ms in which `reads` of `latency` were answered and consumers waited for `stalled` of it.
  const TuneObservation& Pass(uint64_t reads, int64_t latency, double stalled) {
    seen.now_ns += 20 * kMs;
    seen.reads += reads;
    seen.read_bytes += reads * kFile;
    seen.latency_ns += reads * static_cast<uint64_t>(latency);
    seen.latency_low_ns = reads > 0 ? static_cast<uint64_t>(latency) : 0;
    seen.consumed_bytes += reads * kFile;
    seen.takes += reads > 0 ? 1 : 0;
    seen.stall_ns += static_cast<uint64_t>(stalled * 20 * kMs);
    seen.batch_bytes = 8 * kFile;
    return seen;
  }
};

TEST(ForebayTuner, ReadsInFlightAreNotReadiness) {
  // A buffer that is full of reads while a consumer waits: PRISMA's rule calls it full and stops.
  Observed observed;
  const std::unique_ptr<Tuner> ours = MakeTuner({.cores = 64});
  const std::unique_ptr<Tuner> theirs = MakeTuner({.policy = TunePolicy::kPrisma, .cores = 64});
  for (int i = 0; i < 1000; ++i) {
    observed.seen.in_flight = 10;
    observed.seen.ahead_bytes = 10 * kFile;
    observed.seen.ready_bytes = 0;
    // As many reads as are allowed, each of 20 ms.
    const uint64_t reads = std::min<uint64_t>(ours->decision().reads, 200);
    ours->Step(observed.Pass(reads, 20 * kMs, 1));
    theirs->Step(observed.seen);
  }
  EXPECT_GT(ours->decision().reads, 100u);
  EXPECT_LE(theirs->decision().reads, 2u);
  EXPECT_NE(theirs->decision().reason.find("stopped"), std::string::npos);
}

TEST(ForebayTuner, BacksOffWhenMoreReadsMakeTheStorageSlower) {
  Observed observed;
  const std::unique_ptr<Tuner> tuner = MakeTuner({});
  // 40 reads of 20 ms are best; more than that get into each other's way.
  for (int i = 0; i < 400; ++i) {
    const uint64_t n = tuner->decision().reads;
    const uint64_t done = n <= 40 ? n : 40 * 40 / n;
    tuner->Step(observed.Pass(done, static_cast<int64_t>(20 * kMs * n / done), 1));
  }
  EXPECT_GE(tuner->decision().reads, 30u);
  EXPECT_LE(tuner->decision().reads, 50u);
}

// A queue that others stand in, too: who leaves it for a moment has lost its place.
TEST(ForebayTuner, OfASharedSourceItComesDownInSteps) {
  for (const uint64_t shared : {0, 1}) {
    Observed observed;
    observed.seen.shared = shared;
    const std::unique_ptr<Tuner> tuner = MakeTuner({});
    size_t deepest = 0;
    for (int i = 0; i < 400; ++i) {
      const size_t before = tuner->decision().reads;
      observed.seen.in_flight = before;
      // 5 reads of 20 ms in a step, however many wait; the first found nobody waiting.
      const TuneObservation& seen =
          observed.Pass(5, static_cast<int64_t>(20 * kMs * before / 5), 1);
      observed.seen.latency_low_ns = static_cast<uint64_t>(kMs);
      const size_t after = tuner->Step(seen).reads;
      if (after < before && before > 4) deepest = std::max(deepest, before / after);
    }
    EXPECT_EQ(deepest > 2, shared == 0) << deepest;
  }
}

// Its share is the rate: that more reads bring no more bytes says nothing about the storage.
TEST(ForebayTuner, WhatWaitsForAShareKeepsItsReads) {
  Observed observed;
  const std::unique_ptr<Tuner> tuner = MakeTuner({});
  const auto pass = [&] {
    const size_t reads = tuner->decision().reads;
    observed.seen.in_flight = reads;
    tuner->Step(observed.Pass(5, static_cast<int64_t>(4 * kMs * reads), 1));
  };
  for (int i = 0; i < 400; ++i) pass();
  ASSERT_LT(tuner->decision().reads, 16u);  // alone, few do
  observed.seen.shared = 2;
  for (int i = 0; i < 400; ++i) {
    pass();
    if (i > 50) {
      ASSERT_EQ(tuner->decision().reads, 64u) << i;
    }
  }
  EXPECT_GE(tuner->decision().ahead_bytes, 64 * kFile);
  observed.seen.shared = 0;
  for (int i = 0; i < 400; ++i) pass();
  EXPECT_LT(tuner->decision().reads, 32u);
}

TEST(ForebayTuner, StartsAtOnce) {
  Observed observed;
  const std::unique_ptr<Tuner> tuner = MakeTuner({});
  const size_t first = tuner->decision().reads;
  int steps = 0;
  for (; steps < 50 && tuner->decision().reads < 4 * first; ++steps) {
    tuner->Step(observed.Pass(tuner->decision().reads, 20 * kMs, 1));
  }
  EXPECT_LT(steps, 15) << "of 20 ms";
}

TEST(ForebayTuner, WhatIsSetByHandStays) {
  Observed observed;
  const std::unique_ptr<Tuner> tuner = MakeTuner({});
  observed.seen.fixed_reads = 7;
  for (int i = 0; i < 200; ++i) {
    EXPECT_EQ(tuner->Step(observed.Pass(7, 20 * kMs, 1)).reads, 7u);
  }
  observed.seen.fixed_reads = 0;
  for (int i = 0; i < 200; ++i) {
    tuner->Step(observed.Pass(tuner->decision().reads, 20 * kMs, 1));
  }
  EXPECT_GT(tuner->decision().reads, 7u);
}

TEST(ForebayTuner, EveryChangeHasItsReason) {
  Observed observed;
  const std::unique_ptr<Tuner> tuner = MakeTuner({});
  for (int i = 0; i < 300; ++i) {
    const TuneDecision& d =
        tuner->Step(observed.Pass(std::min<size_t>(tuner->decision().reads, 90), 20 * kMs, i % 2));
    EXPECT_FALSE(d.reason.empty());
    EXPECT_EQ(d.reason.back(), '.');
    EXPECT_EQ(d.reason.find('\n'), std::string::npos);
  }
}

TEST(PrismaTuner, IsSilentThenAddsThreadsUpToTheCores) {
  Observed observed;
  const std::unique_ptr<Tuner> tuner = MakeTuner({.policy = TunePolicy::kPrisma, .cores = 3});
  while (observed.seen.now_ns < 14'900 * kMs) {
    EXPECT_EQ(tuner->Step(observed.Pass(5, kMs, 1)).reads, 1u);
  }
  for (int i = 0; i < 100; ++i) tuner->Step(observed.Pass(5, kMs, 1));
  EXPECT_EQ(tuner->decision().reads, 3u);
}

TEST(PrismaTuner, AnUnsteadyBufferGetsTenFilesMore) {
  Observed observed;
  const std::unique_ptr<Tuner> tuner = MakeTuner({.policy = TunePolicy::kPrisma, .cores = 3});
  observed.seen.now_ns = 1;
  for (int i = 0; i < 750; ++i) tuner->Step(observed.Pass(5, kMs, 0));
  const TuneDecision before = tuner->decision();
  size_t steps = 0;
  for (; steps < 20 && tuner->decision().ahead_bytes == before.ahead_bytes; ++steps) {
    observed.seen.ahead_bytes = steps % 2 == 0 ? 0 : tuner->decision().ahead_bytes;
    tuner->Step(observed.Pass(5, kMs, 0));
  }
  EXPECT_LE(steps, 6u);
  EXPECT_EQ(tuner->decision().reads, before.reads);
  EXPECT_EQ(tuner->decision().ahead_bytes, before.ahead_bytes + 10 * kFile);
}

TEST(TuneLog, DamagedLogsAreErrors) {
  const TuneOptions options{
      .policy = TunePolicy::kPrisma, .max_reads = 9, .max_ahead_bytes = 8, .cores = 7};
  TuneObservation seen;
  seen.now_ns = -5;
  seen.fixed_bytes = ~uint64_t{0};
  const TuneDecision decided{.reads = 3, .ahead_bytes = 4, .reason = "Because, and so on."};
  const std::string text = TuneLogHeader(options) + TuneLogLine(seen, decided);
  const Result<TuneLog> log = ParseTuneLog(text);
  ASSERT_TRUE(log) << log.status().ToString();
  EXPECT_EQ(log->options, options);
  ASSERT_EQ(log->steps.size(), 1u);
  EXPECT_EQ(log->steps[0].seen, seen);
  EXPECT_EQ(log->steps[0].decided, decided);
  const Result<TuneLog> cut = ParseTuneLog(std::string_view(text).substr(0, text.size() - 3));
  ASSERT_TRUE(cut);
  EXPECT_TRUE(cut->steps.empty()) << "a last line without its end";
  EXPECT_FALSE(ParseTuneLog(""));
  EXPECT_FALSE(ParseTuneLog("something else\n"));
  EXPECT_FALSE(ParseTuneLog("forebay-tuner 2 5 1 1 1\n"));
  EXPECT_FALSE(ParseTuneLog("forebay-tuner 2 0 0 1 1\n"));
  EXPECT_FALSE(ParseTuneLog(TuneLogHeader(options) + "1 2 3\n"));
}

}  // namespace
}  // namespace forebay
