// The performance simulators: a cluster's scenario with one run a policy, and one node.
#include <cmath>

#include "common.h"
#include "sim/node_sim.h"
#include "sim/peer_sim.h"
#include "sim/simulate.h"

namespace forebay::python {
namespace {

Nanos FromSeconds(double seconds) { return static_cast<Nanos>(std::llround(seconds * 1e9)); }

nb::dict EpochDict(const sim::NodeEpoch& epoch) {
  nb::dict d;
  d["seconds"] = epoch.seconds;
  d["stall_seconds"] = epoch.stall_seconds;
  d["samples"] = epoch.samples;
  d["source_reads"] = epoch.source_reads;
  d["source_bytes"] = epoch.source_bytes;
  d["folder_reads"] = epoch.folder_reads;
  d["folder_bytes"] = epoch.folder_bytes;
  return d;
}

void BindNode(nb::module_& m) {
  using namespace sim;
  m.def(
      "simulate_node",
      [](nb::ndarray<const uint32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu> lengths,
         const std::string& source, uint32_t batch, uint32_t epochs, uint64_t arena_bytes,
         double step_s, double sample_step_s, uint64_t seed, uint32_t lookups, uint32_t opens,
         uint64_t read_bytes, double op_extra_s, double reads_per_s, size_t max_in_flight,
         size_t in_flight, bool keep, uint64_t folder_bytes, double folder_read_bytes_per_s,
         double folder_write_bytes_per_s, uint64_t folder_buffer_bytes, nb::object progress) {
        NodeScenario s;
        s.lengths.assign(lengths.data(), lengths.data() + lengths.size());
        s.source = Value(StorageSettings::Parse(source));
        s.batch = batch;
        s.epochs = epochs;
        s.arena_bytes = arena_bytes;
        s.step = FromSeconds(step_s);
        s.sample_step = FromSeconds(sample_step_s);
        s.seed = seed;
        s.lookups = lookups;
        s.opens = opens;
        s.read_bytes = read_bytes;
        s.op_extra = FromSeconds(op_extra_s);
        s.reads_per_s = reads_per_s;
        s.max_in_flight = max_in_flight;
        s.in_flight = in_flight;
        s.keep = keep;
        s.folder.bytes = folder_bytes;
        s.folder.read_bytes_per_s = folder_read_bytes_per_s;
        s.folder.write_bytes_per_s = folder_write_bytes_per_s;
        s.folder.buffer_bytes = folder_buffer_bytes;
        const NodeProgressFn tick = [&progress](uint64_t done, uint64_t total) {
          nb::gil_scoped_acquire locked;
          if (SignalRaised()) throw nb::python_error();
          if (!progress.is_none()) progress(done, total);
          return true;
        };
        Result<NodeOutcome> result = [&] {
          WaitUnlocked unlocked;
          return SimulateNode(s, tick);
        }();
        const NodeOutcome out = Value(std::move(result));
        nb::list each;
        for (const NodeEpoch& epoch : out.epochs) each.append(EpochDict(epoch));
        nb::dict d;
        d["seconds"] = out.seconds;
        d["epochs"] = each;
        d["kept_bytes"] = out.kept_bytes;
        d["folder_bytes"] = out.folder_bytes;
        d["in_flight_limit"] = out.in_flight_limit;
        return d;
      },
      nb::arg("lengths"), nb::arg("source"), nb::kw_only(), nb::arg("batch"), nb::arg("epochs"),
      nb::arg("arena_bytes"), nb::arg("step_s") = 0.0, nb::arg("sample_step_s") = 0.0,
      nb::arg("seed") = 0, nb::arg("lookups") = 0, nb::arg("opens") = 1,
      nb::arg("read_bytes") = uint64_t{1} << 20, nb::arg("op_extra_s") = 0.0,
      nb::arg("reads_per_s") = 0.0, nb::arg("max_in_flight") = 256, nb::arg("in_flight") = 0,
      nb::arg("keep") = true, nb::arg("folder_bytes") = 0, nb::arg("folder_read_bytes_per_s") = 0.0,
      nb::arg("folder_write_bytes_per_s") = 0.0, nb::arg("folder_buffer_bytes") = 0,
      nb::arg("progress") = nb::none(),
      "One node's epochs in virtual time, under the engine's own scheduler; `source` is settings "
      "as slowfs has them (docs/simulator.md).");
}

}  // namespace

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
              WaitUnlocked unlocked;
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
            if (which == Policy::kForebay) {
              d["plan"] = out.plan == Plan::kByNode   ? "by_node"
                          : out.plan == Plan::kByRank ? "by_rank"
                                                      : "none";
            }
            if (out.planned_epochs > 0) {
              d["planned_epochs"] = out.planned_epochs;
              d["uncovered_share"] = out.uncovered_share;
            }
            return d;
          },
          nb::arg("policy"), nb::arg("progress") = nb::none(),
          "Runs one policy; `progress` is called with (accesses done, accesses in all).");
  m.def(
      "simulate_peers",
      [](Simulation& simulation, const std::vector<std::pair<uint32_t, uint32_t>>& phases,
         bool coordinate, bool locality, nb::object progress) {
        std::vector<PeerPhase> each;
        for (const auto& [nodes, epochs] : phases) each.push_back({nodes, epochs});
        const ProgressFn tick = [&progress](uint64_t done, uint64_t total) {
          nb::gil_scoped_acquire locked;
          if (SignalRaised()) throw nb::python_error();
          if (!progress.is_none()) progress(done, total);
          return true;
        };
        Result<std::vector<PeerEpoch>> result = [&] {
          WaitUnlocked unlocked;
          return SimulatePeers(simulation, each, {coordinate, locality}, tick);
        }();
        nb::list out;
        for (const PeerEpoch& epoch : Value(std::move(result))) {
          nb::dict d;
          d["nodes"] = epoch.nodes;
          d["source_vs_dataset"] = epoch.source_vs_dataset();
          d["local_share"] = epoch.local_share();
          d["source_mb"] = epoch.source_mb;
          d["peer_mb"] = epoch.peer_mb;
          d["hottest_link"] = epoch.hottest_link;
          d["hottest_link_step"] = epoch.hottest_link_step;
          out.append(d);
        }
        return out;
      },
      nb::arg("simulation"), nb::arg("phases"), nb::arg("coordinate") = true,
      nb::arg("locality") = false, nb::arg("progress") = nb::none(),
      "Who reads what from the source and who serves whom: one dict an epoch. `phases`: (nodes, "
      "epochs) of each part of the job; nodes that stay keep what they hold.");
  m.def(
      "sim_policies",
      [] {
        std::vector<std::string> names;
        for (int i = 0; i < kPolicies; ++i) names.emplace_back(PolicyName(static_cast<Policy>(i)));
        return names;
      },
      "The names that Simulation.run takes.");
  BindNode(m);
}

}  // namespace forebay::python
