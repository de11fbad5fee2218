#include "catalog/paths.h"

#include <unistd.h>

#include <cerrno>
#include <climits>
#include <cstdlib>
#include <memory>

#include "base/clock.h"

namespace forebay {

Result<std::string> AbsolutePath(std::string_view path) {
  if (path.empty()) return Status(Code::kInvalidArgument, "the path is empty");
  if (path.find('\0') != std::string_view::npos) {
    return Status(Code::kInvalidArgument, "the path holds a NUL byte");
  }
  std::string full;
  if (path.front() != '/') {
    char cwd[PATH_MAX];
    if (::getcwd(cwd, sizeof cwd) == nullptr) {
      return ErrnoStatus(errno, StrCat("find the working folder to resolve ", path));
    }
    full = StrCat(cwd, "/");
  }
  full.append(path);
  std::string out;
  size_t at = 0;
  while (at < full.size()) {
    const size_t end = std::min(full.find('/', at), full.size());
    const std::string_view part = std::string_view(full).substr(at, end - at);
    if (!part.empty() && part != ".") out.append("/").append(part);
    at = end + 1;
  }
  return out.empty() ? "/" : out;
}

std::string RealPath(const std::string& path) {
  const std::unique_ptr<char, decltype(&std::free)> real(::realpath(path.c_str(), nullptr),
                                                         &std::free);
  return real == nullptr ? path : std::string(real.get());
}

std::string_view DirName(std::string_view path) {
  const size_t slash = path.rfind('/');
  if (slash == std::string_view::npos) return "";
  return slash == 0 ? path.substr(0, 1) : path.substr(0, slash);
}

std::string_view BaseName(std::string_view path) {
  const size_t slash = path.rfind('/');
  return slash == std::string_view::npos ? path : path.substr(slash + 1);
}

std::string JoinPath(std::string_view folder, std::string_view name) {
  if (folder.empty()) return std::string(name);
  if (name.empty()) return std::string(folder);
  return StrCat(folder, folder.back() == '/' ? "" : "/", name);
}

bool IsPathBelow(std::string_view path) {
  if (path.find('\0') != std::string_view::npos) return false;
  while (true) {
    const size_t end = std::min(path.find('/'), path.size());
    const std::string_view part = path.substr(0, end);
    if (part.empty() || part == "." || part == "..") return false;
    if (end == path.size()) return true;
    path.remove_prefix(end + 1);
  }
}

int64_t MtimeNs(const struct stat& st) {
  return static_cast<int64_t>(st.st_mtim.tv_sec) * kSecond + st.st_mtim.tv_nsec;
}

int64_t CtimeNs(const struct stat& st) {
  return static_cast<int64_t>(st.st_ctim.tv_sec) * kSecond + st.st_ctim.tv_nsec;
}

Status PathError(int error, const std::string& path) {
  if (error == ENOENT || error == ENOTDIR) {
    return Status(
        Code::kNotFound,
        StrCat(path, " does not exist; check the path, and that its storage is mounted here"));
  }
  return ErrnoStatus(error, StrCat("stat ", path));
}

}  // namespace forebay
