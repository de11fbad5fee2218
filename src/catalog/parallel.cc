#include "catalog/parallel.h"

#include <algorithm>
#include <chrono>
#include <utility>

#include "base/thread.h"

namespace forebay {
namespace {

constexpr Nanos kTick = 100 * kMilli;

}  // namespace

WorkStack::~WorkStack() {
  std::vector<std::jthread> threads;
  {
    MutexLock lock(mutex_);
    closed_ = true;
    tasks_.clear();
    threads.swap(threads_);
  }
  stopping_.store(true, std::memory_order_relaxed);
  work_.notify_all();
}

void WorkStack::Push(Task task) {
  MutexLock lock(mutex_);
  if (!status_.ok() || closed_) return;
  tasks_.push_back(std::move(task));
  if (waiting_ >= tasks_.size() || threads_.size() >= max_threads_) {
    work_.notify_one();
    return;
  }
  // A lack of memory is found before there is a thread, which would be waited for with the lock
  // held.
  threads_.reserve(threads_.size() + 1);
  auto started = StartThread("forebay-scan", [this] { Work(); });
  if (started) {
    threads_.push_back(*std::move(started));
  } else if (threads_.empty()) {
    // Fewer threads than asked for only cost time; none at all would wait for ever.
    Fail(started.error());
  }
}

void WorkStack::Fail(Status status) {
  if (status_.ok()) status_ = std::move(status);
  tasks_.clear();
  stopping_.store(true, std::memory_order_relaxed);
}

void WorkStack::Work() {
  MutexLock lock(mutex_);
  while (true) {
    while (tasks_.empty() && !closed_) {
      ++waiting_;
      work_.wait(lock.native());
      --waiting_;
    }
    if (tasks_.empty()) return;
    Task task = std::move(tasks_.back());
    tasks_.pop_back();
    ++running_;
    lock.native().unlock();
    Status status = task();
    task = nullptr;
    lock.native().lock();
    --running_;
    if (!status.ok()) Fail(std::move(status));
    if (running_ == 0 && tasks_.empty()) idle_.notify_all();
  }
}

Status WorkStack::Drain(const std::function<bool()>& tick) {
  const auto cancelled = [&] { return tick && !tick(); };
  bool cancel = cancelled();
  MutexLock lock(mutex_);
  while (true) {
    if (cancel) Fail(Status(Code::kCancelled, "cancelled by the caller"));
    cancel = false;
    if (running_ == 0 && tasks_.empty()) return status_;
    if (idle_.wait_for(lock.native(), std::chrono::nanoseconds(kTick)) == std::cv_status::timeout &&
        status_.ok()) {
      lock.native().unlock();
      cancel = cancelled();
      lock.native().lock();
    }
  }
}

Status ParallelFor(size_t n, size_t threads, const std::function<Status(size_t)>& body,
                   const std::function<bool()>& tick) {
  std::atomic<size_t> next = 0;
  WorkStack work(threads);
  for (size_t t = 0; t < std::min(n, threads); ++t) {
    work.Push([&]() -> Status {
      for (size_t i = next++; i < n && !work.stopping(); i = next++) {
        FOREBAY_RETURN_IF_ERROR(body(i));
      }
      return Status();
    });
  }
  return work.Drain(tick);
}

bool Pace::Due() {
  const Nanos now = SteadyClock().Now();
  if (begun_ && now - last_ < kTick) return false;
  begun_ = true;
  last_ = now;
  return true;
}

}  // namespace forebay
