// What the file service's book asks of its copiers, and what they say of it.
#pragma once

#include <sys/stat.h>

#include <condition_variable>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "base/nanos.h"
#include "base/owned.h"
#include "base/thread_annotations.h"
#include "files/key.h"
#include "files/message.h"
#include "metrics/stall.h"

namespace forebay::files {

// What a copy is there for, and of which budget.
enum class CopyPlace : uint8_t { kNone, kKept, kStaged };

// A file of the source, open. Shared by the jobs that read it; the last one closes it.
struct SourceFile {
  OwnedFd fd;
  Nanos opened = 0;  // when it was
  struct stat stat = {};
  int64_t birth_seconds = 0;
  uint32_t birth_nanoseconds = 0;
};

// A file that seemed too young to be copied, and when it was first seen to be like this, by this
// node's own clock.
struct YoungFile {
  struct stat stat = {};
  Nanos seen = 0;
};

// The right to publish a copy, until it is dropped. Safe for concurrent use by multiple threads.
class Ticket {
 public:
  // Publishing takes calls on the cache's disk, and who drops the ticket waits for them so long.
  static constexpr Nanos kPatience = kSecond / 2;

  // False: it was dropped. Otherwise EndPublishing() follows.
  bool BeginPublishing() EXCLUDES(mutex_);
  // When it was dropped meanwhile, nobody waits any more: what was published is to be taken back.
  void EndPublishing() EXCLUDES(mutex_);
  bool dropped() const EXCLUDES(mutex_);
  // When this returns nothing will be published, or has been; unless the disk hangs, and then it is
  // taken back when that answers. `wait`: false where it is known to hang.
  void Drop(bool wait) EXCLUDES(mutex_);

 private:
  mutable Mutex mutex_;
  std::condition_variable_any ended_;
  bool publishing_ GUARDED_BY(mutex_) = false;
  bool dropped_ GUARDED_BY(mutex_) = false;
};

struct CopyJob {
  enum class Kind : uint8_t {
    kCopy,     // a whole file; a large one is only prepared
    kBlock,    // a part of a large file
    kFinish,   // gives a large copy its name
    kLook,     // whether the path still leads to the file that a large copy is of
    kResolve,  // where a path leads, see CopyResult::real
    kList,     // the files of a folder, see CopyResult::names
  };
  Kind kind = Kind::kCopy;
  bool urgent = false;                 // somebody waits
  bool may_stage = false;              // it may take from the second budget
  bool known = false;                  // its size was known when it was asked for
  bool follow = true;                  // of kResolve: the last part of the path, too
  bool grows = false;                  // of a large file: room is reserved block by block
  CopyPlace place = CopyPlace::kNone;  // reserved already, `reserved` bytes
  uint64_t reserved = 0;
  uint64_t owner = 0;  // the book's
  JobNumber job = 0;   // for which it is read
  std::string path;
  FileKey key;
  std::shared_ptr<Ticket> ticket;      // shared with the book
  std::shared_ptr<SourceFile> source;  // null: not open yet
  std::shared_ptr<OwnedFd> part;       // of a large copy, shared by its blocks
  std::shared_ptr<YoungFile> young;    // as it was before; with kYoung, as it is now
  uint64_t offset = 0;
  uint64_t bytes = 0;
  uint32_t crc = 0;  // of kFinish
};

struct CopyResult {
  enum class Outcome : uint8_t {
    kDone,
    kLarge,      // prepared: source and part are open
    kAlias,      // the path leads to `real`
    kRefused,    // no regular file, or one with several names
    kYoung,      // changed a moment ago, it seems; see CopyJob::young
    kNoRoom,     // neither budget has room
    kNoSpace,    // the disk is full
    kError,      // of the source; `error`
    kMissing,    // there is no such file
    kCacheBad,   // an error of the cache's disk; `error`
    kDiscarded,  // the file changed while it was read
    kDropped,    // by its ticket
  };
  Outcome outcome = Outcome::kError;
  CopyJob job;  // with what was reserved and opened
  int error = 0;
  std::string real;     // of kAlias and kResolve; empty: not known
  bool stored = false;  // a copy was there, and has a further name now
  uint32_t crc = 0;
  StallCause cause = StallCause::kSource;  // what it waited for in the end
  std::vector<std::string> names;          // of kList, sorted
};

// A file as it counts for the budgets.
inline uint64_t OnDisk(uint64_t bytes) { return (bytes + 4095) / 4096 * 4096; }

// The two budgets. Safe for concurrent use by multiple threads.
class Room {
 public:
  Room(uint64_t kept, uint64_t staged) : most_{kept, staged} {}
  // From the first budget, or the second if it may be.
  // While somebody waits the second may be overdrawn by a quarter.
  CopyPlace Reserve(uint64_t bytes, bool may_stage, bool urgent = false);
  bool Fits(uint64_t bytes, bool may_stage, bool urgent) const;
  void Release(CopyPlace place, uint64_t bytes);
  // What is there from an earlier run counts, even if it is too much.
  void Found(uint64_t bytes);
  void SetMost(uint64_t kept, uint64_t staged);
  uint64_t used(CopyPlace place) const;
  uint64_t most(CopyPlace place) const;
  uint64_t left() const;  // for copies that are kept

 private:
  static size_t Of(CopyPlace place) { return place == CopyPlace::kKept ? 0 : 1; }
  CopyPlace Find(uint64_t bytes, bool may_stage, bool urgent) const REQUIRES(mutex_);
  mutable Mutex mutex_;
  uint64_t most_[2] GUARDED_BY(mutex_);
  uint64_t used_[2] GUARDED_BY(mutex_) = {0, 0};
};

}  // namespace forebay::files
