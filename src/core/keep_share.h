// KeepShare: what a node of a cluster may keep of a data set, by sample.
#pragma once

#include <cstdint>

namespace forebay {

enum class KeepShare : uint8_t {
  kNone = 0,     // others need the room
  kHome = 1,     // it lives here
  kReplica = 2,  // where room is left beside all that lives here
};

}  // namespace forebay
