#include "common.h"
#include "core/tuner_log.h"

namespace forebay::python {
namespace {

using Choice = std::tuple<uint64_t, uint64_t, std::string>;

Choice ChoiceOf(const TuneDecision& d) { return {d.reads, d.ahead_bytes, d.reason}; }

}  // namespace

void BindTune(nb::module_& m) {
  m.def(
      "replay_tuner_log",
      [](const std::string& text, const std::string& policy, uint64_t cores) {
        const TuneLog log = Value(ParseTuneLog(text));
        TuneOptions options = log.options;
        if (policy == "forebay") {
          options.policy = TunePolicy::kForebay;
        } else if (policy == "prisma") {
          options.policy = TunePolicy::kPrisma;
        } else if (!policy.empty()) {
          Raise(Status(Code::kInvalidArgument,
                       StrCat("policy is '", policy, "'; it takes forebay or prisma")));
        }
        if (cores != 0) options.cores = cores;
        const std::vector<TuneDecision> decided = ReplayTuneLog(log, options);
        std::vector<std::tuple<double, Choice, Choice>> out;
        const int64_t start = log.steps.empty() ? 0 : log.steps.front().seen.now_ns;
        for (size_t i = 0; i < decided.size(); ++i) {
          const TuneStep& step = log.steps[i];
          out.emplace_back(static_cast<double>(step.seen.now_ns - start) / 1e9,
                           ChoiceOf(step.decided), ChoiceOf(decided[i]));
        }
        return out;
      },
      nb::arg("text"), nb::arg("policy") = "", nb::arg("cores") = 0,
      "(seconds, recorded, replayed) of each step; the two are (reads, bytes, reason).");
}

}  // namespace forebay::python
