#include "slowfs/serve_loop.h"

#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/prctl.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <utility>

namespace forebay::slowfs {
namespace {

// A signal that arrives just before the sleep is noticed after this.
constexpr Nanos kLongestWait = 200 * kMilli;

thread_local ServeLoop* current = nullptr;

}  // namespace

Result<std::unique_ptr<ServeLoop>> ServeLoop::Make(InodeTable& inodes, Counters& counters) {
  OwnedFd epoll(epoll_create1(EPOLL_CLOEXEC));
  OwnedFd wake(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  epoll_event event{};
  event.events = EPOLLIN;
  event.data.fd = wake.get();
  if (!epoll.valid() || !wake.valid() ||
      epoll_ctl(epoll.get(), EPOLL_CTL_ADD, wake.get(), &event) != 0) {
    return ErrnoStatus(errno, "make an event loop");
  }
  return std::unique_ptr<ServeLoop>(
      new ServeLoop(inodes, counters, std::move(epoll), std::move(wake)));
}

ServeLoop* ServeLoop::Current() { return current; }

bool ServeLoop::Later(const Waiting& a, const Waiting& b) {
  return a.due != b.due ? a.due > b.due : a.sequence > b.sequence;
}

int ServeLoop::Run(fuse_session* session) {
  current = this;
  // The default slack lets the kernel wake a sleeper 50 us late.
  prctl(PR_SET_TIMERSLACK, 1);
  epoll_event event{};
  event.events = EPOLLIN | EPOLLEXCLUSIVE;
  event.data.fd = fuse_session_fd(session);
  if (epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, fuse_session_fd(session), &event) != 0) return errno;

  fuse_buf request{};
  int error = 0;
  while (!fuse_session_exited(session)) {
    const Nanos next_due = SendDue();
    const int received = fuse_session_receive_buf(session, &request);
    if (received > 0) {
      fuse_session_process_buf(session, &request);
    } else if (received == -EAGAIN || received == -EINTR) {
      Sleep(next_due);
    } else if (received < 0) {
      error = -received;
      break;
    }
  }
  free(request.mem);
  fuse_session_exit(session);
  return error;
}

Nanos ServeLoop::SendDue() {
  while (true) {
    const Nanos now = SteadyClock().Now();
    Waiting next;
    {
      MutexLock lock(mutex_);
      if (heap_.empty()) return now + kLongestWait;
      if (heap_.front().due > now) return std::min(heap_.front().due, now + kLongestWait);
      std::pop_heap(heap_.begin(), heap_.end(), Later);
      next = std::move(heap_.back());
      heap_.pop_back();
    }
    counters_.End(now - next.due);
    Send(*next.reply, inodes_);
  }
}

void ServeLoop::Sleep(Nanos until) {
  const Nanos span = until - SteadyClock().Now();
  if (span <= 0) return;
  const timespec timeout{span / kSecond, span % kSecond};
  epoll_event event{};
  if (epoll_pwait2(epoll_.get(), &event, 1, &timeout, nullptr) == 1 &&
      event.data.fd == wake_.get()) {
    eventfd_t ignored = 0;
    eventfd_read(wake_.get(), &ignored);
  }
}

void ServeLoop::Push(Nanos due, std::unique_ptr<Reply> reply) {
  bool earliest = false;
  {
    MutexLock lock(mutex_);
    const uint64_t sequence = pushed_++;
    heap_.push_back({due, sequence, std::move(reply)});
    std::push_heap(heap_.begin(), heap_.end(), Later);
    earliest = heap_.front().sequence == sequence;
  }
  if (earliest && current != this) Wake();
}

void ServeLoop::Wake() { eventfd_write(wake_.get(), 1); }

void ServeLoop::SendAll() {
  MutexLock lock(mutex_);
  for (Waiting& waiting : heap_) {
    counters_.End(0);
    Send(*waiting.reply, inodes_);
  }
  heap_.clear();
}

}  // namespace forebay::slowfs
