#include "source/shard_fds.h"

#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <condition_variable>
#include <deque>
#include <stop_token>
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

}  // namespace

class ShardFds::Opener {
 public:
  struct Opened {
    ObjectId object = 0;
    OwnedFd fd;
    int error = 0;
  };

  // False: no thread to be had now.
  bool Start() {
    auto started = StartThread("forebay-open", [this](const std::stop_token& stop) { Run(stop); });
    if (started) thread_ = *std::move(started);
    return started.has_value();
  }

  void Open(ObjectId object, std::string path) EXCLUDES(mutex_) {
    MutexLock lock(mutex_);
    requests_.emplace_back(object, std::move(path));
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
  void Run(const std::stop_token& stop) {
    while (true) {
      std::pair<ObjectId, std::string> request;
      std::vector<OwnedFd> closing;
      bool opens = false;
      {
        MutexLock lock(mutex_);
        wake_.wait(lock.native(), stop,
                   [this]() REQUIRES(mutex_) { return !requests_.empty() || !closing_.empty(); });
        if (stop.stop_requested()) return;
        closing.swap(closing_);
        opens = !requests_.empty();
        if (opens) {
          request = std::move(requests_.front());
          requests_.pop_front();
        }
      }
      closing.clear();  // before the open, which may need the descriptors
      if (!opens) continue;
      Opened opened{.object = request.first, .fd = OpenRegularFile(request.second.c_str())};
      opened.error = opened.fd.valid() ? 0 : errno;
      MutexLock lock(mutex_);
      opened_.push_back(std::move(opened));
      // Pairs with the acquire in TakeOpened, which then finds the entry under the mutex.
      has_opened_.store(true, std::memory_order_release);
    }
  }

  Mutex mutex_;
  std::condition_variable_any wake_;
  std::deque<std::pair<ObjectId, std::string>> requests_ GUARDED_BY(mutex_);
  std::vector<OwnedFd> closing_ GUARDED_BY(mutex_);
  std::vector<Opened> opened_ GUARDED_BY(mutex_);
  std::atomic<bool> has_opened_ = false;
  std::jthread thread_;
};

ShardFds::ShardFds(size_t max_open) : max_open_(max_open), creator_(getpid()) {}

ShardFds::~ShardFds() {
  // The thread is the parent's; there is nothing to join here.
  if (getpid() != creator_) (void)opener_.release();
}

int ShardFds::Acquire(ObjectId object, const std::string& path) {
  TakeOpened();
  if (const auto found = open_.find(object); found != open_.end()) {
    Entry& entry = found->second;
    if (entry.forgotten) return -1;
    ++entry.users;
    recent_.splice(recent_.begin(), recent_, entry.place);
    return entry.fd.get();
  }
  if (requested_.size() < kMaxRequests && StartOpener() && requested_.insert(object).second) {
    opener_->Open(object, path);
  }
  return -1;
}

bool ShardFds::StartOpener() {
  if (opener_) return true;
  auto opener = std::make_unique<Opener>();
  if (!opener->Start()) return false;  // reads go on by path
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
    requested_.erase(opened.object);
    if (opened.error == EMFILE || opened.error == ENFILE) Shrink();
    // Whoever reads by path meets the other errors and reports them.
    if (!opened.fd.valid()) continue;
    if (open_.size() >= max_open_ && !EvictOne()) {
      opener_->Close(std::move(opened.fd));
      continue;
    }
    recent_.push_front(opened.object);
    open_.emplace(opened.object, Entry{.fd = std::move(opened.fd), .place = recent_.begin()});
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
