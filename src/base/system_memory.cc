#include "base/system_memory.h"

#include <algorithm>
#include <cstdlib>
#include <fstream>
#include <sstream>

namespace forebay {
namespace {

// First number in a file; false when there is none ("max").
bool ReadNumber(const std::string& path, uint64_t* out) {
  std::ifstream in(path);
  return static_cast<bool>(in >> *out);
}

void Tighten(uint64_t limit, uint64_t used, uint64_t* tightest) {
  constexpr uint64_t kUnlimited = uint64_t{1} << 60;  // cgroup v1 writes a huge number for "none"
  if (limit >= kUnlimited) return;
  const uint64_t left = limit > used ? limit - used : 1;
  *tightest = *tightest == 0 ? left : std::min(*tightest, left);
}

}  // namespace

MemoryLimit ReadMemoryLimit(const std::string& root) {
  MemoryLimit limit;
  std::ifstream info(root + "/proc/meminfo");
  for (std::string line; std::getline(info, line);) {
    std::istringstream fields(line);
    std::string key;
    uint64_t kib = 0;
    if (fields >> key >> kib && key == "MemAvailable:") limit.available = kib * 1024;
  }
  std::ifstream groups(root + "/proc/self/cgroup");
  for (std::string line; std::getline(groups, line);) {
    // "0::/a/b" (v2) or "4:memory:/a/b" (v1). A limit may be set at any level above.
    const size_t first = line.find(':');
    const size_t second = line.find(':', first + 1);
    if (first == std::string::npos || second == std::string::npos) continue;
    const std::string controllers = line.substr(first + 1, second - first - 1);
    const bool v2 = controllers.empty();
    if (!v2 && controllers.find("memory") == std::string::npos) continue;
    const std::string base = root + (v2 ? "/sys/fs/cgroup" : "/sys/fs/cgroup/memory");
    std::string dir = base + line.substr(second + 1);
    while (dir.size() >= base.size()) {
      uint64_t most = 0;
      uint64_t used = 0;
      if (ReadNumber(dir + (v2 ? "/memory.max" : "/memory.limit_in_bytes"), &most)) {
        ReadNumber(dir + (v2 ? "/memory.current" : "/memory.usage_in_bytes"), &used);
        Tighten(most, used, &limit.cgroup);
      }
      dir.resize(dir.rfind('/'));
    }
  }
  return limit;
}

uint64_t LocalRanks() {
  for (const char* name : {"LOCAL_WORLD_SIZE", "SLURM_NTASKS_PER_NODE",
                           "OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS"}) {
    const char* text = std::getenv(name);
    if (text == nullptr) continue;
    const uint64_t n = std::strtoull(text, nullptr, 10);
    if (n > 0) return n;
  }
  return 1;
}

uint64_t DefaultBudget() {
  const MemoryLimit limit = ReadMemoryLimit();
  return limit.usable() / 2 / LocalRanks();
}

}  // namespace forebay
