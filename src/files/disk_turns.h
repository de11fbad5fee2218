// DiskTurns: the right to write to the cache's disk. Few threads have it at a time: more of them do
// not make a local disk faster, and spin for the lock of its folder (1.2 ms of processor time a
// file with 64). What somebody waits for goes first, then what was begun first: a reader is waiting
// for that, or will be next.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <map>
#include <stop_token>
#include <utility>

#include "base/thread_annotations.h"

namespace forebay::files {

// Safe for concurrent use by multiple threads. Outlives its turns.
class DiskTurns {
 public:
  static constexpr size_t kMost = 4;  // at a time

  class Turn {
   public:
    // Waits for it. `number`: of what was begun first the lowest.
    Turn(DiskTurns& turns, bool urgent, uint64_t number, const std::stop_token& stop);
    ~Turn();
    Turn(const Turn&) = delete;
    Turn& operator=(const Turn&) = delete;
    bool given() const { return given_; }  // false: `stop`

   private:
    DiskTurns& turns_;
    std::condition_variable_any turn_;
    bool given_ = false;
  };

  size_t given() const EXCLUDES(mutex_);
  size_t waiting() const EXCLUDES(mutex_);

 private:
  mutable Mutex mutex_;
  size_t given_ GUARDED_BY(mutex_) = 0;
  // By urgency, then by number.
  std::multimap<std::pair<bool, uint64_t>, Turn*> waiting_ GUARDED_BY(mutex_);
};

}  // namespace forebay::files
