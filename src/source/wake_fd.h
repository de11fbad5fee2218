// WakeFd: one pollable descriptor for several causes: other descriptors, and a time.
#pragma once

#include "base/clock.h"
#include "base/owned.h"
#include "base/status.h"

namespace forebay {

// Not safe for concurrent use.
class WakeFd {
 public:
  static constexpr Nanos kNever = -1;

  static Result<WakeFd> Make();

  // Readable whenever `fd` is; `fd` must stay open as long as this does.
  Status Watch(int fd);
  // Readable from `due` (of SteadyClock) on, until the next call. kNever: only the watched ones
  // count.
  void SetTime(Nanos due);

  int get() const { return epoll_.get(); }

 private:
  WakeFd(OwnedFd epoll, OwnedFd timer);

  OwnedFd epoll_;
  OwnedFd timer_;
  Nanos due_ = kNever;
};

}  // namespace forebay
