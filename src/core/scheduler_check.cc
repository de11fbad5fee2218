#include "core/scheduler_check.h"

#include <algorithm>
#include <vector>

namespace forebay {
namespace {

using Entry = Residency::Entry;
using SampleState = Residency::State;
using Counts = std::vector<std::vector<uint32_t>>;  // by data set and sample

class Checks {
 public:
  explicit Checks(const Scheduler& s)
      : arena_(s.arena()),
        residency_(s.residency()),
        stores_(s.stores()),
        lookahead_(s.lookahead()),
        reads_(s.reads()),
        leases_(s.leases()) {}
  std::string All() const;

 private:
  const Entry& entry(DatasetId d, SampleId s) const { return residency_.dataset(d).entries[s]; }
  std::string CheckLeases(Counts* pins, uint64_t* used) const;
  std::string CheckDataset(DatasetId d, Residency::Bytes* bytes) const;
  std::string CheckEntry(DatasetId d, SampleId s, uint32_t pins, uint32_t ahead) const;
  std::string CheckBytes(const Residency::Bytes& bytes) const;

  const Arena& arena_;
  const Residency& residency_;
  const StoreQueue& stores_;
  const Lookahead& lookahead_;
  const Reads& reads_;
  const Leases& leases_;
};

std::string Checks::All() const {
  const std::vector<Residency::Dataset>& datasets = residency_.datasets();
  Counts pins(datasets.size());
  Counts ahead(datasets.size());
  for (size_t d = 0; d < datasets.size(); ++d) {
    pins[d].resize(datasets[d].entries.size());
    ahead[d].resize(datasets[d].entries.size());
  }
  uint64_t used = arena_.set_aside() + reads_.raced_bytes();
  if (std::string wrong = CheckLeases(&pins, &used); !wrong.empty()) return wrong;
  for (const uint64_t key : stores_.taking()) ++pins[key >> 32][static_cast<SampleId>(key)];
  lookahead_.CountWindows(&ahead);
  if (!reads_.RacesAreForReads()) return "a race for a sample that is not being read";
  Residency::Bytes bytes;
  size_t due = 0;
  for (DatasetId d = 0; d < datasets.size(); ++d) {
    if (std::string wrong = CheckDataset(d, &bytes); !wrong.empty()) return wrong;
    for (SampleId s = 0; s < datasets[d].entries.size(); ++s) {
      std::string wrong = CheckEntry(d, s, pins[d][s], ahead[d][s]);
      if (!wrong.empty()) return wrong + " (sample " + std::to_string(s) + ")";
      const Entry& e = datasets[d].entries[s];
      if (e.block != Arena::kNone) used += arena_.size(e.block);
      if (e.store == Residency::Store::kDue) ++due;
    }
  }
  if (used != arena_.used()) return "arena bytes do not add up";
  if (used > arena_.capacity()) return "more than the arena";
  if (due != stores_.due()) return "copies that are due do not add up";
  if (stores_.hangs() && due > 0) return "copies are due though nobody waits for them";
  return CheckBytes(bytes);
}

std::string Checks::CheckLeases(Counts* pins, uint64_t* used) const {
  uint64_t leased = 0;
  uint64_t serving = 0;
  for (const auto& [id, l] : leases_.leases()) {
    const std::vector<LeaseId>& pending = leases_.pending();
    const bool waits = std::find(pending.begin(), pending.end(), id) != pending.end();
    if (waits ? l.state == Leases::State::kHandedOut : !l.ready()) {
      return "a lease is pending, or is not, against its state";
    }
    if (l.state != Leases::State::kGathering && !l.missing.empty()) {
      return "a lease misses samples against its state";
    }
    leased += l.bytes;
    uint64_t bytes = 0;
    for (SampleId s : l.samples) bytes += ArenaAllocator::Rounded(entry(l.dataset, s).length);
    if (l.bytes != bytes) return "a lease's bytes do not add up";
    if (l.admitted) serving += l.bytes;
    if (l.serving() && !l.admitted && l.missing.size() != l.samples.size()) {
      return "serving without being admitted";
    }
    if (l.block != Arena::kNone && !l.in_region) *used += arena_.size(l.block);
    if (l.copied()) continue;
    for (SampleId s : l.samples) ++(*pins)[l.dataset][s];
    for (SampleId s : l.missing) --(*pins)[l.dataset][s];
  }
  if (leased != leases_.leased_bytes()) return "leased bytes do not add up";
  if (serving != leases_.serving_bytes()) return "serving bytes do not add up";
  uint64_t regions = 0;
  for (StreamId id = 0; id < lookahead_.streams().size(); ++id) {
    const Arena::Block region = leases_.consumer(id).region;
    if (region != Arena::kNone) regions += arena_.size(region);
  }
  if (regions != arena_.regions()) return "regions do not add up";
  *used += regions;
  return {};
}

// Adds to `bytes` what its entries come to.
std::string Checks::CheckDataset(DatasetId d, Residency::Bytes* bytes) const {
  const Residency::Dataset& dataset = residency_.dataset(d);
  uint64_t uncovered = 0;
  uint64_t sized = 0;
  uint64_t kept_bytes = 0;
  size_t unsized = 0;
  for (SampleId s = 0; s < dataset.entries.size(); ++s) {
    const Entry& e = dataset.entries[s];
    const uint64_t rounded = ArenaAllocator::Rounded(e.length);
    const bool kept = (e.flags & Residency::kKept) != 0;
    if (e.state == SampleState::kUnsized) {
      ++unsized;
    } else if (!e.dead) {
      sized += rounded;
    }
    if (!kept && !e.dead && !(e.flags & Residency::kInTier) &&
        dataset.ShareOf(s) != KeepShare::kNone) {
      ++uncovered;
      if (!dataset.share.empty() && dataset.ShareOf(s) == KeepShare::kHome) {
        bytes->reserved += rounded;
      }
    }
    if (e.block == Arena::kNone) continue;
    const uint64_t size = arena_.size(e.block);
    if (kept) bytes->kept += size;
    if (kept) kept_bytes += size;
    if (dataset.parked != 0 && !kept) return "parked, and in memory though it is not kept";
    if (dataset.Spare(s)) bytes->spare += size;
    if (kept) continue;
    if (e.pins != 0) {
      bytes->pinned += size;
    } else if (e.store != Residency::Store::kNone && e.ahead == 0) {
      bytes->storing += size;
    } else {
      bytes->ahead += size;
      if (e.state == SampleState::kResident) bytes->ready += size;
    }
  }
  if (unsized != dataset.unsized || sized != dataset.sized_bytes) return "lengths do not add up";
  if (kept_bytes != dataset.kept_bytes) return "a data set's kept bytes do not add up";
  if (uncovered != dataset.uncovered) return "uncovered samples do not add up";
  return {};
}

std::string Checks::CheckEntry(DatasetId d, SampleId s, uint32_t pins, uint32_t ahead) const {
  using Store = Residency::Store;
  const Entry& e = entry(d, s);
  if (e.pins != pins) return "pins do not add up";
  if (e.ahead != ahead) return "look-ahead does not add up";
  const bool has_place = e.state == SampleState::kReading || e.state == SampleState::kResident;
  if (has_place != (e.block != Arena::kNone)) return "block without state";
  const bool resident = e.state == SampleState::kResident;
  if (!resident && e.pins != 0) return "pinned but not resident";
  if (e.store == Store::kDue) {
    if (!resident) return "a copy of nothing is due";
    if (e.flags & Residency::kInTier) return "a copy is due that is there";
    if (stores_.Writing(d, s)) return "a copy is due and under way";
  }
  if (e.dead && ((e.flags & (Residency::kKept | Residency::kInTier)) || e.store != Store::kNone)) {
    return "invalidated, and in a tier or on its way there";
  }
  if (e.dead && resident && e.pins == 0) return "invalidated, and in memory for nobody";
  if (e.store == Store::kWriting && !stores_.Writing(d, s)) return "stays for no copy";
  const bool kept = (e.flags & Residency::kKept) != 0;
  if (kept && e.block == Arena::kNone) return "kept without a block";
  if (resident && e.pins == 0 && e.ahead == 0 && !kept && e.store == Store::kNone) {
    return "resident without a reason";
  }
  return {};
}

std::string Checks::CheckBytes(const Residency::Bytes& bytes) const {
  const Residency::Bytes& counted = residency_.bytes();
  if (bytes.kept != counted.kept) return "kept bytes do not add up";
  if (bytes.spare != counted.spare) return "spare bytes do not add up";
  if (bytes.reserved != counted.reserved) return "reserved bytes do not add up";
  if (bytes.storing != counted.storing) return "bytes that wait for their copy do not add up";
  if (bytes.ahead != counted.ahead) return "look-ahead bytes do not add up";
  if (bytes.ready != counted.ready) return "ready bytes do not add up";
  if (bytes.pinned != counted.pinned) return "pinned bytes do not add up";
  return {};
}

}  // namespace

std::string CheckInvariants(const Scheduler& scheduler) { return Checks(scheduler).All(); }

}  // namespace forebay
