// EntryGuard: one thread at a time inside an iterator's next().
#include <chrono>
#include <condition_variable>
#include <memory>
#include <mutex>

#include "base/fork.h"
#include "common.h"
#include "leaving.h"

namespace forebay::python {
namespace {

// The fields are guarded by the GIL, but for Waiters.
class EntryGuard {
 public:
  // Waits until no other thread is inside; Ctrl-C is seen. A thread that is inside already is told
  // so by false, and must leave once more.
  bool Enter() {
    if (made_ != ForkGeneration()) *this = EntryGuard();  // the parent's threads are not here
    CountConsumer();
    if (EndAwaited()) WaitUnlocked();
    const unsigned long self = PyThread_get_thread_ident();
    while (depth_ > 0 && owner_ != self) {
      const std::shared_ptr<Waiters> waiters = waiters_;
      uint64_t seen = 0;
      {
        std::lock_guard lock(waiters->mutex);
        seen = waiters->left;
      }
      {
        WaitUnlocked unlocked;
        std::unique_lock lock(waiters->mutex);
        waiters->changed.wait_for(lock, std::chrono::milliseconds(50),
                                  [&] { return waiters->left != seen; });
      }
      if (SignalRaised()) throw nb::python_error();
    }
    owner_ = self;
    return ++depth_ == 1;
  }

  // Does nothing where this thread is not inside.
  void Leave() {
    if (made_ != ForkGeneration() || !inside() || --depth_ > 0) return;
    {
      std::lock_guard lock(waiters_->mutex);
      ++waiters_->left;
    }
    waiters_->changed.notify_one();
  }

  bool inside() const { return depth_ > 0 && owner_ == PyThread_get_thread_ident(); }

 private:
  struct Waiters {
    std::mutex mutex;
    std::condition_variable changed;
    uint64_t left = 0;  // how often a thread has left; guarded by `mutex`
  };

  uint64_t made_ = ForkGeneration();
  unsigned long owner_ = 0;
  int depth_ = 0;
  std::shared_ptr<Waiters> waiters_ = std::make_shared<Waiters>();  // shared with those who wait
};

}  // namespace

void BindEntryGuard(nb::module_& m) {
  nb::class_<EntryGuard>(m, "EntryGuard", "One thread at a time inside an iterator's next().")
      .def(nb::init<>())
      .def("enter", &EntryGuard::Enter,
           "Waits until no other thread is inside; False when this one is already.")
      .def_prop_rw(
          "inside", &EntryGuard::inside,
          [](EntryGuard& self, bool inside) {
            if (!inside) self.Leave();
          },
          "Whether this thread is. Set to False to leave: unlike a call, an assignment is not "
          "followed by signal handlers.");
}

}  // namespace forebay::python
