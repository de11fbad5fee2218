// A second tier that stops answering in the middle of an epoch, in virtual time: its reads never
// end, or end very late; the driver leaves it and comes back, as the engine does with PlaceWatch.
#include <gtest/gtest.h>

#include <algorithm>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "base/rng.h"
#include "core/place_watch.h"
#include "core/sampler.h"
#include "core/scheduler.h"
#include "core/scheduler_check.h"

namespace forebay {
namespace {

using Take = Scheduler::Take;
constexpr uint32_t kSize = 1000;
constexpr Nanos kRead = 5 * kMilli;
constexpr size_t kThreads = 4;  // that read from the folder

// The folder reads four at a time, as a real one; while it hangs, those it has begun do not end.
class Node {
 public:
  Node(uint64_t seed, uint32_t samples, Scheduler::Options options)
      : rng_(seed), scheduler(options) {
    scheduler.AddDataset(std::vector<uint32_t>(samples, kSize));
    scheduler.residency().dataset(0).tier = {.present = true, .holds_all = true};
    for (SampleId s = 0; s < samples; ++s) scheduler.residency().SetInTier(0, s, true);
    spec_ = {.size = samples, .shuffle = true, .seed = seed};
    stream_ = scheduler.OpenStream({.batch_size = 8, .whole = true});
  }

  // One epoch; `hangs_at` and `answers_at` are batches, -1: never.
  void RunEpoch(uint64_t epoch, int hangs_at = -1, int answers_at = -1) {
    const std::vector<SampleId> order = EpochOrder(spec_, epoch);
    Scheduler::Handout h;
    size_t at = 0;
    for (int batch = 0; at < order.size(); ++batch) {
      if (batch == hangs_at) hangs = true;
      if (batch == answers_at) Answer();
      ASSERT_EQ(TakeNow(&h), Take::kReady);
      for (const SampleId s : h.samples) ASSERT_EQ(s, order[at++]);
      scheduler.leases().Release(h.lease);
      ASSERT_EQ(CheckInvariants(scheduler), "");
    }
    ASSERT_EQ(TakeNow(&h), Take::kEndOfEpoch);
  }

  // What hung ends now.
  void Answer() {
    hangs = false;
    for (Flying& read : reading_) read.end = now + kRead;
  }

  SplitMix64 rng_;
  Scheduler scheduler;
  PlaceWatch watch;
  Nanos now = 1000 * kSecond;
  Nanos longest_wait = 0;
  bool hangs = false;
  uint64_t from_source = 0;
  uint64_t from_tier = 0;
  std::vector<ReadAction> hedges;

 private:
  struct Flying {
    ReadAction action;
    Nanos end = 0;
    bool passed = false;
  };

  Take TakeNow(Scheduler::Handout* out) {
    const Nanos asked = now;
    for (int i = 0; i < 100'000; ++i) {
      const Take t = scheduler.leases().TakeBatch(stream_, out);
      Pump();
      if (t != Take::kPending) {
        longest_wait = std::max(longest_wait, now - asked);
        return t;
      }
      now += kMilli;
      scheduler.Advance(now);
      End();
      Look();
    }
    ADD_FAILURE() << "no progress";
    return Take::kPending;
  }

  void Pump() {
    for (const OrderAction& a : scheduler.lookahead().TakeOrders()) {
      scheduler.ExtendOrder(a.stream, a.generation, a.epoch,
                            EpochOrder(spec_, a.epoch, a.first_position), false);
    }
    std::vector<ReadAction> reads;
    scheduler.leases().NextReads(32, &reads);
    for (const ReadAction& read : reads) Begin(read);
  }

  void Begin(const ReadAction& read) {
    if (read.origin == Origin::kTier && read.likely == Origin::kTier) {
      EXPECT_FALSE(watch.left()) << "it is passed by";
      if (queued_.empty() && reading_.empty()) silent_since_ = now;
      queued_.push_back(read);
    } else {
      source_.push_back({read, now + kRead + static_cast<Nanos>(rng_.Below(kRead))});
    }
  }

  void End() {
    while (!queued_.empty() && reading_.size() < kThreads) {
      reading_.push_back({queued_.front(), hangs ? OriginModel::kNever : now + kMilli});
      queued_.erase(queued_.begin());
    }
    if (!hangs) EndDue(reading_, Origin::kTier);
    EndDue(source_, Origin::kSource);
  }

  void EndDue(std::vector<Flying>& reads, Origin from) {
    for (size_t i = 0; i < reads.size();) {
      if (reads[i].end > now) {
        ++i;
        continue;
      }
      Flying read = reads[i];
      reads.erase(reads.begin() + static_cast<ptrdiff_t>(i));
      if (from == Origin::kTier) silent_since_ = now;
      ++(from == Origin::kTier ? from_tier : from_source);
      if (read.passed) read.action.origin = Origin::kSource;
      scheduler.OnReadDone(read.action, true, read.action.sample + 1, from);
    }
  }

  void Look() {
    const Nanos patience = PlaceWatch::Patience(10 * kMilli, 2 * kRead);
    const bool owed = !queued_.empty() || !reading_.empty();
    if (watch.Suspects(now, owed ? now - silent_since_ : 0, patience)) {
      scheduler.SetTierLeft(true);
      for (const ReadAction& read : queued_) source_.push_back({read, now + kRead, true});
      queued_.clear();
    }
    if (!watch.left()) return;
    for (const Flying& stuck : reading_) {
      ReadAction second;
      if (!scheduler.Hedge(stuck.action, &second, true)) continue;
      hedges.push_back(second);
      source_.push_back({second, now + kRead});
    }
    if (watch.ProbeDue(now)) {
      watch.OnProbeSent();
      probe_sent_ = now;
    }
    if (probe_sent_ != 0 && !hangs) {
      const Nanos took = now - std::exchange(probe_sent_, 0);
      if (watch.OnProbeAnswered(now, took, patience)) scheduler.SetTierLeft(false);
    }
  }

  SamplerSpec spec_;
  StreamId stream_ = 0;
  std::vector<ReadAction> queued_;
  std::vector<Flying> reading_;
  std::vector<Flying> source_;
  Nanos silent_since_ = 0;
  Nanos probe_sent_ = 0;
};

constexpr Scheduler::Options kNoMemoryTier = {.arena_bytes = 300 * kSize, .keep = false};

TEST(LeftTier, AnEpochGoesOnFromTheSource) {
  for (uint64_t seed = 0; seed < 20; ++seed) {
    Node node(seed, 400, kNoMemoryTier);
    node.RunEpoch(0);
    EXPECT_EQ(node.from_source, 0u);
    node.RunEpoch(1, 10 + static_cast<int>(seed));
    EXPECT_TRUE(node.watch.left());
    EXPECT_LE(node.longest_wait, PlaceWatch::kLeastPatience + 10 * kRead);
    EXPECT_EQ(node.hedges.size(), kThreads) << "those that were being read, and no others";
    node.longest_wait = 0;
    node.RunEpoch(2);
    EXPECT_LE(node.longest_wait, 20 * kRead) << "nobody waits for it any more";
    EXPECT_EQ(node.hedges.size(), kThreads);
  }
}

TEST(LeftTier, ItIsUsedAgainWithAllThatItHas) {
  for (uint64_t seed = 0; seed < 20; ++seed) {
    Node node(seed, 400, kNoMemoryTier);
    node.RunEpoch(0);
    node.RunEpoch(1, 5, 20);
    uint64_t epoch = 2;
    while (node.watch.left() && epoch < 40) node.RunEpoch(epoch++);
    EXPECT_FALSE(node.watch.left());
    node.RunEpoch(epoch++);  // what was read ahead meanwhile
    const uint64_t before = node.from_source;
    node.RunEpoch(epoch);
    EXPECT_EQ(node.from_source, before) << "what was passed by is still known to be there";
  }
}

// The limit of one in 200 is for places that are not left.
TEST(LeftTier, ItsSecondReadsAreNotLimited) {
  Node node(3, 400, kNoMemoryTier);
  node.RunEpoch(0, 0);
  EXPECT_EQ(node.hedges.size(), kThreads) << "of very few reads";
  const SchedulerCounters& counters = node.scheduler.counters();
  EXPECT_EQ(counters.hedged, kThreads);
  EXPECT_EQ(counters.hedged_left, kThreads);
}

TEST(LeftTier, CopiesAreNotWaitedFor) {
  Scheduler scheduler({.arena_bytes = 64 * kSize, .keep = false});
  scheduler.AddDataset(std::vector<uint32_t>(64, kSize));
  scheduler.residency().dataset(0).tier = {.present = true, .holds_all = true};
  const StreamId stream = scheduler.OpenStream({.batch_size = 8, .whole = true});
  std::vector<SampleId> order(64);
  for (SampleId s = 0; s < 64; ++s) order[s] = s;
  for (const OrderAction& a : scheduler.lookahead().TakeOrders()) {
    scheduler.ExtendOrder(stream, a.generation, a.epoch, order, false);
  }
  std::vector<ReadAction> reads;
  scheduler.leases().NextReads(16, &reads);
  for (const ReadAction& read : reads) scheduler.OnReadDone(read, true, 1, Origin::kSource);
  StoreAction store;
  ASSERT_TRUE(scheduler.stores().First(&store));
  scheduler.stores().Begin(store);
  scheduler.stores().OnTaken(store);
  ASSERT_TRUE(scheduler.stores().Awaits(store.dataset, store.sample));
  scheduler.SetTierLeft(true);
  EXPECT_TRUE(scheduler.stores().hangs());
  EXPECT_FALSE(scheduler.stores().Awaits(store.dataset, store.sample));
  EXPECT_EQ(scheduler.stores().due(), 0u);
  EXPECT_EQ(CheckInvariants(scheduler), "");
  scheduler.Advance(100 * kSecond);
  EXPECT_TRUE(scheduler.stores().hangs()) << "until it is used again";
  // What is written when it answers is known to be there.
  scheduler.OnStoreEnded(store.dataset, store.sample, true);
  scheduler.SetTierLeft(false);
  EXPECT_FALSE(scheduler.stores().hangs());
  EXPECT_EQ(CheckInvariants(scheduler), "");
}

}  // namespace
}  // namespace forebay
