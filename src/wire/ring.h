// Rings: how a daemon announces finished batches to one client, in memory that both map.
//
// One memfd a stream. The daemon publishes entries (`tail`), the client takes them (`head`) and
// hands leases back through a second, smaller ring. A batch that is there costs the client no
// system call; only when the ring is empty it tells a daemon that sleeps, and sleeps on a futex.
// Before that the daemon comes by itself, see RingPace. Neither side trusts what it reads: counts
// outside of the ring's bounds are kDataLoss. The memfd is sealed, so that nobody can shrink it
// under the other.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/clock.h"
#include "base/owned.h"
#include "base/status.h"

namespace forebay::wire {

struct RingShape {
  uint32_t slots = 0;
  uint32_t samples = 0;  // the most in a batch
  size_t SlotBytes() const;
  size_t Bytes() const;
  // 32 slots, fewer where batches are long; none when even two would take more than 4 MiB.
  static RingShape For(uint32_t batch_size);
  // kDataLoss for numbers that no daemon sends.
  Status Validate() const;
};

struct RingEntry {
  static constexpr uint8_t kError = 4;   // beside the values of TakeKind
  static constexpr uint8_t kNoRoom = 5;  // an error, too: the client had better go on elsewhere
  uint8_t kind = 0;
  uint8_t cause = 0;      // a StallCause: what the client waited for, if it did
  Code code = Code::kOk;  // of errors
  uint64_t lease = 0;
  uint32_t dataset = 0;
  uint64_t epoch = 0;
  uint64_t index = 0;
};

namespace internal {

inline constexpr uint32_t kRingReleases = 64;

// What the daemon wants to be told of while it sleeps.
inline constexpr uint32_t kAwake = 0;
inline constexpr uint32_t kTellWanted = 1;    // that the client waits
inline constexpr uint32_t kTellReleased = 2;  // every release, too

struct RingHeader {
  // The daemon's. Counts wrap.
  alignas(64) std::atomic<uint32_t> tail;  // entries published; the client's futex
  std::atomic<uint32_t> releases_read;
  std::atomic<uint32_t> beat;  // changes with each round of the daemon's thread
  // The client's.
  alignas(64) std::atomic<uint32_t> head;  // entries taken
  std::atomic<uint32_t> releases_tail;
  // Both write these: one sets, the other clears.
  alignas(64) std::atomic<uint32_t> wanted;  // the client found nothing and wants the next batch
  std::atomic<uint32_t> sleeping;            // one of the above
  alignas(64) std::atomic<uint64_t> releases[kRingReleases];
};
static_assert(std::atomic<uint32_t>::is_always_lock_free);
static_assert(std::atomic<uint64_t>::is_always_lock_free);

}  // namespace internal

// When to look at a ring again: about when half of what it has is taken, at the pace of its client.
class RingPace {
 public:
  static constexpr Nanos kLongest = 100 * kMilli;
  // `taken`: entries since the last call.
  void Saw(uint32_t taken, Nanos now);
  // From that call on, with `ready` entries in the ring.
  Nanos SleepFor(uint32_t ready) const;

 private:
  Nanos per_entry_ = kLongest;
  Nanos last_ = 0;  // when something was taken
};

// The daemon's side. Used by one thread.
class RingWriter {
 public:
  static Result<RingWriter> Create(const RingShape& shape);

  const RingShape& shape() const { return shape_; }
  int fd() const { return memory_.get(); }

  // Reads what the client did; the numbers below are as of then. kDataLoss when it cannot be.
  Status ReadPosition();
  uint32_t outstanding() const { return tail_ - head_; }  // published and not taken
  uint32_t free_slots() const { return shape_.slots - outstanding(); }
  bool wanted() const;

  // There must be a free slot; the three lists have one length of at most shape().samples.
  void Publish(const RingEntry& entry, std::span<const uint32_t> samples,
               std::span<const uint64_t> offsets, std::span<const uint32_t> lengths);
  void PublishError(const Status& status, uint8_t cause, uint8_t kind = RingEntry::kError);
  // Takes back what the client has not taken. Only while the client waits for an answer.
  void Rewind();
  // Appends the leases that the client gave back since the last call.
  Status PopReleases(std::vector<uint64_t>* out);

  // Asks to be told; true when there is news already and the daemon must not sleep. `knows_wanted`:
  // that the client waits is no news.
  bool Sleep(bool tell_releases, bool knows_wanted);
  void Awake();

 private:
  internal::RingHeader& header() const {
    return *reinterpret_cast<internal::RingHeader*>(mapping_.data());
  }
  std::byte* Slot(uint32_t number) const;
  void Advance();

  RingShape shape_;
  OwnedFd memory_;
  Mapping mapping_;
  uint32_t tail_ = 0;
  uint32_t head_ = 0;
  uint32_t releases_read_ = 0;
};

// The client's side. Take and Want by one thread at a time, Release likewise.
class RingReader {
 public:
  // kDataLoss when the memory is too small for the shape.
  static Result<RingReader> Map(const OwnedFd& memory, const RingShape& shape);

  // The next entry, or false when there is none.
  Result<bool> Take(RingEntry* entry, std::vector<uint32_t>* samples,
                    std::vector<uint64_t>* offsets, std::vector<uint32_t>* lengths,
                    std::string* error);
  // Says that the client waits. `*seen` is for Wait. True: the daemon wants a Nudge.
  bool Want(uint32_t* seen);
  // Sleeps until something was published after `seen`, or `wait` has passed.
  void Wait(uint32_t seen, Nanos wait) const;
  // Changes several times a second while the daemon does anything at all.
  uint32_t beat() const { return header().beat.load(std::memory_order_relaxed); }
  // Wakes whoever sleeps in Wait in this process.
  void Wake() const;
  // False when the ring of releases is full. `*tell`: the daemon wants a Nudge.
  bool Release(uint64_t lease, bool* tell);

 private:
  internal::RingHeader& header() const {
    return *reinterpret_cast<internal::RingHeader*>(mapping_.data());
  }
  RingShape shape_;
  Mapping mapping_;
  uint32_t head_ = 0;
};

}  // namespace forebay::wire
