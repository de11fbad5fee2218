// DiskCalls: calls on the cache's disk for a thread that others wait for. A thread of their own
// makes them, in their order; one that hangs in one keeps nobody, and is left behind in the end.
#pragma once

#include <functional>
#include <memory>
#include <utility>

#include "base/clock.h"
#include "base/status.h"

namespace forebay::files {

// Confined to one thread.
class DiskCalls {
 public:
  // What is waited for a call at most, once: while it hangs, nothing is.
  static constexpr Nanos kPatience = kSecond / 2;

  static Result<std::unique_ptr<DiskCalls>> Start(Nanos patience = kPatience);
  DiskCalls(const DiskCalls&) = delete;
  DiskCalls& operator=(const DiskCalls&) = delete;
  // A call that hangs still ends one day: it must own what it needs.
  ~DiskCalls();

  // Makes the call after those before it, and waits until at most `left` of all have not been made.
  // False: the disk hangs, and it may be made later.
  bool Make(std::function<void()> call, size_t left = 0) {
    return Make(std::move(call), left, patience_);
  }
  bool Make(std::function<void()> call, size_t left, Nanos patience);
  // There are some that have not been made.
  bool busy() const;
  // Drops the calls that have not begun. False: one hangs.
  bool Drop();
  // As Drop(); no further ones are made.
  bool Close();

 private:
  struct State;
  DiskCalls(std::shared_ptr<State> state, Nanos patience)
      : patience_(patience), state_(std::move(state)) {}

  const Nanos patience_;
  const std::shared_ptr<State> state_;  // shared with the thread, which may outlive this
};

}  // namespace forebay::files
