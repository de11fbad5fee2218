// Hands signals that reach this process on to one child of it.
#pragma once

#include <sys/types.h>

#include <csignal>
#include <span>
#include <utility>
#include <vector>

namespace forebay {

// One at a time in a process. Handlers do it, not a waiting thread with the signals blocked: the
// kernel gives a signal to any thread that does not block it, libraries start threads of their own,
// and there the signal would end the process while the child lived on.
//
// Signals from the kernel, such as Ctrl-C at a terminal, are swallowed: the child is in the same
// group and has had them. Only the end of a terminal is told to its session's leader alone.
class SignalForwarding {
 public:
  // From here on the signals are kept; those that are ignored stay so until SendTo(), as a child
  // inherits that.
  explicit SignalForwarding(std::span<const int> signals);
  // As it was before; what came after Stop() is lost.
  ~SignalForwarding();
  SignalForwarding(const SignalForwarding&) = delete;
  SignalForwarding& operator=(const SignalForwarding&) = delete;

  // What has been kept goes to the child at once, what comes later as it comes.
  void SendTo(pid_t child);
  // Before the child is reaped: its number may be another process's after that. Signals are
  // swallowed from here on.
  void Stop();

 private:
  void Take(int number);

  std::vector<int> ignored_;
  std::vector<std::pair<int, struct sigaction>> before_;
};

}  // namespace forebay
