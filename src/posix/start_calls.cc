// Programs that are started: one without our variables tells of no changes.
#include <spawn.h>
#include <unistd.h>

#include "posix/calls.h"
#include "posix/libc.h"
#include "posix/place.h"

namespace forebay::posix {

int Execute(const char* path, char* const* arguments, char* const* variables) {
  Starts(variables);
  return libc.execve(path, arguments, variables);
}

int ExecuteFound(const char* file, char* const* arguments, char* const* variables) {
  Starts(variables);
  return libc.execvpe(file, arguments, variables);
}

int ExecuteOpen(int fd, char* const* arguments, char* const* variables) {
  Starts(variables);
  return libc.fexecve(fd, arguments, variables);
}

int ExecuteHere(const char* path, char* const* arguments) {
  Starts(environ);
  return libc.execv(path, arguments);
}

int ExecuteFoundHere(const char* file, char* const* arguments) {
  Starts(environ);
  return libc.execvp(file, arguments);
}

int Spawn(int* process, const char* path, const void* actions, const void* attributes,
          char* const* arguments, char* const* variables, bool find) {
  Starts(variables);
  const auto* files = static_cast<const posix_spawn_file_actions_t*>(actions);
  const auto* how = static_cast<const posix_spawnattr_t*>(attributes);
  return find ? libc.posix_spawnp(process, path, files, how, arguments, variables)
              : libc.posix_spawn(process, path, files, how, arguments, variables);
}

}  // namespace forebay::posix
