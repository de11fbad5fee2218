// The bugs that can be planted, by name.
#pragma once

#include <array>
#include <optional>
#include <string_view>
#include <utility>

#include "base/planted_bug.h"

namespace forebay::sim {

inline constexpr std::array<std::pair<std::string_view, PlantedBug>, 5> kBugs = {{
    {"lost-home", PlantedBug::kLostHome},
    {"double-serve", PlantedBug::kDoubleServe},
    {"stale-directory", PlantedBug::kStaleDirectory},
    {"lease-leak", PlantedBug::kLeaseLeak},
    {"missed-wake-up", PlantedBug::kMissedWakeUp},
}};

inline std::optional<PlantedBug> BugOf(std::string_view name) {
  for (const auto& [known, bug] : kBugs) {
    if (known == name) return bug;
  }
  return std::nullopt;
}

}  // namespace forebay::sim
