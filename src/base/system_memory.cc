#include "base/system_memory.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <charconv>
#include <cstdlib>
#include <string_view>

#include "base/owned.h"

namespace forebay {
namespace {

// A small file; empty when it cannot be read. Not through a stream: where the C++ library is linked
// both statically and as a shared object, streams of one find the other's facets, and read 0.
std::string ReadFile(const std::string& path) {
  const OwnedFd file(open(path.c_str(), O_RDONLY | O_CLOEXEC));
  std::string text;
  std::array<char, 4096> piece;
  while (file.valid()) {
    const ssize_t n = read(file.get(), piece.data(), piece.size());
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) break;
    text.append(piece.data(), static_cast<size_t>(n));
  }
  return text;
}

// Takes the first line off `text`.
std::string_view NextLine(std::string_view* text) {
  const size_t end = std::min(text->find('\n'), text->size());
  const std::string_view line = text->substr(0, end);
  text->remove_prefix(std::min(end + 1, text->size()));
  return line;
}

// The number that `text` begins with, after blanks; false when there is none ("max").
bool ParseNumber(std::string_view text, uint64_t* out) {
  text.remove_prefix(std::min(text.find_first_not_of(" \t"), text.size()));
  return std::from_chars(text.data(), text.data() + text.size(), *out).ec == std::errc();
}

bool ReadNumber(const std::string& path, uint64_t* out) { return ParseNumber(ReadFile(path), out); }

// Pages of files in a group's memory: they count as used, and make room for whoever asks.
uint64_t FilePages(const std::string& path, bool v2) {
  const std::string stat = ReadFile(path);
  uint64_t pages = 0;
  for (std::string_view rest = stat; !rest.empty();) {
    const std::string_view line = NextLine(&rest);
    const size_t blank = std::min(line.find(' '), line.size());
    std::string_view key = line.substr(0, blank);
    if (!v2) {
      if (!key.starts_with("total_")) continue;
      key.remove_prefix(6);
    }
    uint64_t bytes = 0;
    if ((key == "inactive_file" || key == "active_file") &&
        ParseNumber(line.substr(blank), &bytes)) {
      pages += bytes;
    }
  }
  return pages;
}

std::atomic<bool> serves_all_ranks{false};

void Tighten(uint64_t limit, uint64_t used, uint64_t* tightest) {
  constexpr uint64_t kUnlimited = uint64_t{1} << 60;  // cgroup v1 writes a huge number for "none"
  if (limit >= kUnlimited) return;
  const uint64_t left = limit > used ? limit - used : 1;
  *tightest = *tightest == 0 ? left : std::min(*tightest, left);
}

}  // namespace

MemoryLimit ReadMemoryLimit(const std::string& root) {
  MemoryLimit limit;
  constexpr std::string_view kAvailable = "MemAvailable:";
  const std::string info = ReadFile(root + "/proc/meminfo");
  for (std::string_view rest = info; !rest.empty();) {
    const std::string_view line = NextLine(&rest);
    uint64_t kib = 0;
    if (line.starts_with(kAvailable) && ParseNumber(line.substr(kAvailable.size()), &kib)) {
      limit.available = kib * 1024;
    }
  }
  const std::string groups = ReadFile(root + "/proc/self/cgroup");
  for (std::string_view rest = groups; !rest.empty();) {
    const std::string line(NextLine(&rest));
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
        const uint64_t files = FilePages(dir + "/memory.stat", v2);
        Tighten(most, used - std::min(used, files), &limit.cgroup);
      }
      dir.resize(dir.rfind('/'));
    }
  }
  return limit;
}

uint64_t LocalRanks() {
  if (serves_all_ranks.load(std::memory_order_relaxed)) return 1;
  for (const char* name : {"LOCAL_WORLD_SIZE", "SLURM_NTASKS_PER_NODE",
                           "OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS"}) {
    const char* text = std::getenv(name);
    if (text == nullptr) continue;
    const uint64_t n = std::strtoull(text, nullptr, 10);
    if (n > 0) return n;
  }
  return 1;
}

void ServeAllRanks() { serves_all_ranks.store(true, std::memory_order_relaxed); }

uint64_t DefaultBudget() {
  const MemoryLimit limit = ReadMemoryLimit();
  return limit.usable() / 2 / LocalRanks();
}

}  // namespace forebay
