// The engine's mechanisms: each has a name, its knobs and its metrics, and nothing else tunes it.
// The engine reads all knobs at once (Engine::ApplyKnobs), so that what is set together acts
// together.
#pragma once

#include <cstdint>

#include "core/rate_limit.h"
#include "metrics/registry.h"

namespace forebay {

struct PrefetchMechanism {
  PrefetchMechanism(Registry& registry, uint64_t most, uint64_t initial)
      : mechanism(registry.AddMechanism("prefetch", "how many source reads are made at once")),
        reads(mechanism.AddKnob("source_reads_in_flight", KnobType::kCount, 0,
                                static_cast<int64_t>(most), static_cast<int64_t>(initial),
                                "source reads at once; 0: the tuner's")),
        requests_total(mechanism.AddCounter(
            "forebay_source_requests_total",
            "Requests sent to the source; neighbouring samples may share one")),
        in_flight(mechanism.AddGauge("forebay_source_in_flight_reads", "Source reads under way")),
        limit(mechanism.AddGauge("forebay_source_in_flight_limit_reads",
                                 "Source reads allowed at once")) {}
  Mechanism& mechanism;
  Knob& reads;
  Metric& requests_total;
  Metric& in_flight;
  Metric& limit;
};

struct ReadAheadMechanism {
  ReadAheadMechanism(Registry& registry, uint64_t most, uint64_t initial)
      : mechanism(registry.AddMechanism("read_ahead", "how far reads run ahead of consumers")),
        bytes(mechanism.AddKnob("read_ahead_bytes", KnobType::kBytes, 0, static_cast<int64_t>(most),
                                static_cast<int64_t>(initial),
                                "bytes in flight and ready ahead of consumers, beside samples that "
                                "stay in memory; 0: the tuner's")),
        limit_bytes(mechanism.AddGauge("forebay_read_ahead_limit_bytes",
                                       "Bytes allowed in flight and ready ahead of consumers")),
        ahead_bytes(mechanism.AddGauge("forebay_read_ahead_bytes",
                                       "Bytes in flight and ready ahead of consumers, not kept")),
        ready_bytes(mechanism.AddGauge("forebay_read_ahead_ready_bytes",
                                       "Bytes ready ahead of consumers, not kept")) {}
  Mechanism& mechanism;
  Knob& bytes;
  Metric& limit_bytes;
  Metric& ahead_bytes;
  Metric& ready_bytes;
};

struct TunerMechanism {
  explicit TunerMechanism(Registry& registry)
      : mechanism(registry.AddMechanism(
            "tuner", "finds the fewest reads and the smallest buffer that keep consumers fed")),
        on(mechanism.AddKnob("tuner_on", KnobType::kSwitch, 0, 1, 1,
                             "1: the tuner chooses reads at once and read-ahead; 0: its last "
                             "choices stay")),
        decisions_total(mechanism.AddCounter("forebay_tuner_decisions_total",
                                             "Changes that the tuner has made")),
        reads(mechanism.AddGauge("forebay_tuner_reads", "Reads at once that the tuner chose last")),
        bytes(mechanism.AddGauge("forebay_tuner_read_ahead_bytes",
                                 "Read-ahead that the tuner chose last")) {}
  Mechanism& mechanism;
  Knob& on;
  Metric& decisions_total;
  Metric& reads;
  Metric& bytes;
};

struct MemoryTierMechanism {
  MemoryTierMechanism(Registry& registry, uint64_t most, uint64_t initial)
      : mechanism(
            registry.AddMechanism("memory_tier", "samples that stay in memory for later epochs")),
        bytes(mechanism.AddKnob("memory_tier_bytes", KnobType::kBytes, 0,
                                static_cast<int64_t>(most), static_cast<int64_t>(initial),
                                "most bytes of samples kept in memory for later epochs; 0: all "
                                "that read-ahead leaves")),
        kept_bytes(mechanism.AddGauge("forebay_stage_kept_bytes", "Bytes the memory tier keeps")),
        evicted_total(mechanism.AddCounter("forebay_stage_evicted_samples_total",
                                           "Kept samples given up for a waiting batch")) {}
  Mechanism& mechanism;
  Knob& bytes;
  Metric& kept_bytes;
  Metric& evicted_total;
};

// Its metrics are the tier's (TierMetrics).
struct CacheFolderMechanism {
  explicit CacheFolderMechanism(Registry& registry)
      : mechanism(registry.AddMechanism("cache_folder", "copies in a folder on a local disk")),
        bytes(mechanism.AddKnob("cache_folder_bytes", KnobType::kBytes, 0, INT64_MAX, 0,
                                "most bytes of copies in the cache folder, within what it was "
                                "opened with; below what is there it takes no more; 0: no such "
                                "limit")) {}
  Mechanism& mechanism;
  Knob& bytes;
};

struct AdmissionMechanism {
  explicit AdmissionMechanism(Registry& registry)
      : mechanism(
            registry.AddMechanism("admission", "whether tiers take samples they do not hold")),
        memory(mechanism.AddKnob("admit_memory", KnobType::kSwitch, 0, 1, 1,
                                 "1: memory keeps more samples while it has room; 0: it keeps "
                                 "those it has")),
        folder(mechanism.AddKnob("admit_folder", KnobType::kSwitch, 0, 1, 1,
                                 "1: what is read from the source is copied into the cache folder; "
                                 "0: the folder only serves what it has")) {}
  Mechanism& mechanism;
  Knob& memory;
  Knob& folder;
};

struct HedgingMechanism {
  explicit HedgingMechanism(Registry& registry, uint64_t one_in_at_first)
      : mechanism(
            registry.AddMechanism("hedging", "second reads of samples whose first one hangs")),
        one_in(mechanism.AddKnob("hedge_one_in", KnobType::kCount, 0, 1'000'000,
                                 static_cast<int64_t>(one_in_at_first),
                                 "at most one read in so many is made a second time; 0: none")),
        hedged_total(mechanism.AddCounter("forebay_source_hedged_reads_total",
                                          "Second reads of samples whose first one hung")) {}
  Mechanism& mechanism;
  Knob& one_in;
  Metric& hedged_total;
};

struct SourceLimitMechanism {
  explicit SourceLimitMechanism(Registry& registry)
      : mechanism(registry.AddMechanism("source_limit", "how much is read from the source")),
        bytes(mechanism.AddKnob("source_bytes_per_second", KnobType::kBytesPerSecond, 0,
                                int64_t{1} << 50, 0,
                                "most bytes a second, for all jobs; 0: no limit")),
        operations(mechanism.AddKnob("source_operations_per_second", KnobType::kPerSecond, 0,
                                     1'000'000'000, 0,
                                     "most reads a second, for all jobs; 0: no limit")),
        extra(mechanism.AddKnob("source_extra", KnobType::kCount, 0, 2, 1,
                                "reads of what the cache folder has: 0: none but those that it "
                                "does not answer; 1: and those that come too late from it, and "
                                "sooner from the source; 2: all that come sooner from the source")),
        extra_total(
            mechanism.AddCounter("forebay_source_extra_reads_total",
                                 "Reads of the source for samples that the cache folder has")),
        extra_bytes_total(
            mechanism.AddCounter("forebay_source_extra_read_bytes_total", "Bytes of those reads")),
        held(mechanism.AddCounter("forebay_source_share_nanoseconds_total",
                                  "Time with reads that waited for a job's share of the source, "
                                  "summed over jobs")) {}
  RateLimits limits() const {
    const auto rate = [](const Knob& knob) {
      return knob.value() == 0 ? kUnlimited : static_cast<double>(knob.value());
    };
    return {rate(bytes), rate(operations)};
  }
  Mechanism& mechanism;
  Knob& bytes;
  Knob& operations;
  Knob& extra;
  Metric& extra_total;
  Metric& extra_bytes_total;
  Metric& held;
};

}  // namespace forebay
