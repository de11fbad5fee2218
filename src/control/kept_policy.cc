#include "control/kept_policy.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstdint>
#include <cstdio>
#include <cstdlib>

#include "base/trusted_files.h"

namespace forebay::control {
namespace {

constexpr size_t kLongest = size_t{1} << 20;
constexpr std::string_view kWhat = "state folder";

std::string Folder(const std::string& path) { return path.substr(0, path.rfind('/')); }
std::string Name(const std::string& path) { return path.substr(path.rfind('/') + 1); }

std::string Variable(const char* name) {
  const char* value = std::getenv(name);
  return value == nullptr ? "" : value;
}

Status WriteAll(int fd, std::string_view text) {
  while (!text.empty()) {
    const ssize_t n = write(fd, text.data(), text.size());
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) return ErrnoStatus(errno, "writing");
    text.remove_prefix(static_cast<size_t>(n));
  }
  return fsync(fd) == 0 ? Status() : ErrnoStatus(errno, "writing");
}

}  // namespace

Result<std::string> KeptPolicyPath(std::string_view place) {
  std::string folder;
  // The XDG specification says to ignore relative values.
  if (const std::string xdg = Variable("XDG_STATE_HOME"); !xdg.empty() && xdg.front() == '/') {
    folder = xdg + "/forebay";
  } else if (const std::string home = Variable("HOME"); !home.empty() && home.front() == '/') {
    folder = home + "/.local/state/forebay";
  } else {
    return Status(Code::kUnimplemented,
                  "no policy is kept: the environment has neither XDG_STATE_HOME nor HOME");
  }
  std::array<char, 256> host{};
  (void)gethostname(host.data(), host.size() - 1);
  uint64_t hash = 0xcbf29ce484222325ULL;  // FNV-1a
  for (const char c : StrCat(host.data(), "\n", place)) {
    hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001b3ULL;
  }
  std::array<char, 17> hex{};
  (void)std::snprintf(hex.data(), hex.size(), "%016llx", static_cast<unsigned long long>(hash));
  return StrCat(folder, "/policy-", hex.data(), ".json");
}

Result<std::string> ReadKeptPolicy(const std::string& path) {
  const Result<OwnedFd> folder = OpenPrivateFolder(Folder(path), kWhat, false);
  if (!folder) {
    if (folder.error().code() == Code::kNotFound) return std::string();
    return folder.error();
  }
  const OwnedFd file = OpenPrivateFile(folder->get(), Name(path).c_str(), O_RDONLY);
  if (!file.valid()) {
    if (errno == ENOENT) return std::string();
    return ErrnoStatus(errno, StrCat("reading the kept policy ", path,
                                     ", which is not this user's alone; remove it"));
  }
  std::string text;
  std::array<char, 4096> part;
  while (true) {
    const ssize_t n = read(file.get(), part.data(), part.size());
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) return ErrnoStatus(errno, StrCat("reading the kept policy ", path));
    if (n == 0) return text;
    text.append(part.data(), static_cast<size_t>(n));
    if (text.size() > kLongest) {
      return Status(Code::kDataLoss, StrCat(path, " is no policy; remove it"));
    }
  }
}

Status KeepPolicy(const std::string& path, std::string_view json) {
  const Result<OwnedFd> folder = OpenPrivateFolder(Folder(path), kWhat, !json.empty());
  if (!folder) {
    if (json.empty() && folder.error().code() == Code::kNotFound) return Status();
    return folder.error();
  }
  const std::string name = Name(path);
  if (json.empty()) {
    if (unlinkat(folder->get(), name.c_str(), 0) == 0 || errno == ENOENT) return Status();
    return ErrnoStatus(errno, StrCat("removing the kept policy ", path));
  }
  const std::string temporary = StrCat(name, ".", getpid());
  (void)unlinkat(folder->get(), temporary.c_str(), 0);  // of a process that died
  const OwnedFd file =
      OpenPrivateFile(folder->get(), temporary.c_str(), O_WRONLY | O_CREAT | O_EXCL);
  Status kept = file.valid() ? WriteAll(file.get(), json) : ErrnoStatus(errno, "writing");
  if (kept.ok() && renameat(folder->get(), temporary.c_str(), folder->get(), name.c_str()) != 0) {
    kept = ErrnoStatus(errno, "renaming");
  }
  if (kept.ok()) {
    (void)fsync(folder->get());
    return Status();
  }
  (void)unlinkat(folder->get(), temporary.c_str(), 0);
  return Status(kept.code(), StrCat("the policy is not kept in ", path, ": ", kept.message()));
}

}  // namespace forebay::control
