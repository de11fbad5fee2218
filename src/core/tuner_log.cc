#include "core/tuner_log.h"

#include <array>
#include <charconv>
#include <cstddef>

namespace forebay {
namespace {

constexpr std::string_view kMagic = "forebay-tuner 4";

// In the order of the line; now_ns comes first.
constexpr std::array kFields = {
    &TuneObservation::reads,
    &TuneObservation::read_bytes,
    &TuneObservation::latency_ns,
    &TuneObservation::latency_low_ns,
    &TuneObservation::consumed_bytes,
    &TuneObservation::takes,
    &TuneObservation::stall_ns,
    &TuneObservation::consumers,
    &TuneObservation::in_flight,
    &TuneObservation::ready_bytes,
    &TuneObservation::ready_low_bytes,
    &TuneObservation::ahead_bytes,
    &TuneObservation::batch_bytes,
    &TuneObservation::fixed_reads,
    &TuneObservation::fixed_bytes,
    &TuneObservation::shared,
    &TuneObservation::hits,
    &TuneObservation::hit_bytes,
};

template <typename T>
bool Number(std::string_view& line, T* out) {
  const auto [end, error] = std::from_chars(line.data(), line.data() + line.size(), *out);
  if (error != std::errc()) return false;
  line.remove_prefix(static_cast<size_t>(end - line.data()));
  if (!line.empty() && line.front() == ' ') line.remove_prefix(1);
  return true;
}

std::string_view TakeLine(std::string_view& text) {
  const size_t end = text.find('\n');
  const std::string_view line = text.substr(0, end);
  text.remove_prefix(end == std::string_view::npos ? text.size() : end + 1);
  return line;
}

Status Bad(size_t line) {
  return Status(Code::kInvalidArgument, StrCat("line ", line, " is not of a tuner's log"));
}

}  // namespace

std::string TuneLogHeader(const TuneOptions& options) {
  return StrCat(kMagic, " ", static_cast<int>(options.policy), " ", options.max_reads, " ",
                options.max_ahead_bytes, " ", options.cores, "\n");
}

std::string TuneLogLine(const TuneObservation& seen, const TuneDecision& decided) {
  std::string line = std::to_string(seen.now_ns);
  for (const auto field : kFields) {
    line += ' ';
    line += std::to_string(seen.*field);
  }
  line += StrCat(" ", decided.reads, " ", decided.ahead_bytes, " ", decided.flight_bytes, " ",
                 decided.reason, "\n");
  return line;
}

Result<TuneLog> ParseTuneLog(std::string_view text) {
  TuneLog log;
  std::string_view line = TakeLine(text);
  int policy = 0;
  if (!line.starts_with(kMagic) || line.size() <= kMagic.size()) return Bad(1);
  line.remove_prefix(kMagic.size() + 1);
  if (!Number(line, &policy) || policy < 0 || policy > 1 || !Number(line, &log.options.max_reads) ||
      !Number(line, &log.options.max_ahead_bytes) || !Number(line, &log.options.cores) ||
      log.options.max_reads == 0 || log.options.cores == 0) {
    return Bad(1);
  }
  log.options.policy = static_cast<TunePolicy>(policy);
  for (size_t number = 2; text.find('\n') != std::string_view::npos; ++number) {
    line = TakeLine(text);
    TuneStep step;
    bool good = Number(line, &step.seen.now_ns);
    for (const auto field : kFields) good = good && Number(line, &(step.seen.*field));
    good = good && Number(line, &step.decided.reads) && Number(line, &step.decided.ahead_bytes) &&
           Number(line, &step.decided.flight_bytes);
    if (!good) return Bad(number);
    step.decided.reason = line;
    log.steps.push_back(std::move(step));
  }
  return log;
}

std::vector<TuneDecision> ReplayTuneLog(const TuneLog& log, const TuneOptions& options) {
  const std::unique_ptr<Tuner> tuner = MakeTuner(options);
  std::vector<TuneDecision> decisions;
  decisions.reserve(log.steps.size());
  for (const TuneStep& step : log.steps) decisions.push_back(tuner->Step(step.seen));
  return decisions;
}

}  // namespace forebay
