// PlaceCost and PlaceChoice: from which of two places a sample is read that both have, by when each
// would be done with it, given what it was asked for already. Pure: times are handed in.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include "base/nanos.h"
#include "core/cost_model.h"

namespace forebay {

// What a read of a data set takes at a place, in nanoseconds: a picture of an OriginModel. All 0:
// not known.
struct PlaceCost {
  static constexpr size_t kDepths = OriginModel::kBuckets;
  // With 1, 2, 4, ... reads under way, itself included.
  std::array<double, kDepths> at{};
  double late = 1;   // nine in ten take at most so many times as long
  double last = 0;   // what the last answer took; 0: not known
  double stuck = 0;  // for how long a read hangs there; 0: none does

  static PlaceCost Of(const OriginModel& model, uint64_t bytes);
  // The same whatever the depth.
  static PlaceCost Flat(double latency);
  bool known() const { return at[0] > 0; }
  // Of a read that makes `depth` under way.
  double Expect(size_t depth) const;
};

// Which reads the source may get of samples that the cache folder has.
enum class SourceExtra : uint8_t {
  kNever = 0,  // those that the folder does not answer
  kLate = 1,   // and those that come too late from it, and sooner from the source
  kOpen = 2,   // all that come sooner from the source
};

// Not safe for concurrent use.
class PlaceChoice {
 public:
  // True: the source is to be read. `late`: a consumer waits, so that what comes next is late
  // already. `folder_reads`, `source_reads`: under way.
  bool PassBy(const PlaceCost& folder, size_t folder_reads, const PlaceCost& source,
              size_t source_reads, SourceExtra extra, bool late, Nanos now);

 private:
  static bool Probe(Nanos now, double takes, Nanos* at);

  // When a place that has nothing to do is tried again.
  Nanos folder_at_ = 0;
  Nanos source_at_ = 0;
};

}  // namespace forebay
