// Leases of several streams that want the same samples while memory is short.
#include <gtest/gtest.h>

#include <vector>

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

}  // namespace
}  // namespace forebay
