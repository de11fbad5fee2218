// ShardFds: a bounded set of open descriptors for objects that hold several samples.
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <list>
#include <memory>
#include <string>
#include <unordered_map>
#include <unordered_set>

#include "base/owned.h"
#include "catalog/catalog.h"

namespace forebay {

// Opening and closing may take a round trip to the storage, so both happen on a thread of its own,
// started by the first Acquire; no call waits for it. Confined to one thread. In a forked child
// destroying is the only call allowed, and it waits for nothing.
class ShardFds {
 public:
  explicit ShardFds(size_t max_open);
  ~ShardFds();
  ShardFds(const ShardFds&) = delete;
  ShardFds& operator=(const ShardFds&) = delete;

  // A descriptor that stays open until Release, or -1; then it is being opened for a later Acquire.
  int Acquire(ObjectId object, const std::string& path);
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
    std::list<ObjectId>::iterator place;  // in recent_
  };

  bool StartOpener();
  void TakeOpened();
  bool EvictOne();
  void Erase(std::unordered_map<ObjectId, Entry>::iterator entry);

  const size_t max_open_;
  const pid_t creator_;
  std::unordered_map<ObjectId, Entry> open_;
  std::list<ObjectId> recent_;              // most recently used first
  std::unordered_set<ObjectId> requested_;  // with the opener
  std::unique_ptr<Opener> opener_;
};

}  // namespace forebay
