// Where a scan of shards leaves the samples that it has read on its way, so that nobody reads them
// again.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "catalog/catalog.h"

namespace forebay {

// Safe for concurrent use by multiple threads.
class EarlySink {
 public:
  virtual ~EarlySink() = default;
  // Bytes of samples that it would still take; an estimate.
  virtual uint64_t Room() const = 0;
  // Copies the bytes of a sample, named by its shard and its number there. False: no room.
  virtual bool Land(uint32_t shard, uint32_t index, std::span<const std::byte> bytes) = 0;
  // Called once at the end of a scan that succeeded: the catalog's number of each shard's first
  // sample.
  virtual void Number(std::span<const SampleId> first_of_shard) = 0;
};

}  // namespace forebay
