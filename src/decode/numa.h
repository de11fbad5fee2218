// Which processors are near which memory.
#pragma once

#include <sched.h>

#include <string>
#include <vector>

namespace forebay {

// One set for each NUMA node that has processors this process may use; a single set, or none where
// the system does not say, when there is nothing to choose. `folder`: as Linux lays out
// /sys/devices/system/node.
std::vector<cpu_set_t> NumaNodes(const std::string& folder = "/sys/devices/system/node");

// Processors this process may run on.
size_t UsableProcessors();

}  // namespace forebay
