#include "files/read_progress.h"

#include <dirent.h>
#include <fcntl.h>
#include <unistd.h>

#include <array>
#include <charconv>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "base/owned.h"
#include "base/status.h"

namespace forebay::files {
namespace {

constexpr size_t kMostProcesses = 256;
constexpr size_t kMostThreads = 64;  // of a process, that are looked at for forks

std::string Contents(const std::string& path) {
  const OwnedFd file(open(path.c_str(), O_RDONLY | O_CLOEXEC));
  std::array<char, 4096> out;
  const ssize_t n = file.valid() ? read(file.get(), out.data(), out.size()) : 0;
  return n > 0 ? std::string(out.data(), static_cast<size_t>(n)) : std::string();
}

uint64_t NumberAt(std::string_view text, size_t at) {
  while (at < text.size() && (text[at] == ' ' || text[at] == '\t')) ++at;
  uint64_t number = 0;
  if (at < text.size()) (void)std::from_chars(&text[at], text.data() + text.size(), number);
  return number;
}

// What follows `name` in lines of "name number".
uint64_t NumberOf(std::string_view text, std::string_view name) {
  const size_t at = text.find(name);
  return at == std::string_view::npos ? 0 : NumberAt(text, at + name.size());
}

// Faults that waited for storage; `alive` is false for one that has ended.
uint64_t Faults(std::string_view stat, bool* alive) {
  constexpr int kFields = 9;  // from the state, which follows the name in brackets
  size_t at = stat.rfind(')');
  *alive = at != std::string_view::npos && at + 2 < stat.size() && stat[at + 2] != 'Z' &&
           stat[at + 2] != 'X';
  if (!*alive) return 0;
  at += 2;
  for (int i = 0; i < kFields && at != std::string_view::npos; ++i) at = stat.find(' ', at + 1);
  return at == std::string_view::npos ? 0 : NumberAt(stat, at);
}

void AddForked(const std::string& folder, std::vector<pid_t>* out) {
  const std::string threads = folder + "/task";
  const std::unique_ptr<DIR, int (*)(DIR*)> list(opendir(threads.c_str()), closedir);
  if (list == nullptr) return;
  for (size_t n = 0; n < kMostThreads;) {
    const dirent* const found = readdir(list.get());
    if (found == nullptr) return;
    if (found->d_name[0] == '.') continue;
    ++n;
    const std::string forked = Contents(StrCat(threads, "/", found->d_name, "/children"));
    const char* at = forked.data();
    const char* const end = at + forked.size();
    while (at < end && out->size() < kMostProcesses) {
      pid_t process = 0;
      const auto parsed = std::from_chars(at, end, process);
      if (parsed.ec != std::errc()) break;
      out->push_back(process);
      at = parsed.ptr + 1;
    }
  }
}

uint64_t Mixed(uint64_t sum, uint64_t value) {
  return (sum ^ value) * 0x9E3779B97F4A7C15 + (sum >> 29);
}

}  // namespace

ReadProgress MappingProgress(pid_t process) {
  std::vector<pid_t> all = {process};
  uint64_t sum = 0;
  uint64_t bytes = 0;
  for (size_t i = 0; i < all.size(); ++i) {
    const std::string folder = StrCat("/proc/", all[i]);
    bool alive = false;
    const uint64_t faults = Faults(Contents(folder + "/stat"), &alive);
    if (!alive && i == 0) return {};
    if (!alive) continue;
    sum = Mixed(sum, static_cast<uint64_t>(all[i]));
    sum = Mixed(sum, faults);
    const uint64_t resident = NumberOf(Contents(folder + "/status"), "RssFile:") << 10;
    bytes += resident;
    sum = Mixed(sum, resident);
    AddForked(folder, &all);
  }
  return {.mark = sum | 1, .bytes = bytes};
}

ReadProgress DescriptorProgress(pid_t process, int64_t fd) {
  const std::string text = Contents(StrCat("/proc/", process, "/fdinfo/", fd));
  if (text.empty()) return {};
  return {.mark = NumberOf(text, "pos:") + 1, .bytes = 0};
}

}  // namespace forebay::files
