// One mutex guards the queue, the completions and the idle workers. A worker that finishes
// publishes its completion and takes the next op in one critical section, so a busy pool never
// sleeps.
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
  void Clear() { size_ = 0; }

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

int CheckVersion(int fd, const FileVersion& expected, Completion& done) {
  // Not the time of access: the read has just changed it, and a file system that is far away would
  // be asked for it.
  struct statx st = {};
  if (statx(fd, "", AT_EMPTY_PATH, STATX_SIZE | STATX_MTIME, &st) != 0) return errno;
  const FileVersion found{.bytes = st.stx_size,
                          .modified_ns = st.stx_mtime.tv_sec * kSecond + st.stx_mtime.tv_nsec};
  done.changed = found != expected;
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
  }
  if (fd >= 0) done.error = ReadFully(fd, op, waste, done);
  if (op.version && done.error == 0) done.error = CheckVersion(fd, *op.version, done);
  done.latency_ns = SteadyClock().Now() - start;
  Checksum(op, done);
  return done;
}

class Pool {
 public:
  Pool(size_t capacity, int event_fd)
      : capacity_(capacity), event_fd_(event_fd), queue_(capacity), done_(capacity) {
    workers_.reserve(capacity);
    idle_.reserve(capacity);
  }

  ~Pool() {
    {
      MutexLock lock(mutex_);
      stopping_ = true;
      queue_.Clear();
      for (Worker* worker : idle_) worker->wake.notify_one();
    }
    workers_.clear();
  }

  // One worker always exists, so that every accepted op makes progress.
  Status StartFirst() {
    MutexLock lock(mutex_);
    const int error = StartWorker();
    return error == 0 ? Status() : ErrnoStatus(error, "start a reader thread");
  }

  size_t Submit(std::span<const ReadOp> ops) {
    MutexLock lock(mutex_);
    const size_t taken = std::min(ops.size(), capacity_ - in_flight_);
    for (const ReadOp& op : ops.first(taken)) queue_.Push(op);
    in_flight_ += taken;
    WakeWorkers();
    return taken;
  }

  size_t Reap(std::span<Completion> out) {
    MutexLock lock(mutex_);
    const size_t taken = std::min(out.size(), done_.size());
    for (size_t i = 0; i < taken; ++i) out[i] = done_.Pop();
    in_flight_ -= taken;
    if (taken > 0 && done_.empty()) {
      uint64_t count;
      [[maybe_unused]] const ssize_t n = read(event_fd_, &count, sizeof count);
    }
    return taken;
  }

 private:
  struct Worker {
    Pool* pool = nullptr;
    std::condition_variable wake;
    bool idle = false;  // guarded by the pool's mutex
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
    OwnedFd opened;
    std::vector<std::byte> waste;
    while (true) {
      std::optional<ReadOp> op = Exchange(finished);
      opened.Reset();
      if (!op) op = WaitForOp(self);
      if (!op) return;
      finished = Execute(*op, waste, opened);
    }
  }

  // Publishes a completion, if any, and takes the next op, if any.
  std::optional<ReadOp> Exchange(const std::optional<Completion>& finished) EXCLUDES(mutex_) {
    MutexLock lock(mutex_);
    if (finished) {
      done_.Push(*finished);
      // Written with the lock held: the eventfd is readable exactly while completions wait.
      if (done_.size() == 1) {
        const uint64_t one = 1;
        [[maybe_unused]] const ssize_t n = write(event_fd_, &one, sizeof one);
      }
    }
    return TakeOp();
  }

  // Nothing when the pool is closing.
  std::optional<ReadOp> WaitForOp(Worker& self) EXCLUDES(mutex_) {
    MutexLock lock(mutex_);
    while (queue_.empty() && !stopping_) {
      self.idle = true;
      idle_.push_back(&self);
      while (self.idle && !stopping_) self.wake.wait(lock.native());
      if (!self.idle) --waking_;
    }
    return TakeOp();
  }

  std::optional<ReadOp> TakeOp() REQUIRES(mutex_) {
    if (queue_.empty() || stopping_) return std::nullopt;
    const ReadOp op = queue_.Pop();
    WakeWorkers();
    return op;
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
      } else if (workers_.size() == capacity_ || StartWorker() != 0) {
        return;  // those that run will take what waits
      }
    }
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

  const size_t capacity_;
  const int event_fd_;

  Mutex mutex_;
  Ring<ReadOp> queue_ GUARDED_BY(mutex_);
  Ring<Completion> done_ GUARDED_BY(mutex_);
  size_t in_flight_ GUARDED_BY(mutex_) = 0;  // accepted and not reaped
  std::vector<Worker*> idle_ GUARDED_BY(mutex_);
  size_t waking_ GUARDED_BY(mutex_) = 0;  // woken or started, and not yet at the queue
  bool stopping_ GUARDED_BY(mutex_) = false;
  // Grows under the mutex; emptied by the destructor once stopping_ forbids growth.
  std::vector<std::unique_ptr<Worker>> workers_;
};

class ThreadLoop final : public Loop {
 public:
  ThreadLoop(size_t capacity, OwnedFd event_fd)
      : capacity_(capacity),
        event_fd_(std::move(event_fd)),
        pool_(std::make_unique<Pool>(capacity, event_fd_.get())) {}

  ~ThreadLoop() override {
    // The threads are the parent's, and one of them may have held the mutex at the fork.
    if (getpid() != creator_) (void)pool_.release();
  }

  Status Start() { return pool_->StartFirst(); }
  size_t Submit(std::span<const ReadOp> ops) override { return pool_->Submit(ops); }
  size_t Reap(std::span<Completion> out) override { return pool_->Reap(out); }
  int event_fd() const override { return event_fd_.get(); }
  size_t capacity() const override { return capacity_; }
  const char* name() const override { return "threads"; }

 private:
  const size_t capacity_;
  const pid_t creator_ = getpid();
  const OwnedFd event_fd_;
  std::unique_ptr<Pool> pool_;
};

}  // namespace

Result<std::unique_ptr<Loop>> MakeThreadLoop(const LoopOptions& options) {
  FOREBAY_RETURN_IF_ERROR(options.Validate());
  OwnedFd event_fd(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (!event_fd.valid()) return ErrnoStatus(errno, "eventfd");
  auto loop = std::make_unique<ThreadLoop>(options.max_in_flight, std::move(event_fd));
  FOREBAY_RETURN_IF_ERROR(loop->Start());
  return std::unique_ptr<Loop>(std::move(loop));
}

}  // namespace forebay
