#include "daemon/program_watch.h"

#include <fstream>

#include "base/status.h"

namespace forebay {
namespace {

std::string NameOf(pid_t pid) {
  std::string name;
  std::getline(std::ifstream(StrCat("/proc/", pid, "/comm")), name);
  return StrCat(name.empty() ? "program" : name, " ", pid);
}

}  // namespace

void ProgramWatch::Asked(pid_t pid, StallCause cause, Nanos from, Nanos to) {
  const MutexLock lock(mutex_);
  auto found = programs_.find(pid);
  if (found == programs_.end()) {
    if (programs_.size() >= kMost) return;
    found = programs_.emplace(pid, Program{pid, NameOf(pid), to, StreamWatch(0, from)}).first;
  }
  Program& program = found->second;
  program.asked = to;
  program.watch.Fetched(0, 1, 0);
  program.watch.Waited(cause, from, to);
}

std::vector<ProgramWatch::Program> ProgramWatch::Programs(Nanos now) {
  const MutexLock lock(mutex_);
  std::erase_if(programs_, [&](const auto& each) { return now - each.second.asked > kForget; });
  std::vector<Program> out;
  out.reserve(programs_.size());
  for (const auto& [pid, program] : programs_) out.push_back(program);
  return out;
}

}  // namespace forebay
