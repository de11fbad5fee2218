#include "stage/early_samples.h"

#include <utility>

#include "base/crc32c.h"
#include "stage/engine.h"

namespace forebay {

EarlySamples::~EarlySamples() {
  std::vector<ArenaAllocator::Block> blocks;
  MutexLock lock(mutex_);
  for (const Sample& sample : samples_) blocks.push_back(sample.block);
  engine_.ReturnEarly(blocks);
}

uint64_t EarlySamples::Room() const { return engine_.EarlyRoom(size()); }

bool EarlySamples::Land(uint32_t shard, uint32_t index, std::span<const std::byte> bytes) {
  if (bytes.size() > Room()) return false;
  Sample sample = {.shard = shard, .index = index, .length = static_cast<uint32_t>(bytes.size())};
  const std::span<std::byte> to = engine_.AllotEarly(sample.length, &sample.block);
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
