#include "core/locality.h"

#include <algorithm>

#include "core/home.h"

namespace forebay {
namespace {

// Calls use(batch, owners) for each global batch of the epoch from global position `start` on.
template <typename Use>
void ForEachBatch(const SamplerSpec& spec, uint64_t epoch, uint64_t start, const Use& use) {
  const uint64_t total = spec.TotalSize();
  if (start >= total) return;
  SamplerSpec whole = spec;
  whole.rank = 0;
  whole.world = 1;
  whole.exchange = 0;
  const std::vector<SampleId> order = EpochOrder(whole, epoch);
  const uint64_t step = uint64_t{spec.exchange} * spec.world;
  Exchange exchange(spec.world, spec.ranks_per_node);
  std::vector<SampleId> batch;
  std::vector<uint32_t> owner;
  for (uint64_t begin = start; begin < total; begin += batch.size()) {
    batch.resize(std::min(step, total - begin));
    owner.resize(batch.size());
    // Padding repeats the order from its start, as often as it takes.
    for (size_t i = 0; i < batch.size(); ++i) batch[i] = order[(begin + i) % spec.size];
    exchange.Assign(batch, owner);
    use(batch, owner);
  }
}

}  // namespace

Exchange::Exchange(uint32_t world, uint32_t ranks_per_node)
    : world_(world),
      ranks_per_node_(ranks_per_node),
      nodes_((world - 1) / ranks_per_node + 1),
      free_(world),
      turns_(nodes_) {}

uint32_t Exchange::FreeOn(uint32_t node) {
  const uint32_t first = node * ranks_per_node_;
  const uint32_t ranks = std::min(ranks_per_node_, world_ - first);
  for (uint32_t tried = 0; tried < ranks; ++tried) {
    const uint32_t rank = first + turns_[node];
    turns_[node] = (turns_[node] + 1) % ranks;
    if (free_[rank] > 0) return rank;
  }
  return kNobody;
}

void Exchange::Assign(std::span<const SampleId> batch, std::span<uint32_t> owner) {
  std::fill(free_.begin(), free_.end(), static_cast<uint32_t>(batch.size() / world_));
  std::fill(turns_.begin(), turns_.end(), 0);
  const auto give = [&](size_t i, uint32_t rank) {
    owner[i] = rank;
    --free_[rank];
  };
  std::fill(owner.begin(), owner.end(), kNobody);
  // Those at home stay, the others go home while there is place there.
  homes_.resize(batch.size());
  for (size_t i = 0; i < batch.size(); ++i) {
    homes_[i] = HomeOf(batch[i], nodes_).node;
    const auto rank = static_cast<uint32_t>(i % world_);
    if (rank / ranks_per_node_ == homes_[i]) give(i, rank);
  }
  for (size_t i = 0; i < batch.size(); ++i) {
    if (owner[i] != kNobody) continue;
    const uint32_t rank = FreeOn(homes_[i]);
    if (rank != kNobody) give(i, rank);
  }
  // The rest stays where it can.
  uint32_t next = 0;
  for (size_t i = 0; i < batch.size(); ++i) {
    if (owner[i] != kNobody) continue;
    const auto rank = static_cast<uint32_t>(i % world_);
    if (free_[rank] > 0) give(i, rank);
  }
  for (size_t i = 0; i < batch.size(); ++i) {
    if (owner[i] != kNobody) continue;
    while (free_[next] == 0) ++next;
    give(i, next);
  }
}

std::vector<SampleId> LocalOrder(const SamplerSpec& spec, uint64_t epoch, uint64_t start) {
  std::vector<SampleId> mine;
  const uint64_t total = spec.TotalSize();
  if (start < total) mine.reserve((total - start) / spec.world);
  ForEachBatch(spec, epoch, start,
               [&](std::span<const SampleId> batch, std::span<const uint32_t> owner) {
                 for (size_t i = 0; i < batch.size(); ++i) {
                   if (owner[i] == spec.rank) mine.push_back(batch[i]);
                 }
               });
  return mine;
}

double LocalShare(const SamplerSpec& spec, uint64_t epoch) {
  const uint32_t nodes = (spec.world - 1) / spec.ranks_per_node + 1;
  SamplerSpec rank = spec;
  uint64_t all = 0, local = 0;
  for (rank.rank = 0; rank.rank < spec.world; ++rank.rank) {
    for (const SampleId sample : EpochOrder(rank, epoch)) {
      ++all;
      if (HomeOf(sample, nodes).node == rank.rank / spec.ranks_per_node) ++local;
    }
  }
  return all == 0 ? 0 : static_cast<double>(local) / static_cast<double>(all);
}

}  // namespace forebay
