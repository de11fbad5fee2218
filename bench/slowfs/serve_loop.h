// ServeLoop: one thread that takes requests from the kernel and sends answers when they are due.
//
// Both in one thread, because waking threads is most of what a request costs: at 300 MB/s in files
// of 110 KiB a file takes 130 us of processor time, and 195 us with a thread for requests and one
// for answers (normal priority, 2 cores). No thread sleeps for a single request, so hundreds in
// flight cost a heap entry each.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "base/clock.h"
#include "base/owned.h"
#include "base/status.h"
#include "base/thread_annotations.h"
#include "slowfs/counters.h"
#include "slowfs/inode_table.h"
#include "slowfs/reply.h"

namespace forebay::slowfs {

class ServeLoop {
 public:
  // Both must outlive the loop.
  static Result<std::unique_ptr<ServeLoop>> Make(InodeTable& inodes, Counters& counters);

  // Runs in the calling thread until the session ends. Returns 0, or an errno value. The session's
  // descriptor must not block.
  int Run(fuse_session* session);

  // Sends `reply` at `due`. Safe for concurrent use by multiple threads.
  void Push(Nanos due, std::unique_ptr<Reply> reply);
  // Makes Run look whether the session has ended. Safe for concurrent use by multiple threads.
  void Wake();
  // Sends whatever still waits, at once. Not while Run runs.
  void SendAll();

  // The loop that runs, or ran last, in the calling thread; null if there was none.
  static ServeLoop* Current();

 private:
  struct Waiting {
    Nanos due;
    uint64_t sequence;  // equal due times leave in order of arrival
    std::unique_ptr<Reply> reply;
  };

  ServeLoop(InodeTable& inodes, Counters& counters, OwnedFd epoll, OwnedFd wake)
      : inodes_(inodes), counters_(counters), epoll_(std::move(epoll)), wake_(std::move(wake)) {}

  static bool Later(const Waiting& a, const Waiting& b);
  // Sends what is due and returns when the next one is, kLongestWait from now at most.
  Nanos SendDue();
  void Sleep(Nanos until);

  InodeTable& inodes_;
  Counters& counters_;
  const OwnedFd epoll_;
  const OwnedFd wake_;

  Mutex mutex_;
  std::vector<Waiting> heap_ GUARDED_BY(mutex_);
  uint64_t pushed_ GUARDED_BY(mutex_) = 0;
};

}  // namespace forebay::slowfs
