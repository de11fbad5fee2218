#include "core/sampler.h"

#include <algorithm>
#include <cstring>
#include <numeric>

#include "core/locality.h"

namespace forebay {

namespace {

// Drawn ahead, the elements are on their way when their swap comes: a third less time at 14
// million.
constexpr uint32_t kAhead = 64;

}  // namespace

std::vector<SampleId> InsideOutPerm(uint32_t n, Mt19937& rng) {
  std::vector<SampleId> order(n);
  uint32_t picks[kAhead];
  for (uint32_t i = 0; i < n;) {
    const uint32_t count = std::min(kAhead, n - i);
    for (uint32_t k = 0; k < count; ++k) {
      picks[k] = static_cast<uint32_t>(rng.Next64() % (uint64_t{i} + k + 1));
      __builtin_prefetch(&order[picks[k]], 1);
    }
    for (uint32_t k = 0; k < count; ++k, ++i) {
      order[i] = order[picks[k]];
      order[picks[k]] = i;
    }
  }
  return order;
}

std::vector<SampleId> RandPerm(uint32_t n, Mt19937& rng) {
  if (n > kMostForward) return InsideOutPerm(n, rng);
  std::vector<SampleId> order(n);
  std::iota(order.begin(), order.end(), 0u);
  uint32_t picks[kAhead];
  const uint32_t steps = n == 0 ? 0 : n - 1;
  for (uint32_t i = 0; i < steps;) {
    const uint32_t count = std::min(kAhead, steps - i);
    for (uint32_t k = 0; k < count; ++k) {
      picks[k] = i + k + rng.Next() % (n - i - k);
      __builtin_prefetch(&order[picks[k]], 1);
    }
    for (uint32_t k = 0; k < count; ++k, ++i) std::swap(order[i], order[picks[k]]);
  }
  return order;
}

Status SamplerSpec::Validate() const {
  if (world == 0 || rank >= world) {
    return Status(Code::kInvalidArgument,
                  StrCat("rank ", rank, " of world size ", world, " does not exist"));
  }
  if (ranks_per_node == 0) return Status(Code::kInvalidArgument, "ranks_per_node is 0");
  return Status();
}

uint64_t SamplerSpec::TotalSize() const {
  const uint64_t n = size;
  return drop_last ? n / world * world : (n + world - 1) / world * world;
}

namespace {

uint32_t SeedOf(const SamplerSpec& spec, uint64_t epoch) {
  return static_cast<uint32_t>(spec.seed + epoch);
}

// `permutation`: the whole epoch's; none where it is not shuffled.
std::vector<SampleId> RankOrder(const SamplerSpec& spec, uint64_t start,
                                std::span<const SampleId> permutation) {
  const uint64_t total = spec.TotalSize();
  std::vector<SampleId> order;
  if (start >= total) return order;
  order.reserve((total - start) / spec.world);
  // Padding repeats the permutation from its start, as often as it takes.
  for (uint64_t p = start + spec.rank; p < total; p += spec.world) {
    const uint64_t at = p % spec.size;
    order.push_back(spec.shuffle ? permutation[at] : static_cast<SampleId>(at));
  }
  return order;
}

}  // namespace

std::vector<SampleId> EpochOrder(const SamplerSpec& spec, uint64_t epoch, uint64_t start) {
  if (spec.exchange != 0) return LocalOrder(spec, epoch, start);
  if (!spec.shuffle || start >= spec.TotalSize()) return RankOrder(spec, start, {});
  Mt19937 rng(SeedOf(spec, epoch));
  std::vector<SampleId> permutation = RandPerm(spec.size, rng);
  if (spec.world == 1 && start == 0) return permutation;
  return RankOrder(spec, start, permutation);
}

std::vector<SampleId> RankOrders::Order(const SamplerSpec& spec, uint64_t epoch, uint64_t start) {
  if (spec.exchange != 0 || !spec.shuffle || spec.world == 1 || start >= spec.TotalSize()) {
    return EpochOrder(spec, epoch, start);
  }
  const uint32_t seed = SeedOf(spec, epoch);
  if (permutation_.size() != spec.size || seed_ != seed) {
    Forget();  // never two at once
    Mt19937 rng(seed);
    permutation_ = RandPerm(spec.size, rng);
    seed_ = seed;
    ++computed_;
  }
  return RankOrder(spec, start, permutation_);
}

namespace {

// Layout of a CPU generator's state: seed u64, left i32, seeded i32, next u64, 624 words of 64 bits
// of which the low half counts, then fields of the normal distribution that a permutation ignores.
constexpr size_t kStateBytes = 5056;
constexpr size_t kLeftAt = 8;
constexpr size_t kSeededAt = 12;
constexpr size_t kNextAt = 16;
constexpr size_t kWordsAt = 24;

template <typename T>
T LoadAt(std::span<const std::byte> bytes, size_t at) {
  T value;
  std::memcpy(&value, bytes.data() + at, sizeof value);
  return value;
}

}  // namespace

Result<TorchGenerator> TorchGenerator::FromState(std::span<const std::byte> state) {
  if (state.size() != kStateBytes) {
    return Status(Code::kInvalidArgument,
                  StrCat("a torch CPU generator's state has ", kStateBytes, " bytes, this one has ",
                         state.size(), "; pass generator.get_state()"));
  }
  const auto left = LoadAt<int32_t>(state, kLeftAt);
  const auto seeded = LoadAt<int32_t>(state, kSeededAt);
  const auto next = LoadAt<uint64_t>(state, kNextAt);
  if (seeded == 0 || left < 1 || left > Mt19937::kWords || next > Mt19937::kWords) {
    return Status(Code::kInvalidArgument, "the torch generator's state is damaged");
  }
  Mt19937::State words;
  for (size_t i = 0; i < words.size(); ++i) {
    words[i] = static_cast<uint32_t>(LoadAt<uint64_t>(state, kWordsAt + 8 * i));
  }
  // left == 1: the next draw refills. Otherwise `next` words are spent.
  const int used = left == 1 ? Mt19937::kWords : static_cast<int>(next);
  return TorchGenerator(Mt19937(words, used));
}

TorchGenerator TorchGenerator::FromSeed(uint64_t seed) {
  return TorchGenerator(Mt19937(static_cast<uint32_t>(seed)));
}

Result<std::vector<SampleId>> RandomSamplerOrder(TorchGenerator& generator, uint32_t size,
                                                 uint64_t num_samples, bool replacement) {
  std::vector<SampleId> order;
  if (size == 0) return order;
  order.reserve(num_samples);
  Mt19937& rng = generator.engine();
  if (replacement) {
    // PyTorch draws 32 indices at a time, and the remainder in a last call; the calls leave nothing
    // in between, so one loop is the same.
    while (order.size() < num_samples) order.push_back(rng.Next() % size);
    return order;
  }
  for (uint64_t i = 0; i < num_samples / size; ++i) {
    const std::vector<SampleId> pass = RandPerm(size, rng);
    order.insert(order.end(), pass.begin(), pass.end());
  }
  // PyTorch draws a whole permutation for the remainder, even an empty one.
  const std::vector<SampleId> rest = RandPerm(size, rng);
  order.insert(order.end(), rest.begin(), rest.begin() + static_cast<int64_t>(num_samples % size));
  return order;
}

}  // namespace forebay
