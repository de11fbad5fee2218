#include <algorithm>

#include "base/clock.h"
#include "base/rng.h"
#include "common.h"
#include "control/controller.h"
#include "control/etcd_store.h"
#include "control/kept_policy.h"
#include "control/memory_store.h"
#include "port/attach.h"

namespace forebay::python {
namespace {

using namespace forebay::control;

using Knobs = std::vector<std::tuple<std::string, int64_t, int64_t>>;

Policy Parse(const std::string& json, const Knobs& knobs) {
  std::vector<KnownKnob> known;
  for (const auto& [name, minimum, maximum] : knobs) known.push_back({name, minimum, maximum});
  return Value(ParsePolicy(json, known));
}

std::unique_ptr<EtcdStore> Etcd(const std::vector<std::string>& endpoints, double deadline_s) {
  std::unique_ptr<EtcdStore> store =
      Value(EtcdStore::Open(endpoints, static_cast<Nanos>(deadline_s * kSecond)));
  const std::string warning = store->Warning();
  if (!warning.empty() && PyErr_WarnEx(PyExc_RuntimeWarning, warning.c_str(), 1) != 0) {
    throw nb::python_error();
  }
  return store;
}

struct Rounds {
  std::vector<double> total_ms;
  std::vector<double> read_ms;  // the range read alone, of the same state
  size_t written = 0;           // keys, in the last round
};

// Rounds of a controller over `stages` summaries, which all change before each round.
Result<Rounds> TimeRounds(ControlStore& store, size_t stages, size_t jobs, size_t warm,
                          size_t rounds, uint64_t seed) {
  const ControlLayout layout("/forebay-bench/");
  ControllerOptions options;
  options.prefix = "/forebay-bench/";
  options.name = "bench";
  options.lease = 60 * kSecond;
  Policy policy;
  for (size_t i = 0; i < jobs; ++i) {
    JobRule& rule = policy.jobs.emplace_back();
    rule.match = StrCat("job-", i);
    rule.share = static_cast<double>(1 + i % 4);
  }
  FOREBAY_RETURN_IF_ERROR(StorePolicy(store, options.prefix, policy));
  Controller controller(store, options);
  SplitMix64 rng(seed);
  Rounds out;
  for (size_t round = 0; round < warm + rounds; ++round) {
    std::vector<StoreWrite> writes;
    for (size_t i = 0; i < stages; ++i) {
      StageSummary summary;
      const double rate = 1e7 + rng.Uniform() * 1e8;
      summary.delivered = {rate, rate / 1e5};
      summary.demand =
          rng.Below(2) == 0 ? RateLimits() : RateLimits{rate * 1.25, rate * 1.25 / 1e5};
      summary.stall_share = rng.Uniform();
      summary.capacity = rate;
      writes.push_back(
          {layout.Stage(StrCat("node-", i), StrCat("job-", i % jobs)), WriteSummary(summary), 0});
    }
    FOREBAY_RETURN_IF_ERROR(store.PutMany(writes));
    const Nanos before = SteadyClock().Now();
    const Result<StoreSnapshot> read = store.Range(layout.Live());
    if (!read) return read.error();
    const Nanos begin = SteadyClock().Now();
    const Result<RoundReport> report = controller.Round(begin);
    const Nanos end = SteadyClock().Now();
    if (!report) return report.error();
    if (!report->leads || report->stages != stages || report->unreadable != 0) {
      return Status(Code::kInternal, StrCat("a round over ", report->stages, " of ", stages,
                                            " stages, led by ", report->leader));
    }
    if (round < warm) continue;
    out.total_ms.push_back(static_cast<double>(end - begin) / kMilli);
    out.read_ms.push_back(static_cast<double>(begin - before) / kMilli);
    out.written = report->written;
  }
  FOREBAY_RETURN_IF_ERROR(controller.Resign());
  return out;
}

}  // namespace

void BindControl(nb::module_& m) {
  m.def(
      "policy_canonical",
      [](const std::string& json, const Knobs& knobs) { return WritePolicy(Parse(json, knobs)); },
      nb::arg("json"), nb::arg("knobs") = Knobs(),
      "Checks a policy and gives its canonical JSON. knobs: (name, minimum, maximum) of each that\n"
      "may be fixed; without any they are not compared.");
  m.def(
      "policy_rule",
      [](const std::string& json, const std::string& job) {
        const Policy policy = Parse(json, {});
        const JobRule* rule = &policy.RuleFor(job);
        for (size_t i = 0; i < policy.jobs.size(); ++i) {
          if (rule == &policy.jobs[i]) return static_cast<int64_t>(i);
        }
        return int64_t{-1};
      },
      nb::arg("json"), nb::arg("job"), "Number of the rule that holds for a job; -1: none does.");
  m.def(
      "divide_fairly",
      [](double capacity,
         const std::vector<std::tuple<double, double, double, double, int32_t>>& claims) {
        std::vector<Claim> list;
        for (const auto& [demand, weight, guarantee, cap, priority] : claims) {
          list.push_back({demand, weight, guarantee, cap, priority});
        }
        return DivideFairly(capacity, list);
      },
      nb::arg("capacity"), nb::arg("claims"),
      "What each claim (demand, weight, guarantee, cap, priority) gets of a capacity.");
  m.def(
      "store_policy",
      [](const std::vector<std::string>& endpoints, const std::string& prefix,
         const std::string& json, double deadline_s) {
        const Policy policy = json.empty() ? Policy() : Parse(json, {});
        const auto store = Etcd(endpoints, deadline_s);
        const auto put = [&] {
          WaitUnlocked unlocked;
          if (json.empty()) return store->Delete(ControlLayout(prefix).Policy());
          return StorePolicy(*store, prefix, policy);
        };
        Raise(put());
      },
      nb::arg("endpoints"), nb::arg("prefix"), nb::arg("json"), nb::arg("deadline_s") = 5.0,
      "Puts a policy into etcd; an empty text removes the one that is there.");
  m.def(
      "kept_policy",
      [](const std::string& folder) {
        const std::string path = Value(KeptPolicyPath(DaemonPlace(folder).socket));
        return std::pair(path, Value(ReadKeptPolicy(path)));
      },
      nb::arg("folder"),
      "The file of the policy that the next daemon in the folder takes up, and what is in it.");
  m.def(
      "drop_kept_policy",
      [](const std::string& folder) {
        Raise(KeepPolicy(Value(KeptPolicyPath(DaemonPlace(folder).socket)), ""));
      },
      nb::arg("folder"), "Where no daemon runs: one that does has its policy removed.");
  m.def(
      "stored_policy",
      [](const std::vector<std::string>& endpoints, const std::string& prefix,
         double deadline_s) -> std::optional<std::string> {
        const auto store = Etcd(endpoints, deadline_s);
        const auto get = [&] {
          WaitUnlocked unlocked;
          return store->Range(ControlLayout(prefix).Policy());
        };
        const StoreSnapshot found = Value(get());
        if (found.entries.empty()) return std::nullopt;
        return found.entries[0].value;
      },
      nb::arg("endpoints"), nb::arg("prefix"), nb::arg("deadline_s") = 5.0,
      "The policy in etcd, as JSON; None when there is none.");
  m.def(
      "time_control_rounds",
      [](const std::vector<std::string>& endpoints, size_t stages, size_t jobs, size_t warm,
         size_t rounds, uint64_t seed) {
        const auto run = [&]() -> Result<Rounds> {
          WaitUnlocked unlocked;
          if (endpoints.empty()) {
            MemoryStoreState state(SteadyClock());
            MemoryStore store(state);
            return TimeRounds(store, stages, jobs, warm, rounds, seed);
          }
          const auto store = EtcdStore::Open(endpoints, 30 * kSecond);
          if (!store) return store.error();
          return TimeRounds(**store, stages, jobs, warm, rounds, seed);
        };
        if (stages == 0 || jobs == 0) {
          Raise(Status(Code::kInvalidArgument, "a round needs a stage and a job"));
        }
        Rounds out = Value(run());
        return std::tuple(std::move(out.total_ms), std::move(out.read_ms), out.written);
      },
      nb::arg("endpoints"), nb::arg("stages"), nb::arg("jobs"), nb::arg("warm"), nb::arg("rounds"),
      nb::arg("seed") = 0,
      "Milliseconds of each control round over that many simulated stages, of the range read "
      "alone,\n"
      "and how many keys the last round wrote. No endpoints: the in-memory store.");
}

}  // namespace forebay::python
