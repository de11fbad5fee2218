// Tier: a bounded local store of whole samples, copies of what a source holds for good.
//
// The shape is that of Loop and Source: Submit takes what it can, Reap never blocks, each accepted
// op completes exactly once. A miss and "full" are values: losing a copy never loses a sample.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

#include "base/status.h"

namespace forebay {

struct TierKey {
  uint64_t group = 0;  // the data folder that a put is for; a copy is found whichever it was
  // What it is a copy of: 96 bits of a hash (copy_names.h).
  uint64_t name = 0;
  uint32_t check = 0;
  bool operator==(const TierKey& other) const { return name == other.name && check == other.check; }
};

struct TierOp {
  enum class Kind : uint8_t {
    kPut,   // store a copy of `bytes`; a key that is held already is left as it is
    kGet,   // fill `bytes`, which has exactly the sample's length
    kDrop,  // forget the copy, if there is one
  };
  uint64_t tag = 0;  // returned in the completion
  Kind kind = Kind::kGet;
  TierKey key;
  std::span<std::byte> bytes;  // valid until the completion is reaped; kPut only reads it
  uint32_t crc = 0;            // kPut: CRC-32C of bytes, as the source computed it
  bool as_file = false;        // kPut: in a file of its own, however short; a hint
  // kPut: stands for what this node knows of the source's file beyond the name; 0: nothing. A copy
  // that is held with another stamp gets this one if its bytes are the same; else it is replaced.
  uint32_t stamp = 0;
};

struct TierDone {
  uint64_t tag = 0;
  Status status = {};   // not ok: the store failed; else as a miss, or as not stored
  bool hit = false;     // kGet: bytes are those that were put. A miss leaves them undefined.
  bool passed = false;  // kGet without a hit: it was not looked for, as the store does not answer
  bool stored = false;  // kPut: the tier holds the key. False: full, or it takes no writes.
  uint32_t crc = 0;     // kGet with a hit: CRC-32C of bytes
};

// What the store has done since it was opened.
struct TierStats {
  uint64_t hits = 0;
  uint64_t misses = 0;
  uint64_t damaged = 0;  // copies found torn, or with a wrong checksum, and dropped
  uint64_t writes = 0;
  uint64_t full = 0;    // puts refused for want of room
  uint64_t errors = 0;  // ops that ended with a status that is not ok
};

// A copy is invisible until it is whole. Ops in flight on one key may run in any order. Submit and
// Reap are called by one thread at a time; the other calls are safe from any thread.
class Tier {
 public:
  // Waits for what has begun, and discards the rest. In a forked child destroying is the only call
  // allowed, and it waits for nothing.
  virtual ~Tier() = default;

  // Takes a prefix of `ops` and returns its length; 0 when too many are in flight. Never blocks.
  virtual size_t Submit(std::span<const TierOp> ops) = 0;
  // Fills `out` with finished ops and returns how many. Never blocks.
  virtual size_t Reap(std::span<TierDone> out) = 0;
  // Readable (poll) while completions may be waiting.
  virtual int event_fd() const = 0;
  // Most ops in flight.
  virtual size_t capacity() const = 0;

  // True: a kGet submitted now most likely hits. Who asks, for a group that is in use, needs the
  // copy: it stays, if it can.
  virtual bool Has(const TierKey& key) const = 0;
  // The stamp that the copy was last put with; 0: none, or there is no copy.
  virtual uint32_t StampOfCopy(const TierKey& key) const = 0;
  // True: a kPut of so many bytes submitted now is most likely stored. Spares a caller the copy.
  virtual bool HasRoom(uint64_t bytes) const = 0;
  virtual uint64_t capacity_bytes() const = 0;
  // At most capacity_bytes, unless that shrank under what was there.
  virtual uint64_t used_bytes() const = 0;
  virtual TierStats stats() const = 0;
  // Ok while the tier takes writes; else why it does not. It still serves what it has.
  virtual Status health() const = 0;
  // For logs and reports: "folder /nvme/cache".
  virtual std::string Describe() const = 0;
};

}  // namespace forebay
