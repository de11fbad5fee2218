// ProgramWatch: the programs that open files through this node's engine, and what they waited for.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "base/clock.h"
#include "base/thread_annotations.h"
#include "daemon/stream_watch.h"
#include "files/observer.h"

namespace forebay {

// Safe for concurrent use by multiple threads.
class ProgramWatch final : public files::FileObserver {
 public:
  struct Program {
    pid_t pid = 0;
    std::string name;  // as the kernel has it, and its number
    Nanos asked = 0;   // for the last time
    StreamWatch watch;
  };

  void Asked(pid_t pid, StallCause cause, Nanos from, Nanos to) override EXCLUDES(mutex_);
  // Those that asked lately, by number.
  std::vector<Program> Programs(Nanos now) EXCLUDES(mutex_);

 private:
  static constexpr Nanos kForget = 60 * kSecond;  // who asks for nothing any more
  static constexpr size_t kMost = 4096;

  Mutex mutex_;
  std::map<pid_t, Program> programs_ GUARDED_BY(mutex_);
};

}  // namespace forebay
