// forebayd: one engine for all of a user's training processes on a node.
//
// Started by the first client that needs it (port/attach.cc) and gone some seconds after the last
// has left. Nothing of it outlives it but its policy, and what it said in its log, if it was
// killed.
#include <poll.h>
#include <sys/signalfd.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <memory>
#include <string>
#include <string_view>
#include <system_error>
#include <vector>

#include "base/clock.h"
#include "base/system_memory.h"
#include "control/kept_policy.h"
#include "daemon/control_loop.h"
#include "daemon/page.h"
#include "daemon/server.h"
#include "daemon/web_server.h"
#include "files/engine_supply.h"
#include "files/service.h"
#include "peer/start.h"
#include "port/attach.h"
#include "stage/engine.h"
#include "wire/program.h"

namespace forebay {
namespace {

constexpr std::string_view kUsage =
    "usage: forebayd [--folder=DIR] [--NAME=VALUE ...]\n"
    "\n"
    "Serves one engine to this user's training processes on this node, over a Unix socket in\n"
    "$XDG_RUNTIME_DIR/forebay or /tmp/forebay-UID. Clients start it by themselves.\n"
    "\n"
    "  --memory=BYTES         of everything it holds; default: half of what may be used\n"
    "  --memory_tier=BYTES    the most that stays for later epochs\n"
    "  --cache_dir=DIR        a folder on a local disk for copies\n"
    "  --cache_bytes=BYTES    how much of the disk it may take\n"
    "  --cache_group=GROUP    the folder is shared with this group, whose members are trusted\n"
    "  --in_flight=N          source reads at once; default: found while running\n"
    "  --max_in_flight=N      the most it may find\n"
    "  --copy_threads=N, --keep=0|1, --verify=0|1, --io=auto|threads|io_uring\n"
    "  --linger=SECONDS       it stays without a client; default 5\n"
    "  --metrics_port=PORT    a page for people at http://127.0.0.1:PORT/, and /metrics\n"
    "  --peers=off|auto|LIST  other nodes of the job; default: $FOREBAY_PEERS, or the launcher's\n"
    "                         variables\n"
    "  --etcd=URL[,URL]       of the cluster that shares the source; default: $FOREBAY_ETCD, or "
    "none.\n"
    "                         $FOREBAY_ETCD_CACERT, _CERT, _KEY, _USER, _PASSWORD_FILE go with it\n"
    "  --etcd_prefix=PREFIX   of the cluster's keys; default /forebay/\n"
    "\n"
    "For programs under `forebay run`, `forebay mount`, fsspec and TensorFlow:\n"
    "  --files=DIR            copies of the files that they open lie here; instead of --cache_dir\n"
    "  --source=[NAME=]DIR    a data folder; may be given several times. NAME: what nodes that "
    "have\n"
    "                         it at different paths call it\n"
    "  --ahead_bytes=BYTES    the most that copies made ahead may take, beside --cache_bytes\n"
    "  --reads_in_flight=N    files that are copied at once; default 64\n"
    "  --job=NAME             of those who name none; default: run-PID\n"
    "  --temporary=0|1        the folder goes with the daemon\n";

constexpr int64_t kLongestLinger = 7 * 24 * 3600;
constexpr Nanos kLongestScan = 15 * kSecond;  // who starts the daemon waits for 20
constexpr uint64_t kMemoryForFiles = uint64_t{512} << 20;
// Of the job's name: a loader in the same job has a cluster of its own.
constexpr std::string_view kFilesSuffix = "-files";
constexpr unsigned kLongestEnd = 10;  // seconds, whatever else hangs
// What reads of the source may take when everybody has gone. One that hangs must not keep the
// folder's lock: the next one to come would wait for it.
constexpr Nanos kLongestRead = kSecond;

struct Settings {
  EngineOptions engine;
  wire::ProgramOptions program;
  std::string given;  // for HelloReply::settings
  uint64_t linger = 5;
  ControlLoopOptions control;
  uint64_t metrics_port = 0;
  std::string peers;            // empty: as the environment says
  std::string job;              // of the programs that open files
  files::ServiceOptions files;  // its `store` is empty: programs open no files by this daemon
};

using wire::ParseNumber;

template <typename T>
Status Option(std::string_view name, std::string_view text, uint64_t most, T* out) {
  uint64_t value = 0;
  FOREBAY_RETURN_IF_ERROR(ParseNumber(name, text, most, &value));
  *out = static_cast<T>(value);
  return Status();
}

std::vector<std::string> Split(std::string_view list) {
  std::vector<std::string> out;
  for (size_t at = 0; at < list.size();) {
    const size_t comma = std::min(list.find(',', at), list.size());
    if (comma > at) out.emplace_back(list.substr(at, comma - at));
    at = comma + 1;
  }
  return out;
}

// False: it is none of the options of the file service.
Result<bool> ParseFiles(std::string_view name, std::string_view value, files::ServiceOptions* out) {
  constexpr uint64_t kMostBytes = uint64_t{1} << 62;
  Status parsed;
  if (name == "files") {
    out->store = value;
  } else if (name == "source") {
    out->sources.emplace_back(value);
  } else if (name == "ahead_bytes") {
    parsed = ParseNumber(name, value, kMostBytes, &out->ahead_bytes);
  } else if (name == "reads_in_flight") {
    parsed = ParseNumber(name, value, 1 << 16, &out->reads_in_flight);
  } else if (name == "slots") {
    parsed = ParseNumber(name, value, 1 << 28, &out->slots);
  } else if (name == "partial_bytes") {
    parsed = ParseNumber(name, value, kMostBytes, &out->partial_bytes);
  } else if (name == "temporary") {
    parsed = Option(name, value, 1, &out->temporary);
  } else if (name == "young_ms") {
    parsed = Option(name, value, kLongestLinger * 1000, &out->young);
    out->young *= kMilli;
  } else {
    return false;
  }
  if (!parsed.ok()) return parsed;
  return true;
}

Status ParseOne(std::string_view word, Settings* out) {
  const Result<bool> ours = wire::ParseProgramOption(word, &out->program);
  if (!ours) return ours.error();
  if (*ours) return Status();
  const size_t equals = word.find('=');
  const std::string_view name = word.substr(2, equals - 2);
  const std::string_view value = word.substr(equals + 1);
  constexpr uint64_t kAny = ~uint64_t{0};
  constexpr uint64_t kMostBytes = uint64_t{1} << 62;
  out->given += StrCat(name, "=", value, "\n");
  EngineOptions& engine = out->engine;
  if (name == "memory") return ParseNumber(name, value, kAny, &engine.memory);
  if (name == "memory_tier") return ParseNumber(name, value, kAny, &engine.memory_tier);
  if (name == "cache_bytes") return ParseNumber(name, value, kMostBytes, &engine.cache_bytes);
  if (name == "in_flight") return Option(name, value, 1 << 20, &engine.in_flight);
  if (name == "max_in_flight") return Option(name, value, 1 << 20, &engine.max_in_flight);
  if (name == "copy_threads") return Option(name, value, 1 << 10, &engine.copy_threads);
  if (name == "keep") return Option(name, value, 1, &engine.keep);
  if (name == "verify") return Option(name, value, 1, &engine.verify);
  if (name == "linger") return ParseNumber(name, value, kLongestLinger, &out->linger);
  if (name == "metrics_port") return ParseNumber(name, value, 65535, &out->metrics_port);
  if (name == "etcd") {
    out->control.etcd = Split(value);
    return Status();
  }
  if (name == "etcd_prefix") {
    out->control.prefix = value;
    return Status();
  }
  if (name == "peers") {
    out->peers = value;
    return Status();
  }
  if (name == "job") {
    out->job = value;
    return Status();
  }
  if (name == "cache_dir") {
    engine.cache_folder = value;
    return Status();
  }
  if (name == "cache_group") {
    engine.cache_group = value;
    return Status();
  }
  if (const Result<bool> taken = ParseFiles(name, value, &out->files); !taken || *taken) {
    return taken.status();
  }
  if (name == "io" && (value == "auto" || value == "threads" || value == "io_uring")) {
    if (value == "threads") engine.io = PosixSourceOptions::Io::kThreads;
    if (value == "io_uring") engine.io = PosixSourceOptions::Io::kUring;
    return Status();
  }
  return Status(Code::kInvalidArgument, StrCat("'", word, "' is no option of forebayd"));
}

void Say(std::string_view what) { wire::Say("forebayd", what); }

struct Daemon {
  std::unique_ptr<Warnings> warnings = std::make_unique<Warnings>();
  EnginePtr engine;
  std::unique_ptr<ProgramWatch> programs;
  std::unique_ptr<files::EngineSupply> supply;  // goes before the engine
  std::unique_ptr<files::Service> files;        // goes before its supply
  std::unique_ptr<peer::Peers> peers;           // goes before the engine
  std::unique_ptr<ControlLoop> control;         // goes before the engine
  ServerPtr server;                             // goes before both
  WebServerPtr web;                             // goes before the server
  Knob* linger = nullptr;
};

// Programs read copies, so memory is for what is on its way.
EngineOptions EngineFor(const Settings& settings) {
  EngineOptions out = settings.engine;
  if (settings.files.store.empty()) return out;
  out.cache_folder = settings.files.store;
  if (out.memory == 0) out.memory = std::min(DefaultBudget(), kMemoryForFiles);
  return out;
}

Status StartFiles(const Settings& settings, const wire::ProgramPlace& place, Daemon* daemon) {
  daemon->programs = std::make_unique<ProgramWatch>();
  const std::string job = settings.job.empty() ? StrCat("run-", getpid()) : settings.job;
  daemon->supply =
      std::make_unique<files::EngineSupply>(*daemon->engine, job, daemon->peers == nullptr);
  files::ServiceOptions options = settings.files;
  options.cache = StrCat(options.store, "/run");
  options.socket = place.socket;
  options.supply = daemon->supply.get();
  options.observer = daemon->programs.get();
  options.registry = &daemon->engine->registry();
  options.linger = static_cast<Nanos>(settings.linger) * kSecond;
  options.settings =
      StrCat(settings.given, "cluster=", peer::ClusterName(settings.peers, kFilesSuffix), "\n");
  options.warnings = daemon->warnings.get();
  options.say = [](const std::string& what) { Say(what); };
  // How much it may take is not known before.
  const std::shared_ptr<FolderStore> store = daemon->engine->cache_store();
  if (const std::string hung = daemon->engine->CacheWarning(); store == nullptr && !hung.empty()) {
    return Status(Code::kUnavailable, hung);
  }
  if (store == nullptr || !store->WaitScanned(kLongestScan)) {
    return Status(Code::kUnavailable,
                  StrCat("the cache folder ", options.store, " is not read through within ",
                         kLongestScan / kSecond, " s; name one on another disk with --cache"));
  }
  options.cache_bytes = store->capacity_bytes();
  Result<std::unique_ptr<files::Service>> service = files::Service::Start(options);
  if (!service) return service.error();
  daemon->files = *std::move(service);
  return Status();
}

Status CheckFiles(const Settings& settings) {
  if (!settings.engine.cache_folder.empty()) {
    return Status(Code::kInvalidArgument,
                  "--files and --cache_dir are both a folder for copies: give --files only");
  }
  if (!settings.engine.cache_group.empty()) {
    return Status(Code::kInvalidArgument,
                  "--cache_group needs --cache_dir: the folder of --files is one user's");
  }
  files::ServiceOptions checked = settings.files;
  checked.cache = checked.store;
  return checked.Validate();
}

// With all that lies in it.
void RemoveFolder(const std::string& folder) {
  std::error_code ignored;
  std::filesystem::remove_all(folder, ignored);
}

// The socket for clients of the engine, beside that for programs which open files: in a folder of
// its own, where it has the name that every daemon's has.
std::string EngineSocket(const wire::ProgramPlace& place) {
  // files-0123456789abcdef.sock: no longer than that, since paths of sockets are short.
  constexpr std::string_view kName = "/files-";
  const size_t name = place.socket.rfind(kName) + kName.size();
  return DaemonPlace(StrCat(place.folder, "/run-", place.socket.substr(name, 8))).socket;
}

Result<Daemon> Start(const Settings& settings, const wire::ProgramPlace& place) {
  Daemon daemon;
  Result<EnginePtr> engine = Engine::Create(EngineFor(settings));
  if (!engine) return engine.error();
  daemon.engine = *std::move(engine);
  daemon.linger = &daemon.engine->registry()
                       .AddMechanism("daemon", "this node's forebayd")
                       .AddKnob("daemon_linger_seconds", KnobType::kSeconds, 0, kLongestLinger,
                                static_cast<int64_t>(settings.linger),
                                "how long forebayd stays after its last client has left");
  const auto warn = [list = daemon.warnings.get()](const std::string& warning) {
    if (list->Add(warning)) Say(StrCat("WARNING: ", warning));
  };
  if (const std::string note = daemon.engine->CacheNote(); !note.empty()) Say(note);
  daemon.engine->SetWarn(warn);
  const bool serves_files = !settings.files.store.empty();
  if (const std::string hung = daemon.engine->CacheWarning(); !serves_files && !hung.empty()) {
    warn(hung);
  }
  Result<peer::Started> peers =
      peer::StartPeers(*daemon.engine, settings.peers, serves_files ? kFilesSuffix : "");
  if (!peers) return peers.error();
  if (peers->failed) {
    warn(StrCat("each node reads all of the data for itself: ", peers->note));
  } else if (!peers->note.empty()) {
    Say(peers->note);
  }
  if (!peers->warning.empty()) warn(peers->warning);
  daemon.peers = std::move(peers->peers);
  if (serves_files) FOREBAY_RETURN_IF_ERROR(StartFiles(settings, place, &daemon));
  ServerOptions options;
  if (settings.metrics_port != 0) {
    auto web = WebServer::Listen(static_cast<uint16_t>(settings.metrics_port));
    // Training does not depend on it.
    if (web) {
      daemon.web = *std::move(web);
      options.url = daemon.web->url();
    } else {
      Say(web.error().ToString());
    }
  }
  ControlLoopOptions looped = settings.control;
  looped.say = Say;
  if (looped.etcd.empty() && !settings.files.temporary) {
    // Where the environment names no folder, the policy goes with the daemon.
    const Result<std::string> file = control::KeptPolicyPath(place.socket);
    if (file) looped.policy_file = *file;
  }
  Result<std::unique_ptr<ControlLoop>> control = ControlLoop::Start(*daemon.engine, looped);
  if (!control) return control.error();
  daemon.control = *std::move(control);
  options.set_policy = [loop = daemon.control.get()](const std::string& json) {
    return loop->SetPolicy(json);
  };
  options.policy = [loop = daemon.control.get()] { return loop->policy(); };
  options.control = [loop = daemon.control.get()] { return loop->Describe(); };
  options.socket_path = serves_files ? EngineSocket(place) : place.socket;
  options.programs = daemon.programs.get();
  options.open_datasets = true;
  options.keep_loans = true;
  options.settings = settings.given;
  options.linger = [knob = daemon.linger] { return knob->value() * kSecond; };
  if (serves_files) {
    // The file service has waited for the next one already.
    options.linger = [] { return kSecond / 2; };
    options.occupied = [files = daemon.files.get()] { return files->busy(); };
  }
  Result<ServerPtr> server = Server::Start(*daemon.engine, options);
  if (!server) return server.error();
  daemon.server = *std::move(server);
  if (daemon.web != nullptr) {
    Server* const told = daemon.server.get();
    FOREBAY_RETURN_IF_ERROR(daemon.web->Serve({
        {"/", "text/html; charset=utf-8", [] { return std::string(StatusPage()); }},
        {"/status.json", "application/json", [told] { return told->StatusJson(); }},
        {"/metrics", "text/plain; version=0.0.4; charset=utf-8",
         [told] { return told->MetricsText(); }},
    }));
  }
  return daemon;
}

// Until a signal asks for the end, or nobody has been there for long enough.
void Serve(const Daemon& daemon, const sigset_t& ends) {
  const OwnedFd signals(signalfd(-1, &ends, SFD_CLOEXEC));
  const int files = daemon.files == nullptr ? -1 : daemon.files->ended_fd();
  std::array<pollfd, 3> fds = {pollfd{signals.get(), POLLIN, 0},
                               pollfd{daemon.server->ended_fd(), POLLIN, 0},
                               pollfd{files, POLLIN, 0}};
  while (true) {
    if (poll(fds.data(), fds.size(), -1) <= 0) continue;
    if (fds[0].revents != 0 || fds[1].revents != 0 || daemon.files->folder_gone()) return;
    fds[2].fd = -1;  // nobody opens files; the server ends when it has no client either
  }
}

// Whether no read of the source is under way any more.
bool ReadsEnd(Engine& engine, Nanos wait) {
  const Nanos until = SteadyClock().Now() + wait;
  while (true) {
    uint64_t reads = 0;
    for (const Registry::Sample& sample : engine.registry().Snapshot()) {
      if (sample.name == "forebay_source_in_flight_reads") reads = sample.value;
    }
    if (reads == 0) return true;
    if (SteadyClock().Now() >= until) return false;
    (void)poll(nullptr, 0, 10);
  }
}

// No thread comes back from a source or a disk that hangs, so the process ends without them. What
// is stored is whole at any moment. A folder on a disk that hangs stays.
void EndWithoutReads(const Settings& settings, const wire::ProgramPlace& place, bool disk_answers) {
  Say(StrCat("the ", disk_answers ? "source" : "disk of the cache folder",
             " does not answer: this daemon ends without waiting for it"));
  if (settings.files.temporary && disk_answers) RemoveFolder(settings.files.store);
  unlink(place.socket.c_str());
  unlink(place.lock.c_str());  // last, as every program does
  rmdir(place.folder.c_str());
  (void)kill(getpid(), SIGKILL);
}

// For who must not hang himself, and asks before he opens the folder: standard output ends when the
// folder's disk has answered. Nobody waits for the child if it does not.
int Look(const std::string& folder) {
  if (fork() != 0) return 0;
  FolderStore::Look(folder);
  _exit(0);
}

int Run(int argc, char** argv) {
  constexpr std::string_view kLook = "--look=";
  if (argc == 2 && std::string_view(argv[1]).starts_with(kLook)) {
    return Look(argv[1] + kLook.size());
  }
  ServeAllRanks();
  Settings settings;
  settings.program.name = "forebayd";
  Status parsed;
  for (int i = 1; i < argc && parsed.ok(); ++i) {
    if (std::string_view(argv[i]) == "--help") {
      std::fputs(kUsage.data(), stdout);
      return 0;
    }
    parsed = ParseOne(argv[i], &settings);
  }
  if (const char* etcd = std::getenv("FOREBAY_ETCD"); etcd != nullptr) {
    if (settings.control.etcd.empty()) settings.control.etcd = Split(etcd);
  }
  const bool serves_files = !settings.files.store.empty();
  if (parsed.ok() && serves_files) parsed = CheckFiles(settings);
  const wire::ProgramPlace place =
      serves_files ? files::ServicePlace(settings.program.folder, settings.files.store)
                   : DaemonPlace(settings.program.folder);
  return wire::RunProgram(
      settings.program, place, parsed, [&](const wire::ReadyReport& ready, const sigset_t& ends) {
        Result<Daemon> daemon = Start(settings, place);
        ready(daemon.status());
        if (!daemon) return 1;
        Serve(*daemon, ends);
        daemon->web.reset();
        daemon->server.reset();
        daemon->control.reset();
        (void)alarm(kLongestEnd);
        if (serves_files &&
            (!daemon->files->End(kLongestRead) || !ReadsEnd(*daemon->engine, kLongestRead))) {
          EndWithoutReads(settings, place, daemon->supply->CopiesAnswer());
        }
        daemon->files.reset();
        daemon->supply.reset();
        daemon->peers.reset();
        daemon->engine.reset();
        (void)alarm(0);
        if (serves_files && settings.files.temporary) {
          RemoveFolder(settings.files.store);
        }
        return 0;
      });
}

}  // namespace
}  // namespace forebay

int main(int argc, char** argv) { return forebay::Run(argc, argv); }
