// One node in virtual time: the engine's own Scheduler and Tuner over a StorageModel.
//
// The engine has threads, a clock and files around the two; here are events and figures. Everything
// that decides what is read when, what stays in memory and what a batch waits for is the engine's
// code, and the source is the model behind slowfs, so that a simulation and a run on slowfs of the
// same settings can be compared (`forebay bench simulator`).
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "base/clock.h"
#include "base/status.h"
#include "catalog/catalog.h"
#include "core/storage_model.h"
#include "core/tuner.h"

namespace forebay::sim {

// A cache folder: what was read from the source is written there behind the reader, up to `bytes`.
struct FolderSpec {
  uint64_t bytes = 0;            // 0: there is none
  double read_bytes_per_s = 0;   // 0: no limit
  double write_bytes_per_s = 0;  // 0: no limit
  Nanos read = 0;                // latency of one read
  uint64_t buffer_bytes =
      0;  // copies on their way; 0: no limit. What finds no room waits in memory
};

struct NodeScenario {
  std::vector<uint32_t> lengths;  // of the samples
  uint32_t batch = 1;
  uint32_t epochs = 1;
  uint64_t seed = 0;
  Nanos step = 0;         // that the consumer computes on a batch
  Nanos sample_step = 0;  // and on each sample of it

  uint64_t arena_bytes = 0;  // the engine's memory for samples and tables
  bool keep = true;          // samples stay in memory for later epochs
  FolderSpec folder;

  // A sample costs `lookups` operations of kind kStat, `opens` of kind kOpen, and one of kind kRead
  // for every `read_bytes` of it, one after the other. No errors and no stalls.
  StorageSettings source;
  uint32_t lookups = 0;
  uint32_t opens = 1;
  uint64_t read_bytes = uint64_t{1} << 20;
  Nanos op_extra = 0;      // that an operation takes beside the model: system calls, wake-ups
  double reads_per_s = 0;  // what the processors can read, however fast the source is; 0: no limit
  size_t max_in_flight = 256;
  size_t in_flight = 0;     // fixed number instead of the tuner's; 0: tuned
  uint64_t read_ahead = 0;  // bytes, fixed instead of the tuner's; 0: tuned
  TunePolicy tuner = TunePolicy::kForebay;
  // The storage changes to `then` at that time; 0: it does not.
  Nanos change_at = 0;
  StorageSettings then;

  Status Validate() const;
};

struct NodeEpoch {
  double seconds = 0;
  double stall_seconds = 0;  // that the consumer waited for batches
  uint64_t samples = 0;      // delivered
  uint64_t source_reads = 0;
  uint64_t source_bytes = 0;
  uint64_t folder_reads = 0;
  uint64_t folder_bytes = 0;
};

struct NodeOutcome {
  double seconds = 0;
  double first_batch_seconds = 0;
  std::vector<NodeEpoch> epochs;
  uint64_t kept_bytes = 0;    // in memory, at the end
  uint64_t folder_bytes = 0;  // in the folder, at the end
  size_t in_flight_limit = 0;
  uint64_t read_ahead_bytes = 0;
};

// Called with each batch as it is handed out.
using BatchFn = std::function<void(uint32_t epoch, std::span<const SampleId> samples)>;
// Called with each step of the tuner.
using TuneFn = std::function<void(const TuneObservation& seen, const TuneDecision& decided)>;
// (samples delivered, samples in all); false stops the run with kCancelled.
using NodeProgressFn = std::function<bool(uint64_t done, uint64_t total)>;

// The same scenario gives the same answer on every machine. kResourceExhausted when a batch does
// not fit the memory.
Result<NodeOutcome> SimulateNode(const NodeScenario& scenario,
                                 const NodeProgressFn& progress = nullptr,
                                 const BatchFn& on_batch = nullptr,
                                 const TuneFn& on_tune = nullptr);

}  // namespace forebay::sim
