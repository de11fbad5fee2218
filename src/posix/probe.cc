// A program as any other, which the tests run with and without the preloaded library.
//
//   probe WHAT ARGUMENTS...   prints what it saw; exits with 1 when something was wrong
#include <dlfcn.h>
#include <fcntl.h>
#include <linux/openat2.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/sendfile.h>
#include <sys/stat.h>
#include <sys/statfs.h>
#include <sys/statvfs.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <sys/xattr.h>
#include <unistd.h>
#include <utime.h>

#include <atomic>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <functional>
#include <iterator>
#include <map>
#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace {

using Arguments = std::vector<std::string>;

std::string Rest(int fd) {
  std::string text;
  char buffer[4096];
  for (ssize_t got = 0; (got = read(fd, buffer, sizeof(buffer))) > 0;) {
    text.append(buffer, static_cast<size_t>(got));
  }
  return text;
}

std::string Close(int fd) {
  if (fd < 0) return std::string("error ") + std::to_string(errno);
  std::string text = Rest(fd);
  close(fd);
  return text;
}

std::string Stream(FILE* stream) {
  if (stream == nullptr) return std::string("error ") + std::to_string(errno);
  std::string text;
  char buffer[100];
  for (size_t got = 0; (got = fread(buffer, 1, sizeof(buffer), stream)) > 0;) {
    text.append(buffer, got);
  }
  fclose(stream);
  return text;
}

// Every way to read a file that is known here.
int Read(const Arguments& a) {
  const char* path = a[0].c_str();
  const std::string folder = a[0].substr(0, a[0].rfind('/'));
  const std::string name = a[0].substr(a[0].rfind('/') + 1);
  const auto say = [](const char* how, const std::string& text) {
    std::printf("%s: %s\n", how, text.c_str());
  };
  say("open", Close(open(path, O_RDONLY)));
  say("open64", Close(open64(path, O_RDONLY | O_CLOEXEC)));
  say("openat", Close(openat(AT_FDCWD, path, O_RDONLY)));
  const int at = open(folder.c_str(), O_RDONLY | O_DIRECTORY);
  say("openat folder", Close(openat(at, name.c_str(), O_RDONLY)));
  say("openat64 folder", Close(openat64(at, ("./" + name).c_str(), O_RDONLY)));
  close(at);
  say("syscall openat", Close(static_cast<int>(syscall(SYS_openat, AT_FDCWD, path, O_RDONLY))));
  open_how how{};
  how.flags = O_RDONLY;
  say("openat2", Close(static_cast<int>(syscall(SYS_openat2, AT_FDCWD, path, &how, sizeof(how)))));
  say("fopen", Stream(fopen(path, "r")));
  say("fopen64", Stream(fopen64(path, "rbe")));
  std::ifstream stream(path, std::ios::binary);
  say("ifstream", std::string(std::istreambuf_iterator<char>(stream), {}));
  say("odd", Close(open((folder + "//.//" + name).c_str(), O_RDONLY)));
  say("slash", Close(open((a[0] + "/").c_str(), O_RDONLY)));
  say("dot", Close(open((a[0] + "/.").c_str(), O_RDONLY)));
  say("nofollow", Close(open(path, O_RDONLY | O_NOFOLLOW)));
  if (chdir(folder.c_str()) != 0) return 1;
  say("relative", Close(open(name.c_str(), O_RDONLY)));
  if (chdir("/") != 0) return 1;
  say("relative to root", Close(open(path + 1, O_RDONLY)));
  if (syscall(SYS_chdir, folder.c_str()) != 0) return 1;
  say("relative by syscall", Close(open(name.c_str(), O_RDONLY)));
  if (syscall(SYS_chdir, "/") != 0) return 1;
  const int fd = open(path, O_RDONLY);
  struct stat stat {};
  if (fstat(fd, &stat) == 0 && stat.st_size > 0) {
    const auto bytes = static_cast<size_t>(stat.st_size);
    void* mapped = mmap(nullptr, bytes, PROT_READ, MAP_PRIVATE, fd, 0);
    say("mmap", std::string(static_cast<char*>(mapped), bytes));
    char out[3] = {};
    say("pread", std::to_string(pread(fd, out, 2, 1)) + out);
    const int other = dup(fd);
    lseek(other, 2, SEEK_SET);
    say("dup shares its offset", Rest(fd));
    say("lseek", std::to_string(lseek(fd, 0, SEEK_END)));
    int pipes[2];
    off_t offset = 0;
    if (pipe(pipes) != 0) return 1;
    say("sendfile", std::to_string(sendfile(pipes[1], fd, &offset, 1 << 16)));
    std::printf("fadvise: %d\n", posix_fadvise(fd, 0, 0, POSIX_FADV_SEQUENTIAL));
    std::printf("flags: %d\n", fcntl(fd, F_GETFL));
  }
  std::printf("write: %zd %d\n", write(fd, "x", 1), errno);
  return 0;
}

void Show(const char* how, int rc, const struct stat& s) {
  std::printf(
      "%s: %d dev %lu ino %lu mode %o nlink %lu uid %u gid %u size %ld block %ld %ld"
      " mtime %ld.%09ld ctime %ld.%09ld\n",
      how, rc, s.st_dev, s.st_ino, s.st_mode, s.st_nlink, s.st_uid, s.st_gid, s.st_size,
      s.st_blksize, s.st_blocks, s.st_mtim.tv_sec, s.st_mtim.tv_nsec, s.st_ctim.tv_sec,
      s.st_ctim.tv_nsec);
}

void Show(const char* how, int rc, const struct statx& s) {
  std::printf(
      "%s: %d mask %x dev %u:%u ino %llu mode %o nlink %u size %llu mtime %lld.%u"
      " btime %lld.%u\n",
      how, rc, s.stx_mask & STATX_BASIC_STATS, s.stx_dev_major, s.stx_dev_minor, s.stx_ino,
      s.stx_mode, s.stx_nlink, s.stx_size, s.stx_mtime.tv_sec, s.stx_mtime.tv_nsec,
      s.stx_btime.tv_sec, s.stx_btime.tv_nsec);
}

int Stat(const Arguments& a) {
  const char* path = a[0].c_str();
  struct stat s {};
  Show("stat", stat(path, &s), s);
  Show("lstat", lstat(path, &s), s);
  Show("fstatat", fstatat(AT_FDCWD, path, &s, 0), s);
  Show("fstatat nofollow", fstatat(AT_FDCWD, path, &s, AT_SYMLINK_NOFOLLOW), s);
  const int fd = open(path, O_RDONLY);
  Show("fstat", fstat(fd, &s), s);
  Show("fstatat empty", fstatat(fd, "", &s, AT_EMPTY_PATH), s);
  struct statx x {};
  Show("statx", statx(AT_FDCWD, path, 0, STATX_BASIC_STATS | STATX_BTIME, &x), x);
  Show("statx fd", statx(fd, "", AT_EMPTY_PATH, STATX_BASIC_STATS | STATX_BTIME, &x), x);
  // The names that older programs are linked to.
  using Old = int (*)(int, const char*, struct stat*);
  using OldFd = int (*)(int, int, struct stat*);
  if (auto* old = reinterpret_cast<Old>(dlsym(RTLD_DEFAULT, "__xstat"))) {
    Show("__xstat", old(1, path, &s), s);
  }
  if (auto* old = reinterpret_cast<Old>(dlsym(RTLD_DEFAULT, "__lxstat64"))) {
    Show("__lxstat64", old(1, path, &s), s);
  }
  if (auto* old = reinterpret_cast<OldFd>(dlsym(RTLD_DEFAULT, "__fxstat"))) {
    Show("__fxstat", old(1, fd, &s), s);
  }
  for (int mode : {F_OK, R_OK, W_OK, X_OK}) {
    std::printf("access %d: %d %d %d\n", mode, access(path, mode), eaccess(path, mode),
                faccessat(AT_FDCWD, path, mode, AT_EACCESS));
  }
  struct statfs f {};
  struct statvfs v {};
  std::printf("fstatfs: %d %lx\n", fstatfs(fd, &f), static_cast<unsigned long>(f.f_type));
  std::printf("fstatvfs: %d %lu\n", fstatvfs(fd, &v), v.f_fsid);
  char names[4096];
  std::printf("flistxattr: %zd\n", flistxattr(fd, names, sizeof(names)));
  std::printf("fgetxattr: %zd\n", fgetxattr(fd, "user.forebay.file", names, sizeof(names)));
  Show("stat of nothing", stat((a[0] + ".none").c_str(), &s), s);
  std::printf("errno: %d\n", errno);
  return 0;
}

// A descriptor that was opened before exec.
int FstatOf(const Arguments& a) {
  struct stat s {};
  const int fd = std::atoi(a[0].c_str());
  Show("fstat", fstat(fd, &s), s);
  std::printf("rest: %s\n", Rest(fd).c_str());
  return 0;
}

int Exec(const Arguments& a) {
  const int fd = open(a[0].c_str(), O_RDONLY);
  char one = 0;
  if (fd < 0 || read(fd, &one, 1) != 1) return 1;
  const std::string number = std::to_string(fd);
  execl("/proc/self/exe", "probe", "fstat", number.c_str(), nullptr);
  return 1;
}

int Change(const Arguments& a) {
  const std::string& how = a[0];
  const char* path = a[1].c_str();
  const std::string other = a[1] + ".other";
  const auto write_to = [](int fd) {
    const bool good = fd >= 0 && write(fd, "written", 7) == 7;
    close(fd);
    return good ? 0 : 1;
  };
  const std::map<std::string, std::function<int()>> all = {
      {"open", [&] { return write_to(open(path, O_WRONLY | O_TRUNC)); }},
      {"openat", [&] { return write_to(openat(AT_FDCWD, path, O_RDWR)); }},
      {"creat", [&] { return write_to(creat(path, 0644)); }},
      {"syscall",
       [&] { return write_to(static_cast<int>(syscall(SYS_openat, AT_FDCWD, path, O_RDWR))); }},
      {"fopen",
       [&] {
         FILE* stream = fopen(path, "r+");
         if (stream == nullptr) return 1;
         std::fputs("written", stream);
         return fclose(stream);
       }},
      {"freopen",
       [&] {
         FILE* stream = freopen(path, "w", stderr);
         if (stream == nullptr) return 1;
         std::fputs("written", stream);
         return fclose(stream);
       }},
      {"unlink", [&] { return unlink(path); }},
      {"unlinkat", [&] { return unlinkat(AT_FDCWD, path, 0); }},
      {"remove", [&] { return std::remove(path); }},
      {"rename", [&] { return std::rename(path, other.c_str()); }},
      {"renameat", [&] { return renameat(AT_FDCWD, path, AT_FDCWD, other.c_str()); }},
      {"renameat2", [&] { return renameat2(AT_FDCWD, path, AT_FDCWD, other.c_str(), 0); }},
      {"replace",
       [&] { return write_to(creat(other.c_str(), 0644)) + std::rename(other.c_str(), path); }},
      {"rename folder",
       [&] {
         const std::string folder = a[1].substr(0, a[1].rfind('/'));
         return std::rename(folder.c_str(), (folder + ".other").c_str());
       }},
      {"truncate", [&] { return truncate(path, 2); }},
      {"link", [&] { return link(path, other.c_str()); }},
      {"linkat", [&] { return linkat(AT_FDCWD, path, AT_FDCWD, other.c_str(), 0); }},
      {"chmod", [&] { return chmod(path, 0600); }},
      {"syscall linkat",
       [&] {
         return static_cast<int>(syscall(SYS_linkat, AT_FDCWD, path, AT_FDCWD, other.c_str(), 0));
       }},
      {"syscall fchmodat",
       [&] { return static_cast<int>(syscall(SYS_fchmodat, AT_FDCWD, path, 0600)); }},
      {"syscall fchmod",
       [&] { return static_cast<int>(syscall(SYS_fchmod, open(path, O_RDONLY), 0600)); }},
      {"chmod folder",
       [&] {
         const std::string folder = a[1].substr(0, a[1].rfind('/'));
         return chmod(folder.c_str(), 0600) + chmod(folder.c_str(), 0700);
       }},
      {"fchmodat", [&] { return fchmodat(AT_FDCWD, path, 0600, 0); }},
      {"fchmod", [&] { return fchmod(open(path, O_RDONLY), 0600); }},
      {"chown", [&] { return chown(path, getuid(), getgid()); }},
      {"fchown", [&] { return fchown(open(path, O_RDONLY), getuid(), getgid()); }},
      {"utime", [&] { return utime(path, nullptr); }},
      {"utimensat", [&] { return utimensat(AT_FDCWD, path, nullptr, 0); }},
      {"futimens", [&] { return futimens(open(path, O_RDONLY), nullptr); }},
      {"setxattr", [&] { return setxattr(path, "user.probe", "x", 1, 0); }},
      {"fsetxattr", [&] { return fsetxattr(open(path, O_RDONLY), "user.probe", "x", 1, 0); }},
  };
  const auto found = all.find(how);
  if (found == all.end() || found->second() != 0) {
    std::perror(how.c_str());
    return 1;
  }
  struct stat s {};
  const int rc = stat(path, &s);
  std::printf("%d %lo %s\n", rc, rc == 0 ? static_cast<unsigned long>(s.st_mode) : 0,
              Close(open(path, O_RDONLY)).c_str());
  return 0;
}

// Links by name, through syscall(): a[0] is there, the others are not.
int LinkByCall(const Arguments& a) {
  int wrong = syscall(SYS_symlinkat, a[0].c_str(), AT_FDCWD, a[1].c_str()) == 0 ? 0 : 1;
#ifdef SYS_symlink
  wrong += syscall(SYS_symlink, a[0].c_str(), a[2].c_str()) == 0 ? 0 : 1;
#endif
#ifdef SYS_link
  wrong += syscall(SYS_link, a[0].c_str(), a[3].c_str()) == 0 ? 0 : 1;
#endif
  std::printf("%d wrong\n", wrong);
  return wrong;
}

// What is done to a folder, and changes none of its files.
int Keep(const Arguments& a) {
  const std::string& folder = a[0];
  const char* path = folder.c_str();
  const auto good = [](const char* what, bool done) {
    if (!done) std::perror(what);
    return done ? 0 : 1;
  };
  int wrong = 0;
  int fd = open(path, O_TMPFILE | O_RDWR, 0600);
  if (fd >= 0) {
    wrong += good("write", write(fd, "new", 3) == 3);
    const std::string name = "/proc/self/fd/" + std::to_string(fd);
    wrong += good("linkat", linkat(AT_FDCWD, name.c_str(), AT_FDCWD, (folder + "/new").c_str(),
                                   AT_SYMLINK_FOLLOW) == 0);
    close(fd);
    // It has a name, and may still be written to.
    wrong += good("new", Close(open((folder + "/new").c_str(), O_RDONLY)) == "new");
  } else {
    wrong += good("O_TMPFILE", errno == EOPNOTSUPP);
  }
  fd = open(path, O_RDONLY | O_DIRECTORY);
  wrong += good("chmod", chmod(path, 0700) == 0 && fchmodat(AT_FDCWD, path, 0711, 0) == 0);
  wrong += good("fchmod", fchmod(fd, 0755) == 0);
  wrong +=
      good("chown", chown(path, getuid(), getgid()) == 0 && fchown(fd, getuid(), getgid()) == 0);
  close(fd);
  wrong += good("symlink", symlink(path, (folder + "/link").c_str()) == 0);
  wrong += good("symlink to a file", symlinkat("a", AT_FDCWD, (folder + "/link2").c_str()) == 0);
  std::printf("%d wrong\n", wrong);
  return wrong == 0 ? 0 : 1;
}

// Writes by a path that is not below the data folder's name: a link, "..", a descriptor.
int ChangeAround(const Arguments& a) {
  const std::string& folder = a[0];
  const std::string& name = a[1];
  const std::string link = folder + "-link";
  if (symlink(folder.c_str(), link.c_str()) != 0) return 1;
  const int fd = open((link + "/" + name).c_str(), O_WRONLY | O_TRUNC);
  if (fd < 0 || write(fd, "written", 7) != 7) return 1;
  close(fd);
  unlink(link.c_str());
  std::printf("%s\n", Close(open((folder + "/" + name).c_str(), O_RDONLY)).c_str());
  return 0;
}

std::string Expected(const std::string& path) { return path.substr(path.rfind('/') + 1); }

// Memory that cannot be read or written, and a path that runs into it.
struct Nowhere {
  explicit Nowhere(const std::string& path) {
    void* made = mmap(nullptr, 8192, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    page = static_cast<char*>(made) + 4096;
    mprotect(page, 4096, PROT_NONE);
    endless = page - path.size();
    std::memcpy(endless, path.data(), path.size());
  }
  char* page;
  char* endless;
};

void BadPaths(const char* which, const char* path, int folder) {
  const auto say = [&](const char* how, long result) {
    std::printf("%s %s: %ld %d\n", which, how, result, result < 0 ? errno : 0);
  };
  struct stat s {};
  struct statx x {};
  open_how how{};
  char* const none[] = {nullptr};
  say("open", open(path, O_RDONLY));
  say("open to write", open(path, O_WRONLY));
  say("openat", openat(folder, path, O_RDONLY));
  say("creat", creat(path, 0600));
  say("fopen", std::fopen(path, "r") == nullptr ? -1 : 0);
  say("fopen to write", std::fopen(path, "r+") == nullptr ? -1 : 0);
  say("syscall", syscall(SYS_openat, AT_FDCWD, path, O_RDONLY));
  say("openat2", syscall(SYS_openat2, AT_FDCWD, path, &how, sizeof(how)));
  say("stat", stat(path, &s));
  say("lstat", lstat(path, &s));
  say("fstatat", fstatat(folder, path, &s, 0));
  say("statx", statx(AT_FDCWD, path, 0, STATX_BASIC_STATS, &x));
  say("access", access(path, R_OK));
  say("faccessat", faccessat(folder, path, R_OK, AT_EACCESS));
  say("truncate", truncate(path, 1));
  say("chmod", chmod(path, 0600));
  say("fchmodat", fchmodat(folder, path, 0600, 0));
  say("chown", chown(path, getuid(), getgid()));
  say("fchownat", fchownat(folder, path, getuid(), getgid(), AT_EMPTY_PATH));
  say("utimensat", utimensat(folder, path, nullptr, 0));
  say("setxattr", setxattr(path, "user.probe", "x", 1, 0));
  say("rename", std::rename(path, path));
  say("link", link(path, path));
  say("linkat", linkat(folder, path, folder, path, AT_EMPTY_PATH));
  say("symlink", symlink(path, path));
  say("unlink", unlink(path));
  say("rmdir", rmdir(path));
  say("chdir", chdir(path));
  say("execve", execve(path, none, environ));
}

// Pointers that the kernel refuses.
int Bad(const Arguments& a) {
  const Nowhere nowhere(a[0]);
  const std::string parent = a[0].substr(0, a[0].rfind('/'));
  const int folder = open(parent.c_str(), O_RDONLY | O_DIRECTORY);
  volatile uintptr_t low = 16;
  volatile uintptr_t high = ~uintptr_t{4095};
  const std::pair<const char*, char*> all[] = {{"low", reinterpret_cast<char*>(low)},
                                               {"high", reinterpret_cast<char*>(high)},
                                               {"nowhere", nowhere.page},
                                               {"half", nowhere.page - 8}};
  for (const bool inside : {false, true}) {
    if (inside && chdir(parent.c_str()) != 0) return 1;
    for (const auto& [which, at] : all) {
      if (at != nowhere.page - 8) BadPaths(which, at, folder);
    }
    BadPaths("endless", nowhere.endless, folder);
  }
  for (const auto& [which, at] : all) {
    const auto say = [&, which = which](const char* how, long result) {
      std::printf("%s %s: %ld %d\n", which, how, result, result < 0 ? errno : 0);
    };
    const int fd = open(a[0].c_str(), O_RDONLY);
    auto* const s = reinterpret_cast<struct stat*>(at);
    auto* const x = reinterpret_cast<struct statx*>(at);
    char* const none[] = {nullptr};
    say("stat to", stat(a[0].c_str(), s));
    say("lstat to", lstat(a[0].c_str(), s));
    say("fstat to", fstat(fd, s));
    say("fstatat to", fstatat(folder, Expected(a[0]).c_str(), s, 0));
    say("statx to", statx(AT_FDCWD, a[0].c_str(), 0, STATX_BASIC_STATS, x));
    if (at != nowhere.page - 8) {
      say("read to", read(fd, at, 4));
      say("readv of", readv(fd, reinterpret_cast<iovec*>(at), 1));
      say("openat2 how", syscall(SYS_openat2, AT_FDCWD, a[0].c_str(), at, sizeof(open_how)));
      say("execve with", execve("/bin/true", none, reinterpret_cast<char**>(at)));
    }
    close(fd);
  }
  return 0;
}

// Copies a file within the kernel.
int Range(const Arguments& a) {
  const std::string other = a[0] + ".out";
  const int in = open(a[0].c_str(), O_RDONLY);
  const int out = open(other.c_str(), O_RDWR | O_CREAT | O_TRUNC, 0600);
  off_t from = 3;
  off_t to = 1;
  const ssize_t at = copy_file_range(in, &from, out, &to, 4, 0);
  std::printf("%zd %d from %ld to %ld\n", at, at < 0 ? errno : 0, from, to);
  const ssize_t all = copy_file_range(in, nullptr, out, nullptr, 1 << 20, 0);
  std::printf("%zd %d at %ld and %ld\n", all, all < 0 ? errno : 0, lseek(in, 0, SEEK_CUR),
              lseek(out, 0, SEEK_CUR));
  lseek(out, 0, SEEK_SET);
  std::printf("%s\n", Close(out).c_str());
  return unlink(other.c_str());
}

// Files that hold their own names, read by threads and by the children that they fork.
int Threads(const Arguments& a) {
  std::atomic<int> wrong = 0;
  const auto check = [&](const std::string& path) {
    const std::string text = Close(open(path.c_str(), O_RDONLY));
    if (text != Expected(path)) {
      ++wrong;
      std::fprintf(stderr, "%s: %s\n", path.c_str(), text.c_str());
    }
  };
  std::vector<std::thread> threads;
  for (int t = 0; t < 16; ++t) {
    threads.emplace_back([&, t] {
      for (int round = 0; round < 20; ++round) {
        for (size_t i = 0; i < a.size(); ++i) {
          check(a[(i + static_cast<size_t>(t)) % a.size()]);
        }
        if (round % 5 == t % 5 && t < 4) {
          const pid_t child = fork();
          if (child == 0) {
            for (const std::string& path : a) check(path);
            _exit(wrong == 0 ? 0 : 1);
          }
          int status = 0;
          if (waitpid(child, &status, 0) != child || status != 0) ++wrong;
        }
      }
    });
  }
  for (auto& thread : threads) thread.join();
  std::printf("%d\n", wrong.load());
  return wrong == 0 ? 0 : 1;
}

std::string signal_path;
std::atomic<int> signal_opens = 0;
std::atomic<int> signal_wrong = 0;

void OnSignal(int) {
  const int kept = errno;
  char buffer[64] = {};
  const int fd = open(signal_path.c_str(), O_RDONLY);
  if (fd < 0 || read(fd, buffer, sizeof(buffer)) <= 0 || buffer[0] != signal_path.back()) {
    ++signal_wrong;
  }
  close(fd);
  ++signal_opens;
  errno = kept;
}

// Opens from a signal handler, in the middle of any other call. The file holds its name's last
// letter first.
int Signals(const Arguments& a) {
  signal_path = a[0];
  struct sigaction action {};
  action.sa_handler = OnSignal;
  action.sa_flags = SA_RESTART;
  sigaction(SIGALRM, &action, nullptr);
  const itimerval every{.it_interval = {.tv_sec = 0, .tv_usec = 200},
                        .it_value = {.tv_sec = 0, .tv_usec = 200}};
  setitimer(ITIMER_REAL, &every, nullptr);
  for (int i = 0; i < 200'000 && signal_opens < 300; ++i) {
    errno = 0;
    struct stat s {};
    const int fd = open(a[1].c_str(), O_RDONLY);
    if (fd < 0 || fstat(fd, &s) != 0 || stat(a[1].c_str(), &s) != 0 || errno != 0) ++signal_wrong;
    close(fd);
  }
  const itimerval never{};
  setitimer(ITIMER_REAL, &never, nullptr);
  std::printf("%d wrong, %s\n", signal_wrong.load(), signal_opens > 20 ? "many" : "few");
  return signal_wrong == 0 ? 0 : 1;
}

// Handlers run on a stack that ends at memory that nobody may touch, and is no larger than what a
// program that knows no better gives them.
int SmallStack(const Arguments& a) {
  constexpr size_t kGuard = 1 << 16;
  // The kernel's frame has grown with the registers since SIGSTKSZ was 8 KiB.
#ifdef _SC_MINSIGSTKSZ
  const auto frame = static_cast<size_t>(sysconf(_SC_MINSIGSTKSZ));
#else
  const size_t frame = MINSIGSTKSZ;
#endif
  const size_t bytes = (8192 + frame + 4095) / 4096 * 4096;
  auto* const memory = static_cast<char*>(
      mmap(nullptr, kGuard + bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
  if (memory == MAP_FAILED || mprotect(memory, kGuard, PROT_NONE) != 0) return 1;
  stack_t stack{};
  stack.ss_sp = memory + kGuard;
  stack.ss_size = bytes;
  if (sigaltstack(&stack, nullptr) != 0) return 1;
  signal_path = a[0];
  struct sigaction action {};
  action.sa_handler = OnSignal;
  action.sa_flags = SA_ONSTACK;
  sigaction(SIGUSR1, &action, nullptr);
  for (int i = 0; i < 100; ++i) raise(SIGUSR1);
  std::printf("%d wrong of %d\n", signal_wrong.load(), signal_opens.load());
  return signal_wrong == 0 ? 0 : 1;
}

// Threads that open and read are cancelled, wherever they are.
int Cancel(const Arguments& a) {
  struct Job {
    const char* path;
    std::atomic<int> rounds = 0;
    std::atomic<int> wrong = 0;
  };
  const auto run = [](void* given) -> void* {
    Job& job = *static_cast<Job*>(given);
    while (true) {
      struct File {
        int fd = -1;
        ~File() {
          int before = 0;  // close() may be where a thread ends, and a destructor may not
          pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, &before);
          if (fd >= 0) close(fd);
          pthread_setcancelstate(before, nullptr);
        }
      } file;
      char out[8] = {};
      struct stat s {};
      file.fd = open(job.path, O_RDONLY);
      if (file.fd < 0 || stat(job.path, &s) != 0 || read(file.fd, out, 1) != 1 || out[0] != 'x') {
        ++job.wrong;
      }
      ++job.rounds;
    }
  };
  int wrong = 0;
  for (int i = 0; i < 200; ++i) {
    Job job{a[static_cast<size_t>(i) % a.size()].c_str()};
    pthread_t thread{};
    if (pthread_create(&thread, nullptr, run, &job) != 0) return 1;
    while (job.rounds < i % 3) sched_yield();
    void* result = nullptr;
    if (pthread_cancel(thread) != 0 || pthread_join(thread, &result) != 0) ++wrong;
    if (result != PTHREAD_CANCELED || job.wrong != 0) ++wrong;
  }
  for (const std::string& path : a) wrong += Close(open(path.c_str(), O_RDONLY)) == "x" ? 0 : 1;
  // A thread that ends as open() returns leaves its descriptor behind, with libc's as well; what
  // the library opens for itself it closes.
  const int next = open("/dev/null", O_RDONLY);
  if (next > 40) ++wrong;
  std::printf("%d wrong\n", wrong);
  return wrong == 0 ? 0 : 1;
}

// No two stretches are alike.
char ByteAt(size_t offset) {
  uint64_t word = (offset / 8 + 1) * 0x9E3779B97F4A7C15;
  word ^= word >> 29;
  return static_cast<char>('a' + (word >> (offset % 8 * 7)) % 26);
}

bool IsRight(const char* bytes, size_t count, size_t offset) {
  for (size_t i = 0; i < count; ++i) {
    if (bytes[i] != ByteAt(offset + i)) return false;
  }
  return true;
}

// Writes such a file: all of it, or with dots where it must not be read.
int Fill(const Arguments& a) {
  const auto size = static_cast<size_t>(std::atol(a[1].c_str()));
  const auto from = static_cast<size_t>(std::atol(a[2].c_str()));
  const auto to = static_cast<size_t>(std::atol(a[3].c_str()));
  std::string text(size, '.');
  for (size_t i = from; i < to && i < size; ++i) text[i] = ByteAt(i);
  std::ofstream(a[0], std::ios::binary) << text;
  return 0;
}

[[gnu::noinline]] void CloseInVfork(int fd) {
  const pid_t child = vfork();
  if (child == 0) {
    close(fd);
    close_range(3, ~0U, 0);
    _exit(0);
  }
  waitpid(child, nullptr, 0);
}

// A large file in all ways of reading; its bytes are those of ByteAt().
int Large(const Arguments& a) {
  int wrong = 0;
  const auto expect = [&](bool good, const char* what) {
    if (good) return;
    ++wrong;
    std::printf("wrong: %s (errno %d)\n", what, errno);
  };
  const int fd = open(a[0].c_str(), O_RDONLY);
  struct stat s {};
  expect(fd >= 0 && fstat(fd, &s) == 0, "open");
  const auto size = static_cast<size_t>(s.st_size);
  std::vector<char> out(size + 100);
  size_t done = 0;
  for (ssize_t got = 0; (got = read(fd, out.data() + done, 1 << 16)) > 0;) {
    done += static_cast<size_t>(got);
  }
  expect(done == size && IsRight(out.data(), size, 0), "read to the end");
  expect(lseek(fd, 0, SEEK_CUR) == static_cast<off_t>(size), "offset at the end");
  expect(pread(fd, out.data(), 5000, 12345) == 5000 && IsRight(out.data(), 5000, 12345), "pread");
  expect(pread64(fd, out.data(), 100, s.st_size - 10) == 10 && IsRight(out.data(), 10, size - 10),
         "pread over the end");
  expect(pread(fd, out.data(), 100, s.st_size) == 0, "pread at the end");
  expect(pread(fd, out.data(), 100, -1) == -1 && errno == EINVAL, "pread before the start");
  iovec parts[2] = {{.iov_base = out.data(), .iov_len = 10},
                    {.iov_base = out.data() + 10, .iov_len = 4000}};
  lseek(fd, 77, SEEK_SET);
  expect(readv(fd, parts, 2) == 4010 && IsRight(out.data(), 4010, 77), "readv");
  expect(lseek(fd, 0, SEEK_CUR) == 77 + 4010, "offset after readv");
  expect(preadv(fd, parts, 2, 999) == 4010 && IsRight(out.data(), 4010, 999), "preadv");
  expect(preadv2(fd, parts, 2, -1, 0) == 4010 && IsRight(out.data(), 4010, 77 + 4010), "preadv2");
  const Nowhere nowhere(a[0]);
  expect(pread(fd, nowhere.page, 100, 0) == -1 && errno == EFAULT, "pread to nowhere");
  expect(readv(fd, reinterpret_cast<iovec*>(nowhere.page), 2) == -1 && errno == EFAULT,
         "readv of nowhere");
  const int other = dup(fd);
  const int third = fcntl(fd, F_DUPFD_CLOEXEC, 50);
  lseek(other, 5, SEEK_SET);
  expect(read(fd, out.data(), 3) == 3 && IsRight(out.data(), 3, 5), "dup");
  expect(read(third, out.data(), 3) == 3 && IsRight(out.data(), 3, 8), "F_DUPFD");
  // Threads and a child share one offset: no byte comes twice.
  lseek(fd, 0, SEEK_SET);
  std::vector<std::atomic<int>> seen(size / 1000);
  std::atomic<int> bad = 0;
  const auto take = [&](int from, size_t most) {
    std::vector<char> bytes(1000);
    for (size_t n = 0; n < most && read(from, bytes.data(), 1000) == 1000; ++n) {
      size_t at = 0;
      while (at < seen.size() && !IsRight(bytes.data(), 1000, at * 1000)) ++at;
      if (at == seen.size() || seen[at].fetch_add(1) != 0) ++bad;
    }
  };
  std::vector<std::thread> threads;
  for (int t = 0; t < 3; ++t) threads.emplace_back([&] { take(t == 0 ? other : fd, 200); });
  for (auto& thread : threads) thread.join();
  expect(bad == 0, "one offset for all threads");
  const off_t before = lseek(fd, 0, SEEK_CUR);
  const pid_t child = fork();
  if (child == 0) {
    take(fd, 10);
    _exit(bad);
  }
  int status = 1;
  waitpid(child, &status, 0);
  expect(status == 0 && lseek(fd, 0, SEEK_CUR) == before + 10'000, "a child reads on");
  // The child of a vfork closes its own.
  CloseInVfork(fd);
  expect(pread(fd, out.data(), 100, 0) == 100 && IsRight(out.data(), 100, 0), "after a vfork");
  // The number is another file's now.
  dup2(open("/dev/zero", O_RDONLY), fd);
  out[0] = 'x';
  expect(read(fd, out.data(), 1) == 1 && out[0] == 0, "dup2 over it");
  close(third);
  const int reused = open("/dev/zero", O_RDONLY);
  expect(read(reused, out.data(), 1) == 1 && out[0] == 0, "close and open");
  // A close that the library does not see.
  syscall(SYS_close, other);
  const int again = open("/dev/zero", O_RDONLY);
  out[0] = 'x';
  expect(again == other && read(again, out.data(), 1) == 1 && out[0] == 0, "an unseen close");
  std::printf("%d wrong\n", wrong);
  return wrong == 0 ? 0 : 1;
}

// No descriptor is left behind, and each open gives the lowest number.
int Numbers(const Arguments& a) {
  const int first = open("/dev/null", O_RDONLY);
  close(first);
  for (const std::string& path : a) {
    const int fd = open(path.c_str(), O_RDONLY);
    if (fd >= 0) close(fd);
    if (fd >= 0 && fd != first) return 1;
    struct stat s {};
    stat(path.c_str(), &s);
    access(path.c_str(), R_OK);
    chmod(path.c_str(), 0644);
  }
  const int last = open("/dev/null", O_RDONLY);
  std::printf("%s\n", last == first ? "same" : "other");
  return last == first ? 0 : 1;
}

}  // namespace

// A stream of a large file whose bytes are those of ByteAt().
int StreamOf(const Arguments& a) {
  int wrong = 0;
  const auto expect = [&](bool good, const char* what) {
    if (good) return;
    ++wrong;
    std::printf("wrong: %s (errno %d)\n", what, errno);
  };
  FILE* stream = std::fopen(a[0].c_str(), "rb");
  expect(stream != nullptr, "fopen");
  if (stream == nullptr) return 1;
  struct stat s {};
  expect(fstat(fileno(stream), &s) == 0, "fstat");
  const auto size = static_cast<size_t>(s.st_size);
  std::vector<char> out(size + 100);
  const auto byte = [](size_t at) { return static_cast<unsigned char>(ByteAt(at)); };
  expect(std::fgetc(stream) == byte(0) && std::fgetc(stream) == byte(1), "fgetc");
  const auto reads = [&](size_t bytes, size_t at, const char* what) {
    std::memset(out.data(), 0, bytes);
    expect(std::fread(out.data(), 1, bytes, stream) == bytes && IsRight(out.data(), bytes, at),
           what);
    expect(std::ftell(stream) == static_cast<long>(at + bytes), what);
  };
  reads(300'000, 2, "much after a little");
  reads(100, 300'002, "a little after much");
  reads(1'000'000, 300'102, "much again");
  expect(std::fgetc(stream) == byte(1'300'102), "fgetc after much");
  expect(std::ungetc('?', stream) == '?', "ungetc");
  expect(std::fread(out.data(), 100, 1000, stream) == 1000 && out[0] == '?' &&
             IsRight(out.data() + 1, 99'999, 1'300'103),
         "after a character that was pushed back");
  expect(std::fseek(stream, -50'000, SEEK_CUR) == 0, "back");
  reads(80'000, 1'350'102, "after going back");
  expect(std::fseek(stream, 12345, SEEK_SET) == 0, "there");
  reads(200'000, 12345, "after going there");
  expect(lseek(fileno(stream), 0, SEEK_CUR) >= 212'345, "the descriptor");
  expect(std::fseek(stream, 10, SEEK_SET) == 0, "to the start");
  expect(std::fread(out.data(), 7, size, stream) == (size - 10) / 7 && std::feof(stream) != 0 &&
             IsRight(out.data(), size - 10, 10),
         "over the end");
  expect(std::fread(out.data(), 1, 100'000, stream) == 0 && std::ferror(stream) == 0, "at the end");
  std::rewind(stream);
  std::vector<std::thread> threads;
  std::atomic<size_t> taken = 0;
  for (int t = 0; t < 3; ++t) {
    threads.emplace_back([&] {
      std::vector<char> piece(70'000);
      for (size_t got = 1; got > 0; taken += got) {
        got = std::fread(piece.data(), 1, piece.size(), stream);
      }
    });
  }
  for (auto& thread : threads) thread.join();
  expect(taken == size, "threads");
  expect(std::fclose(stream) == 0, "fclose");
  // As NumPy does: a descriptor's duplicate becomes a stream.
  const int fd = open(a[0].c_str(), O_RDONLY);
  char head[10];
  expect(read(fd, head, sizeof(head)) == 10, "read");
  stream = fdopen(dup(fd), "rb");
  reads(size - 10, 10, "fdopen");
  expect(std::fclose(stream) == 0 && close(fd) == 0, "close");
  std::printf("%d wrong\n", wrong);
  return wrong;
}

constexpr size_t kMapped = 2 << 20;

// Letters of the pages from there on: of the source, of the copy, or others.
bool AllAre(const char* at, size_t bytes, char letter) {
  for (size_t i = 0; i < bytes; i += 512) {
    if (static_cast<const volatile char*>(at)[i] != letter) return false;
  }
  return true;
}

// From here on the copy is there: the service that the test has made sees this question.
void LetItBeCopied(const std::string& path) {
  const int fd = open((path + ".copied").c_str(), O_RDONLY);
  if (fd >= 0) close(fd);
}
void AnyCall() { close(-1); }

long Bare(long number, long a, long b) {
  long result = number;
#if defined(__x86_64__)
  __asm__ volatile("syscall" : "+a"(result) : "D"(a), "S"(b) : "rcx", "r11", "memory");
#else
  result = syscall(number, a, b);
#endif
  return result;
}

bool IsAdvisedRandom(const char* at) {
  std::ifstream maps("/proc/self/smaps");
  char start[40];
  std::snprintf(start, sizeof(start), "%lx-", reinterpret_cast<unsigned long>(at));
  bool inside = false;
  for (std::string line; std::getline(maps, line);) {
    if (line.starts_with(start)) inside = true;
    if (inside && line.starts_with("VmFlags:")) return line.find(" rr") != std::string::npos;
  }
  return false;
}

// A mapping of a file of 's', whose copy, once it is there, has 'c'. What is done before decides
// whether the mapping moves.
int MappingOf(const Arguments& a) {
  const std::string& path = a[0];
  const std::string& how = a[1];
  int wrong = 0;
  const auto expect = [&](bool good, const char* what) {
    if (good) return;
    ++wrong;
    std::printf("wrong: %s (errno %d)\n", what, errno);
  };
  const bool writes = how == "written";
  const int fd = open(path.c_str(), O_RDONLY);
  const long offset = how == "offset" ? 8192 : 0;
  const size_t bytes = kMapped - static_cast<size_t>(offset);
  auto* const map = static_cast<char*>(
      mmap(nullptr, bytes, writes ? PROT_READ | PROT_WRITE : PROT_READ,
           how == "shared" || how == "threads" ? MAP_SHARED : MAP_PRIVATE, fd, offset));
  expect(map != MAP_FAILED && AllAre(map, bytes, 's'), "the source is mapped");
  close(fd);
  AnyCall();
  expect(AllAre(map, bytes, 's'), "it stays");
  char* const half = map + bytes / 2;
  const auto anonymous = [&](size_t length) {
    void* const got = mmap(half, length, PROT_READ | PROT_WRITE,
                           MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE, -1, 0);
    expect(got == half, "memory in its place");
    if (got == half) std::memset(half, 'x', length);
  };

  if (how == "shared" || how == "private" || how == "offset") {
    LetItBeCopied(path);
    AnyCall();
    expect(AllAre(map, bytes, 'c'), "it has moved");
    expect(munmap(map, bytes) == 0, "munmap");
  } else if (how == "threads") {
    std::atomic<bool> stop = false;
    std::atomic<int> bad = 0;
    std::atomic<size_t> copied = 0;
    std::vector<std::thread> threads;
    for (unsigned t = 0; t < 4; ++t) {
      threads.emplace_back([&, t] {
        unsigned seed = t + 1;
        while (!stop) {
          seed = seed * 1103515245 + 12345;
          const char letter = static_cast<volatile char*>(map)[(seed >> 8) % bytes];
          if (letter == 'c') ++copied;
          if (letter != 's' && letter != 'c') ++bad;
          if (t == 3) AnyCall();
        }
      });
    }
    threads.emplace_back([&] {
      // Others map and unmap all the time.
      while (!stop) {
        void* const other =
            mmap(nullptr, 1 << 16, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        static_cast<char*>(other)[0] = 'x';
        munmap(other, 1 << 16);
      }
    });
    LetItBeCopied(path);
    for (int i = 0; i < 2000 && copied < 100'000; ++i) usleep(1000);
    stop = true;
    for (auto& thread : threads) thread.join();
    expect(bad == 0, "nobody finds a gap");
    expect(AllAre(map, bytes, 'c'), "it has moved");
  } else if (how == "written") {
    map[5] = 'w';
    LetItBeCopied(path);
    AnyCall();
    expect(map[5] == 'w' && map[512] == 's', "what was written stays");
  } else if (how == "cut") {
    expect(munmap(half, bytes / 2) == 0, "munmap");
    anonymous(bytes / 2);
    LetItBeCopied(path);
    AnyCall();
    expect(AllAre(map, bytes / 2, 's') && AllAre(half, bytes / 2, 'x'), "what is left");
  } else if (how == "cut behind us") {
    expect(Bare(SYS_munmap, reinterpret_cast<long>(half), static_cast<long>(bytes / 2)) == 0,
           "munmap");
    anonymous(4096);
    LetItBeCopied(path);
    AnyCall();
    expect(AllAre(map, bytes / 2, 's') && AllAre(half, 4096, 'x'), "what is left");
  } else if (how == "replaced behind us") {
    expect(Bare(SYS_munmap, reinterpret_cast<long>(map), static_cast<long>(bytes)) == 0, "munmap");
    expect(mmap(map, bytes, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE, -1, 0) ==
               map,
           "memory in its place");
    LetItBeCopied(path);
    AnyCall();
    expect(AllAre(map, bytes, 0), "memory stays");
  } else if (how == "covered") {
    expect(mmap(half, 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1,
                0) == half,
           "memory over it");
    half[0] = 'x';
    LetItBeCopied(path);
    AnyCall();
    expect(half[0] == 'x' && map[0] == 's', "memory over it stays");
  } else if (how == "protected") {
    expect(mprotect(half, 4096, PROT_READ | PROT_WRITE) == 0, "mprotect");
    half[0] = 'x';
    LetItBeCopied(path);
    AnyCall();
    expect(half[0] == 'x' && map[0] == 's', "what was written stays");
  } else if (how == "moved") {
    auto* const other = static_cast<char*>(mremap(map, bytes, bytes + 4096, MREMAP_MAYMOVE));
    expect(other != MAP_FAILED, "mremap");
    LetItBeCopied(path);
    AnyCall();
    expect(AllAre(other, bytes, 's'), "what was moved stays");
  } else if (how == "advised") {
    expect(madvise(map, bytes, MADV_RANDOM) == 0, "madvise");
    LetItBeCopied(path);
    AnyCall();
    expect(AllAre(map, bytes, 'c') && IsAdvisedRandom(map), "it has moved, with its advice");
  } else if (how == "forked") {
    const pid_t child = fork();
    if (child == 0) {
      LetItBeCopied(path);
      AnyCall();
      _exit(AllAre(map, bytes, 'c') ? 0 : 1);
    }
    int status = -1;
    waitpid(child, &status, 0);
    expect(status == 0, "the child's has moved");
    expect(AllAre(map, bytes, 's'), "ours has not");
    AnyCall();
    expect(AllAre(map, bytes, 'c'), "but does");
  } else if (how == "again") {
    LetItBeCopied(path);
    const int other = open(path.c_str(), O_RDONLY);
    const auto* const copy =
        static_cast<char*>(mmap(nullptr, bytes, PROT_READ, MAP_SHARED, other, 0));
    expect(copy != MAP_FAILED && AllAre(copy, bytes, 'c'), "the copy is mapped");
  }
  std::printf("%d wrong\n", wrong);
  return wrong;
}

int main(int argc, char** argv) {
  const std::map<std::string, int (*)(const Arguments&)> all = {
      {"read", Read},        {"stat", Stat},           {"fstat", FstatOf},   {"exec", Exec},
      {"change", Change},    {"around", ChangeAround}, {"threads", Threads}, {"signals", Signals},
      {"fill", Fill},        {"range", Range},         {"large", Large},     {"numbers", Numbers},
      {"bad", Bad},          {"keep", Keep},           {"stream", StreamOf}, {"mapping", MappingOf},
      {"small", SmallStack}, {"cancel", Cancel},       {"links", LinkByCall}};
  if (argc < 3) return 2;
  const auto found = all.find(argv[1]);
  if (found == all.end()) return 2;
  return found->second(Arguments(argv + 2, argv + argc));
}
