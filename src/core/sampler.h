// The exact orders of PyTorch's samplers, as pure functions.
//
// A permutation is torch.randperm's on a CPU generator: PyTorch's mt19937 seeded with the low 32
// bits of the seed, then a forward Fisher-Yates that draws one 32-bit number a step and takes it
// modulo what is left. From 2^32 / 20 samples on it is the inside-out one, with 64-bit numbers.
// Facts read off PyTorch's behaviour; golden vectors and a property test hold them.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "base/rng.h"
#include "base/status.h"
#include "catalog/catalog.h"

namespace forebay {

// The most samples that torch.randperm shuffles by its first algorithm.
inline constexpr uint64_t kMostForward = 214748363;

// torch.randperm(n, generator=g) of PyTorch 2.6 and later; advances `rng` as PyTorch does.
std::vector<SampleId> RandPerm(uint32_t n, Mt19937& rng);
// Its algorithm for more than kMostForward samples, for any number of them.
std::vector<SampleId> InsideOutPerm(uint32_t n, Mt19937& rng);

// torch.utils.data.DistributedSampler, and sequential order in the same partition.
struct SamplerSpec {
  uint32_t size = 0;    // samples in the data set
  bool shuffle = true;  // false: 0, 1, 2, ...
  uint64_t seed = 0;
  uint32_t rank = 0;
  uint32_t world = 1;
  bool drop_last = false;  // DistributedSampler's: drop the tail instead of padding it
  // Samples of a rank's batch: ranks exchange those of each global batch so that most are read on
  // the node where they live (core/locality.h). 0: no exchange.
  uint32_t exchange = 0;
  uint32_t ranks_per_node = 1;  // rank r runs on node r / ranks_per_node

  Status Validate() const;
  // Samples all ranks together see in an epoch, padding included.
  uint64_t TotalSize() const;
  uint64_t RankSize() const { return TotalSize() / world; }
};

// What one rank reads in `epoch` from global position `start` on (a multiple of the world size):
// the padded permutation's elements start + rank, start + rank + world, ...; with `exchange`, as
// many of each global batch from `start` on.
std::vector<SampleId> EpochOrder(const SamplerSpec& spec, uint64_t epoch, uint64_t start = 0);

// Orders of a node's ranks, asked for one after the other: the permutation that they share is
// computed once, and kept until it is forgotten or another one is needed.
class RankOrders {
 public:
  // What EpochOrder tells.
  std::vector<SampleId> Order(const SamplerSpec& spec, uint64_t epoch, uint64_t start);
  void Forget() { permutation_ = {}; }
  uint64_t computed() const { return computed_; }

 private:
  std::vector<SampleId> permutation_;
  uint32_t seed_ = 0;
  uint64_t computed_ = 0;
};

// A torch.Generator's state as get_state() returns it (5,056 bytes).
class TorchGenerator {
 public:
  static Result<TorchGenerator> FromState(std::span<const std::byte> state);
  static TorchGenerator FromSeed(uint64_t seed);
  Mt19937& engine() { return engine_; }

 private:
  explicit TorchGenerator(Mt19937 engine) : engine_(engine) {}
  Mt19937 engine_;
};

// What torch.utils.data.RandomSampler(range(size), replacement, num_samples, generator) yields.
Result<std::vector<SampleId>> RandomSamplerOrder(TorchGenerator& generator, uint32_t size,
                                                 uint64_t num_samples, bool replacement);

}  // namespace forebay
