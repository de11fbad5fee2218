// Loads libforebay_ucx.so when the first transport is made, so that a process without peers has
// nothing of UCX in it.
#include <dlfcn.h>
#include <signal.h>
#include <unistd.h>

#include <climits>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "base/thread_annotations.h"
#include "transport/transport.h"
#include "transport/ucx_library.h"

namespace forebay {
namespace {

constexpr char kName[] = "libforebay_ucx.so";
constexpr char kFirstName[] = "libforebay_ucx_first.so";

// Beside the module or program that this code is in, or above it (libforebay.so is in lib/).
std::vector<std::string> Places() {
  if (const char* given = std::getenv("FOREBAY_UCX_LIBRARY"); given != nullptr) return {given};
  std::vector<std::string> places;
  Dl_info info{};
  if (dladdr(reinterpret_cast<const void*>(&UcxVersion), &info) != 0 && info.dli_fname != nullptr) {
    std::string file = info.dli_fname;
    // A program's name is what it was started as, which need not say where it lies.
    char self[PATH_MAX];
    const ssize_t n = file.starts_with('/') ? -1 : readlink("/proc/self/exe", self, sizeof self);
    if (n > 0) file.assign(self, static_cast<size_t>(n));
    const size_t slash = file.rfind('/');
    const std::string folder = slash == std::string::npos ? "." : file.substr(0, slash);
    places.push_back(StrCat(folder, "/", kName));
    places.push_back(StrCat(folder, "/../", kName));
  }
  places.push_back(kName);
  return places;
}

// UCX handles SIGSEGV and others as soon as it is loaded. Those signals are the program's.
class KeepSignals {
 public:
  KeepSignals() {
    ::sigaltstack(nullptr, &stack_);
    for (int i = 1; i < kSignals; ++i) known_[i] = ::sigaction(i, nullptr, &actions_[i]) == 0;
  }
  ~KeepSignals() {
    for (int i = 1; i < kSignals; ++i) {
      struct sigaction now {};
      if (known_[i] && ::sigaction(i, nullptr, &now) == 0 &&
          now.sa_sigaction != actions_[i].sa_sigaction) {
        ::sigaction(i, &actions_[i], nullptr);
      }
    }
    ::sigaltstack(&stack_, nullptr);
  }

 private:
  static constexpr int kSignals = 32;  // the real-time ones are nobody's
  stack_t stack_{};
  bool known_[kSignals] = {};
  struct sigaction actions_[kSignals] = {};
};

// Keeps UCX from rewriting libc's code, unless somebody asks for that; false: it will.
bool LoadFirst(const std::string& place) {
  if (std::getenv("UCX_MEM_EVENTS") != nullptr) return false;
  const size_t slash = place.rfind('/');
  const std::string first =
      slash == std::string::npos ? kFirstName : place.substr(0, slash + 1) + kFirstName;
  // UCX's lowest library names functions of the next one, which is not there yet.
  void* const handle = dlopen(first.c_str(), RTLD_LAZY | RTLD_LOCAL | RTLD_NODELETE);
  if (handle == nullptr) return false;
  const auto tell = reinterpret_cast<UcxFirst>(dlsym(handle, kUcxFirst));
  if (tell == nullptr) return false;
  tell();
  return true;
}

Result<const UcxLibrary*> Load() {
  static Mutex mutex;
  static const UcxLibrary* loaded = nullptr;
  MutexLock lock(mutex);
  if (loaded != nullptr) return loaded;
  // Another library may use UCX in this process, in its own way.
  void* const before = dlopen("libucs.so.0", RTLD_LAZY | RTLD_NOLOAD);
  const bool shared = before != nullptr;
  if (shared) dlclose(before);
  const KeepSignals keep;
  std::string why;
  for (const std::string& place : Places()) {
    const bool told = !shared && LoadFirst(place);
    // Never unloaded: UCX has threads and exit handlers of its own.
    void* const handle = dlopen(place.c_str(), RTLD_NOW | RTLD_LOCAL | RTLD_NODELETE);
    if (handle == nullptr) {
      const char* const error = dlerror();
      // The first one that is there but does not load says why: UCX is not installed.
      if (why.empty() || std::strstr(why.c_str(), kName) != nullptr) {
        why = error != nullptr ? error : place;
      }
      continue;
    }
    const auto entry = reinterpret_cast<UcxEntry>(dlsym(handle, kUcxEntry));
    const UcxLibrary* const library = entry != nullptr ? entry() : nullptr;
    if (library == nullptr || std::strcmp(library->build, kUcxBuild) != 0) {
      return Status(Code::kUnavailable, StrCat(place, " is of another build of Forebay"));
    }
    if (!shared) library->quiet(told);
    loaded = library;
    return loaded;
  }
  return Status(Code::kUnavailable,
                StrCat("UCX cannot be used (", why,
                       "); install libucx0, and a Forebay that was built where libucx-dev is"));
}

}  // namespace

Result<std::unique_ptr<Transport>> MakeUcxTransport(const TransportOptions& options,
                                                    TransportHandler& handler) {
  FOREBAY_RETURN_IF_ERROR(options.Validate());
  const Result<const UcxLibrary*> library = Load();
  if (!library) return library.error();
  return (*library)->make(options, handler);
}

Result<std::string> UcxVersion() {
  const Result<const UcxLibrary*> library = Load();
  if (!library) return library.error();
  return (*library)->version();
}

}  // namespace forebay
