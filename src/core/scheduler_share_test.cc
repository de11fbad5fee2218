// What a node of a cluster keeps, and how it serves the others: shares, serving streams, and reads
// that other nodes answer.
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <map>
#include <numeric>
#include <set>
#include <utility>
#include <vector>

#include "base/rng.h"
#include "core/scheduler.h"
#include "core/scheduler_check.h"
#include "core/waits.h"

namespace forebay {
namespace {

using Take = Scheduler::Take;
constexpr uint32_t kSize = 4096;
constexpr auto kNone = static_cast<uint8_t>(KeepShare::kNone);
constexpr auto kHome = static_cast<uint8_t>(KeepShare::kHome);
constexpr auto kReplica = static_cast<uint8_t>(KeepShare::kReplica);

class Remote final : public RemoteSamples {
 public:
  bool IsRemote(DatasetId, SampleId s) const override { return rule && rule(s); }
  bool AwaitsNodes(DatasetId, SampleId) const override { return joining; }
  std::function<bool(SampleId)> rule;
  bool joining = false;
};

// One node whose samples are all of one size; reads end in a random order.
class Node {
 public:
  Node(uint32_t n, uint64_t keep, uint64_t arena, uint64_t seed = 1)
      : rng(seed), scheduler({.arena_bytes = arena * kSize, .keep_bytes = keep * kSize}, &remote) {
    dataset = scheduler.AddDataset(std::vector<uint32_t>(n, kSize));
  }

  StreamId Train(std::vector<SampleId> order, uint32_t batch = 4) {
    const StreamId id = scheduler.OpenStream({.dataset = dataset, .batch_size = batch});
    Declare(id, 0, std::move(order));
    return id;
  }
  void Declare(StreamId id, uint64_t epoch, std::vector<SampleId> order) {
    scheduler.ExtendOrder(id, scheduler.lookahead().streams().at(id).generation, epoch,
                          std::move(order), false);
  }
  StreamId Serve() { return scheduler.OpenStream({.dataset = dataset, .serving = true}); }

  std::vector<ReadAction> Pump() {
    (void)scheduler.lookahead().TakeOrders();
    std::vector<ReadAction> reads;
    scheduler.leases().NextReads(limit, &reads);
    flying.insert(flying.end(), reads.begin(), reads.end());
    for (const ReadAction& read : reads) ++count[read.sample];
    return reads;
  }
  bool Step() {
    if (flying.empty()) return false;
    const size_t i = rng.Below(flying.size());
    const ReadAction read = flying[i];
    flying.erase(flying.begin() + static_cast<int64_t>(i));
    const bool ok = fail_permille == 0 || rng.Below(1000) >= fail_permille;
    const Origin from = read.likely == Origin::kPeer ? Origin::kPeer : Origin::kSource;
    scheduler.OnReadDone(read, ok, Crc(read.sample), from);
    return true;
  }
  void Drain() {
    do Pump();
    while (Step());
  }
  static uint32_t Crc(SampleId s) { return s * 7 + 1; }

  // Takes and gives back batches until the epoch has ended.
  void Epoch(StreamId id) {
    Scheduler::Handout out;
    for (int i = 0; i < 100000; ++i) {
      const Take take = scheduler.leases().TakeBatch(id, &out);
      Pump();
      ASSERT_EQ(CheckInvariants(scheduler), "");
      if (take == Take::kEndOfEpoch) return;
      if (take == Take::kReady) scheduler.leases().Release(out.lease);
      if (take == Take::kPending && !Step() && !scheduler.leases().consumer(id).due) break;
    }
    FAIL() << "no progress: in flight " << scheduler.reads().in_flight() << ", cause "
           << static_cast<int>(Waits(scheduler).CauseOfStream(id));
  }
  size_t Held(uint8_t of, const std::vector<uint8_t>& share) const {
    size_t held = 0;
    for (SampleId s = 0; s < share.size(); ++s) {
      held += share[s] == of && scheduler.residency().dataset(dataset).Held(s) ? 1 : 0;
    }
    return held;
  }

  SplitMix64 rng;
  Remote remote;
  Scheduler scheduler;
  DatasetId dataset = 0;
  size_t limit = 8;
  uint64_t fail_permille = 0;
  std::vector<ReadAction> flying;
  std::map<SampleId, int> count;
};

std::vector<uint8_t> Shares(std::vector<std::pair<size_t, uint8_t>> runs) {
  std::vector<uint8_t> share;
  for (const auto& [n, kind] : runs) share.insert(share.end(), n, kind);
  return share;
}

std::vector<SampleId> Backwards(SampleId n) {
  std::vector<SampleId> order(n);
  std::iota(order.rbegin(), order.rend(), 0u);
  return order;
}

TEST(Share, WhatLivesHereIsKeptBeforeCopiesWhateverComesFirst) {
  Node node(100, 60, 90);
  const std::vector<uint8_t> share = Shares({{50, kHome}, {50, kReplica}});
  node.scheduler.residency().SetShare(node.dataset, share);
  EXPECT_EQ(node.scheduler.residency().bytes().reserved, 50u * kSize);
  const StreamId id = node.Train(Backwards(100));  // copies of others come first
  node.Epoch(id);
  EXPECT_EQ(node.Held(kHome, share), 50u);
  EXPECT_EQ(node.Held(kReplica, share), 10u);
  EXPECT_EQ(node.scheduler.residency().bytes().reserved, 0u);
  EXPECT_EQ(node.scheduler.counters().evicted, 0u) << "room was left from the start";
  node.Declare(id, 1, Backwards(100));
  node.Epoch(id);
  EXPECT_EQ(node.scheduler.counters().reads, 100u + 40u);
}

TEST(Share, WhatOthersNeedTheRoomForIsNotKept) {
  Node node(40, 60, 90);  // everything would fit
  const std::vector<uint8_t> share = Shares({{10, kHome}, {10, kReplica}, {20, kNone}});
  node.scheduler.residency().SetShare(node.dataset, share);
  const StreamId id = node.Train(Backwards(40));
  node.Epoch(id);
  EXPECT_EQ(node.Held(kHome, share), 10u);
  EXPECT_EQ(node.Held(kReplica, share), 10u);
  EXPECT_EQ(node.Held(kNone, share), 0u);
  EXPECT_EQ(node.scheduler.residency().dataset(node.dataset).uncovered, 0u);
}

TEST(Share, WhereEverythingFitsAllBecomesLocal) {
  Node node(40, 0, 60);
  node.scheduler.residency().SetShare(node.dataset, Shares({{10, kHome}, {30, kReplica}}));
  const StreamId id = node.Train(Backwards(40));
  node.Epoch(id);
  node.Declare(id, 1, Backwards(40));
  node.Epoch(id);
  EXPECT_EQ(node.scheduler.counters().reads, 40u);
}

TEST(Share, ANewShareTakesTheRoomOfCopies) {
  Node node(100, 60, 90);
  std::vector<uint8_t> share = Shares({{40, kHome}, {60, kReplica}});
  node.scheduler.residency().SetShare(node.dataset, share);
  const StreamId id = node.Train(Backwards(100));
  node.Epoch(id);
  EXPECT_EQ(node.Held(kReplica, share), 20u);
  // A node has died: 20 more live here now, and nothing that lived here goes for them.
  share = Shares({{60, kHome}, {40, kReplica}});
  node.scheduler.residency().SetShare(node.dataset, share);
  ASSERT_EQ(CheckInvariants(node.scheduler), "");
  node.Declare(id, 1, Backwards(100));
  node.Epoch(id);
  EXPECT_EQ(node.Held(kHome, share), 60u);
  EXPECT_EQ(node.Held(kReplica, share), 0u);
  for (SampleId s = 0; s < 40; ++s) EXPECT_EQ(node.count[s], 1) << s;
  // It has come back. What is there stays until its room is needed.
  share = Shares({{40, kHome}, {20, kNone}, {40, kReplica}});
  node.scheduler.residency().SetShare(node.dataset, share);
  ASSERT_EQ(CheckInvariants(node.scheduler), "");
  EXPECT_EQ(node.Held(kNone, share), 20u);
  node.scheduler.residency().SetKeepBytes(45 * kSize);
  EXPECT_EQ(node.Held(kHome, share), 40u) << "first what does not live here";
  EXPECT_EQ(node.Held(kNone, share), 5u);
  node.scheduler.residency().SetShare(node.dataset, {});
  ASSERT_EQ(CheckInvariants(node.scheduler), "");
  EXPECT_EQ(node.scheduler.residency().bytes().reserved, 0u);
}

TEST(Share, CopiesBegunBeforeTheSharesAreKnownDoNotKeepOutWhatLivesHere) {
  Node node(20, 10, 60);
  std::vector<SampleId> order(20);
  std::iota(order.begin(), order.end(), 0u);
  std::rotate(order.begin(), order.begin() + 10, order.end());
  const StreamId id = node.Train(order);
  node.limit = 10;
  node.Pump();  // ten that live elsewhere, all to be kept as far as is known
  ASSERT_EQ(node.flying.size(), 10u);
  const std::vector<ReadAction> copies = std::exchange(node.flying, {});
  const std::vector<uint8_t> share = Shares({{10, kHome}, {10, kReplica}});
  node.scheduler.residency().SetShare(node.dataset, share);
  node.limit = 20;
  node.Drain();  // what lives here arrives first
  EXPECT_EQ(node.Held(kHome, share), 10u);
  ASSERT_EQ(CheckInvariants(node.scheduler), "");
  node.flying = copies;
  node.Epoch(id);
  node.Declare(id, 1, order);
  node.Epoch(id);
  for (SampleId s = 0; s < 10; ++s) EXPECT_EQ(node.count[s], 1) << s;
}

TEST(Share, TheFolderLeavesRoomForWhatLivesHere) {
  Node node(30, 1, 40);
  node.scheduler.residency().dataset(node.dataset).tier = {.present = true, .holds_all = false};
  node.scheduler.residency().SetShare(node.dataset,
                                      Shares({{10, kHome}, {10, kReplica}, {10, kNone}}));
  node.scheduler.stores().SetFolderRoom(14 * kSize);
  (void)node.Train(Backwards(30));
  node.limit = 30;
  std::map<SampleId, bool> store;
  for (int i = 0; i < 30; ++i) {
    for (const ReadAction& read : node.Pump()) store[read.sample] = read.store;
  }
  EXPECT_EQ(store.size(), 30u);
  const auto stored = [&](SampleId first, SampleId last) {
    return std::count_if(store.begin(), store.end(), [&](const auto& s) {
      return s.first >= first && s.first < last && s.second;
    });
  };
  EXPECT_GE(stored(0, 10), 9) << "one may be in memory";
  EXPECT_EQ(stored(10, 20), 4) << "beside ten that live here";
  EXPECT_EQ(stored(20, 30), 0);
}

TEST(Share, ChangesAddUpToWhatIsHeld) {
  Node node(64, 20, 40, 5);
  std::set<SampleId> told;
  const auto learn = [&] {
    const HeldChanges changes = node.scheduler.residency().dataset(node.dataset).TakeHeldChanges();
    for (const SampleId s : changes.got) EXPECT_TRUE(told.insert(s).second);
    for (const SampleId s : changes.lost) EXPECT_EQ(told.erase(s), 1u);
    const std::vector<std::byte> bits = node.scheduler.residency().dataset(node.dataset).HeldBits();
    for (SampleId s = 0; s < 64; ++s) {
      const bool held = (bits[s / 8] >> (s % 8) & std::byte{1}) != std::byte{0};
      EXPECT_EQ(held, told.contains(s)) << s;
      EXPECT_EQ(held, node.scheduler.residency().dataset(node.dataset).Held(s)) << s;
    }
  };
  learn();
  const StreamId id = node.Train(Backwards(64));
  for (uint64_t epoch = 0; epoch < 4; ++epoch) {
    if (epoch > 0) node.Declare(id, epoch, Backwards(64));
    node.Epoch(id);
    learn();
    std::vector<uint8_t> share(64);
    for (uint8_t& s : share) s = static_cast<uint8_t>(node.rng.Below(3));
    node.scheduler.residency().SetShare(node.dataset, share);
    node.scheduler.residency().SetKeepBytes((10 + node.rng.Below(20)) * kSize);
    learn();
    if (epoch == 2) node.scheduler.residency().SetInTier(node.dataset, 7, true);
    learn();
    EXPECT_TRUE(epoch != 2 || told.contains(7));
  }
}

TEST(Share, UpcomingIsWhatWouldBeKeptAndIsNotThere) {
  Node node(100, 60, 90);
  node.scheduler.residency().SetShare(node.dataset,
                                      Shares({{30, kHome}, {40, kReplica}, {30, kNone}}));
  EXPECT_TRUE(node.scheduler.lookahead().Upcoming(node.dataset, 100).empty())
      << "nobody says what is used";
  (void)node.Train(Backwards(100));
  node.scheduler.lookahead().SetReadAheadBytes(2 * kSize);
  const std::vector<SampleId> next = node.scheduler.lookahead().Upcoming(node.dataset, 8);
  EXPECT_EQ(next, (std::vector<SampleId>{69, 68, 67, 66, 65, 64, 63, 62}));
  EXPECT_EQ(node.scheduler.lookahead().Upcoming(node.dataset, 1000).size(), 70u);
  // What lives here is used first and is named last.
  node.scheduler.residency().SetShare(node.dataset,
                                      Shares({{30, kNone}, {40, kReplica}, {30, kHome}}));
  EXPECT_EQ(node.scheduler.lookahead().Upcoming(node.dataset, 8),
            (std::vector<SampleId>{69, 68, 67, 66, 65, 64, 63, 62}));
  const std::vector<SampleId> all = node.scheduler.lookahead().Upcoming(node.dataset, 45);
  ASSERT_EQ(all.size(), 45u);
  EXPECT_EQ(all[39], 30u);
  EXPECT_EQ(all[40], 99u);
  node.scheduler.residency().SetShare(node.dataset,
                                      Shares({{30, kHome}, {40, kReplica}, {30, kNone}}));
  node.Drain();
  for (const SampleId s : node.scheduler.lookahead().Upcoming(node.dataset, 1000)) {
    EXPECT_FALSE(node.scheduler.residency().dataset(node.dataset).Held(s)) << s;
  }
}

TEST(Serving, FetchesManyAtOnceWithTheirChecksums) {
  Node node(100, 60, 90);
  const StreamId serving = node.Serve();
  std::vector<LeaseId> leases(5, kNoLease);
  Scheduler::Handout out;
  for (SampleId s = 0; s < 5; ++s) {
    EXPECT_EQ(node.scheduler.leases().FetchSample(serving, s, &leases[s], &out), Take::kPending);
  }
  const std::vector<ReadAction> reads = node.Pump();
  EXPECT_EQ(reads.size(), 5u);
  for (const ReadAction& read : reads) EXPECT_TRUE(read.serving);
  EXPECT_FALSE(Waits(node.scheduler).AnyForSamples()) << "no consumer waits";
  EXPECT_EQ(Waits(node.scheduler).CountForReads(), 0u);
  const uint64_t before = node.scheduler.leases().consumer(serving).changes;
  node.Drain();
  EXPECT_GE(node.scheduler.leases().consumer(serving).changes, before + 5);
  for (SampleId s = 0; s < 5; ++s) {
    ASSERT_EQ(node.scheduler.leases().FetchSample(serving, s, &leases[s], &out), Take::kReady);
    ASSERT_EQ(out.samples, std::vector<SampleId>{s});
    EXPECT_EQ(out.crcs, std::vector<uint32_t>{Node::Crc(s)});
    ASSERT_EQ(CheckInvariants(node.scheduler), "");
    node.scheduler.leases().Release(out.lease);
  }
  EXPECT_EQ(node.scheduler.leases().serving_bytes(), 0u);
  // Twice the same, and one that is there: no second read.
  std::vector<LeaseId> again(2, kNoLease);
  for (LeaseId& lease : again) {
    ASSERT_EQ(node.scheduler.leases().FetchSample(serving, 3, &lease, &out), Take::kReady);
  }
  EXPECT_EQ(node.count[3], 1);
  for (const LeaseId lease : again) node.scheduler.leases().Release(lease);
  ASSERT_EQ(CheckInvariants(node.scheduler), "");
}

TEST(Serving, AFailedReadIsReported) {
  Node node(10, 10, 20);
  const StreamId serving = node.Serve();
  LeaseId lease = kNoLease;
  Scheduler::Handout out;
  ASSERT_EQ(node.scheduler.leases().FetchSample(serving, 2, &lease, &out), Take::kPending);
  node.fail_permille = 1000;
  node.Drain();
  EXPECT_EQ(node.scheduler.leases().FetchSample(serving, 2, &lease, &out), Take::kFailed);
  EXPECT_EQ(out.failed, 2u);
  node.scheduler.leases().Release(lease);
  ASSERT_EQ(CheckInvariants(node.scheduler), "");
}

TEST(Serving, StaysWithinItsPartOfTheMemory) {
  Node node(100, 60, 80);
  const StreamId serving = node.Serve();
  std::vector<LeaseId> leases(30, kNoLease);
  Scheduler::Handout out;
  for (SampleId s = 0; s < 30; ++s) {
    (void)node.scheduler.leases().FetchSample(serving, s, &leases[s], &out);
  }
  node.Drain();
  EXPECT_LE(node.scheduler.leases().serving_bytes(), 10u * kSize);
  size_t ready = 0;
  // As some are given back the others get their turn; nothing is forgotten.
  for (int round = 0; round < 10; ++round) {
    for (SampleId s = 0; s < 30; ++s) {
      if (leases[s] == kNoLease) continue;
      if (node.scheduler.leases().FetchSample(serving, s, &leases[s], &out) != Take::kReady)
        continue;
      ++ready;
      node.scheduler.leases().Release(out.lease);
      leases[s] = kNoLease;
    }
    node.Drain();
    ASSERT_EQ(CheckInvariants(node.scheduler), "");
    ASSERT_LE(node.scheduler.leases().serving_bytes(), 10u * kSize);
  }
  EXPECT_EQ(ready, 30u);
}

TEST(Serving, NeverTakesWhatLivesHereOrWhatATrainerStages) {
  Node node(200, 50, 70);
  std::vector<uint8_t> share = Shares({{50, kHome}, {150, kNone}});
  node.scheduler.residency().SetShare(node.dataset, share);
  const StreamId id = node.Train(Backwards(50));
  node.Epoch(id);
  ASSERT_EQ(node.Held(kHome, share), 50u);
  // Look-ahead fills the rest, less what is left to serving.
  const StreamId serving = node.Serve();
  std::vector<SampleId> order(100);
  std::iota(order.begin(), order.end(), 50u);
  node.Declare(id, 1, order);
  node.Drain();
  const uint64_t ahead = node.scheduler.residency().bytes().ahead;
  EXPECT_EQ(ahead, 17u * kSize);
  std::vector<LeaseId> leases(20, kNoLease);
  Scheduler::Handout out;
  for (size_t i = 0; i < leases.size(); ++i) {
    (void)node.scheduler.leases().FetchSample(serving, static_cast<SampleId>(170 + i), &leases[i],
                                              &out);
  }
  node.Drain();
  EXPECT_EQ(node.Held(kHome, share), 50u);
  EXPECT_EQ(node.scheduler.residency().bytes().ahead, ahead);
  EXPECT_EQ(node.scheduler.counters().evicted, 0u);
  EXPECT_EQ(node.scheduler.counters().retracted, 0u);
  size_t ready = 0;
  for (size_t i = 0; i < leases.size(); ++i) {
    ready += node.scheduler.leases().FetchSample(serving, static_cast<SampleId>(170 + i),
                                                 &leases[i], &out) == Take::kReady
                 ? 1
                 : 0;
  }
  EXPECT_GE(ready, 1u) << "a part is left to it";
  // The rest waits, and is given up by who asked; training never noticed.
  node.Epoch(id);
  for (const LeaseId lease : leases) node.scheduler.leases().Release(lease);
  ASSERT_EQ(CheckInvariants(node.scheduler), "");
  EXPECT_EQ(node.scheduler.leases().serving_bytes(), 0u);
}

TEST(Serving, StandsBehindConsumersAndBeforeLookAhead) {
  Node node(100, 0, 60);
  node.limit = 4;
  const StreamId serving = node.Serve();
  std::vector<SampleId> order(100);
  std::iota(order.begin(), order.end(), 0u);
  const StreamId id = node.Train(order, 8);
  Scheduler::Handout out;
  LeaseId lease = kNoLease;
  ASSERT_EQ(node.scheduler.leases().FetchSample(serving, 99, &lease, &out), Take::kPending);
  ASSERT_EQ(node.scheduler.leases().TakeBatch(id, &out), Take::kPending);
  std::vector<SampleId> started;
  for (const ReadAction& read : node.Pump()) started.push_back(read.sample);
  EXPECT_EQ(started, (std::vector<SampleId>{0, 1, 2, 3})) << "eight are waited for";
  while (started.size() < 9) {
    ASSERT_TRUE(node.Step());
    for (const ReadAction& read : node.Pump()) started.push_back(read.sample);
  }
  EXPECT_EQ(started[8], 99u) << "then the other node's";
  // It is outside of the limit: four more run beside it.
  EXPECT_EQ(node.flying.size(), 5u);
}

TEST(Serving, AConsumerWithoutRoomGoesFirst) {
  Node node(100, 0, 8);
  const StreamId serving = node.Serve();
  const StreamId id = node.Train(Backwards(100), 8);
  Scheduler::Handout out;
  LeaseId lease = kNoLease;
  ASSERT_EQ(node.scheduler.leases().FetchSample(serving, 0, &lease, &out), Take::kPending);
  node.Drain();
  ASSERT_EQ(node.scheduler.leases().FetchSample(serving, 0, &lease, &out), Take::kReady);
  // The batch needs all of the memory: it waits for the other node's sample to be given back, and
  // no other one may come in between.
  for (int i = 0; i < 20 && node.scheduler.leases().TakeBatch(id, &out) == Take::kPending; ++i) {
    node.Drain();
  }
  EXPECT_EQ(Waits(node.scheduler).CauseOfStream(id), StallCause::kMemory);
  LeaseId second = kNoLease;
  ASSERT_EQ(node.scheduler.leases().FetchSample(serving, 1, &second, &out), Take::kPending);
  node.Drain();
  EXPECT_EQ(node.count[1], 0);
  node.scheduler.leases().Release(lease);
  Take take = Take::kPending;
  for (int i = 0; i < 20 && take == Take::kPending; ++i) {
    node.Drain();
    take = node.scheduler.leases().TakeBatch(id, &out);
  }
  EXPECT_EQ(take, Take::kReady);
  node.scheduler.leases().Release(out.lease);
  node.scheduler.leases().Release(second);
  ASSERT_EQ(CheckInvariants(node.scheduler), "");
}

// Otherwise two nodes deadlock: each consumer needs memory that is pinned by a read from the other.
TEST(Serving, GoesOnWhileAConsumerWithoutRoomWaitsForPeers) {
  Remote remote;
  remote.rule = [](SampleId s) { return s == 1; };
  Scheduler scheduler({.arena_bytes = 32 * kSize, .keep = false}, &remote);
  const DatasetId d =
      scheduler.AddDataset(std::vector<uint32_t>{14 * kSize, 10 * kSize, 10 * kSize, kSize, kSize});
  const StreamId serving = scheduler.OpenStream({.dataset = d, .serving = true});
  const StreamId id = scheduler.OpenStream({.dataset = d, .batch_size = 2});
  scheduler.ExtendOrder(id, scheduler.lookahead().streams().at(id).generation, 0, {0, 4, 1, 2},
                        false);
  std::map<SampleId, ReadAction> flying;
  const auto pump = [&] {
    (void)scheduler.lookahead().TakeOrders();
    std::vector<ReadAction> reads;
    scheduler.leases().NextReads(8, &reads);
    for (const ReadAction& read : reads) flying[read.sample] = read;
  };
  const auto end = [&](SampleId s, Origin from) {
    ASSERT_TRUE(flying.contains(s)) << s;
    scheduler.OnReadDone(flying[s], true, 0, from);
    flying.erase(s);
  };
  Scheduler::Handout first;
  ASSERT_EQ(scheduler.leases().TakeBatch(id, &first), Take::kPending);
  pump();
  end(0, Origin::kSource);
  end(4, Origin::kSource);
  ASSERT_EQ(scheduler.leases().TakeBatch(id, &first), Take::kReady);
  // The next batch has 10 of its 20; 7 are free.
  Scheduler::Handout second;
  ASSERT_EQ(scheduler.leases().TakeBatch(id, &second), Take::kPending);
  pump();
  ASSERT_TRUE(flying.contains(1) && !flying.contains(2));
  LeaseId lease = kNoLease;
  Scheduler::Handout out;
  ASSERT_EQ(scheduler.leases().FetchSample(serving, 3, &lease, &out), Take::kPending);
  pump();
  EXPECT_TRUE(flying.contains(3)) << "the other node may wait for it as this one does";
  if (flying.contains(3)) end(3, Origin::kSource);
  EXPECT_EQ(scheduler.leases().FetchSample(serving, 3, &lease, &out), Take::kReady);
  scheduler.leases().Release(lease);
  // Once nothing is to come from peers, the consumer goes first.
  end(1, Origin::kPeer);
  ASSERT_EQ(scheduler.leases().TakeBatch(id, &second), Take::kPending);
  lease = kNoLease;
  ASSERT_EQ(scheduler.leases().FetchSample(serving, 3, &lease, &out), Take::kPending);
  pump();
  EXPECT_FALSE(flying.contains(3));
  ASSERT_EQ(CheckInvariants(scheduler), "");
  scheduler.leases().Release(first.lease);
  Take take = Take::kPending;
  for (int i = 0; i < 10 && take == Take::kPending; ++i) {
    pump();
    while (!flying.empty()) end(flying.begin()->first, flying.begin()->second.likely);
    take = scheduler.leases().TakeBatch(id, &second);
  }
  ASSERT_EQ(take, Take::kReady);
  scheduler.leases().Release(second.lease);
  scheduler.leases().Release(lease);
  ASSERT_EQ(CheckInvariants(scheduler), "");
}

TEST(Elsewhere, SuchReadsAreThePeersAndNotTheSources) {
  Node node(100, 60, 90);
  node.remote.rule = [](SampleId s) { return s % 2 == 0; };
  StreamShape shape{.dataset = node.dataset, .batch_size = 2, .job = "j"};
  const StreamId id = node.scheduler.OpenStream(shape);
  node.Declare(id, 0, {0, 2, 4, 6});
  // The job may read nothing from the source for long.
  node.scheduler.SetJobLimits("j", {.source = {1, 1}});
  node.scheduler.Advance(kSecond);
  Scheduler::Handout out;
  ASSERT_EQ(node.scheduler.leases().TakeBatch(id, &out), Take::kPending);
  const std::vector<ReadAction> reads = node.Pump();
  ASSERT_GE(reads.size(), 2u);
  for (const ReadAction& read : reads) {
    EXPECT_EQ(read.likely, Origin::kPeer);
    EXPECT_EQ(read.charged, 0u);
  }
  EXPECT_EQ(Waits(node.scheduler).CauseOfStream(id), StallCause::kPeer);
  node.Drain();
  ASSERT_EQ(node.scheduler.leases().TakeBatch(id, &out), Take::kReady);
  node.scheduler.leases().Release(out.lease);
  EXPECT_EQ(node.scheduler.jobs().TakeStats().at(0).bytes, 0u);
  EXPECT_TRUE(node.scheduler.residency().dataset(node.dataset).Held(0))
      << "what a peer gave is kept as any other";
}

TEST(Elsewhere, AWaitForNodesToJoinIsNotTheSources) {
  Node node(100, 60, 90);
  const StreamId id = node.Train({0, 1, 2, 3});
  Scheduler::Handout out;
  ASSERT_EQ(node.scheduler.leases().TakeBatch(id, &out), Take::kPending);
  ASSERT_FALSE(node.Pump().empty());
  EXPECT_EQ(Waits(node.scheduler).CauseOfStream(id), StallCause::kSource);
  node.remote.joining = true;
  EXPECT_EQ(Waits(node.scheduler).CauseOfStream(id), StallCause::kPeer);
  node.Drain();
  ASSERT_EQ(node.scheduler.leases().TakeBatch(id, &out), Take::kReady);
  node.scheduler.leases().Release(out.lease);
}

TEST(Elsewhere, ConsumersOfOneStreamWaitEachForTheirOwn) {
  Node node(100, 60, 90);
  node.remote.rule = [](SampleId s) { return s % 2 == 0; };
  const StreamId id =
      node.scheduler.OpenStream({.dataset = node.dataset, .batch_size = 1, .itemised = true});
  Scheduler::Handout out;
  LeaseId source = kNoLease;
  LeaseId peer = kNoLease;
  ASSERT_EQ(node.scheduler.leases().FetchSample(id, 1, &source, &out), Take::kPending);
  ASSERT_EQ(node.scheduler.leases().FetchSample(id, 2, &peer, &out), Take::kPending);
  node.Pump();
  EXPECT_EQ(Waits(node.scheduler).CauseOfLease(source), StallCause::kSource);
  EXPECT_EQ(Waits(node.scheduler).CauseOfLease(peer), StallCause::kPeer);
  EXPECT_EQ(Waits(node.scheduler).CauseOfStream(id), StallCause::kSource) << "the oldest one's";
  node.Drain();
  ASSERT_EQ(node.scheduler.leases().FetchSample(id, 1, &source, &out), Take::kReady);
  ASSERT_EQ(node.scheduler.leases().FetchSample(id, 2, &peer, &out), Take::kReady);
  node.scheduler.leases().Release(source);
  node.scheduler.leases().Release(peer);
  EXPECT_EQ(Waits(node.scheduler).CauseOfLease(peer), StallCause::kSource) << "it is no more";
}

// Trainers, other nodes' requests, failures, and shares and limits that change all the time: every
// invariant holds, training reaches the end, and requests end or can be given up.
TEST(Share, RandomWorlds) {
  for (uint64_t seed = 0; seed < 8; ++seed) {
    SCOPED_TRACE(seed);
    SplitMix64 rng(seed);
    const auto n = static_cast<uint32_t>(50 + rng.Below(150));
    const uint64_t arena = 24 + rng.Below(n);
    Node node(n, rng.Below(2) == 0 ? 0 : 1 + rng.Below(arena), arena, seed);
    node.fail_permille = rng.Below(3) == 0 ? 50 : 0;
    node.limit = 1 + rng.Below(12);
    const uint64_t remote = rng.Below(4);
    node.remote.rule = [&](SampleId s) { return s % 4 < remote; };
    const StreamId serving = node.Serve();
    std::vector<StreamId> streams;
    for (uint64_t i = 0; i < 1 + rng.Below(3); ++i) {
      streams.push_back(node.Train(Backwards(n), static_cast<uint32_t>(1 + rng.Below(5))));
    }
    std::vector<std::pair<SampleId, LeaseId>> asked;
    std::vector<uint64_t> epoch(streams.size());
    Scheduler::Handout out;
    size_t finished = 0;
    size_t idle = 0;
    for (int step = 0; step < 40000 && finished < streams.size() && idle < 2000; ++step) {
      const uint64_t dice = rng.Below(100);
      if (dice < 1) {
        std::vector<uint8_t> share(n);
        for (uint8_t& s : share) s = static_cast<uint8_t>(rng.Below(3));
        node.scheduler.residency().SetShare(node.dataset,
                                            rng.Below(5) == 0 ? std::vector<uint8_t>() : share);
      } else if (dice < 2) {
        node.scheduler.residency().SetKeepBytes(rng.Below(arena) * kSize);
      } else if (dice < 20 && asked.size() < 40) {
        asked.emplace_back(static_cast<SampleId>(rng.Below(n)), kNoLease);
      } else if (dice < 45 && !asked.empty()) {
        const size_t i = rng.Below(asked.size());
        auto& [sample, lease] = asked[i];
        const Take take = node.scheduler.leases().FetchSample(serving, sample, &lease, &out);
        if (take == Take::kReady) {
          ASSERT_EQ(out.crcs.at(0), Node::Crc(sample));
        }
        if (take != Take::kPending || rng.Below(8) == 0) {
          node.scheduler.leases().Release(lease);
          asked.erase(asked.begin() + static_cast<int64_t>(i));
        }
      } else if (dice < 80) {
        const size_t i = rng.Below(streams.size());
        const Take take = node.scheduler.leases().TakeBatch(streams[i], &out);
        if (take == Take::kReady) node.scheduler.leases().Release(out.lease);
        idle = take == Take::kReady ? 0 : idle + 1;
        if (take == Take::kEndOfEpoch) {
          if (++epoch[i] == 3) {
            ++finished;
            node.scheduler.EndHorizon(streams[i]);
          }
          if (epoch[i] < 3) node.Declare(streams[i], epoch[i], Backwards(n));
        }
      } else {
        node.Step();
      }
      node.Pump();
      if (step % 7 == 0) {
        ASSERT_EQ(CheckInvariants(node.scheduler), "");
      }
      ASSERT_LE(node.scheduler.leases().serving_bytes(), std::max(arena / 8, uint64_t{1}) * kSize);
    }
    EXPECT_EQ(finished, streams.size()) << "in flight " << node.scheduler.reads().in_flight();
    for (const auto& [sample, lease] : asked) {
      if (lease != kNoLease) node.scheduler.leases().Release(lease);
    }
    for (const StreamId id : streams) node.scheduler.CloseStream(id);
    node.Drain();
    ASSERT_EQ(CheckInvariants(node.scheduler), "");
    EXPECT_EQ(node.scheduler.arena().used(), node.scheduler.residency().bytes().kept);
  }
}

}  // namespace
}  // namespace forebay
