// SharedEngine: a daemon's engine behind the same methods as Engine, so that loaders see no
// difference.
#include <map>
#include <memory>
#include <mutex>
#include <utility>

#include "common.h"
#include "handles.h"
#include "port/attach.h"
#include "port/job_name.h"
#include "wire/message.h"

namespace forebay::python {
namespace {

SharedHandle Attached(Result<std::unique_ptr<SocketPort>> made) {
  return SharedHandle(std::shared_ptr<SocketPort>(Value(std::move(made))));
}

template <typename Call>
auto Unlocked(Call call) {
  WaitUnlocked unlocked;
  return call();
}

std::string Ask(const SharedHandle& self, uint8_t what, StreamId stream = 0) {
  return Value(Unlocked([&] { return self.port->Query(what, stream); }));
}

DatasetId AddDataset(SharedHandle& self, const CatalogHandle& c, const std::string& delay) {
  return Value(Unlocked([&] { return self.port->OpenDataset(c.catalog, delay); }));
}

nb::object BatchOf(const SharedHandle& self, BatchLoan loan) {
  std::shared_ptr<const Catalog> catalog = self.port->Find(loan.dataset);
  if (catalog == nullptr) {
    (void)self.port->Release(loan.lease);
    Raise(Status(Code::kInternal, "a batch of a data set that this process did not open"));
  }
  return MakeBatch(self.port, std::move(catalog), std::move(loan));
}

nb::object Take(const SharedHandle& self, StreamId stream, double wait_s, nb::handle held) {
  BatchLoan loan;
  return TakeInSlices(
      wait_s, held, [&](Nanos slice) { return self.port->Take(stream, slice, &loan); },
      [&] { return BatchOf(self, std::move(loan)); });
}

}  // namespace

void BindShared(nb::module_& m) {
  nb::class_<SharedHandle>(m, "SharedEngine", "An engine in forebayd; see forebay.SharedEngine.")
      .def_static(
          "attach",
          [](const std::string& program, const std::string& folder,
             std::vector<std::string> settings, double timeout_s) {
            DaemonOptions options;
            options.program = program;
            options.folder = folder;
            options.settings = std::move(settings);
            options.timeout = static_cast<Nanos>(timeout_s * kSecond);
            return Attached(Unlocked([&] { return AttachDaemon(options); }));
          },
          nb::arg("program"), nb::arg("folder"), nb::arg("settings"), nb::arg("timeout_s") = 20.0,
          "The daemon that runs, or one that is started with these settings ('name=value').")
      .def_static(
          "attach_running",
          [](const std::string& folder, double timeout_s) {
            return Attached(Unlocked([&] {
              return AttachRunningDaemon(folder, static_cast<Nanos>(timeout_s * kSecond));
            }));
          },
          nb::arg("folder"), nb::arg("timeout_s") = 5.0, "Raises when none runs.")
      .def_static("clear_dead", &ClearDeadDaemon, nb::arg("folder"),
                  "Removes what a killed daemon left behind.")
      .def_static("default_folder", [] { return DaemonPlace("").folder; })
      .def("add_dataset", &AddDataset, nb::arg("catalog"), nb::arg("delay") = "")
      .def(
          "open_stream",
          [](const SharedHandle& e, DatasetId dataset, uint32_t batch_size, bool drop_last,
             bool contiguous, bool itemised, bool declared, uint32_t size, bool shuffle,
             uint64_t seed, uint32_t rank, uint32_t world, bool sampler_drop_last, uint64_t epochs,
             uint64_t first_epoch, uint64_t first_position, uint32_t exchange,
             uint32_t ranks_per_node, const std::string& job) {
            StreamOptions options;
            options.shape = {dataset,  batch_size,  drop_last,      contiguous,
                             itemised, first_epoch, first_position, epochs};
            options.declared = declared;
            options.shape.job = job;
            options.sampler = {size,  shuffle,           seed,     rank,
                               world, sampler_drop_last, exchange, ranks_per_node};
            return Value(Unlocked([&] { return e.port->OpenStream(options); }));
          },
          nb::arg("dataset"), nb::arg("batch_size"), nb::arg("drop_last") = false,
          nb::arg("contiguous") = false, nb::arg("itemised") = false, nb::arg("declared") = false,
          nb::arg("size") = 0, nb::arg("shuffle") = true, nb::arg("seed") = 0, nb::arg("rank") = 0,
          nb::arg("world") = 1, nb::arg("sampler_drop_last") = false, nb::arg("epochs") = 0,
          nb::arg("first_epoch") = 0, nb::arg("first_position") = 0, nb::arg("exchange") = 0,
          nb::arg("ranks_per_node") = 1, nb::arg("job") = "")
      .def(
          "declare",
          [](const SharedHandle& e, StreamId s, uint64_t epoch,
             nb::ndarray<const uint32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu> order,
             bool last) {
            std::vector<SampleId> samples(order.data(), order.data() + order.size());
            Raise(Unlocked([&] { return e.port->Declare(s, epoch, std::move(samples), last); }));
          },
          nb::arg("stream"), nb::arg("epoch"), nb::arg("order"), nb::arg("last") = false)
      .def(
          "fetch",
          [](const SharedHandle& e, StreamId stream, SampleId sample, double wait_s) -> nb::object {
            BatchLoan loan;
            const TakeKind taken = Value(Unlocked([&] {
              return e.port->Fetch(stream, sample, static_cast<Nanos>(wait_s * kSecond), &loan);
            }));
            if (taken != TakeKind::kBatch) return nb::none();
            return BatchOf(e, std::move(loan));
          },
          nb::arg("stream"), nb::arg("sample"), nb::arg("wait_s"),
          "One sample as a Batch, or None.")
      .def("close_stream",
           [](const SharedHandle& e, StreamId s) {
             Raise(Unlocked([&] { return e.port->CloseStream(s); }));
           })
      .def(
          "seek",
          [](const SharedHandle& e, StreamId s, uint64_t epoch, uint64_t position) {
            Raise(Unlocked([&] { return e.port->Seek(s, epoch, position); }));
          },
          nb::arg("stream"), nb::arg("epoch"), nb::arg("position"))
      .def("take", &Take, nb::arg("stream"), nb::arg("wait_s"), nb::arg("held") = nb::none(),
           "A Batch; None when `wait_s` seconds passed; or 'end of epoch' or 'end of stream'. "
           "It is also in `held.item`.")
      .def(
          "stats",
          [](const SharedHandle& e, StreamId s) {
            nb::list out;
            for (const EpochStats& epoch : Value(Unlocked([&] { return e.port->Stats(s); }))) {
              out.append(StatsOf(epoch));
            }
            return out;
          },
          nb::arg("stream"))
      .def(
          "empty_rings", [](const SharedHandle& e, StreamId s) { return e.port->EmptyRings(s); },
          nb::arg("stream"), "How often a take found no batch ready.")
      .def(
          "stalled",
          [](const SharedHandle& e, StreamId s, size_t cause, double seconds) {
            e.port->CountStall(s, CauseAt(cause), static_cast<Nanos>(seconds * kSecond));
          },
          nb::arg("stream"), nb::arg("cause"), nb::arg("seconds"),
          "A consumer behind the stream's workers waited; `cause` is a place in STALL_CAUSES.")
      .def("waiting_for", [](const SharedHandle& e,
                             StreamId s) { return FileText(Ask(e, wire::Query::kWaitingFor, s)); })
      .def(
          "describe", [](const SharedHandle& e) { return Ask(e, wire::Query::kDescribe); },
          "The daemon, its data sets, clients, knobs and metrics, as JSON.")
      .def("prometheus", [](const SharedHandle& e) { return Ask(e, wire::Query::kPrometheus); })
      .def(
          "set_knobs",
          [](const SharedHandle& e, std::vector<std::string> names, std::vector<int64_t> values) {
            Raise(Unlocked([&] { return e.port->SetKnobs(std::move(names), std::move(values)); }));
          },
          nb::arg("names"), nb::arg("values"), "All of them, or none.")
      .def(
          "policy", [](const SharedHandle& e) { return Ask(e, wire::Query::kPolicy); },
          "The node's policy as JSON; empty when none is in force.")
      .def(
          "set_policy",
          [](const SharedHandle& e, std::string json) {
            Raise(Unlocked([&] { return e.port->SetPolicy(std::move(json)); }));
          },
          nb::arg("json"), "Empty: none.")
      .def_static("job_name", &JobName, "The job that this process belongs to.")
      .def(
          "set_decode_threads",
          [](const SharedHandle& e, int64_t threads) {
            const std::vector<KnobSetting> settings = {{"decode_threads", threads}};
            Raise(e.port->registry().Apply(settings));
          },
          nb::arg("threads"), "Threads that decode in this process; 0: as many as are needed.")
      .def(
          "decoding",
          [](const SharedHandle& e) {
            std::map<std::string, uint64_t> out;
            for (const Registry::Sample& s : e.port->registry().Snapshot()) out[s.name] = s.value;
            return out;
          },
          "Metrics of this process's decoding.")
      .def_prop_ro("settings", [](const SharedHandle& e) { return FileText(e.port->settings()); })
      .def_prop_ro("pid", [](const SharedHandle& e) { return e.port->server_pid(); })
      .def_prop_ro("budget", [](const SharedHandle& e) { return e.port->budget(); })
      .def_prop_ro("arena_bytes", [](const SharedHandle& e) { return e.port->arena_bytes(); })
      .def_prop_ro("connected", [](const SharedHandle& e) { return e.port->connected(); });
}

}  // namespace forebay::python
