// Where a sample of a growing data set lives: a hash of its name, which every node computes alike.
//
// Such a data set has no list that all nodes share, so there is nothing to plan: neither the bytes
// that are to come nor their number are known. A name's home is its first choice among all nodes of
// the job, by the jump hash of core/home.h, that is alive. So a death moves only what lived with
// the dead, to all others alike; a return moves only that back; and with another number of nodes
// only those of the nodes that were added or are gone move.
#pragma once

#include <cstdint>
#include <vector>

#include "core/directory.h"
#include "core/view.h"

namespace forebay::peer {

// Pure: no clock, thread or I/O. Not safe for concurrent use.
class NamedHomes {
 public:
  explicit NamedHomes(uint32_t self) : self_(self) {}

  // Members that never came count as dead, this node as alive. True: homes have changed.
  bool OnView(const View& view);
  // `name`: a hash of all that the sample is a copy of. kNoNode before the first view.
  uint32_t HomeOf(uint64_t name) const;

 private:
  const uint32_t self_;
  std::vector<bool> alive_;
  std::vector<uint32_t> living_;  // the numbers of those
};

}  // namespace forebay::peer
