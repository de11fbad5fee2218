// The node with which a sample lives while all nodes are there and have room: a hash that moves as
// few samples as possible when the number of nodes changes (Lamping and Veach's jump hash, 2014, on
// whole numbers). From n to n + 1 nodes only those of the new one move; from n + 1 to n they go
// back.
#pragma once

#include <cstdint>

#include "base/rng.h"
#include "catalog/catalog.h"

namespace forebay {

struct Home {
  uint32_t node = 0;
  // The sample lives there for every number of nodes from node + 1 to this one; with one more it
  // moves away.
  uint64_t until = 0;
};

// Of whatever `seed` stands for.
inline Home JumpHash(uint64_t seed, uint32_t nodes) {
  SplitMix64 rng(seed);
  uint64_t at = 0, next = 0;
  do {
    at = next;
    // The first number of nodes with which it leaves `at`: larger than m with probability
    // (at + 1) / (m + 1).
    next = ((at + 1) << 32) / ((rng.Next() >> 32) + 1);
  } while (next < nodes);
  return {static_cast<uint32_t>(at), next};
}

// `choice` 0: the home. 1, 2, ...: where it would go instead, each independent of the others.
inline Home HomeOf(SampleId sample, uint32_t nodes, uint32_t choice = 0) {
  return JumpHash(uint64_t{choice} << 32 | sample, nodes);
}

}  // namespace forebay
