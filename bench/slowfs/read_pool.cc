#include "slowfs/read_pool.h"

#include <signal.h>

#include <utility>

namespace forebay::slowfs {
namespace {

// Enough to keep a disk busy.
constexpr int kThreads = 16;

}  // namespace

void ReadPool::Run(std::function<void()> read) {
  {
    MutexLock lock(mutex_);
    reads_.push_back(std::move(read));
    if (threads_.empty()) {
      // Signals are for the main thread.
      sigset_t all, before;
      sigfillset(&all);
      pthread_sigmask(SIG_SETMASK, &all, &before);
      for (int i = 0; i < kThreads; ++i) threads_.emplace_back([this] { Work(); });
      pthread_sigmask(SIG_SETMASK, &before, nullptr);
    }
  }
  changed_.notify_one();
}

void ReadPool::Close() {
  std::vector<std::jthread> threads;
  {
    MutexLock lock(mutex_);
    closing_ = true;
    threads.swap(threads_);
  }
  changed_.notify_all();
}

void ReadPool::Work() {
  while (true) {
    std::function<void()> read;
    {
      MutexLock lock(mutex_);
      while (reads_.empty()) {
        if (closing_) return;
        changed_.wait(lock.native());
      }
      read = std::move(reads_.front());
      reads_.pop_front();
    }
    read();
  }
}

}  // namespace forebay::slowfs
