// ControlStore: where control state beyond one process lives (members, summaries, policies,
// decisions).
//
// Keys are texts in byte order; every write gives the store a new revision. Two implementations:
// MemoryStore for one process and for tests, EtcdStore for clusters; one conformance suite runs on
// both. No call waits longer than the store's deadline, and an unreachable store is kUnavailable or
// kDeadlineExceeded with the endpoint named: callers go on with what they last knew.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/clock.h"
#include "base/status.h"

namespace forebay::control {

using LeaseId = int64_t;  // 0: none

struct StoreEntry {
  std::string key;
  std::string value;
  int64_t revision = 0;  // of its last write
  LeaseId lease = 0;
};

struct StoreSnapshot {
  std::vector<StoreEntry> entries;  // in the order of keys
  int64_t revision = 0;             // of the store when it was read
};

struct StoreWrite {
  std::string key;
  std::string value;
  LeaseId lease = 0;  // the key vanishes with it
};

struct StoreEvent {
  std::string key;
  std::optional<std::string> value;  // none: it was deleted, or its lease ended
  int64_t revision = 0;
};

// Who won an election: the campaigner whose lease holds it.
struct Leadership {
  std::string name;
  LeaseId lease = 0;
};

// What a leader's writes depend on: that `lease` still leads `election`.
struct Fence {
  std::string election;
  LeaseId lease = 0;
};

// Confined to one thread.
class StoreWatch {
 public:
  virtual ~StoreWatch() = default;
  // Events since the last call, oldest first; waits for the first one for `wait` at most and gives
  // none when there is none. kChanged: some are no longer known; read the range and watch anew.
  // After another error the watch may be polled again and misses nothing.
  virtual Result<std::vector<StoreEvent>> Poll(Nanos wait) = 0;
};

// Confined to one thread; several handles may work on one store.
class ControlStore {
 public:
  virtual ~ControlStore() = default;

  // All writes or, where the store has to cut them into batches, whole batches in their order.
  // With `fence`, a batch is written only while that holds: otherwise kCancelled, so that a deposed
  // leader changes nothing. A lease that is gone is kNotFound. A key may stand once in a call.
  virtual Status PutMany(std::span<const StoreWrite> writes, const Fence* fence = nullptr) = 0;
  Status Put(std::string key, std::string value, LeaseId lease = 0) {
    const StoreWrite write{std::move(key), std::move(value), lease};
    return PutMany({&write, 1});
  }
  // All keys that begin with `prefix`, as of one revision, in one read.
  virtual Result<StoreSnapshot> Range(std::string_view prefix) = 0;
  // Deleting what is not there is ok.
  virtual Status Delete(std::string_view key) = 0;

  // `ttl` is rounded up to the store's unit (etcd: a second). Without KeepAlive for that long the
  // lease ends and its keys vanish.
  virtual Result<LeaseId> GrantLease(Nanos ttl) = 0;
  virtual Status KeepAlive(LeaseId lease) = 0;  // kNotFound: it has ended
  virtual Status Revoke(LeaseId lease) = 0;     // one that has ended is ok

  // Events of keys with `prefix` from `revision` on (a snapshot's revision + 1 misses nothing).
  virtual Result<std::unique_ptr<StoreWatch>> Watch(std::string_view prefix, int64_t revision) = 0;

  // Takes the lead of `election`, a key, if nobody has it; says who has it now. The lead ends with
  // the lease. Never waits for the lead: ask again.
  virtual Result<Leadership> Campaign(std::string_view election, std::string_view name,
                                      LeaseId lease) = 0;
  virtual Result<std::optional<Leadership>> Leader(std::string_view election) = 0;

  // Forgets events before `revision`: watches from there on still miss nothing. A store whose keys
  // change all the time would otherwise grow without bound. What is forgotten already is ok.
  virtual Status Compact(int64_t revision) = 0;

  // Whether programs that are not Forebay's may keep keys in it. Their history is not ours to
  // forget: Compact, which knows no prefixes, is for stores of our own.
  virtual bool shared() const = 0;

  // For messages: what and where it is.
  virtual std::string Describe() const = 0;
};

// The first key after all keys that begin with `prefix`; "" when there is none.
std::string PrefixEnd(std::string_view prefix);

}  // namespace forebay::control
