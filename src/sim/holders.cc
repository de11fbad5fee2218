#include "sim/holders.h"

#include <algorithm>
#include <cmath>
#include <optional>

#include "core/placement.h"

namespace forebay::sim {
namespace {

constexpr uint64_t kMaxReads = uint64_t{1} << 28;

// Who reads a sample how often, and when first.
struct Reader {
  uint32_t id;
  uint32_t first;
  uint32_t count;
};

// For each sample its reads over the horizon, as reader:16 | epoch:16, sorted.
class Reads {
 public:
  Reads(const Scenario& scenario, uint32_t ranks_per_reader, const EpochOrderFn& order,
        uint32_t horizon)
      : horizon_(horizon), reads_(size_t{scenario.samples} * horizon) {
    const uint32_t world = scenario.World();
    for (uint32_t e = 0; e < horizon; ++e) {
      uint32_t rank = 0;
      for (SampleId s : order(e)) {
        reads_[size_t{s} * horizon + e] = ((rank / ranks_per_reader) << 16) | e;
        if (++rank == world) rank = 0;
      }
    }
    for (size_t s = 0; s < scenario.samples; ++s) {
      auto first = reads_.begin() + static_cast<std::ptrdiff_t>(s * horizon);
      std::sort(first, first + horizon);
    }
  }

  const std::vector<Reader>& Of(SampleId sample) {
    readers_.clear();
    for (size_t i = size_t{sample} * horizon_; i < (size_t{sample} + 1) * horizon_; ++i) {
      const uint32_t id = reads_[i] >> 16;
      if (readers_.empty() || readers_.back().id != id) {
        readers_.push_back({id, reads_[i] & 0xffff, 0});
      }
      ++readers_.back().count;
    }
    return readers_;
  }

 private:
  uint32_t horizon_;
  std::vector<uint32_t> reads_;
  std::vector<Reader> readers_;
};

uint64_t Bytes(double mb) { return static_cast<uint64_t>(std::llround(mb * 1048576)); }
double Mb(uint64_t bytes) { return static_cast<double>(bytes) / 1048576; }

Status Stopped() { return Status(Code::kCancelled, "the simulation was stopped"); }

}  // namespace

uint32_t Holders::Horizon(const Scenario& scenario) {
  const uint64_t fit = std::max<uint64_t>(1, kMaxReads / scenario.samples);
  return static_cast<uint32_t>(std::min<uint64_t>({scenario.epochs, fit, 255}));
}

Holders::Holders(uint32_t samples, uint32_t stride)
    : stride_(stride), entries_(size_t{samples} * stride, kEnd) {}

void Holders::Add(SampleId sample, uint32_t holder, uint32_t since, uint8_t tier) {
  uint32_t* entry = &entries_[size_t{sample} * stride_];
  while (*entry != kEnd) ++entry;
  *entry = (holder << 16) | (since << 8) | tier;
}

void Holders::Finish(uint32_t samples) {
  uint64_t nowhere = 0;
  for (size_t s = 0; s < samples; ++s) nowhere += entries_[s * stride_] == kEnd;
  uncovered_share_ = static_cast<double>(nowhere) / samples;
}

Result<Holders> Holders::NoPfs(const Scenario& scenario, const EpochOrderFn& order,
                               const SizeFn& size, const TickFn& tick) {
  const uint32_t horizon = Horizon(scenario);
  const uint32_t world = scenario.World();
  Reads reads(scenario, 1, order, horizon);
  if (!tick()) return Stopped();
  // Bytes that a rank reads more often than f times: where its samples of frequency f begin in its
  // list, the most frequent first.
  std::vector<double> offset(size_t{world} * (horizon + 1));
  for (SampleId s = 0; s < scenario.samples; ++s) {
    for (const Reader& r : reads.Of(s)) offset[size_t{r.id} * (horizon + 1) + r.count] += size(s);
  }
  for (size_t rank = 0; rank < world; ++rank) {
    double sum = 0;
    for (size_t f = horizon; f > 0; --f) {
      const double bytes = offset[rank * (horizon + 1) + f];
      offset[rank * (horizon + 1) + f] = sum;
      sum += bytes;
    }
  }
  if (!tick()) return Stopped();
  std::vector<double> ends;
  double sum = 0;
  for (const TierSpec& tier : scenario.tiers) {
    ends.push_back(sum += tier.mb / scenario.ranks_per_node);
  }
  Holders holders(scenario.samples, horizon);
  for (SampleId s = 0; s < scenario.samples; ++s) {
    for (const Reader& r : reads.Of(s)) {
      double& at = offset[size_t{r.id} * (horizon + 1) + r.count];
      at += size(s);
      const auto tier = std::lower_bound(ends.begin(), ends.end(), at) - ends.begin();
      if (static_cast<size_t>(tier) < ends.size()) {
        holders.Add(s, r.id, r.first, static_cast<uint8_t>(tier));
      }
    }
  }
  holders.Finish(scenario.samples);
  return holders;
}

Result<Holders> Holders::Forebay(const Scenario& scenario, const EpochOrderFn& order,
                                 const SizeFn& size, const TickFn& tick) {
  const uint32_t horizon = Horizon(scenario);
  const size_t classes = scenario.tiers.size();
  Reads reads(scenario, scenario.ranks_per_node, order, horizon);
  if (!tick()) return Stopped();

  PlacementOptions options;
  options.sampler.size = scenario.samples;
  options.sampler.seed = scenario.seed;
  options.sampler.world = scenario.World();
  options.epochs = std::min(scenario.epochs, kMaxHorizonEpochs);
  options.ranks_per_node = scenario.ranks_per_node;
  NodeTiers capacity;
  if (classes > 0) capacity.memory = Bytes(scenario.tiers[0].mb);
  if (classes > 1) capacity.nvme = Bytes(scenario.tiers[1].mb);
  options.nodes.assign(scenario.nodes, capacity);
  std::vector<uint32_t> lengths(scenario.samples);
  for (SampleId s = 0; s < scenario.samples; ++s) {
    lengths[s] = static_cast<uint32_t>(Bytes(size(s)));
  }
  const Result<Placement> placement = PlanPlacement(options, lengths);
  if (!placement) return placement.error();
  if (!tick()) return Stopped();

  Holders holders(scenario.samples, horizon + 1);
  for (SampleId s = 0; s < scenario.samples; ++s) {
    const std::optional<CopyPlace> place = placement->Locate(s);
    if (place) holders.Add(s, place->node, 0, static_cast<uint8_t>(place->tier));
  }
  std::vector<double> room;  // by node and class
  for (const NodeTiers& used : placement->used()) {
    if (classes > 0) room.push_back(Mb(capacity.memory - used.memory));
    if (classes > 1) room.push_back(Mb(capacity.nvme - used.nvme));
  }

  uint32_t most = 0;
  for (SampleId s = 0; s < scenario.samples; ++s) {
    for (const Reader& r : reads.Of(s)) most = std::max(most, r.count);
  }
  // A second copy pays where the same node reads the sample again, and the most frequent the most.
  for (uint32_t f = most; f > 1; --f) {
    for (SampleId s = 0; s < scenario.samples; ++s) {
      const std::optional<CopyPlace> place = placement->Locate(s);
      for (const Reader& r : reads.Of(s)) {
        if (r.count != f || (place && r.id == place->node)) continue;
        size_t tier = 0;
        while (tier < classes && room[r.id * classes + tier] < size(s)) ++tier;
        if (tier == classes) continue;
        room[r.id * classes + tier] -= size(s);
        holders.Add(s, r.id, r.first, static_cast<uint8_t>(tier));
      }
    }
    if (!tick()) return Stopped();
  }
  holders.Finish(scenario.samples);
  return holders;
}

}  // namespace forebay::sim
