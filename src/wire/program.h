// What a program that its clients start (wire/start.h) does around its work.
#pragma once

#include <csignal>
#include <cstdint>
#include <functional>
#include <string>
#include <string_view>

#include "base/owned.h"
#include "base/status.h"
#include "wire/start.h"

namespace forebay::wire {

struct ProgramOptions {
  std::string name;
  std::string folder;
  uint64_t lock_fd = 0;
  uint64_t ready_fd = 0;
  bool detach = false;
};

// Takes the words that AttachOrStart gives to every program; false: this is another one.
Result<bool> ParseProgramOption(std::string_view word, ProgramOptions* out);
// The value of --name=text.
Status ParseNumber(std::string_view name, std::string_view text, uint64_t most, uint64_t* out);

// A line in the log.
void Say(std::string_view name, std::string_view what);

// `serve` starts the work, tells `ready` how that went, and returns when a signal of `ends` has
// come (they are blocked) or there is no more work. It returns what main() does.
using ReadyReport = std::function<void(const Status& status)>;
using ServeProgram = std::function<int(const ReadyReport& ready, const sigset_t& ends)>;
// Detaches, holds the lock while it serves, and removes lock and log when it is done. An error of
// `parsed` is reported to who started it.
int RunProgram(const ProgramOptions& options, const ProgramPlace& place, const Status& parsed,
               const ServeProgram& serve);

}  // namespace forebay::wire
