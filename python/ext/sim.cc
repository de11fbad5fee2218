// The performance simulator: a scenario, and one run a policy.
#include "common.h"
#include "sim/simulate.h"

namespace forebay::python {

void BindSim(nb::module_& m) {
  using namespace sim;
  nb::class_<TierSpec>(m, "SimTier", "A storage class of a simulated node.")
      .def(
          "__init__",
          [](TierSpec* self, std::string name, double mb, double mb_per_s, double threads) {
            new (self) TierSpec{std::move(name), mb, mb_per_s, threads};
          },
          nb::arg("name"), nb::arg("mb"), nb::arg("mb_per_s"), nb::arg("threads"));
  nb::class_<Scenario>(m, "SimScenario", "What the simulator is told; MB are 2^20 bytes.")
      .def(nb::init<>())
      .def("validate", [](const Scenario& s) { Raise(s.Validate()); })
      .def_rw("nodes", &Scenario::nodes)
      .def_rw("ranks_per_node", &Scenario::ranks_per_node)
      .def_rw("tiers", &Scenario::tiers)
      .def_rw("staging_mb", &Scenario::staging_mb)
      .def_rw("staging_mb_per_s", &Scenario::staging_mb_per_s)
      .def_rw("staging_threads", &Scenario::staging_threads)
      .def_rw("network_mb_per_s", &Scenario::network_mb_per_s)
      .def_rw("source", &Scenario::source)
      .def_prop_rw(
          "study_accounting", [](const Scenario& s) { return s.accounting == Accounting::kStudy; },
          [](Scenario& s, bool study) {
            s.accounting = study ? Accounting::kStudy : Accounting::kConserving;
          })
      .def_rw("samples", &Scenario::samples)
      .def_rw("sample_mb", &Scenario::sample_mb)
      .def_rw("sample_sigma_mb", &Scenario::sample_sigma_mb)
      .def_rw("compute_mb_per_s", &Scenario::compute_mb_per_s)
      .def_rw("preprocess_mb_per_s", &Scenario::preprocess_mb_per_s)
      .def_rw("batch", &Scenario::batch)
      .def_rw("epochs", &Scenario::epochs)
      .def_rw("seed", &Scenario::seed)
      .def_rw("max_accesses", &Scenario::max_accesses);
  nb::class_<Simulation>(m, "Simulation", "One scenario, in virtual time.")
      .def(
          "__init__",
          [](Simulation* self, const Scenario& scenario) {
            new (self) Simulation(Value(Simulation::Make(scenario)));
          },
          nb::arg("scenario"))
      .def_prop_ro("simulated_epochs", &Simulation::simulated_epochs)
      .def(
          "run",
          [](Simulation& self, const std::string& policy, nb::object progress) {
            const Policy which = Value(ParsePolicy(policy));
            const ProgressFn tick = [&progress](uint64_t done, uint64_t total) {
              nb::gil_scoped_acquire locked;
              if (SignalRaised()) throw nb::python_error();
              if (!progress.is_none()) progress(done, total);
              return true;
            };
            Result<Outcome> result = [&] {
              nb::gil_scoped_release unlocked;
              return self.Run(which, tick);
            }();
            const Outcome out = Value(std::move(result));
            nb::dict d;
            d["policy"] = policy;
            d["title"] = nb::str(PolicyTitle(which).data(), PolicyTitle(which).size());
            if (!out.infeasible.empty()) {
              d["infeasible"] = out.infeasible;
              return d;
            }
            d["seconds"] = out.seconds;
            d["staging_seconds"] = out.staging_seconds;
            d["epoch_seconds"] = out.epoch_seconds;
            d["stall_seconds"] = out.stall_seconds;
            d["source_mb"] = out.source_mb;
            d["peer_mb"] = out.peer_mb;
            d["local_mb"] = out.local_mb;
            d["read_share"] = out.read_share;
            d["global_shuffle"] = out.global_shuffle;
            d["simulated_epochs"] = out.simulated_epochs;
            if (out.planned_epochs > 0) {
              d["planned_epochs"] = out.planned_epochs;
              d["uncovered_share"] = out.uncovered_share;
            }
            return d;
          },
          nb::arg("policy"), nb::arg("progress") = nb::none(),
          "Runs one policy; `progress` is called with (accesses done, accesses in all).");
  m.def(
      "sim_policies",
      [] {
        std::vector<std::string> names;
        for (int i = 0; i < kPolicies; ++i) names.emplace_back(PolicyName(static_cast<Policy>(i)));
        return names;
      },
      "The names that Simulation.run takes.");
}

}  // namespace forebay::python
