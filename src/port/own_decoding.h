// OwnDecoding: the threads of this process that decode what an engine of another process has
// stored.
#pragma once

#include <cstdint>

#include "decode/pool.h"
#include "metrics/registry.h"

namespace forebay {

struct OwnDecoding {
  OwnDecoding();

  const uint64_t sharers;  // ranks of the node: each has as many, together one for each processor
  Registry registry;
  DecodePool pool;
};

}  // namespace forebay
