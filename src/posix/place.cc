#include "posix/place.h"

#include <fcntl.h>
#include <stdlib.h>
#include <sys/stat.h>

#include <atomic>
#include <cerrno>
#include <cstring>

#include "files/raw_call.h"
#include "posix/memory.h"

namespace forebay::posix {
namespace {

using files::RawArgument;
using files::RawCall;

constinit files::Client client;
constinit std::atomic<bool> off = true;
constinit std::atomic<int> own_process = 0;
// Whether a relative path can lie in a data folder.
constinit std::atomic<bool> folder_matters = true;

// Whether an absolute path may lie below a normal one. It is compared up to where the two part:
// there, "//" and "/." leave it open.
bool MayBeBelow(const char* path, const char* source, size_t length) {
  if (length == 1) return true;
  const size_t i = files::SameBytes(path, source, length);
  if (i == length) return path[i] == '/' || path[i] == 0;
  return i > 0 && path[i - 1] == '/' && (path[i] == '/' || path[i] == '.');
}

bool Related(std::string_view folder) {
  for (const char* at = client.sources(); *at != 0;) {
    const std::string_view source(at);
    if (files::IsBelow(folder, source) || files::IsBelow(source, folder)) return true;
    at += source.size() + 1;
  }
  return false;
}

size_t WorkingFolder(char (&out)[kMostPath]) {
  const long length = RawCall(SYS_getcwd, RawArgument(out), sizeof(out));
  return length > 1 && out[0] == '/' ? static_cast<size_t>(length - 1) : 0;
}

size_t ReadLinkOf(int fd, char (&out)[kMostPath]) {
  char name[32] = "/proc/self/fd/";
  char digits[12];
  size_t count = 0;
  for (auto left = static_cast<unsigned>(fd); left > 0 || count == 0; left /= 10) {
    digits[count++] = static_cast<char>('0' + left % 10);
  }
  char* at = name + std::strlen(name);
  while (count > 0) *at++ = digits[--count];
  *at = 0;
  const long length =
      RawCall(SYS_readlinkat, AT_FDCWD, RawArgument(name), RawArgument(out), sizeof(out) - 1);
  if (length <= 0 || out[0] != '/') return 0;
  out[length] = 0;
  return static_cast<size_t>(length);
}

size_t RealOf(int folder, const char* path, int flags, char (&out)[kMostPath]) {
  const long fd = RawCall(SYS_openat, folder, RawArgument(path), O_PATH | O_CLOEXEC | flags, 0);
  if (fd < 0) return 0;
  const size_t length = ReadLinkOf(static_cast<int>(fd), out);
  RawCall(SYS_close, fd);
  return length;
}

// Of another, nothing is known: neither which files it shows, nor which of ours it changes.
bool SameNamespace(const char* wanted) {
  if (wanted == nullptr || wanted[0] == 0) return true;
  char found[64];
  const long length = RawCall(SYS_readlinkat, AT_FDCWD, RawArgument("/proc/self/ns/mnt"),
                              RawArgument(found), sizeof(found));
  return length <= 0 || std::string_view(found, static_cast<size_t>(length)) == wanted;
}

bool SameTime(const timespec& a, const timespec& b) {
  return a.tv_sec == b.tv_sec && a.tv_nsec == b.tv_nsec;
}

bool Good(long got, files::Identity* out) {
  return got >= 0 && files::CheckIdentity(static_cast<size_t>(got), out);
}

}  // namespace

void StartPlace() {
  own_process.store(static_cast<int>(RawCall(SYS_getpid)), std::memory_order_relaxed);
  if (!SameNamespace(getenv(files::kNamespaceVariable))) return;
  if (client.Start(getenv(files::kCacheVariable), getenv(files::kSocketVariable),
                   getenv(files::kSourcesVariable), getenv(files::kJobVariable))) {
    FolderChanged();
    off.store(false, std::memory_order_release);
  }
}

const files::Client& TheClient() { return client; }

bool MayBeInside(int folder, const char* path) {
  // As much as is compared here, with what follows it.
  if (off.load(std::memory_order_acquire) || !StringReadable(path, client.longest_source() + 2)) {
    return false;
  }
  if (path[0] == '/') {
    const char* at = client.sources();
    for (size_t n = 0; n < client.source_count(); at += client.source_length(n) + 1, ++n) {
      if (MayBeBelow(path, at, client.source_length(n))) return client.on();
    }
    return false;
  }
  if (path[0] == 0) return false;
  if (folder == AT_FDCWD && !folder_matters.load(std::memory_order_relaxed)) return false;
  return client.on();
}

namespace {

// In calls of their own, here and below: paths lie on the stack, and a program may have little.
[[gnu::noinline]] std::string_view InsideOnceNormal(int folder, std::string_view text,
                                                    char (&room)[kMostPath]) {
  // A folder, or an error that only libc can give.
  if (text.ends_with('/') || text.ends_with("/.") || text == ".") return {};
  size_t length = 0;
  if (text.starts_with('/')) {
    length = files::NormalPath({}, text, room, sizeof(room));
  } else {
    char base[kMostPath];
    const size_t base_length = folder == AT_FDCWD ? WorkingFolder(base) : ReadLinkOf(folder, base);
    if (base_length == 0) return {};
    length = files::NormalPath({base, base_length}, text, room, sizeof(room));
  }
  const std::string_view normal(room, length);
  return length > 0 && client.Covers(normal) ? normal : std::string_view();
}

[[gnu::noinline]] bool ComparesEqual(int fd, const char* path) {
  files::Identity identity;
  struct stat now {};
  if (IdentityOfCopy(fd, &identity) &&
      RawCall(SYS_newfstatat, AT_FDCWD, RawArgument(path), RawArgument(&now), 0) == 0 &&
      now.st_size == identity.stat.st_size && SameTime(now.st_mtim, identity.stat.st_mtim) &&
      SameTime(now.st_ctim, identity.stat.st_ctim)) {
    return true;
  }
  client.FileChanged(path);
  return false;
}

}  // namespace

std::string_view Inside(int folder, const char* path, char (&room)[kMostPath]) {
  const size_t size = PathLength(path);
  if (size == kUnreadable) return {};
  const std::string_view text(path, size);
  if (client.Plainly(text)) [[likely]]
    return text;
  return InsideOnceNormal(folder, text, room);
}

void FolderChanged() {
  char folder[kMostPath];
  const size_t length = WorkingFolder(folder);
  const bool matters = length == 0 || Related({folder, length});
  // The child of a vfork has a working folder of its own, and this variable is its parent's.
  if (!matters && RawCall(SYS_getpid) != own_process.load(std::memory_order_relaxed)) return;
  folder_matters.store(matters, std::memory_order_relaxed);
}

void RootChanged() { off.store(true, std::memory_order_release); }

size_t PathOf(int fd, char (&out)[kMostPath]) { return ReadLinkOf(fd, out); }

size_t RealPath(int folder, const char* path, bool follow, char (&out)[kMostPath]) {
  if (!PathReadable(path) || path[0] == 0) return 0;
  if (follow) return RealOf(folder, path, 0, out);
  std::string_view text(path);
  while (text.size() > 1 && text.back() == '/') text.remove_suffix(1);
  const size_t slash = text.rfind('/');
  const bool has_folder = slash != std::string_view::npos;
  const std::string_view name(text.data() + (has_folder ? slash + 1 : 0),
                              text.size() - (has_folder ? slash + 1 : 0));
  char above[kMostPath];
  const size_t above_length = has_folder ? slash + 1 : 1;  // with its slash, so "/" is one, too
  if (name.empty() || name == "." || name == ".." || above_length >= sizeof(above)) return 0;
  std::memcpy(above, has_folder ? text.data() : ".", above_length);
  above[above_length] = 0;
  size_t length = RealOf(folder, above, O_DIRECTORY, out);
  if (length == 0 || length + name.size() + 2 > sizeof(out)) return 0;
  if (out[length - 1] != '/') out[length++] = '/';
  std::memcpy(out + length, name.data(), name.size());
  length += name.size();
  out[length] = 0;
  return length;
}

bool Concerns(std::string_view real, bool tree) {
  if (real.empty() || off.load(std::memory_order_acquire) || !client.on()) return false;
  return client.Covers(real) || client.Knows(real) || (tree && Related(real));
}

bool IdentityOf(int fd, files::Identity* out) {
  struct stat stat {};
  if (RawCall(SYS_fstat, fd, RawArgument(&stat)) != 0 || !files::MayBeCopy(stat.st_mode)) {
    return false;
  }
  return IdentityOfCopy(fd, out);
}

bool IdentityOfCopy(int fd, files::Identity* out) {
  return Good(
      RawCall(SYS_fgetxattr, fd, RawArgument(files::kIdentityName), RawArgument(out), sizeof(*out)),
      out);
}

const char* PathOfSource(int folder, const char* path, files::Identity* room) {
  if (off.load(std::memory_order_acquire) || !StringReadable(path, 8) ||
      (std::strncmp(path, "/proc/", 6) != 0 && std::strncmp(path, "/dev/", 5) != 0)) {
    return path;
  }
  struct stat stat {};
  if (RawCall(SYS_newfstatat, folder, RawArgument(path), RawArgument(&stat), 0) != 0 ||
      !files::MayBeCopy(stat.st_mode) ||
      !Good(RawCall(SYS_getxattr, RawArgument(path), RawArgument(files::kIdentityName),
                    RawArgument(room), sizeof(*room)),
            room)) {
    return path;
  }
  return room->path;
}

bool Starts(char* const* variables) {
  bool preloads = false;
  bool knows = false;
  constexpr std::string_view kPreload = "LD_PRELOAD=";
  constexpr size_t kMostVariable = 128 << 10;  // Linux's own bound
  for (; variables != nullptr; ++variables) {
    // The kernel refuses what cannot be read.
    if (!Readable(variables, sizeof(*variables))) return false;
    if (*variables == nullptr) break;
    if (StringLength(*variables, kMostVariable) == kUnreadable) return false;
    const std::string_view variable(*variables);
    preloads = preloads || (variable.starts_with(kPreload) &&
                            variable.find("libforebay_posix") != std::string_view::npos);
    knows = knows || (variable.starts_with(files::kCacheVariable) &&
                      variable[std::strlen(files::kCacheVariable)] == '=');
  }
  if (!preloads || !knows) client.SetUnwatched();
  return preloads;
}

bool IsCurrent(int fd, const char* path) { return !client.unwatched() || ComparesEqual(fd, path); }

bool IdentityAt(std::string_view path, bool follow, files::Identity* out) {
  if (client.unwatched()) return false;
  char copy[files::Client::kMostCopyPath];
  if (!client.CopyPath(path, copy, sizeof(copy))) return false;
  return Good(RawCall(follow ? SYS_getxattr : SYS_lgetxattr, RawArgument(copy),
                      RawArgument(files::kIdentityName), RawArgument(out), sizeof(*out)),
              out);
}

}  // namespace forebay::posix
