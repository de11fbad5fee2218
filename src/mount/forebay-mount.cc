// forebay-mount: shows a data folder through FUSE, for programs that nothing can be preloaded into.
//
// `forebay mount` starts it, with the file service that runs for it in the environment. Without
// those variables, or without the service, it shows the source as it is.
#include <fcntl.h>
#include <getopt.h>
#include <linux/fuse.h>
#include <stdarg.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <memory>
#include <sstream>
#include <string>
#include <vector>

#include "base/clock.h"
#include "base/status.h"
#include "files/client.h"
#include "files/key.h"
#include "files/message.h"
#include "files/session.h"
#include "mount/tree.h"

namespace forebay::mount {
namespace {

constexpr int kUsageError = 2;
constexpr unsigned kThreads = 256;  // each serves one request; one waits while a file is copied
constexpr unsigned kReadAheadKb = 1024;
constexpr Nanos kJoin = 10 * kSecond;

constexpr char kHelp[] =
    R"(Usage: forebay-mount [options] SOURCE_DIR MOUNTPOINT

Shows SOURCE_DIR, read-only, at the folder MOUNTPOINT; file contents come from their copies in a
cache folder. Started by 'forebay mount', which also starts the service that makes the copies.
Returns when the mount is ready; unmount with 'forebay unmount MOUNTPOINT'.

  --allow-other       let other users in, with the rights that the files' modes give them
  --foreground        stay in the foreground
  --help              show this text

Environment: FOREBAY_FILES_CACHE, FOREBAY_FILES_SOCKET, FOREBAY_FILES_SOURCES, FOREBAY_FILES_JOB,
of the service.
Exit status: 0 unmounted or in the background, 1 the session failed, 2 wrong usage or no mount.
)";

struct Arguments {
  std::string source;
  std::string mountpoint;
  bool allow_other = false;
  bool foreground = false;
  bool help = false;
};

Result<Arguments> ParseArguments(int argc, char** argv) {
  enum Flag { kAllowOther = 256, kForeground, kHelpFlag };
  const option options[] = {{"allow-other", no_argument, nullptr, kAllowOther},
                            {"foreground", no_argument, nullptr, kForeground},
                            {"help", no_argument, nullptr, kHelpFlag},
                            {}};
  Arguments arguments;
  opterr = 0;
  while (true) {
    const int flag = getopt_long(argc, argv, ":", options, nullptr);
    if (flag == -1) break;
    if (flag == kAllowOther) {
      arguments.allow_other = true;
    } else if (flag == kForeground) {
      arguments.foreground = true;
    } else if (flag == kHelpFlag) {
      arguments.help = true;
      return arguments;
    } else {
      return Status(Code::kInvalidArgument, StrCat("unknown option ", argv[optind - 1],
                                                   "; 'forebay-mount --help' lists the options"));
    }
  }
  if (argc - optind != 2) {
    return Status(Code::kInvalidArgument,
                  "SOURCE_DIR and MOUNTPOINT are needed; see 'forebay-mount --help'");
  }
  arguments.source = argv[optind];
  arguments.mountpoint = argv[optind + 1];
  return arguments;
}

Result<std::string> RealFolder(const std::string& path, const char* what) {
  const std::unique_ptr<char, decltype(&free)> real(realpath(path.c_str(), nullptr), &free);
  struct stat kind = {};
  if (real == nullptr || stat(real.get(), &kind) != 0) {
    if (errno == ENOTCONN) {
      return Status(Code::kUnavailable,
                    StrCat(what, ' ', path, ": a dead mount is left there; remove it with ",
                           "'forebay unmount ", path, "'"));
    }
    return ErrnoStatus(errno, StrCat(what, ' ', path));
  }
  if (!S_ISDIR(kind.st_mode)) {
    return Status(Code::kInvalidArgument, StrCat(what, ' ', path, " is not a folder"));
  }
  return std::string(real.get());
}

// libfuse says on its log why a mount failed; the last line goes into our message.
std::string& FuseLog() {
  static std::string line;
  return line;
}

void KeepFuseLog(enum fuse_log_level, const char* format, va_list arguments) {
  char line[512];
  vsnprintf(line, sizeof line, format, arguments);
  FuseLog() = line;
  while (FuseLog().ends_with('\n')) FuseLog().pop_back();
}

void PrintFuseLog(enum fuse_log_level, const char* format, va_list arguments) {
  vfprintf(stderr, format, arguments);
}

struct DestroySession {
  void operator()(fuse_session* session) const { fuse_session_destroy(session); }
};
using Session = std::unique_ptr<fuse_session, DestroySession>;

Result<Session> MakeSession(const Arguments& arguments, Tree& tree) {
  std::string options = "ro,subtype=forebay,fsname=";
  // A comma in a name would end the option.
  for (const char c : arguments.source) {
    if (c == ',' || c == '\\') options += '\\';
    options += c;
  }
  if (arguments.allow_other) options += ",allow_other,default_permissions";
  std::string words[] = {"forebay-mount", "-o", options};
  std::vector<char*> argv;
  for (std::string& word : words) argv.push_back(word.data());
  fuse_args args = FUSE_ARGS_INIT(static_cast<int>(argv.size()), argv.data());
  Session session(fuse_session_new(&args, &Tree::Operations(), sizeof(fuse_lowlevel_ops), &tree));
  fuse_opt_free_args(&args);
  if (session == nullptr) return Status(Code::kInternal, StrCat("libfuse: ", FuseLog()));
  return session;
}

// Where the kernel's read-ahead of the mount is set; empty where only root may.
std::string& ReadAheadSetting() {
  static std::string path;
  return path;
}

std::string FindReadAheadSetting(const std::string& mountpoint) {
  std::ifstream mounts("/proc/self/mountinfo");
  std::string found;
  for (std::string line; std::getline(mounts, line);) {
    std::istringstream words(line);
    std::string id, parent, device, root, point;
    words >> id >> parent >> device >> root >> point;
    if (point == mountpoint) found = StrCat("/sys/class/bdi/", device, "/read_ahead_kb");
  }
  return access(found.c_str(), W_OK) == 0 ? found : "";
}

ssize_t ReadDevice(int fd, void* buffer, size_t size, void*) { return read(fd, buffer, size); }

ssize_t SpliceToDevice(int from, off_t* from_at, int to, off_t* to_at, size_t size, unsigned flags,
                       void*) {
  return splice(from, from_at, to, to_at, size, flags);
}

// The first answer is that to INIT. Before release 3.17 libfuse does not pass FUSE_PARALLEL_DIROPS
// on to the kernel, which then asks for one new name of a folder at a time; so the flag is set on
// its way out. The kernel takes at most its own 128 KiB of read-ahead from that answer; more can be
// set once it has it.
ssize_t WriteDevice(int fd, iovec* parts, int count, void*) {
  static std::atomic<bool> initialised{false};
  if (initialised.exchange(true)) return writev(fd, parts, count);
  if (count == 2 && parts[1].iov_len == sizeof(fuse_init_out)) {
    static_cast<fuse_init_out*>(parts[1].iov_base)->flags |= FUSE_PARALLEL_DIROPS;
  }
  const ssize_t written = writev(fd, parts, count);
  if (!ReadAheadSetting().empty()) std::ofstream(ReadAheadSetting()) << kReadAheadKb << '\n';
  return written;
}

// The service stays as long as this connection does. Without it, the source is shown as it is.
std::unique_ptr<files::Session> JoinService(const std::string& source,
                                            const files::Client& client) {
  const char* path = getenv(files::kSocketVariable);
  if (path == nullptr) return nullptr;
  Result<std::unique_ptr<files::Session>> session =
      files::Session::Connect(path, kJoin, client.job());
  if (!session || !(*session)->Hello({&source, 1}).ok()) return nullptr;
  return *std::move(session);
}

int Serve(fuse_session* session) {
  fuse_loop_config* config = fuse_loop_cfg_create();
  fuse_loop_cfg_set_max_threads(config, kThreads);
  const int result = fuse_session_loop_mt(session, config);
  fuse_loop_cfg_destroy(config);
  return result < 0 ? -result : 0;  // above 0: the signal that ended it
}

int Main(int argc, char** argv) {
  const auto fail = [](const Status& status) {
    fprintf(stderr, "forebay-mount: %s\n", status.message().c_str());
    return kUsageError;
  };
  Result<Arguments> arguments = ParseArguments(argc, argv);
  if (!arguments) return fail(arguments.error());
  if (arguments->help) {
    fputs(kHelp, stdout);
    return 0;
  }
  const Result<std::string> source = RealFolder(arguments->source, "source folder");
  if (!source) return fail(source.error());
  const Result<std::string> mountpoint = RealFolder(arguments->mountpoint, "mountpoint");
  if (!mountpoint) return fail(mountpoint.error());
  // It would wait for itself.
  if (files::IsBelow(*mountpoint, *source) || files::IsBelow(*source, *mountpoint)) {
    return fail({Code::kInvalidArgument,
                 StrCat("mountpoint ", *mountpoint, " and source ", *source,
                        " lie within each other; name a folder outside of the source")});
  }
  if (access("/dev/fuse", F_OK) != 0) {
    return fail({Code::kUnimplemented,
                 StrCat("/dev/fuse: ", strerror(errno),
                        "; load the kernel module with 'modprobe fuse', or start the container "
                        "with --device /dev/fuse --cap-add SYS_ADMIN")});
  }
  arguments->source = *source;

  static files::Client client;
  client.Start(getenv(files::kCacheVariable), getenv(files::kSocketVariable),
               getenv(files::kSourcesVariable), getenv(files::kJobVariable));
  Tree tree({.source = *source}, client);

  fuse_set_log_func(KeepFuseLog);
  Result<Session> session = MakeSession(*arguments, tree);
  if (!session) return fail(session.error());
  if (fuse_session_mount(session->get(), mountpoint->c_str()) != 0) {
    return fail(
        {Code::kUnavailable,
         StrCat("cannot mount at ", *mountpoint, ": ",
                FuseLog().empty() ? strerror(errno) : FuseLog().c_str(),
                "; mounting needs root, or fusermount3 (package fuse3) with its setuid bit")});
  }
  fuse_set_log_func(PrintFuseLog);
  ReadAheadSetting() = FindReadAheadSetting(*mountpoint);
  const fuse_custom_io device{.writev = WriteDevice,
                              .read = ReadDevice,
                              .splice_receive = nullptr,
                              .splice_send = SpliceToDevice};
  int error = -fuse_session_custom_io(session->get(), &device, fuse_session_fd(session->get()));
  if (error == 0 && (fuse_set_signal_handlers(session->get()) != 0 ||
                     fuse_daemonize(arguments->foreground) != 0)) {
    error = EAGAIN;
  }
  if (error == 0) {
    const std::unique_ptr<files::Session> service = JoinService(*source, client);
    error = Serve(session->get());
  }
  fuse_session_unmount(session->get());
  fuse_remove_signal_handlers(session->get());
  if (error != 0) fprintf(stderr, "forebay-mount: %s: %s\n", mountpoint->c_str(), strerror(error));
  return error == 0 ? 0 : 1;
}

}  // namespace
}  // namespace forebay::mount

int main(int argc, char** argv) { return forebay::mount::Main(argc, argv); }
