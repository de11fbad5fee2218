// What goes in and out of a Scheduler and between its parts: numbers, actions and shapes. Pure.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "base/nanos.h"
#include "catalog/catalog.h"
#include "core/job_table.h"
#include "core/keep_share.h"
#include "core/place_cost.h"

namespace forebay {

using DatasetId = uint32_t;
using StreamId = uint32_t;
using LeaseId = uint64_t;
inline constexpr LeaseId kNoLease = 0;

// Where a sample is read from.
enum class Origin : uint8_t { kSource, kTier, kPeer };

// What a node's tiers have taken and given up.
struct HeldChanges {
  std::vector<SampleId> got;
  std::vector<SampleId> lost;
};

struct ReadAction {
  DatasetId dataset = 0;
  SampleId sample = 0;
  uint64_t offset = 0;  // in the arena
  uint32_t length = 0;
  uint32_t serial = 0;              // tells the two reads of a race apart
  uint32_t group = 0;               // not 0: one request with its neighbours in `out` of that group
  uint64_t request_bytes = 0;       // of the file that its request reads; 0: `length`
  Origin origin = Origin::kTier;    // kTier: from the folder if that has it, else from the source
  Origin likely = Origin::kSource;  // where it will come from, as far as is known
  bool store = false;               // what comes from the source is to be copied into the folder
  JobId job = kNoJob;               // whose share of the source it takes
  uint64_t charged = 0;             // of that share, in bytes; a group's first read has it all
  bool store_spare = false;         // `store`, though it does not live here
  bool urgent = false;              // a consumer waits for it
  bool serving = false;             // for other nodes: outside of the limit of reads at once
};

// The second tier of a data set.
struct TierShape {
  bool present = false;
  bool holds_all = false;           // large enough for every sample
  uint64_t largest = ~uint64_t{0};  // longest sample that it takes
  // What copies of others' samples leave free, for what will live here and is not known yet.
  uint64_t left_by_copies = 0;
};

// What reads of a data set cost, and what it pays to read in one request.
struct ReadCosts {
  PlaceCost tier;
  PlaceCost source;
  bool late = false;         // a consumer waits
  uint64_t merge_bytes = 0;  // largest request for several samples; 0: one each
  uint64_t merge_gap = 0;    // bytes between two samples worth reading through
};

// Give a copy of the sample to the second tier.
struct StoreAction {
  DatasetId dataset = 0;
  SampleId sample = 0;
  uint64_t offset = 0;  // in the arena
  uint32_t length = 0;
  uint32_t crc = 0;
};

// Copy the samples of a lease into its contiguous block.
struct CopyAction {
  LeaseId lease = kNoLease;
  uint64_t dest = 0;
  std::vector<uint64_t> from;
  std::vector<uint32_t> lengths;
};

struct OrderAction {
  StreamId stream = 0;
  uint64_t epoch = 0;
  uint64_t first_position = 0;  // global position to start from
  uint64_t generation = 0;      // an answer for an older generation is ignored
};

// A consumer waits for the sample's length.
struct SizeAction {
  DatasetId dataset = 0;
  SampleId sample = 0;
};

struct SampleLength {
  SampleId sample = 0;
  uint32_t length = 0;
  bool ok = true;  // false: it could not be had
};

struct StreamShape {
  DatasetId dataset = 0;
  uint32_t batch_size = 1;
  bool drop_last = false;   // drop an epoch's last batch when it is not full
  bool contiguous = false;  // batches are copied into one piece, ahead of time
  bool itemised = false;    // samples are fetched one by one, in roughly the declared order
  uint64_t first_epoch = 0;
  uint64_t first_position = 0;
  uint64_t epochs = 0;   // 0: the horizon is extended without end
  bool whole = false;    // each epoch uses every sample once
  std::string job = {};  // whose limits hold for it
  // Samples are fetched for other nodes, in any order, many at once.
  bool serving = false;
  // Its consumer tells the order, if at all: what is fetched before it has told one is not of it.
  bool declared = false;
};

struct SchedulerOptions {
  uint64_t arena_bytes = 0;
  uint64_t staging_bytes = 0;  // share that stays free of kept samples; 0: chosen from the streams
  bool keep = true;            // false: no memory tier (every sample is read for each use)
  uint64_t keep_bytes = 0;     // the most that the memory tier takes; 0: all that staging leaves
  // Samples that look-ahead may have under way, however few requests they are; a group is a
  // sixteenth of them at most, so that several are.
  size_t max_samples = size_t{1} << 20;
  // How long to wait for the second tier while it ends no copy.
  Nanos copy_patience = 5 * kSecond;
};

struct SchedulerCounters {
  uint64_t reads = 0, read_bytes = 0, failed_reads = 0;
  uint64_t hits = 0, hit_bytes = 0;     // resident when asked for
  uint64_t evicted = 0;                 // kept samples given up
  uint64_t retracted = 0;               // look-ahead taken back
  uint64_t changed = 0;                 // samples whose bytes differ from an earlier read
  uint64_t requests = 0;                // to the source; a group is one
  uint64_t hedged = 0;                  // second reads of samples whose first one hangs
  uint64_t extra = 0, extra_bytes = 0;  // from the source, though the second tier has it
  uint64_t hedged_left = 0;             // of those, because the place of the first one was left
  uint64_t copies_given_up = 0;         // for a second tier that hung, or because memory was short
};

// What all parts of a Scheduler use.
struct SchedulerCommon {
  JobTable jobs;
  Nanos now = 0;
  SchedulerCounters counters;
  // Whether memory and the second tier take samples that they do not hold.
  bool admit_memory = true;
  bool admit_tier = true;
  // The second tier does not answer: nothing is asked of it, and nothing waits for it.
  bool tier_left = false;
};

}  // namespace forebay
