// Tuner: how many reads to keep in flight and how many bytes to read ahead. Pure: what was measured
// goes in, the two numbers come out; no clock, no thread. The engine steps it every 20 ms or so,
// the simulator under virtual time, and `forebay tune replay` from a recorded log.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>

#include "core/actions.h"

namespace forebay {

// Counters grow from 0; the others are values of the moment.
struct TuneObservation {
  int64_t now_ns = 0;
  uint64_t reads = 0;  // requests that source and cache folder have answered
  uint64_t read_bytes = 0;
  uint64_t latency_ns = 0;  // of those requests, added up
  uint64_t hits = 0;        // of them, answered by the cache folder
  uint64_t hit_bytes = 0;
  // The least that the source took since the last observation; 0: it has answered nothing.
  uint64_t latency_low_ns = 0;
  uint64_t consumed_bytes = 0;  // handed to consumers
  uint64_t takes = 0;           // in so many batches
  uint64_t stall_ns = 0;        // that consumers waited for reads, added up over consumers
  uint64_t consumers = 1;       // that have asked for batches lately
  uint64_t in_flight = 0;       // requests
  // Samples that stay in memory for later epochs are not counted: their memory is taken either way.
  uint64_t ready_bytes = 0;      // there, ahead of consumers; reads in flight are not readiness
  uint64_t ready_low_bytes = 0;  // the least that a take since the last observation left ready
  uint64_t ahead_bytes = 0;      // ready, or being read
  uint64_t batch_bytes = 0;      // of one batch of each consumer
  // Set by hand, and not the tuner's to change; 0: they are.
  uint64_t fixed_reads = 0;
  uint64_t fixed_bytes = 0;
  // 1: jobs have parts of the source, and what one leaves others take; 2: and for most of
  // the time since the last observation reads waited for their job's part.
  uint64_t shared = 0;

  bool operator==(const TuneObservation&) const = default;
};

struct TuneDecision {
  size_t reads = 1;          // in flight at once
  uint64_t ahead_bytes = 0;  // ready and in flight, beyond the batch each consumer waits for
  // Look-ahead in flight, as long as it is not known what a read brings; 0: no such bound.
  uint64_t flight_bytes = 0;
  std::string reason;  // one sentence

  bool operator==(const TuneDecision&) const = default;
};

enum class TunePolicy : uint8_t { kForebay, kPrisma };

struct TuneOptions {
  TunePolicy policy = TunePolicy::kForebay;
  size_t max_reads = 256;
  uint64_t max_ahead_bytes = uint64_t{1} << 30;
  size_t cores = 1;  // PRISMA's rule has no more threads than cores

  bool operator==(const TuneOptions&) const = default;
};

// One thread at a time. The same observations give the same decisions on every machine.
class Tuner {
 public:
  virtual ~Tuner() = default;
  // Observations come in the order of their time. The answer stays valid until the next step.
  virtual const TuneDecision& Step(const TuneObservation& seen) = 0;
  virtual const TuneDecision& decision() const = 0;
};

std::unique_ptr<Tuner> MakeTuner(const TuneOptions& options);

// Gathers an observation from events. One thread at a time.
class TuneMeter {
 public:
  void OnRequest(int64_t latency_ns, Origin from);
  void OnBytes(uint64_t bytes, Origin from);
  // A consumer took a batch and left `ready_bytes`.
  void OnTake(uint64_t bytes, uint64_t ready_bytes);
  // So many consumers wait for reads from now on.
  void OnWaiting(uint64_t consumers, int64_t now_ns);
  uint64_t waiting() const { return waiting_; }

  // The values of the moment; the rest follows from the events.
  struct Now {
    uint64_t consumers = 1;
    uint64_t in_flight = 0;
    uint64_t ready_bytes = 0;
    uint64_t ahead_bytes = 0;
    uint64_t batch_bytes = 0;
    uint64_t fixed_reads = 0;
    uint64_t fixed_bytes = 0;
    uint64_t shared = 0;
  };
  TuneObservation Observe(const Now& values, int64_t now_ns);

 private:
  TuneObservation seen_;
  uint64_t waiting_ = 0;
  int64_t waiting_since_ = 0;
  uint64_t ready_low_ = ~uint64_t{0};
  uint64_t latency_low_ = 0;
};

}  // namespace forebay
