// ShardFds: a bounded set of open descriptors for objects that hold several samples.
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <list>
#include <memory>
#include <string>
#include <unordered_map>
#include <unordered_set>

#include "base/clock.h"
#include "base/owned.h"
#include "catalog/catalog.h"
#include "io/loop.h"

namespace forebay {

// Opening, closing and looking at a path may take a round trip to the storage, so all happen on a
// thread of its own, started by the first Acquire; no call waits for it, nor does the destructor.
// Confined to one thread. In a forked child destroying is the only call allowed, and it waits for
// nothing.
//
// A descriptor is given only of the version that is asked for. While it is in use, its path is
// looked at again every kLookEvery: one that was rewritten in place or replaced is forgotten, so
// that the next read opens the path and meets what is there.
class ShardFds {
 public:
  static constexpr Nanos kLookEvery = kSecond;

  explicit ShardFds(size_t max_open, Nanos look_every = kLookEvery);
  ~ShardFds();
  ShardFds(const ShardFds&) = delete;
  ShardFds& operator=(const ShardFds&) = delete;

  // A descriptor that stays open until Release, or -1; then it is being opened for a later Acquire.
  int Acquire(ObjectId object, const std::string& path, const FileVersion& version);
  // Once for each Acquire that gave a descriptor.
  void Release(ObjectId object);
  // Closes the object's descriptor once nobody uses it; later Acquires open the path anew.
  void Forget(ObjectId object);
  // Closes the less recently used half of those that nobody uses: the process lacks descriptors.
  void Shrink();

  size_t open_count() const { return open_.size(); }

 private:
  class Opener;
  struct Entry {
    OwnedFd fd;
    size_t users = 0;
    bool forgotten = false;
    bool looking = false;                 // the opener looks at its path
    Nanos looked = 0;                     // when it was opened, or its path was last looked at
    std::list<ObjectId>::iterator place;  // in recent_
  };

  bool StartOpener();
  void LookAgain(ObjectId object, Entry& entry, const std::string& path,
                 const FileVersion& version);
  void TakeOpened();
  bool EvictOne();
  void Erase(std::unordered_map<ObjectId, Entry>::iterator entry);

  const size_t max_open_;
  const Nanos look_every_;
  const pid_t creator_;
  std::unordered_map<ObjectId, Entry> open_;
  std::list<ObjectId> recent_;              // most recently used first
  std::unordered_set<ObjectId> requested_;  // with the opener
  std::shared_ptr<Opener> opener_;          // shared with its thread, which nobody waits for
};

}  // namespace forebay
