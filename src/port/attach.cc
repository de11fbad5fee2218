#include "port/attach.h"

#include <utility>

namespace forebay {

DaemonPlace::DaemonPlace(const std::string& where) : wire::ProgramPlace(where, "forebayd") {}

std::vector<std::string> DaemonSettings(const EngineOptions& options) {
  const EngineOptions defaults;
  std::vector<std::string> out;
  const auto number = [&](const char* name, uint64_t value, uint64_t usual) {
    if (value != usual) out.push_back(StrCat(name, "=", value));
  };
  number("memory", options.memory, defaults.memory);
  number("in_flight", options.in_flight, defaults.in_flight);
  number("max_in_flight", options.max_in_flight, defaults.max_in_flight);
  if (options.io == PosixSourceOptions::Io::kThreads) out.emplace_back("io=threads");
  if (options.io == PosixSourceOptions::Io::kUring) out.emplace_back("io=io_uring");
  number("copy_threads", options.copy_threads, defaults.copy_threads);
  number("keep", options.keep ? 1 : 0, defaults.keep ? 1 : 0);
  number("memory_tier", options.memory_tier, defaults.memory_tier);
  number("verify", options.verify ? 1 : 0, defaults.verify ? 1 : 0);
  if (!options.cache_folder.empty()) out.push_back(StrCat("cache_dir=", options.cache_folder));
  number("cache_bytes", options.cache_bytes, defaults.cache_bytes);
  if (!options.cache_group.empty()) out.push_back(StrCat("cache_group=", options.cache_group));
  return out;
}

Result<std::unique_ptr<SocketPort>> AttachRunningDaemon(const std::string& folder, Nanos timeout) {
  return SocketPort::Attach(DaemonPlace(folder).socket, timeout, true, true);
}

Result<std::unique_ptr<SocketPort>> AttachDaemon(const DaemonOptions& options) {
  const DaemonPlace place(options.folder);
  const wire::StartOptions start{.program = options.program,
                                 .name = "forebayd",
                                 .settings = options.settings,
                                 .timeout = options.timeout,
                                 .stop = options.stop};
  std::unique_ptr<SocketPort> client;
  FOREBAY_RETURN_IF_ERROR(wire::AttachOrStart(place, start, [&](Nanos timeout) {
    Result<std::unique_ptr<SocketPort>> made = SocketPort::Attach(place.socket, timeout, true);
    if (made) client = *std::move(made);
    return made ? Status() : made.error();
  }));
  return client;
}

void ClearDeadDaemon(const std::string& folder) {
  const DaemonPlace place(folder);
  wire::ClearDead(
      place, [&](Nanos timeout) { return SocketPort::Attach(place.socket, timeout).status(); });
}

}  // namespace forebay
