// Waits: which leases wait, and for what. A look at a Scheduler; it changes nothing. Pure.
#pragma once

#include <cstddef>

#include "core/actions.h"
#include "core/leases.h"
#include "core/scheduler.h"
#include "metrics/stall.h"

namespace forebay {

class Waits {
 public:
  explicit Waits(const Scheduler& scheduler) : scheduler_(scheduler) {}

  // Why the stream's pending lease waits; with several, the oldest.
  StallCause CauseOfStream(StreamId stream) const;
  // Why this one does: consumers of an itemised stream wait each for their own.
  StallCause CauseOfLease(LeaseId lease) const;
  // A sample that the stream's pending lease misses; false when there is none.
  bool FirstMissing(StreamId stream, DatasetId* dataset, SampleId* sample) const;
  // Nothing is under way that could end the wait: only a Release can.
  bool OnlyReleaseHelps(StreamId stream) const;
  // A consumer waits for samples that are not there.
  bool AnyForSamples() const;
  // Pending leases that a consumer waits for and only reads can fill.
  size_t CountForReads() const;

 private:
  using Lease = Leases::Lease;
  const Leases& leases() const { return scheduler_.leases(); }
  const Lease& lease(LeaseId id) const { return leases().leases().at(id); }
  StallCause CauseOf(const Lease& lease) const;
  // Where the sample is read from.
  static StallCause PlaceOf(const Residency::Dataset& dataset, SampleId sample);
  // Memory is free for all that it misses.
  bool RoomForMissing(const Lease& lease) const;
  // A length that it asked for has not come yet.
  bool AwaitsLength(const Lease& lease) const;

  const Scheduler& scheduler_;
};

}  // namespace forebay
