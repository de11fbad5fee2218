// Limits of jobs in the scheduler, in virtual time: reads take a while, consumers take batches as
// fast as they come.
#include <gtest/gtest.h>

#include <map>
#include <queue>
#include <string>
#include <vector>

#include "base/rng.h"
#include "core/sampler.h"
#include "core/scheduler.h"
#include "core/scheduler_check.h"
#include "core/waits.h"

namespace forebay {
namespace {

using Take = Scheduler::Take;

constexpr uint32_t kSample = 10'000;

class Node {
 public:
  explicit Node(uint64_t arena = 64 << 20, bool keep = false)
      : scheduler({.arena_bytes = arena, .keep = keep}) {}

  StreamId Open(const std::string& job, DatasetId dataset, uint32_t batch = 8, uint64_t seed = 1) {
    StreamShape shape;
    shape.dataset = dataset;
    shape.batch_size = batch;
    shape.job = job;
    const StreamId id = scheduler.OpenStream(shape);
    specs_[id] = {.size = samples_[dataset], .seed = seed};
    return id;
  }
  DatasetId AddDataset(uint32_t samples) {
    samples_.push_back(samples);
    return scheduler.AddDataset(std::vector<uint32_t>(samples, kSample));
  }

  // Until `until`: every stream of `eager` takes and gives back batches without a pause.
  void Run(Nanos until, const std::vector<StreamId>& eager) {
    while (now < until) {
      bool progress = true;
      for (int i = 0; progress && i < 32; ++i) {  // kept samples come without end
        progress = false;
        for (const StreamId id : eager) progress |= TakeOne(id);
        Pump();
      }
      for (const StreamId id : eager) {
        ++causes[{id, Waits(scheduler).CauseOfStream(id)}];
      }
      Nanos next = std::min(until, scheduler.jobs().wake_at());
      if (!events_.empty()) next = std::min(next, events_.top().at);
      ASSERT_GT(next, now - 1);
      now = std::max(now + 1, next);
      while (!events_.empty() && events_.top().at <= now) {
        const ReadAction read = events_.top().read;
        events_.pop();
        scheduler.OnReadDone(read, true, read.sample + 1, from);
      }
      if (++steps % 64 == 0) {
        ASSERT_EQ(CheckInvariants(scheduler), "");
      }
    }
  }

  bool TakeOne(StreamId id) {
    Scheduler::Handout out;
    const Take take = scheduler.leases().TakeBatch(id, &out);
    if (take == Take::kReady) {
      bytes[id] += out.samples.size() * kSample;
      scheduler.leases().Release(out.lease);
    }
    return take == Take::kReady || take == Take::kEndOfEpoch;
  }

  void Pump() {
    scheduler.Advance(now);
    std::vector<ReadAction> reads;
    do {
      for (const OrderAction& a : scheduler.lookahead().TakeOrders()) {
        scheduler.ExtendOrder(a.stream, a.generation, a.epoch,
                              EpochOrder(specs_.at(a.stream), a.epoch, a.first_position), false);
      }
      reads.clear();
      scheduler.leases().NextReads(slots, &reads);
      for (const ReadAction& read : reads) {
        started += read.length;
        ++started_of[read.sample];
        busy_until_ = std::max(busy_until_, now) + service;
        events_.push({std::max(now + kMilli, busy_until_), read});
      }
    } while (!reads.empty());
  }

  JobStats Stats(const std::string& job) {
    for (JobStats& stats : scheduler.jobs().TakeStats()) {
      if (stats.name == job) return stats;
    }
    return {};
  }

  Scheduler scheduler;
  Nanos now = 0;
  size_t slots = 64;                   // requests at once, a millisecond each
  Nanos service = 0;                   // of a source that does one after the other
  Origin from = Origin::kSource;       // where reads turn out to come from
  std::map<StreamId, uint64_t> bytes;  // handed out
  std::map<SampleId, int> started_of;
  uint64_t started = 0;
  uint64_t steps = 0;
  std::map<std::pair<StreamId, StallCause>, int> causes;

 private:
  struct Event {
    Nanos at;
    ReadAction read;
    bool operator<(const Event& o) const { return at > o.at; }
  };
  std::vector<uint32_t> samples_;
  std::map<StreamId, SamplerSpec> specs_;
  std::priority_queue<Event> events_;
  Nanos busy_until_ = 0;
};

JobLimits Bytes(double rate) { return {.source = {rate, kUnlimited}}; }

TEST(JobLimits, HoldForUrgentReadsAndLookAhead) {
  Node node;
  const StreamId a = node.Open("a", node.AddDataset(4'000));
  const StreamId b = node.Open("b", node.AddDataset(4'000));
  node.scheduler.SetJobLimits("a", Bytes(30e6));
  node.scheduler.SetJobLimits("b", Bytes(10e6));
  node.Run(2 * kSecond, {a, b});
  // A burst of 50 ms, and a batch that is not complete.
  EXPECT_NEAR(static_cast<double>(node.bytes[a]), 60e6, 2e6);
  EXPECT_NEAR(static_cast<double>(node.bytes[b]), 20e6, 1e6);
  EXPECT_GT((node.causes[{a, StallCause::kShare}]), (node.causes[{a, StallCause::kSource}]));
  const JobStats stats = node.Stats("a");
  EXPECT_TRUE(stats.held_back.bytes);
  EXPECT_FALSE(stats.held_back.operations);
  EXPECT_NEAR(static_cast<double>(stats.bytes), 60e6, 2e6);
  EXPECT_GT(stats.held, kSecond);
  EXPECT_GT(stats.waited, kSecond);
}

TEST(JobLimits, DoNotSlowOthersDown) {
  Node node;
  const StreamId a = node.Open("a", node.AddDataset(4'000));
  const StreamId b = node.Open("b", node.AddDataset(4'000));
  node.scheduler.SetJobLimits("a", Bytes(1e6));
  node.Run(kSecond, {a, b});
  EXPECT_LT(node.bytes[a], 1.2e6);
  EXPECT_GT(node.bytes[b], 500e6);  // 64 reads a millisecond
  EXPECT_EQ((node.causes[{b, StallCause::kShare}]), 0);
}

TEST(JobLimits, StreamsOfOneJobTakeTurns) {
  Node node;
  const DatasetId d = node.AddDataset(4'000);
  std::vector<StreamId> streams;
  for (uint64_t i = 0; i < 8; ++i) streams.push_back(node.Open("job", d, 8, i));
  node.scheduler.SetJobLimits("job", Bytes(40e6));
  node.Run(2 * kSecond, streams);
  for (const StreamId id : streams) {
    EXPECT_NEAR(static_cast<double>(node.bytes[id]), 10e6, 3e6) << id;
  }
}

TEST(JobLimits, ASampleThatTwoJobsWantIsChargedOnce) {
  Node node(64 << 20, true);
  const DatasetId d = node.AddDataset(2'000);
  const StreamId a = node.Open("a", d);
  const StreamId b = node.Open("b", d);
  node.scheduler.SetJobLimits("a", Bytes(5e6));
  node.scheduler.SetJobLimits("b", Bytes(5e6));
  node.Run(6 * kSecond, {a, b});
  EXPECT_EQ(node.started, 2'000u * kSample);
  EXPECT_EQ(node.Stats("a").bytes + node.Stats("b").bytes, 2'000u * kSample);
}

TEST(JobLimits, WhatTheFolderHasIsFree) {
  for (const bool known : {true, false}) {
    Node node;
    node.from = Origin::kTier;
    const DatasetId d = node.AddDataset(4'000);
    node.scheduler.residency().dataset(d).tier = {.present = true, .holds_all = true};
    for (SampleId s = 0; known && s < 4'000; ++s) node.scheduler.residency().SetInTier(d, s, true);
    const StreamId a = node.Open("a", d);
    node.scheduler.SetJobLimits("a", Bytes(1e6));
    node.Run(kSecond, {a});
    EXPECT_GT(node.bytes[a], known ? 300e6 : 3e6);  // what was not known is given back
    EXPECT_EQ(node.Stats("a").bytes, 0u);
  }
}

// The limits add up to a tenth more than the source can give.
TEST(JobLimits, SharesHoldWhereRequestsAreShort) {
  Node node(8 << 20);
  node.slots = 16;
  node.service = 250 * kMicro;
  const StreamId a = node.Open("a", node.AddDataset(4'000));
  const StreamId b = node.Open("b", node.AddDataset(4'000));
  node.scheduler.SetJobLimits("a", Bytes(33e6));
  node.scheduler.SetJobLimits("b", Bytes(11e6));
  node.Run(kSecond, {a, b});
  const uint64_t before[] = {node.bytes[a], node.bytes[b]};
  node.Run(3 * kSecond, {a, b});
  const auto of_a = static_cast<double>(node.bytes[a] - before[0]);
  const auto of_b = static_cast<double>(node.bytes[b] - before[1]);
  EXPECT_NEAR(of_a / (of_a + of_b), 0.75, 0.01);
}

TEST(JobLimits, OfAllJobsTogether) {
  Node node;
  const StreamId a = node.Open("a", node.AddDataset(4'000));
  const StreamId b = node.Open("", node.AddDataset(4'000));
  node.scheduler.jobs().SetNodeLimits({kUnlimited, 1000});
  node.Run(2 * kSecond, {a, b});
  EXPECT_NEAR(static_cast<double>(node.bytes[a] + node.bytes[b]), 2000.0 * kSample, 1.5e6);
  EXPECT_GT(node.bytes[a], 5e6);
  EXPECT_GT(node.bytes[b], 5e6);
}

TEST(JobLimits, ChangeAtOnce) {
  Node node;
  const StreamId a = node.Open("a", node.AddDataset(4'000));
  node.scheduler.SetJobLimits("a", Bytes(1e6));
  node.Run(kSecond, {a});
  EXPECT_LT(node.bytes[a], 1.2e6);
  node.scheduler.SetJobLimits("a", {});
  node.Run(2 * kSecond, {a});
  EXPECT_GT(node.bytes[a], 500e6);
}

// Memory for two batches and a bit: what is held back must not keep the others, nor itself, from
// room.
TEST(JobLimits, SmallMemoryDeadlocksNobody) {
  for (uint64_t seed = 1; seed <= 20; ++seed) {
    SplitMix64 rng(seed);
    Node node(uint64_t{kSample} * (40 + rng.Below(20)), rng.Below(2) == 0);
    const DatasetId d = node.AddDataset(400);
    std::vector<StreamId> streams;
    for (int i = 0; i < 3; ++i) {
      streams.push_back(node.Open(std::string(1, static_cast<char>('a' + i)), d, 16, rng.Next()));
    }
    node.scheduler.SetJobLimits("a", Bytes(1e6 + rng.Uniform() * 4e6));
    node.scheduler.SetJobLimits("b", Bytes(1e6));
    node.Run(4 * kSecond, streams);
    for (const StreamId id : streams) EXPECT_GT(node.bytes[id], 1e6) << seed << " " << id;
  }
}

TEST(JobLimits, TheMemoryTierHasAQuotaForEachJob) {
  Node node(64 << 20, true);
  const StreamId a = node.Open("a", node.AddDataset(1'000));
  const StreamId b = node.Open("b", node.AddDataset(1'000));
  node.scheduler.SetJobLimits("a", {.memory_bytes = 1 << 20});
  node.Run(kSecond, {a, b});
  EXPECT_LE(node.Stats("a").kept_bytes, 1u << 20);
  EXPECT_GT(node.Stats("a").kept_bytes, 900u << 10);
  EXPECT_GE(node.Stats("b").kept_bytes, 1'000u * kSample);
  node.scheduler.SetJobLimits("b", {.memory_bytes = 2 << 20});
  EXPECT_LE(node.Stats("b").kept_bytes, 2u << 20);
  EXPECT_EQ(CheckInvariants(node.scheduler), "");
}

TEST(JobTable, YieldsToWhoHasGotLessButNotForLongAndToNobodyWithoutALimit) {
  JobTable jobs;
  const JobId a = jobs.Open("a");
  const JobId b = jobs.Open("b");
  const JobId free = jobs.Open("free");
  jobs.SetLimits(a, {.source = {1e6, kUnlimited}}, 0);
  jobs.SetLimits(b, {.source = {1e6, kUnlimited}}, 0);
  jobs.Charge(b, 10'000);
  jobs.Charge(a, 100'000);
  const auto round = [&](Nanos now, JobId waits) {
    jobs.MarkWaiting(waits);
    jobs.BeginRound(now);
  };
  round(kMilli, free);
  EXPECT_FALSE(jobs.ShouldYield(a)) << "one without a limit has no share to be behind with";
  round(2 * kMilli, b);
  EXPECT_TRUE(jobs.ShouldYield(a));
  EXPECT_FALSE(jobs.ShouldYield(b));
  round(50 * kMilli, b);
  EXPECT_TRUE(jobs.ShouldYield(a));
  round(200 * kMilli, b);
  EXPECT_FALSE(jobs.ShouldYield(a)) << "b waits for something else";
  jobs.Charge(a, 1);
  EXPECT_TRUE(jobs.ShouldYield(a)) << "it has had its turn";
}

TEST(JobTable, WhoTheNodesLimitHoldsBackWantsMore) {
  JobTable jobs;
  const JobId a = jobs.Open("a");
  jobs.SetNodeLimits({1e6, kUnlimited});
  EXPECT_TRUE(jobs.Ready(a, 0));
  jobs.Charge(a, 1'000'000);
  EXPECT_FALSE(jobs.Ready(a, kMilli));
  jobs.BeginRound(2 * kMilli);
  const auto stats = jobs.TakeStats();
  ASSERT_EQ(stats.size(), 1u);
  EXPECT_TRUE(stats[0].held_back.bytes);
  EXPECT_FALSE(jobs.TakeStats()[0].held_back.bytes);
}

TEST(JobTable, ForgetsJobsThatHaveGone) {
  JobTable jobs;
  const JobId a = jobs.Open("a");
  EXPECT_EQ(jobs.Open("a"), a);
  jobs.SetLimits(a, {.memory_bytes = 7}, 0);
  jobs.Close(a);
  EXPECT_EQ(jobs.TakeStats().size(), 1u);
  jobs.Close(a);
  EXPECT_TRUE(jobs.TakeStats().empty());
  EXPECT_EQ(jobs.Open("b"), a);
  EXPECT_EQ(jobs.stats(a).limits, JobLimits());
  EXPECT_EQ(jobs.Find("a"), kNoJob);
  for (int i = 0; i < 70'000; ++i) (void)jobs.Open(std::to_string(i % 1000));
  EXPECT_EQ(jobs.size(), 1002u);
}

}  // namespace
}  // namespace forebay
