// What the kernel counts of a process that reads files by itself.
#pragma once

#include <sys/types.h>

#include <cstdint>

namespace forebay::files {

// A number that is another one whenever the process, or one that it has forked, has touched pages
// of files through mappings that it had not touched before. 0: it is gone, or cannot be seen.
uint64_t MappingProgress(pid_t process);
// The same for the place in the file that a descriptor of the process has come to. 0: it is closed.
uint64_t DescriptorProgress(pid_t process, int64_t fd);

}  // namespace forebay::files
