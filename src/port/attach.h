// How a process comes to its user's daemon on this node: the one that runs, or one it starts.
#pragma once

#include <cstdint>
#include <memory>
#include <stop_token>
#include <string>
#include <vector>

#include "base/clock.h"
#include "base/status.h"
#include "port/socket_port.h"
#include "stage/engine.h"
#include "wire/start.h"

namespace forebay {

struct DaemonPlace : wire::ProgramPlace {
  explicit DaemonPlace(const std::string& where);  // empty: wire::RuntimeFolder()
};

struct DaemonOptions {
  std::string folder;   // empty: wire::RuntimeFolder()
  std::string program;  // forebayd
  // Its settings, each "name=value"; those of the first client hold.
  std::vector<std::string> settings;
  Nanos timeout = 20 * kSecond;  // for all of it
  std::stop_token stop = {};     // ends it earlier, within 5 s
};

// An engine's options as a daemon's settings; those that have their defaults are left out.
std::vector<std::string> DaemonSettings(const EngineOptions& options);

// A client with rings, of the daemon that is there or that this call has started. The daemon shares
// nothing with this process: a session of its own, no open descriptor, no LD_PRELOAD, none of the
// launcher's variables that speak of one rank. However many call at once, one is started. What a
// dead daemon left behind is replaced. An error of the daemon's own start is returned as it is.
Result<std::unique_ptr<SocketPort>> AttachDaemon(const DaemonOptions& options);

// Of the daemon that is there, to look on: it does not stay for this client. kUnavailable when
// there is none.
Result<std::unique_ptr<SocketPort>> AttachRunningDaemon(const std::string& folder, Nanos timeout);

// Removes what a daemon that was killed left in the folder. Does nothing while one lives or starts.
void ClearDeadDaemon(const std::string& folder);

}  // namespace forebay
