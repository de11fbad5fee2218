// Answers to the kernel, and the queue in which they wait until they are due.
//
// No thread sleeps for a single request: one thread waits for the earliest answer, so hundreds of
// requests in flight cost a heap entry each and no thread.
#pragma once

#define FUSE_USE_VERSION FUSE_MAKE_VERSION(3, 12)
#include <fuse_lowlevel.h>
#include <sys/statvfs.h>

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <thread>
#include <variant>
#include <vector>

#include "base/clock.h"
#include "base/owned.h"
#include "base/thread_annotations.h"
#include "slowfs/counters.h"
#include "slowfs/inode_table.h"

namespace forebay::slowfs {

struct ErrorReply {
  int error;  // 0: success, and nothing more to say
};
struct EntryReply {
  fuse_entry_param entry;
};
struct AttrReply {
  struct stat attr;
  double timeout_s;
};
struct OpenReply {
  fuse_file_info info;  // its fh becomes the number of `fd`
  OwnedFd fd;
};
struct DataReply {
  std::unique_ptr<char[]> data;
  size_t size;
};
struct StatfsReply {
  struct statvfs info;
};
struct LinkReply {
  std::string target;
};

struct Reply {
  fuse_req_t request;
  std::variant<ErrorReply, EntryReply, AttrReply, OpenReply, DataReply, StatfsReply, LinkReply>
      body;
};

// Answers the request. What the kernel does not take (the caller is gone) is released: descriptors
// are closed, lookups forgotten in `inodes`.
void Send(Reply& reply, InodeTable& inodes);

// Safe for concurrent use by multiple threads.
class ReplyQueue {
 public:
  // Both must outlive the queue.
  ReplyQueue(InodeTable& inodes, Counters& counters) : inodes_(inodes), counters_(counters) {}
  ~ReplyQueue() { Close(); }

  // Starts the threads that answer. Signals of the process are not delivered to them.
  void Start();
  void Push(Nanos due, std::unique_ptr<Reply> reply);
  // Answers at once whatever still waits, and ends the threads. Nothing may be pushed afterwards.
  void Close();

 private:
  struct Waiting {
    Nanos due;
    uint64_t sequence;  // equal due times leave in order of arrival
    std::unique_ptr<Reply> reply;
  };
  static bool Later(const Waiting& a, const Waiting& b);
  void Run();

  InodeTable& inodes_;
  Counters& counters_;

  Mutex mutex_;
  std::condition_variable changed_;
  std::vector<Waiting> heap_ GUARDED_BY(mutex_);
  uint64_t pushed_ GUARDED_BY(mutex_) = 0;
  // The thread that sleeps until the earliest due time; the others sleep until they are called.
  std::thread::id leader_ GUARDED_BY(mutex_);
  bool closing_ GUARDED_BY(mutex_) = false;
  std::vector<std::jthread> threads_;
};

}  // namespace forebay::slowfs
