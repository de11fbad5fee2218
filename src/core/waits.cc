#include "core/waits.h"

#include <algorithm>
#include <cstdint>
#include <vector>

namespace forebay {
namespace {

using Entry = Residency::Entry;
using SampleState = Residency::State;

}  // namespace

bool Waits::FirstMissing(StreamId id, DatasetId* dataset, SampleId* sample) const {
  for (const LeaseId candidate : leases().pending()) {
    const Lease& l = lease(candidate);
    if (l.stream != id || l.missing.empty()) continue;
    *dataset = l.dataset;
    *sample = l.missing.front();
    return true;
  }
  return false;
}

StallCause Waits::CauseOfStream(StreamId id) const {
  for (const LeaseId candidate : leases().pending()) {
    const Lease& l = lease(candidate);
    if (l.stream == id) return CauseOf(l);
  }
  const bool planned = !scheduler_.lookahead().streams()[id].epochs.empty();
  return planned ? StallCause::kSource : StallCause::kPlan;
}

StallCause Waits::CauseOfLease(LeaseId id) const {
  const auto found = leases().leases().find(id);
  return found == leases().leases().end() ? StallCause::kSource : CauseOf(found->second);
}

StallCause Waits::CauseOf(const Lease& l) const {
  if (l.throttled) return StallCause::kShare;
  const Residency::Dataset& dataset = scheduler_.residency().dataset(l.dataset);
  bool from_tier = false;
  bool from_peer = false;
  for (const SampleId s : l.missing) {
    const Entry& e = dataset.entries[s];
    from_tier |= e.state == SampleState::kAbsent && scheduler_.stores().Awaits(l.dataset, s);
    if (e.state == SampleState::kUnsized) return StallCause::kSource;
    if (e.state != SampleState::kReading) continue;
    const StallCause place = PlaceOf(dataset, s);
    if (place == StallCause::kSource) return place;
    (place == StallCause::kTier ? from_tier : from_peer) = true;
  }
  if (from_peer) return StallCause::kPeer;
  if (from_tier) return StallCause::kTier;
  if (l.copying()) return StallCause::kDecode;
  // Nothing holds its first read up: it starts at the next look.
  if (!l.missing.empty() && RoomForMissing(l)) {
    return PlaceOf(dataset, l.missing.front());
  }
  // What waits to be copied into the folder has the memory.
  return scheduler_.residency().bytes().storing > 0 ? StallCause::kTier : StallCause::kMemory;
}

StallCause Waits::PlaceOf(const Residency::Dataset& dataset, SampleId s) {
  if (dataset.entries[s].flags & Residency::kInTier) return StallCause::kTier;
  const bool from_peer = dataset.Remote(s) || dataset.AwaitsNodes(s);
  return from_peer ? StallCause::kPeer : StallCause::kSource;
}

bool Waits::RoomForMissing(const Lease& l) const {
  const Residency::Dataset& dataset = scheduler_.residency().dataset(l.dataset);
  uint64_t bytes = 0;
  for (const SampleId s : l.missing) bytes += dataset.entries[s].length;
  const Arena& arena = scheduler_.arena();
  // Free memory lies in several holes: only much of it has surely one that is large enough.
  return (arena.capacity() - arena.used()) / 4 >= bytes;
}

bool Waits::AwaitsLength(const Lease& l) const {
  const Residency::Dataset& dataset = scheduler_.residency().dataset(l.dataset);
  return l.unsized && std::any_of(l.missing.begin(), l.missing.end(), [&](SampleId s) {
           const Entry& e = dataset.entries[s];
           return e.state == SampleState::kUnsized && (e.flags & Residency::kUrgent);
         });
}

bool Waits::OnlyReleaseHelps(StreamId id) const {
  if (scheduler_.reads().Moving() || leases().CopiesWait() || leases().consumer(id).due) {
    return false;
  }
  for (const LeaseId candidate : leases().pending()) {
    const Lease& l = lease(candidate);
    if (l.copying() || AwaitsLength(l) || (l.throttled && !l.serving())) return false;
    if (l.stream == id) return true;
  }
  return false;
}

bool Waits::AnyForSamples() const {
  const std::vector<LeaseId>& pending = leases().pending();
  return std::any_of(pending.begin(), pending.end(), [this](LeaseId id) {
    const Lease& l = lease(id);
    return l.wanted() && !l.serving() && !l.missing.empty();
  });
}

size_t Waits::CountForReads() const {
  const std::vector<LeaseId>& pending = leases().pending();
  return static_cast<size_t>(std::count_if(pending.begin(), pending.end(), [this](LeaseId id) {
    const Lease& l = lease(id);
    return l.wanted() && !l.serving() && !l.blocked() && !l.throttled && !l.missing.empty();
  }));
}

}  // namespace forebay
