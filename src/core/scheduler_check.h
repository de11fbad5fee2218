// The invariants of a scheduler and its parts, for tests.
#pragma once

#include <string>

#include "core/scheduler.h"

namespace forebay {

// Empty when all hold.
std::string CheckInvariants(const Scheduler& scheduler);

}  // namespace forebay
