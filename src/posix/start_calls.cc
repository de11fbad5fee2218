// Programs that are started: one without our variables tells of no changes, and one that our
// library does not fit is started without it.
#include <fcntl.h>
#include <spawn.h>
#include <stdlib.h>
#include <unistd.h>

#include <cstring>
#include <string_view>

#include "files/program_file.h"
#include "files/raw_call.h"
#include "posix/calls.h"
#include "posix/libc.h"
#include "posix/memory.h"
#include "posix/place.h"

namespace forebay::posix {
namespace {

using files::Preload;

constexpr std::string_view kPreloadVariable = "LD_PRELOAD=";
constexpr std::string_view kOurName = "libforebay_posix";

// As execvp() finds it; nullptr: it does not.
const char* FindProgram(const char* file, char (&room)[kMostPath]) {
  if (!PathReadable(file) || file[0] == 0) return nullptr;
  if (std::strchr(file, '/') != nullptr) return file;
  const char* at = getenv("PATH");
  if (at == nullptr) at = "/bin:/usr/bin";
  const size_t length = std::strlen(file);
  while (true) {
    const size_t folder = std::strcspn(at, ":");
    if (folder + length + 2 <= sizeof(room)) {
      std::memcpy(room, at, folder);
      room[folder] = '/';
      // An empty folder is the working one.
      char* const name = room + (folder == 0 ? 0 : folder + 1);
      std::memcpy(name, file, length + 1);
      if (files::RawCall(SYS_faccessat, AT_FDCWD, files::RawArgument(room), X_OK) == 0) return room;
    }
    if (at[folder] == 0) return nullptr;
    at += folder + 1;
  }
}

// Variables for a program that is about to be started: those given, or where our library does not
// fit the program, those without it.
class Variables {
 public:
  explicit Variables(char* const* given) : given_(given), used_(given), ours_(Starts(given)) {}
  Variables(const Variables&) = delete;
  Variables& operator=(const Variables&) = delete;

  char* const* For(const char* path) {
    if (ours_ && PathReadable(path)) Leave(files::PreloadInto(path));
    return used_;
  }
  char* const* ForFound(const char* file) {
    char room[kMostPath];
    return ours_ ? For(FindProgram(file, room)) : used_;
  }
  char* const* ForOpen(int fd) {
    if (ours_) Leave(files::PreloadIntoOpen(fd));
    return used_;
  }

 private:
  void Leave(Preload preload) {
    if (preload == Preload::kFits) return;
    size_t count = 0;
    for (char* const* at = given_; *at != nullptr; ++at) {
      char* variable = *at;
      if (std::string_view(variable).starts_with(kPreloadVariable)) {
        if (!Without(variable)) continue;
        variable = preload_;
      }
      if (count + 1 == kMost) return;  // it is started as it was asked for
      room_[count++] = variable;
    }
    room_[count] = nullptr;
    used_ = room_;
    TheClient().StartsPlain();
  }
  // Other libraries that are preloaded; false: there is none, or too many.
  bool Without(const char* variable) {
    size_t length = kPreloadVariable.size();
    std::memcpy(preload_, variable, length);
    const char* at = variable + length;
    while (*at != 0) {
      const size_t bytes = std::strcspn(at, ": ");
      const std::string_view library(at, bytes);
      if (bytes > 0 && library.find(kOurName) == std::string_view::npos) {
        if (length + bytes + 2 > sizeof(preload_)) return false;
        if (length > kPreloadVariable.size()) preload_[length++] = ':';
        std::memcpy(preload_ + length, at, bytes);
        length += bytes;
      }
      at += bytes + (at[bytes] == 0 ? 0 : 1);
    }
    preload_[length] = 0;
    return length > kPreloadVariable.size();
  }

  static constexpr size_t kMost = 1024;
  char* const* given_;
  char* const* used_;
  bool ours_;
  char* room_[kMost];
  char preload_[kMostPath];
};

}  // namespace

int Execute(const char* path, char* const* arguments, char* const* variables) {
  Variables with(variables);
  return libc.execve(path, arguments, with.For(path));
}

int ExecuteFound(const char* file, char* const* arguments, char* const* variables) {
  Variables with(variables);
  return libc.execvpe(file, arguments, with.ForFound(file));
}

int ExecuteOpen(int fd, char* const* arguments, char* const* variables) {
  Variables with(variables);
  return libc.fexecve(fd, arguments, with.ForOpen(fd));
}

int ExecuteHere(const char* path, char* const* arguments) {
  Variables with(environ);
  return libc.execve(path, arguments, with.For(path));
}

int ExecuteFoundHere(const char* file, char* const* arguments) {
  Variables with(environ);
  return libc.execvpe(file, arguments, with.ForFound(file));
}

long ExecuteCall(const long (&a)[6]) {
  Variables with(reinterpret_cast<char* const*>(a[2]));
  char* const* const used = with.For(reinterpret_cast<const char*>(a[0]));
  return libc.syscall(SYS_execve, a[0], a[1], files::RawArgument(used));
}

int Spawn(int* process, const char* path, const void* actions, const void* attributes,
          char* const* arguments, char* const* variables, bool find) {
  Variables with(variables);
  const auto* files = static_cast<const posix_spawn_file_actions_t*>(actions);
  const auto* how = static_cast<const posix_spawnattr_t*>(attributes);
  return find ? libc.posix_spawnp(process, path, files, how, arguments, with.ForFound(path))
              : libc.posix_spawn(process, path, files, how, arguments, with.For(path));
}

}  // namespace forebay::posix
