#include "decode/numa.h"

#include <algorithm>
#include <charconv>
#include <fstream>
#include <string_view>
#include <thread>

namespace forebay {
namespace {

// "0-7,16-23"
bool ParseProcessors(std::string_view text, cpu_set_t* out) {
  CPU_ZERO(out);
  const char* at = text.data();
  const char* const end = at + text.size();
  while (at < end && *at != '\n') {
    size_t first = 0;
    auto parsed = std::from_chars(at, end, first);
    if (parsed.ec != std::errc()) return false;
    size_t last = first;
    at = parsed.ptr;
    if (at < end && *at == '-') {
      parsed = std::from_chars(at + 1, end, last);
      if (parsed.ec != std::errc()) return false;
      at = parsed.ptr;
    }
    for (size_t i = first; i <= last && i < CPU_SETSIZE; ++i) CPU_SET(i, out);
    if (at < end && *at == ',') ++at;
  }
  return true;
}

bool Allowed(cpu_set_t* out) {
  CPU_ZERO(out);
  return sched_getaffinity(0, sizeof *out, out) == 0;
}

}  // namespace

std::vector<cpu_set_t> NumaNodes(const std::string& folder) {
  std::vector<cpu_set_t> nodes;
  cpu_set_t allowed;
  if (!Allowed(&allowed)) return nodes;
  constexpr int kMostNodes = 1024;
  int missing = 0;  // numbers may have gaps
  for (int i = 0; i < kMostNodes && missing < 8; ++i) {
    std::ifstream file(folder + "/node" + std::to_string(i) + "/cpulist");
    std::string line;
    if (!std::getline(file, line)) {
      ++missing;
      continue;
    }
    cpu_set_t node;
    if (!ParseProcessors(line, &node)) continue;
    CPU_AND(&node, &node, &allowed);
    if (CPU_COUNT(&node) > 0) nodes.push_back(node);
  }
  return nodes;
}

size_t UsableProcessors() {
  cpu_set_t allowed;
  if (Allowed(&allowed)) return static_cast<size_t>(std::max(1, CPU_COUNT(&allowed)));
  return std::max(1U, std::thread::hardware_concurrency());
}

}  // namespace forebay
