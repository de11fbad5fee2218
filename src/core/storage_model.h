// StorageModel: how long a busy shared file system takes to answer, as a pure function of what it
// was asked so far. No clock, thread or I/O; the caller says what time it is.
//
// Every operation waits for its turn under the operations limit, then takes its latency. Bytes pass
// through one pipe that all readers share, while the latency runs: a read is done when both its
// latency is over and its last byte is through, so enough reads in flight fill the pipe whatever
// the latency is.
#pragma once

#include <cstdint>
#include <limits>
#include <string>
#include <string_view>

#include "base/nanos.h"
#include "base/rng.h"
#include "base/status.h"

namespace forebay {

enum class OpKind : uint8_t { kOpen, kStat, kReaddir, kRead };

struct StorageSettings {
  static constexpr Nanos kForever = std::numeric_limits<Nanos>::max();

  // Latency of each kind of operation.
  Nanos open = 0;
  Nanos stat = 0;  // lookups and attributes
  Nanos readdir = 0;
  Nanos read = 0;

  double jitter = 0;     // in [0, 1]: latencies vary uniformly by this fraction, both ways
  double tail_prob = 0;  // in [0, 1]: this share of operations takes tail_mult times as long
  double tail_mult = 10;

  double bytes_per_s = 0;  // shared by everybody; 0: no limit
  double ops_per_s = 0;    // shared by everybody; 0: no limit

  double eio_rate = 0;  // in [0, 1]: this share of opens and reads fails with EIO
  Nanos stall = 0;      // nothing asked in this span is answered before its end; kForever: never
  uint64_t seed = 1;

  Status Validate() const;

  // `text` holds key=value pairs, one a line or separated by commas; '#' starts a comment. Keys:
  // open_ms stat_ms readdir_ms read_ms jitter tail_prob tail_mult bandwidth_mb (10^6 bytes a
  // second) ops eio_rate stall_ms (a number or "forever") seed. What the text does not name keeps
  // the default.
  static Result<StorageSettings> Parse(std::string_view text);
  // As Parse, but what the text does not name keeps its value here.
  Result<StorageSettings> With(std::string_view text) const;
  // One key=value a line, every key; Parse gives the same settings back.
  std::string ToText() const;

  bool operator==(const StorageSettings&) const = default;
};

// Not safe for concurrent use. `now` may step back a little between calls (threads that race to the
// model), never before the construction.
class StorageModel {
 public:
  // finish_at of an operation that a stall without end swallows: ask again after the next Apply.
  static constexpr Nanos kNever = std::numeric_limits<Nanos>::max();

  struct Decision {
    Nanos finish_at = 0;
    int error = 0;  // an errno value, 0: the operation succeeds
  };

  // `settings` must be valid, here and in Apply.
  StorageModel(const StorageSettings& settings, Nanos now);

  // Takes in an operation that moves `bytes`, and says when it is answered and how.
  Decision Admit(OpKind kind, uint64_t bytes, Nanos now);

  // Changes the settings for operations admitted from now on. A stall begins when `stall` changes;
  // a limit that changes forgets its backlog; the random numbers start again when the seed changes.
  void Apply(const StorageSettings& settings, Nanos now);

  // The settings in force; `stall` is 0 once the stall is over.
  StorageSettings settings(Nanos now) const;

 private:
  Nanos Latency(OpKind kind);

  StorageSettings settings_;
  SplitMix64 rng_;
  Nanos stalled_until_;
  Nanos ops_free_at_;   // when the next operation may begin
  Nanos pipe_free_at_;  // when the last byte admitted so far is through
};

}  // namespace forebay
