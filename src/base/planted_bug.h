// Bugs that the fault simulator plants in its own copy of a few files, to see that it finds them
// (sim/faults). Everywhere else FOREBAY_PLANTED(kAny) is the constant false.
#pragma once

#ifdef FOREBAY_PLANTED_BUGS

#include <cstdint>

namespace forebay {

enum class PlantedBug : uint8_t {
  kNone,
  kLostHome,        // a sample of a dead node gets no new home
  kDoubleServe,     // a request is answered twice
  kStaleDirectory,  // copies of the dead are not forgotten
  kLeaseLeak,       // who is given up while it reads keeps its sample in memory
  kMissedWakeUp     // of answers that brought nothing the loop is not told
};
extern PlantedBug planted_bug;

}  // namespace forebay

#define FOREBAY_PLANTED(bug) (::forebay::planted_bug == ::forebay::PlantedBug::bug)
#else
#define FOREBAY_PLANTED(bug) false
#endif
