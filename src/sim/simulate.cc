#include "sim/simulate.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <optional>

#include "base/rng.h"
#include "core/sampler.h"

namespace forebay::sim {
namespace {

constexpr uint64_t kKeptOrders = uint64_t{1} << 27;  // sample numbers in memory
constexpr uint32_t kRememberWait = 64;               // batches
constexpr uint64_t kTickEvery = uint64_t{1} << 20;   // accesses
constexpr double kNothingToGain = 1e-4;              // of the job's time

Status Stopped() { return Status(Code::kCancelled, "the simulation was stopped"); }

// Where a sample comes from: kSource, kLocal + class or kPeer + class.
using PlaceCode = uint8_t;
constexpr PlaceCode kSource = 0;
constexpr PlaceCode kLocal = 1;
constexpr PlaceCode kPeer = 3;
constexpr size_t kPlaces = 5;

// Uniform in [0, 1), the same for the same arguments.
double Draw(uint64_t seed, uint64_t a, uint64_t b) {
  SplitMix64 rng(seed ^ (a * 0x9e3779b97f4a7c15ULL) ^ (b * 0xc2b2ae3d27d4eb4fULL));
  rng.Next();
  return rng.Uniform();
}

// How a policy moves samples, whatever place it takes them from.
struct Traits {
  bool prefetch = true;        // staging threads run ahead of the rank
  bool whole_buffer = true;    // as far as the staging buffer has room, else two batches
  bool crosses_epochs = true;  // also beyond the end of an epoch
  bool cost_model = false;     // the cheapest place is taken, whatever is kept where
};

Traits TraitsOf(Policy policy) {
  switch (policy) {
    case Policy::kNaive:
      return {false, false, false, false};
    case Policy::kDoubleBuffer:
    case Policy::kLru:
    case Policy::kSharding:
    case Policy::kMonarch:
      return {true, false, false, false};
    case Policy::kNoPfs:
    case Policy::kForebay:
      return {true, true, true, true};
    default:
      return {};
  }
}

// One batch of all ranks: what each slot reads, and from where. Slot i is rank i % world's.
struct Batch {
  uint32_t epoch = 0;
  uint64_t first = 0;  // position of slot 0 in the epoch
  std::vector<SampleId> samples;
  std::vector<PlaceCode> places;
};

// The policies' decisions: pure functions of what the cluster has read so far.
class Places {
 public:
  Places(const Scenario& scenario, Policy policy, Simulation& simulation)
      : scenario_(scenario), policy_(policy), simulation_(simulation) {}

  // Fills what does not change while the job runs, and the fixed part of `outcome`.
  Status Prepare(Outcome& outcome, const TickFn& tick);
  void Decide(Batch& batch);
  // Seconds to fetch one MB by one staging thread, everything but the source.
  double Cost(PlaceCode place) const { return costs_[place]; }

 private:
  double WorkerMb() const { return scenario_.NodeMb() / scenario_.ranks_per_node; }
  // All memory of a rank: its share of the first class, and its staging buffer.
  double MemoryMb() const {
    const double tier = scenario_.tiers.empty() ? 0 : scenario_.tiers[0].mb;
    return tier / scenario_.ranks_per_node + scenario_.staging_mb;
  }
  double StageSeconds(double worker_mb) const;
  // The class that holds what lies at `mb` of a rank's (or node's) list; kNowhere beyond the last.
  uint8_t ClassAt(double mb, double share) const {
    double end = 0;
    for (size_t j = 0; j < scenario_.tiers.size(); ++j) {
      end += scenario_.tiers[j].mb * share;
      if (mb <= end) return static_cast<uint8_t>(j);
    }
    return Holders::kNowhere;
  }
  // Of the copies; the source where there is none.
  PlaceCode Cheapest(const Holders::Found& found) const;
  void DecideLocality(Batch& batch);

  const Scenario& scenario_;
  const Policy policy_;
  Simulation& simulation_;
  std::array<double, kPlaces> costs_{};
  std::optional<Holders> holders_;     // NoPFS, Forebay
  std::vector<uint32_t> first_read_;   // position in the first epoch; LBANN dynamic, locality
  std::vector<uint32_t> rank_count_;   // of a batch; locality
  std::vector<uint32_t> left_over_;    // slots of a batch; locality
  std::vector<SampleId> new_samples_;  // of a batch; locality
  std::vector<PlaceCode> new_places_;
};

double Places::StageSeconds(double worker_mb) const {
  const double workers = scenario_.World();
  const double readers =
      scenario_.accounting == Accounting::kStudy ? workers : workers * scenario_.staging_threads;
  return worker_mb * workers / scenario_.SourceRate(readers);
}

Status Places::Prepare(Outcome& outcome, const TickFn& tick) {
  const double p0 = scenario_.staging_threads;
  const double ranks = scenario_.ranks_per_node;
  const bool study = scenario_.accounting == Accounting::kStudy;
  const double link = scenario_.network_mb_per_s / ranks / (study ? 1 : p0);
  for (size_t j = 0; j < scenario_.tiers.size(); ++j) {
    const TierSpec& tier = scenario_.tiers[j];
    const double rate = tier.mb_per_s / ranks / (study ? tier.threads : std::max(tier.threads, p0));
    costs_[kLocal + j] = 1 / rate;
    costs_[kPeer + j] = 1 / std::min(link, rate);
  }
  // A policy that keeps samples in memory has the staging buffer even where a node has no class.
  if (scenario_.tiers.empty()) {
    const double rate = scenario_.staging_mb_per_s / p0;
    costs_[kLocal] = 1 / rate;
    costs_[kPeer] = 1 / std::min(link, rate);
  }

  const double dataset = scenario_.DatasetMb();
  const double part = dataset / scenario_.World();
  auto fits_memory = [&] {
    if (part <= MemoryMb()) return true;
    outcome.infeasible = "the data set does not fit into the ranks' memory";
    return false;
  };
  switch (policy_) {
    case Policy::kSharding:
      outcome.global_shuffle = scenario_.World() == 1;
      break;
    case Policy::kDeepIoOrdered:
    case Policy::kDeepIoOpportunistic: {
      const double kept = std::min(part, MemoryMb());
      outcome.staging_seconds = StageSeconds(kept);
      outcome.source_mb = kept * scenario_.World();
      if (policy_ == Policy::kDeepIoOpportunistic) outcome.read_share = kept / part;
      break;
    }
    case Policy::kParallelStaging: {
      const double kept = std::min(dataset, WorkerMb());
      if (kept == 0) {
        outcome.infeasible = "no node has room to stage into";
        return Status();
      }
      outcome.staging_seconds = StageSeconds(kept);
      outcome.source_mb = kept * scenario_.World();
      outcome.read_share = kept / dataset;
      outcome.global_shuffle = kept == dataset;
      break;
    }
    case Policy::kLbannDynamic:
      fits_memory();
      break;
    case Policy::kLbannPreload:
      if (fits_memory()) {
        outcome.staging_seconds = StageSeconds(part);
        outcome.source_mb = dataset;
      }
      break;
    case Policy::kNoPfs:
    case Policy::kForebay: {
      const EpochOrderFn order = [this](uint32_t e) { return simulation_.Order(e); };
      const SizeFn size = [this](SampleId s) { return simulation_.SizeMb(s); };
      Result<Holders> holders = policy_ == Policy::kNoPfs
                                    ? Holders::NoPfs(scenario_, order, size, tick)
                                    : Holders::Forebay(scenario_, order, size, tick);
      if (!holders) return holders.error();
      holders_ = *std::move(holders);
      outcome.planned_epochs = Holders::Horizon(scenario_);
      outcome.uncovered_share = holders_->uncovered_share();
      break;
    }
    default:
      break;
  }
  if (policy_ == Policy::kLbannDynamic || policy_ == Policy::kLocality) {
    first_read_.resize(scenario_.samples);
    uint32_t position = 0;
    for (SampleId s : simulation_.Order(0)) first_read_[s] = position++;
  }
  return Status();
}

PlaceCode Places::Cheapest(const Holders::Found& found) const {
  PlaceCode best = kSource;
  if (found.peer != Holders::kNowhere) best = static_cast<PlaceCode>(kPeer + found.peer);
  if (found.local != Holders::kNowhere) {
    const auto local = static_cast<PlaceCode>(kLocal + found.local);
    if (best == kSource || costs_[local] <= costs_[best]) best = local;
  }
  return best;
}

// Yang and Cong: a global batch's samples go to the ranks that keep them; what one rank keeps more
// of than its batch takes, and what nobody keeps, goes to the ranks that still have room.
void Places::DecideLocality(Batch& batch) {
  const uint32_t world = scenario_.World();
  const double share = 1.0 / scenario_.ranks_per_node;
  const size_t slots = batch.samples.size();
  auto size_of_rank = [&](size_t rank) { return (slots - rank + world - 1) / world; };
  rank_count_.assign(world, 0);
  left_over_.clear();
  new_samples_.resize(slots);
  new_places_.resize(slots);
  for (size_t i = 0; i < slots; ++i) {
    const uint32_t position = first_read_[batch.samples[i]];
    const uint32_t holder = position % world;
    const uint8_t tier = ClassAt((position / world + 1) * scenario_.sample_mb, share);
    if (tier == Holders::kNowhere || rank_count_[holder] >= size_of_rank(holder)) {
      left_over_.push_back(static_cast<uint32_t>(i));
      continue;
    }
    const size_t slot = size_t{rank_count_[holder]++} * world + holder;
    new_samples_[slot] = batch.samples[i];
    new_places_[slot] = static_cast<PlaceCode>(kLocal + tier);
  }
  size_t rank = 0;
  for (uint32_t i : left_over_) {
    while (rank_count_[rank] >= size_of_rank(rank)) ++rank;
    const size_t slot = size_t{rank_count_[rank]++} * world + rank;
    const uint8_t tier =
        ClassAt((first_read_[batch.samples[i]] / world + 1) * scenario_.sample_mb, share);
    new_samples_[slot] = batch.samples[i];
    new_places_[slot] = tier == Holders::kNowhere ? kSource : static_cast<PlaceCode>(kPeer + tier);
  }
  batch.samples.swap(new_samples_);
  batch.places.swap(new_places_);
}

void Places::Decide(Batch& batch) {
  const uint32_t world = scenario_.World();
  const uint32_t e = batch.epoch;
  const size_t slots = batch.samples.size();
  const double share = 1.0 / scenario_.ranks_per_node;
  auto each = [&](auto place) {
    uint32_t rank = 0;
    for (size_t i = 0; i < slots; ++i) {
      batch.places[i] = place(batch.samples[i], rank, i);
      if (++rank == world) rank = 0;
    }
  };
  switch (policy_) {
    case Policy::kLowerBound:
    case Policy::kNaive:
    case Policy::kStagingBuffer:
    case Policy::kDoubleBuffer:
      std::fill(batch.places.begin(), batch.places.end(), kSource);
      break;
    case Policy::kLru: {
      // The chance that a node still has what it reads now, when it keeps the last distinct
      // NodeMb() it read: exact for equal samples in the limit of many (docs/simulator.md).
      const double n = scenario_.nodes;
      const double memory = scenario_.tiers.empty() ? 0 : scenario_.tiers[0].mb;
      const double kept = std::min(1.0, memory / scenario_.DatasetMb());
      const double p = std::min(1.0, static_cast<double>(batch.first) / scenario_.samples);
      const double seen = 1 - std::pow(1 - 1 / n, e);
      const double hit = p < n ? std::clamp(1 - (1 - kept) / (1 - p / n), 0.0, seen) : 0;
      each([&](SampleId s, uint32_t, size_t) {
        return Draw(scenario_.seed, s, e) < hit ? kLocal : kSource;
      });
      break;
    }
    case Policy::kMonarch: {
      // A node keeps what it reads first, and evicts nothing.
      const double seen = 1 - std::pow(1 - 1.0 / scenario_.nodes, e);
      const double dataset = scenario_.DatasetMb();
      each([&](SampleId s, uint32_t, size_t) {
        const double u = Draw(scenario_.seed, s, e);
        const uint8_t tier = u < seen ? ClassAt(u * dataset, 1) : Holders::kNowhere;
        return tier == Holders::kNowhere ? kSource : static_cast<PlaceCode>(kLocal + tier);
      });
      break;
    }
    case Policy::kSharding: {
      // Rank r has the samples r, r + world, ... for good; their order changes no time.
      const uint64_t rounds = (scenario_.samples + world - 1) / world;
      each([&](SampleId& s, uint32_t rank, size_t i) {
        const uint64_t index = (batch.first + i) / world % rounds;
        s = static_cast<SampleId>((index * world + rank) % scenario_.samples);
        const uint8_t tier =
            e == 0 ? Holders::kNowhere
                   : ClassAt((static_cast<double>(index) + 1) * scenario_.sample_mb, share);
        return tier == Holders::kNowhere ? kSource : static_cast<PlaceCode>(kLocal + tier);
      });
      break;
    }
    case Policy::kDeepIoOrdered:
    case Policy::kDeepIoOpportunistic: {
      const double memory = MemoryMb();
      const bool ordered = policy_ == Policy::kDeepIoOrdered;
      each([&](SampleId s, uint32_t rank, size_t) {
        if ((s / world + 1) * scenario_.sample_mb > memory) return ordered ? kSource : kLocal;
        return s % world == rank ? kLocal : kPeer;
      });
      break;
    }
    case Policy::kParallelStaging: {
      const double kept = std::min(scenario_.DatasetMb(), WorkerMb());
      each([&](SampleId s, uint32_t, size_t) {
        const uint8_t tier = ClassAt(Draw(scenario_.seed, s, e) * kept, share);
        return static_cast<PlaceCode>(kLocal + tier);
      });
      break;
    }
    case Policy::kLbannDynamic:
      each([&](SampleId s, uint32_t rank, size_t) {
        if (e == 0) return kSource;
        return first_read_[s] % world == rank ? kLocal : kPeer;
      });
      break;
    case Policy::kLbannPreload:
      each([&](SampleId s, uint32_t rank, size_t) { return s % world == rank ? kLocal : kPeer; });
      break;
    case Policy::kLocality:
      if (e == 0) {
        std::fill(batch.places.begin(), batch.places.end(), kSource);
      } else {
        DecideLocality(batch);
      }
      break;
    case Policy::kNoPfs:
    case Policy::kForebay: {
      const uint32_t ranks = policy_ == Policy::kNoPfs ? 1 : scenario_.ranks_per_node;
      each([&](SampleId s, uint32_t rank, size_t) {
        return Cheapest(holders_->Locate(s, e, rank / ranks));
      });
      break;
    }
  }
}

// Readers that the source has at a time, of `most`, when a MB costs each of them `other` seconds
// elsewhere for every `share` MB at the source: the fixed point at which the source's throughput is
// what its curve gives.
double Readers(const Scenario& scenario, double most, double share, double other) {
  if (most <= 1 || share <= 0) return 1;
  auto excess = [&](double readers) {
    const double at_source = share * readers / scenario.SourceRate(readers);
    return readers - most * at_source / (at_source + other);
  };
  if (other <= 0 || excess(most) <= 0) return most;
  if (excess(1) >= 0) return 1;
  double low = 1;
  double high = most;
  for (int i = 0; i < 24; ++i) {
    const double middle = (low + high) / 2;
    (excess(middle) < 0 ? low : high) = middle;
  }
  return high;
}

// A batch's bytes by place, and what they cost.
struct Mix {
  std::array<double, kPlaces> mb{};
  std::array<double, kPlaces> cost{};  // seconds a MB of one thread; the source's is for Solve
  double readers = 1;

  double Sum() const {
    double sum = 0;
    for (double part : mb) sum += part;
    return sum;
  }
  // Sets the readers and the source's cost; returns the threads' seconds for the whole batch.
  double Solve(const Scenario& scenario, double most_readers, double write) {
    double other = mb[kSource] * write;
    for (size_t place = 1; place < kPlaces; ++place) other += mb[place] * cost[place];
    const double all = Sum();
    readers = Readers(scenario, most_readers, mb[kSource] / all, other / all);
    cost[kSource] = readers / scenario.SourceRate(readers) + write;
    return other + mb[kSource] * (cost[kSource] - write);
  }
};

// How many MB of `place` should come from the source instead, so that the threads are done first.
double Spill(const Scenario& scenario, const Mix& mix, size_t place, double most_readers,
             double write, bool gains_by_readers) {
  // Unless readers help each other, one more makes a source that is dear already no cheaper.
  if (!gains_by_readers && mix.cost[kSource] >= mix.cost[place]) return 0;
  auto seconds = [&](double mb) {
    Mix moved = mix;
    moved.mb[place] -= mb;
    moved.mb[kSource] += mb;
    return moved.Solve(scenario, most_readers, write);
  };
  constexpr int kSteps = 20;
  double best = 0;
  double least = seconds(0);
  for (int i = 1; i <= kSteps; ++i) {
    const double mb = mix.mb[place] * i / kSteps;
    const double now = seconds(mb);
    if (now >= least) continue;
    least = now;
    best = mb;
  }
  return best;
}

}  // namespace

Simulation::Simulation(Scenario scenario) : scenario_(std::move(scenario)) {}

Result<Simulation> Simulation::Make(Scenario scenario) {
  FOREBAY_RETURN_IF_ERROR(scenario.Validate());
  Simulation out(std::move(scenario));
  const Scenario& s = out.scenario_;
  // Two epochs show the fill and the steady state.
  const uint64_t fit = std::max<uint64_t>(2, s.max_accesses / s.samples);
  out.simulated_ = static_cast<uint32_t>(std::min<uint64_t>({s.epochs, fit, 255}));
  if (s.sample_sigma_mb > 0) {
    const double ratio = s.sample_sigma_mb / s.sample_mb;
    const double variance = std::log1p(ratio * ratio);
    const double mu = std::log(s.sample_mb) - variance / 2;
    SplitMix64 rng(s.seed ^ 0x5a3b1e55ULL);
    out.sizes_.resize(s.samples);
    for (float& size : out.sizes_) {
      const double radius = std::sqrt(-2 * std::log(1 - rng.Uniform()));
      const double normal = radius * std::cos(2 * 3.14159265358979323846 * rng.Uniform());
      // 4095 MB: what a sample's length can say.
      size = static_cast<float>(std::min(4095.0, std::exp(mu + std::sqrt(variance) * normal)));
    }
  }
  return out;
}

std::span<const SampleId> Simulation::Order(uint32_t epoch) {
  SamplerSpec spec;
  spec.size = scenario_.samples;
  spec.seed = scenario_.seed;
  if (uint64_t{epoch + 1} * scenario_.samples > kKeptOrders) {
    order_ = EpochOrder(spec, epoch);
    return order_;
  }
  if (orders_.size() <= epoch) orders_.resize(epoch + 1);
  if (orders_[epoch].empty()) orders_[epoch] = EpochOrder(spec, epoch);
  return orders_[epoch];
}

Result<Outcome> Simulation::Run(Policy policy, const ProgressFn& progress) {
  if (policy != Policy::kForebay) return RunOne(policy, progress);
  constexpr std::array<std::pair<Policy, Plan>, 3> kPlans{{{Policy::kForebay, Plan::kByNode},
                                                           {Policy::kNoPfs, Plan::kByRank},
                                                           {Policy::kStagingBuffer, Plan::kNone}}};
  const uint64_t accesses = uint64_t{simulated_} * scenario_.samples;
  std::optional<Outcome> best;
  uint64_t before = 0;
  for (const auto& [as, plan] : kPlans) {
    ProgressFn part;
    if (progress) {
      part = [&](uint64_t done, uint64_t) {
        return progress(before + done, kPlans.size() * accesses);
      };
    }
    Result<Outcome> out = RunOne(as, part);
    if (!out) return out;
    out->policy = policy;
    out->plan = plan;
    before += accesses;
    if (!best || out->seconds < best->seconds) best = *std::move(out);
    // A job loses at barriers at most what all ranks together waited.
    if (best->stall_seconds * scenario_.World() <= kNothingToGain * best->seconds) break;
  }
  return *std::move(best);
}

Result<Outcome> Simulation::RunOne(Policy policy, const ProgressFn& progress) {
  const Scenario& sc = scenario_;
  Outcome out;
  out.policy = policy;
  out.simulated_epochs = simulated_;
  const uint64_t accesses = uint64_t{simulated_} * sc.samples;
  uint64_t done = 0;
  auto tick = [&] { return !progress || progress(std::min(done, accesses), accesses); };
  const Status stopped = Stopped();
  if (!tick()) return stopped;
  Places places(sc, policy, *this);
  FOREBAY_RETURN_IF_ERROR(places.Prepare(out, tick));
  if (!out.infeasible.empty()) return out;

  const Traits traits = TraitsOf(policy);
  const uint32_t world = sc.World();
  const bool study = sc.accounting == Accounting::kStudy;
  const double p0 = sc.staging_threads;
  const double threads = traits.prefetch ? p0 : 1;
  const double most_readers = world * (study ? 1 : threads);
  const double write = std::max(1 / sc.preprocess_mb_per_s, p0 / sc.staging_mb_per_s);
  const double compute = 1 / sc.compute_mb_per_s;
  const double buffer = sc.staging_mb / (sc.batch * sc.sample_mb);
  const size_t window = traits.whole_buffer ? static_cast<size_t>(std::clamp(buffer, 1.0, 1e9))
                                            : static_cast<size_t>(std::clamp(buffer, 1.0, 2.0));
  const uint64_t epoch_slots = (uint64_t{sc.samples} + world - 1) / world * world;

  bool gains_by_readers = false;
  for (size_t i = 1; i < sc.source.size(); ++i) {
    const auto& [readers, rate] = sc.source[i];
    gains_by_readers |= rate / readers > sc.source[i - 1].second / sc.source[i - 1].first;
  }

  Batch batch;
  std::vector<double> fetched(world, out.staging_seconds);  // when a rank's threads are free
  std::vector<double> free(world, out.staging_seconds);     // when a rank may consume the next
  std::vector<double> barriers;                             // of all batches so far
  // What a rank's samples of the slowest place are due to the source, a fraction of one.
  std::vector<double> owed(world);
  for (uint32_t rank = 0; rank < world; ++rank) owed[rank] = Draw(sc.seed, rank, 0);
  uint32_t starved = 0;  // batches for which a wait is remembered
  double now = out.staging_seconds;
  double epoch_start = 0;
  double stalled = 0;
  uint64_t next_tick = kTickEvery;
  for (uint32_t e = 0; e < simulated_; ++e) {
    const std::span<const SampleId> order = Order(e);
    // The first epoch carries what was staged before it.
    epoch_start = e == 0 ? 0 : now;
    const double epoch_gate = traits.crosses_epochs ? 0 : now;
    const uint64_t batch_slots = uint64_t{sc.batch} * world;
    for (uint64_t first = 0; first < epoch_slots; first += batch_slots) {
      const uint64_t slots = std::min(batch_slots, epoch_slots - first);
      batch.epoch = e;
      batch.first = first;
      batch.samples.resize(slots);
      batch.places.resize(slots);
      for (uint64_t i = 0; i < slots; ++i) {
        const uint64_t at = first + i;
        batch.samples[i] = order[at < sc.samples ? at : at % sc.samples];
      }
      places.Decide(batch);

      Mix mix;
      for (uint64_t i = 0; i < slots; ++i) mix.mb[batch.places[i]] += SizeMb(batch.samples[i]);
      for (size_t place = 1; place < kPlaces; ++place) {
        mix.cost[place] = places.Cost(static_cast<PlaceCode>(place)) + write;
      }
      if (traits.prefetch) {
        double seconds = mix.Solve(sc, most_readers, write);
        // Where ranks wait or threads do not keep up, the cost model gives the source what it
        // serves faster.
        std::array<size_t, kPlaces - 1> dearest{1, 2, 3, 4};
        std::sort(dearest.begin(), dearest.end(),
                  [&](size_t x, size_t y) { return mix.cost[x] > mix.cost[y]; });
        for (size_t place : dearest) {
          if (!traits.cost_model) break;
          if (starved == 0 && seconds / threads <= mix.Sum() * compute) break;
          if (mix.mb[place] <= 0) continue;
          const double share =
              Spill(sc, mix, place, most_readers, write, gains_by_readers) / mix.mb[place];
          if (share <= 0) continue;
          uint32_t rank = 0;
          for (uint64_t i = 0; i < slots; ++i) {
            if (batch.places[i] == place && (owed[rank] += share) >= 1) {
              owed[rank] -= 1;
              batch.places[i] = kSource;
              mix.mb[place] -= SizeMb(batch.samples[i]);
              mix.mb[kSource] += SizeMb(batch.samples[i]);
            }
            if (++rank == world) rank = 0;
          }
          mix.mb[place] = std::max(0.0, mix.mb[place]);
          seconds = mix.Solve(sc, most_readers, write);
        }
      } else {
        // All ranks read at the same time: they left a barrier together.
        mix.cost[kSource] = most_readers / sc.SourceRate(most_readers) + write;
      }
      std::array<double, kPlaces> cost = mix.cost;
      if (policy == Policy::kLowerBound) {
        cost.fill(0);
      } else {
        out.source_mb += mix.mb[kSource];
        out.local_mb += mix.mb[kLocal] + mix.mb[kLocal + 1];
        out.peer_mb += mix.mb[kPeer] + mix.mb[kPeer + 1];
      }
      for (double& c : cost) c /= threads;

      const double gate =
          std::max(epoch_gate, barriers.size() < window ? 0.0 : barriers[barriers.size() - window]);
      uint32_t rank = 0;
      const double stalled_before = stalled;
      for (uint64_t i = 0; i < slots; ++i) {
        const double size = SizeMb(batch.samples[i]);
        const double ready = traits.prefetch ? std::max(fetched[rank], gate) : free[rank];
        fetched[rank] = ready + size * cost[batch.places[i]];
        const double start = std::max(fetched[rank], free[rank]);
        stalled += start - free[rank];
        free[rank] = start + size * compute;
        if (++rank == world) rank = 0;
      }
      if (stalled - stalled_before > 1e-4 * mix.Sum() * compute) {
        starved = kRememberWait;
      } else if (starved > 0) {
        --starved;
      }
      now = *std::max_element(free.begin(), free.end());
      std::fill(free.begin(), free.end(), now);
      barriers.push_back(now);
      done += slots;
      if (done >= next_tick) {
        next_tick = done + kTickEvery;
        if (!tick()) return stopped;
      }
    }
    out.epoch_seconds.push_back(now - epoch_start);
  }
  out.seconds = now + (sc.epochs - simulated_) * out.epoch_seconds.back();
  out.stall_seconds = stalled / world;
  if (!tick()) return stopped;
  return out;
}

}  // namespace forebay::sim
