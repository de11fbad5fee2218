#include "core/place_cost.h"

#include <algorithm>
#include <bit>

namespace forebay {

PlaceCost PlaceCost::Of(const OriginModel& model, uint64_t bytes) {
  PlaceCost cost;
  if (!model.known()) return cost;
  for (size_t i = 0; i < kDepths; ++i) {
    cost.at[i] = static_cast<double>(model.Expect(bytes, size_t{1} << i));
  }
  cost.late = model.Late();
  return cost;
}

PlaceCost PlaceCost::Flat(double latency) {
  PlaceCost cost;
  cost.at.fill(latency);
  return cost;
}

double PlaceCost::Expect(size_t depth) const {
  const size_t most = size_t{1} << (kDepths - 1);
  const size_t whole = std::clamp<size_t>(depth, 1, most);
  const auto low = static_cast<size_t>(std::bit_width(whole)) - 1;
  double latency = at[low];
  if (low + 1 < kDepths) {
    const auto below = static_cast<double>(size_t{1} << low);
    latency += (static_cast<double>(whole) - below) / below * (at[low + 1] - at[low]);
  }
  return std::max(latency, stuck);
}

// A place that has nothing to do is tried for a part of the time that its reads would take.
bool PlaceChoice::Probe(Nanos now, double takes, Nanos* at) {
  constexpr double kOneIn = 16;
  constexpr double kLongest = 30.0 * kSecond;
  if (now < *at) return false;
  *at = now + static_cast<Nanos>(std::min(kOneIn * takes, kLongest));
  return true;
}

bool PlaceChoice::PassBy(const PlaceCost& folder, size_t folder_reads, const PlaceCost& source,
                         size_t source_reads, SourceExtra extra, bool late, Nanos now) {
  if (extra == SourceExtra::kNever || (extra == SourceExtra::kLate && !late)) return false;
  if (!folder.known()) return false;
  const bool open = extra == SourceExtra::kOpen;
  // What read-ahead hides from any step is in time.
  constexpr double kHidden = 20.0 * kMilli;
  const double in_time = open ? 0 : kHidden;
  double here = folder.Expect(folder_reads + 1);
  if (!source.known()) return open && source_reads == 0 && Probe(now, here, &source_at_);
  const double there = source.Expect(source_reads + 1);
  // A single answer tells of a recovery before the model believes it.
  if (folder_reads == 0 && folder.last > 0) here = std::min(here, folder.last);
  // Where the source is to be spared, it must be surely the first.
  if (here <= in_time + (open ? 1 : source.late) * there) {
    return open && source_reads == 0 && Probe(now, there, &source_at_);
  }
  return folder_reads > 0 || !Probe(now, here, &folder_at_);
}

}  // namespace forebay
