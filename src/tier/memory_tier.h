// A tier in the process's own memory: the reference for the others, for tests and simulators.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "base/status.h"
#include "tier/tier.h"

namespace forebay {

// Counts the samples' bytes against `capacity_bytes`, nothing else. Ops finish within Submit.
Result<std::unique_ptr<Tier>> MakeMemoryTier(uint64_t capacity_bytes, size_t max_in_flight);

}  // namespace forebay
