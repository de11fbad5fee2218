// The lock file is the program's life: whoever starts one takes the lock and hands the open file
// over by exec, so the lock is free exactly when nobody runs or starts one, also after a kill. A
// lock counts only while its file is the one that the name leads to: a program that ends removes
// the file before it lets go.
#include "wire/start.h"

#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <spawn.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <mutex>
#include <string_view>
#include <thread>
#include <utility>

#include "wire/socket.h"

extern char** environ;

namespace forebay::wire {
namespace {

constexpr Nanos kAttachOnce = 5 * kSecond;
constexpr Nanos kLookAgain = 10 * kMilli;
constexpr Nanos kStopSeen = 100 * kMilli;
// Where the daemon finds what it is handed.
constexpr int kLockFd = 3;
constexpr int kReadyFd = 4;
constexpr int kAbove = 10;  // descriptors are moved out of the way of those
constexpr size_t kLongestReport = size_t{16} << 10;

// A preloaded library is the program's.
constexpr std::string_view kNotForDaemon = "LD_PRELOAD=";

// What is open only while a daemon is started. A child that another thread forks meanwhile has
// copies: it would keep the lock when the daemon has died, and its starter waiting for the pipe's
// end. It closes them first of all.
class NotForChildren {
 public:
  static NotForChildren& Get() {
    static NotForChildren* const all = new NotForChildren;  // forks may come after main
    return *all;
  }
  // `open` returns a descriptor.
  template <typename Open>
  int Add(Open open) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const int fd = open();
    if (fd >= 0) {
      const auto room = std::find(fds_.begin(), fds_.end(), -1);
      if (room != fds_.end()) *room = fd;
    }
    return fd;
  }
  void Close(int fd) {
    const std::lock_guard<std::mutex> lock(mutex_);
    std::replace(fds_.begin(), fds_.end(), fd, -1);
    close(fd);
  }

 private:
  NotForChildren() {
    fds_.fill(-1);
    pthread_atfork([] { Get().mutex_.lock(); }, [] { Get().mutex_.unlock(); },
                   [] {
                     for (int& fd : Get().fds_) {
                       if (fd >= 0) close(fd);
                       fd = -1;
                     }
                     Get().mutex_.unlock();
                   });
  }
  std::mutex mutex_;
  std::array<int, 32> fds_;
};

class PrivateFd {
 public:
  PrivateFd() = default;
  // `open` returns a descriptor.
  template <typename Open>
  explicit PrivateFd(Open open) : fd_(NotForChildren::Get().Add(open)) {}
  PrivateFd(PrivateFd&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  PrivateFd& operator=(PrivateFd&& other) noexcept {
    std::swap(fd_, other.fd_);
    return *this;
  }
  ~PrivateFd() {
    if (fd_ >= 0) NotForChildren::Get().Close(fd_);
  }
  // The same, at a number that is out of the way of those that the daemon gets.
  PrivateFd Copy() const {
    return PrivateFd([this] { return fcntl(fd_, F_DUPFD_CLOEXEC, kAbove); });
  }

  int get() const { return fd_; }
  bool valid() const { return fd_ >= 0; }

 private:
  int fd_ = -1;
};

// Whatever this machine lacks for a daemon, callers can do without one.
Status NoDaemon(const Status& status) {
  if (status.code() != Code::kResourceExhausted) return status;
  return Status(Code::kUnavailable, status.message());
}

// The lock, or an invalid one while somebody has it.
Result<PrivateFd> TakeLock(const ProgramPlace& place) {
  PrivateFd lock(
      [&] { return open(place.lock.c_str(), O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0600); });
  if (!lock.valid()) {
    if (errno == ENOENT) return PrivateFd();  // the folder has just been removed
    return ErrnoStatus(errno, StrCat("opening ", place.lock));
  }
  if (flock(lock.get(), LOCK_EX | LOCK_NB) != 0) return PrivateFd();
  struct stat ours = {};
  struct stat named = {};
  const bool same = fstat(lock.get(), &ours) == 0 && stat(place.lock.c_str(), &named) == 0 &&
                    ours.st_ino == named.st_ino && ours.st_dev == named.st_dev;
  if (!same) return PrivateFd();
  return lock;
}

Status Stopped() { return Status(Code::kCancelled, "nobody waits for it any more"); }

// What the daemon says of its start: a byte, its code, and the message.
Status AwaitReady(const StartOptions& options, int pipe, Nanos deadline) {
  const std::string& name = options.name;
  std::string report;
  std::array<char, 1024> room;
  while (report.size() < kLongestReport) {
    const Nanos left = deadline - SteadyClock().Now();
    if (left <= 0) return Status(Code::kUnavailable, StrCat(name, " did not start in time"));
    if (options.stop.stop_requested()) return Stopped();
    pollfd fd = {pipe, POLLIN, 0};
    const int ready = poll(&fd, 1, static_cast<int>(std::min(left, kStopSeen) / kMilli) + 1);
    if (ready <= 0) continue;
    const ssize_t n = read(pipe, room.data(), room.size());
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) break;
    report.append(room.data(), static_cast<size_t>(n));
  }
  if (report.empty()) return Status(Code::kUnavailable, StrCat(name, " ended before it was ready"));
  const auto code = static_cast<uint8_t>(report[0]);
  if (code > static_cast<uint8_t>(Code::kInternal)) {
    return Status(Code::kUnavailable, StrCat("what was started is no ", name));
  }
  return Status(static_cast<Code>(code), report.substr(1));
}

// The process that was started forks the program and ends at once, if it is one of ours. Somebody
// else's wait() may have reaped it.
void Reap(pid_t child) {
  constexpr Nanos kBound = kSecond;
  Nanos until = SteadyClock().Now() + kBound;
  bool killed = false;
  int status = 0;
  while (true) {
    const pid_t got = waitpid(child, &status, WNOHANG);
    if (got == child || (got < 0 && errno != EINTR)) return;
    if (SteadyClock().Now() > until) {
      if (killed) return;  // nothing more can be done about one that hangs in the kernel
      kill(child, SIGKILL);
      killed = true;
      until = SteadyClock().Now() + kBound;
    }
    std::this_thread::sleep_for(std::chrono::nanoseconds(kMilli));
  }
}

Status Spawn(const StartOptions& options, const ProgramPlace& place, const PrivateFd& lock,
             Nanos deadline) {
  std::array<int, 2> ends = {-1, -1};
  PrivateFd to([&] { return pipe2(ends.data(), O_CLOEXEC) == 0 ? ends[1] : -1; });
  if (!to.valid()) return ErrnoStatus(errno, "making a pipe");
  const OwnedFd from(ends[0]);
  PrivateFd high_lock = lock.Copy();
  PrivateFd high_to = to.Copy();
  if (!high_lock.valid() || !high_to.valid()) return ErrnoStatus(errno, "copying a descriptor");
  to = PrivateFd();

  std::vector<std::string> words = {options.name, "--detach", StrCat("--lock-fd=", kLockFd),
                                    StrCat("--ready-fd=", kReadyFd),
                                    StrCat("--folder=", place.folder)};
  for (const std::string& setting : options.settings) words.push_back(StrCat("--", setting));
  std::vector<char*> argv;
  for (std::string& word : words) argv.push_back(word.data());
  argv.push_back(nullptr);
  std::vector<char*> variables;
  for (char** variable = environ; *variable != nullptr; ++variable) {
    if (!std::string_view(*variable).starts_with(kNotForDaemon)) variables.push_back(*variable);
  }
  variables.push_back(nullptr);

  posix_spawn_file_actions_t files;
  posix_spawnattr_t attributes;
  posix_spawn_file_actions_init(&files);
  posix_spawnattr_init(&attributes);
  posix_spawn_file_actions_addopen(&files, STDIN_FILENO, "/dev/null", O_RDONLY, 0);
  posix_spawn_file_actions_addopen(&files, STDOUT_FILENO, "/dev/null", O_WRONLY, 0);
  posix_spawn_file_actions_addopen(&files, STDERR_FILENO, place.log.c_str(),
                                   O_WRONLY | O_CREAT | O_TRUNC | O_APPEND | O_NOFOLLOW, 0600);
  posix_spawn_file_actions_adddup2(&files, high_lock.get(), kLockFd);
  posix_spawn_file_actions_adddup2(&files, high_to.get(), kReadyFd);
  posix_spawn_file_actions_addclosefrom_np(&files, kReadyFd + 1);
  sigset_t none;
  sigset_t all;
  sigemptyset(&none);
  sigfillset(&all);
  posix_spawnattr_setsigmask(&attributes, &none);
  posix_spawnattr_setsigdefault(&attributes, &all);
  posix_spawnattr_setflags(&attributes,
                           POSIX_SPAWN_SETSID | POSIX_SPAWN_SETSIGMASK | POSIX_SPAWN_SETSIGDEF);
  pid_t child = -1;
  const int error = posix_spawn(&child, options.program.c_str(), &files, &attributes, argv.data(),
                                variables.data());
  posix_spawn_file_actions_destroy(&files);
  posix_spawnattr_destroy(&attributes);
  high_to = PrivateFd();
  high_lock = PrivateFd();
  if (error != 0) {
    return Status(Code::kUnavailable,
                  ErrnoStatus(error, StrCat("starting ", options.program)).message());
  }
  const Status ready = AwaitReady(options, from.get(), deadline);
  Reap(child);
  return ready;
}

}  // namespace

ProgramPlace::ProgramPlace(const std::string& where, const std::string& name)
    : folder(where.empty() ? RuntimeFolder() : where),
      socket(StrCat(folder, "/", name, ".sock")),
      lock(StrCat(folder, "/", name, ".lock")),
      log(StrCat(folder, "/", name, ".log")) {}

Status AttachOrStart(const ProgramPlace& place, const StartOptions& options, const Attach& attach) {
  const Nanos deadline = SteadyClock().Now() + options.timeout;
  while (true) {
    const Nanos left = deadline - SteadyClock().Now();
    const Status attached = attach(std::clamp(left, kMilli, kAttachOnce));
    if (attached.ok() || attached.code() != Code::kUnavailable || left <= 0) return attached;
    if (options.stop.stop_requested()) return Stopped();
    bool made = false;
    const Status there = PrivateFolder(place.folder, &made);
    if (there.code() == Code::kNotFound && access(place.folder.c_str(), F_OK) != 0 &&
        left > kLookAgain) {
      // Another program has just removed it as the last to leave; or its parent is not there.
      std::this_thread::sleep_for(std::chrono::nanoseconds(kLookAgain));
      const size_t slash = place.folder.rfind('/');
      if (slash == 0 || slash == std::string::npos ||
          access(place.folder.substr(0, slash).c_str(), F_OK) == 0) {
        continue;
      }
    }
    FOREBAY_RETURN_IF_ERROR(NoDaemon(there));
    Result<PrivateFd> lock = TakeLock(place);
    if (!lock) return NoDaemon(lock.error());
    if (lock->valid()) {
      // It may have come up, and this process may have been slow, since the look above.
      if (attach(std::clamp(left, kMilli, kAttachOnce)).ok()) return Status();
      const Status started = Spawn(options, place, *lock, deadline);
      if (!started.ok()) {
        *lock = PrivateFd();
        ClearDead(place, attach);
        return started;
      }
    } else {
      std::this_thread::sleep_for(std::chrono::nanoseconds(kLookAgain));
    }
  }
}

void ClearDead(const ProgramPlace& place, const Attach& attach) {
  constexpr Nanos kBound = kSecond / 2;
  const Nanos deadline = SteadyClock().Now() + kBound;
  PrivateFd held;
  // A process that dies closes its socket a moment before its lock.
  while (!held.valid() && access(place.lock.c_str(), F_OK) == 0) {
    Result<PrivateFd> lock = TakeLock(place);
    if (!lock) return;
    held = *std::move(lock);
    if (held.valid()) break;
    if (SteadyClock().Now() > deadline || attach(kBound).ok()) return;
    std::this_thread::sleep_for(std::chrono::nanoseconds(kLookAgain));
  }
  if (!held.valid()) return;
  unlink(place.socket.c_str());
  // What it said before it died stays, for who looks for the reason.
  struct stat st = {};
  if (stat(place.log.c_str(), &st) == 0 && st.st_size == 0) unlink(place.log.c_str());
  unlink(place.lock.c_str());
  rmdir(place.folder.c_str());  // fails, rightly, while there is anything in it
}

}  // namespace forebay::wire
