// Policies as data: who may take how much of the source and of the tiers.
//
// People write TOML (docs/policies.md), which the command-line tool reads and turns into the JSON
// that this file reads and writes; daemon and controller see only that.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"
#include "core/fair_share.h"

namespace forebay::control {

// What one job may take. The defaults are those of a job that no rule matches.
struct JobRule {
  std::string match = "*";  // the job's name, with * and ?
  double share = 1;
  int32_t priority = 0;
  double min_bandwidth = 0;  // bytes a second of the source
  double max_bandwidth = kUnlimited;
  double min_operations = 0;  // reads a second
  double max_operations = kUnlimited;
  std::optional<int64_t> memory;  // bytes of the memory tier that it may fill, on a node
  std::optional<int64_t> folder;  // likewise of the cache folder

  bool operator==(const JobRule&) const = default;
};

struct Policy {
  static constexpr int64_t kVersion = 1;

  std::vector<JobRule> jobs;      // the first that matches a job's name holds for it
  std::optional<int64_t> memory;  // bytes of a node's memory tier, for all jobs together
  std::optional<int64_t> folder;
  bool tuner = true;
  std::map<std::string, int64_t> knobs;  // held at these values, whatever the tuner wants

  // The rule for a job: each job that a rule matches gets all of it, two jobs do not share one.
  const JobRule& RuleFor(std::string_view job) const;

  bool operator==(const Policy&) const = default;
};

// A knob that a policy may fix.
struct KnownKnob {
  std::string name;
  int64_t minimum;
  int64_t maximum;
};

// kInvalidArgument names the key ("job[2].max_bandwidth"), what it may be, and what to do. Knobs
// are compared with `knobs`, unless there are none to compare with.
Status Validate(const Policy& policy, std::span<const KnownKnob> knobs);
// Reads, and validates. A key it does not know is an error.
Result<Policy> ParsePolicy(std::string_view json, std::span<const KnownKnob> knobs);
// Canonical: equal policies have equal text.
std::string WritePolicy(const Policy& policy);

// Whether `name` matches `pattern`, in which * stands for any text and ? for any one byte. Takes
// time in proportion to the product of their lengths at most.
bool GlobMatches(std::string_view pattern, std::string_view name);

}  // namespace forebay::control
