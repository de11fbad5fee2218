// Samples that a scan of shards has read before their data set is known to the engine. They lie in
// the engine's arena, within its budget, and AddDataset takes them over.
#pragma once

#include <atomic>
#include <cstdint>
#include <span>
#include <vector>

#include "base/thread_annotations.h"
#include "catalog/early_sink.h"
#include "core/allocator.h"

namespace forebay {

class Engine;

// Safe for concurrent use by multiple threads. Must not outlive the engine; its destructor gives
// back what was not taken over.
class EarlySamples final : public EarlySink {
 public:
  struct Sample {
    uint32_t shard = 0;
    uint32_t index = 0;
    ArenaAllocator::Block block = ArenaAllocator::kNone;
    uint32_t length = 0;
    uint32_t crc = 0;
  };

  explicit EarlySamples(Engine& engine) : engine_(engine) {}
  ~EarlySamples() override;
  EarlySamples(const EarlySamples&) = delete;
  EarlySamples& operator=(const EarlySamples&) = delete;

  uint64_t Room() const override;
  bool Land(uint32_t shard, uint32_t index, std::span<const std::byte> bytes) override;
  void Number(std::span<const SampleId> first_of_shard) override;

  size_t size() const { return count_.load(std::memory_order_relaxed); }
  // Gives up the latest ones, of `bytes` at least: their blocks, to be returned by the caller.
  std::vector<ArenaAllocator::Block> GiveUp(uint64_t bytes);
  // Moves them out, with the first sample's number of each shard; nothing before Number.
  std::vector<Sample> Take(std::vector<SampleId>* first_of_shard);

 private:
  Engine& engine_;
  std::atomic<size_t> count_ = 0;
  Mutex mutex_;
  std::vector<Sample> samples_ GUARDED_BY(mutex_);
  std::vector<SampleId> first_of_shard_ GUARDED_BY(mutex_);
  bool numbered_ GUARDED_BY(mutex_) = false;
};

}  // namespace forebay
