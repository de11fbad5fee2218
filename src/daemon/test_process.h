// The state of other processes, for tests.
#pragma once

#include <sys/types.h>

#include <filesystem>
#include <fstream>
#include <string>

#include "base/status.h"

namespace forebay::testing {

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
inline constexpr bool kSanitized = true;
#elif defined(__has_feature)
inline constexpr bool kSanitized =
    __has_feature(address_sanitizer) || __has_feature(thread_sanitizer);
#else
inline constexpr bool kSanitized = false;
#endif

// 'Z', 'T', 'S', ... of a process or thread; 0 where there is none.
inline char StateIn(const std::filesystem::path& stat) {
  std::ifstream file(stat);
  std::string line;
  if (!std::getline(file, line)) return 0;
  const size_t name = line.rfind(')');
  return name == std::string::npos || name + 2 >= line.size() ? 0 : line[name + 2];
}

// Or waits only for its parent to notice.
inline bool Ended(pid_t pid) {
  const char state = StateIn(StrCat("/proc/", pid, "/stat"));
  return state == 0 || state == 'Z';
}

// All of its threads: one that was not reached yet may still answer.
inline bool Stopped(pid_t pid) {
  for (const auto& task : std::filesystem::directory_iterator(StrCat("/proc/", pid, "/task"))) {
    if (StateIn(task.path() / "stat") != 'T') return false;
  }
  return true;
}

}  // namespace forebay::testing
