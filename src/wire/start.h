// How a process comes to a program of its user on this node: the one that runs, or one it starts.
#pragma once

#include <functional>
#include <stop_token>
#include <string>
#include <vector>

#include "base/clock.h"
#include "base/status.h"

namespace forebay::wire {

// Where a program and its clients meet. The folder has mode 0700.
struct ProgramPlace {
  // NAME.sock, NAME.lock and NAME.log; an empty folder: RuntimeFolder().
  ProgramPlace(const std::string& where, const std::string& name);
  std::string folder;
  std::string socket;
  std::string lock;  // held by the program for its life, and by who starts it before that
  std::string log;
};

struct StartOptions {
  std::string program;                // its path
  std::string name;                   // for messages
  std::vector<std::string> settings;  // each "name=value"; those of the first client hold
  Nanos timeout = 20 * kSecond;       // for all of it
  std::stop_token stop = {};          // ends it earlier, with kCancelled
};

// Connects to the program; kUnavailable when it does not run.
using Attach = std::function<Status(Nanos timeout)>;

// Attaches to the program that is there or that this call has started. The program shares nothing
// with this process: a session of its own, no open descriptor, no LD_PRELOAD. However many call at
// once, one is started. What a dead one left behind is replaced. An error of the program's own
// start is returned as it is.
Status AttachOrStart(const ProgramPlace& place, const StartOptions& options, const Attach& attach);

// Removes what a program that was killed left in the folder. Does nothing while one lives or
// starts.
void ClearDead(const ProgramPlace& place, const Attach& attach);

}  // namespace forebay::wire
