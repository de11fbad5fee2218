#include "source/wake_fd.h"

#include <sys/epoll.h>
#include <sys/timerfd.h>

#include <algorithm>
#include <cerrno>
#include <utility>

namespace forebay {

WakeFd::WakeFd(OwnedFd epoll, OwnedFd timer) : epoll_(std::move(epoll)), timer_(std::move(timer)) {}

Result<WakeFd> WakeFd::Make() {
  OwnedFd epoll(epoll_create1(EPOLL_CLOEXEC));
  if (!epoll.valid()) return ErrnoStatus(errno, "epoll_create1");
  OwnedFd timer(timerfd_create(CLOCK_MONOTONIC, TFD_CLOEXEC | TFD_NONBLOCK));
  if (!timer.valid()) return ErrnoStatus(errno, "timerfd_create");
  WakeFd wake(std::move(epoll), std::move(timer));
  FOREBAY_RETURN_IF_ERROR(wake.Watch(wake.timer_.get()));
  return wake;
}

Status WakeFd::Watch(int fd) {
  epoll_event event{};
  event.events = EPOLLIN;
  event.data.fd = fd;
  if (epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, fd, &event) != 0) {
    return ErrnoStatus(errno, "epoll_ctl");
  }
  return Status();
}

void WakeFd::SetTime(Nanos due) {
  if (due == due_) return;
  due_ = due;
  itimerspec when{};
  if (due != kNever) {
    // All zero would disarm it.
    const Nanos at = std::max<Nanos>(due, 1);
    when.it_value.tv_sec = at / kSecond;
    when.it_value.tv_nsec = at % kSecond;
  }
  // Cannot fail with a valid descriptor and time. Setting also forgets an expiry nobody has read.
  timerfd_settime(timer_.get(), TFD_TIMER_ABSTIME, &when, nullptr);
}

}  // namespace forebay
