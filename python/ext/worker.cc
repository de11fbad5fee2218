// A server beside the engine, and the client that a worker process attaches to it.
#include "base/clock.h"
#include "common.h"
#include "daemon/page.h"
#include "daemon/server.h"
#include "daemon/web_server.h"
#include "handles.h"
#include "port/socket_port.h"

namespace forebay::python {
namespace {

// Keeps the engine alive for as long as it serves.
struct ServerHandle {
  EngineHandle engine;
  ServerPtr server;
};

struct WebHandle {
  EngineHandle engine;
  WebServerPtr web;
};

// The sample's bytes, copied out of the arena; None when they were not there in time.
nb::object Fetch(SocketPort& client, StreamId stream, SampleId sample, double wait_s) {
  BatchLoan loan;
  Result<TakeKind> taken = [&] {
    WaitUnlocked unlocked;
    return client.Fetch(stream, sample, static_cast<Nanos>(wait_s * kSecond), &loan);
  }();
  if (Value(std::move(taken)) != TakeKind::kBatch) return nb::none();
  const auto* from = reinterpret_cast<const char*>(client.base() + loan.offsets[0]);
  nb::bytes copy(from, loan.lengths[0]);
  (void)client.Release(loan.lease);  // a lost connection shows at the next fetch
  return copy;
}

}  // namespace

void BindWorker(nb::module_& m) {
  nb::class_<ServerHandle>(m, "Server", "Lends an engine to worker processes over a Unix socket.")
      .def(
          "__init__",
          [](ServerHandle* self, const EngineHandle& engine) {
            ServerPtr server = Value(Server::Start(*engine.engine, ServerOptions()));
            new (self) ServerHandle{engine, std::move(server)};
          },
          nb::arg("engine"))
      .def_prop_ro("path",
                   [](const ServerHandle& s) {
                     if (s.server == nullptr) {
                       Raise(Status(Code::kCancelled, "this engine serves no worker any more"));
                     }
                     return s.server->socket_path();
                   })
      .def(
          "close",
          [](ServerHandle& s) {
            WaitUnlocked unlocked;
            s.server.reset();
          },
          "Disconnects the workers and removes the socket.");

  m.def(
      "status_page",
      [] {
        const std::string_view page = StatusPage();
        return nb::bytes(page.data(), page.size());
      },
      "The daemon's web page, as HTML.");
  nb::class_<WebHandle>(m, "MetricsPort", "GET /metrics of an engine on 127.0.0.1.")
      .def(
          "__init__",
          [](WebHandle* self, const EngineHandle& engine, uint16_t port) {
            WebServerPtr web = Value(WebServer::Listen(port));
            Raise(web->Serve({{"/metrics", "text/plain; version=0.0.4; charset=utf-8",
                               [registry = &engine.engine->registry()]() -> Result<std::string> {
                                 return registry->PrometheusText();
                               }}}));
            new (self) WebHandle{engine, std::move(web)};
          },
          nb::arg("engine"), nb::arg("port"))
      .def_prop_ro("url", [](const WebHandle& w) { return w.web->url(); });

  nb::class_<SocketPort>(m, "WorkerClient", "An engine in another process.")
      .def_static(
          "attach",
          [](const std::string& path, double timeout_s) {
            Result<std::unique_ptr<SocketPort>> made = [&] {
              WaitUnlocked unlocked;
              return SocketPort::Attach(path, static_cast<Nanos>(timeout_s * kSecond));
            }();
            return Value(std::move(made));
          },
          nb::arg("path"), nb::arg("timeout_s") = 5.0)
      .def("fetch", &Fetch, nb::arg("stream"), nb::arg("sample"), nb::arg("wait_s"),
           "The sample's bytes, or None when they were not there in time.")
      .def(
          "served",
          [](SocketPort& c, uint64_t reads, uint64_t passes) { Raise(c.Served(reads, passes)); },
          nb::arg("reads"), nb::arg("passes"),
          "Adds to the engine's counts of this worker's reads.")
      .def_prop_ro(
          "waits",
          [](const SocketPort& c) {
            const auto waits = c.FetchWaits();
            return std::vector<int64_t>(waits.begin(), waits.end());
          },
          "Nanoseconds that fetch() has waited in the engine so far, in the order of STALL_CAUSES.")
      .def_prop_ro("connected", &SocketPort::connected);
  m.attr("STALL_CAUSES") =
      std::vector<std::string>(kStallCauseNames.begin(), kStallCauseNames.end());
}

}  // namespace forebay::python
