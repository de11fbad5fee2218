// Leases of several streams that want the same samples while memory is short.
#include <gtest/gtest.h>

#include <numeric>
#include <utility>
#include <vector>

#include "base/rng.h"
#include "core/scheduler.h"
#include "core/scheduler_check.h"

namespace forebay {
namespace {

using Take = Scheduler::Take;
constexpr uint32_t kSize = 1024;

std::vector<ReadAction> Reads(Scheduler& scheduler) {
  std::vector<ReadAction> reads;
  scheduler.leases().NextReads(16, &reads);
  return reads;
}

// The contiguous batch is complete and finds no place for its copy, so it gives up its samples to
// have that first. Another lease, which has waited for one of them too, must not take it as there.
TEST(Leases, ASampleThatGoesAgainAsItArrivesIsReadOnceMoreForTheNext) {
  Scheduler scheduler({.arena_bytes = 8 * kSize, .keep = false});
  const DatasetId d = scheduler.AddDataset(std::vector<uint32_t>(5, kSize));
  const StreamId batches =
      scheduler.OpenStream({.dataset = d, .batch_size = 4, .contiguous = true, .epochs = 1});
  const StreamId single = scheduler.OpenStream({.dataset = d});
  (void)scheduler.lookahead().TakeOrders();
  Scheduler::Handout out;
  // In the way of the copy.
  LeaseId lease = kNoLease;
  ASSERT_EQ(scheduler.leases().FetchSample(single, 4, &lease, &out), Take::kPending);
  for (const ReadAction& read : Reads(scheduler)) {
    scheduler.OnReadDone(read, true, 1, Origin::kSource);
  }
  ASSERT_EQ(scheduler.leases().FetchSample(single, 4, &lease, &out), Take::kReady);

  scheduler.ExtendOrder(batches, scheduler.lookahead().streams().at(batches).generation, 0,
                        {0, 1, 2, 3}, true);
  ASSERT_EQ(scheduler.leases().TakeBatch(batches, &out), Take::kPending);
  LeaseId other = kNoLease;
  ASSERT_EQ(scheduler.leases().FetchSample(single, 3, &other, &out), Take::kPending);
  for (const ReadAction& read : Reads(scheduler)) {
    scheduler.OnReadDone(read, true, 1, Origin::kSource);
    EXPECT_EQ(CheckInvariants(scheduler), "");
  }
  scheduler.leases().Release(lease);
  for (int i = 0; i < 10; ++i) {
    for (const ReadAction& read : Reads(scheduler)) {
      scheduler.OnReadDone(read, true, 1, Origin::kSource);
    }
    for (const CopyAction& copy : scheduler.leases().TakeCopies())
      scheduler.leases().OnCopyDone(copy.lease);
    EXPECT_EQ(CheckInvariants(scheduler), "");
    (void)scheduler.leases().TakeBatch(batches, &out);
    if (scheduler.leases().FetchSample(single, 3, &other, &out) == Take::kReady) return;
  }
  FAIL() << "not had in the end";
}

// As a loop does, whose variable holds the batch before: few bytes, but anywhere in the arena.
TEST(Leases, ALargeSampleFindsAPlaceBesideTheBatchThatIsHeld) {
  for (uint64_t seed = 0; seed < 50; ++seed) {
    SplitMix64 rng(seed);
    Scheduler scheduler({.arena_bytes = 56 * kSize, .keep = seed % 2 == 0});
    std::vector<uint32_t> lengths(101, kSize);
    lengths[100] = 40 * kSize;
    const DatasetId d = scheduler.AddDataset(lengths);
    const StreamId stream = scheduler.OpenStream({.dataset = d, .batch_size = 5, .epochs = 3});
    for (uint64_t epoch = 0; epoch < 3; ++epoch) {
      std::vector<SampleId> order(lengths.size());
      std::iota(order.begin(), order.end(), 0);
      for (size_t i = order.size() - 1; i > 0; --i) std::swap(order[i], order[rng.Below(i + 1)]);
      (void)scheduler.lookahead().TakeOrders();
      scheduler.ExtendOrder(stream, scheduler.lookahead().streams().at(stream).generation, epoch,
                            std::move(order), true);
    }
    LeaseId held = kNoLease;
    Scheduler::Handout out;
    for (int batches = 0, tries = 0; batches < 3 * 21;) {
      const Take take = scheduler.leases().TakeBatch(stream, &out);
      ASSERT_EQ(CheckInvariants(scheduler), "");
      if (take == Take::kReady) {
        if (held != kNoLease) scheduler.leases().Release(held);
        held = out.lease;
        ++batches;
        tries = 0;
      }
      const std::vector<ReadAction> reads = Reads(scheduler);
      for (const ReadAction& read : reads) scheduler.OnReadDone(read, true, 1, Origin::kSource);
      ASSERT_LT(++tries, 100) << "seed " << seed << ", batch " << batches;
    }
  }
}

}  // namespace
}  // namespace forebay
