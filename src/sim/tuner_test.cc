// The tuner in its loop: scheduler, storage and consumer under virtual time.
#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <vector>

#include "base/rng.h"
#include "core/forebay_tuner.h"
#include "core/tuner_log.h"
#include "sim/node_sim.h"

namespace forebay::sim {
namespace {

constexpr double kBandwidth = 300e6;
constexpr uint32_t kSample = 100'000;
constexpr uint32_t kBatch = 8;
constexpr double kMost = kBandwidth / kSample;  // samples a second

struct Step {
  TuneObservation seen;
  TuneDecision decided;
};

struct Trace {
  std::vector<Step> steps;
  std::string log;

  const Step& At(double second) const {
    const auto at = static_cast<int64_t>(second * 1e9);
    const auto it = std::find_if(steps.begin(), steps.end(),
                                 [&](const Step& step) { return step.seen.now_ns >= at; });
    return it == steps.end() ? steps.back() : *it;
  }
  double Rate(double from, double to) const {  // samples a second
    const TuneObservation& a = At(from).seen;
    const TuneObservation& b = At(to).seen;
    return static_cast<double>(b.consumed_bytes - a.consumed_bytes) / kSample /
           (static_cast<double>(b.now_ns - a.now_ns) / 1e9);
  }
  double Reads(double from, double to) const {  // the median
    std::vector<size_t> reads;
    for (const Step& step : steps) {
      const double at = static_cast<double>(step.seen.now_ns) / 1e9;
      if (at >= from && at < to) reads.push_back(step.decided.reads);
    }
    std::nth_element(reads.begin(), reads.begin() + static_cast<int64_t>(reads.size() / 2),
                     reads.end());
    return static_cast<double>(reads[reads.size() / 2]);
  }
};

// Nothing is kept; `pace` is the consumer's share of the bandwidth, 0: it takes what comes.
NodeScenario Scenario(double latency_ms, double pace, double seconds) {
  NodeScenario s;
  s.keep = false;
  s.batch = kBatch;
  s.arena_bytes = uint64_t{128} << 20;
  s.lengths.assign(static_cast<size_t>(kMost * (pace > 0 ? pace : 1) * seconds), kSample);
  s.source.open = s.source.read = static_cast<Nanos>(latency_ms * static_cast<double>(kMilli));
  s.source.jitter = 0.1;
  s.source.bytes_per_s = kBandwidth;
  s.op_extra = 50 * kMicro;
  if (pace > 0) s.step = static_cast<Nanos>(kBatch / (pace * kMost) * 1e9);
  return s;
}

Trace Simulated(const NodeScenario& s) {
  Trace run;
  run.log = TuneLogHeader(
      {.policy = s.tuner, .max_reads = s.max_in_flight, .max_ahead_bytes = s.arena_bytes});
  const Result<NodeOutcome> out =
      SimulateNode(s, nullptr, nullptr, [&](const TuneObservation& seen, const TuneDecision& d) {
        run.steps.push_back({seen, d});
        run.log += TuneLogLine(seen, d);
      });
  EXPECT_TRUE(out) << out.status().ToString();
  return run;
}

double Needed(double latency_ms, double pace) {  // Little's law
  return kMost * (pace > 0 ? pace : 1) * (2 * latency_ms + 0.1) / 1e3;
}

TEST(TunerInLoop, FewReadsAndASmallBufferGiveWhatTheStorageHas) {
  for (const double ms : {0.2, 1.0, 5.0, 20.0}) {
    const Trace run = Simulated(Scenario(ms, 0, 9));
    EXPECT_GT(run.Rate(5, 9), 0.95 * kMost) << ms << " ms";
    EXPECT_LE(run.Reads(5, 9), std::max(3.0, 1.5 * Needed(ms, 0))) << ms << " ms";
    const uint64_t most = static_cast<uint64_t>(1.5 * Needed(ms, 0) + 3 * kBatch) * kSample;
    EXPECT_LE(run.At(9).decided.ahead_bytes, most) << ms << " ms";
  }
}

TEST(TunerInLoop, ASlowConsumerIsFedWithWhatItNeeds) {
  for (const double ms : {0.2, 1.0, 5.0, 20.0}) {
    for (const double pace : {0.3, 0.7}) {
      const Trace run = Simulated(Scenario(ms, pace, 8));
      EXPECT_GT(run.Rate(4, 8), 0.95 * pace * kMost) << ms << " ms, " << pace;
      EXPECT_LE(run.Reads(4, 8), std::max(2.0, 1.5 * Needed(ms, pace) + 1))
          << ms << " ms, " << pace;
      const uint64_t most = static_cast<uint64_t>(1.5 * Needed(ms, pace) + 3 * kBatch) * kSample;
      EXPECT_LE(run.At(8).decided.ahead_bytes, most) << ms << " ms, " << pace;
    }
  }
}

TEST(TunerInLoop, OpensWhenTheStorageSlowsDownAndClosesAgain) {
  for (const double pace : {0.0, 0.5}) {
    NodeScenario s = Scenario(1, pace, 9);
    s.change_at = 4 * kSecond;
    s.then = s.source;
    s.then.open = s.then.read = 20 * kMilli;
    const Trace slower = Simulated(s);
    const double most = (pace > 0 ? pace : 1) * kMost;
    EXPECT_LE(slower.Reads(2, 4), 3 * Needed(1, pace)) << pace;
    EXPECT_GT(slower.Rate(6, 9), 0.95 * most) << pace;
    EXPECT_GE(slower.Reads(6, 9), 0.9 * Needed(20, pace)) << pace;

    std::swap(s.source, s.then);
    s.lengths.resize(static_cast<size_t>(most * 13), kSample);
    const Trace faster = Simulated(s);
    EXPECT_GT(faster.Rate(5, 13), 0.95 * most) << pace;
    EXPECT_LE(faster.Reads(11, 13), 0.3 * Needed(20, pace)) << "it shrinks, too; " << pace;
  }
}

TEST(TunerInLoop, HitsOfTheFolderAreNotTakenForTheStoragesRate) {
  // How many of a window's reads are hits is chance; taken for the storage's rate, it made the
  // tuner search in the second epoch, at up to 7 % of it.
  for (const uint64_t percent : {10, 25}) {
    for (uint64_t seed = 0; seed < 12; ++seed) {
      NodeScenario s = Scenario(2, 0, 1);
      SplitMix64 rng(seed);
      s.lengths.resize(3000);
      uint64_t bytes = 0;
      for (uint32_t& length : s.lengths) {
        length = static_cast<uint32_t>(50'000 + rng.Below(120'000));
        bytes += length;
      }
      s.seed = s.source.seed = seed;
      s.source.bytes_per_s = kBandwidth / 2;
      s.batch = 64;
      s.epochs = 5;
      s.arena_bytes = uint64_t{52} << 20;
      s.folder = {
          .bytes = bytes * percent / 100, .read_bytes_per_s = 2e9, .write_bytes_per_s = 1e9};
      const Result<NodeOutcome> out = SimulateNode(s);
      ASSERT_TRUE(out) << out.status().ToString();
      for (size_t e = 1; e < s.epochs; ++e) {
        const double least = static_cast<double>(bytes - s.folder.bytes) / s.source.bytes_per_s;
        EXPECT_LT(out->epochs[e].seconds, 1.04 * least)
            << percent << " %, seed " << seed << ", epoch " << e;
      }
    }
  }
}

TEST(TunerInLoop, TheFirstBatchOfLargeSamplesDoesNotWaitForTheOthers) {
  // All that may be read ahead would share the pipe: the batch came after ten times its time.
  for (const double latency_ms : {1.0, 20.0}) {
    for (const size_t in_flight : {size_t{0}, ForebayTuner::kInitialReads}) {
      NodeScenario s;
      s.lengths.assign(200, 8'000'000);
      s.batch = 8;
      s.arena_bytes = uint64_t{2} << 30;
      s.source.open = s.source.read = static_cast<Nanos>(latency_ms * static_cast<double>(kMilli));
      s.source.bytes_per_s = kBandwidth;
      s.in_flight = in_flight;
      const Result<NodeOutcome> out = SimulateNode(s);
      ASSERT_TRUE(out) << out.status().ToString();
      const double pipe = 8 * 8e6 / kBandwidth;
      const double everything = 200 * 8e6 / kBandwidth;
      if (in_flight == 0) {
        EXPECT_LT(out->first_batch_seconds, 1.5 * pipe) << latency_ms;
        EXPECT_LT(out->epochs[0].seconds, 1.05 * everything) << latency_ms;
      } else {
        EXPECT_GT(out->first_batch_seconds, 2 * pipe) << "what it is for";
      }
    }
  }
}

TEST(TunerInLoop, WhatLookAheadDoesNotNeedIsKept) {
  struct Case {
    double budget, latency_ms, kept;
  };
  // Where the storage answers late, memory goes to look-ahead: an eighth of 72 MB for it made
  // epochs twice as long.
  for (const Case& c : {Case{170e6, 1, 0.8}, Case{170e6, 5, 0.8}, Case{72e6, 20, 0.4}}) {
    NodeScenario s;
    SplitMix64 rng(1);
    uint64_t total = 0;
    for (int i = 0; i < 5454; ++i) {
      s.lengths.push_back(55'000 + static_cast<uint32_t>(rng.Below(110'000)));
      total += s.lengths.back();
    }
    s.batch = c.budget < 100e6 ? 16 : 64;
    s.epochs = 3;
    s.arena_bytes = static_cast<uint64_t>(c.budget * 0.96);
    s.source.open = s.source.read = static_cast<Nanos>(c.latency_ms * static_cast<double>(kMilli));
    s.source.bytes_per_s = kBandwidth;
    const Result<NodeOutcome> out = SimulateNode(s);
    ASSERT_TRUE(out) << out.status().ToString();
    const auto kept = static_cast<double>(out->kept_bytes);
    EXPECT_GE(kept / c.budget, c.kept) << c.budget << " " << c.latency_ms;
    const double pipe = (static_cast<double>(total) - kept) / kBandwidth;
    EXPECT_LT(out->epochs[2].seconds, 1.15 * pipe) << c.budget << " " << c.latency_ms;
  }
}

TEST(TunerInLoop, FewReadsDoWhereOperationsAreShort) {
  // The operations are what is short: more reads only wait longer.
  NodeScenario s = Scenario(1, 0, 6);
  s.source.ops_per_s = 4000;  // 2,000 samples a second
  s.source.bytes_per_s = 0;
  const Trace run = Simulated(s);
  EXPECT_GT(run.Rate(4, 6), 0.95 * 2000);
  EXPECT_LE(run.Reads(4, 6), 8);
}

TEST(TunerInLoop, AsManyReadsAsItTakesOnOneCore) {
  NodeScenario s = Scenario(20, 0, 6);
  const Trace ours = Simulated(s);
  EXPECT_GT(ours.Reads(3, 6), 64);
  s.tuner = TunePolicy::kPrisma;  // knows of one core here
  s.lengths.resize(1000);
  EXPECT_EQ(Simulated(s).steps.back().decided.reads, 1u);
}

TEST(TunerInLoop, WaitsForAPauseToEnd) {
  // A consumer that computes for long on each epoch's last batch, as for a checkpoint.
  const Trace run = Simulated(Scenario(5, 0, 6));
  const std::unique_ptr<Tuner> tuner = MakeTuner({});
  TuneObservation seen;
  for (const Step& step : run.steps) tuner->Step(seen = step.seen);
  const TuneDecision before = tuner->decision();
  seen.in_flight = 0;
  for (int i = 0; i < 500; ++i) {
    seen.now_ns += 20'000'000;
    tuner->Step(seen);
  }
  EXPECT_EQ(tuner->decision(), before);
}

TEST(TunerInLoop, ARecordedLogReplaysToTheSameDecisions) {
  NodeScenario s = Scenario(1, 0.6, 6);
  s.source.tail_prob = 0.01;
  s.change_at = 3 * kSecond;
  s.then = s.source;
  s.then.read = 5 * kMilli;
  const Trace run = Simulated(s);
  const Result<TuneLog> log = ParseTuneLog(run.log);
  ASSERT_TRUE(log) << log.status().ToString();
  ASSERT_EQ(log->steps.size(), run.steps.size());
  const std::vector<TuneDecision> again = ReplayTuneLog(*log, log->options);
  size_t changes = 0;
  for (size_t i = 0; i < again.size(); ++i) {
    ASSERT_EQ(log->steps[i].seen, run.steps[i].seen) << i;
    ASSERT_EQ(again[i], run.steps[i].decided) << i;
    changes += i > 0 && again[i] != again[i - 1] ? 1 : 0;
  }
  EXPECT_GT(changes, 10u);
  TuneOptions other = log->options;
  other.policy = TunePolicy::kPrisma;
  EXPECT_NE(ReplayTuneLog(*log, other).back().reads, again.back().reads);
}

}  // namespace
}  // namespace forebay::sim
