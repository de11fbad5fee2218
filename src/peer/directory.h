// Directory: where each sample of a data set should be, and where it is as far as is known.
//
// The plan is a pure function of the view (plan/placement.h), so every node finds a sample's home
// without asking; what peers report corrects it: samples that a home lacks, and copies elsewhere.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/status.h"
#include "catalog/catalog.h"
#include "peer/membership.h"

namespace forebay::peer {

inline constexpr uint32_t kNoNode = UINT32_MAX;

// What the node's tiers may keep; one byte a sample (Scheduler::SetShare).
enum class Share : uint8_t {
  kNone = 0,     // others need the room
  kHome = 1,     // it lives here
  kReplica = 2,  // where room is left beside all that lives here
};

struct Found {
  uint32_t home = kNoNode;    // who reads it from the source; kNoNode: each for itself
  uint32_t holder = kNoNode;  // who is known to have a copy, other than the asking node
};

// Pure: no clock, thread or I/O. Not safe for concurrent use.
class Directory {
 public:
  // lengths[s]: the room that sample s takes in a tier.
  Directory(uint32_t self, std::vector<uint32_t> lengths);

  // Plans for the members that are alive. Samples whose home stays alive keep it; those of the dead
  // go to the others that have room; who comes back gets its own again. The same view gives every
  // node the same homes, whatever views it saw before. True: homes have changed.
  bool OnView(const View& view);

  // A few nanoseconds: two array look-ups.
  Found Locate(SampleId sample) const;
  Share ShareOf(SampleId sample) const;
  std::vector<uint8_t> Shares() const;
  std::span<const uint32_t> lengths() const { return lengths_; }
  // What lives with `node`.
  uint64_t home_bytes(uint32_t node) const;
  uint32_t home_samples(uint32_t node) const;
  // Samples that no node has room for.
  uint32_t homeless() const;

  // What peers say: bit i of `bits` is sample `first` + i.
  void OnHave(uint32_t node, SampleId first, std::span<const std::byte> bits);
  void OnGot(uint32_t node, SampleId sample);
  void OnLost(uint32_t node, SampleId sample);  // also: it was asked and has not got it
  void OnDead(uint32_t node);                   // forgets its copies
};

}  // namespace forebay::peer
