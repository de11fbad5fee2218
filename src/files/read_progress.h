// What the kernel counts of a process that reads files by itself, without the file service.
#pragma once

#include <sys/types.h>

#include <cstdint>

namespace forebay::files {

struct ReadProgress {
  uint64_t mark = 0;   // another one whenever something was read; 0: who read is gone
  uint64_t bytes = 0;  // of files that are in the memory of the readers
};

// Of the process, and those that it has forked, in mappings: pages that it had not touched before.
ReadProgress MappingProgress(pid_t process);
// Of a descriptor of the process: the place in the file that it has come to.
ReadProgress DescriptorProgress(pid_t process, int64_t fd);

}  // namespace forebay::files
