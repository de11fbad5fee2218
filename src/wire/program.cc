#include "wire/program.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <charconv>
#include <cstdio>

#include "wire/socket.h"

namespace forebay::wire {
namespace {

// Tells who started us how it went, or standard error.
void Report(std::string_view name, OwnedFd& ready, const Status& status) {
  if (ready.valid()) {
    std::string report(1, static_cast<char>(status.code()));
    report += status.message();
    (void)!write(ready.get(), report.data(), report.size());
    ready.Reset();
  } else if (!status.ok()) {
    Say(name, status.ToString());
  }
}

// The lock that a client handed over, or one of our own.
Result<OwnedFd> Lock(const ProgramOptions& options, const ProgramPlace& place) {
  if (options.lock_fd != 0) {
    (void)fcntl(static_cast<int>(options.lock_fd), F_SETFD, FD_CLOEXEC);
    return OwnedFd(static_cast<int>(options.lock_fd));
  }
  bool made = false;
  FOREBAY_RETURN_IF_ERROR(PrivateFolder(place.folder, &made));
  OwnedFd lock(open(place.lock.c_str(), O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0600));
  if (!lock.valid()) return ErrnoStatus(errno, StrCat("opening ", place.lock));
  struct stat ours = {};
  struct stat named = {};
  // One that ends removes the file before it lets go of it.
  if (flock(lock.get(), LOCK_EX | LOCK_NB) != 0 || fstat(lock.get(), &ours) != 0 ||
      stat(place.lock.c_str(), &named) != 0 || ours.st_ino != named.st_ino) {
    return Status(Code::kUnavailable, StrCat("another ", options.name, " runs in ", place.folder));
  }
  return lock;
}

// A shell's usual limit would be a few hundred clients.
void RaiseDescriptorLimit() {
  rlimit limit = {};
  if (getrlimit(RLIMIT_NOFILE, &limit) != 0 || limit.rlim_cur == limit.rlim_max) return;
  limit.rlim_cur = limit.rlim_max;
  (void)setrlimit(RLIMIT_NOFILE, &limit);
}

}  // namespace

Status ParseNumber(std::string_view name, std::string_view text, uint64_t most, uint64_t* out) {
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), *out);
  if (error != std::errc() || end != text.data() + text.size() || *out > most) {
    return Status(Code::kInvalidArgument,
                  StrCat("--", name, "=", text, ": it takes a number from 0 to ", most));
  }
  return Status();
}

Result<bool> ParseProgramOption(std::string_view word, ProgramOptions* out) {
  constexpr uint64_t kFds = 1 << 20;
  if (word == "--detach") {
    out->detach = true;
    return true;
  }
  const size_t equals = word.find('=');
  if (!word.starts_with("--") || equals == std::string_view::npos) {
    return Status(Code::kInvalidArgument, StrCat("'", word, "' is no option of ", out->name));
  }
  const std::string_view name = word.substr(2, equals - 2);
  const std::string_view value = word.substr(equals + 1);
  if (name == "folder") {
    out->folder = value;
    return true;
  }
  if (name != "lock-fd" && name != "ready-fd") return false;
  FOREBAY_RETURN_IF_ERROR(
      ParseNumber(name, value, kFds, name == "lock-fd" ? &out->lock_fd : &out->ready_fd));
  return true;
}

void Say(std::string_view name, std::string_view what) {
  std::fprintf(stderr, "%.*s %d: %.*s\n", static_cast<int>(name.size()), name.data(),
               static_cast<int>(getpid()), static_cast<int>(what.size()), what.data());
}

int RunProgram(const ProgramOptions& options, const ProgramPlace& place, const Status& parsed,
               const ServeProgram& serve) {
  // Before any thread is there. The starter waits for this process only.
  if (options.detach) {
    const pid_t child = fork();
    if (child < 0) return 1;
    if (child > 0) return 0;
  }
  OwnedFd ready;
  if (options.ready_fd != 0) {
    ready = OwnedFd(static_cast<int>(options.ready_fd));
    (void)fcntl(ready.get(), F_SETFD, FD_CLOEXEC);
  }
  if (!parsed.ok()) {
    Report(options.name, ready, parsed);
    return 2;
  }
  umask(077);
  (void)!chdir("/");  // keeps no mount busy
  sigset_t ends;
  sigemptyset(&ends);
  for (const int number : {SIGTERM, SIGINT, SIGHUP}) sigaddset(&ends, number);
  sigprocmask(SIG_BLOCK, &ends, nullptr);
  (void)std::signal(SIGPIPE, SIG_IGN);
  RaiseDescriptorLimit();

  const Result<OwnedFd> lock = Lock(options, place);
  if (!lock) {
    Report(options.name, ready, lock.error());
    return 1;
  }
  const int code = serve([&](const Status& status) { Report(options.name, ready, status); }, ends);
  unlink(place.log.c_str());
  // Last, while the lock is held: who finds no file makes a new one.
  unlink(place.lock.c_str());
  rmdir(place.folder.c_str());
  return code;
}

}  // namespace forebay::wire
