#include "core/reads.h"

#include <algorithm>
#include <cassert>
#include <utility>

namespace forebay {
namespace {

// Positions one call may plan, so that a lock held around it is short.
constexpr size_t kPlanStep = 4096;

}  // namespace

// ---- starting reads ---------------------------------------------------------------------------

void Reads::Ask(ReadAction read, bool charge) {
  if (charge) Charge(read);
  (read.serving ? asked_serving_ : asked_).push_back(read);
}

bool Reads::AskedOf(DatasetId d) const {
  const auto of = [d](const ReadAction& read) { return read.dataset == d; };
  return std::any_of(asked_.begin(), asked_.end(), of) ||
         std::any_of(asked_serving_.begin(), asked_serving_.end(), of);
}

// What hangs, or has lost a race and may never end, does not hold up what a lease waits for.
bool Reads::HasRoom(size_t limit) const {
  return requests_ - serving_requests_ < std::max<size_t>(1, limit) + hanging_ + orphans_.size();
}

void Reads::StartAsked(size_t limit, std::vector<ReadAction>* out) {
  while (!asked_.empty() && HasRoom(limit)) {
    Start(asked_.front(), out);
    asked_.pop_front();
  }
  // Behind every consumer. Who asks has a limit of its own; here it is only bounded.
  const size_t most = std::max(limit, max_samples_ / 16);
  while (asked_.empty() && !asked_serving_.empty() && serving_requests_ < most) {
    Start(asked_serving_.front(), out);
    asked_serving_.pop_front();
  }
}

void Reads::StartAhead(size_t limit, std::vector<ReadAction>* out) {
  const size_t streams = lookahead_.streams().size();
  size_t budget = kPlanStep;
  size_t idle = 0;
  // Where it is requests that are short, jobs that have got less of their share go first; in a
  // second turn the others may.
  // What was lost with a place that is left takes none of the source's requests.
  if (common_.tier_left) limit += orphans_.size();
  const uint64_t most_bytes = most_flight_bytes_ == 0 ? ~uint64_t{0} : most_flight_bytes_;
  while (requests_ - serving_requests_ < limit && in_flight_ < max_samples_ &&
         flight_bytes_ < most_bytes && idle < 2 * streams && budget > 0) {
    const StreamId id = lookahead_.NextTurn();
    ReadAction action;
    if (lookahead_.MayAdvance(id) &&
        (idle >= streams || !common_.jobs.ShouldYield(lookahead_.streams()[id].job)) &&
        lookahead_.Advance(id, &action, &budget)) {
      StartGroup(id, action, &budget, out);
      idle = 0;
    } else {
      ++idle;
    }
  }
}

Origin Reads::ChooseOrigin(DatasetId d, SampleId s) {
  const Residency::Dataset& dataset = residency_.dataset(d);
  const Residency::Entry& e = dataset.entries[s];
  if (e.flags & Residency::kSuspect) return Origin::kSource;  // what the folder has is in doubt
  if (!(e.flags & Residency::kInTier)) return Origin::kTier;
  if (common_.tier_left) return Origin::kSource;
  if (!PassBy(dataset.costs)) return Origin::kTier;
  ++common_.counters.extra;
  common_.counters.extra_bytes += e.length;
  return Origin::kSource;
}

// Of a sample that the folder has.
bool Reads::PassBy(const ReadCosts& costs) {
  if (!fixed_split_) {
    return choice_.PassBy(costs.tier, requests_at_[static_cast<size_t>(Origin::kTier)],
                          costs.source, requests_at_[static_cast<size_t>(Origin::kSource)],
                          source_extra_, costs.late, common_.now);
  }
  split_due_ += *fixed_split_;
  if (split_due_ < 1) return false;
  split_due_ -= 1;
  return true;
}

void Reads::AddRequest(const ReadAction& read) {
  ++requests_;
  ++requests_at_[static_cast<size_t>(read.likely)];
}

void Reads::EndRequest(const ReadAction& read) {
  --requests_;
  --requests_at_[static_cast<size_t>(read.likely)];
}

uint32_t Reads::NewSerial() {
  const uint32_t serial = next_serial_++;
  if (next_serial_ == 0) next_serial_ = 1;
  return serial;
}

void Reads::Start(const ReadAction& action, std::vector<ReadAction>* out) {
  const Residency::Dataset& dataset = residency_.dataset(action.dataset);
  out->push_back(action);
  ReadAction& started = out->back();
  started.serial = NewSerial();
  started.origin = ChooseOrigin(action.dataset, action.sample);
  if (started.origin == Origin::kTier) {
    if (dataset.entries[action.sample].flags & Residency::kInTier) {
      started.likely = Origin::kTier;
    } else if (dataset.Remote(action.sample)) {
      started.likely = Origin::kPeer;
    }
  }
  stores_.OnReadBegun(&started);
  ++in_flight_;
  if (started.serving) {
    ++serving_requests_;
  } else {
    flight_bytes_ += action.length;
  }
  if (FromPeer(started)) ++peer_reads_;
  ++common_.counters.reads;
  common_.counters.read_bytes += action.length;
  if (action.group == 0 || ++group_left_[action.group] == 1) {
    AddRequest(started);
    if (started.likely == Origin::kSource) {
      ++common_.counters.requests;
      if (started.charged == 0) Charge(started);
    }
  }
}

// ---- groups -----------------------------------------------------------------------------------

// Reads that may become one request: the file's range [begin, end) that they cover so far.
class Reads::Group {
 public:
  Group(const Residency::Dataset& dataset, const ReadAction& first, size_t most_members)
      : dataset_(dataset),
        most_members_(most_members),
        extent_(dataset.layout->extent(first.sample)),
        begin_(extent_.offset),
        end_(extent_.offset + extent_.length),
        members_{first} {}

  const Residency::Dataset& dataset() const { return dataset_; }
  const Extent& first() const { return extent_; }
  std::deque<ReadAction>& members() { return members_; }
  uint64_t bytes() const { return end_ - begin_; }

  // Whether `s`, which lies before or behind, may join.
  bool IsNear(SampleId s) const {
    if (members_.size() >= most_members_ || dataset_.Remote(s)) return false;
    const Extent e = dataset_.layout->extent(s);
    if (e.object != extent_.object) return false;
    const bool before = e.offset + e.length <= begin_;
    if (!before && e.offset < end_) return false;
    const uint64_t gap = before ? begin_ - e.offset - e.length : e.offset - end_;
    const uint64_t first = std::min(begin_, e.offset);
    const uint64_t last = std::max(end_, e.offset + e.length);
    return gap <= dataset_.costs.merge_gap && last - first <= dataset_.costs.merge_bytes;
  }

  void Join(const ReadAction& member) {
    const Extent e = dataset_.layout->extent(member.sample);
    if (e.offset < begin_) {
      members_.push_front(member);
    } else {
      members_.push_back(member);
    }
    begin_ = std::min(begin_, e.offset);
    end_ = std::max(end_, e.offset + e.length);
  }

 private:
  const Residency::Dataset& dataset_;
  const size_t most_members_;
  const Extent extent_;
  uint64_t begin_;
  uint64_t end_;
  std::deque<ReadAction> members_;
};

// Whether a sample that nobody has asked for yet may be read along with its neighbour.
bool Reads::MayJoin(const Residency::Dataset& dataset, SampleId s) const {
  constexpr uint8_t kNo = Residency::kFailedSoon | Residency::kFailedNow | Residency::kSuspect;
  const Entry& e = dataset.entries[s];
  return e.state == State::kAbsent && !e.dead && !(e.flags & kNo) && !FromTier(e.flags);
}

// Every sample is kept where it lands.
bool Reads::FitsMemory() const {
  uint64_t everything = 0;
  for (const Residency::Dataset& dataset : residency_.datasets()) {
    if (dataset.parked == 0) everything += dataset.rounded_bytes;
  }
  return everything <= residency_.keep_quota();
}

void Reads::StartGroup(StreamId id, const ReadAction& action, size_t* budget,
                       std::vector<ReadAction>* out) {
  const Residency::Dataset& dataset = residency_.dataset(action.dataset);
  const bool in_tier = FromTier(dataset.entries[action.sample].flags);
  if (dataset.layout == nullptr || dataset.costs.merge_bytes <= action.length || in_tier ||
      dataset.Remote(action.sample) || dataset.layout->extent(action.sample).whole_object) {
    Start(action, out);
    return;
  }
  Group group(dataset, action, std::max<size_t>(2, max_samples_ / 16));
  const StreamShape& shape = lookahead_.streams()[id].shape;
  if (shape.whole && ((dataset.tier.holds_all && !stores_.hangs()) || FitsMemory())) {
    JoinSurroundings(id, &group);
  } else if (!shape.itemised) {
    JoinOrder(id, &group, budget);
  }
  const uint32_t number = group.members().size() > 1 ? next_group_++ : 0;
  if (next_group_ == 0) next_group_ = 1;
  for (ReadAction& member : group.members()) {
    member.group = number;
    member.request_bytes = group.bytes();
    Start(member, out);
  }
}

// Everything will be kept: the surroundings are staged with it, in aligned pieces, so that every
// shard is read from end to end in large requests.
void Reads::JoinSurroundings(StreamId id, Group* group) {
  const Residency::Dataset& dataset = group->dataset();
  const DatasetId d = lookahead_.streams()[id].shape.dataset;
  const SampleId sample = group->members().front().sample;
  const uint64_t most = dataset.costs.merge_bytes;
  const uint64_t piece = group->first().offset / most * most;
  const auto stage = [&](SampleId s) {
    if (stores_.Writing(d, s)) return false;
    if (!MayJoin(dataset, s) || !group->IsNear(s) || !lookahead_.Allot(id, s)) return false;
    const Entry& e = dataset.entries[s];
    ReadAction neighbour = {.dataset = d, .sample = s, .offset = e.offset, .length = e.length};
    neighbour.job = lookahead_.streams()[id].job;
    group->Join(neighbour);
    return true;
  };
  for (SampleId s = sample; s > 0; --s) {
    if (dataset.layout->extent(s - 1).offset < piece || !stage(s - 1)) break;
  }
  for (SampleId s = sample + 1; s < dataset.entries.size() && stage(s); ++s) {
  }
}

// What the order asks for next, as far as it goes on in the file.
void Reads::JoinOrder(StreamId id, Group* group, size_t* budget) {
  const Residency::Dataset& dataset = group->dataset();
  for (SampleId s = group->members().front().sample + 1; s < dataset.entries.size(); ++s) {
    if (*budget == 0 || !lookahead_.IsNext(id, s)) break;
    ReadAction next;
    if (!MayJoin(dataset, s) || !group->IsNear(s)) break;
    if (!lookahead_.Advance(id, &next, budget, true)) break;
    group->Join(next);
  }
}

// ---- charges ----------------------------------------------------------------------------------

void Reads::Charge(ReadAction& read) {
  read.charged = std::max<uint64_t>(1, read.request_bytes != 0 ? read.request_bytes : read.length);
  common_.jobs.Charge(read.job, read.charged);
}

// The charge was for what had been expected.
void Reads::SettleCharge(const ReadAction& read, bool ok, Origin from) {
  uint64_t bytes = read.charged;
  if (from != Origin::kSource) {
    if (bytes != 0) common_.jobs.GiveBack(read.job, bytes);
    return;
  }
  if (bytes == 0 && read.likely != Origin::kSource) {
    bytes = read.length;
    common_.jobs.Charge(read.job, bytes);
  }
  JobStats& stats = common_.jobs.stats(read.job);
  if (!ok || bytes == 0) return;
  ++stats.requests;
  stats.bytes += bytes;
}

// ---- races ------------------------------------------------------------------------------------

uint64_t Reads::raced_bytes() const {
  uint64_t bytes = 0;
  for (const auto& [serial, lost] : orphans_) bytes += arena_.size(lost);
  for (const auto& [key, race] : races_) bytes += arena_.size(race.second_block);
  return bytes;
}

bool Reads::RacesAreForReads() const {
  return std::all_of(races_.begin(), races_.end(), [&](const auto& race) {
    const auto d = static_cast<DatasetId>(race.first >> 32);
    const auto s = static_cast<SampleId>(race.first);
    return residency_.dataset(d).entries[s].state == State::kReading;
  });
}

bool Reads::MayHedge(const ReadAction& hanging, bool left) const {
  constexpr uint64_t kAtFirst = 2;
  // Losers may hold their memory for long, and a batch must find room all the same.
  const uint64_t memory_one_in = left ? 2 : 8;
  const Entry& e = residency_.dataset(hanging.dataset).entries[hanging.sample];
  if (hedge_one_in_ == 0 || e.state != State::kReading || e.dead || Raced(hanging)) {
    return false;
  }
  // Where everything hangs a second read does not help; a place that is left is not everything.
  const uint64_t limited = common_.counters.hedged - common_.counters.hedged_left;
  if (!left && hedge_one_in_ * limited > common_.counters.reads + kAtFirst * hedge_one_in_) {
    return false;
  }
  const uint64_t raced = raced_bytes() + ArenaAllocator::Rounded(e.length);
  return memory_one_in * raced <= arena_.usable();
}

ReadAction Reads::Hedge(const ReadAction& hanging, Arena::Block block, bool left) {
  ReadAction read = {.dataset = hanging.dataset,
                     .sample = hanging.sample,
                     .offset = arena_.offset(block),
                     .length = entry(hanging.dataset, hanging.sample).length};
  read.serial = NewSerial();
  read.origin = Origin::kSource;
  read.job = hanging.job;
  read.store = hanging.store && !stores_.hangs();
  Charge(read);
  races_[Key(read.dataset, read.sample)] = {hanging.serial, read.serial, block};
  ++in_flight_;
  AddRequest(read);
  flight_bytes_ += read.length;
  ++common_.counters.requests;
  ++common_.counters.hedged;
  if (left) ++common_.counters.hedged_left;
  return read;
}

// True: the read's outcome is not the sample's: it lost a race, or the other one still runs.
bool Reads::SettleRace(const ReadAction& read, bool ok) {
  if (const auto orphan = orphans_.find(read.serial); orphan != orphans_.end()) {
    arena_.Free(orphan->second);
    orphans_.erase(orphan);
    return true;
  }
  const auto it = races_.find(Key(read.dataset, read.sample));
  if (it == races_.end()) return false;
  const Race race = it->second;
  races_.erase(it);
  const bool first = read.serial == race.first;
  // The entry goes on with the winner, or with whichever is left.
  const bool takes_second = first != ok;
  const Arena::Block other =
      takes_second ? residency_.ReplaceBlock(read.dataset, read.sample, race.second_block)
                   : race.second_block;
  if (ok) {
    orphans_.emplace(first ? race.second : race.first, other);
    return false;
  }
  arena_.Free(other);
  return true;
}

// ---- the end of a read ------------------------------------------------------------------------

Reads::Outcome Reads::OnDone(const ReadAction& read, bool ok, uint32_t crc, Origin from) {
  --in_flight_;
  if (read.serving) {
    --serving_requests_;
  } else {
    assert(flight_bytes_ >= read.length);
    flight_bytes_ -= read.length;
  }
  if (FromPeer(read)) --peer_reads_;
  stores_.OnReadEnded(read);
  if (read.group == 0) {
    EndRequest(read);
  } else if (const auto group = group_left_.find(read.group); --group->second == 0) {
    group_left_.erase(group);
    EndRequest(read);
  }
  SettleCharge(read, ok, from);
  if (SettleRace(read, ok)) return Outcome::kNone;
  Entry& e = entry(read.dataset, read.sample);
  assert(e.state == State::kReading);
  if (e.dead) ok = false;
  if (ok) {
    if (!residency_.Accept(read, crc, from)) {
      ReadAction again = {
          .dataset = read.dataset, .sample = read.sample, .offset = e.offset, .length = e.length};
      again.job = read.job;
      Ask(again, false);
      return Outcome::kNone;
    }
    if (from != Origin::kTier && read.store) stores_.Add(read);
  } else {
    if (!e.dead) ++common_.counters.failed_reads;
    const bool urgent = (e.flags & Residency::kUrgent) != 0;
    residency_.FreeBlock(read.dataset, read.sample);
    e.flags |= urgent ? Residency::kFailedNow : Residency::kFailedSoon;
  }
  e.flags &= static_cast<uint8_t>(~Residency::kUrgent);
  return ok ? Outcome::kArrived : Outcome::kFailed;
}

}  // namespace forebay
