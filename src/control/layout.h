// Where control state lies in a store, and how it is written.
//
//   PREFIXlive/stages/NODE/JOB   a summary, under its node's lease
//   PREFIXlive/policy            the policy in force, canonical JSON
//   PREFIXdecisions/NN           limits of the nodes whose name hashes to NN: one page of kPages
//   PREFIXdecisions/state        what a new controller goes on from
//   PREFIXleader                 the election
//
// A round is then one range read of live/ and one batch of few writes, however many stages there
// are: a thousand decisions of their own would be a thousand writes.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <utility>

#include "base/json.h"
#include "base/status.h"
#include "core/division.h"

namespace forebay::control {

class ControlLayout {
 public:
  static constexpr uint32_t kPages = 16;

  explicit ControlLayout(std::string prefix) : prefix_(std::move(prefix)) {}

  std::string Live() const { return prefix_ + "live/"; }
  std::string Policy() const { return prefix_ + "live/policy"; }
  std::string Stages() const { return prefix_ + "live/stages/"; }
  std::string Stage(std::string_view node, std::string_view job) const;
  std::string Decisions() const { return prefix_ + "decisions/"; }
  std::string Page(uint32_t number) const;
  std::string State() const { return prefix_ + "decisions/state"; }
  std::string Election() const { return prefix_ + "leader"; }

  // Every build and node computes it alike.
  static uint32_t PageOf(std::string_view node);
  // Node and job of a stage's key; none when it is not one.
  std::optional<std::pair<std::string, std::string>> StageOf(std::string_view key) const;

 private:
  const std::string prefix_;
};

// Numbers are rounded to five digits.
std::string WriteSummary(const StageSummary& summary);
// Node and job come from the key.
Result<StageSummary> ParseSummary(std::string node, std::string job, std::string_view json);

// The decisions of one page.
struct DecisionPage {
  int64_t policy = 0;  // revision of the policy that they follow; 0: none
  std::map<std::string, std::map<std::string, RateLimits>> limits;  // by node and job

  bool operator==(const DecisionPage&) const = default;
};

std::string WritePage(const DecisionPage& page);
Result<DecisionPage> ParsePage(std::string_view json);

// A rate as JSON: null when it is kUnlimited.
JsonValue WriteRate(double rate);
std::optional<double> ParseRate(const JsonValue& value);

}  // namespace forebay::control
