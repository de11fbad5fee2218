// FileObserver: who is told what programs waited for.
#pragma once

#include <sys/types.h>

#include "base/nanos.h"
#include "metrics/stall.h"

namespace forebay::files {

class FileObserver {
 public:
  virtual ~FileObserver() = default;
  // A program asked for a file, or a part of one, and has its answer. Called by the service's
  // thread: it must not wait.
  virtual void Asked(pid_t pid, StallCause cause, Nanos from, Nanos to) = 0;
};

}  // namespace forebay::files
