// What a tuner saw and decided, as text: a line that names the policy and its options, then one
// line a step. Numbers are separated by spaces, the reason ends the line.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"
#include "core/tuner.h"

namespace forebay {

struct TuneStep {
  TuneObservation seen;
  TuneDecision decided;
};

struct TuneLog {
  TuneOptions options;
  std::vector<TuneStep> steps;
};

std::string TuneLogHeader(const TuneOptions& options);
std::string TuneLogLine(const TuneObservation& seen, const TuneDecision& decided);
// A last line that was cut short is left out.
Result<TuneLog> ParseTuneLog(std::string_view text);
// What a policy decides from the same observations, one decision a step.
std::vector<TuneDecision> ReplayTuneLog(const TuneLog& log, const TuneOptions& options);

}  // namespace forebay
