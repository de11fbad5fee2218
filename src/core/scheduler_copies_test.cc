// Copies for the second tier, in virtual time: a writer that is slow, hangs, fails, or has little
// memory to wait in. What is copied must be what was read, and whoever waits for a batch gets it.
#include <gtest/gtest.h>

#include <algorithm>
#include <deque>
#include <map>
#include <optional>
#include <set>
#include <utility>
#include <vector>

#include "base/rng.h"
#include "core/sampler.h"
#include "core/scheduler.h"
#include "core/scheduler_check.h"
#include "core/waits.h"

namespace forebay {
namespace {

using Take = Scheduler::Take;

constexpr uint32_t kSize = 1024;
constexpr Nanos kRead = kMilli;

// A source that takes about a millisecond a read, a folder whose writer takes `write` a copy, one
// after the other, and a buffer of `buffer` copies.
class Node {
 public:
  Node(uint64_t seed, const Scheduler::Options& options, uint32_t samples)
      : rng_(seed), scheduler(options) {
    const std::vector<uint32_t> lengths(samples, kSize);
    scheduler.AddDataset(lengths);
    scheduler.residency().dataset(0).tier = {.present = true, .holds_all = true};
    spec_.size = samples;
    spec_.seed = seed;
  }

  void Open(StreamShape shape) { streams.push_back(scheduler.OpenStream(shape)); }

  void Pump() {
    scheduler.Advance(now);
    for (const OrderAction& a : scheduler.lookahead().TakeOrders()) {
      scheduler.ExtendOrder(a.stream, a.generation, a.epoch,
                            EpochOrder(spec_, a.epoch, a.first_position), false);
    }
    StoreAction store;
    while (writing_.size() < buffer && scheduler.stores().First(&store)) {
      scheduler.stores().Begin(store);
      EXPECT_EQ(memory_[store.offset], store.sample) << "other bytes are copied";
      scheduler.stores().OnTaken(store);
      writer_free_ = std::max(now, writer_free_) + write;
      writing_.push_back({writer_free_, store.sample});
    }
    for (const CopyAction& copy : scheduler.leases().TakeCopies())
      scheduler.leases().OnCopyDone(copy.lease);
    std::vector<ReadAction> reads;
    scheduler.leases().NextReads(16, &reads);
    for (const ReadAction& read : reads) {
      flying_.push_back({now + kRead / 2 + static_cast<Nanos>(rng_.Below(kRead)), read});
    }
  }

  // The next event, or 100 ms without one.
  void Step() {
    const auto read =
        std::min_element(flying_.begin(), flying_.end(),
                         [](const Flying& a, const Flying& b) { return a.at < b.at; });
    const bool copies = !writing_.empty() && !hangs;
    if (copies && (read == flying_.end() || writing_.front().at < read->at)) {
      const Writing done = writing_.front();
      writing_.pop_front();
      now = std::max(now, done.at);
      const bool stored = fail_one_in == 0 || rng_.Below(fail_one_in) != 0;
      if (stored) folder.insert(done.sample);
      scheduler.OnStoreEnded(0, done.sample, stored);
    } else if (read != flying_.end()) {
      const Flying done = *read;
      flying_.erase(read);
      now = done.at;
      const ReadAction& action = done.action;
      const bool hit = action.origin == Origin::kTier && folder.contains(action.sample);
      memory_[action.offset] = action.sample;
      if (!hit) ++source_reads;
      scheduler.OnReadDone(action, true, action.sample + 1, hit ? Origin::kTier : Origin::kSource);
    } else {
      now += 100 * kMilli;
    }
    scheduler.Advance(now);
  }

  Take TakeNow(StreamId stream, Scheduler::Handout* out) {
    for (int i = 0; i < 100'000; ++i) {
      const Take take = scheduler.leases().TakeBatch(stream, out);
      Pump();
      if (take != Take::kPending) return take;
      ++waits[Waits(scheduler).CauseOfStream(stream)];
      EXPECT_FALSE(Waits(scheduler).OnlyReleaseHelps(stream))
          << "a consumer would be told to release";
      Step();
    }
    ADD_FAILURE() << "no progress: " << scheduler.residency().bytes().storing << " bytes held, "
                  << scheduler.stores().under_way() << " copies under way";
    return Take::kPending;
  }

  // One epoch of every stream, in turn.
  void RunEpoch(uint64_t epoch) {
    const std::vector<SampleId> order = EpochOrder(spec_, epoch);
    std::vector<size_t> at(streams.size());
    for (size_t ended = 0; ended < streams.size();) {
      for (size_t i = 0; i < streams.size(); ++i) {
        if (at[i] > order.size()) continue;
        Scheduler::Handout h;
        const Take take = TakeNow(streams[i], &h);
        if (take == Take::kEndOfEpoch) {
          EXPECT_EQ(at[i], order.size());
          at[i] = order.size() + 1;
          ++ended;
          continue;
        }
        ASSERT_EQ(take, Take::kReady);
        for (size_t k = 0; k < h.samples.size(); ++k) {
          ASSERT_EQ(h.samples[k], order[at[i]++]);
          if (!streams_copy) {
            ASSERT_EQ(memory_[h.offsets[k]], h.samples[k]);
          }
        }
        now += step;
        scheduler.leases().Release(h.lease);
        ASSERT_EQ(CheckInvariants(scheduler), "");
      }
    }
  }

  // What is under way ends.
  void Settle() {
    for (int i = 0;
         i < 100'000 && (!flying_.empty() || (scheduler.stores().under_way() > 0 && !hangs)); ++i) {
      Pump();
      Step();
    }
    ASSERT_EQ(CheckInvariants(scheduler), "");
  }

  SplitMix64 rng_;
  Scheduler scheduler;
  std::vector<StreamId> streams;
  std::set<SampleId> folder;
  std::map<StallCause, size_t> waits;
  Nanos write = kRead / 20;
  Nanos step = kMilli;
  size_t buffer = 4;
  bool hangs = false;
  bool streams_copy = false;
  uint64_t fail_one_in = 0;
  uint64_t source_reads = 0;
  Nanos now = 0;

 private:
  struct Flying {
    Nanos at = 0;
    ReadAction action;
  };
  struct Writing {
    Nanos at = 0;
    SampleId sample = 0;
  };
  SamplerSpec spec_;
  std::vector<Flying> flying_;
  std::deque<Writing> writing_;
  Nanos writer_free_ = 0;
  std::map<uint64_t, SampleId> memory_;  // by offset
};

constexpr Scheduler::Options kSmall = {.arena_bytes = 60 * kSize, .keep = false};

TEST(Copies, ASlowWriterCostsTimeAndNoCopy) {
  for (const Nanos write : {kRead / 20, kRead, 20 * kRead}) {
    Node node(3, kSmall, 400);
    node.write = write;
    node.Open({.batch_size = 8});
    node.RunEpoch(0);
    EXPECT_GE(node.now, 330 * write) << "read-ahead waits for the writer";
    node.RunEpoch(1);
    node.RunEpoch(2);
    node.Settle();
    EXPECT_EQ(node.source_reads, 400u) << "each sample once, whatever the writer takes";
    EXPECT_EQ(node.folder.size(), 400u);
    EXPECT_EQ(node.scheduler.counters().copies_given_up, 0u);
    if (write == 20 * kRead) {
      EXPECT_GT(node.waits[StallCause::kTier], 0u);
    }
    EXPECT_EQ(node.waits[StallCause::kMemory], 0u) << "the folder is to blame";
  }
}

TEST(Copies, SmallMemoryAndManyStreamsDeadlockNobody) {
  for (uint64_t seed = 1; seed <= 20; ++seed) {
    // Two batches of each of three streams, and little more.
    Node node(seed, {.arena_bytes = (48 + seed) * kSize, .keep = seed % 2 == 0}, 100);
    node.write = static_cast<Nanos>(seed % 5) * kRead;
    node.buffer = 1 + seed % 3;
    node.streams_copy = true;
    for (int i = 0; i < 3; ++i) node.Open({.batch_size = 8, .contiguous = i == 2 && seed % 3 == 0});
    for (uint64_t epoch = 0; epoch < 3; ++epoch) node.RunEpoch(epoch);
    node.Settle();
    EXPECT_EQ(node.folder.size(), 100u);
    EXPECT_EQ(node.scheduler.counters().copies_given_up, 0u);
  }
}

TEST(Copies, AWriterThatHangsIsGivenUpForAWhile) {
  Node node(5, kSmall, 400);
  node.Open({.batch_size = 8});
  node.hangs = true;
  node.RunEpoch(0);
  EXPECT_TRUE(node.scheduler.stores().hangs());
  EXPECT_GT(node.scheduler.counters().copies_given_up, 0u);
  EXPECT_GE(node.now, 5 * kSecond);
  EXPECT_LT(node.now, 10 * kSecond) << "once, not for every batch";
  EXPECT_EQ(node.scheduler.residency().bytes().storing, 0u);
  EXPECT_EQ(node.folder.size(), 0u);
  // It writes again: what is missing is copied in the next epoch, and then read from there.
  node.hangs = false;
  node.RunEpoch(1);
  node.Settle();
  EXPECT_FALSE(node.scheduler.stores().hangs());
  EXPECT_GT(node.folder.size(), 380u) << "all but what was read before it was seen to write";
  node.RunEpoch(2);
  node.Settle();
  EXPECT_EQ(node.folder.size(), 400u);
  const uint64_t before = node.source_reads;
  node.RunEpoch(3);
  EXPECT_EQ(node.source_reads, before);
}

TEST(Copies, ThatFailAreMadeInALaterEpoch) {
  Node node(6, kSmall, 400);
  node.Open({.batch_size = 8});
  node.fail_one_in = 4;
  node.RunEpoch(0);
  node.Settle();
  const size_t first = node.folder.size();
  EXPECT_LT(first, 350u);
  EXPECT_GT(first, 250u);
  node.fail_one_in = 0;
  node.RunEpoch(1);
  node.RunEpoch(2);  // look-ahead for the second epoch began while copies failed
  node.Settle();
  EXPECT_EQ(node.folder.size(), 400u);
  EXPECT_LT(node.source_reads, 400 + 150u) << "only what is missing";
}

TEST(Copies, AProcessThatStoodStillBlamesNoWriter) {
  Node node(7, kSmall, 100);
  node.write = 20 * kMilli;
  node.Open({.batch_size = 8});
  Scheduler::Handout h;
  for (int i = 0; i < 12; ++i) {
    ASSERT_EQ(node.TakeNow(node.streams[0], &h), Take::kReady);
    node.scheduler.leases().Release(h.lease);
    node.now += 3600 * kSecond;  // stopped, and continued
    node.Pump();
  }
  EXPECT_EQ(node.scheduler.counters().copies_given_up, 0u);
}

TEST(Copies, MemoryThatIsTakenForTablesGoesBeforeThem) {
  Node node(8, kSmall, 100);
  node.hangs = true;
  node.Open({.batch_size = 8});
  Scheduler::Handout h;
  for (int i = 0; i < 4; ++i) {
    ASSERT_EQ(node.TakeNow(node.streams[0], &h), Take::kReady);
    node.scheduler.leases().Release(h.lease);
    node.Pump();
  }
  EXPECT_GT(node.scheduler.residency().bytes().storing, 0u);
  std::vector<ArenaAllocator::Block> blocks;
  EXPECT_TRUE(node.scheduler.SetAside(30 * kSize, &blocks));
  EXPECT_GT(node.scheduler.counters().copies_given_up, 0u);
  EXPECT_EQ(CheckInvariants(node.scheduler), "");
}

// A second read of a sample whose first one hangs is copied as well.
TEST(Copies, TheWinnerOfARaceIsCopied) {
  Scheduler scheduler(kSmall);
  const std::vector<uint32_t> lengths(8, kSize);
  scheduler.AddDataset(lengths);
  scheduler.residency().dataset(0).tier = {.present = true, .holds_all = true};
  const StreamId stream = scheduler.OpenStream({.batch_size = 8});
  for (const OrderAction& a : scheduler.lookahead().TakeOrders()) {
    scheduler.ExtendOrder(stream, a.generation, 0, {0, 1, 2, 3, 4, 5, 6, 7}, true);
  }
  std::vector<ReadAction> reads;
  scheduler.leases().NextReads(16, &reads);
  ASSERT_FALSE(reads.empty());
  ReadAction second;
  ASSERT_TRUE(scheduler.Hedge(reads[0], &second));
  scheduler.OnReadDone(second, true, 7, Origin::kSource);
  StoreAction store;
  ASSERT_TRUE(scheduler.stores().First(&store));
  EXPECT_EQ(store.offset, second.offset);
  EXPECT_EQ(store.crc, 7u);
  scheduler.stores().Begin(store);
  scheduler.OnReadDone(reads[0], true, 7, Origin::kSource);
  EXPECT_FALSE(scheduler.stores().First(&store)) << "the loser is not";
  EXPECT_EQ(CheckInvariants(scheduler), "");
}

}  // namespace
}  // namespace forebay
