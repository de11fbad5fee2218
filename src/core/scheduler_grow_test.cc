// Data sets that grow while they are read, and samples that are invalidated at any moment.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <deque>
#include <map>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "base/rng.h"
#include "core/scheduler.h"
#include "core/scheduler_check.h"

namespace forebay {
namespace {

using Take = Scheduler::Take;

StreamShape Itemised() { return {.dataset = 0, .itemised = true, .declared = true}; }

uint64_t Seeds() {
  const char* text = std::getenv("FOREBAY_SEEDS");
  return text == nullptr ? 200 : std::strtoull(text, nullptr, 10);
}

std::vector<ReadAction> Reads(Scheduler& scheduler, size_t limit = 16) {
  std::vector<ReadAction> reads;
  scheduler.leases().NextReads(limit, &reads);
  return reads;
}

void End(Scheduler& scheduler, const ReadAction& read) {
  scheduler.OnReadDone(read, true, read.sample * 7 + 1, Origin::kSource);
  ASSERT_EQ(CheckInvariants(scheduler), "");
}

TEST(GrowingScheduler, SamplesMayBeDeclaredAndFetchedAsSoonAsTheyAreThere) {
  Scheduler scheduler({.arena_bytes = 1 << 20});
  const DatasetId d = scheduler.AddDataset({});
  const StreamId stream = scheduler.OpenStream(Itemised());
  ASSERT_EQ(CheckInvariants(scheduler), "");
  ASSERT_TRUE(scheduler.AppendSamples(d, std::vector<uint32_t>{100, 0, 300}));
  scheduler.ExtendOrder(stream, scheduler.lookahead().streams().at(stream).generation, 0, {2, 1},
                        false);
  for (const ReadAction& read : Reads(scheduler)) End(scheduler, read);
  EXPECT_EQ(scheduler.counters().reads, 2u);
  ASSERT_TRUE(scheduler.AppendSamples(d, std::vector<uint32_t>{400}));
  scheduler.ExtendOrder(stream, scheduler.lookahead().streams().at(stream).generation, 1, {3, 2},
                        false);
  for (const ReadAction& read : Reads(scheduler)) End(scheduler, read);
  EXPECT_EQ(scheduler.counters().reads, 3u) << "2 was there";
  for (const SampleId s : {2, 1, 3}) {
    LeaseId lease = kNoLease;
    Scheduler::Handout out;
    ASSERT_EQ(scheduler.leases().FetchSample(stream, s, &lease, &out), Take::kReady);
    EXPECT_EQ(out.samples, std::vector<SampleId>{s});
    scheduler.leases().Release(lease);
    ASSERT_EQ(CheckInvariants(scheduler), "");
  }
}

TEST(GrowingScheduler, TablesThatFindNoRoomAddNothing) {
  Scheduler scheduler({.arena_bytes = 1 << 20});
  const DatasetId d = scheduler.AddDataset({});
  EXPECT_TRUE(scheduler.AppendSamples(d, std::vector<uint32_t>{1}, 1000));
  EXPECT_FALSE(scheduler.AppendSamples(d, std::vector<uint32_t>{1, 2}, 2 << 20));
  EXPECT_EQ(scheduler.residency().dataset(d).HeldBits().size(), 1u);
  EXPECT_EQ(scheduler.residency().dataset(d).uncovered, 1u);
  EXPECT_GE(scheduler.arena().used(), 1000u);
  EXPECT_EQ(CheckInvariants(scheduler), "");
}

TEST(GrowingScheduler, WhatIsHeldIsToldOfSamplesThatCameLater) {
  Scheduler scheduler({.arena_bytes = 1 << 20});
  const DatasetId d = scheduler.AddDataset(std::vector<uint32_t>{100});
  scheduler.residency().SetInTier(d, 0, true);
  EXPECT_EQ(scheduler.residency().dataset(d).TakeHeldChanges().got, std::vector<SampleId>{0});
  ASSERT_TRUE(scheduler.AppendSamples(d, std::vector<uint32_t>{100}));
  EXPECT_TRUE(scheduler.residency().dataset(d).TakeHeldChanges().got.empty());
  scheduler.residency().SetInTier(d, 1, true);
  EXPECT_EQ(scheduler.residency().dataset(d).TakeHeldChanges().got, std::vector<SampleId>{1});
  scheduler.Invalidate(d, 0);
  EXPECT_EQ(scheduler.residency().dataset(d).TakeHeldChanges().lost, std::vector<SampleId>{0});
  EXPECT_EQ(CheckInvariants(scheduler), "");
}

// In a cluster each new sample comes with its share.
TEST(GrowingScheduler, CopiesOfOthersSamplesLeaveRoomForWhatIsToCome) {
  constexpr auto kHome = static_cast<uint8_t>(KeepShare::kHome);
  constexpr auto kReplica = static_cast<uint8_t>(KeepShare::kReplica);
  Scheduler scheduler({.arena_bytes = 1 << 20, .keep = false});
  const DatasetId d = scheduler.AddDataset({});
  const StreamId stream = scheduler.OpenStream(Itemised());
  scheduler.residency().dataset(d).tier = {
      .present = true, .holds_all = false, .left_by_copies = 50'000};
  scheduler.stores().SetFolderRoom(60'000);
  SampleId next = 0;
  // Whether the folder is to get it.
  const auto stored = [&](uint8_t share) {
    EXPECT_TRUE(scheduler.AppendSamples(d, std::vector<uint32_t>{4000}, 0, {{share}}));
    EXPECT_EQ(CheckInvariants(scheduler), "");
    LeaseId lease = kNoLease;
    Scheduler::Handout out;
    EXPECT_EQ(scheduler.leases().FetchSample(stream, next++, &lease, &out), Take::kPending);
    const std::vector<ReadAction> reads = Reads(scheduler);
    EXPECT_EQ(reads.size(), 1u);
    const bool store = reads.at(0).store;
    End(scheduler, reads[0]);
    scheduler.leases().Release(lease);
    StoreAction action;
    if (store && scheduler.stores().First(&action)) {
      scheduler.stores().Begin(action);
      scheduler.stores().OnTaken(action);
      scheduler.OnStoreEnded(d, action.sample, true);
    }
    EXPECT_EQ(CheckInvariants(scheduler), "");
    return store;
  };
  EXPECT_TRUE(stored(kReplica));
  scheduler.stores().SetFolderRoom(52'000);
  EXPECT_FALSE(stored(kReplica));
  EXPECT_TRUE(stored(kHome));
  scheduler.residency().SetShare(d, {kHome, kHome, kReplica});
  EXPECT_EQ(CheckInvariants(scheduler), "");
}

// Whoever fetches its samples keeps them: memory does not, however much there is, and the folder
// gets only what other nodes asked for, which find memory beside it.
TEST(GrowingScheduler, SamplesOfAPassingDataSetAreKeptByWhoFetchesThem) {
  Scheduler scheduler({.arena_bytes = 1 << 20});
  const DatasetId d = scheduler.AddDataset({});
  scheduler.residency().dataset(d).passing = true;
  scheduler.residency().dataset(d).tier = {.present = true, .holds_all = true};
  const StreamId own = scheduler.OpenStream(Itemised());
  StreamShape shape;
  shape.serving = true;
  const StreamId serving = scheduler.OpenStream(shape);
  ASSERT_TRUE(scheduler.AppendSamples(d, std::vector<uint32_t>{4000, 4000}));
  SampleId sample = 0;
  for (const StreamId stream : {own, serving}) {
    LeaseId lease = kNoLease;
    Scheduler::Handout out;
    EXPECT_EQ(scheduler.leases().FetchSample(stream, sample, &lease, &out), Take::kPending);
    const std::vector<ReadAction> reads = Reads(scheduler);
    ASSERT_EQ(reads.size(), 1u) << sample;
    EXPECT_EQ(reads[0].store, stream == serving);
    End(scheduler, reads[0]);
    EXPECT_EQ(scheduler.leases().FetchSample(stream, sample, &lease, &out), Take::kReady);
    scheduler.leases().Release(lease);
    EXPECT_FALSE(scheduler.residency().dataset(d).Held(sample));
    EXPECT_EQ(CheckInvariants(scheduler), "");
    ++sample;
  }
}

class Invalidation : public ::testing::Test {
 protected:
  Invalidation() {
    scheduler_.AddDataset(std::vector<uint32_t>(4, 1000));
    stream_ = scheduler_.OpenStream(Itemised());
  }
  Take Fetch(SampleId s, LeaseId* lease) {
    return scheduler_.leases().FetchSample(stream_, s, lease, &out_);
  }
  void Invalidate(SampleId s) {
    scheduler_.Invalidate(0, s);
    ASSERT_EQ(CheckInvariants(scheduler_), "");
  }

  Scheduler scheduler_{{.arena_bytes = 1 << 20}};
  StreamId stream_ = 0;
  Scheduler::Handout out_;
};

TEST_F(Invalidation, ALeaseKeepsWhatItHasAndLaterFetchesFail) {
  LeaseId lease = kNoLease;
  ASSERT_EQ(Fetch(0, &lease), Take::kPending);
  for (const ReadAction& read : Reads(scheduler_)) End(scheduler_, read);
  ASSERT_EQ(Fetch(0, &lease), Take::kReady);
  EXPECT_GT(scheduler_.residency().bytes().kept, 0u);
  Invalidate(0);
  EXPECT_EQ(scheduler_.residency().bytes().kept, 0u);
  EXPECT_GT(scheduler_.arena().used(), 0u) << "it is on loan";
  LeaseId later = kNoLease;
  EXPECT_EQ(Fetch(0, &later), Take::kFailed);
  EXPECT_EQ(out_.failed, 0u);
  EXPECT_EQ(later, kNoLease);
  scheduler_.leases().Release(lease);
  EXPECT_EQ(scheduler_.arena().used(), 0u);
  EXPECT_EQ(CheckInvariants(scheduler_), "");
}

TEST_F(Invalidation, AReadUnderWayIsDiscardedAndItsWaiterIsTold) {
  scheduler_.residency().dataset(0).tier = {.present = true, .holds_all = true};
  LeaseId lease = kNoLease;
  ASSERT_EQ(Fetch(1, &lease), Take::kPending);
  const std::vector<ReadAction> reads = Reads(scheduler_);
  ASSERT_EQ(reads.size(), 1u);
  EXPECT_TRUE(reads[0].store);
  Invalidate(1);
  EXPECT_TRUE(scheduler_.leases().consumer(stream_).due) << "it need not wait for the read";
  EXPECT_EQ(Fetch(1, &lease), Take::kFailed);
  End(scheduler_, reads[0]);
  StoreAction store;
  EXPECT_FALSE(scheduler_.stores().First(&store));
  EXPECT_FALSE(scheduler_.residency().dataset(0).Held(1));
  EXPECT_EQ(Fetch(1, &lease), Take::kFailed);
  scheduler_.leases().Release(lease);
  EXPECT_EQ(scheduler_.arena().used(), 0u);
  EXPECT_EQ(scheduler_.leases().leases().size(), 0u);
}

TEST_F(Invalidation, CopiesAreNotMadeAndThoseUnderWayDoNotCount) {
  scheduler_.residency().dataset(0).tier = {.present = true, .holds_all = true};
  scheduler_.ExtendOrder(stream_, scheduler_.lookahead().streams().at(stream_).generation, 0,
                         {0, 1, 2}, false);
  for (const ReadAction& read : Reads(scheduler_)) End(scheduler_, read);
  StoreAction first;
  ASSERT_TRUE(scheduler_.stores().First(&first));
  scheduler_.stores().Begin(first);
  Invalidate(first.sample);
  EXPECT_TRUE(scheduler_.stores().Writing(0, first.sample));
  scheduler_.stores().OnTaken(first);
  ASSERT_EQ(CheckInvariants(scheduler_), "");
  scheduler_.OnStoreEnded(0, first.sample, true);
  EXPECT_FALSE(scheduler_.stores().Writing(0, first.sample));
  EXPECT_FALSE(scheduler_.residency().dataset(0).Held(first.sample));
  StoreAction second;
  ASSERT_TRUE(scheduler_.stores().First(&second));
  Invalidate(second.sample);
  StoreAction third;
  ASSERT_TRUE(scheduler_.stores().First(&third));
  EXPECT_NE(third.sample, second.sample);
  EXPECT_EQ(scheduler_.stores().under_way(), 1u);
}

TEST_F(Invalidation, LookAheadPassesByWhatIsDead) {
  Invalidate(1);
  scheduler_.ExtendOrder(stream_, scheduler_.lookahead().streams().at(stream_).generation, 0,
                         {0, 1, 2}, false);
  std::vector<SampleId> started;
  for (const ReadAction& read : Reads(scheduler_)) started.push_back(read.sample);
  EXPECT_EQ(started, (std::vector<SampleId>{0, 2}));
}

TEST_F(Invalidation, WhatWaitsForMemoryIsNotInTheWayOfOthers) {
  Scheduler scheduler({.arena_bytes = 64 * 100});
  scheduler.AddDataset(std::vector<uint32_t>(4, 64 * 60));
  const StreamId old = scheduler.OpenStream(Itemised());
  const StreamId young = scheduler.OpenStream(Itemised());
  LeaseId held = kNoLease, waiting = kNoLease, next = kNoLease;
  Scheduler::Handout out;
  ASSERT_EQ(scheduler.leases().FetchSample(young, 0, &held, &out), Take::kPending);
  for (const ReadAction& read : Reads(scheduler)) End(scheduler, read);
  ASSERT_EQ(scheduler.leases().FetchSample(young, 0, &held, &out), Take::kReady);
  ASSERT_EQ(scheduler.leases().FetchSample(old, 1, &waiting, &out), Take::kPending);
  EXPECT_TRUE(Reads(scheduler).empty());
  scheduler.Invalidate(0, 1);
  scheduler.leases().Release(held);
  ASSERT_EQ(scheduler.leases().FetchSample(young, 2, &next, &out), Take::kPending);
  for (const ReadAction& read : Reads(scheduler)) End(scheduler, read);
  EXPECT_EQ(scheduler.leases().FetchSample(young, 2, &next, &out), Take::kReady);
  EXPECT_EQ(scheduler.leases().FetchSample(old, 1, &waiting, &out), Take::kFailed);
  EXPECT_EQ(CheckInvariants(scheduler), "");
}

// What is fetched before any order is known is not part of one that comes later.
TEST_F(Invalidation, FetchesBeforeAnOrderDoNotCountInIt) {
  for (int i = 0; i < 3; ++i) {
    LeaseId lease = kNoLease;
    while (Fetch(0, &lease) == Take::kPending) {
      for (const ReadAction& read : Reads(scheduler_)) End(scheduler_, read);
    }
    scheduler_.leases().Release(lease);
  }
  Scheduler scheduler({.arena_bytes = 1 << 20, .keep = false});
  scheduler.AddDataset(std::vector<uint32_t>(4, 1000));
  const StreamId stream = scheduler.OpenStream(Itemised());
  LeaseId lease = kNoLease;
  Scheduler::Handout out;
  ASSERT_EQ(scheduler.leases().FetchSample(stream, 0, &lease, &out), Take::kPending);
  for (const ReadAction& read : Reads(scheduler)) End(scheduler, read);
  ASSERT_EQ(scheduler.leases().FetchSample(stream, 0, &lease, &out), Take::kReady);
  scheduler.leases().Release(lease);
  scheduler.ExtendOrder(stream, scheduler.lookahead().streams().at(stream).generation, 0, {0, 1},
                        false);
  EXPECT_EQ(Reads(scheduler).size(), 2u) << "0 is needed once more";
}

// ---- any order of events ---------------------------------------------------------------------

// A node whose programs open, change and announce files at random. Reads write where they were
// told to, also those that end late; what is on loan must stay what it was.
class RandomNode {
 public:
  explicit RandomNode(uint64_t seed)
      : rng_(seed),
        scheduler_({.arena_bytes = 64 * (200 + rng_.Below(2000)), .keep = rng_.Below(4) != 0}) {
    scheduler_.AddDataset({});
    if (rng_.Below(2) == 0) {
      scheduler_.residency().dataset(0).tier = {.present = true, .holds_all = rng_.Below(2) == 0};
    }
    for (int i = 0; i < 2; ++i) streams_.push_back(scheduler_.OpenStream(Itemised()));
    Append();
  }

  void Event() {
    switch (rng_.Below(10)) {
      case 0:
        if (lengths_.size() < 300) Append();
        break;
      case 1:
        if (rng_.Below(3) == 0) Invalidate();
        break;
      case 2:
        if (rng_.Below(8) == 0) Declare();
        break;
      case 3:
      case 4:
        if (fetches_.size() < 6) BeginFetch();
        break;
      case 5:
        AskAgain();
        break;
      case 6:
        ReleaseOne();
        break;
      case 7:
        StoreStep();
        break;
      default:
        EndRead();
    }
    Pump();
    ASSERT_EQ(CheckInvariants(scheduler_), "");
  }

  // Everything that was begun ends, and nothing is left.
  void Finish() {
    for (int i = 0; i < 2000 && (!fetches_.empty() || !flying_.empty() || !loans_.empty()); ++i) {
      while (!loans_.empty()) ReleaseOne();
      while (!stores_.empty()) EndStore();
      AskAgain();
      EndRead();
      Pump();
      ASSERT_EQ(CheckInvariants(scheduler_), "");
    }
    EXPECT_TRUE(fetches_.empty()) << "hang";
    for (const StreamId stream : streams_) scheduler_.CloseStream(stream);
    for (int i = 0; i < 2000; ++i) {
      Pump();
      EndRead();
      StoreStep();
    }
    while (!stores_.empty()) EndStore();
    ASSERT_EQ(CheckInvariants(scheduler_), "");
    EXPECT_EQ(scheduler_.reads().in_flight(), 0u);
    EXPECT_EQ(scheduler_.arena().used(),
              scheduler_.residency().bytes().kept + scheduler_.residency().bytes().storing);
  }

 private:
  struct Fetching {
    StreamId stream = 0;
    SampleId sample = 0;
    LeaseId lease = kNoLease;
  };
  struct Loan {
    SampleId sample = 0;
    LeaseId lease = kNoLease;
    uint64_t offset = 0;
  };

  SampleId AnySample() { return static_cast<SampleId>(rng_.Below(lengths_.size())); }

  void Append() {
    std::vector<uint32_t> lengths(1 + rng_.Below(20));
    for (uint32_t& l : lengths) l = static_cast<uint32_t>(rng_.Below(64 * 30));
    ASSERT_TRUE(scheduler_.AppendSamples(0, lengths));
    lengths_.insert(lengths_.end(), lengths.begin(), lengths.end());
  }

  void Invalidate() {
    const SampleId s = AnySample();
    scheduler_.Invalidate(0, s);
    dead_.insert(s);
    EXPECT_TRUE(scheduler_.residency().dataset(0).Dead(s));
    EXPECT_FALSE(scheduler_.residency().dataset(0).Held(s));
  }

  void Declare() {
    std::vector<SampleId> order(1 + rng_.Below(60));
    for (SampleId& s : order) s = AnySample();
    const StreamId stream = streams_[rng_.Below(streams_.size())];
    scheduler_.ExtendOrder(stream, scheduler_.lookahead().streams().at(stream).generation, epoch_++,
                           order, false);
  }

  void BeginFetch() {
    Fetching fetch{.stream = streams_[rng_.Below(streams_.size())], .sample = AnySample()};
    const bool dead = dead_.contains(fetch.sample);
    if (Ask(&fetch)) {
      EXPECT_FALSE(dead && got_) << "bytes of an invalidated sample";
      return;
    }
    EXPECT_FALSE(dead) << "nothing can come of it";
    fetches_.push_back(fetch);
  }

  void AskAgain() {
    if (fetches_.empty()) return;
    const size_t i = rng_.Below(fetches_.size());
    if (rng_.Below(20) == 0) {
      scheduler_.leases().Release(fetches_[i].lease);  // who asked has gone
    } else if (!Ask(&fetches_[i])) {
      EXPECT_FALSE(dead_.contains(fetches_[i].sample)) << "it must fail at once";
      return;
    }
    fetches_.erase(fetches_.begin() + static_cast<ptrdiff_t>(i));
  }

  // True: it is over; `got_`: with the sample.
  bool Ask(Fetching* fetch) {
    Scheduler::Handout out;
    const Take take =
        scheduler_.leases().FetchSample(fetch->stream, fetch->sample, &fetch->lease, &out);
    got_ = take == Take::kReady;
    if (take == Take::kPending) return false;
    if (!got_) {
      EXPECT_EQ(take, Take::kFailed);
      EXPECT_TRUE(dead_.contains(fetch->sample)) << "no read fails here";
      if (fetch->lease != kNoLease) scheduler_.leases().Release(fetch->lease);
      return true;
    }
    EXPECT_EQ(out.lengths[0], lengths_[fetch->sample]);
    EXPECT_EQ(memory_[out.offsets[0]], fetch->sample);
    loans_.push_back({fetch->sample, out.lease, out.offsets[0]});
    return true;
  }

  void ReleaseOne() {
    if (loans_.empty()) return;
    const size_t i = rng_.Below(loans_.size());
    EXPECT_EQ(memory_[loans_[i].offset], loans_[i].sample) << "changed while it was on loan";
    scheduler_.leases().Release(loans_[i].lease);
    loans_.erase(loans_.begin() + static_cast<ptrdiff_t>(i));
  }

  void Pump() {
    for (const ReadAction& read : Reads(scheduler_, 4)) {
      flying_.push_back(read);
      ReadAction second;
      if (rng_.Below(10) == 0 && scheduler_.Hedge(read, &second)) flying_.push_back(second);
    }
    (void)scheduler_.lookahead().TakeOrders();
  }

  void EndRead() {
    if (flying_.empty()) return;
    const size_t i = rng_.Below(flying_.size());
    const ReadAction read = flying_[i];
    flying_.erase(flying_.begin() + static_cast<ptrdiff_t>(i));
    memory_[read.offset] = read.sample;
    const bool hit = read.origin == Origin::kTier && folder_.contains(read.sample);
    scheduler_.OnReadDone(read, true, read.sample * 7 + 1, hit ? Origin::kTier : Origin::kSource);
  }

  void StoreStep() {
    StoreAction store;
    if (scheduler_.stores().First(&store)) {
      EXPECT_FALSE(dead_.contains(store.sample)) << "an invalidated sample is copied";
      scheduler_.stores().Begin(store);
      stores_.push_back(store);
    } else if (!stores_.empty()) {
      EndStore();
    }
  }

  void EndStore() {
    const StoreAction store = stores_.front();
    stores_.pop_front();
    EXPECT_EQ(memory_[store.offset], store.sample) << "other bytes are copied";
    scheduler_.stores().OnTaken(store);
    const bool stored = rng_.Below(4) != 0;
    if (stored && !dead_.contains(store.sample)) folder_.insert(store.sample);
    scheduler_.OnStoreEnded(0, store.sample, stored);
  }

  SplitMix64 rng_;
  Scheduler scheduler_;
  std::vector<StreamId> streams_;
  std::vector<uint32_t> lengths_;
  std::set<SampleId> dead_;
  std::set<SampleId> folder_;
  std::vector<Fetching> fetches_;
  std::vector<Loan> loans_;
  std::vector<ReadAction> flying_;
  std::deque<StoreAction> stores_;
  std::map<uint64_t, SampleId> memory_;  // by offset: what was read last
  uint64_t epoch_ = 0;
  bool got_ = false;
};

TEST(GrowingScheduler, NoInvalidatedBytesAreHandedOutWhateverHappens) {
  for (uint64_t seed = 0; seed < Seeds(); ++seed) {
    SCOPED_TRACE(seed);
    RandomNode node(seed);
    for (int i = 0; i < 600 && !::testing::Test::HasFailure(); ++i) node.Event();
    if (!::testing::Test::HasFailure()) node.Finish();
    ASSERT_FALSE(::testing::Test::HasFailure());
  }
}

}  // namespace
}  // namespace forebay
