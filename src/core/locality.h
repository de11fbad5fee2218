// Locality-preserving assignment: ranks exchange samples of one global batch, so that most are read
// on the node where they live.
//
// A global batch is what all ranks take in one step: spec.exchange samples each. It stays exactly
// the set that DistributedSampler gives, and every rank gets as many as before; only who gets which
// changes. Homes are core/home.h's for the job's nodes, whoever is alive and whatever fits, so the
// order depends on nothing but the spec.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "catalog/catalog.h"
#include "core/sampler.h"

namespace forebay {

// What EpochOrder returns for a spec with `exchange`.
std::vector<SampleId> LocalOrder(const SamplerSpec& spec, uint64_t epoch, uint64_t start = 0);

// One global batch, in global order: owner[i] is the rank that gets batch[i]; without an exchange
// it is i % world. The batch's size is a multiple of `world`. As many as possible go to a rank of
// their home's node; a sample that is at home already stays.
class Exchange {
 public:
  Exchange(uint32_t world, uint32_t ranks_per_node);
  void Assign(std::span<const SampleId> batch, std::span<uint32_t> owner);

 private:
  static constexpr uint32_t kNobody = UINT32_MAX;

  // A rank of `node` that has a free place, each in turn; kNobody: there is none.
  uint32_t FreeOn(uint32_t node);

  const uint32_t world_;
  const uint32_t ranks_per_node_;
  const uint32_t nodes_;
  std::vector<uint32_t> free_;   // places, by rank
  std::vector<uint32_t> turns_;  // by node: who is next
  std::vector<uint32_t> homes_;
};

// Share of an epoch's samples that are read on the node where they live.
double LocalShare(const SamplerSpec& spec, uint64_t epoch);

}  // namespace forebay
