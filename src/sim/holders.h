// Where the clairvoyant policies keep each sample: who holds a copy, in which class, since when.
//
// Two placements of the same shape. NoPFS: every rank alone keeps what it reads most often.
// Forebay: by node; the planner's Placement (core/placement.h) covers as much of the data set as
// the cluster can hold once, then spare room takes second copies where a node reads a sample again.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "base/status.h"
#include "catalog/catalog.h"
#include "sim/scenario.h"

namespace forebay::sim {

// The permutation of an epoch; the span is valid until the next call.
using EpochOrderFn = std::function<std::span<const SampleId>(uint32_t epoch)>;
// A sample's size in MB.
using SizeFn = std::function<double(SampleId)>;
// Called now and then; false stops the work.
using TickFn = std::function<bool()>;

class Holders {
 public:
  static constexpr uint8_t kNowhere = 0xff;
  // Epochs that fit an entry and this much memory.
  static uint32_t Horizon(const Scenario& scenario);

  static Result<Holders> NoPfs(const Scenario& scenario, const EpochOrderFn& order,
                               const SizeFn& size, const TickFn& tick);
  static Result<Holders> Forebay(const Scenario& scenario, const EpochOrderFn& order,
                                 const SizeFn& size, const TickFn& tick);

  struct Found {
    uint8_t local = kNowhere;  // class of the reader's own copy
    uint8_t peer = kNowhere;   // fastest class among the others' copies
  };
  // Copies that exist in `epoch`: a holder keeps a sample from the first time it reads it; the
  // first copy of Forebay is kept when the first rank of all has read it.
  Found Locate(SampleId sample, uint32_t epoch, uint32_t reader) const {
    Found found;
    const uint32_t* entry = &entries_[size_t{sample} * stride_];
    for (uint32_t i = 0; i < stride_ && entry[i] != kEnd; ++i) {
      if (((entry[i] >> 8) & 0xff) >= epoch) continue;
      const auto tier = static_cast<uint8_t>(entry[i] & 0xff);
      uint8_t& best = (entry[i] >> 16) == reader ? found.local : found.peer;
      if (tier < best) best = tier;
    }
    return found;
  }
  // Share of the samples that nobody keeps.
  double uncovered_share() const { return uncovered_share_; }

 private:
  static constexpr uint32_t kEnd = 0xffffffff;

  Holders(uint32_t samples, uint32_t stride);
  void Add(SampleId sample, uint32_t holder, uint32_t since, uint8_t tier);
  void Finish(uint32_t samples);

  uint32_t stride_;
  std::vector<uint32_t> entries_;  // holder:16 | since:8 | class:8, `stride_` a sample
  double uncovered_share_ = 0;
};

}  // namespace forebay::sim
