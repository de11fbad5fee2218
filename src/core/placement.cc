#include "core/placement.h"

#include <algorithm>
#include <limits>
#include <memory>
#include <queue>

namespace forebay {
namespace {

constexpr uint32_t kMaxNodes = 65535;
static_assert(kMaxHorizonEpochs <= 255, "levels have 8 bits");

// The tiers' room while it is given away.
class Room {
 public:
  explicit Room(std::span<const NodeTiers> nodes) : free_(nodes.begin(), nodes.end()) {}

  bool Memory(uint32_t node, uint64_t length) const { return free_[node].memory >= length; }
  bool Any(uint32_t node, uint64_t length) const {
    return free_[node].memory >= length || free_[node].nvme >= length;
  }
  uint64_t Total(uint32_t node) const { return free_[node].memory + free_[node].nvme; }
  // Takes the room in the fastest tier that has it.
  CopyPlace Take(uint32_t node, uint64_t length) {
    const bool memory = Memory(node, length);
    (memory ? free_[node].memory : free_[node].nvme) -= length;
    return {node, memory ? TierLevel::kMemory : TierLevel::kNvme};
  }
  std::span<const NodeTiers> free() const { return free_; }

 private:
  std::vector<NodeTiers> free_;
};

bool Stopped(const PlanInterrupt* interrupt) {
  return interrupt != nullptr && interrupt->Stopped();
}

// Which node uses each sample, epoch by epoch: a column an epoch, so that the scattered writes of
// one permutation stay within `size` elements.
template <typename Id>
class UseTable {
 public:
  UseTable(const PlacementOptions& options, const PlanInterrupt* interrupt)
      : size_(options.sampler.size),
        nobody_(static_cast<Id>(options.nodes.size())),
        ids_(std::make_unique_for_overwrite<Id[]>(size_ * options.Horizon())),
        counts_(options.nodes.size() + 1),
        users_(options.Horizon(), nobody_) {
    for (uint32_t e = 0; e < options.Horizon() && !Stopped(interrupt); ++e) FillEpoch(options, e);
  }

  // Counts the uses of one sample by node, until the next call. Returns the largest count.
  // Without a branch that depends on the data: 14 million samples are counted twice or more.
  uint8_t Count(SampleId sample) {
    int16_t* const counts = counts_.data();
    Id* const users = users_.data();
    const size_t epochs = users_.size();
    for (size_t e = 0; e < epochs; ++e) counts[users[e]] = 0;
    counts[nobody_] = -static_cast<int16_t>(kMaxHorizonEpochs);
    int most = 0;
    const Id* id = ids_.get() + sample;
    for (size_t e = 0; e < epochs; ++e, id += size_) {
      users[e] = *id;
      most = std::max<int>(most, ++counts[*id]);
    }
    return static_cast<uint8_t>(most);
  }
  // The node of each epoch for the counted sample; in an epoch that drops it, one with count <= 0.
  std::span<const Id> users() const { return users_; }
  int count(uint32_t node) const { return counts_[node]; }
  uint64_t bytes() const { return size_ * users_.size() * sizeof(Id); }

 private:
  void FillEpoch(const PlacementOptions& options, uint32_t index) {
    SamplerSpec whole = options.sampler;
    whole.rank = 0;
    whole.world = 1;
    const std::vector<SampleId> order = EpochOrder(whole, options.first_epoch + index);
    const uint32_t world = options.sampler.world;
    std::vector<Id> node_of(world);
    for (uint32_t r = 0; r < world; ++r) node_of[r] = static_cast<Id>(options.NodeOf(r));
    Id* column = ids_.get() + index * size_;
    const size_t used = std::min<size_t>(size_, options.sampler.TotalSize());
    uint32_t rank = 0;
    for (size_t p = 0; p < used; ++p) {
      column[order[p]] = node_of[rank];
      if (++rank == world) rank = 0;
    }
    for (size_t p = used; p < size_; ++p) column[order[p]] = nobody_;  // dropped in this epoch
  }

  const size_t size_;
  const Id nobody_;
  const std::unique_ptr<Id[]> ids_;
  std::vector<int16_t> counts_;
  std::vector<Id> users_;
};

// Bytes for each node when `bytes` are spread as evenly as the capacities allow.
std::vector<uint64_t> SpreadEvenly(std::span<const uint64_t> capacities, uint64_t bytes) {
  std::vector<size_t> order(capacities.size());
  for (size_t i = 0; i < order.size(); ++i) order[i] = i;
  std::stable_sort(order.begin(), order.end(),
                   [&](size_t a, size_t b) { return capacities[a] < capacities[b]; });
  std::vector<uint64_t> shares(capacities.size());
  for (size_t i = 0; i < order.size(); ++i) {
    const uint64_t nodes_left = order.size() - i;
    shares[order[i]] = std::min(capacities[order[i]], (bytes + nodes_left - 1) / nodes_left);
    bytes -= std::min(bytes, shares[order[i]]);
  }
  return shares;
}

// What the hash offers each node: even shares of memory first, then of NVMe.
std::vector<uint64_t> HashShares(std::span<const NodeTiers> nodes, uint64_t bytes) {
  std::vector<uint64_t> memory, nvme;
  uint64_t all_memory = 0;
  for (const NodeTiers& node : nodes) {
    memory.push_back(node.memory);
    nvme.push_back(node.nvme);
    all_memory += node.memory;
  }
  std::vector<uint64_t> shares = SpreadEvenly(memory, std::min(bytes, all_memory));
  const std::vector<uint64_t> more = SpreadEvenly(nvme, bytes - std::min(bytes, all_memory));
  for (size_t n = 0; n < shares.size(); ++n) shares[n] += more[n];
  return shares;
}

}  // namespace

PlacementRule ChosenRule(const PlacementOptions& options) {
  if (options.rule != PlacementRule::kAuto) return options.rule;
  const auto nodes = static_cast<uint32_t>(options.nodes.size());
  if (nodes == 1) return PlacementRule::kHash;
  // Without a shuffle each node uses the same samples in every epoch.
  if (!options.sampler.shuffle) return PlacementRule::kFrequency;
  const double gain = ExpectedLocalShare(nodes, options.Horizon()) - 1.0 / nodes;
  return gain >= kMinLocalityGain ? PlacementRule::kFrequency : PlacementRule::kHash;
}

uint64_t PlanBytes(const PlacementOptions& options) {
  const bool narrow = options.nodes.size() <= std::numeric_limits<uint8_t>::max();
  // A column an epoch; an order, a level, a code and a length of each sample. What is left over is
  // sorted when the columns are gone, and so are replicas counted.
  const uint64_t each = options.Horizon() * (narrow ? 1 : 2) + 4 + 1 + 4 + 4;
  return std::max<uint64_t>(each, 4 + 4 + 2 * 4) * options.sampler.size;
}

namespace {

Status CheckLengths(const PlacementOptions& options, std::span<const uint32_t> lengths) {
  if (lengths.size() == options.sampler.size) return Status();
  return Status(Code::kInvalidArgument,
                StrCat(lengths.size(), " lengths for ", options.sampler.size, " samples"));
}

}  // namespace

// Gives places away, the best first. With `kept`, only samples that it covers take part at first.
class PlacementPlanner {
 public:
  PlacementPlanner(const PlacementOptions& options, std::span<const uint32_t> lengths,
                   const Placement* kept, const PlanInterrupt* interrupt)
      : options_(options),
        lengths_(lengths),
        kept_(kept),
        interrupt_(interrupt),
        room_(options.nodes) {
    placement_.codes_.assign(lengths.size(), Placement::kNowhere);
    for (const uint32_t length : lengths) placement_.stats_.bytes += length;
  }

  // False: a sample of `kept` found no room.
  bool Run(PlacementRule rule) {
    PlacementStats& stats = placement_.stats_;
    stats.rule = rule;
    stats.horizon = options_.Horizon();
    stats.samples = lengths_.size();
    if (rule == PlacementRule::kHash) {
      ByHash();
    } else if (options_.nodes.size() <= std::numeric_limits<uint8_t>::max()) {
      ByFrequency<uint8_t>();
    } else {
      ByFrequency<uint16_t>();
    }
    const bool whole = PlaceRest(true);
    if (whole && kept_ != nullptr) PlaceRest(false);
    for (size_t n = 0; n < options_.nodes.size(); ++n) {
      const NodeTiers &had = options_.nodes[n], &left = room_.free()[n];
      placement_.used_.push_back({had.memory - left.memory, had.nvme - left.nvme});
    }
    return whole;
  }

  Placement Take() { return std::move(placement_); }

 private:
  bool Wanted(SampleId sample) const {
    return kept_ == nullptr || kept_->codes()[sample] != Placement::kNowhere;
  }

  void Put(SampleId sample, uint32_t node) {
    const uint32_t length = lengths_[sample];
    const CopyPlace place = room_.Take(node, length);
    placement_.codes_[sample] = place.node << 1 | static_cast<uint32_t>(place.tier);
    PlacementStats& stats = placement_.stats_;
    ++stats.covered_samples;
    stats.covered_bytes += length;
    if (place.tier == TierLevel::kMemory) {
      ++stats.memory_samples;
      stats.memory_bytes += length;
    }
  }

  // `working`: bytes allocated beside the plan itself.
  void NotePeak(uint64_t working) {
    const uint64_t plan = placement_.codes_.size() * sizeof(uint32_t) + lengths_.size_bytes();
    placement_.stats_.peak_bytes = std::max(placement_.stats_.peak_bytes, plan + working);
  }

  void ByHash() {
    const std::vector<uint64_t> shares = HashShares(options_.nodes, placement_.stats_.bytes);
    std::vector<uint64_t> ends;
    uint64_t all = 0;
    for (const uint64_t share : shares) ends.push_back(all += share);
    if (all == 0) return;
    for (SampleId s = 0; s < lengths_.size(); ++s) {
      const uint64_t at = SplitMix64(s).Next() % all;
      const auto node =
          static_cast<uint32_t>(std::upper_bound(ends.begin(), ends.end(), at) - ends.begin());
      if (Wanted(s) && room_.Any(node, lengths_[s])) Put(s, node);
    }
  }

  // Levels are counts: the samples that some node uses k times are placed before those with k - 1,
  // so that a node's memory fills with what it uses most. A sample whose nodes are full goes down
  // to the count of the best node that has room.
  template <typename Id>
  void ByFrequency() {
    UseTable<Id> uses(options_, interrupt_);
    if (Stopped(interrupt_)) return;
    std::vector<uint8_t> levels(lengths_.size());
    NotePeak(uses.bytes() + std::max(sizeof(SampleId), sizeof(uint8_t)) * lengths_.size());
    uint8_t top = 0;
    for (SampleId s = 0; s < lengths_.size(); ++s) {
      if (!Wanted(s)) continue;
      levels[s] = uses.Count(s);
      top = std::max(top, levels[s]);
    }
    uint64_t most_free = std::numeric_limits<uint64_t>::max();
    uint32_t misses = 0;
    for (uint8_t level = top; level > 0 && !Stopped(interrupt_); --level) {
      for (SampleId s = 0; s < levels.size(); ++s) {
        if (levels[s] != level) continue;
        if (lengths_[s] > most_free) {
          levels[s] = 0;
        } else {
          levels[s] = PlaceAt(uses, s, level);
          // Room only shrinks, so an old value is a bound; it is renewed now and then.
          if (levels[s] < level && misses++ % 1024 == 0) most_free = MostFree();
        }
      }
    }
  }

  uint64_t MostFree() const {
    uint64_t most = 0;
    for (const NodeTiers& node : room_.free()) most = std::max({most, node.memory, node.nvme});
    return most;
  }

  // Places the sample with a node that uses it `level` times: one with room in memory before one
  // with room in NVMe, then the emptiest. Returns `level`, or the count of the best node with room
  // where those are full (0: there is none).
  template <typename Id>
  uint8_t PlaceAt(UseTable<Id>& uses, SampleId sample, uint8_t level) {
    uses.Count(sample);
    const uint64_t length = lengths_[sample];
    uint32_t best = kMaxNodes;
    for (const uint32_t node : uses.users()) {
      if (uses.count(node) != level || !room_.Any(node, length)) continue;
      if (best == kMaxNodes || Better(node, best, length)) best = node;
    }
    if (best == kMaxNodes) {
      int lower = 0;
      for (const uint32_t node : uses.users()) {
        const int count = uses.count(node);
        if (count > lower && count < level && room_.Any(node, length)) lower = count;
      }
      return static_cast<uint8_t>(lower);
    }
    Put(sample, best);
    placement_.stats_.local_accesses += level;
    return level;
  }

  bool Better(uint32_t a, uint32_t b, uint64_t length) const {
    if (room_.Memory(a, length) != room_.Memory(b, length)) return room_.Memory(a, length);
    if (room_.Total(a) != room_.Total(b)) return room_.Total(a) > room_.Total(b);
    return a < b;
  }

  // Samples without a place go wherever there is room: the longest first, each into the emptiest
  // memory, or else the emptiest NVMe. False when some of them stay without.
  bool PlaceRest(bool wanted) {
    std::vector<SampleId> rest;
    for (SampleId s = 0; s < lengths_.size(); ++s) {
      if (placement_.codes_[s] == Placement::kNowhere && Wanted(s) == wanted) rest.push_back(s);
    }
    NotePeak(rest.capacity() * sizeof(SampleId) * 2);  // a vector that grows holds two copies
    std::sort(rest.begin(), rest.end(), [&](SampleId a, SampleId b) {
      return lengths_[a] != lengths_[b] ? lengths_[a] > lengths_[b] : a < b;
    });
    // (free bytes, node): the emptiest on top, of equals the one with the lowest number.
    using Entry = std::pair<uint64_t, int64_t>;
    std::priority_queue<Entry> memory, nvme;
    for (size_t n = 0; n < options_.nodes.size(); ++n) {
      memory.emplace(room_.free()[n].memory, -static_cast<int64_t>(n));
      nvme.emplace(room_.free()[n].nvme, -static_cast<int64_t>(n));
    }
    bool all = true;
    for (const SampleId s : rest) {
      const uint64_t length = lengths_[s];
      std::priority_queue<Entry>& queue = memory.top().first >= length ? memory : nvme;
      const auto [free, node] = queue.top();
      if (free < length) {
        all = false;
        continue;
      }
      queue.pop();
      queue.emplace(free - length, node);
      Put(s, static_cast<uint32_t>(-node));
    }
    return all || kept_ == nullptr;
  }

  const PlacementOptions& options_;
  const std::span<const uint32_t> lengths_;
  const Placement* const kept_;
  const PlanInterrupt* const interrupt_;
  Room room_;
  Placement placement_;
};

Status PlacementOptions::Validate() const {
  SamplerSpec any = sampler;
  any.rank = 0;
  FOREBAY_RETURN_IF_ERROR(any.Validate());
  if (nodes.empty() || nodes.size() > kMaxNodes) {
    return Status(Code::kInvalidArgument,
                  StrCat("a placement is for 1 to ", kMaxNodes, " nodes, not ", nodes.size()));
  }
  if (ranks_per_node == 0) {
    return Status(Code::kInvalidArgument, "ranks_per_node is 0");
  }
  if (!node_of_rank.empty() && node_of_rank.size() != sampler.world) {
    return Status(Code::kInvalidArgument,
                  StrCat(node_of_rank.size(), " nodes of ranks for ", sampler.world, " ranks"));
  }
  for (uint32_t r = 0; r < sampler.world; ++r) {
    if (NodeOf(r) >= nodes.size()) {
      return Status(Code::kInvalidArgument, StrCat("rank ", r, " is on node ", NodeOf(r),
                                                   ", there are ", nodes.size(), " nodes"));
    }
  }
  uint64_t all = 0;
  for (const NodeTiers& node : nodes) {
    for (const uint64_t bytes : {node.memory, node.nvme}) {
      if (bytes > std::numeric_limits<uint64_t>::max() - all) {
        return Status(Code::kInvalidArgument, "the nodes' capacities exceed 64 bits");
      }
      all += bytes;
    }
  }
  return Status();
}

uint32_t PlacementOptions::Horizon() const {
  return epochs == 0 ? kHorizonEpochs : std::min(epochs, kMaxHorizonEpochs);
}

PlacementOptions PlacementOptions::Next() const {
  PlacementOptions next = *this;
  next.first_epoch += Horizon();
  // After the last known epoch training goes on for an unknown number of them.
  if (epochs != 0) next.epochs -= Horizon();
  return next;
}

uint64_t Placement::KeptBytes() const {
  return sizeof *this + codes_.capacity() * sizeof codes_[0] + used_.capacity() * sizeof used_[0];
}

namespace {

Status CancelledPlan() { return Status(Code::kCancelled, "the plan is not wanted any more"); }

}  // namespace

Result<Placement> PlanPlacement(const PlacementOptions& options, std::span<const uint32_t> lengths,
                                const PlanInterrupt* interrupt) {
  FOREBAY_RETURN_IF_ERROR(options.Validate());
  FOREBAY_RETURN_IF_ERROR(CheckLengths(options, lengths));
  PlacementPlanner planner(options, lengths, nullptr, interrupt);
  planner.Run(ChosenRule(options));
  if (Stopped(interrupt)) return CancelledPlan();
  return planner.Take();
}

Result<Placement> ExtendPlacement(const Placement& previous, const PlacementOptions& next,
                                  std::span<const uint32_t> lengths,
                                  const PlanInterrupt* interrupt) {
  FOREBAY_RETURN_IF_ERROR(next.Validate());
  FOREBAY_RETURN_IF_ERROR(CheckLengths(next, lengths));
  if (previous.size() != lengths.size()) {
    return Status(
        Code::kInvalidArgument,
        StrCat("a plan for ", previous.size(), " samples cannot be extended to ", lengths.size()));
  }
  if (ChosenRule(next) == PlacementRule::kHash) return previous;
  PlacementPlanner planner(next, lengths, &previous, interrupt);
  const bool whole = planner.Run(PlacementRule::kFrequency);
  if (Stopped(interrupt)) return CancelledPlan();
  if (!whole) return previous;
  return planner.Take();
}

namespace {

// Calls use(sample, node) for every access of the horizon.
template <typename Use>
void ForEachUse(const PlacementOptions& options, const PlanInterrupt* interrupt, const Use& use) {
  SamplerSpec whole = options.sampler;
  whole.rank = 0;
  whole.world = 1;
  const uint64_t used = std::min<uint64_t>(whole.size, options.sampler.TotalSize());
  for (uint32_t e = 0; e < options.Horizon() && !Stopped(interrupt); ++e) {
    const std::vector<SampleId> order = EpochOrder(whole, options.first_epoch + e);
    for (uint64_t p = 0; p < used; ++p) {
      use(order[p], options.NodeOf(static_cast<uint32_t>(p % options.sampler.world)));
    }
  }
}

}  // namespace

std::vector<uint16_t> NodeFrequency(const PlacementOptions& options, uint32_t node,
                                    const PlanInterrupt* interrupt) {
  std::vector<uint16_t> counts(options.sampler.size);
  ForEachUse(options, interrupt, [&](SampleId sample, uint32_t user) {
    if (user == node) ++counts[sample];
  });
  return counts;
}

std::vector<uint8_t> PlanReplicas(const PlacementOptions& options, const Placement& placement,
                                  std::span<const uint32_t> lengths, uint32_t node,
                                  const PlanInterrupt* interrupt) {
  std::vector<uint8_t> replicas(lengths.size(), kNoReplica);
  NodeTiers room = options.nodes[node];
  room.memory -= placement.used()[node].memory;
  room.nvme -= placement.used()[node].nvme;
  const auto shortest = std::min_element(lengths.begin(), lengths.end());
  if (shortest == lengths.end() || std::max(room.memory, room.nvme) < *shortest) return replicas;
  const std::vector<uint16_t> counts = NodeFrequency(options, node, interrupt);
  for (uint32_t count = options.Horizon(); count > 0; --count) {
    for (SampleId s = 0; s < lengths.size(); ++s) {
      if (counts[s] != count) continue;
      const std::optional<CopyPlace> place = placement.Locate(s);
      if (place && place->node == node) continue;
      for (const auto tier : {TierLevel::kMemory, TierLevel::kNvme}) {
        uint64_t& free = tier == TierLevel::kMemory ? room.memory : room.nvme;
        if (free < lengths[s]) continue;
        free -= lengths[s];
        replicas[s] = static_cast<uint8_t>(tier);
        break;
      }
    }
  }
  return replicas;
}

double LocalShare(const PlacementOptions& options, const Placement& placement) {
  uint64_t all = 0, local = 0;
  ForEachUse(options, nullptr, [&](SampleId sample, uint32_t user) {
    const std::optional<CopyPlace> place = placement.Locate(sample);
    ++all;
    if (place && place->node == user) ++local;
  });
  return all == 0 ? 0 : static_cast<double>(local) / static_cast<double>(all);
}

double ExpectedLocalShare(uint32_t nodes, uint32_t epochs) {
  if (nodes <= 1 || epochs == 0) return 1;
  // The largest of `nodes` counts that are taken as independent and binomial; only + - * / are
  // used, so that every node has the same bits.
  const double p = 1.0 / nodes;
  double none = 1;  // (1 - p)^epochs
  for (uint32_t e = 0; e < epochs; ++e) none *= 1 - p;
  double term = none, at_most = 0, expected = 1;  // the largest is 1 or more
  for (uint32_t k = 0; k < epochs; ++k) {
    at_most += term;  // P(one count <= k)
    double all = 1, power = at_most < 1 ? at_most : 1;
    for (uint32_t n = nodes; n != 0; n >>= 1, power *= power) {
      if (n & 1) all *= power;
    }
    if (k > 0) expected += 1 - all;  // P(the largest > k)
    term *= static_cast<double>(epochs - k) / (k + 1) * (p / (1 - p));
  }
  // The counts add up to `epochs`, so the largest is no less than their mean.
  const double share = expected / epochs;
  return share > p ? share : p;
}

}  // namespace forebay
