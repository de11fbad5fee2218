// Data sets that are parked and removed while others are used.
#include <gtest/gtest.h>

#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "base/rng.h"
#include "core/scheduler.h"
#include "core/scheduler_check.h"

namespace forebay {
namespace {

using Take = Scheduler::Take;
constexpr uint32_t kSize = 1024;

// One epoch of the data set, in batches; what it has read.
uint64_t ReadEpoch(Scheduler& scheduler, DatasetId d, uint64_t seed) {
  const size_t n = scheduler.residency().dataset(d).entries.size();
  const StreamId stream = scheduler.OpenStream({.dataset = d, .batch_size = 4, .epochs = 1});
  std::vector<SampleId> order(n);
  std::iota(order.begin(), order.end(), 0);
  SplitMix64 rng(seed);
  for (size_t i = n - 1; i > 0; --i) std::swap(order[i], order[rng.Below(i + 1)]);
  (void)scheduler.lookahead().TakeOrders();
  scheduler.ExtendOrder(stream, scheduler.lookahead().streams().at(stream).generation, 0,
                        std::move(order), true);
  uint64_t reads = 0;
  Scheduler::Handout out;
  for (int tries = 0; tries < 1000; ++tries) {
    const Take take = scheduler.leases().TakeBatch(stream, &out);
    if (take == Take::kReady) scheduler.leases().Release(out.lease);
    if (take == Take::kEndOfEpoch || take == Take::kEndOfStream) break;
    std::vector<ReadAction> started;
    scheduler.leases().NextReads(16, &started);
    for (const ReadAction& read : started) {
      scheduler.OnReadDone(read, true, 1, Origin::kSource);
      ++reads;
    }
    EXPECT_EQ(CheckInvariants(scheduler), "");
  }
  scheduler.CloseStream(stream);
  EXPECT_EQ(CheckInvariants(scheduler), "");
  return reads;
}

void RemoveParked(Scheduler& scheduler, DatasetId d) {
  SampleId next = 0;
  while (!scheduler.residency().GiveUpParked(d, &next, 7)) {
    EXPECT_EQ(CheckInvariants(scheduler), "");
  }
  (void)scheduler.residency().Remove(d);
  EXPECT_EQ(CheckInvariants(scheduler), "");
}

TEST(ResidencyPark, WhatIsParkedIsThereForWhoComesBack) {
  Scheduler scheduler({.arena_bytes = 64 * kSize});
  const DatasetId d = scheduler.AddDataset(std::vector<uint32_t>(20, kSize));
  EXPECT_EQ(ReadEpoch(scheduler, d, 1), 20u);
  scheduler.residency().Park(d);
  EXPECT_EQ(CheckInvariants(scheduler), "");
  scheduler.residency().Unpark(d);
  EXPECT_EQ(ReadEpoch(scheduler, d, 2), 0u);
}

TEST(ResidencyPark, ItGoesWholeWhenItDoesNotFitBesideWhatIsOpen) {
  Scheduler scheduler({.arena_bytes = 64 * kSize});
  const DatasetId old = scheduler.AddDataset(std::vector<uint32_t>(20, kSize));
  const DatasetId young = scheduler.AddDataset(std::vector<uint32_t>(20, kSize));
  EXPECT_EQ(ReadEpoch(scheduler, old, 1) + ReadEpoch(scheduler, young, 1), 40u);
  scheduler.residency().Park(old);
  scheduler.residency().Park(young);
  const DatasetId fits = scheduler.AddDataset(std::vector<uint32_t>(20, kSize));
  EXPECT_EQ(scheduler.residency().dataset(old).kept_bytes, 20 * kSize);
  EXPECT_EQ(ReadEpoch(scheduler, fits, 1), 20u);
  const DatasetId more = scheduler.AddDataset(std::vector<uint32_t>(20, kSize));
  EXPECT_EQ(scheduler.residency().dataset(old).kept_bytes, 0u);
  EXPECT_EQ(scheduler.residency().dataset(young).kept_bytes, 20 * kSize);
  EXPECT_EQ(ReadEpoch(scheduler, more, 1), 20u);
  // All of what is open is kept.
  EXPECT_EQ(ReadEpoch(scheduler, fits, 2) + ReadEpoch(scheduler, more, 2), 0u);
}

TEST(ResidencyPark, NoPlaceIsKeptForLargeSamplesOfAClosedOne) {
  Scheduler scheduler({.arena_bytes = 64 * kSize});
  const DatasetId large = scheduler.AddDataset(std::vector<uint32_t>{30 * kSize});
  scheduler.residency().Park(large);
  RemoveParked(scheduler, large);
  const DatasetId d = scheduler.AddDataset(std::vector<uint32_t>(62, kSize));
  EXPECT_EQ(ReadEpoch(scheduler, d, 1), 62u);
  EXPECT_EQ(ReadEpoch(scheduler, d, 2), 0u);
}

TEST(ResidencyPark, AnythingInAnyOrder) {
  for (uint64_t seed = 0; seed < 100; ++seed) {
    SplitMix64 rng(seed);
    Scheduler scheduler({.arena_bytes = (32 + rng.Below(64)) * kSize, .keep = seed % 5 != 0});
    enum class Is { kFree, kOpen, kParked };
    std::vector<Is> is;
    for (int step = 0; step < 60; ++step) {
      const size_t pick = is.empty() ? 0 : rng.Below(is.size());
      const auto d = static_cast<DatasetId>(pick);
      if (is.empty() || rng.Below(4) == 0) {
        std::vector<uint32_t> lengths(1 + rng.Below(30));
        for (uint32_t& length : lengths) length = static_cast<uint32_t>(1 + rng.Below(2 * kSize));
        const bool again = !is.empty() && is[pick] == Is::kFree;
        const auto number = again ? d : static_cast<DatasetId>(is.size());
        scheduler.residency().AddAs(number, Residency::Dataset::Sized(lengths));
        if (again) {
          is[pick] = Is::kOpen;
        } else {
          is.push_back(Is::kOpen);
        }
      } else if (is[pick] == Is::kOpen && rng.Below(2) == 0) {
        (void)ReadEpoch(scheduler, d, rng.Next());
      } else if (is[pick] == Is::kOpen) {
        scheduler.residency().Park(d);
        is[pick] = Is::kParked;
      } else if (is[pick] == Is::kParked && rng.Below(2) == 0) {
        scheduler.residency().Unpark(d);
        is[pick] = Is::kOpen;
      } else if (is[pick] == Is::kParked) {
        RemoveParked(scheduler, d);
        is[pick] = Is::kFree;
      }
      ASSERT_EQ(CheckInvariants(scheduler), "") << "seed " << seed << ", step " << step;
    }
  }
}

}  // namespace
}  // namespace forebay
