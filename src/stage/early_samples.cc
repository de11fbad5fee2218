#include "stage/early_samples.h"

#include <utility>

#include "base/crc32c.h"
#include "stage/engine.h"

namespace forebay {

EarlySamples::~EarlySamples() {
  // Without the lock: the engine's comes before it.
  engine_.ReturnEarly(GiveUp(~uint64_t{0}));
}

std::vector<ArenaAllocator::Block> EarlySamples::GiveUp(uint64_t bytes) {
  MutexLock lock(mutex_);
  std::vector<ArenaAllocator::Block> blocks;
  for (uint64_t got = 0; got < bytes && !samples_.empty(); samples_.pop_back()) {
    got += samples_.back().length;
    blocks.push_back(samples_.back().block);
  }
  return blocks;
}

uint64_t EarlySamples::Room() const { return engine_.EarlyRoom(size()); }

bool EarlySamples::Land(uint32_t shard, uint32_t index, std::span<const std::byte> bytes) {
  Sample sample = {.shard = shard, .index = index, .length = static_cast<uint32_t>(bytes.size())};
  const std::span<std::byte> to = engine_.AllotEarly(sample.length, size(), &sample.block);
  if (to.size() != bytes.size()) return false;
  sample.crc = CopyCrc32c(to, bytes);
  count_.fetch_add(1, std::memory_order_relaxed);
  MutexLock lock(mutex_);
  samples_.push_back(sample);
  return true;
}

void EarlySamples::Number(std::span<const SampleId> first_of_shard) {
  MutexLock lock(mutex_);
  first_of_shard_.assign(first_of_shard.begin(), first_of_shard.end());
  numbered_ = true;
}

std::vector<EarlySamples::Sample> EarlySamples::Take(std::vector<SampleId>* first_of_shard) {
  MutexLock lock(mutex_);
  if (!numbered_) return {};
  *first_of_shard = first_of_shard_;
  return std::exchange(samples_, {});
}

}  // namespace forebay
