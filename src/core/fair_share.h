// Weighted max-min division of a capacity. Pure: no clock, no state.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "core/rate_limit.h"

namespace forebay::control {

// Rates are in one unit, bytes or operations a second; the caller divides each on its own.
struct Claim {
  double demand = 0;        // what it would take if it could; kUnlimited is allowed
  double weight = 1;        // above 0
  double guarantee = 0;     // gets this much before anybody gets more, if it wants it
  double cap = kUnlimited;  // never gets more
  int32_t priority = 0;     // a higher class is served before a lower one gets more than guarantees
};

// What each claim gets, in their order.
//
// Guarantees come first; where the capacity does not hold them all, each is cut by the same factor.
// Then the classes take turns, the highest priority first. Within a class a claim gets its weight's
// part, more only from what others leave, and its guarantee counts towards it:
// clamp(weight * level, guarantee, min(demand, cap)) with one level for the class. Nothing is left
// over while a claim wants more. A negative number or NaN counts as 0 (a weight: as 1). Takes
// O(n log n).
std::vector<double> DivideFairly(double capacity, std::span<const Claim> claims);

}  // namespace forebay::control
