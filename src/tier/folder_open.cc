// Opening a folder whose disk may hang.
#include <fcntl.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <condition_variable>
#include <functional>
#include <optional>
#include <string>
#include <utility>

#include "base/clock.h"
#include "base/thread.h"
#include "base/thread_annotations.h"
#include "tier/folder_log.h"
#include "tier/folder_tier.h"

namespace forebay {
namespace {

using Opened = Result<std::shared_ptr<FolderStore>>;

// What comes of a thread of its own, which may never come back.
template <typename T>
struct Outcome {
  Mutex mutex;
  std::condition_variable_any came;
  std::optional<T> value GUARDED_BY(mutex);

  bool Wait(Nanos at_most) {
    MutexLock lock(mutex);
    return came.wait_for(lock.native(), std::chrono::nanoseconds(at_most),
                         [this]() NO_THREAD_SAFETY_ANALYSIS { return value.has_value(); });
  }
  T Take() {
    const MutexLock lock(mutex);
    return *std::move(value);
  }
};

template <typename T>
Result<std::shared_ptr<Outcome<T>>> Begin(const char* name, std::function<T()> call) {
  auto outcome = std::make_shared<Outcome<T>>();
  auto thread = StartThread<std::thread>(name, [outcome, call = std::move(call)] {
    T value = call();
    const MutexLock lock(outcome->mutex);
    outcome->value = std::move(value);
    outcome->came.notify_all();
  });
  if (!thread) return thread.error();
  thread->detach();
  return outcome;
}

}  // namespace

// The folder, and of its log what memory can be made to forget.
void FolderStore::Look(const std::string& path) {
  constexpr int kFolder = O_RDONLY | O_DIRECTORY | O_CLOEXEC | O_NONBLOCK;
  OwnedFd folder(open(path.c_str(), kFolder));
  std::string above = path;
  while (!folder.valid() && errno == ENOENT && above.rfind('/') > 0 &&
         above.rfind('/') != std::string::npos) {
    above.resize(above.rfind('/'));
    folder = OwnedFd(open(above.c_str(), kFolder));
  }
  if (!folder.valid()) return;
  std::array<char, 4096> page;
  (void)syscall(SYS_getdents64, folder.get(), page.data(), page.size());
  const OwnedFd log(
      openat(folder.get(), FolderLog::kName, O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK));
  if (!log.valid()) return;
  (void)posix_fadvise(log.get(), 0, page.size(), POSIX_FADV_DONTNEED);
  (void)!pread(log.get(), page.data(), page.size(), 0);
}

// Opening may take long where a killed run has left many files, so it is not the time it takes that
// tells: others are asked of the disk while it takes long.
Result<std::shared_ptr<FolderStore>> FolderStore::OpenUnlessHung(const FolderTierOptions& options,
                                                                 Nanos patience) {
  FOREBAY_RETURN_IF_ERROR(options.Validate());
  const auto opening = Begin<Opened>("forebay-folder", [options] { return Open(options); });
  if (!opening) return opening.error();
  const Nanos usual = std::min(patience, kSecond);
  while (!(*opening)->Wait(usual)) {
    const Nanos asked = SteadyClock().Now();
    const auto look = Begin<bool>("forebay-look", [path = options.folder] {
      Look(path);
      return true;
    });
    if (!look) return look.error();
    while (!(*look)->Wait(usual / 10)) {
      if ((*opening)->Wait(0)) break;
      if (SteadyClock().Now() - asked >= patience) return std::shared_ptr<FolderStore>();
    }
  }
  return (*opening)->Take();
}

}  // namespace forebay
