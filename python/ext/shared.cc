// Port: the node's daemon while there is one, an engine of this process while there is not, behind
// the same methods as Engine. SharedEngine: a connection to a daemon, to see and to set.
#include <algorithm>
#include <chrono>
#include <map>
#include <memory>
#include <optional>
#include <utility>

#include "common.h"
#include "handles.h"
#include "port/attach.h"
#include "port/job_name.h"
#include "wire/message.h"

namespace forebay::python {
namespace {

std::string Ask(const SharedHandle& self, uint8_t what) {
  return Value(Unlocked([&] { return self.port->Query(what); }));
}

std::map<std::string, uint64_t> Metrics(const Registry& registry) {
  std::map<std::string, uint64_t> out;
  for (const Registry::Sample& s : registry.Snapshot()) out[s.name] = s.value;
  return out;
}

void OpenPort(PortHandle* self, const EngineOptions& engine, const std::string& program,
              const std::string& folder, std::vector<std::string> settings, const std::string& job,
              double timeout_s, const std::vector<double>& retry_s) {
  auto changes = std::make_shared<Changes>();
  FailoverOptions options;
  options.daemon.program = program;
  options.daemon.folder = folder;
  options.daemon.settings = std::move(settings);
  options.daemon.timeout = static_cast<Nanos>(timeout_s * kSecond);
  options.engine = engine;
  options.job = job;
  options.retry.clear();
  for (const double wait : retry_s) options.retry.push_back(static_cast<Nanos>(wait * kSecond));
  options.tell = [changes](FailoverEvent event, const std::string& what) {
    changes->Add({event == FailoverEvent::kAlone, what});
  };
  FailoverPortPtr port = Value(Unlocked([&] { return FailoverPort::Open(std::move(options)); }));
  new (self) PortHandle(std::shared_ptr<FailoverPort>(std::move(port)), std::move(changes));
}

nb::object DaemonOf(const PortHandle& self) {
  std::shared_ptr<SocketPort> daemon = self.port->daemon();
  return daemon == nullptr ? nb::none() : nb::cast(SharedHandle(std::move(daemon)));
}

nb::object EngineOf(const PortHandle& self) {
  std::shared_ptr<Engine> engine = Unlocked([&] { return self.port->engine(); });
  return engine == nullptr ? nb::none() : nb::cast(EngineHandle(std::move(engine)));
}

void BindPort(nb::module_& m) {
  nb::class_<LooksHandle>(m, "RankLooks",
                          "One opening's way to the other ranks of its job on this node.");
  nb::class_<Changes>(m, "Changes", "What a Port has to say.")
      .def(
          "first",
          [](const Changes& c) -> nb::object {
            Changes::Change first;
            if (!c.First(&first)) return nb::none();
            return nb::make_tuple(first.alone, FileText(first.what));
          },
          "(whether this process goes on without the daemon, why or with whom), or None. It stays "
          "until it is dropped.")
      .def("drop_first", &Changes::DropFirst)
      .def(
          "wait", [](Changes& c) { return Unlocked([&] { return c.Wait(); }); },
          "Until there is one; False: there never will be.")
      .def_prop_ro("any", &Changes::any);

  nb::class_<PortHandle> port(m, "Port",
                              "The node's daemon while there is one, an engine of this process "
                              "while there is not; see forebay.SharedEngine.");
  BindStreams(port);
  port.def("__init__", &OpenPort, nb::arg("engine"), nb::arg("program"), nb::arg("folder"),
           nb::arg("settings"), nb::arg("job"), nb::arg("timeout_s"), nb::arg("retry_s"),
           "`settings` ('name=value') are those of a daemon that is started, `engine` those of the "
           "engine of this process; `retry_s`: waits before the tries to come back.")
      .def(
          "add_dataset",
          [](const PortHandle& p, const CatalogHandle& c, const std::string& delay) {
            return Value(Unlocked([&] { return p.port->OpenDataset(c.catalog, delay); }));
          },
          nb::arg("catalog"), nb::arg("delay") = "")
      .def(
          "close_dataset",
          [](const PortHandle& p, DatasetId dataset) {
            Raise(Unlocked([&] {
              p.port->CloseDataset(dataset);
              return Status();
            }));
          },
          nb::arg("dataset"))
      .def(
          "open_shared_stream",
          [](const PortHandle& p, const StreamOptions& options) {
            return Value(Unlocked([&] { return p.port->OpenSharedStream(options); }));
          },
          nb::arg("options"), "One that other processes fetch from, too, under its address.")
      .def(
          "adopt_stream",
          [](const PortHandle& p, const StreamOptions& options,
             std::pair<uint32_t, StreamId> address) {
            const StreamAddress of{address.first, address.second};
            return Value(Unlocked([&] { return p.port->AdoptStream(options, of); }));
          },
          nb::arg("options"), nb::arg("address"),
          "One that another process has opened; one of this process takes its place when it has "
          "gone.")
      .def(
          "address",
          [](const PortHandle& p, StreamId stream) {
            const StreamAddress found = Value(Unlocked([&] { return p.port->Address(stream); }));
            return std::pair<uint32_t, StreamId>(found.daemon, found.stream);
          },
          nb::arg("stream"),
          "(the daemon's process, or 0 for the engine of this process; its number there). Notices "
          "a daemon that has ended.")
      .def(
          "describe",
          [](const PortHandle& p) { return Value(Unlocked([&] { return p.port->Describe(); })); },
          "The daemon, its data sets, clients, knobs and metrics, as JSON; empty: there is none.")
      .def(
          "set_decode_threads",
          [](const PortHandle& p, int64_t threads) {
            Raise(p.port->registry().SetKnob("decode_threads", threads));
          },
          nb::arg("threads"), "Threads that decode in this process; 0: as many as are needed.")
      .def(
          "decoding", [](const PortHandle& p) { return Metrics(p.port->registry()); },
          "Metrics of this process's decoding.")
      .def(
          "own_metrics", [](const PortHandle& p) { return Metrics(p.port->own_metrics()); },
          "Metrics of the way to the engine.")
      .def(
          "empty_rings",
          [](const PortHandle& p, StreamId stream) { return p.port->EmptyRings(stream); },
          nb::arg("stream"), "How often a take found no batch ready.")
      .def(
          "come_back",
          [](const PortHandle& p) { return Unlocked([&] { return p.port->ComeBack(); }); },
          "Looks for a daemon at once; whether there is one now.")
      .def(
          "rank_looks",
          [](const PortHandle& p, const std::string& job, uint32_t rank, uint32_t ranks,
             std::optional<double> wrote_ago_s) -> nb::object {
            std::shared_ptr<SocketPort> daemon = p.port->daemon();
            if (daemon == nullptr) return nb::none();
            RankOfJob who{.job = CleanJobName(job), .rank = rank, .ranks = ranks, .wrote_at = -1};
            if (wrote_ago_s) {
              const auto ago = static_cast<Nanos>(*wrote_ago_s * kSecond);
              who.wrote_at = std::max<Nanos>(SteadyClock().Now() - ago, 0);
            }
            return nb::cast(
                LooksHandle{std::make_shared<RankLooks>(std::move(daemon), std::move(who))});
          },
          nb::arg("job"), nb::arg("rank"), nb::arg("ranks"), nb::arg("wrote_ago_s") = nb::none(),
          "For one opening of one data set; None while there is no daemon.")
      .def(
          "looks_over",
          [](const PortHandle& p) {
            Raise(Unlocked([&] {
              if (const std::shared_ptr<SocketPort> daemon = p.port->daemon()) daemon->DropLook(0);
              return Status();
            }));
          },
          "Before this process writes to a data set: other ranks look again when they open it.")
      .def_prop_ro(
          "returning", [](const PortHandle& p) { return p.port->returning(); },
          "Whether tries to come back to a daemon are still to come.")
      .def_prop_ro("daemon", &DaemonOf, "The connection; None without a daemon.")
      .def_prop_ro("engine", &EngineOf, "The engine of this process; None with a daemon.")
      .def_prop_ro("changes", [](const PortHandle& p) { return p.changes; });
}

}  // namespace

void Changes::Add(Change change) {
  MutexLock lock(mutex_);
  changes_.push_back(std::move(change));
  count_.store(changes_.size(), std::memory_order_relaxed);
  changed_.notify_all();
}

bool Changes::First(Change* out) const {
  MutexLock lock(mutex_);
  if (changes_.empty()) return false;
  *out = changes_.front();
  return true;
}

void Changes::DropFirst() {
  MutexLock lock(mutex_);
  if (!changes_.empty()) changes_.pop_front();
  count_.store(changes_.size(), std::memory_order_relaxed);
}

bool Changes::Wait() {
  MutexLock lock(mutex_);
  while (changes_.empty() && !closed_) changed_.wait_for(lock.native(), std::chrono::seconds(1));
  return !changes_.empty();
}

void Changes::Close() {
  MutexLock lock(mutex_);
  closed_ = true;
  changed_.notify_all();
}

PortHandle::PortHandle(std::shared_ptr<FailoverPort> made, std::shared_ptr<Changes> said)
    : port(std::move(made)), changes(std::move(said)) {}

PortHandle::~PortHandle() {
  WaitUnlocked unlocked;  // a daemon may be being started
  port->StopReturning();
  if (port->forked()) return;  // the locks may be held for ever
  changes->Close();
  port.reset();
}

void BindShared(nb::module_& m) {
  nb::class_<SharedHandle>(m, "SharedEngine", "A connection to forebayd; see forebay.SharedEngine.")
      .def_static(
          "attach_running",
          [](const std::string& folder, double timeout_s) {
            auto made = Value(Unlocked([&] {
              return AttachRunningDaemon(folder, static_cast<Nanos>(timeout_s * kSecond));
            }));
            return SharedHandle(std::shared_ptr<SocketPort>(std::move(made)));
          },
          nb::arg("folder"), nb::arg("timeout_s") = 5.0, "Raises when none runs.")
      .def_static("clear_dead", &ClearDeadDaemon, nb::arg("folder"),
                  "Removes what a killed daemon left behind.")
      .def_static("default_folder", [] { return DaemonPlace("").folder; })
      .def_static("job_name", &JobName, "The job that this process belongs to.")
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
      .def_prop_ro("settings", [](const SharedHandle& e) { return FileText(e.port->settings()); })
      .def_prop_ro("pid", [](const SharedHandle& e) { return e.port->server_pid(); })
      .def_prop_ro("budget", [](const SharedHandle& e) { return e.port->budget(); })
      .def_prop_ro("arena_bytes", [](const SharedHandle& e) { return e.port->arena_bytes(); })
      .def_prop_ro("connected", [](const SharedHandle& e) { return e.port->connected(); });
  BindPort(m);
}

}  // namespace forebay::python
