// Loop: many positional reads in flight on local or mounted files.
//
// Two implementations pass one conformance suite: a thread pool (works everywhere) and io_uring.
// The shape is io_uring's, which simulates directly: Submit takes what it can, Reap never blocks,
// each accepted op completes exactly once.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>

#include "base/clock.h"
#include "base/status.h"

namespace forebay {

// A piece of a range that is read at once.
struct ReadPart {
  uint64_t gap = 0;                // bytes before it, since the piece before, that are thrown away
  std::span<std::byte> dest = {};  // may be empty
  uint32_t crc = 0;                // filled with ReadOp::checksum once the whole range is read
};

// Which bytes a path leads to, as far as its attributes tell.
struct FileVersion {
  uint64_t bytes = 0;
  int64_t modified_ns = 0;
  bool operator==(const FileVersion&) const = default;
};

struct ReadOp {
  uint64_t tag = 0;  // returned in the completion
  int fd = -1;       // >= 0: an open descriptor, which stays open; else `path` is opened and closed
  const char* path = nullptr;  // must stay valid until the completion is reaped
  uint64_t offset = 0;
  std::span<std::byte> dest = {};  // must stay valid until the completion is reaped
  // Not empty: instead of `dest`, the pieces of the range that begins at `offset`. They, too, stay
  // valid until the completion is reaped, and belong to the loop until then. Not with expect_end.
  std::span<ReadPart> parts = {};
  // True: the file must end exactly at offset + dest.size(). A longer one is reported through
  // Completion::longer, at no extra request (one more byte is asked for in the same read).
  bool expect_end = false;
  // The version that the bytes must be of. The file's attributes are asked for after the read, so
  // that a write that came in between shows; another version is reported through
  // Completion::changed. A storage that is far away is not asked for what it has just told: at the
  // open, or, of `fd`, when `just_opened` (or when the caller asks it by other means).
  std::optional<FileVersion> version = std::nullopt;
  bool just_opened = false;
  // True: Completion::change_time_ns is filled, of a file that is opened by its path. The storage
  // is not asked for it, beyond what it told at the open.
  bool change_time = false;
  // True: Completion::crc is filled; by the thread that read where there is one, else by Reap.
  bool checksum = false;
};

struct Completion {
  uint64_t tag = 0;
  int error = 0;         // errno of the open or read, 0 otherwise. ESPIPE: the path leads to a
                         // FIFO, a device or a socket, which is not waited for
  uint64_t bytes = 0;    // bytes in dest (with parts: of the range, gaps included); fewer than
                         // asked means the file ended there
  bool longer = false;   // only with expect_end
  bool changed = false;  // only with version, and without an error
  uint32_t crc = 0;      // CRC-32C of those bytes; only with checksum, without an error or parts
  // Of the file's last change of any kind (ctime), as it was before the read; 0: not known.
  int64_t change_time_ns = 0;
  int64_t latency_ns = 0;  // from the start of the open (or read) to its end; io_uring: from Submit
};

class Loop {
 public:
  // Waits for what is in flight; nothing touches `dest` afterwards. Ops that no thread has begun
  // may be discarded. In a forked child destroying is the only call allowed, and it waits for
  // nothing.
  virtual ~Loop() = default;

  // Takes a prefix of `ops` and returns its length; 0 when the loop is full. Never blocks.
  virtual size_t Submit(std::span<const ReadOp> ops) = 0;
  // Fills `out` with finished ops and returns how many. Never blocks.
  virtual size_t Reap(std::span<Completion> out) = 0;
  // Readable (poll) while completions may be waiting; drained by Reap.
  virtual int event_fd() const = 0;
  virtual size_t capacity() const = 0;
  virtual const char* name() const = 0;
};
// Submit and Reap are called by one thread at a time (the engine's loop thread).

struct LoopOptions {
  // Most ops in flight; the thread pool starts threads lazily, as they are needed.
  size_t max_in_flight = 256;
  Status Validate() const;
};

// Threads that read for any number of loops, in the order in which ops were submitted to any of
// them. Threads that have been inside one op for `stuck_after` do not count: as many more may run,
// so that storage which hangs below one loop does not take the threads of another.
struct ReaderPoolOptions {
  size_t threads = 256;  // started lazily, as they are needed
  Nanos stuck_after = kSecond;
  Status Validate() const;
};
class ReaderPool;
// Shared by its loops: the last of them ends the threads.
Result<std::shared_ptr<ReaderPool>> MakeReaderPool(const ReaderPoolOptions& options);
// A loop of the pool's. Each is used by one thread at a time; two may be used by two.
Result<std::unique_ptr<Loop>> MakeThreadLoopOn(std::shared_ptr<ReaderPool> pool,
                                               const LoopOptions& options);

// Threads of its own doing open, preadv, close. Stacks are small (128 KiB, thread-local storage
// included).
Result<std::unique_ptr<Loop>> MakeThreadLoop(const LoopOptions& options);

// io_uring; kUnimplemented when the build or the kernel lacks it, or a policy forbids it.
Result<std::unique_ptr<Loop>> MakeUringLoop(const LoopOptions& options);

// Whether MakeUringLoop can work here, and if not why (for `forebay doctor`).
Status ProbeUring();

}  // namespace forebay
