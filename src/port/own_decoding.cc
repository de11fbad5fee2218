#include "port/own_decoding.h"

#include <algorithm>
#include <cstddef>

#include "base/system_memory.h"
#include "decode/numa.h"

namespace forebay {

OwnDecoding::OwnDecoding()
    : sharers(LocalRanks()), pool(registry, std::max<size_t>(1, UsableProcessors() / sharers)) {}

}  // namespace forebay
