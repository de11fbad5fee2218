// One mutex a pool guards the queue, the loops' completions and the idle workers. A worker that
// finishes publishes its completion and takes the next op, of whichever loop, in one critical
// section, so a busy pool never sleeps.
//
// Wake-ups chain: Submit wakes a few workers, and each that gets an op wakes more while ops wait.
// When storage is slow the chain reaches every worker within a fraction of one read; when reads are
// page cache copies the few that run empty the queue first, and the others stay asleep.
#include <fcntl.h>
#include <pthread.h>
#include <sys/eventfd.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "base/clock.h"
#include "base/owned.h"
#include "base/thread.h"
#include "base/thread_annotations.h"
#include "base/trusted_files.h"
#include "io/loop.h"
#include "io/scatter.h"

namespace forebay {
namespace {

// glibc carves thread-local storage out of the stack, and a Python process has a lot of it; the
// workers themselves need less than 12 KiB.
constexpr size_t kStackBytes = 128 * 1024;

// Workers that are woken or being started at one time. With 8, all of 64 sleeping workers are
// inside their open() within 1 ms; waking all at once is no faster and switches contexts more.
constexpr size_t kMaxWaking = 8;

// A joining owner of a thread with a small stack, which std::jthread cannot give.
class SmallThread {
 public:
  SmallThread() = default;
  SmallThread(const SmallThread&) = delete;
  SmallThread& operator=(const SmallThread&) = delete;
  ~SmallThread() {
    if (running_) pthread_join(thread_, nullptr);
  }

  // Returns 0 or an errno value.
  int Start(void* (*entry)(void*), void* argument) {
    const SignalsBlocked blocked;
    pthread_attr_t attributes;
    pthread_attr_init(&attributes);
    pthread_attr_setstacksize(&attributes, kStackBytes);
    int error = pthread_create(&thread_, &attributes, entry, argument);
    // EINVAL: thread-local storage alone is larger than the stack asked for.
    if (error == EINVAL) error = pthread_create(&thread_, nullptr, entry, argument);
    pthread_attr_destroy(&attributes);
    running_ = error == 0;
    if (running_) pthread_setname_np(thread_, "forebay-io");
    return error;
  }

 private:
  pthread_t thread_{};
  bool running_ = false;
};

// First in, first out, with room fixed at construction.
template <typename T>
class Ring {
 public:
  explicit Ring(size_t capacity) : items_(capacity) {}
  size_t size() const { return size_; }
  bool empty() const { return size_ == 0; }
  void Push(const T& item) {
    items_[(head_ + size_) % items_.size()] = item;
    ++size_;
  }
  T Pop() {
    T item = items_[head_];
    head_ = (head_ + 1) % items_.size();
    --size_;
    return item;
  }

 private:
  std::vector<T> items_;
  size_t head_ = 0;
  size_t size_ = 0;
};

// Reads until the range is full, the file ends or an error. A read that fills it exactly although
// one byte more was asked for has met the end: asking again would cost a request on every file.
int ReadFully(int fd, const ReadOp& op, std::vector<std::byte>& waste, Completion& done) {
  std::byte beyond{};
  std::array<iovec, kMostVectors + 1> vectors;
  const uint64_t range = RangeBytes(op);
  if (!op.parts.empty()) waste.resize(kWasteBytes);
  while (done.bytes < range || (op.expect_end && range == 0)) {
    uint64_t wanted = 0;
    size_t count = Vectors(op, done.bytes, waste, std::span(vectors).first(kMostVectors), wanted);
    if (op.expect_end) vectors[count++] = {&beyond, 1};
    const ssize_t n = preadv(fd, vectors.data(), static_cast<int>(count),
                             static_cast<off_t>(op.offset + done.bytes));
    if (n < 0) {
      if (errno == EINTR) continue;
      return errno;
    }
    if (n == 0) break;
    const auto got = static_cast<uint64_t>(n);
    done.longer = got > wanted;
    done.bytes += std::min(got, wanted);
    if (done.longer) break;
  }
  return 0;
}

// Before the read: bytes that are younger than they are said to be do no harm.
int64_t ChangeTime(int fd) {
  struct statx st = {};
  if (statx(fd, "", AT_EMPTY_PATH | AT_STATX_DONT_SYNC, STATX_CTIME, &st) != 0) return 0;
  return st.stx_ctime.tv_sec * kSecond + st.stx_ctime.tv_nsec;
}

int CheckVersion(int fd, const ReadOp& op, Completion& done) {
  const int known = op.fd < 0 || op.just_opened ? AT_STATX_DONT_SYNC : AT_STATX_SYNC_AS_STAT;
  // Not the time of access: the read has just changed it.
  struct statx st = {};
  if (statx(fd, "", AT_EMPTY_PATH | known, STATX_SIZE | STATX_MTIME, &st) != 0) return errno;
  const FileVersion found{.bytes = st.stx_size,
                          .modified_ns = st.stx_mtime.tv_sec * kSecond + st.stx_mtime.tv_nsec};
  done.changed = found != *op.version;
  return 0;
}

// `opened` receives the descriptor to close once the completion is published: closing may cost a
// round trip to the storage, and nobody needs to wait for it.
Completion Execute(const ReadOp& op, std::vector<std::byte>& waste, OwnedFd& opened) {
  Completion done{.tag = op.tag};
  const Nanos start = SteadyClock().Now();
  int fd = op.fd;
  if (fd < 0) {
    opened = OpenRegularFile(op.path);
    fd = opened.get();
    if (fd < 0) done.error = errno;
    if (fd >= 0 && op.change_time) done.change_time_ns = ChangeTime(fd);
  }
  if (fd >= 0) done.error = ReadFully(fd, op, waste, done);
  if (op.version && done.error == 0) done.error = CheckVersion(fd, op, done);
  done.latency_ns = SteadyClock().Now() - start;
  Checksum(op, done);
  return done;
}

}  // namespace

// What one loop has in the pool. All of it is guarded by the pool's mutex.
struct ReaderChannel {
  ReaderChannel(size_t most, int fd) : capacity(most), event_fd(fd), done(most) {}
  const size_t capacity;
  const int event_fd;
  Ring<Completion> done;
  size_t in_flight = 0;  // accepted and not reaped
  size_t running = 0;    // in a worker's hands
  std::condition_variable idle;
};

class ReaderPool {
 public:
  explicit ReaderPool(const ReaderPoolOptions& options)
      : threads_(options.threads), stuck_after_(options.stuck_after) {
    workers_.reserve(2 * threads_);
    idle_.reserve(2 * threads_);
  }

  // Its loops are gone, and their ops with them.
  ~ReaderPool() {
    {
      MutexLock lock(mutex_);
      stopping_ = true;
      for (Worker* worker : idle_) worker->wake.notify_one();
    }
    workers_.clear();
  }

  // In a forked child the threads are the parent's, and one of them may have held the mutex at the
  // fork: there it is left alone.
  struct Delete {
    void operator()(ReaderPool* pool) const {
      if (getpid() == pool->creator_) delete pool;
    }
  };

  // One worker always exists, so that every accepted op makes progress.
  Status StartFirst() {
    MutexLock lock(mutex_);
    const int error = StartWorker();
    return error == 0 ? Status() : ErrnoStatus(error, "start a reader thread");
  }

  size_t Submit(ReaderChannel& channel, std::span<const ReadOp> ops) {
    MutexLock lock(mutex_);
    const size_t taken = std::min(ops.size(), channel.capacity - channel.in_flight);
    for (const ReadOp& op : ops.first(taken)) queue_.push_back({op, &channel});
    channel.in_flight += taken;
    WakeWorkers();
    return taken;
  }

  size_t Reap(ReaderChannel& channel, std::span<Completion> out) {
    MutexLock lock(mutex_);
    const size_t taken = std::min(out.size(), channel.done.size());
    for (size_t i = 0; i < taken; ++i) out[i] = channel.done.Pop();
    channel.in_flight -= taken;
    if (taken > 0 && channel.done.empty()) {
      uint64_t count;
      [[maybe_unused]] const ssize_t n = read(channel.event_fd, &count, sizeof count);
    }
    WakeWorkers();  // some may have become stuck since
    return taken;
  }

  // Discards what no worker has begun and waits for the rest.
  void Leave(ReaderChannel& channel) {
    MutexLock lock(mutex_);
    std::erase_if(queue_, [&](const Task& task) { return task.channel == &channel; });
    while (channel.running > 0) channel.idle.wait(lock.native());
  }

 private:
  struct Task {
    ReadOp op;
    ReaderChannel* channel = nullptr;
  };
  struct Worker {
    ReaderPool* pool = nullptr;
    std::condition_variable wake;
    // Guarded by the pool's mutex.
    bool idle = false;
    Nanos since = -1;  // inside an op; -1: in none
    SmallThread thread;
  };

  static void* Enter(void* argument) {
    Worker* self = static_cast<Worker*>(argument);
    self->pool->Run(*self);
    return nullptr;
  }

  void Run(Worker& self) EXCLUDES(mutex_) {
    {
      MutexLock lock(mutex_);
      --waking_;
    }
    std::optional<Completion> finished;
    std::optional<Task> task;
    OwnedFd opened;
    std::vector<std::byte> waste;
    while (true) {
      task = Exchange(self, task, finished);
      opened.Reset();
      if (!task) task = WaitForTask(self);
      if (!task) return;
      finished = Execute(task->op, waste, opened);
    }
  }

  // Publishes the completion of `ended`, if any, and takes the next task, if any.
  std::optional<Task> Exchange(Worker& self, const std::optional<Task>& ended,
                               const std::optional<Completion>& finished) EXCLUDES(mutex_) {
    MutexLock lock(mutex_);
    if (ended) {
      ReaderChannel& channel = *ended->channel;
      channel.done.Push(*finished);
      // Written with the lock held: the eventfd is readable exactly while completions wait.
      if (channel.done.size() == 1) {
        const uint64_t one = 1;
        [[maybe_unused]] const ssize_t n = write(channel.event_fd, &one, sizeof one);
      }
      if (--channel.running == 0) channel.idle.notify_all();
      self.since = -1;
    }
    return TakeTask(self);
  }

  // Nothing when the pool is closing.
  std::optional<Task> WaitForTask(Worker& self) EXCLUDES(mutex_) {
    MutexLock lock(mutex_);
    while (queue_.empty() && !stopping_) {
      self.idle = true;
      idle_.push_back(&self);
      while (self.idle && !stopping_) self.wake.wait(lock.native());
      if (!self.idle) --waking_;
    }
    return TakeTask(self);
  }

  std::optional<Task> TakeTask(Worker& self) REQUIRES(mutex_) {
    if (queue_.empty() || stopping_) return std::nullopt;
    const Task task = queue_.front();
    queue_.pop_front();
    ++task.channel->running;
    self.since = SteadyClock().Now();
    WakeWorkers();
    return task;
  }

  void WakeWorkers() REQUIRES(mutex_) {
    while (waking_ < std::min(queue_.size(), kMaxWaking)) {
      if (!idle_.empty()) {
        // The one that slept last: its stack and its core's caches are warm.
        Worker* worker = idle_.back();
        idle_.pop_back();
        worker->idle = false;
        ++waking_;
        worker->wake.notify_one();
      } else if (!MayStart() || StartWorker() != 0) {
        return;  // those that run will take what waits
      }
    }
  }

  // All of them is as many as storage that hangs may hold: then it is told by who waits for it.
  bool MayStart() REQUIRES(mutex_) {
    if (workers_.size() < threads_ + stuck_) return true;
    if (workers_.size() >= 2 * threads_) return false;
    const Nanos now = SteadyClock().Now();
    if (now < look_at_) return false;
    look_at_ = now + stuck_after_ / 8;
    stuck_ = static_cast<size_t>(
        std::count_if(workers_.begin(), workers_.end(), [&](const std::unique_ptr<Worker>& worker) {
          return worker->since >= 0 && now - worker->since >= stuck_after_;
        }));
    stuck_ = std::min(stuck_, threads_);
    return workers_.size() < threads_ + stuck_;
  }

  int StartWorker() REQUIRES(mutex_) {
    auto worker = std::make_unique<Worker>();
    worker->pool = this;
    const int error = worker->thread.Start(&Enter, worker.get());
    if (error != 0) return error;
    ++waking_;
    workers_.push_back(std::move(worker));
    return 0;
  }

  const size_t threads_;
  const Nanos stuck_after_;
  const pid_t creator_ = getpid();

  Mutex mutex_;
  std::deque<Task> queue_ GUARDED_BY(mutex_);  // as many as the loops accept
  std::vector<Worker*> idle_ GUARDED_BY(mutex_);
  size_t waking_ GUARDED_BY(mutex_) = 0;  // woken or started, and not yet at the queue
  size_t stuck_ GUARDED_BY(mutex_) = 0;   // at the last look
  Nanos look_at_ GUARDED_BY(mutex_) = 0;
  bool stopping_ GUARDED_BY(mutex_) = false;
  // Grows under the mutex; emptied by the destructor once stopping_ forbids growth.
  std::vector<std::unique_ptr<Worker>> workers_;
};

namespace {

class ThreadLoop final : public Loop {
 public:
  ThreadLoop(std::shared_ptr<ReaderPool> pool, size_t capacity, OwnedFd event_fd)
      : event_fd_(std::move(event_fd)),
        pool_(std::move(pool)),
        channel_(std::make_unique<ReaderChannel>(capacity, event_fd_.get())) {}

  ~ThreadLoop() override {
    if (getpid() == creator_) {
      pool_->Leave(*channel_);
      return;
    }
    (void)channel_.release();  // the parent's: a waiter may be in its condition variable
  }

  size_t Submit(std::span<const ReadOp> ops) override { return pool_->Submit(*channel_, ops); }
  size_t Reap(std::span<Completion> out) override { return pool_->Reap(*channel_, out); }
  int event_fd() const override { return event_fd_.get(); }
  size_t capacity() const override { return channel_->capacity; }
  const char* name() const override { return "threads"; }

 private:
  const pid_t creator_ = getpid();
  const OwnedFd event_fd_;
  const std::shared_ptr<ReaderPool> pool_;  // shared with the other loops on it
  std::unique_ptr<ReaderChannel> channel_;
};

}  // namespace

Result<std::shared_ptr<ReaderPool>> MakeReaderPool(const ReaderPoolOptions& options) {
  FOREBAY_RETURN_IF_ERROR(options.Validate());
  std::shared_ptr<ReaderPool> pool(new ReaderPool(options), ReaderPool::Delete());
  FOREBAY_RETURN_IF_ERROR(pool->StartFirst());
  return pool;
}

Result<std::unique_ptr<Loop>> MakeThreadLoopOn(std::shared_ptr<ReaderPool> pool,
                                               const LoopOptions& options) {
  FOREBAY_RETURN_IF_ERROR(options.Validate());
  OwnedFd event_fd(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (!event_fd.valid()) return ErrnoStatus(errno, "eventfd");
  return std::unique_ptr<Loop>(
      std::make_unique<ThreadLoop>(std::move(pool), options.max_in_flight, std::move(event_fd)));
}

Result<std::unique_ptr<Loop>> MakeThreadLoop(const LoopOptions& options) {
  FOREBAY_RETURN_IF_ERROR(options.Validate());
  Result<std::shared_ptr<ReaderPool>> pool = MakeReaderPool({.threads = options.max_in_flight});
  if (!pool) return pool.error();
  return MakeThreadLoopOn(*std::move(pool), options);
}

}  // namespace forebay
