// Drives the scheduler in virtual time: reads finish after seeded delays, consumers take and give
// back batches, and an oracle checks order, residency and every invariant.
#include "core/scheduler.h"

#include <gtest/gtest.h>

#include <map>
#include <queue>
#include <set>
#include <vector>

#include "base/rng.h"
#include "core/sampler.h"
#include "core/scheduler_check.h"
#include "core/waits.h"

namespace forebay {
namespace {

// The read of a sample from the source ends.
void EndRead(Scheduler& scheduler, DatasetId d, SampleId s, bool ok, uint32_t crc) {
  const Residency::Entry& e = scheduler.residency().dataset(d).entries[s];
  const ReadAction read{.dataset = d, .sample = s, .offset = e.offset, .length = e.length};
  scheduler.OnReadDone(read, ok, crc, Origin::kSource);
}

using Take = Scheduler::Take;

class World {
 public:
  World(uint64_t seed, Scheduler::Options options) : rng_(seed), scheduler_(options) {}

  Scheduler& scheduler() { return scheduler_; }

  DatasetId AddDataset(size_t n, uint32_t low, uint32_t high) {
    std::vector<uint32_t> lengths(n);
    for (auto& l : lengths) l = static_cast<uint32_t>(low + rng_.Below(high - low + 1));
    lengths_.push_back(lengths);
    return scheduler_.AddDataset(lengths);
  }

  // The same, with lengths that come one by one, in any order.
  DatasetId AddUnsized(size_t n, uint32_t low, uint32_t high) {
    std::vector<uint32_t> lengths(n);
    for (auto& l : lengths) l = static_cast<uint32_t>(low + rng_.Below(high - low + 1));
    lengths_.push_back(lengths);
    const DatasetId d =
        scheduler_.residency().Add(Residency::Dataset::Unsized(n, (low + high) / 2));
    for (SampleId s = 0; s < n; ++s) {
      events_.push({now_ + 1 + static_cast<int64_t>(rng_.Below(20000)), d, s, kNoLease, true});
    }
    return d;
  }

  StreamId Open(const StreamShape& shape, const SamplerSpec& spec) {
    const StreamId id = scheduler_.OpenStream(shape);
    specs_[id] = spec;
    return id;
  }

  // Answers orders, starts reads and copies.
  void Pump() {
    for (const OrderAction& a : scheduler_.lookahead().TakeOrders()) {
      scheduler_.ExtendOrder(a.stream, a.generation, a.epoch,
                             EpochOrder(specs_.at(a.stream), a.epoch, a.first_position), false);
    }
    std::vector<ReadAction> reads;
    scheduler_.leases().NextReads(limit_, &reads);
    for (const ReadAction& r : reads) {
      EXPECT_LE(r.offset + r.length, scheduler_.arena().capacity());
      EXPECT_EQ(r.length, lengths_[r.dataset][r.sample]);
      EXPECT_TRUE(reading_.insert({r.dataset, r.sample}).second) << "read twice at once";
      ++read_count_[{r.dataset, r.sample}];
      events_.push(
          {now_ + 1 + static_cast<int64_t>(rng_.Below(1000)), r.dataset, r.sample, kNoLease});
    }
    for (const SizeAction& a : scheduler_.leases().TakeSizes()) {
      events_.push(
          {now_ + 1 + static_cast<int64_t>(rng_.Below(200)), a.dataset, a.sample, kNoLease, true});
    }
    for (const CopyAction& c : scheduler_.leases().TakeCopies()) {
      events_.push({now_ + 1 + static_cast<int64_t>(rng_.Below(50)), 0, 0, c.lease});
    }
  }

  // Lets the next event happen; false when there is none.
  bool Step() {
    if (events_.empty()) return false;
    const Event e = events_.top();
    events_.pop();
    now_ = e.at;
    if (e.length) {
      const bool ok = fail_permille_ == 0 || rng_.Below(1000) >= fail_permille_;
      const SampleLength told = {e.sample, ok ? lengths_[e.dataset][e.sample] : 0, ok};
      scheduler_.OnLengths(e.dataset, std::span(&told, 1));
    } else if (e.copy != kNoLease) {
      scheduler_.leases().OnCopyDone(e.copy);
    } else {
      reading_.erase({e.dataset, e.sample});
      const bool fail = fail_permille_ > 0 && rng_.Below(1000) < fail_permille_;
      EndRead(scheduler_, e.dataset, e.sample, !fail, e.sample * 7 + 1);
    }
    return true;
  }

  // Takes the next batch, letting time pass as long as it is pending.
  Take TakeNow(StreamId id, Scheduler::Handout* out) {
    for (int i = 0; i < 1000000; ++i) {
      const Take t = scheduler_.leases().TakeBatch(id, out);
      Pump();
      if (t != Take::kPending) return t;
      if (!Step() && !scheduler_.leases().consumer(id).due) {
        // Orders answered in Pump make the stream due; anything else here is a hang.
        EXPECT_TRUE(Waits(scheduler_).OnlyReleaseHelps(id)) << "hang";
        return Take::kPending;
      }
    }
    ADD_FAILURE() << "no progress: in flight " << scheduler_.reads().in_flight() << ", used "
                  << scheduler_.arena().used() << " of " << scheduler_.arena().capacity()
                  << ", retracted " << scheduler_.counters().retracted << ", evicted "
                  << scheduler_.counters().evicted << ", reads " << scheduler_.counters().reads
                  << ", cause " << static_cast<int>(Waits(scheduler_).CauseOfStream(id))
                  << ", stream " << id;
    return Take::kPending;
  }

  SplitMix64 rng_;
  size_t limit_ = 16;
  uint64_t fail_permille_ = 0;
  std::map<std::pair<DatasetId, SampleId>, int> read_count_;
  std::vector<std::vector<uint32_t>> lengths_;

 private:
  struct Event {
    int64_t at;
    DatasetId dataset;
    SampleId sample;
    LeaseId copy;
    bool length = false;  // of the sample, not its read
    bool operator>(const Event& o) const { return at > o.at; }
  };
  Scheduler scheduler_;
  std::map<StreamId, SamplerSpec> specs_;
  std::priority_queue<Event, std::vector<Event>, std::greater<>> events_;
  std::set<std::pair<DatasetId, SampleId>> reading_;
  int64_t now_ = 0;
};

SamplerSpec Spec(uint32_t n, uint64_t seed) {
  SamplerSpec spec;
  spec.size = n;
  spec.seed = seed;
  return spec;
}

void CheckHandout(const World& world, DatasetId d, const Scheduler::Handout& h,
                  const std::vector<SampleId>& order, size_t at) {
  for (size_t i = 0; i < h.samples.size(); ++i) {
    ASSERT_EQ(h.samples[i], order[at + i]);
    ASSERT_EQ(h.lengths[i], world.lengths_[d][h.samples[i]]);
  }
}

TEST(Scheduler, ReadsEachSampleOnceWhenAllFits) {
  World world(1, {.arena_bytes = 10 << 20});
  const DatasetId d = world.AddDataset(500, 0, 10000);
  const SamplerSpec spec = Spec(500, 9);
  const StreamId s = world.Open({.dataset = d, .batch_size = 16}, spec);
  for (uint64_t epoch = 0; epoch < 4; ++epoch) {
    const auto order = EpochOrder(spec, epoch);
    size_t at = 0;
    Scheduler::Handout h;
    Take t;
    while ((t = world.TakeNow(s, &h)) == Take::kReady) {
      EXPECT_EQ(h.epoch, epoch);
      EXPECT_EQ(h.index, at / 16);
      CheckHandout(world, d, h, order, at);
      at += h.samples.size();
      world.scheduler().leases().Release(h.lease);
    }
    ASSERT_EQ(t, Take::kEndOfEpoch);
    ASSERT_EQ(at, 500u);
    ASSERT_EQ(CheckInvariants(world.scheduler()), "");
  }
  EXPECT_EQ(world.read_count_.size(), 500u);
  for (const auto& [key, n] : world.read_count_) EXPECT_EQ(n, 1);
}

// With one use an epoch no policy has more hits than the tier has room: D + (E-1) * max(0, D - C).
TEST(Scheduler, SourceBytesMeetTheLowerBoundWhenHalfFits) {
  const uint64_t size = 4096;
  const uint32_t n = 1000;
  World world(2, {.arena_bytes = size * n / 2 + size * 64, .staging_bytes = size * 64});
  const DatasetId d = world.AddDataset(n, size, size);
  const SamplerSpec spec = Spec(n, 3);
  const StreamId s = world.Open({.dataset = d, .batch_size = 8, .epochs = 5}, spec);
  Scheduler::Handout h;
  Take t;
  while ((t = world.TakeNow(s, &h)) != Take::kEndOfStream) {
    ASSERT_TRUE(t == Take::kReady || t == Take::kEndOfEpoch);
    if (t == Take::kReady) world.scheduler().leases().Release(h.lease);
  }
  // Capacity is at least the kept share, at most the whole arena (staging may carry over an epoch's
  // end).
  EXPECT_LE(world.scheduler().counters().reads, n + 4 * (n / 2));
  EXPECT_GE(world.scheduler().counters().reads, n + 4 * (n / 2 - 64));
}

TEST(Scheduler, BatchLargerThanTheArenaIsNamed) {
  World world(3, {.arena_bytes = 10000});
  const DatasetId d = world.AddDataset(10, 4000, 4000);
  const StreamId s = world.Open({.dataset = d, .batch_size = 4}, Spec(10, 0));
  Scheduler::Handout h;
  EXPECT_EQ(world.TakeNow(s, &h), Take::kTooLarge);
  EXPECT_GE(h.bytes, 16000u);
}

TEST(Scheduler, OnlyAReleaseHelpsWhenLeasesHoldEverything) {
  World world(4, {.arena_bytes = 64 * 1000});
  const DatasetId d = world.AddDataset(100, 64 * 100, 64 * 100);
  const StreamId s = world.Open({.dataset = d, .batch_size = 4}, Spec(100, 0));
  Scheduler::Handout a, b, c;
  ASSERT_EQ(world.TakeNow(s, &a), Take::kReady);
  ASSERT_EQ(world.TakeNow(s, &b), Take::kReady);
  ASSERT_EQ(world.TakeNow(s, &c), Take::kPending);
  ASSERT_TRUE(Waits(world.scheduler()).OnlyReleaseHelps(s));
  EXPECT_EQ(Waits(world.scheduler()).CauseOfStream(s), StallCause::kMemory);
  world.scheduler().leases().Release(a.lease);
  EXPECT_TRUE(world.scheduler().leases().consumer(s).due);
  ASSERT_EQ(world.TakeNow(s, &c), Take::kReady);
}

// Validation starts while training's look-ahead fills the budget, and training does not move.
TEST(Scheduler, AStreamAtRestNeverStarvesAnother) {
  World world(5, {.arena_bytes = 64 * 2000});
  const DatasetId train = world.AddDataset(300, 64 * 10, 64 * 50);
  const DatasetId val = world.AddDataset(100, 64 * 10, 64 * 50);
  const StreamId a = world.Open({.dataset = train, .batch_size = 8}, Spec(300, 1));
  Scheduler::Handout held, h;
  ASSERT_EQ(world.TakeNow(a, &held), Take::kReady);
  const SamplerSpec spec = Spec(100, 2);
  const StreamId b = world.Open({.dataset = val, .batch_size = 8, .epochs = 1}, spec);
  const auto order = EpochOrder(spec, 0);
  size_t at = 0;
  while (world.TakeNow(b, &h) == Take::kReady) {
    CheckHandout(world, val, h, order, at);
    at += h.samples.size();
    world.scheduler().leases().Release(h.lease);
    ASSERT_EQ(CheckInvariants(world.scheduler()), "");
  }
  EXPECT_EQ(at, 100u);
}

TEST(Scheduler, AFailedReadIsReportedWhereItIsNeededAndTriedAgain) {
  World world(6, {.arena_bytes = 1 << 20});
  const DatasetId d = world.AddDataset(64, 100, 100);
  const SamplerSpec spec = Spec(64, 5);
  const StreamId s = world.Open({.dataset = d, .batch_size = 4}, spec);
  world.fail_permille_ = 1000;
  Scheduler::Handout h;
  ASSERT_EQ(world.TakeNow(s, &h), Take::kFailed);
  world.fail_permille_ = 0;
  const auto order = EpochOrder(spec, 0);
  ASSERT_EQ(world.TakeNow(s, &h), Take::kReady);
  CheckHandout(world, d, h, order, 0);
}

TEST(Scheduler, LengthsThatComeLateChangeNeitherOrderNorReads) {
  World world(12, {.arena_bytes = 10 << 20});
  const DatasetId d = world.AddUnsized(500, 0, 10000);
  const SamplerSpec spec = Spec(500, 9);
  const StreamId s = world.Open({.dataset = d, .batch_size = 16}, spec);
  EXPECT_EQ(world.scheduler().residency().dataset(d).unsized, 500u);
  for (uint64_t epoch = 0; epoch < 3; ++epoch) {
    const auto order = EpochOrder(spec, epoch);
    size_t at = 0;
    Scheduler::Handout h;
    while (world.TakeNow(s, &h) == Take::kReady) {
      CheckHandout(world, d, h, order, at);
      at += h.samples.size();
      world.scheduler().leases().Release(h.lease);
      ASSERT_EQ(CheckInvariants(world.scheduler()), "");
    }
    ASSERT_EQ(at, 500u);
  }
  EXPECT_EQ(world.scheduler().residency().dataset(d).unsized, 0u);
  for (const auto& [key, n] : world.read_count_) EXPECT_EQ(n, 1);
}

TEST(Scheduler, LookAheadStopsWhereALengthIsMissing) {
  Scheduler scheduler({.arena_bytes = 1 << 20});
  const DatasetId d = scheduler.residency().Add(Residency::Dataset::Unsized(6, 100));
  const StreamId s = scheduler.OpenStream({.dataset = d, .batch_size = 2, .epochs = 1});
  for (const OrderAction& a : scheduler.lookahead().TakeOrders()) {
    scheduler.ExtendOrder(a.stream, a.generation, a.epoch, {0, 1, 2, 3, 4, 5}, false);
  }
  const auto started = [&] {
    std::vector<ReadAction> reads;
    scheduler.leases().NextReads(16, &reads);
    std::vector<SampleId> samples;
    for (const ReadAction& r : reads) samples.push_back(r.sample);
    return samples;
  };
  EXPECT_TRUE(started().empty());
  std::vector<SampleLength> told = {{0, 100}, {1, 200}, {3, 300}};
  scheduler.OnLengths(d, told);
  EXPECT_EQ(started(), (std::vector<SampleId>{0, 1}));
  EXPECT_EQ(scheduler.residency().dataset(d).SizedAhead(), 1u);
  EXPECT_TRUE(scheduler.leases().TakeSizes().empty()) << "nobody waits yet";
  EndRead(scheduler, d, 0, true, 1);
  EndRead(scheduler, d, 1, true, 1);
  Scheduler::Handout first, h;
  ASSERT_EQ(scheduler.leases().TakeBatch(s, &first), Take::kReady);
  EXPECT_EQ(first.lengths, (std::vector<uint32_t>{100, 200}));
  // The next batch waits for the length of 2: it is asked for once.
  ASSERT_EQ(scheduler.leases().TakeBatch(s, &h), Take::kPending);
  EXPECT_EQ(Waits(scheduler).CauseOfStream(s), StallCause::kSource);
  EXPECT_FALSE(Waits(scheduler).OnlyReleaseHelps(s));
  const std::vector<SizeAction> sizes = scheduler.leases().TakeSizes();
  ASSERT_EQ(sizes.size(), 1u);
  EXPECT_EQ(sizes[0].sample, 2u);
  ASSERT_EQ(scheduler.leases().TakeBatch(s, &h), Take::kPending);
  EXPECT_TRUE(scheduler.leases().TakeSizes().empty());
  EXPECT_EQ(started(), (std::vector<SampleId>{3}));
  // It cannot be had: the batch fails, and the next ask tries again.
  told = {{2, 0, false}};
  scheduler.OnLengths(d, told);
  EXPECT_TRUE(scheduler.leases().consumer(s).due);
  ASSERT_EQ(scheduler.leases().TakeBatch(s, &h), Take::kFailed);
  EXPECT_EQ(h.failed, 2u);
  ASSERT_EQ(scheduler.leases().TakeBatch(s, &h), Take::kPending);
  ASSERT_EQ(scheduler.leases().TakeSizes().size(), 1u);
  told = {{2, 50}, {4, 1}, {5, 1}};
  scheduler.OnLengths(d, told);
  EXPECT_EQ(started(), (std::vector<SampleId>{2, 4, 5}));
  EndRead(scheduler, d, 2, true, 1);
  EndRead(scheduler, d, 3, true, 1);
  ASSERT_EQ(scheduler.leases().TakeBatch(s, &h), Take::kReady);
  EXPECT_EQ(h.lengths, (std::vector<uint32_t>{50, 300}));
  EXPECT_EQ(CheckInvariants(scheduler), "");
}

TEST(Scheduler, ABatchTooLargeIsNamedWhenItsLengthsAreKnown) {
  World world(3, {.arena_bytes = 10000});
  const DatasetId d = world.AddUnsized(10, 4000, 4000);
  const StreamId s = world.Open({.dataset = d, .batch_size = 4}, Spec(10, 0));
  Scheduler::Handout h;
  EXPECT_EQ(world.TakeNow(s, &h), Take::kTooLarge);
}

TEST(Scheduler, ChangedBytesAreReadTwiceBeforeTheyAreBelieved) {
  Scheduler scheduler({.arena_bytes = 1 << 16, .keep = false});
  const DatasetId d = scheduler.AddDataset(std::vector<uint32_t>{100});
  const StreamId s = scheduler.OpenStream({.dataset = d, .batch_size = 1});
  auto read_with = [&](uint32_t crc) {
    for (const OrderAction& a : scheduler.lookahead().TakeOrders()) {
      scheduler.ExtendOrder(a.stream, a.generation, a.epoch, {0}, false);
    }
    Scheduler::Handout h;
    std::vector<ReadAction> reads;
    Take t = scheduler.leases().TakeBatch(s, &h);
    if (t == Take::kEndOfEpoch) t = scheduler.leases().TakeBatch(s, &h);
    scheduler.leases().NextReads(1, &reads);
    int n = 0;
    while (!reads.empty()) {
      ++n;
      reads.clear();
      EndRead(scheduler, d, 0, true, crc);
      scheduler.leases().NextReads(1, &reads);
      if (n > 5) break;
    }
    EXPECT_EQ(scheduler.leases().TakeBatch(s, &h), Take::kReady);
    scheduler.leases().Release(h.lease);
    return n;
  };
  EXPECT_EQ(read_with(11), 1);
  EXPECT_EQ(scheduler.counters().changed, 0u);
  // The look-ahead may have read the next use already; either way the new bytes are seen twice.
  EXPECT_GE(read_with(22), 1);
  EXPECT_LE(scheduler.counters().changed, 1u);
}

// The region of a contiguous stream is made for the mean batch; the arena takes what it cannot.
TEST(Scheduler, AContiguousBatchMayBeFarAboveTheMean) {
  World world(7, {.arena_bytes = 64 * 1000});
  std::vector<uint32_t> lengths(100, 64);
  lengths[42] = 64 * 300;
  world.lengths_.push_back(lengths);
  const DatasetId d = world.scheduler().AddDataset(lengths);
  const SamplerSpec spec = Spec(100, 4);
  const StreamId s =
      world.Open({.dataset = d, .batch_size = 1, .contiguous = true, .epochs = 2}, spec);
  for (uint64_t epoch = 0; epoch < 2; ++epoch) {
    const auto order = EpochOrder(spec, epoch);
    for (size_t at = 0; at < order.size(); ++at) {
      Scheduler::Handout h;
      ASSERT_EQ(world.TakeNow(s, &h), Take::kReady) << "sample " << order[at];
      CheckHandout(world, d, h, order, at);
      world.scheduler().leases().Release(h.lease);
      ASSERT_EQ(CheckInvariants(world.scheduler()), "");
    }
    Scheduler::Handout h;
    ASSERT_EQ(world.TakeNow(s, &h), Take::kEndOfEpoch);
  }
}

TEST(Scheduler, HeldContiguousBatchesMayTakeMoreThanTheRegion) {
  World world(8, {.arena_bytes = 64 * 4000});
  const DatasetId d = world.AddDataset(100, 64, 64 * 4);
  const StreamId s = world.Open({.dataset = d, .batch_size = 5, .contiguous = true}, Spec(100, 4));
  std::vector<LeaseId> held;
  Take t;
  Scheduler::Handout h;
  while ((t = world.TakeNow(s, &h)) == Take::kReady) held.push_back(h.lease);
  EXPECT_EQ(t, Take::kEndOfEpoch);
  EXPECT_EQ(held.size(), 20u);
  ASSERT_EQ(CheckInvariants(world.scheduler()), "");
  for (LeaseId lease : held) world.scheduler().leases().Release(lease);
  ASSERT_EQ(CheckInvariants(world.scheduler()), "");
}

// Half of the arena is the region; batches of a third of it fit beside the one that is held only
// when neither that one nor their own samples cut the free memory into pieces.
TEST(Scheduler, AContiguousBatchFindsRoomAmongItsOwnSamples) {
  for (uint64_t seed = 0; seed < 200; ++seed) {
    SCOPED_TRACE(seed);
    World world(seed, {.arena_bytes = 64 * 1000});
    const DatasetId d = world.AddDataset(200, 0, 64 * 20);
    const SamplerSpec spec = Spec(200, seed);
    const StreamId s =
        world.Open({.dataset = d, .batch_size = 16, .contiguous = true, .epochs = 3}, spec);
    LeaseId held = kNoLease;
    Scheduler::Handout h;
    Take t;
    size_t batches = 0;
    while ((t = world.TakeNow(s, &h)) != Take::kEndOfStream) {
      ASSERT_TRUE(t == Take::kReady || t == Take::kEndOfEpoch) << "after " << batches;
      if (t == Take::kEndOfEpoch) continue;
      ++batches;
      world.scheduler().leases().Release(held);
      held = h.lease;
      ASSERT_EQ(CheckInvariants(world.scheduler()), "");
    }
    EXPECT_EQ(batches, 3u * 13);
  }
}

struct Consumer {
  StreamId stream;
  DatasetId dataset;
  SamplerSpec spec;
  StreamShape shape;
  uint64_t epoch = 0;
  uint64_t at = 0;
  std::vector<SampleId> order;
  std::vector<LeaseId> held;
  bool gave_up = false;
};

// Random streams, sizes, budgets, failures, held leases, seeks: order exact, no hang, no leak.
TEST(Scheduler, RandomWorlds) {
  for (uint64_t seed = 0; seed < 500; ++seed) {
    SCOPED_TRACE(seed);
    SplitMix64 rng(seed);
    const auto n = static_cast<uint32_t>(20 + rng.Below(200));
    const auto max = static_cast<uint32_t>(64 + rng.Below(3000));
    // From a few batches to more than everything.
    const uint64_t arena = uint64_t{max + 64} * (30 + rng.Below(rng.Below(2) == 0 ? 20 : 400));
    World world(seed, {.arena_bytes = arena});
    world.limit_ = 1 + rng.Below(64);
    world.fail_permille_ = rng.Below(3) == 0 ? 20 : 0;
    std::vector<Consumer> consumers(1 + rng.Below(3));
    for (Consumer& c : consumers) {
      // Those of the engine are not contiguous while lengths are missing.
      const bool unsized = seed % 2 == 1 && rng.Below(2) == 0;
      c.dataset = unsized ? world.AddUnsized(n, 0, max) : world.AddDataset(n, 0, max);
      c.spec = Spec(n, rng.Next());
      c.spec.world = static_cast<uint32_t>(1 + rng.Below(3));
      c.shape = {.dataset = c.dataset,
                 .batch_size = static_cast<uint32_t>(1 + rng.Below(6)),
                 .drop_last = rng.Below(2) == 0,
                 .contiguous = !unsized && rng.Below(3) == 0};
      c.stream = world.Open(c.shape, c.spec);
      c.order = EpochOrder(c.spec, 0);
    }
    for (int step = 0; step < 400; ++step) {
      Consumer& c = consumers[rng.Below(consumers.size())];
      if (rng.Below(40) == 0) {
        for (LeaseId id : c.held) world.scheduler().leases().Release(id);
        c.held.clear();
        c.gave_up = false;
        c.epoch = rng.Below(5);
        c.at = rng.Below(n / c.spec.world);
        c.order = EpochOrder(c.spec, c.epoch);
        world.scheduler().Seek(c.stream, c.epoch, c.at * c.spec.world);
        continue;
      }
      Scheduler::Handout h;
      const Take t = world.TakeNow(c.stream, &h);
      c.gave_up = false;
      switch (t) {
        case Take::kReady:
          ASSERT_EQ(h.epoch, c.epoch);
          CheckHandout(world, c.dataset, h, c.order, c.at);
          c.at += h.samples.size();
          c.held.push_back(h.lease);
          break;
        case Take::kEndOfEpoch: {
          const uint64_t left = c.order.size() - c.at;
          ASSERT_TRUE(left == 0 || (c.shape.drop_last && left < c.shape.batch_size));
          c.at = 0;
          c.order = EpochOrder(c.spec, ++c.epoch);
          break;
        }
        case Take::kFailed:
          ASSERT_GT(world.fail_permille_, 0u);
          break;
        case Take::kPending: {  // leases hold the memory
          size_t held = 0;
          c.gave_up = true;
          // A batch that was asked for and not fetched counts as on loan.
          for (const Consumer& other : consumers) {
            held += other.held.size() + (&other != &c && other.gave_up ? 1 : 0);
          }
          ASSERT_GT(held, 0u) << "waits for a release, and nothing is on loan";
          for (Consumer& other : consumers) {
            for (LeaseId id : other.held) world.scheduler().leases().Release(id);
            other.held.clear();
          }
          break;
        }
        default:
          FAIL() << static_cast<int>(t);
      }
      while (c.held.size() > rng.Below(4)) {
        world.scheduler().leases().Release(c.held.front());
        c.held.erase(c.held.begin());
      }
      if (step % 8 == 0) {
        ASSERT_EQ(CheckInvariants(world.scheduler()), "");
      }
    }
    for (Consumer& c : consumers) {
      for (LeaseId id : c.held) world.scheduler().leases().Release(id);
      world.scheduler().CloseStream(c.stream);
    }
    while (world.Step()) world.Pump();
    ASSERT_EQ(CheckInvariants(world.scheduler()), "");
    ASSERT_EQ(world.scheduler().arena().used(), world.scheduler().residency().bytes().kept);
    ASSERT_EQ(world.scheduler().leases().leases().size(), 0u);
  }
}

// Worker processes fetch samples one by one, batches of several workers interleaved.
TEST(Scheduler, ItemisedFetchesInRoughOrder) {
  for (uint64_t seed = 0; seed < 50; ++seed) {
    SCOPED_TRACE(seed);
    SplitMix64 rng(seed);
    World world(seed, {.arena_bytes = 64 * 40 * (20 + rng.Below(100))});
    const uint32_t n = 90;
    const DatasetId d = world.AddDataset(n, 0, 64 * 40);
    const SamplerSpec spec = Spec(n, seed);
    const StreamId s = world.Open({.dataset = d, .batch_size = 1, .itemised = true}, spec);
    for (uint64_t epoch = 0; epoch < 12; ++epoch) {
      auto order = EpochOrder(spec, epoch);
      for (size_t i = 0; i + 4 < order.size(); ++i) std::swap(order[i], order[i + rng.Below(4)]);
      for (SampleId sample : order) {
        LeaseId lease = kNoLease;
        Scheduler::Handout h;
        Take t;
        int guard = 0;
        while ((t = world.scheduler().leases().FetchSample(s, sample, &lease, &h)) ==
               Take::kPending) {
          if (rng.Below(5) == 0) {  // a worker gives up, and asks again
            world.scheduler().leases().Release(lease);
            lease = kNoLease;
          }
          world.Pump();
          world.Step();
          ASSERT_LT(++guard, 10000) << "hang";
        }
        world.Pump();
        ASSERT_EQ(t, Take::kReady);
        ASSERT_EQ(h.samples[0], sample);
        world.scheduler().leases().Release(h.lease);
      }
      ASSERT_EQ(CheckInvariants(world.scheduler()), "");
    }
    // Look-ahead has kept up to the last epoch: most samples were there when they were asked for.
    EXPECT_GT(world.scheduler().counters().hits, 12 * n / 2);
    world.scheduler().CloseStream(s);
    while (world.Step()) world.Pump();
    ASSERT_EQ(CheckInvariants(world.scheduler()), "");
  }
}

TEST(Scheduler, WhatCannotBeSetAsideTakesNothing) {
  World world(9, {.arena_bytes = 8 << 20});
  const DatasetId d = world.AddDataset(100, 10000, 10000);
  const StreamId s = world.Open({.dataset = d, .batch_size = 10, .epochs = 1}, Spec(100, 1));
  Scheduler::Handout h;
  while (world.TakeNow(s, &h) == Take::kReady) world.scheduler().leases().Release(h.lease);
  const uint64_t kept = world.scheduler().residency().bytes().kept;
  const uint64_t used = world.scheduler().arena().used();
  ASSERT_EQ(kept, 100 * ArenaAllocator::Rounded(10000));
  std::vector<ArenaAllocator::Block> blocks;
  EXPECT_FALSE(world.scheduler().SetAside(9 << 20, &blocks));
  EXPECT_FALSE(world.scheduler().SetAside(4 << 20, &blocks, 5 << 20));
  EXPECT_FALSE(world.scheduler().SetAside(~uint64_t{0}, &blocks, ~uint64_t{0}));
  EXPECT_TRUE(blocks.empty());
  EXPECT_EQ(world.scheduler().residency().bytes().kept, kept);
  EXPECT_EQ(world.scheduler().arena().used(), used);
  ASSERT_EQ(CheckInvariants(world.scheduler()), "");
}

TEST(Scheduler, KeptSamplesGiveWayToWhatIsSetAside) {
  World world(10, {.arena_bytes = 8 << 20});
  const DatasetId d = world.AddDataset(1000, 10000, 10000);
  const StreamId s = world.Open({.dataset = d, .batch_size = 10}, Spec(1000, 1));
  Scheduler::Handout h;
  ASSERT_EQ(world.TakeNow(s, &h), Take::kReady);
  while (world.Step()) world.Pump();
  std::vector<ArenaAllocator::Block> blocks;
  ASSERT_TRUE(world.scheduler().SetAside(7 << 20, &blocks));
  uint64_t bytes = 0;
  for (const ArenaAllocator::Block block : blocks) bytes += world.scheduler().arena().size(block);
  EXPECT_EQ(bytes, uint64_t{7} << 20);
  ASSERT_EQ(CheckInvariants(world.scheduler()), "");
  // Its own batch stays where it is, and the rest of the arena is enough to go on.
  world.scheduler().leases().Release(h.lease);
  for (int i = 0; i < 20; ++i) {
    ASSERT_EQ(world.TakeNow(s, &h), Take::kReady);
    world.scheduler().leases().Release(h.lease);
  }
  world.scheduler().ReturnAside(blocks);
  while (world.Step()) world.Pump();
  ASSERT_EQ(CheckInvariants(world.scheduler()), "");
  EXPECT_GT(world.scheduler().arena().used(), uint64_t{4} << 20);
}

// A batch waits for memory that is set aside: it goes on once that comes back.
TEST(Scheduler, ReturnedMemoryEndsAWait) {
  for (const bool contiguous : {false, true}) {
    World world(11, {.arena_bytes = 4 << 20});
    const DatasetId d = world.AddDataset(100, 100000, 100000);
    const StreamId s =
        world.Open({.dataset = d, .batch_size = 8, .contiguous = contiguous}, Spec(100, 1));
    Scheduler::Handout held, h;
    ASSERT_EQ(world.TakeNow(s, &held), Take::kReady);
    std::vector<ArenaAllocator::Block> blocks;
    uint64_t piece = 1 << 20;
    while (piece > 1000) {
      std::vector<ArenaAllocator::Block> more;
      if (world.scheduler().SetAside(piece, &more)) {
        blocks.insert(blocks.end(), more.begin(), more.end());
      } else if (!world.Step()) {
        piece /= 2;
      }
    }
    const Take t = world.TakeNow(s, &h);
    ASSERT_TRUE(t == Take::kPending || t == Take::kTooLarge);
    ASSERT_EQ(CheckInvariants(world.scheduler()), "");
    world.scheduler().ReturnAside(blocks);
    ASSERT_EQ(world.TakeNow(s, &h), Take::kReady) << contiguous;
    ASSERT_EQ(CheckInvariants(world.scheduler()), "");
  }
}

TEST(Scheduler, RandomSharesSetAside) {
  for (uint64_t seed = 0; seed < 150; ++seed) {
    SCOPED_TRACE(seed);
    World world(seed, {.arena_bytes = (2 + seed % 4) << 20, .keep = seed % 5 != 0});
    SplitMix64& rng = world.rng_;
    struct Reader {
      DatasetId dataset;
      StreamId stream;
      SamplerSpec spec;
      uint64_t epoch = 0;
      size_t at = 0;
    };
    std::vector<Reader> readers;
    for (uint64_t i = 0; i < 1 + seed % 3; ++i) {
      const auto n = static_cast<uint32_t>(20 + rng.Below(200));
      const DatasetId d = world.AddDataset(n, 0, 30000);
      const SamplerSpec spec = Spec(n, seed + i);
      const auto batch = static_cast<uint32_t>(1 + rng.Below(8));
      const StreamShape shape{.dataset = d, .batch_size = batch, .contiguous = rng.Below(3) == 0};
      readers.push_back({d, world.Open(shape, spec), spec});
    }
    std::vector<std::vector<ArenaAllocator::Block>> shares;
    uint64_t aside = 0;
    size_t taken = 0;
    for (int step = 0; step < 300; ++step) {
      const uint64_t what = rng.Below(10);
      if (what < 2) {
        const uint64_t kept = world.scheduler().residency().bytes().kept;
        const uint64_t bytes = 1 + rng.Below(3 << 20);
        const uint64_t leave = rng.Below(2) * (1 << 20);
        std::vector<ArenaAllocator::Block> blocks;
        if (world.scheduler().SetAside(bytes, &blocks, leave)) {
          uint64_t have = 0;
          for (const auto block : blocks) have += world.scheduler().arena().size(block);
          ASSERT_EQ(have, ArenaAllocator::Rounded(bytes));
          aside += have;
          shares.push_back(std::move(blocks));
        } else {
          ASSERT_TRUE(blocks.empty());
          ASSERT_LE(world.scheduler().residency().bytes().kept, kept);
        }
      } else if (what < 4 && !shares.empty()) {
        const size_t i = rng.Below(shares.size());
        for (const auto block : shares[i]) aside -= world.scheduler().arena().size(block);
        world.scheduler().ReturnAside(shares[i]);
        shares.erase(shares.begin() + static_cast<int64_t>(i));
      } else {
        Reader& reader = readers[rng.Below(readers.size())];
        const auto order = EpochOrder(reader.spec, reader.epoch);
        Scheduler::Handout h;
        const Take t = world.TakeNow(reader.stream, &h);
        if (t == Take::kReady) {
          CheckHandout(world, reader.dataset, h, order, reader.at);
          reader.at += h.samples.size();
          world.scheduler().leases().Release(h.lease);
          ++taken;
        } else if (t == Take::kEndOfEpoch) {
          ASSERT_EQ(reader.at, order.size());
          ++reader.epoch;
          reader.at = 0;
        } else {
          ASSERT_FALSE(shares.empty()) << "nothing stands in the way";
        }
      }
      world.Pump();
      ASSERT_GE(world.scheduler().arena().used(), aside);
      ASSERT_EQ(CheckInvariants(world.scheduler()), "");
    }
    for (const auto& blocks : shares) world.scheduler().ReturnAside(blocks);
    ASSERT_EQ(CheckInvariants(world.scheduler()), "");
    for (Reader& reader : readers) {
      Scheduler::Handout h;
      const Take t = world.TakeNow(reader.stream, &h);
      ASSERT_TRUE(t == Take::kReady || t == Take::kEndOfEpoch);
      if (t == Take::kReady) world.scheduler().leases().Release(h.lease);
    }
    EXPECT_GT(taken, 0u);
  }
}

// ---- limits ----------------------------------------------------------------------------------

TEST(ReadAhead, BytesInFlightAndReadyStayWithinTheLimit) {
  for (const bool contiguous : {false, true}) {
    World world(3, {.arena_bytes = 4 << 20, .keep = false});
    const DatasetId d = world.AddDataset(500, 900, 1024);
    StreamShape shape{.dataset = d, .batch_size = 8, .contiguous = contiguous, .epochs = 1};
    const StreamId id = world.Open(shape, Spec(500, 1));
    constexpr uint64_t kLimit = 40 * 1024;
    world.scheduler().lookahead().SetReadAheadBytes(kLimit);
    world.limit_ = 100;
    Scheduler::Handout h;
    uint64_t most = 0;
    // Contiguous streams prepare three batches beside it.
    const uint64_t beside = (contiguous ? 4 : 1) * 8 * 1024;
    for (Take t = Take::kPending; t != Take::kEndOfStream;) {
      t = world.TakeNow(id, &h);
      if (t != Take::kReady) continue;
      most = std::max(most, world.scheduler().residency().bytes().ahead);
      ASSERT_LE(world.scheduler().residency().bytes().ready,
                world.scheduler().residency().bytes().ahead);
      ASSERT_EQ(CheckInvariants(world.scheduler()), "");
      world.scheduler().leases().Release(h.lease);
      world.Pump();
    }
    EXPECT_LE(most, kLimit + beside);
    EXPECT_GT(most, kLimit / 2);
  }
}

TEST(ReadAhead, EachStreamHasItsNextBatchWhateverTheLimit) {
  World world(4, {.arena_bytes = 4 << 20, .keep = false});
  const DatasetId d = world.AddDataset(400, 1024, 1024);
  world.scheduler().lookahead().SetReadAheadBytes(0);
  world.limit_ = 100;
  const StreamId a = world.Open({.dataset = d, .batch_size = 8}, Spec(400, 1));
  const StreamId b = world.Open({.dataset = d, .batch_size = 16}, Spec(400, 2));
  world.Pump();
  world.Pump();
  EXPECT_GE(world.scheduler().reads().in_flight(), 20u);  // the two batches may share samples
  EXPECT_LE(world.scheduler().reads().in_flight(), 24u);
  for (const StreamId id : {a, b}) {
    Scheduler::Handout h;
    for (int i = 0; i < 20; ++i) {
      ASSERT_EQ(world.TakeNow(id, &h), Take::kReady);
      world.scheduler().leases().Release(h.lease);
    }
  }
}

TEST(ReadAhead, StreamsShareTheLimitEvenly) {
  World world(5, {.arena_bytes = 8 << 20, .keep = false});
  const DatasetId d = world.AddDataset(2000, 1024, 1024);
  const DatasetId e = world.AddDataset(2000, 1024, 1024);
  world.limit_ = 1000;
  world.scheduler().lookahead().SetReadAheadBytes(200 * 1024);
  const StreamId a = world.Open({.dataset = d, .batch_size = 8}, Spec(2000, 1));
  world.Pump();
  world.Pump();
  const size_t alone = world.scheduler().reads().in_flight();
  EXPECT_GE(alone, 190u);
  const StreamId b = world.Open({.dataset = e, .batch_size = 8}, Spec(2000, 2));
  Scheduler::Handout h;
  for (int i = 0; i < 60; ++i) {  // both take alike
    for (const StreamId id : {a, b}) {
      ASSERT_EQ(world.TakeNow(id, &h), Take::kReady);
      world.scheduler().leases().Release(h.lease);
    }
  }
  while (world.Step()) world.Pump();
  size_t of_b = 0;
  for (int i = 0; i < 40; ++i) {
    const Take t = world.scheduler().leases().TakeBatch(b, &h);
    if (t != Take::kReady) break;
    world.scheduler().leases().Release(h.lease);
    of_b += h.samples.size();
  }
  EXPECT_GE(of_b, 80u) << "of 200";
}

TEST(ReadAhead, WhatStaysInMemoryIsNotCounted) {
  World world(6, {.arena_bytes = 4 << 20});
  const DatasetId d = world.AddDataset(300, 1024, 1024);
  world.scheduler().lookahead().SetReadAheadBytes(0);
  world.limit_ = 1000;
  world.Open({.dataset = d, .batch_size = 8}, Spec(300, 1));
  world.Pump();
  world.Pump();
  EXPECT_EQ(world.scheduler().reads().in_flight(), 300u);
  EXPECT_EQ(world.scheduler().residency().bytes().ahead, 0u);
}

TEST(ReadLimit, AWaitingBatchGoesFirstAndWithinIt) {
  Scheduler scheduler({.arena_bytes = 1 << 20, .keep = false});
  const DatasetId d = scheduler.AddDataset(std::vector<uint32_t>(100, 1024));
  const StreamId id = scheduler.OpenStream({.dataset = d, .batch_size = 32});
  std::vector<SampleId> order(100);
  for (SampleId s = 0; s < 100; ++s) order[s] = s;
  for (const OrderAction& a : scheduler.lookahead().TakeOrders()) {
    scheduler.ExtendOrder(id, a.generation, a.epoch, order, true);
  }
  Scheduler::Handout h;
  ASSERT_EQ(scheduler.leases().TakeBatch(id, &h), Take::kPending);
  std::vector<ReadAction> reads;
  scheduler.leases().NextReads(4, &reads);
  EXPECT_EQ(reads.size(), 4u);
  EXPECT_EQ(Waits(scheduler).CountForReads(), 1u);
  // What hangs does not hold the batch up.
  scheduler.reads().SetHanging(3);
  scheduler.leases().NextReads(4, &reads);
  EXPECT_EQ(reads.size(), 7u);
  scheduler.reads().SetHanging(0);
  std::vector<ReadAction> more;
  for (size_t i = 0; i < 200 && scheduler.leases().TakeBatch(id, &h) == Take::kPending; ++i) {
    ASSERT_FALSE(reads.empty());
    EXPECT_LT(reads.front().sample, 32u) << "look-ahead waits for the batch's own reads";
    scheduler.OnReadDone(reads.front(), true, 1, Origin::kSource);
    reads.erase(reads.begin());
    scheduler.leases().NextReads(4, &reads, false);
    EXPECT_LE(scheduler.reads().requests(), 7u);
  }
  EXPECT_EQ(h.samples.size(), 32u);
}

}  // namespace
}  // namespace forebay
