// The scheduler's reads: look-ahead, groups of neighbours, races, and what happens when one ends.
#include <algorithm>
#include <cassert>
#include <deque>
#include <utility>
#include <vector>

#include "core/scheduler.h"

namespace forebay {
namespace {

// Positions one call may plan, so that a lock held around it is short.
constexpr size_t kPlanStep = 4096;

}  // namespace

// ---- look-ahead ------------------------------------------------------------------------------

void Scheduler::UnplanPosition(Stream& stream, SampleId s) {
  if (stream.shape.itemised) {
    auto it = stream.outstanding.find(s);
    if (it == stream.outstanding.end()) return;
    if (it->second > 0) {
      AddAhead(entry(stream.shape.dataset, s), -1);
      MaybeFree(stream.shape.dataset, s);
    }
    if (--it->second <= 0) stream.outstanding.erase(it);
    return;
  }
  AddAhead(entry(stream.shape.dataset, s), -1);
  MaybeFree(stream.shape.dataset, s);
}

void Scheduler::Unplan(Stream& stream) {
  if (stream.shape.itemised) {
    for (const auto& [s, count] : stream.outstanding) {
      if (count <= 0) continue;
      Entry& e = entry(stream.shape.dataset, s);
      AddAhead(e, -count);
      MaybeFree(stream.shape.dataset, s);
    }
    stream.outstanding.clear();
    stream.fetched = 0;
  } else {
    for (size_t i = 0; i < stream.epochs.size() && i <= stream.cursor_epoch; ++i) {
      const std::vector<SampleId>& order = stream.epochs[i].order;
      const uint64_t begin = i == 0 ? stream.taken : 0;
      const uint64_t end = i < stream.cursor_epoch ? order.size() : stream.cursor;
      for (uint64_t p = begin; p < end; ++p) UnplanPosition(stream, order[p]);
    }
  }
  stream.epochs.clear();
  stream.taken = 0;
  stream.cursor = 0;
  stream.cursor_epoch = 0;
}

void Scheduler::DropWaiting(Stream& stream) {
  std::vector<LeaseId> waiting(stream.queue.begin(), stream.queue.end());
  stream.queue.clear();
  for (LeaseId id : waiting) Release(id);
}

bool Scheduler::MayReadAhead(const Stream& stream, SampleId s) const {
  const DatasetId d = stream.shape.dataset;
  const uint64_t then = ahead_bytes_ + ArenaAllocator::Rounded(entry(d, s).length);
  if (then <= read_ahead_bytes_ / 2 || stream.window() < stream.shape.batch_size) return true;
  if (WouldKeep(d, s, stream.job)) return true;
  if (then > read_ahead_bytes_) return false;
  // The second half is for those that have less than their share.
  const uint64_t active = ActiveStreams();
  return active <= 1 || stream.window() * datasets_[d].mean_rounded < read_ahead_bytes_ / active;
}

bool Scheduler::AdvanceCursor(Stream& stream, ReadAction* out, size_t* budget, bool joins) {
  const DatasetId d = stream.shape.dataset;
  const auto id = static_cast<StreamId>(&stream - streams_.data());
  while (*budget > 0 && stream.cursor_epoch < stream.epochs.size()) {
    const std::vector<SampleId>& order = stream.epochs[stream.cursor_epoch].order;
    if (stream.cursor == order.size()) {
      if (stream.shape.itemised) {
        const size_t known = stream.epochs.size();
        PopFetched(stream, id);
        if (stream.epochs.size() != known) continue;
      }
      if (stream.cursor_epoch + 1 == stream.epochs.size()) return false;
      ++stream.cursor_epoch;
      stream.cursor = 0;
      continue;
    }
    const SampleId s = order[stream.cursor];
    Entry& e = entry(d, s);
    if (stream.shape.itemised) {
      int32_t& balance = stream.outstanding[s];
      if (balance < 0) {  // fetched before it was planned
        if (++balance == 0) stream.outstanding.erase(s);
        ++stream.cursor;
        --*budget;
        continue;
      }
    }
    if (e.ahead == kMaxRefs) return false;
    if (e.state == State::kUnsized && !(e.flags & (kFailedSoon | kFailedNow))) {
      if (stream.shape.itemised && stream.outstanding[s] == 0) stream.outstanding.erase(s);
      return false;
    }
    bool read = false;
    // What is on its way into the second tier is left to the lease, which reads it from there.
    if (e.state == State::kAbsent && !(e.flags & kFailedSoon) && !AwaitsStore(d, s)) {
      const bool may = MayRead(d, s, stream.job) && (joins || MayReadAhead(stream, s));
      if (!may || !Allot(d, s, Need::kAhead, id)) {
        if (may) stream.blocked_at = frees_;
        if (stream.shape.itemised && stream.outstanding[s] == 0) stream.outstanding.erase(s);
        return false;
      }
      read = true;
    }
    if (stream.shape.itemised) ++stream.outstanding[s];
    AddAhead(entry(d, s), 1);
    ++stream.cursor;
    --*budget;
    if (read) {
      const Entry& placed = entry(d, s);
      *out = {d, s, placed.offset, placed.length};
      out->job = stream.job;
      return true;
    }
  }
  return false;
}

ReadAction Scheduler::PlaceOf(DatasetId d, SampleId s) const {
  const Entry& e = entry(d, s);
  return {.dataset = d, .sample = s, .offset = e.offset, .length = e.length};
}

// The folder, unless it has become much slower than the source; every so often it is asked all the
// same, so that its recovery is seen.
Place Scheduler::ChoosePlace(DatasetId d, SampleId s) {
  constexpr double kMuchSlower = 4;
  constexpr uint32_t kProbeEvery = 32;
  Dataset& dataset = datasets_[d];
  const ReadCosts& costs = dataset.costs;
  if (entry(d, s).flags & kSuspect) return Place::kSource;  // what the folder has is in doubt
  const bool slower = costs.source > 0 && costs.tier > kMuchSlower * costs.source;
  if (!slower || !(entry(d, s).flags & kInTier) || ++dataset.tier_skips >= kProbeEvery) {
    dataset.tier_skips = 0;
    return Place::kTier;
  }
  return Place::kSource;
}

void Scheduler::Start(const ReadAction& action, std::vector<ReadAction>* out) {
  const Dataset& dataset = datasets_[action.dataset];
  const Entry& e = dataset.entries[action.sample];
  out->push_back(action);
  ReadAction& started = out->back();
  started.serial = next_serial_++;
  if (next_serial_ == 0) next_serial_ = 1;
  started.place = ChoosePlace(action.dataset, action.sample);
  if (started.place == Place::kTier) {
    if (e.flags & kInTier) {
      started.likely = Place::kTier;
    } else if (Elsewhere(action.dataset, action.sample)) {
      started.likely = Place::kPeer;
    }
  }
  started.store = MayStore(action.dataset, action.sample, action.job);
  started.store_spare = started.store && ShareOf(action.dataset, action.sample) != KeepShare::kHome;
  if (started.store_spare) storing_spare_ += action.length;
  ++in_flight_;
  if (started.serving) ++serving_requests_;
  if (FromPeer(started)) ++peer_reads_;
  ++counters_.reads;
  counters_.read_bytes += action.length;
  if (action.group == 0 || ++group_left_[action.group] == 1) {
    ++requests_;
    if (started.likely == Place::kSource) {
      ++counters_.requests;
      if (started.charged == 0) Charge(started);
    }
  }
}

// Whether what is read from the source is copied into the second tier.
bool Scheduler::MayStore(DatasetId d, SampleId s, JobId job) const {
  const Dataset& dataset = datasets_[d];
  const Entry& e = dataset.entries[s];
  const JobStats& stats = jobs_.stats(job);
  return dataset.tier.present && admit_tier_ && !copies_hang_ && e.length <= dataset.tier.largest &&
         (dataset.tier.holds_all || !(e.flags & kKept)) &&
         stats.folder_bytes + e.length <= stats.limits.folder_bytes && FolderMayTake(d, s);
}

void Scheduler::Charge(ReadAction& read) {
  read.charged = std::max<uint64_t>(1, read.request_bytes != 0 ? read.request_bytes : read.length);
  jobs_.Charge(read.job, read.charged);
}

bool Scheduler::FolderMayTake(DatasetId d, SampleId s) const {
  if (datasets_[d].share.empty()) return true;
  switch (ShareOf(d, s)) {
    case KeepShare::kNone:
      return false;
    case KeepShare::kHome:
      return true;
    case KeepShare::kReplica:
      break;
  }
  return storing_spare_ + due_spare_ + reserved_bytes_ + entry(d, s).length <= folder_room_;
}

// The charge was for what had been expected.
void Scheduler::SettleCharge(const ReadAction& read, bool ok, Place from) {
  uint64_t bytes = read.charged;
  if (from != Place::kSource) {
    if (bytes != 0) jobs_.GiveBack(read.job, bytes);
    return;
  }
  if (bytes == 0 && read.likely != Place::kSource) {
    bytes = read.length;
    jobs_.Charge(read.job, bytes);
  }
  JobStats& stats = jobs_.stats(read.job);
  if (!ok || bytes == 0) return;
  ++stats.requests;
  stats.bytes += bytes;
}

// Whether a sample that nobody has asked for yet may be read along with its neighbour.
bool Scheduler::MayJoin(const Dataset& dataset, SampleId s) const {
  constexpr uint8_t kNo = kInTier | kFailedSoon | kFailedNow | kSuspect;
  const Entry& e = dataset.entries[s];
  return e.state == State::kAbsent && !(e.flags & kNo);
}

void Scheduler::StartGroup(Stream& stream, const ReadAction& action, size_t* budget,
                           std::vector<ReadAction>* out) {
  const DatasetId d = action.dataset;
  const auto id = static_cast<StreamId>(&stream - streams_.data());
  const Dataset& dataset = datasets_[d];
  const uint64_t most = dataset.costs.merge_bytes;
  const bool in_tier = (entry(d, action.sample).flags & kInTier) != 0;
  if (dataset.layout == nullptr || most <= action.length || in_tier ||
      Elsewhere(d, action.sample) || dataset.layout->extent(action.sample).whole_object) {
    Start(action, out);
    return;
  }
  // The file's range [begin, end) that the group covers so far.
  const Extent extent = dataset.layout->extent(action.sample);
  uint64_t begin = extent.offset;
  uint64_t end = extent.offset + extent.length;
  std::deque<ReadAction> members = {action};
  const size_t largest = std::max<size_t>(2, options_.max_samples / 16);
  // Whether `s`, which lies before or behind, may join.
  auto near = [&](SampleId s) {
    if (members.size() >= largest || Elsewhere(d, s)) return false;
    const Extent e = dataset.layout->extent(s);
    if (e.object != extent.object) return false;
    const bool before = e.offset + e.length <= begin;
    if (!before && e.offset < end) return false;
    const uint64_t gap = before ? begin - e.offset - e.length : e.offset - end;
    const uint64_t first = std::min(begin, e.offset);
    const uint64_t last = std::max(end, e.offset + e.length);
    return gap <= dataset.costs.merge_gap && last - first <= most;
  };
  auto join = [&](const ReadAction& member) {
    const Extent e = dataset.layout->extent(member.sample);
    if (e.offset < begin) {
      members.push_front(member);
    } else {
      members.push_back(member);
    }
    begin = std::min(begin, e.offset);
    end = std::max(end, e.offset + e.length);
  };
  const auto n = static_cast<SampleId>(dataset.entries.size());
  if (stream.shape.whole && ((dataset.tier.holds_all && !copies_hang_) || FitsMemory())) {
    // Everything will be kept: the surroundings are staged with it, in aligned pieces, so that
    // every shard is read from end to end in large requests.
    const uint64_t piece = extent.offset / most * most;
    auto stage = [&](SampleId s) {
      if (storing_.contains(Key(d, s))) return false;
      if (!MayJoin(dataset, s) || !near(s) || !Allot(d, s, Need::kAhead, id)) return false;
      ReadAction neighbour = PlaceOf(d, s);
      neighbour.job = stream.job;
      join(neighbour);
      return true;
    };
    for (SampleId s = action.sample; s > 0; --s) {
      if (dataset.layout->extent(s - 1).offset < piece || !stage(s - 1)) break;
    }
    for (SampleId s = action.sample + 1; s < n && stage(s); ++s) {
    }
  } else if (!stream.shape.itemised) {
    // What the order asks for next, as far as it goes on in the file.
    for (SampleId s = action.sample + 1; s<n&& * budget> 0; ++s) {
      if (stream.cursor_epoch >= stream.epochs.size()) break;
      const std::vector<SampleId>& order = stream.epochs[stream.cursor_epoch].order;
      if (stream.cursor >= order.size() || order[stream.cursor] != s) break;
      ReadAction next;
      if (!MayJoin(dataset, s) || !near(s) || !AdvanceCursor(stream, &next, budget, true)) break;
      join(next);
    }
  }
  const uint32_t group = members.size() > 1 ? next_group_++ : 0;
  if (next_group_ == 0) next_group_ = 1;
  for (ReadAction& member : members) {
    member.group = group;
    member.request_bytes = end - begin;
    Start(member, out);
  }
}

void Scheduler::NextReads(size_t limit, std::vector<ReadAction>* out, bool look_ahead) {
  std::vector<LeaseId> blocked;
  std::vector<LeaseId> held;
  for (LeaseId id : pending_) {
    const Lease& lease = leases_.at(id);
    if (lease.blocked) blocked.push_back(id);
    if (lease.held && !lease.blocked) held.push_back(id);
  }
  // Those of serving streams last.
  const auto order = [&](LeaseId id) {
    const Lease& lease = leases_.at(id);
    return std::pair(lease.serving, lease.stream);
  };
  std::stable_sort(blocked.begin(), blocked.end(),
                   [&](LeaseId a, LeaseId b) { return order(a) < order(b); });
  bool starving = false;
  // Here for room that has come free; to take from other leases is for a consumer that asks right
  // now.
  may_steal_ = false;
  handing_out_ = true;
  for (LeaseId id : blocked) {
    Lease& lease = leases_.at(id);
    if (!lease.missing.empty()) AskMissing(id, lease);
    StartCopyIfDue(id, lease);
    if (lease.ready()) MarkDue(streams_[lease.stream]);
    starving |= lease.blocked && !lease.serving;
  }
  // Those that wait for their share take turns, or the first would have all of it.
  std::stable_sort(held.begin(), held.end(), [&](LeaseId a, LeaseId b) {
    return leases_.at(a).stream - next_held_ < leases_.at(b).stream - next_held_;
  });
  std::vector<LeaseId> later;  // of jobs that have got more of their share than others
  const auto hand_out = [&](LeaseId id) {
    Lease& lease = leases_.at(id);
    const size_t before = urgent_.size();
    AskMissing(id, lease);
    if (urgent_.size() != before) next_held_ = lease.stream + 1;
    starving |= lease.blocked && !lease.serving;
  };
  // Leases wait for these: they go first. What hangs, or has lost a race and may never end, does
  // not hold them up.
  const auto room = [&] {
    return requests_ - serving_requests_ < std::max<size_t>(1, limit) + hanging_ + orphans_.size();
  };
  const auto start_urgent = [&] {
    while (!urgent_.empty() && room()) {
      Start(urgent_.front(), out);
      urgent_.pop_front();
    }
    // Behind every consumer. Who asks has a limit of its own; here it is only bounded.
    const size_t most = std::max(limit, options_.max_samples / 16);
    while (urgent_.empty() && !serving_urgent_.empty() && serving_requests_ < most) {
      Start(serving_urgent_.front(), out);
      serving_urgent_.pop_front();
    }
  };
  for (LeaseId id : held) {
    if (jobs_.ShouldYield(streams_[leases_.at(id).stream].job)) {
      later.push_back(id);
    } else {
      hand_out(id);
    }
  }
  start_urgent();
  handing_out_ = false;
  may_steal_ = true;
  if (!starving && look_ahead && urgent_.empty()) LookAhead(limit, out);
  may_steal_ = false;
  handing_out_ = true;
  for (LeaseId id : later) {
    if (!urgent_.empty() || !room()) break;
    hand_out(id);
    start_urgent();
  }
  handing_out_ = false;
  may_steal_ = true;
}

void Scheduler::LookAhead(size_t limit, std::vector<ReadAction>* out) {
  size_t budget = kPlanStep;
  size_t idle = 0;
  // Where it is requests that are short, jobs that have got less of their share go first; in a
  // second turn the others may.
  while (requests_ - serving_requests_ < limit && in_flight_ < options_.max_samples &&
         idle < 2 * streams_.size() && budget > 0) {
    Stream& stream = streams_[next_stream_ % streams_.size()];
    ++next_stream_;
    ReadAction action;
    if (stream.open && stream.blocked_at != frees_ &&
        (idle >= streams_.size() || !jobs_.ShouldYield(stream.job)) &&
        AdvanceCursor(stream, &action, &budget)) {
      StartGroup(stream, action, &budget, out);
      idle = 0;
    } else {
      ++idle;
    }
  }
}

// ---- events ----------------------------------------------------------------------------------

// True: the read's outcome is not the sample's: it lost a race, or the other one still runs.
bool Scheduler::SettleRace(const ReadAction& read, bool ok) {
  if (const auto orphan = orphans_.find(read.serial); orphan != orphans_.end()) {
    arena_.Free(orphan->second);
    ++frees_;
    orphans_.erase(orphan);
    return true;
  }
  const auto it = races_.find(Key(read.dataset, read.sample));
  if (it == races_.end()) return false;
  const Race race = it->second;
  races_.erase(it);
  Entry& e = entry(read.dataset, read.sample);
  Uncount(e);
  const bool first = read.serial == race.first;
  // The entry goes on with the winner, or with whichever is left.
  const bool takes_second = first != ok;
  const ArenaAllocator::Block other = takes_second ? e.block : race.second_block;
  if (takes_second) {
    e.block = race.second_block;
    e.offset = arena_.offset(e.block);
  }
  Count(e);
  if (ok) {
    orphans_.emplace(first ? race.second : race.first, other);
    return false;
  }
  arena_.Free(other);
  ++frees_;
  return true;
}

bool Scheduler::Hedge(const ReadAction& hanging, ReadAction* out) {
  constexpr uint64_t kAtFirst = 2;
  // Losers may hold their memory for long, and a batch must find room all the same.
  constexpr uint64_t kMemoryOneIn = 8;
  const DatasetId d = hanging.dataset;
  const SampleId s = hanging.sample;
  Entry& e = entry(d, s);
  if (hedge_one_in_ == 0 || e.state != State::kReading || orphans_.contains(hanging.serial) ||
      races_.contains(Key(d, s)) ||
      hedge_one_in_ * counters_.hedged > counters_.reads + kAtFirst * hedge_one_in_) {
    return false;
  }
  uint64_t raced = ArenaAllocator::Rounded(e.length);
  for (const auto& [serial, lost] : orphans_) raced += arena_.size(lost);
  for (const auto& [key, race] : races_) raced += arena_.size(race.second_block);
  if (kMemoryOneIn * raced > UsableBytes()) return false;
  ArenaAllocator::Block block = arena_.Allocate(e.length);
  if (block == ArenaAllocator::kNone && (e.flags & kUrgent) && MakeRoom(e.length, ~StreamId{0})) {
    block = arena_.Allocate(e.length);
  }
  if (block == ArenaAllocator::kNone) return false;
  *out = {.dataset = d, .sample = s, .offset = arena_.offset(block), .length = e.length};
  out->serial = next_serial_++;
  if (next_serial_ == 0) next_serial_ = 1;
  out->place = Place::kSource;
  out->job = hanging.job;
  out->store = hanging.store && !copies_hang_;
  Charge(*out);
  races_[Key(d, s)] = {hanging.serial, out->serial, block};
  ++in_flight_;
  ++requests_;
  ++counters_.requests;
  ++counters_.hedged;
  return true;
}

void Scheduler::OnLengths(DatasetId d, std::span<const SampleLength> lengths) {
  Dataset& dataset = datasets_[d];
  bool failed = false;
  for (const SampleLength& told : lengths) {
    Entry& e = dataset.entries[told.sample];
    if (e.state != State::kUnsized) continue;
    e.flags &= static_cast<uint8_t>(~(kUrgent | kFailedSoon | kFailedNow));
    if (!told.ok) {
      e.flags |= kFailedSoon;
      failed = true;
      continue;
    }
    const uint64_t before = ArenaAllocator::Rounded(0);
    e.length = told.length;
    e.state = State::kAbsent;
    --dataset.unsized;
    dataset.sized_bytes += ArenaAllocator::Rounded(e.length);
    if (!dataset.share.empty() && ShareOf(d, told.sample) == KeepShare::kHome &&
        !(e.flags & (kKept | kInTier))) {
      reserved_bytes_ += ArenaAllocator::Rounded(e.length) - before;
    }
  }
  const size_t sized = dataset.entries.size() - dataset.unsized;
  if (sized != 0) {
    dataset.mean_rounded = dataset.sized_bytes / sized;
    dataset.rounded_bytes = dataset.sized_bytes + dataset.unsized * dataset.mean_rounded;
  }
  ChooseStaging();
  while (kept_bytes_ > keep_quota() && EvictOne()) {
  }
  // Here for what has become possible; to take from other leases is for a consumer that asks.
  may_steal_ = false;
  for (const LeaseId id : pending_) {
    Lease& lease = leases_.at(id);
    if (lease.dataset != d || !lease.unsized) continue;
    const uint64_t bytes = BytesOf(lease);
    leased_bytes_ += bytes - lease.bytes;
    if (lease.admitted) serving_bytes_ += bytes - lease.bytes;
    lease.bytes = bytes;
    lease.unsized = false;
    for (const SampleId s : lease.missing) {
      Entry& e = entry(d, s);
      if (e.state != State::kUnsized) continue;
      lease.unsized = true;
      if (failed && (e.flags & kFailedSoon)) {
        e.flags |= kFailedNow;
        MarkDue(streams_[lease.stream]);
      }
    }
    AskMissing(id, lease);
    if (lease.blocked || !lease.unsized) MarkDue(streams_[lease.stream]);
  }
  may_steal_ = true;
}

void Scheduler::OnStored(DatasetId d, SampleId s) { SetFlag(d, s, kInTier); }

void Scheduler::OnReadDone(const ReadAction& read, bool ok, uint32_t crc, Place from) {
  const DatasetId d = read.dataset;
  const SampleId s = read.sample;
  --in_flight_;
  if (read.serving) --serving_requests_;
  if (FromPeer(read)) --peer_reads_;
  if (read.store_spare) storing_spare_ -= read.length;
  if (read.group == 0) {
    --requests_;
  } else if (const auto group = group_left_.find(read.group); --group->second == 0) {
    group_left_.erase(group);
    --requests_;
  }
  SettleCharge(read, ok, from);
  if (SettleRace(read, ok)) return;
  Entry& e = entry(d, s);
  assert(e.state == State::kReading);
  if (ok && from == Place::kTier) {
    SetFlag(d, s, kInTier);
    // Memory is for what the folder lacks, until the two cover everything.
    if ((e.flags & kKept) && !datasets_[d].tier.holds_all && datasets_[d].uncovered > 0) {
      Unkeep(d, s);
    }
  } else if (ok && read.place == Place::kTier) {
    ClearFlag(d, s, kInTier);  // it was not there, or damaged
  }
  if (ok && from != Place::kTier && !(e.flags & kKept)) {
    KeepIfMay(d, s, read.job);  // room that had been meant for what the folder turned out to have
  }
  if (ok) {
    uint32_t& known = datasets_[d].crcs[s];
    if ((e.flags & kCrcKnown) && known != crc) {
      if (!(e.flags & kSuspect)) {
        // Either this read or the first was corrupted, or the file changed: a second look tells.
        e.flags |= kSuspect;
        known = crc;
        urgent_.push_back({d, s, e.offset, e.length});
        urgent_.back().job = read.job;
        return;
      }
      ++counters_.changed;
    } else if (e.flags & kSuspect) {
      ++counters_.changed;  // twice the same new bytes: the file has changed
    }
    known = crc;
    e.flags |= kCrcKnown;
    e.flags &= static_cast<uint8_t>(~kSuspect);
    Uncount(e);
    e.state = State::kResident;
    Count(e);
    Touch(d, s);
    if (from != Place::kTier && read.store) SetDue(read);
  } else {
    ++counters_.failed_reads;
    const bool urgent = (e.flags & kUrgent) != 0;
    FreeBlock(d, s);
    e.flags |= urgent ? kFailedNow : kFailedSoon;
  }
  e.flags &= static_cast<uint8_t>(~kUrgent);
  bool wanted = false;
  for (LeaseId id : pending_) {
    Lease& lease = leases_.at(id);
    if (lease.dataset != d) continue;
    for (size_t i = 0; i < lease.missing.size();) {
      if (lease.missing[i] != s) {
        ++i;
        continue;
      }
      wanted = true;
      if (!ok || e.pins == kMaxRefs) {
        MarkDue(streams_[lease.stream]);
        break;
      }
      if (lease.serving && !Admit(lease)) break;
      Pin(e);
      lease.missing[i] = lease.missing.back();
      lease.missing.pop_back();
    }
    if (wanted && lease.missing.empty()) {
      MarkDue(streams_[lease.stream]);
      StartCopyIfDue(id, lease);
    }
  }
  if (!ok && !wanted) e.flags &= static_cast<uint8_t>(~kFailedNow);
  if (ok) MaybeFree(d, s);
}

// ---- copies for the second tier --------------------------------------------------------------

// It has been read.
void Scheduler::SetDue(const ReadAction& read) {
  const DatasetId d = read.dataset;
  const SampleId s = read.sample;
  Entry& e = entry(d, s);
  // Whatever changed since the read began.
  if (copies_hang_ || (e.flags & (kInTier | kCopyDue)) || storing_.contains(Key(d, s))) return;
  if ((e.flags & kKept) && !datasets_[d].tier.holds_all) return;
  if (copies_under_way() == 0) copies_moved_ = now_;
  Uncount(e);
  e.flags |= kCopyDue;
  Count(e);
  due_.push_back({d, s, read.job, read.store_spare});
  if (read.store_spare) due_spare_ += e.length;
  jobs_.stats(read.job).folder_bytes += e.length;
}

void Scheduler::ClearDue(const Due& due) {
  Entry& e = entry(due.dataset, due.sample);
  Uncount(e);
  e.flags &= static_cast<uint8_t>(~kCopyDue);
  Count(e);
  if (due.spare) due_spare_ -= e.length;
}

void Scheduler::GiveUp(const Due& due) {
  ClearDue(due);
  jobs_.stats(due.job).folder_bytes -= entry(due.dataset, due.sample).length;
  ++counters_.copies_given_up;
  MaybeFree(due.dataset, due.sample);
}

void Scheduler::GiveUpCopies() {
  copies_hang_ = true;
  for (; !due_.empty(); due_.pop_front()) GiveUp(due_.front());
  for (const auto& [key, job] : storing_) {
    const auto d = static_cast<DatasetId>(key >> 32);
    const auto s = static_cast<SampleId>(key);
    if (!entry(d, s).storing) continue;
    SetStoring(entry(d, s), false);
    MaybeFree(d, s);
  }
  ++frees_;
  // Some wait for copies on their way, and may be read from the source now.
  for (const LeaseId id : pending_) MarkDue(streams_[leases_.at(id).stream]);
}

bool Scheduler::GiveUpOneHeld() {
  for (auto it = due_.begin(); it != due_.end(); ++it) {
    const Entry& e = entry(it->dataset, it->sample);
    if (e.pins != 0 || e.ahead != 0 || (e.flags & kKept)) continue;
    const Due due = *it;
    due_.erase(it);
    GiveUp(due);
    return true;
  }
  return false;
}

// What is in the writer's hands already is here only to be found by whoever uses it soon.
bool Scheduler::FreeOneStoring() {
  for (const auto& [key, job] : storing_) {
    const auto d = static_cast<DatasetId>(key >> 32);
    const auto s = static_cast<SampleId>(key);
    Entry& e = entry(d, s);
    if (!e.storing || e.pins != 0 || e.ahead != 0 || (e.flags & kKept)) continue;
    FreeBlock(d, s);
    return true;
  }
  return false;
}

bool Scheduler::FirstStore(StoreAction* out) {
  if (due_.empty()) return false;
  const Due& due = due_.front();
  const Entry& e = entry(due.dataset, due.sample);
  if (e.pins == kMaxRefs) return false;
  *out = {due.dataset, due.sample, e.offset, e.length, datasets_[due.dataset].crcs[due.sample]};
  return true;
}

void Scheduler::BeginStore(const StoreAction& store) {
  const Due due = due_.front();
  assert(due.dataset == store.dataset && due.sample == store.sample);
  due_.pop_front();
  const uint64_t key = Key(store.dataset, store.sample);
  storing_.emplace(key, due.job);
  taking_.insert(key);
  Pin(entry(store.dataset, store.sample));
  ClearDue(due);
  SetStoring(entry(store.dataset, store.sample), true);
}

void Scheduler::OnStoreTaken(const StoreAction& store) {
  if (taking_.erase(Key(store.dataset, store.sample)) == 0) return;
  Unpin(store.dataset, store.sample);
}

void Scheduler::OnStoreEnded(DatasetId d, SampleId s, bool stored) {
  const auto it = storing_.find(Key(d, s));
  if (it == storing_.end()) return;
  if (!stored) jobs_.stats(it->second).folder_bytes -= entry(d, s).length;
  storing_.erase(it);
  copies_moved_ = now_;
  copies_hang_ = false;
  const bool held = entry(d, s).storing;
  if (held) SetStoring(entry(d, s), false);
  if (stored) OnStored(d, s);
  if (held) MaybeFree(d, s);
  for (const LeaseId id : pending_) {
    const Lease& lease = leases_.at(id);
    const auto& missing = lease.missing;
    if (lease.dataset == d && std::find(missing.begin(), missing.end(), s) != missing.end()) {
      MarkDue(streams_[lease.stream]);
    }
  }
}

}  // namespace forebay
