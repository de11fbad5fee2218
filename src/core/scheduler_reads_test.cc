// A node with memory, a folder and a source in virtual time. Reads write where they were told to,
// also those that lost a race and end late; what a batch hands out must then lie there.
#include <gtest/gtest.h>

#include <algorithm>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "base/rng.h"
#include "catalog/test_data.h"
#include "core/sampler.h"
#include "core/scheduler.h"
#include "core/scheduler_check.h"
#include "core/waits.h"

namespace forebay {
namespace {

using Take = Scheduler::Take;

class Node {
 public:
  Node(uint64_t seed, Scheduler::Options options, std::vector<uint32_t> lengths)
      : rng(seed), scheduler(options), lengths_(std::move(lengths)) {
    dataset = scheduler.AddDataset(lengths_);
  }

  void Open(StreamShape shape, const SamplerSpec& spec) {
    shape.dataset = dataset;
    spec_ = spec;
    stream = scheduler.OpenStream(shape);
  }

  void Pump() {
    for (const OrderAction& a : scheduler.lookahead().TakeOrders()) {
      scheduler.ExtendOrder(a.stream, a.generation, a.epoch,
                            EpochOrder(spec_, a.epoch, a.first_position), false);
    }
    std::vector<ReadAction> reads;
    if (ahead_bytes != 0) scheduler.residency().SetAheadBytes(ahead_bytes);
    scheduler.leases().NextReads(limit, &reads);
    for (const ReadAction& r : reads) Begin(r);
  }

  void Begin(const ReadAction& r) {
    started.push_back(r);
    flying_.push_back({r, now_ + 1 + static_cast<int64_t>(rng.Below(100))});
    if (hang_permille > 0 && rng.Below(1000) < hang_permille) flying_.back().end += 3000;
  }

  // Ends the read that is due first; false: none is under way.
  bool Step() {
    if (flying_.empty()) return EndLagging();
    const auto it =
        std::min_element(flying_.begin(), flying_.end(),
                         [](const Flying& a, const Flying& b) { return a.end < b.end; });
    const Flying read = *it;
    flying_.erase(it);
    now_ = read.end;
    const ReadAction& r = read.action;
    const bool hit = r.origin == Origin::kTier && folder.contains(r.sample);
    const bool ok = hit || fail_permille == 0 || rng.Below(1000) >= fail_permille;
    // A failing read may have written something, too.
    memory_[r.offset] = {r.sample, ok};
    if (!hit && ok) {
      ++source_reads;
      source_bytes += r.length;
    }
    scheduler.OnReadDone(r, ok, r.sample * 7 + 1, hit ? Origin::kTier : Origin::kSource);
    StoreDue();
    return true;
  }

  void StoreDue() {
    StoreAction store;
    while (scheduler.stores().First(&store)) {
      scheduler.stores().Begin(store);
      EXPECT_EQ(memory_[store.offset], std::pair(store.sample, true)) << "other bytes are copied";
      EXPECT_EQ(store.crc, store.sample * 7 + 1);
      scheduler.stores().OnTaken(store);
      lagging_.push_back(store);
    }
    while (!folder_lags && EndLagging()) {
    }
  }

  bool EndLagging() {
    if (lagging_.empty()) return false;
    const StoreAction store = lagging_.front();
    lagging_.pop_front();
    const bool fits = folder_bytes + store.length <= folder_capacity;
    if (fits && folder.insert(store.sample).second) folder_bytes += store.length;
    scheduler.OnStoreEnded(dataset, store.sample, fits);
    return true;
  }

  // Races reads that take longer than `tail`.
  void HedgeAfter(int64_t tail) {
    for (size_t i = 0; i < flying_.size(); ++i) {
      ReadAction second;
      if (flying_[i].end - now_ > tail && scheduler.Hedge(flying_[i].action, &second)) {
        Begin(second);
      }
    }
  }

  Take TakeNow(Scheduler::Handout* out) {
    for (int i = 0; i < 100000; ++i) {
      const Take t = scheduler.leases().TakeBatch(stream, out);
      Pump();
      if (hedge_tail) HedgeAfter(*hedge_tail);
      if (t != Take::kPending) return t;
      if (!Step() && !scheduler.leases().consumer(stream).due) break;
    }
    ADD_FAILURE() << "no progress";
    return Take::kPending;
  }

  // One epoch: order, and that what is handed out lies where it is said to.
  void RunEpoch(uint64_t epoch) {
    const std::vector<SampleId> order = EpochOrder(spec_, epoch);
    size_t at = 0;
    Scheduler::Handout h;
    Take t = Take::kPending;
    while (at < order.size()) {
      t = TakeNow(&h);
      if (t == Take::kFailed) continue;
      ASSERT_EQ(t, Take::kReady);
      for (int i = 0; i < 3; ++i) Step();  // what ends late must not touch what is on loan
      for (size_t i = 0; i < h.samples.size(); ++i) {
        ASSERT_EQ(h.samples[i], order[at++]);
        ASSERT_EQ(memory_[h.offsets[i]], std::pair(h.samples[i], true));
      }
      scheduler.leases().Release(h.lease);
      ASSERT_EQ(CheckInvariants(scheduler), "");
    }
    ASSERT_EQ(TakeNow(&h), Take::kEndOfEpoch);
  }

  void CloseAndDrain() {
    scheduler.CloseStream(stream);
    while (Step()) {
    }
    ASSERT_EQ(CheckInvariants(scheduler), "");
    EXPECT_EQ(scheduler.reads().in_flight(), 0u);
    EXPECT_EQ(scheduler.reads().requests(), 0u);
    EXPECT_EQ(scheduler.arena().used(), scheduler.residency().bytes().kept);
  }

  SplitMix64 rng;
  Scheduler scheduler;
  DatasetId dataset = 0;
  StreamId stream = 0;
  size_t limit = 16;
  uint64_t ahead_bytes = 0;  // 0: nobody says
  uint64_t hang_permille = 0;
  uint64_t fail_permille = 0;
  std::optional<int64_t> hedge_tail;
  std::set<SampleId> folder;
  bool folder_lags = false;  // copies end when nothing else happens
  uint64_t folder_capacity = 0;
  uint64_t folder_bytes = 0;
  uint64_t source_reads = 0;
  uint64_t source_bytes = 0;
  std::vector<ReadAction> started;

 private:
  struct Flying {
    ReadAction action;
    int64_t end = 0;
  };
  std::vector<uint32_t> lengths_;
  SamplerSpec spec_;
  std::vector<Flying> flying_;
  std::deque<StoreAction> lagging_;
  std::map<uint64_t, std::pair<SampleId, bool>> memory_;  // by offset: what was read last
  int64_t now_ = 0;
};

SamplerSpec Spec(uint32_t n, bool shuffle = true) {
  SamplerSpec spec;
  spec.size = n;
  spec.shuffle = shuffle;
  spec.seed = 5;
  return spec;
}

// ---- staging ---------------------------------------------------------------------------------

TEST(Staging, IsWhatItsUseShows) {
  // Reads that are slower than the consumer: look-ahead never has what the tuner would allow.
  const uint32_t size = 112640;
  Node node(1, {.arena_bytes = 160'000'000}, std::vector<uint32_t>(6000, size));
  node.ahead_bytes = 30'000'000;
  node.scheduler.lookahead().SetReadAheadBytes(node.ahead_bytes);
  node.Open({.batch_size = 64}, Spec(6000));
  for (uint64_t epoch = 0; epoch < 3; ++epoch) node.RunEpoch(epoch);
  EXPECT_GT(node.scheduler.residency().bytes().kept, 136'000'000u);
  EXPECT_LT(node.scheduler.counters().evicted, 600u);
  // The consumer pauses: what look-ahead may have, it gets.
  for (int i = 0; i < 3000; ++i) {
    node.Pump();
    node.Step();
  }
  EXPECT_GT(node.scheduler.residency().bytes().ahead, 25'000'000u);
  EXPECT_EQ(CheckInvariants(node.scheduler), "");
}

// ---- two tiers -------------------------------------------------------------------------------

constexpr uint32_t kSize = 1024;

TEST(TwoTiers, TogetherTheyCoverAsMuchAsTheyHold) {
  const uint32_t n = 400;
  Node node(1, {.arena_bytes = 200 * kSize, .keep_bytes = 100 * kSize},
            std::vector<uint32_t>(n, kSize));
  node.folder_capacity = 150 * kSize;
  node.scheduler.residency().dataset(node.dataset).tier = {.present = true};
  node.Open({.batch_size = 8}, Spec(n));
  node.RunEpoch(0);
  // The second epoch's look-ahead has begun: none of it is of what the tiers hold.
  for (uint64_t epoch = 1; epoch < 5; ++epoch) node.RunEpoch(epoch);
  EXPECT_EQ(node.folder.size(), 150u);
  EXPECT_EQ(node.scheduler.residency().bytes().kept, 100u * kSize);
  EXPECT_EQ(node.scheduler.residency().dataset(node.dataset).uncovered, n - 250u);
  node.CloseAndDrain();
  const uint64_t bound = n + 4 * (n - 250);
  EXPECT_GE(node.source_reads, bound);
  EXPECT_LE(node.source_reads, bound + 64) << "more than look-ahead into the sixth epoch";
}

TEST(TwoTiers, AWarmFolderLeavesMemoryToTheRest) {
  const uint32_t n = 200;
  Node node(2, {.arena_bytes = 160 * kSize, .keep_bytes = 100 * kSize},
            std::vector<uint32_t>(n, kSize));
  for (SampleId s = 0; s < n; s += 2) {
    node.folder.insert(s);
    node.scheduler.residency().SetInTier(node.dataset, s, true);
  }
  node.folder_capacity = 100 * kSize;
  node.folder_bytes = 100 * kSize;
  node.scheduler.residency().dataset(node.dataset).tier = {.present = true};
  node.Open({.batch_size = 8}, Spec(n));
  for (uint64_t epoch = 0; epoch < 3; ++epoch) node.RunEpoch(epoch);
  EXPECT_EQ(node.source_reads, 100u);
  EXPECT_EQ(node.scheduler.residency().dataset(node.dataset).uncovered, 0u);
  EXPECT_EQ(node.scheduler.residency().bytes().kept, 100u * kSize);
}

TEST(TwoTiers, AFolderForEverythingGetsEverything) {
  const uint32_t n = 200;
  Node node(3, {.arena_bytes = 160 * kSize, .keep_bytes = 100 * kSize},
            std::vector<uint32_t>(n, kSize));
  node.folder_capacity = n * kSize;
  node.scheduler.residency().dataset(node.dataset).tier = {.present = true, .holds_all = true};
  node.Open({.batch_size = 8}, Spec(n));
  for (uint64_t epoch = 0; epoch < 2; ++epoch) node.RunEpoch(epoch);
  EXPECT_EQ(node.folder.size(), n);
  EXPECT_EQ(node.source_reads, n);
  EXPECT_EQ(node.scheduler.residency().bytes().kept, 100u * kSize);
}

TEST(TwoTiers, AFolderThatLostItsCopiesIsFilledAgain) {
  const uint32_t n = 100;
  Node node(4, {.arena_bytes = 60 * kSize, .keep = false}, std::vector<uint32_t>(n, kSize));
  node.folder_capacity = n * kSize;
  node.scheduler.residency().dataset(node.dataset).tier = {.present = true, .holds_all = true};
  node.Open({.batch_size = 4}, Spec(n));
  node.RunEpoch(0);
  node.RunEpoch(1);
  node.folder.clear();
  node.folder_bytes = 0;
  node.RunEpoch(2);
  node.RunEpoch(3);
  EXPECT_EQ(node.folder.size(), n);
}

TEST(TwoTiers, AMuchSlowerFolderIsPassedByAndTriedNowAndThen) {
  const uint32_t n = 200;
  Node node(5, {.arena_bytes = 60 * kSize, .keep = false}, std::vector<uint32_t>(n, kSize));
  node.folder_capacity = n * kSize;
  node.scheduler.residency().dataset(node.dataset).tier = {.present = true, .holds_all = true};
  node.Open({.batch_size = 4, .epochs = 4}, Spec(n));
  node.RunEpoch(0);
  node.RunEpoch(1);
  node.started.clear();
  node.scheduler.residency().dataset(node.dataset).costs = {
      .tier = PlaceCost::Flat(50 * kMilli), .source = PlaceCost::Flat(10 * kMilli), .late = true};
  node.RunEpoch(2);
  const auto from_folder = std::count_if(node.started.begin(), node.started.end(),
                                         [](auto& r) { return r.origin == Origin::kTier; });
  EXPECT_GT(from_folder, 0);
  EXPECT_LT(from_folder, 20);
  node.started.clear();
  node.scheduler.residency().dataset(node.dataset).costs = {.tier = PlaceCost::Flat(50 * kMilli),
                                                            .source = PlaceCost::Flat(10 * kMilli)};
  node.RunEpoch(3);
  for (const ReadAction& r : node.started) EXPECT_EQ(r.origin, Origin::kTier);
}

TEST(TwoTiers, AWaitForTheFolderIsNotTheSources) {
  Node node(12, {.arena_bytes = 60 * kSize, .keep = false}, std::vector<uint32_t>(20, kSize));
  node.folder_capacity = 20 * kSize;
  node.scheduler.residency().dataset(node.dataset).tier = {.present = true, .holds_all = true};
  for (SampleId s = 0; s < 20; ++s) {
    if (s == 5) continue;
    node.folder.insert(s);
    node.scheduler.residency().SetInTier(node.dataset, s, true);
  }
  node.limit = 1;
  node.Open({.batch_size = 4}, Spec(20, false));
  std::vector<StallCause> causes;
  Scheduler::Handout h;
  for (int batch = 0; batch < 2; ++batch) {
    Take t = Take::kPending;
    while ((t = node.scheduler.leases().TakeBatch(node.stream, &h)) == Take::kPending) {
      node.Pump();
      causes.push_back(Waits(node.scheduler).CauseOfStream(node.stream));
      node.Step();
    }
    ASSERT_EQ(t, Take::kReady);
    node.scheduler.leases().Release(h.lease);
  }
  EXPECT_EQ(std::count(causes.begin(), causes.end(), StallCause::kTier) > 0, true);
  EXPECT_EQ(std::count(causes.begin(), causes.end(), StallCause::kSource) > 0, true);
  EXPECT_EQ(causes[1], StallCause::kTier);
}

// ---- races -----------------------------------------------------------------------------------

TEST(Race, TheSecondReadEndsTheWait) {
  Node node(6, {.arena_bytes = 100 * kSize}, std::vector<uint32_t>(50, kSize));
  node.Open({.batch_size = 1}, Spec(50));
  Scheduler::Handout h;
  (void)node.scheduler.leases().TakeBatch(node.stream, &h);
  node.Pump();
  const ReadAction hanging = node.started.front();
  ReadAction second;
  ASSERT_TRUE(node.scheduler.Hedge(hanging, &second));
  EXPECT_EQ(second.origin, Origin::kSource);
  EXPECT_NE(second.offset, hanging.offset);
  ReadAction third;
  EXPECT_FALSE(node.scheduler.Hedge(hanging, &third)) << "raced already";
  const uint64_t used = node.scheduler.arena().used();
  node.scheduler.OnReadDone(second, true, 1, Origin::kSource);
  EXPECT_EQ(CheckInvariants(node.scheduler), "");
  EXPECT_EQ(node.scheduler.arena().used(), used) << "the loser may still write";
  EXPECT_FALSE(node.scheduler.Hedge(hanging, &third)) << "has lost already";
  ASSERT_EQ(node.scheduler.leases().TakeBatch(node.stream, &h), Take::kReady);
  EXPECT_EQ(h.offsets[0], second.offset);
  node.scheduler.OnReadDone(hanging, true, 1, Origin::kSource);
  EXPECT_EQ(CheckInvariants(node.scheduler), "");
  EXPECT_LT(node.scheduler.arena().used(), used);
  EXPECT_EQ(node.scheduler.counters().hedged, 1u);
}

TEST(Race, AFailingReadLeavesTheOtherToDecide) {
  for (const bool second_fails : {false, true}) {
    Node node(7, {.arena_bytes = 100 * kSize}, std::vector<uint32_t>(50, kSize));
    node.Open({.batch_size = 1}, Spec(50));
    Scheduler::Handout h;
    (void)node.scheduler.leases().TakeBatch(node.stream, &h);
    node.Pump();
    const ReadAction first = node.started.front();
    ReadAction second;
    ASSERT_TRUE(node.scheduler.Hedge(first, &second));
    const ReadAction& failing = second_fails ? second : first;
    const ReadAction& other = second_fails ? first : second;
    node.scheduler.OnReadDone(failing, false, 0, Origin::kSource);
    EXPECT_EQ(CheckInvariants(node.scheduler), "");
    EXPECT_EQ(node.scheduler.leases().TakeBatch(node.stream, &h), Take::kPending);
    node.scheduler.OnReadDone(other, true, 1, Origin::kSource);
    EXPECT_EQ(node.scheduler.leases().TakeBatch(node.stream, &h), Take::kReady);
    EXPECT_EQ(h.offsets[0], other.offset);
    EXPECT_EQ(CheckInvariants(node.scheduler), "");
  }
}

TEST(Race, OneReadInTwoHundredAtMost) {
  const uint32_t n = 4000;
  Node node(8, {.arena_bytes = 300 * kSize, .keep = false}, std::vector<uint32_t>(n, kSize));
  node.hang_permille = 100;
  node.hedge_tail = 500;
  node.Open({.batch_size = 8}, Spec(n));
  node.RunEpoch(0);
  EXPECT_GT(node.scheduler.counters().hedged, 10u);
  EXPECT_LE(node.scheduler.counters().hedged, 3 + node.scheduler.counters().reads / 200);
}

TEST(Race, AsManyAsTheKnobSays) {
  for (const uint64_t one_in : {uint64_t{0}, uint64_t{50}}) {
    const uint32_t n = 4000;
    Node node(8, {.arena_bytes = 300 * kSize, .keep = false}, std::vector<uint32_t>(n, kSize));
    node.scheduler.reads().SetHedging(one_in);
    node.hang_permille = 100;
    node.hedge_tail = 500;
    node.Open({.batch_size = 8}, Spec(n));
    node.RunEpoch(0);
    if (one_in == 0) {
      EXPECT_EQ(node.scheduler.counters().hedged, 0u);
    } else {
      EXPECT_GT(node.scheduler.counters().hedged, node.scheduler.counters().reads / 100);
      EXPECT_LE(node.scheduler.counters().hedged, 3 + node.scheduler.counters().reads / one_in);
    }
  }
}

TEST(Admission, TiersTakeNothingMoreWhileItIsOff) {
  const uint32_t n = 200;
  Node node(16, {.arena_bytes = 120 * kSize}, std::vector<uint32_t>(n, kSize));
  node.folder_capacity = n * kSize;
  node.scheduler.residency().dataset(node.dataset).tier = {.present = true, .holds_all = false};
  node.Open({.batch_size = 4}, Spec(n));
  node.scheduler.SetAdmission(false, false);
  node.RunEpoch(0);
  EXPECT_EQ(node.scheduler.residency().bytes().kept, 0u);
  EXPECT_TRUE(node.folder.empty());
  node.scheduler.SetAdmission(true, false);
  node.RunEpoch(1);
  const uint64_t kept = node.scheduler.residency().bytes().kept;
  EXPECT_GT(kept, 20 * kSize);
  EXPECT_TRUE(node.folder.empty());
  node.scheduler.SetAdmission(false, true);
  node.RunEpoch(2);
  EXPECT_LE(node.scheduler.residency().bytes().kept, kept);
  EXPECT_FALSE(node.folder.empty());
  node.CloseAndDrain();
}

TEST(Race, LosersHoldNoMoreThanAnEighthOfTheMemory) {
  Node node(14, {.arena_bytes = 16 * kSize}, std::vector<uint32_t>(50, kSize));
  node.limit = 4;
  node.Open({.batch_size = 1}, Spec(50));
  node.Pump();
  ASSERT_EQ(node.started.size(), 4u);
  ReadAction second;
  for (size_t i = 0; i < 4; ++i) {
    EXPECT_EQ(node.scheduler.Hedge(node.started[i], &second), i < 2) << i;
    if (i == 0) node.scheduler.OnReadDone(second, true, 1, Origin::kSource);
  }
  EXPECT_EQ(CheckInvariants(node.scheduler), "");
}

// ---- groups ----------------------------------------------------------------------------------

// Two tar shards of `each` samples; their contents do not matter here.
std::shared_ptr<const Catalog> Shards(const testing::TempFolder& folder, uint32_t each) {
  for (const char* name : {"a.tar", "b.tar"}) {
    std::string bytes;
    for (uint32_t i = 0; i < each; ++i) {
      bytes += testing::TarMember(StrCat("s", 1000 + i, ".bin"), std::string(kSize, 'x'));
    }
    folder.Write(name, bytes + testing::TarEnd());
  }
  Result<std::unique_ptr<Catalog>> catalog = BuildCatalog(folder.path(), {});
  EXPECT_TRUE(catalog) << catalog.error().message();
  return *std::move(catalog);
}

// Members of a group follow each other in one file, with no more between them than was allowed.
void CheckGroups(const Catalog& catalog, const std::vector<ReadAction>& reads, uint64_t most,
                 uint64_t gap) {
  std::set<uint32_t> seen;
  for (size_t i = 0; i < reads.size();) {
    size_t end = i + 1;
    while (end < reads.size() && reads[i].group != 0 && reads[end].group == reads[i].group) ++end;
    if (reads[i].group != 0) {
      EXPECT_TRUE(seen.insert(reads[i].group).second) << "a group in two pieces";
      EXPECT_GT(end, i + 1) << "a group of one";
    }
    const Extent first = catalog.extent(reads[i].sample);
    for (size_t k = i + 1; k < end; ++k) {
      const Extent before = catalog.extent(reads[k - 1].sample);
      const Extent extent = catalog.extent(reads[k].sample);
      EXPECT_EQ(extent.object, first.object);
      EXPECT_GE(extent.offset, before.offset + before.length);
      EXPECT_LE(extent.offset - before.offset - before.length, gap);
      EXPECT_LE(extent.offset + extent.length - first.offset, most);
    }
    i = end;
  }
}

constexpr ReadCosts kMerge{.tier = {}, .source = {}, .merge_bytes = 16 << 10, .merge_gap = 2048};

TEST(Groups, WhatTheOrderAsksForNextIsReadInOneRequest) {
  const testing::TempFolder folder;
  const auto catalog = Shards(folder, 50);
  Node node(9, {.arena_bytes = 60 * kSize, .keep = false}, std::vector<uint32_t>(100, kSize));
  node.scheduler.residency().dataset(node.dataset).layout = catalog;
  node.scheduler.residency().dataset(node.dataset).costs = kMerge;
  node.limit = 4;
  node.Open({.batch_size = 8, .epochs = 2}, Spec(100, false));
  node.RunEpoch(0);
  node.RunEpoch(1);
  CheckGroups(*catalog, node.started, kMerge.merge_bytes, kMerge.merge_gap);
  EXPECT_EQ(node.source_reads, 200u);
  EXPECT_LT(node.scheduler.counters().requests, 60u);
  node.CloseAndDrain();
}

TEST(Groups, SamplesThatAreStillBeingReadFeedNobody) {
  const testing::TempFolder folder;
  const auto catalog = Shards(folder, 200);
  Node node(15, {.arena_bytes = 300 * kSize, .keep = false}, std::vector<uint32_t>(400, kSize));
  node.scheduler.residency().dataset(node.dataset).layout = catalog;
  node.scheduler.residency().dataset(node.dataset).costs = kMerge;
  node.Open({.batch_size = 4}, Spec(400, false));
  node.Pump();
  EXPECT_GT(node.scheduler.reads().in_flight(), 8 * node.scheduler.reads().requests());
  EXPECT_EQ(node.scheduler.residency().bytes().ready, 0u);
  EXPECT_EQ(node.scheduler.residency().bytes().ahead, node.scheduler.reads().in_flight() * kSize);
  for (int i = 0; i < 100; ++i) node.Step();
  EXPECT_GE(node.scheduler.residency().bytes().ready, 100 * kSize);
}

TEST(Groups, AllThatFitsIsStagedInLargeRequestsWhateverTheOrder) {
  const testing::TempFolder folder;
  const auto catalog = Shards(folder, 50);
  for (const bool in_memory : {true, false}) {
    Node node(10, {.arena_bytes = (in_memory ? 200 : 80) * kSize, .keep = in_memory},
              std::vector<uint32_t>(100, kSize));
    node.folder_capacity = in_memory ? 0 : 100 * kSize;
    node.scheduler.residency().dataset(node.dataset).tier = {.present = !in_memory,
                                                             .holds_all = !in_memory};
    node.scheduler.residency().dataset(node.dataset).layout = catalog;
    node.scheduler.residency().dataset(node.dataset).costs = kMerge;
    node.limit = 4;
    node.Open({.batch_size = 8, .epochs = 2, .whole = true}, Spec(100));
    node.RunEpoch(0);
    CheckGroups(*catalog, node.started, kMerge.merge_bytes, kMerge.merge_gap);
    EXPECT_EQ(node.source_reads, 100u);
    // 76 KB a shard in pieces of 16 KiB.
    EXPECT_LE(node.scheduler.counters().requests, in_memory ? 25u : 40u);
    node.RunEpoch(1);
    EXPECT_EQ(node.source_reads, 100u);
    node.CloseAndDrain();
  }
}

// A tar header lies between two samples.
TEST(Groups, NothingIsReadAcrossAGapThatCostsMoreThanARequest) {
  const testing::TempFolder folder;
  const auto catalog = Shards(folder, 50);
  for (const bool shuffle : {false, true}) {
    Node node(13, {.arena_bytes = 200 * kSize}, std::vector<uint32_t>(100, kSize));
    node.scheduler.residency().dataset(node.dataset).layout = catalog;
    node.scheduler.residency().dataset(node.dataset).costs = {
        .tier = {}, .source = {}, .merge_bytes = 16 << 10, .merge_gap = 511};
    node.Open({.batch_size = 8, .epochs = 1, .whole = true}, Spec(100, shuffle));
    node.RunEpoch(0);
    EXPECT_EQ(node.scheduler.counters().requests, 100u);
    for (const ReadAction& read : node.started) EXPECT_EQ(read.group, 0u);
  }
}

TEST(Groups, WhatIsNotUsedThisEpochIsNotRead) {
  const testing::TempFolder folder;
  const auto catalog = Shards(folder, 50);
  Node node(11, {.arena_bytes = 200 * kSize}, std::vector<uint32_t>(100, kSize));
  node.scheduler.residency().dataset(node.dataset).layout = catalog;
  node.scheduler.residency().dataset(node.dataset).costs = kMerge;
  SamplerSpec spec = Spec(100);
  spec.world = 4;
  node.Open({.batch_size = 8, .epochs = 1}, spec);
  node.RunEpoch(0);
  EXPECT_EQ(node.source_reads, 25u);
}

// A copy that is on its way into the folder is not in it yet.
TEST(Groups, NeighboursAreStagedOnceAlsoWhenTheFolderIsSlow) {
  const testing::TempFolder folder;
  const auto catalog = Shards(folder, 50);
  Node node(13, {.arena_bytes = 80 * kSize, .keep = false}, std::vector<uint32_t>(100, kSize));
  node.folder_capacity = 100 * kSize;
  node.folder_lags = true;
  node.scheduler.residency().dataset(node.dataset).tier = {.present = true, .holds_all = true};
  node.scheduler.residency().dataset(node.dataset).layout = catalog;
  node.scheduler.residency().dataset(node.dataset).costs = kMerge;
  node.Open({.batch_size = 8, .epochs = 1, .whole = true}, Spec(100));
  node.RunEpoch(0);
  EXPECT_EQ(node.source_reads, 100u) << "what is on its way into the folder is read from there";
  node.CloseAndDrain();
}

// Each sample under way takes memory for bookkeeping, also where thousands fit one request.
TEST(Groups, OfManySmallSamplesOnlySoManyAreUnderWay) {
  const testing::TempFolder folder;
  const auto catalog = Shards(folder, 500);
  for (const bool whole : {true, false}) {
    Node node(12, {.arena_bytes = 2000 * kSize, .max_samples = 64},
              std::vector<uint32_t>(1000, kSize));
    node.scheduler.residency().dataset(node.dataset).layout = catalog;
    node.scheduler.residency().dataset(node.dataset).costs = {
        .tier = {}, .source = {}, .merge_bytes = 4 << 20, .merge_gap = 2048};
    node.Open({.batch_size = 8, .whole = whole}, Spec(1000, whole));
    node.Pump();
    EXPECT_LT(node.scheduler.reads().in_flight(), 64u + 64 / 16);
    EXPECT_GE(node.scheduler.reads().requests(), 16u);
    node.RunEpoch(0);
    EXPECT_EQ(node.source_reads, 1000u);
    EXPECT_LT(node.scheduler.counters().requests, 600u);
    node.CloseAndDrain();
  }
}

// ---- all at once -----------------------------------------------------------------------------

TEST(Reads, RandomNodes) {
  const testing::TempFolder folder;
  const auto catalog = Shards(folder, 40);
  const uint32_t n = 80;
  for (uint64_t seed = 0; seed < 300; ++seed) {
    SCOPED_TRACE(seed);
    SplitMix64 rng(seed);
    const bool keep = rng.Below(3) != 0;
    Node node(seed,
              {.arena_bytes = (30 + rng.Below(120)) * kSize,
               .keep = keep,
               .max_samples = 4 + rng.Below(200)},
              std::vector<uint32_t>(n, kSize));
    node.scheduler.residency().dataset(node.dataset).layout = catalog;
    node.limit = 1 + rng.Below(20);
    if (rng.Below(2) != 0) node.hang_permille = 100;
    if (rng.Below(2) != 0) node.fail_permille = 50;
    if (rng.Below(2) != 0) node.hedge_tail = 200;
    if (rng.Below(3) != 0) {
      node.folder_capacity = rng.Below(120) * kSize;
      node.scheduler.residency().dataset(node.dataset).tier = {
          .present = true, .holds_all = node.folder_capacity >= n * kSize};
    }
    const bool whole = rng.Below(2) != 0;
    StreamShape shape{.batch_size = static_cast<uint32_t>(1 + rng.Below(8)), .whole = whole};
    shape.contiguous = false;
    node.Open(shape, Spec(n, rng.Below(3) != 0));
    for (uint64_t epoch = 0; epoch < 4; ++epoch) {
      ReadCosts costs = kMerge;
      costs.merge_bytes = rng.Below(3) * (8 << 10);
      costs.merge_gap = rng.Below(2) * 2048;
      costs.tier = PlaceCost::Flat(static_cast<double>(rng.Below(100)));
      costs.source = PlaceCost::Flat(10);
      costs.late = rng.Below(2) != 0;
      node.scheduler.residency().dataset(node.dataset).costs = costs;
      node.RunEpoch(epoch);
      if (::testing::Test::HasFatalFailure()) return;
      if (rng.Below(4) == 0) {
        node.folder.clear();
        node.folder_bytes = 0;
      }
    }
    node.CloseAndDrain();
    if (::testing::Test::HasFatalFailure()) return;
  }
}

}  // namespace
}  // namespace forebay
