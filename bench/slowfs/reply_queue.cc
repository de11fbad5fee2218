#include "slowfs/reply_queue.h"

#include <signal.h>
#include <sys/prctl.h>

#include <algorithm>
#include <chrono>
#include <utility>

namespace forebay::slowfs {
namespace {

// Two: while one copies an answer into the kernel, which takes about 20 us for 128 KiB, the other
// answers what falls due meanwhile.
constexpr int kThreads = 2;
constexpr Nanos kCopyTime = 20 * kMicro;

template <typename... Visitors>
struct Overload : Visitors... {
  using Visitors::operator()...;
};
template <typename... Visitors>
Overload(Visitors...) -> Overload<Visitors...>;

}  // namespace

void Send(Reply& reply, InodeTable& inodes) {
  const fuse_req_t request = reply.request;
  std::visit(Overload{
                 [&](ErrorReply& body) { fuse_reply_err(request, body.error); },
                 [&](EntryReply& body) {
                   if (fuse_reply_entry(request, &body.entry) != 0 && body.entry.ino != 0) {
                     inodes.Forget(body.entry.ino, 1);
                   }
                 },
                 [&](AttrReply& body) { fuse_reply_attr(request, &body.attr, body.timeout_s); },
                 [&](OpenReply& body) {
                   // From the answer on the kernel may release the handle in another thread.
                   const int fd = body.fd.Release();
                   body.info.fh = static_cast<uint64_t>(fd);
                   if (fuse_reply_open(request, &body.info) != 0) OwnedFd closes(fd);
                 },
                 [&](DataReply& body) { fuse_reply_buf(request, body.data.get(), body.size); },
                 [&](StatfsReply& body) { fuse_reply_statfs(request, &body.info); },
                 [&](LinkReply& body) { fuse_reply_readlink(request, body.target.c_str()); },
             },
             reply.body);
}

bool ReplyQueue::Later(const Waiting& a, const Waiting& b) {
  return a.due != b.due ? a.due > b.due : a.sequence > b.sequence;
}

void ReplyQueue::Start() {
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  for (int i = 0; i < kThreads; ++i) threads_.emplace_back([this] { Run(); });
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

void ReplyQueue::Push(Nanos due, std::unique_ptr<Reply> reply) {
  bool earliest = false;
  {
    MutexLock lock(mutex_);
    const uint64_t sequence = pushed_++;
    heap_.push_back({due, sequence, std::move(reply)});
    std::push_heap(heap_.begin(), heap_.end(), Later);
    earliest = heap_.front().sequence == sequence;
    if (earliest) leader_ = {};
  }
  if (earliest) changed_.notify_one();
}

void ReplyQueue::Close() {
  {
    MutexLock lock(mutex_);
    closing_ = true;
  }
  changed_.notify_all();
  threads_.clear();
}

void ReplyQueue::Run() {
  // The default slack lets the kernel wake a sleeper 50 us late.
  prctl(PR_SET_TIMERSLACK, 1);
  const std::thread::id self = std::this_thread::get_id();
  while (true) {
    Waiting next;
    Nanos now = 0;
    {
      MutexLock lock(mutex_);
      while (true) {
        if (heap_.empty()) {
          if (closing_) return;
          changed_.wait(lock.native());
          continue;
        }
        now = SteadyClock().Now();
        const Nanos due = heap_.front().due;
        if (due <= now || closing_) break;
        if (leader_ != std::thread::id()) {
          changed_.wait(lock.native());
          continue;
        }
        leader_ = self;
        changed_.wait_until(lock.native(),
                            std::chrono::steady_clock::time_point(std::chrono::nanoseconds(due)));
        if (leader_ == self) leader_ = {};
      }
      std::pop_heap(heap_.begin(), heap_.end(), Later);
      next = std::move(heap_.back());
      heap_.pop_back();
      if (leader_ == std::thread::id() && !heap_.empty() && heap_.front().due < now + kCopyTime) {
        changed_.notify_one();
      }
    }
    counters_.End(std::max<Nanos>(0, now - next.due));
    Send(*next.reply, inodes_);
  }
}

}  // namespace forebay::slowfs
