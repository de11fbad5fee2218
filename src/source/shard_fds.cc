#include "source/shard_fds.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <condition_variable>
#include <deque>
#include <thread>
#include <utility>
#include <vector>

#include "base/thread.h"
#include "base/thread_annotations.h"
#include "base/trusted_files.h"

namespace forebay {
namespace {

// Opens waiting at one time. Access that visits more shards than fit would otherwise queue opens
// whose descriptors nobody uses any more.
constexpr size_t kMaxRequests = 16;

// Of `fd`, or of what `path` leads to. An open has just brought the attributes of its descriptor; a
// path is asked for as a program's stat() would, so what the kernel still believes counts.
bool HasVersion(int fd, const char* path, const FileVersion& version) {
  struct statx st = {};
  const int flags = fd >= 0 ? AT_EMPTY_PATH | AT_STATX_DONT_SYNC : AT_STATX_SYNC_AS_STAT;
  if (statx(fd >= 0 ? fd : AT_FDCWD, fd >= 0 ? "" : path, flags, STATX_SIZE | STATX_MTIME, &st) !=
      0) {
    return false;
  }
  return version ==
         FileVersion{.bytes = st.stx_size,
                     .modified_ns = st.stx_mtime.tv_sec * kSecond + st.stx_mtime.tv_nsec};
}

}  // namespace

class ShardFds::Opener {
 public:
  struct Request {
    ObjectId object = 0;
    std::string path;
    FileVersion version;
    bool looks = false;  // only whether the path still leads to this version
  };
  struct Opened {
    ObjectId object = 0;
    bool looked = false;
    bool same = false;  // it is the version that was asked for
    OwnedFd fd = {};
    int error = 0;
  };

  // The thread shares it, and ends it where it is the last. False: no thread to be had now.
  static bool Start(const std::shared_ptr<Opener>& self) {
    auto started = StartThread<std::thread>("forebay-open", [self] { self->Run(); });
    if (started) started->detach();
    return started.has_value();
  }

  // The thread closes these, and whatever it has opened, and ends. It is not waited for: an open()
  // below a mount that hangs would keep the caller.
  void Stop(std::vector<OwnedFd> fds) EXCLUDES(mutex_) {
    MutexLock lock(mutex_);
    for (OwnedFd& fd : fds) closing_.push_back(std::move(fd));
    requests_.clear();
    stopping_ = true;
    wake_.notify_one();
  }

  void Ask(Request request) EXCLUDES(mutex_) {
    MutexLock lock(mutex_);
    requests_.push_back(std::move(request));
    wake_.notify_one();
  }

  void Close(OwnedFd fd) EXCLUDES(mutex_) {
    MutexLock lock(mutex_);
    closing_.push_back(std::move(fd));
    wake_.notify_one();
  }

  std::vector<Opened> TakeOpened() EXCLUDES(mutex_) {
    if (!has_opened_.load(std::memory_order_acquire)) return {};
    MutexLock lock(mutex_);
    has_opened_.store(false, std::memory_order_relaxed);
    return std::exchange(opened_, {});
  }

 private:
  void Run() {
    while (true) {
      Request request;
      std::vector<OwnedFd> closing;
      bool opens = false;
      {
        MutexLock lock(mutex_);
        while (requests_.empty() && closing_.empty() && !stopping_) wake_.wait(lock.native());
        if (stopping_ && closing_.empty()) return;
        closing.swap(closing_);
        opens = !requests_.empty();
        if (opens) {
          request = std::move(requests_.front());
          requests_.pop_front();
        }
      }
      closing.clear();  // before the open, which may need the descriptors
      if (!opens) continue;
      Opened opened{.object = request.object, .looked = request.looks};
      if (!request.looks) {
        opened.fd = OpenRegularFile(request.path.c_str());
        opened.error = opened.fd.valid() ? 0 : errno;
      }
      if (opened.error == 0) {
        opened.same = HasVersion(opened.fd.get(), request.path.c_str(), request.version);
      }
      if (!opened.same) opened.fd.Reset();
      MutexLock lock(mutex_);
      opened_.push_back(std::move(opened));
      // Pairs with the acquire in TakeOpened, which then finds the entry under the mutex.
      has_opened_.store(true, std::memory_order_release);
    }
  }

  Mutex mutex_;
  std::condition_variable wake_;
  std::deque<Request> requests_ GUARDED_BY(mutex_);
  std::vector<OwnedFd> closing_ GUARDED_BY(mutex_);
  std::vector<Opened> opened_ GUARDED_BY(mutex_);
  std::atomic<bool> has_opened_ = false;
  bool stopping_ GUARDED_BY(mutex_) = false;
};

ShardFds::ShardFds(size_t max_open, Nanos look_every)
    : max_open_(max_open), look_every_(look_every), creator_(getpid()) {}

ShardFds::~ShardFds() {
  if (opener_ == nullptr) return;
  if (getpid() != creator_) {
    // The thread is the parent's, and may have held the lock at the fork.
    (void)new std::shared_ptr<Opener>(std::move(opener_));
    return;
  }
  std::vector<OwnedFd> open;
  open.reserve(open_.size());
  for (auto& [object, entry] : open_) open.push_back(std::move(entry.fd));
  opener_->Stop(std::move(open));
}

int ShardFds::Acquire(ObjectId object, const std::string& path, const FileVersion& version) {
  TakeOpened();
  if (const auto found = open_.find(object); found != open_.end()) {
    Entry& entry = found->second;
    if (entry.forgotten) return -1;
    LookAgain(object, entry, path, version);
    ++entry.users;
    recent_.splice(recent_.begin(), recent_, entry.place);
    return entry.fd.get();
  }
  if (requested_.size() < kMaxRequests && StartOpener() && requested_.insert(object).second) {
    opener_->Ask({.object = object, .path = path, .version = version});
  }
  return -1;
}

void ShardFds::LookAgain(ObjectId object, Entry& entry, const std::string& path,
                         const FileVersion& version) {
  if (entry.looking || SteadyClock().Now() - entry.looked < look_every_) return;
  entry.looking = true;  // so there is at most one such request for each that is open
  opener_->Ask({.object = object, .path = path, .version = version, .looks = true});
}

bool ShardFds::StartOpener() {
  if (opener_) return true;
  auto opener = std::make_shared<Opener>();
  if (!Opener::Start(opener)) return false;  // reads go on by path
  opener_ = std::move(opener);
  return true;
}

void ShardFds::Release(ObjectId object) {
  const auto found = open_.find(object);
  if (--found->second.users == 0 && found->second.forgotten) Erase(found);
}

void ShardFds::Forget(ObjectId object) {
  const auto found = open_.find(object);
  if (found == open_.end()) return;
  found->second.forgotten = true;
  if (found->second.users == 0) Erase(found);
}

void ShardFds::Shrink() {
  for (size_t target = open_.size() / 2; open_.size() > target;) {
    if (!EvictOne()) return;
  }
}

void ShardFds::TakeOpened() {
  if (!opener_) return;
  for (Opener::Opened& opened : opener_->TakeOpened()) {
    if (opened.looked) {
      const auto found = open_.find(opened.object);
      if (found == open_.end()) continue;  // closed meanwhile
      found->second.looking = false;
      found->second.looked = SteadyClock().Now();
      if (!opened.same) Forget(opened.object);
      continue;
    }
    requested_.erase(opened.object);
    if (opened.error == EMFILE || opened.error == ENFILE) Shrink();
    // Whoever reads by path meets the other errors and reports them.
    if (!opened.fd.valid()) continue;
    if (open_.size() >= max_open_ && !EvictOne()) {
      opener_->Close(std::move(opened.fd));
      continue;
    }
    recent_.push_front(opened.object);
    open_.emplace(
        opened.object,
        Entry{.fd = std::move(opened.fd), .looked = SteadyClock().Now(), .place = recent_.begin()});
  }
}

bool ShardFds::EvictOne() {
  for (auto object = recent_.rbegin(); object != recent_.rend(); ++object) {
    const auto found = open_.find(*object);
    if (found->second.users > 0) continue;
    Erase(found);
    return true;
  }
  return false;
}

void ShardFds::Erase(std::unordered_map<ObjectId, Entry>::iterator entry) {
  opener_->Close(std::move(entry->second.fd));
  recent_.erase(entry->second.place);
  open_.erase(entry);
}

}  // namespace forebay
