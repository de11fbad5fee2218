// forebay-faultsim: runs seeds of the fault simulator, and shrinks the schedule of one that fails.
#include <algorithm>
#include <charconv>
#include <cstdio>
#include <optional>
#include <string>
#include <string_view>

#include "sim/faults/bugs.h"
#include "sim/faults/cluster.h"

namespace {

using namespace forebay;
using namespace forebay::sim;

constexpr std::string_view kUsage =
    "forebay-faultsim [--seed N] [--seeds COUNT] [--schedule FAULTS] [--bug NAME] [--trace]\n"
    "                 [--no-shrink] [--keep-going]\n"
    "Runs clusters with faults on a virtual clock, from seed N (1) on. FAULTS is what a failure\n"
    "prints. Ends with 1 after a failure, with 2 for wrong arguments.\n";

std::optional<uint64_t> Number(std::string_view text) {
  uint64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size()) return std::nullopt;
  return value;
}

}  // namespace

int main(int argc, char** argv) {
  FaultRun run{.seed = 1};
  uint64_t seeds = 1;
  bool shrink = true;
  bool keep_going = false;
  uint64_t failures = 0;
  std::string bug;
  for (int i = 1; i < argc; ++i) {
    const std::string_view name = argv[i];
    const std::string_view value = i + 1 < argc ? argv[i + 1] : "";
    bool right = true;
    if (name == "--trace") {
      run.trace = true;
    } else if (name == "--keep-going") {
      keep_going = true;
    } else if (name == "--no-shrink") {
      shrink = false;
    } else if (name == "--seed" || name == "--seeds") {
      const std::optional<uint64_t> number = Number(value);
      right = number.has_value();
      if (right) (name == "--seed" ? run.seed : seeds) = *number;
      ++i;
    } else if (name == "--schedule") {
      const Result<Schedule> schedule = Schedule::Parse(std::string(value));
      right = schedule.has_value();
      if (right) run.schedule = *schedule;
      ++i;
    } else if (name == "--bug") {
      bug = value;
      right = BugOf(value).has_value();
      if (right) planted_bug = *BugOf(value);
      ++i;
    } else {
      right = false;
    }
    if (!right) {
      std::fprintf(stderr, "%.*s %.*s?\n%.*s", static_cast<int>(name.size()), name.data(),
                   static_cast<int>(value.size()), value.data(), static_cast<int>(kUsage.size()),
                   kUsage.data());
      return 2;
    }
  }
  uint64_t batches = 0;
  Nanos longest = 0;
  const uint64_t first = run.seed;
  for (; run.seed < first + seeds; ++run.seed) {
    const FaultOutcome out = RunFaults(run);
    batches += out.batches;
    longest = std::max(longest, out.longest_wait);
    if (seeds == 1) {
      std::printf(
          "%u nodes, %.1f s, %llu events, %llu batches, %llu source reads, %llu from peers, "
          "longest wait %.2f s, hash %016llx\nschedule %s\n",
          out.nodes, static_cast<double>(out.virtual_time) / 1e9,
          static_cast<unsigned long long>(out.events), static_cast<unsigned long long>(out.batches),
          static_cast<unsigned long long>(out.source_reads),
          static_cast<unsigned long long>(out.peer_reads),
          static_cast<double>(out.longest_wait) / 1e9, static_cast<unsigned long long>(out.hash),
          out.schedule.ToString().c_str());
    }
    if (out.ok()) continue;
    std::printf("seed %llu: %s: %s\n", static_cast<unsigned long long>(run.seed),
                out.violation.c_str(), out.what.c_str());
    std::printf("%s\n", ReplayCommand(run.seed, out.schedule, bug).c_str());
    if (shrink) {
      const Schedule shortest = Shrink(run, out, 200);
      std::printf("shortest: %s\n", ReplayCommand(run.seed, shortest, bug).c_str());
    }
    std::fflush(stdout);
    ++failures;
    if (!keep_going) return 1;
  }
  if (failures > 0) {
    std::printf("%llu of %llu seeds failed\n", static_cast<unsigned long long>(failures),
                static_cast<unsigned long long>(seeds));
    return 1;
  }
  std::printf("%llu seeds, %llu batches, no failure; longest wait %.2f s\n",
              static_cast<unsigned long long>(seeds), static_cast<unsigned long long>(batches),
              static_cast<double>(longest) / 1e9);
  return 0;
}
