// Tells a forked child that objects with threads, locks or rings belong to its parent.
#pragma once

#include <cstdint>

namespace forebay {

// Grows by one in the child of each fork. Cheap: no system call.
uint64_t ForkGeneration();

}  // namespace forebay
