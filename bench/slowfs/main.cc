// slowfs: shows a folder through a mount that is as slow as a busy shared file system.
#include <dirent.h>
#include <fcntl.h>
#include <getopt.h>
#include <linux/fuse.h>
#include <malloc.h>
#include <sched.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <charconv>
#include <cstdlib>
#include <memory>
#include <string>
#include <vector>

#include "slowfs/file_system.h"

namespace forebay::slowfs {
namespace {

constexpr int kUsageError = 2;

constexpr char kHelp[] =
    R"(Usage: slowfs [options] SOURCE_DIR MOUNTPOINT

Shows SOURCE_DIR, read-only unless said otherwise, at the empty folder MOUNTPOINT, as slow as a busy shared file system.
Returns when the mount is ready; unmount with 'fusermount3 -u MOUNTPOINT'.

Latency of each operation, in milliseconds (default 0):
  --open-ms MS        open a file
  --stat-ms MS        look up a name, get attributes
  --readdir-ms MS     get one piece of a folder's listing
  --read-ms MS        read from a file (at most 1 MiB each)
  --jitter F          vary latencies by up to this fraction, 0 to 1 (default 0)
  --tail-prob P       share of operations that is slow, 0 to 1 (default 0)
  --tail-mult X       how many times longer a slow one takes (default 10)

Limits that all readers share (default 0: none):
  --bandwidth MB      megabytes (10^6 bytes) a second; reads in flight overlap their latency
  --ops N             operations a second

Faults:
  --eio-rate P        share of opens and reads that fails with EIO, 0 to 1 (default 0)
  --stall MS          answer nothing that is asked in the first MS milliseconds; 'forever': until
                      stall_ms is changed (see below)

Others:
  --writable MB       let programs change SOURCE_DIR, as a slow local disk would: what they write
                      takes a pipe of its own of so many megabytes a second (0: no limit); names are
                      changed without delay
  --seed N            for jitter, tail and EIO (default 1)
  --cache             let the kernel cache data, attributes and names, as NFS and Lustre clients do;
                      without it every access costs again
  --allow-other       let other users in (needs user_allow_other in /etc/fuse.conf unless root)
  --threads N         threads that serve (default 1, which takes the least processor time and gives
                      about 10,000 files a second); waiting requests take none
  --no-realtime       run at normal priority, though root: less processor time, later answers
  --foreground        stay in the foreground
  --help              show this text

Control files, not listed and never delayed:
  MOUNTPOINT/.slowfs/stats      counters and processor time, as JSON
  MOUNTPOINT/.slowfs/settings   read: the settings; write 'read_ms=5' lines: change them at once
  MOUNTPOINT/.slowfs/reset      write anything: counters start again from 0

Exit status: 0 unmounted or in the background, 1 the session failed, 2 wrong usage or no mount.
)";

struct SettingFlag {
  const char* flag;
  const char* key;
};
constexpr SettingFlag kSettingFlags[] = {
    {"open-ms", "open_ms"},     {"stat-ms", "stat_ms"},        {"readdir-ms", "readdir_ms"},
    {"read-ms", "read_ms"},     {"jitter", "jitter"},          {"tail-prob", "tail_prob"},
    {"tail-mult", "tail_mult"}, {"bandwidth", "bandwidth_mb"}, {"ops", "ops"},
    {"eio-rate", "eio_rate"},   {"stall", "stall_ms"},         {"seed", "seed"},
};

struct Arguments {
  FileSystem::Options file_system;
  std::string mountpoint;
  unsigned threads = 1;
  bool allow_other = false;
  bool realtime = true;
  bool foreground = false;
  bool help = false;
};

Status Usage(std::string message) {
  return {Code::kInvalidArgument, message + "; 'slowfs --help' lists the options"};
}

Result<Arguments> ParseArguments(int argc, char** argv) {
  enum Flag {
    kSetting = 256,
    kCache,
    kAllowOther,
    kThreads,
    kWritable,
    kNoRealtime,
    kForeground,
    kHelpFlag
  };
  std::vector<option> options;
  for (const SettingFlag& setting : kSettingFlags) {
    options.push_back({setting.flag, required_argument, nullptr, kSetting});
  }
  options.push_back({"cache", no_argument, nullptr, kCache});
  options.push_back({"allow-other", no_argument, nullptr, kAllowOther});
  options.push_back({"threads", required_argument, nullptr, kThreads});
  options.push_back({"writable", required_argument, nullptr, kWritable});
  options.push_back({"no-realtime", no_argument, nullptr, kNoRealtime});
  options.push_back({"foreground", no_argument, nullptr, kForeground});
  options.push_back({"help", no_argument, nullptr, kHelpFlag});
  options.push_back({});

  Arguments arguments;
  std::string settings;
  opterr = 0;
  while (true) {
    int index = 0;
    const int flag = getopt_long(argc, argv, ":", options.data(), &index);
    if (flag == -1) break;
    switch (flag) {
      case kSetting:
        settings += StrCat(kSettingFlags[index].key, "=", optarg, "\n");
        break;
      case kCache:
        arguments.file_system.cache = true;
        break;
      case kAllowOther:
        arguments.allow_other = true;
        break;
      case kThreads: {
        const char* end = optarg + strlen(optarg);
        const auto parsed = std::from_chars(optarg, end, arguments.threads);
        if (parsed.ec != std::errc() || parsed.ptr != end || arguments.threads < 1 ||
            arguments.threads > 1024) {
          return Usage(StrCat("--threads must lie in [1, 1024], not '", optarg, "'"));
        }
        break;
      }
      case kWritable: {
        double megabytes = 0;
        const char* end = optarg + strlen(optarg);
        const auto parsed = std::from_chars(optarg, end, megabytes);
        if (parsed.ec != std::errc() || parsed.ptr != end || !(megabytes >= 0)) {
          return Usage(StrCat("--writable needs megabytes a second, not '", optarg, "'"));
        }
        arguments.file_system.writable = true;
        arguments.file_system.write_bytes_per_s = megabytes * 1e6;
        break;
      }
      case kNoRealtime:
        arguments.realtime = false;
        break;
      case kForeground:
        arguments.foreground = true;
        break;
      case kHelpFlag:
        arguments.help = true;
        return arguments;
      case ':':
        return Usage(StrCat(argv[optind - 1], " needs a value"));
      default:
        return Usage(StrCat("unknown option ", argv[optind - 1]));
    }
  }
  if (argc - optind != 2) return Usage("SOURCE_DIR and MOUNTPOINT are needed");
  const Result<StorageSettings> parsed = StorageSettings::Parse(settings);
  if (!parsed) return Usage(parsed.error().message());
  arguments.file_system.settings = *parsed;
  arguments.file_system.source = argv[optind];
  arguments.mountpoint = argv[optind + 1];
  return arguments;
}

Result<std::string> RealPath(const std::string& path) {
  const std::unique_ptr<char, decltype(&free)> real(realpath(path.c_str(), nullptr), &free);
  if (real == nullptr) return ErrnoStatus(errno, path);
  return std::string(real.get());
}

Result<std::string> CheckSource(const std::string& path) {
  const Result<std::string> real = RealPath(path);
  if (!real) {
    return Status(real.error().code(), StrCat("source folder ", path, ": ", strerror(errno),
                                              "; name an existing folder"));
  }
  struct stat attr {};
  if (stat(real->c_str(), &attr) == 0 && !S_ISDIR(attr.st_mode)) {
    return Status(Code::kInvalidArgument,
                  StrCat("source ", path, " is not a folder; name the folder to show"));
  }
  return *real;
}

// The mountpoint's real path, if a file system can be mounted there.
Result<std::string> CheckMountpoint(const std::string& path, const std::string& source) {
  const auto refuse = [&](const auto&... parts) {
    return Status(Code::kInvalidArgument, StrCat("mountpoint ", path, parts...));
  };
  struct stat attr {};
  if (stat(path.c_str(), &attr) != 0) {
    if (errno == ENOTCONN) {
      return refuse(": a dead mount is left there; remove it with 'fusermount3 -u ", path, "'");
    }
    if (errno == ENOENT) return refuse(" does not exist; make it with 'mkdir -p ", path, "'");
    return refuse(": ", strerror(errno));
  }
  if (!S_ISDIR(attr.st_mode)) return refuse(" is not a folder; name an empty folder");
  const Result<std::string> real = RealPath(path);
  if (!real) return real.error();

  struct stat parent {};
  if (stat(StrCat(*real, "/..").c_str(), &parent) == 0 && parent.st_dev != attr.st_dev) {
    return refuse(" is already mounted; unmount it with 'fusermount3 -u ", path,
                  "' or name another folder");
  }
  // slowfs would wait for itself.
  if (*real == source || real->starts_with(source + "/") || source == "/") {
    return refuse(" lies in the source folder ", source, "; name a folder outside of it");
  }
  DIR* dir = opendir(real->c_str());
  if (dir == nullptr) return refuse(": ", strerror(errno));
  size_t entries = 0;
  while (readdir(dir) != nullptr) ++entries;
  closedir(dir);
  if (entries > 2) return refuse(" is not empty; name an empty folder");
  return *real;
}

Status CheckFuse() {
  OwnedFd device(open("/dev/fuse", O_RDWR | O_CLOEXEC));
  if (device.valid()) return {};
  if (errno == ENOENT || errno == ENODEV || errno == ENXIO) {
    return {Code::kUnimplemented,
            StrCat("/dev/fuse: ", strerror(errno),
                   "; load the kernel module with 'modprobe fuse', or start the container with "
                   "--device /dev/fuse --cap-add SYS_ADMIN")};
  }
  return {Code::kPermissionDenied,
          StrCat("/dev/fuse: ", strerror(errno),
                 "; run as root, or have an administrator run 'chmod 666 /dev/fuse'; a container "
                 "needs --device /dev/fuse --cap-add SYS_ADMIN")};
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

Result<Session> MakeSession(const Arguments& arguments, FileSystem& file_system) {
  std::string mount_options = "fsname=slowfs,subtype=slowfs";
  if (arguments.allow_other) mount_options += ",allow_other";
  std::string words[] = {"slowfs", "-o", mount_options};
  std::vector<char*> argv;
  for (std::string& word : words) argv.push_back(word.data());
  fuse_args args = FUSE_ARGS_INIT(static_cast<int>(argv.size()), argv.data());
  Session session(
      fuse_session_new(&args, &FileSystem::Operations(), sizeof(fuse_lowlevel_ops), &file_system));
  fuse_opt_free_args(&args);
  if (session == nullptr) return Status(Code::kInternal, StrCat("libfuse: ", FuseLog()));
  return session;
}

ssize_t ReadDevice(int fd, void* buffer, size_t size, void*) { return read(fd, buffer, size); }

// Before release 3.17 libfuse does not pass FUSE_PARALLEL_DIROPS on to the kernel (libfuse pull
// request 861), which then asks for one new name of a folder at a time. So the flag is set on its
// way out, in the answer to INIT, which is always the first.
ssize_t WriteDevice(int fd, iovec* parts, int count, void*) {
  static std::atomic<bool> initialised{false};
  if (!initialised.load(std::memory_order_relaxed)) {
    initialised.store(true, std::memory_order_relaxed);
    if (count == 2 && parts[1].iov_len == sizeof(fuse_init_out)) {
      static_cast<fuse_init_out*>(parts[1].iov_base)->flags |= FUSE_PARALLEL_DIROPS;
    }
  }
  return writev(fd, parts, count);
}

int Main(int argc, char** argv) {
  const auto fail = [](const Status& status) {
    fprintf(stderr, "slowfs: %s\n", status.message().c_str());
    return kUsageError;
  };
  Result<Arguments> arguments = ParseArguments(argc, argv);
  if (!arguments) return fail(arguments.error());
  if (arguments->help) {
    fputs(kHelp, stdout);
    return 0;
  }
  const Result<std::string> source = CheckSource(arguments->file_system.source);
  if (!source) return fail(source.error());
  const Result<std::string> mountpoint = CheckMountpoint(arguments->mountpoint, *source);
  if (!mountpoint) return fail(mountpoint.error());
  if (const Status usable = CheckFuse(); !usable.ok()) return fail(usable);

  // Answers of up to 1 MiB come and go; memory that went back to the kernel each time would have to
  // be zeroed again.
  mallopt(M_MMAP_THRESHOLD, 64 << 20);
  mallopt(M_TRIM_THRESHOLD, 1 << 30);

  Result<std::unique_ptr<FileSystem>> file_system = FileSystem::Open(arguments->file_system);
  if (!file_system) return fail(file_system.error());
  fuse_set_log_func(KeepFuseLog);
  Result<Session> session = MakeSession(*arguments, **file_system);
  if (!session) return fail(session.error());
  if (fuse_session_mount(session->get(), mountpoint->c_str()) != 0) {
    return fail(
        {Code::kUnavailable,
         StrCat("cannot mount at ", *mountpoint, ": ",
                FuseLog().empty() ? strerror(errno) : FuseLog().c_str(),
                "; mounting needs root, or fusermount3 (package fuse3) with its setuid bit")});
  }
  fuse_set_log_func(PrintFuseLog);
  const fuse_custom_io device{
      .writev = WriteDevice, .read = ReadDevice, .splice_receive = nullptr, .splice_send = nullptr};
  fuse_session_custom_io(session->get(), &device, fuse_session_fd(session->get()));

  int error = 0;
  if (fuse_set_signal_handlers(session->get()) != 0 || fuse_daemonize(arguments->foreground) != 0) {
    error = EAGAIN;
  } else {
    // The storage that slowfs stands for has its own processors, so readers that keep this machine
    // busy should not delay its answers. Only root may; for others late_us_mean tells.
    const sched_param priority{.sched_priority = 1};
    if (arguments->realtime) sched_setscheduler(0, SCHED_RR, &priority);
    error = (*file_system)->Serve(session->get(), arguments->threads);
  }
  fuse_session_unmount(session->get());
  fuse_remove_signal_handlers(session->get());
  if (error != 0) fprintf(stderr, "slowfs: %s: %s\n", mountpoint->c_str(), strerror(error));
  return error == 0 ? 0 : 1;
}

}  // namespace
}  // namespace forebay::slowfs

int main(int argc, char** argv) { return forebay::slowfs::Main(argc, argv); }
