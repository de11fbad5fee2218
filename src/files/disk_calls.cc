#include "files/disk_calls.h"

#include <chrono>
#include <condition_variable>
#include <deque>
#include <thread>
#include <utility>

#include "base/thread.h"
#include "base/thread_annotations.h"

namespace forebay::files {

struct DiskCalls::State {
  void Run() EXCLUDES(mutex);
  // Until at most `most` calls have not been made, or one hangs.
  bool AwaitLeft(MutexLock& lock, size_t most, Nanos patience) REQUIRES(mutex);

  Mutex mutex;
  std::condition_variable_any changed;
  std::deque<std::function<void()>> calls GUARDED_BY(mutex);
  size_t left GUARDED_BY(mutex) = 0;     // with the one that is being made
  bool hangs GUARDED_BY(mutex) = false;  // the one that is being made; it was waited for
  bool closed GUARDED_BY(mutex) = false;
};

void DiskCalls::State::Run() {
  while (true) {
    std::function<void()> call;
    {
      MutexLock lock(mutex);
      changed.wait(lock.native(),
                   [&]() NO_THREAD_SAFETY_ANALYSIS { return closed || !calls.empty(); });
      if (calls.empty()) return;
      call = std::move(calls.front());
      calls.pop_front();
    }
    call();
    call = nullptr;
    const MutexLock lock(mutex);
    --left;
    hangs = false;
    changed.notify_all();
  }
}

bool DiskCalls::State::AwaitLeft(MutexLock& lock, size_t most, Nanos patience) {
  const auto enough = [&]() NO_THREAD_SAFETY_ANALYSIS { return left <= most; };
  if (!hangs && !changed.wait_for(lock.native(), std::chrono::nanoseconds(patience), enough)) {
    hangs = true;
  }
  return left <= most;
}

Result<std::unique_ptr<DiskCalls>> DiskCalls::Start(Nanos patience) {
  const auto state = std::make_shared<State>();
  auto thread = StartThread<std::thread>("forebay-calls", [state] { state->Run(); });
  if (!thread) return thread.error();
  thread->detach();
  return std::unique_ptr<DiskCalls>(new DiskCalls(state, patience));
}

DiskCalls::~DiskCalls() { (void)Close(); }

bool DiskCalls::Make(std::function<void()> call, size_t left, Nanos patience) {
  MutexLock lock(state_->mutex);
  if (state_->closed) return false;
  state_->calls.push_back(std::move(call));
  ++state_->left;
  state_->changed.notify_all();
  return state_->AwaitLeft(lock, left, patience);
}

bool DiskCalls::busy() const {
  const MutexLock lock(state_->mutex);
  return state_->left > 0;
}

bool DiskCalls::Drop() {
  std::deque<std::function<void()>> dropped;  // outside of the lock
  MutexLock lock(state_->mutex);
  state_->left -= state_->calls.size();
  dropped.swap(state_->calls);
  return state_->AwaitLeft(lock, 0, patience_);
}

bool DiskCalls::Close() {
  {
    const MutexLock lock(state_->mutex);
    state_->closed = true;
    state_->changed.notify_all();
  }
  return Drop();
}

}  // namespace forebay::files
