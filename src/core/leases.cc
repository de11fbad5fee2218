#include "core/leases.h"

#include <algorithm>
#include <functional>
#include <utility>

namespace forebay {
namespace {

// Contiguous batches prepared ahead of the one the consumer holds.
constexpr size_t kCopyDepth = 3;

uint64_t LargestBatch(const Residency::Dataset& dataset, size_t batch_size) {
  std::vector<uint64_t> sizes;
  sizes.reserve(dataset.entries.size());
  for (const Residency::Entry& e : dataset.entries) {
    sizes.push_back(ArenaAllocator::Rounded(e.length));
  }
  const size_t n = std::min(batch_size, sizes.size());
  std::nth_element(sizes.begin(), sizes.begin() + static_cast<int64_t>(n), sizes.end(),
                   std::greater<>());
  uint64_t sum = 0;
  for (size_t i = 0; i < n; ++i) sum += sizes[i];
  return sum;
}

}  // namespace

// ---- consumers --------------------------------------------------------------------------------

// A small budget has no room for a region: what is left beside it must take a batch that is held,
// the next one's samples and its copy, however large. Then copies lie among the samples.
Arena::Block Leases::MakeRegion(const StreamShape& shape) {
  if (!shape.contiguous) return Arena::kNone;
  const Residency::Dataset& dataset = residency_.dataset(shape.dataset);
  const uint64_t batch = shape.batch_size * dataset.mean_rounded;
  const uint64_t usable = arena_.usable();
  const uint64_t beside = 3 * LargestBatch(dataset, shape.batch_size);
  if (beside >= usable) return Arena::kNone;
  // Batches differ in size; a quarter more than the mean leaves few of them waiting.
  uint64_t bytes = std::min({usable / 2, usable - beside, (kCopyDepth + 2) * (batch + batch / 4)});
  // Pinned samples of other streams may stand in the way of the whole of it.
  for (; bytes >= 2 * batch; bytes -= bytes / 8 + 1) {
    if (MakeRoom(bytes, ~StreamId{0}, DueRoom::kTake)) return arena_.MakeRegion(bytes);
  }
  return Arena::kNone;
}

void Leases::Open(StreamId id, const StreamShape& shape) {
  Consumer consumer;
  consumer.region = MakeRegion(shape);
  if (consumer.region != Arena::kNone)
    consumer.copies = ArenaAllocator(arena_.size(consumer.region));
  if (id == consumers_.size()) {
    consumers_.push_back(std::move(consumer));
    return;
  }
  consumer.changes = consumers_[id].changes + 1;
  consumers_[id] = std::move(consumer);
}

void Leases::CancelWaiting(StreamId id) {
  const std::deque<LeaseId> waiting = std::exchange(consumers_[id].queue, {});
  for (LeaseId lease : waiting) Release(lease);
}

void Leases::FreeRegionIfUnused(StreamId id) {
  Consumer& own = consumers_[id];
  if (lookahead_.streams()[id].open || own.leases != 0 || own.region == Arena::kNone) return;
  arena_.FreeRegion(own.region);
  own.region = Arena::kNone;
}

void Leases::MarkDue(StreamId id) {
  consumers_[id].due = true;
  ++consumers_[id].changes;
  ++consumers_[id].changes_of_all;
}

void Leases::MarkDue(Lease& lease) {
  consumers_[lease.stream].due = true;
  ++consumers_[lease.stream].changes;
  ++lease.changes;
}

void Leases::MarkAllDue() {
  for (const LeaseId id : pending_) MarkDue(leases_.at(id));
}

uint64_t Leases::Changes(StreamId stream, LeaseId id) const {
  const auto found = leases_.find(id);
  const uint64_t of_one = found == leases_.end() ? 0 : found->second.changes;
  return consumers_[stream].changes_of_all + of_one;
}

void Leases::MarkDueFor(DatasetId d, SampleId s) {
  for (const LeaseId id : pending_) {
    Lease& lease = leases_.at(id);
    if (lease.Misses(d, s)) MarkDue(lease);
  }
}

void Leases::OnRoom() {
  for (LeaseId waiting : pending_) leases_.at(waiting).reserved = false;
  MarkAllDue();
}

// ---- taking and giving back -------------------------------------------------------------------

Leases::Take Leases::TakeBatch(StreamId id, Handout* out) {
  using Next = Lookahead::Next;
  Consumer& own = consumers_[id];
  own.due = false;
  const Lookahead::Stream& stream = lookahead_.streams()[id];
  if (!stream.open) return Take::kEndOfStream;
  // A contiguous stream prepares several batches; the others only the one asked for.
  const size_t depth = stream.shape.contiguous ? kCopyDepth : 1;
  Next next = Next::kBatch;
  while (own.queue.size() < depth) {
    next = lookahead_.PeekNext(id);
    if (next != Next::kBatch) break;
    Lookahead::Batch batch = lookahead_.TakeBatch(id);
    Lease lease;
    lease.stream = id;
    lease.dataset = stream.shape.dataset;
    lease.epoch = batch.epoch;
    lease.index = batch.index;
    lease.samples = std::move(batch.samples);
    if (stream.shape.contiguous) lease.kind = Kind::kContiguous;
    own.queue.push_back(Add(std::move(lease)));
  }
  if (own.queue.empty()) {
    if (next == Next::kEndOfEpoch) {
      lookahead_.EndEpoch(id);
      return Take::kEndOfEpoch;
    }
    return lookahead_.AtEnd(id) ? Take::kEndOfStream : Take::kPending;
  }
  const LeaseId head = own.queue.front();
  const Take result = Finish(head, leases_.at(head), out);
  if (result == Take::kReady) own.queue.pop_front();
  if (result == Take::kReady || result == Take::kPending) {
    for (LeaseId waiting : own.queue) {
      if (waiting == head) continue;
      Lease& lease = leases_.at(waiting);
      if (!lease.missing.empty()) AskMissing(lease);
      StartCopyIfDue(waiting, lease);
    }
  }
  return result;
}

Leases::Take Leases::FetchSample(StreamId id, SampleId sample, LeaseId* lease_id, Handout* out) {
  consumers_[id].due = false;
  if (*lease_id == kNoLease) {
    const Lookahead::Stream& stream = lookahead_.streams()[id];
    if (entry(stream.shape.dataset, sample).dead) {
      out->failed = sample;
      return Take::kFailed;
    }
    Lease lease;
    lease.stream = id;
    lease.dataset = stream.shape.dataset;
    lease.samples = {sample};
    if (!stream.epochs.empty()) lease.epoch = stream.epochs.front().epoch;
    if (stream.shape.serving) lease.kind = Kind::kServing;
    lease.counted = stream.shape.itemised && (!stream.shape.declared || !stream.epochs.empty());
    if (lease.counted) lookahead_.OnFetch(id, sample);
    *lease_id = Add(std::move(lease));
  }
  return Finish(*lease_id, leases_.at(*lease_id), out);
}

LeaseId Leases::Add(Lease lease) {
  Gather(lease);
  const LeaseId id = next_lease_++;
  leased_bytes_ += lease.bytes;
  ++consumers_[lease.stream].leases;
  if (!lease.ready()) pending_.push_back(id);
  leases_.emplace(id, std::move(lease));
  return id;
}

void Leases::Gather(Lease& lease) {
  Residency::Dataset& dataset = residency_.dataset(lease.dataset);
  lease.bytes = BytesOf(lease);
  for (const SampleId s : lease.samples) {
    Entry& e = dataset.entries[s];
    lease.unsized |= e.state == SampleState::kUnsized;
    if (e.state == SampleState::kResident && e.pins < Residency::kMaxRefs && !e.dead &&
        (!lease.serving() || Admit(lease))) {
      residency_.Pin(e);
      ++common_.counters.hits;
      common_.counters.hit_bytes += e.length;
    } else {
      lease.missing.push_back(s);
    }
  }
  lease.BecomeReady();
}

Leases::Take Leases::Finish(LeaseId id, Lease& lease, Handout* out) {
  const uint64_t usable = arena_.usable();
  const uint64_t region = consumers_[lease.stream].copies.capacity();
  if (lease.bytes > usable || (lookahead_.streams()[lease.stream].shape.contiguous &&
                               lease.bytes > region && 2 * lease.bytes > usable)) {
    out->bytes = lease.bytes;
    return Take::kTooLarge;
  }
  if (!lease.wanted()) lease.demand = Demand::kWanted;
  if (!lease.missing.empty()) {
    if (FindFailure(lease, out)) return Take::kFailed;
    AskMissing(lease);
  }
  StartCopyIfDue(id, lease);
  if (!lease.ready()) return Take::kPending;
  std::erase(pending_, id);
  lease.MoveTo(State::kHandedOut);
  out->lease = id;
  Fill(lease, out);
  return Take::kReady;
}

void Leases::Fill(const Lease& lease, Handout* out) const {
  const Residency::Dataset& dataset = residency_.dataset(lease.dataset);
  out->epoch = lease.epoch;
  out->index = lease.index;
  out->samples = lease.samples;
  const size_t n = lease.samples.size();
  out->offsets.resize(n);
  out->lengths.resize(n);
  if (lease.serving()) {
    out->crcs.resize(n);
    for (size_t i = 0; i < n; ++i) out->crcs[i] = dataset.crcs[lease.samples[i]];
  }
  uint64_t at = lease.block == Arena::kNone ? 0 : CopyOffset(lease);
  for (size_t i = 0; i < n; ++i) {
    const Entry& e = dataset.entries[lease.samples[i]];
    out->lengths[i] = e.length;
    if (lease.block == Arena::kNone) {
      out->offsets[i] = e.offset;
    } else {
      out->offsets[i] = at;
      at += e.length;
    }
  }
}

bool Leases::FindFailure(const Lease& lease, Handout* out) {
  for (SampleId s : lease.missing) {
    Entry& e = entry(lease.dataset, s);
    if (!(e.flags & Residency::kFailedNow) && !e.dead) continue;
    e.flags &= static_cast<uint8_t>(~Residency::kFailedNow);  // the next ask reads again
    out->failed = s;
    out->epoch = lease.epoch;
    out->index = lease.index;
    return true;
  }
  return false;
}

void Leases::Release(LeaseId id) {
  auto it = leases_.find(id);
  if (it == leases_.end()) return;
  Lease& lease = it->second;
  if (lease.copying()) {  // the copier still reads and writes: the end of the copy frees
    lease.MoveTo(State::kCancelled);
    return;
  }
  if (!lease.copied()) Unpin(lease);
  if (lease.state != State::kHandedOut) {
    std::erase(pending_, id);
    if (lease.counted) lookahead_.UndoFetch(lease.stream, lease.samples[0]);
  }
  Drop(id);
}

void Leases::Drop(LeaseId id) {
  auto it = leases_.find(id);
  Lease& lease = it->second;
  const StreamId stream = lease.stream;
  if (lease.block != Arena::kNone) FreeCopy(lease);
  for (LeaseId waiting : pending_) leases_.at(waiting).reserved = false;
  leased_bytes_ -= lease.bytes;
  if (lease.admitted) serving_bytes_ -= lease.bytes;
  --consumers_[stream].leases;
  leases_.erase(it);
  FreeRegionIfUnused(stream);
  for (StreamId other = 0; other < consumers_.size(); ++other) {
    if (!consumers_[other].queue.empty()) MarkDue(other);  // room may have come free for it
  }
}

// Pinned are a lease's samples less the missing ones, as multisets.
void Leases::Unpin(const Lease& lease) {
  std::unordered_map<SampleId, int> missing;
  for (SampleId s : lease.missing) ++missing[s];
  for (SampleId s : lease.samples) {
    if (!missing.empty()) {
      auto found = missing.find(s);
      if (found != missing.end() && found->second-- > 0) continue;
    }
    residency_.Unpin(lease.dataset, s);
  }
}

// What it has gathered is given up, and will be read again for it.
void Leases::StartOver(Lease& lease) {
  Unpin(lease);
  lease.missing = lease.samples;
  lease.MoveTo(State::kGathering);
}

uint64_t Leases::BytesOf(const Lease& lease) const {
  const Residency::Dataset& dataset = residency_.dataset(lease.dataset);
  uint64_t bytes = 0;
  for (const SampleId s : lease.samples) {
    bytes += ArenaAllocator::Rounded(dataset.entries[s].length);
  }
  return bytes;
}

Leases::Held Leases::HeldBeside(StreamId id) const {
  Held held;
  for (const auto& [number, lease] : leases_) {
    if (lease.state == State::kHandedOut) {
      ++held.count;
      held.bytes += lease.bytes;
    } else if (lease.stream == id && lease.wanted()) {
      held.wanted = lease.bytes;
      for (const SampleId s : lease.missing) {
        held.piece =
            std::max<uint64_t>(held.piece, residency_.dataset(lease.dataset).entries[s].length);
      }
    }
  }
  return held;
}

// ---- what is missing --------------------------------------------------------------------------

// A single one however large.
bool Leases::Admit(Lease& lease) {
  if (lease.admitted) return true;
  if (serving_bytes_ != 0 &&
      serving_bytes_ + lease.bytes > arena_.usable() / Lookahead::kServingOneIn) {
    return false;
  }
  lease.admitted = true;
  serving_bytes_ += lease.bytes;
  return true;
}

// Whether a lease must let others go first. While a consumer finds no room, whoever comes after it
// starts nothing, so that what is under way runs out and its memory can be had in one piece. When
// nothing is under way only a release helps the one, and the others may go on. Other nodes are
// served within their part as long as this one waits for any of them. Otherwise nodes A and B
// deadlock: each consumer needs memory that is pinned by a read from the other.
bool Leases::MustYield(const Lease& lease) const {
  bool busy = reads_.Moving();
  bool starving = false;
  for (LeaseId id : pending_) {
    const Lease& other = leases_.at(id);
    if (other.serving()) continue;  // nobody of this node waits for it
    if (lease.serving()) {
      if (other.blocked() && reads_.peer_reads() == 0) return true;
      continue;
    }
    busy |= other.copying();
    starving |=
        &other != &lease && other.blocked() && (!lease.wanted() || other.stream < lease.stream);
  }
  return starving && (busy || !lease.wanted());
}

// Starts reads for what a lease misses and nobody reads yet. Only a lease that a consumer waits for
// makes room for itself; while it cannot, look-ahead stands still.
void Leases::AskMissing(Lease& lease) {
  if (MustYield(lease) || (lease.serving() && !Admit(lease))) {
    lease.SetBlocked(true);
    return;
  }
  const JobId job = lookahead_.streams()[lease.stream].job;
  const Residency::Dataset& dataset = residency_.dataset(lease.dataset);
  // One that had its turn and found no room may take it from others now.
  const bool in_turn = in_turn_ || lease.blocked() || !common_.jobs.Limited(job);
  lease.SetBlocked(false);
  lease.throttled = false;
  for (size_t i = 0; i < lease.missing.size();) {
    const SampleId s = lease.missing[i];
    Entry& e = entry(lease.dataset, s);
    if (e.dead) {  // Finish reports it
      ++i;
      continue;
    }
    if (e.state == SampleState::kResident && e.pins < Residency::kMaxRefs) {
      residency_.Pin(e);
      lease.OnPinned(i);
      continue;
    }
    if (e.state == SampleState::kReading) e.flags |= Residency::kUrgent;
    constexpr uint8_t kAskedOrFailed = Residency::kFailedNow | Residency::kUrgent;
    if (e.state == SampleState::kUnsized && !(e.flags & kAskedOrFailed)) {
      e.flags |= Residency::kUrgent;
      sizes_.push_back({lease.dataset, s});
    }
    if (e.state == SampleState::kAbsent && !(e.flags & Residency::kFailedNow) &&
        !stores_.Awaits(lease.dataset, s)) {
      const bool from_source = !(e.flags & Residency::kInTier) && !dataset.Remote(s);
      if ((!in_turn && from_source) || !lookahead_.MayRead(lease.dataset, s, job)) {
        lease.throttled = true;
        ++i;
        continue;
      }
      if (!Allot(lease, s)) {
        // Its own samples may lie so that no hole is left for the last one: once, it starts over,
        // with the largest.
        if (lease.wanted() && !lease.serving() && !lease.restarted && !lease.unsized &&
            !reads_.Moving() && lease.missing.size() < lease.samples.size()) {
          lease.restarted = true;
          StartOver(lease);
          std::stable_sort(lease.missing.begin(), lease.missing.end(), [&](SampleId a, SampleId b) {
            return dataset.entries[a].length > dataset.entries[b].length;
          });
          i = 0;
          continue;
        }
        lease.SetBlocked(true);
        return;
      }
      ReadAction read = {
          .dataset = lease.dataset, .sample = s, .offset = e.offset, .length = e.length};
      read.job = job;
      read.urgent = lease.wanted();
      read.serving = lease.serving();
      reads_.Ask(read, from_source);
    }
    ++i;
  }
}

// Finds a block for an absent sample and marks it reading; for a consumer that waits, room is made.
bool Leases::Allot(const Lease& lease, SampleId s) {
  if (lease.serving() || !lease.wanted()) {
    return lookahead_.Allot(lease.stream, s, lease.serving());
  }
  const DatasetId d = lease.dataset;
  const JobId job = lookahead_.streams()[lease.stream].job;
  const bool keep = residency_.WouldKeep(d, s, job);
  Arena::Block block = residency_.FindBlock(d, s, keep);
  if (block == Arena::kNone) {
    const uint32_t length = entry(d, s).length;
    if (!MakeRoom(length, lease.stream)) return false;
    block = arena_.Allocate(length);
    if (block == Arena::kNone) return false;
  }
  residency_.BeginRead(d, s, block, true, keep, job);
  return true;
}

void Leases::NextReads(size_t limit, std::vector<ReadAction>* out, bool look_ahead) {
  std::vector<LeaseId> blocked;
  std::vector<LeaseId> throttled;
  for (LeaseId id : pending_) {
    const Lease& lease = leases_.at(id);
    if (lease.blocked()) {
      blocked.push_back(id);
    } else if (lease.throttled) {
      throttled.push_back(id);
    }
  }
  // Here for room that has come free; to take from other leases is for a consumer that asks right
  // now.
  may_steal_ = false;
  in_turn_ = true;
  bool starving = AskBlocked(blocked);
  // Those that wait for their share take turns, or the first would have all of it.
  std::stable_sort(throttled.begin(), throttled.end(), [&](LeaseId a, LeaseId b) {
    return leases_.at(a).stream - next_throttled_ < leases_.at(b).stream - next_throttled_;
  });
  std::vector<LeaseId> later;  // of jobs that have got more of their share than others
  for (LeaseId id : throttled) {
    if (common_.jobs.ShouldYield(lookahead_.streams()[leases_.at(id).stream].job)) {
      later.push_back(id);
    } else {
      starving |= AskThrottled(id);
    }
  }
  // Leases wait for these: they go first.
  reads_.StartAsked(limit, out);
  if (!starving && look_ahead && reads_.asked() == 0) reads_.StartAhead(limit, out);
  for (LeaseId id : later) {
    if (reads_.asked() != 0 || !reads_.HasRoom(limit)) break;
    AskThrottled(id);
    reads_.StartAsked(limit, out);
  }
  in_turn_ = false;
  may_steal_ = true;
}

// True: a consumer of this node still finds no room.
bool Leases::AskBlocked(std::vector<LeaseId>& blocked) {
  // Those of serving streams last.
  const auto order = [&](LeaseId id) {
    const Lease& lease = leases_.at(id);
    return std::pair(lease.serving(), lease.stream);
  };
  std::stable_sort(blocked.begin(), blocked.end(),
                   [&](LeaseId a, LeaseId b) { return order(a) < order(b); });
  bool starving = false;
  for (LeaseId id : blocked) {
    Lease& lease = leases_.at(id);
    if (!lease.missing.empty()) AskMissing(lease);
    StartCopyIfDue(id, lease);
    if (lease.ready()) MarkDue(lease);
    starving |= lease.blocked() && !lease.serving();
  }
  return starving;
}

bool Leases::AskThrottled(LeaseId id) {
  Lease& lease = leases_.at(id);
  const size_t before = reads_.asked();
  AskMissing(lease);
  if (reads_.asked() != before) next_throttled_ = lease.stream + 1;
  return lease.blocked() && !lease.serving();
}

void Leases::OnRead(DatasetId d, SampleId s, bool ok) {
  Entry& e = entry(d, s);
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
      // An earlier one may have given it up again, for room for its copy.
      if (!ok || e.pins == Residency::kMaxRefs || e.state != SampleState::kResident) {
        MarkDue(lease);
        break;
      }
      if (lease.serving() && !Admit(lease)) break;
      residency_.Pin(e);
      lease.OnPinned(i);
    }
    if (wanted && lease.missing.empty()) {
      MarkDue(lease);
      StartCopyIfDue(id, lease);
    }
  }
  if (!ok && !wanted) e.flags &= static_cast<uint8_t>(~Residency::kFailedNow);
  if (ok) residency_.MaybeFree(d, s);
}

void Leases::OnInvalidated(DatasetId d, SampleId s) {
  for (const LeaseId id : pending_) {
    Lease& lease = leases_.at(id);
    if (!lease.Misses(d, s)) continue;
    lease.SetBlocked(false);  // nobody makes way for what will fail
    lease.throttled = false;
    MarkDue(lease);
  }
}

void Leases::OnLengths(DatasetId d, bool failed) {
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
      if (e.state != SampleState::kUnsized) continue;
      lease.unsized = true;
      if (failed && (e.flags & Residency::kFailedSoon)) {
        e.flags |= Residency::kFailedNow;
        MarkDue(lease);
      }
    }
    AskMissing(lease);
    if (lease.blocked() || !lease.unsized) MarkDue(lease);
  }
  may_steal_ = true;
}

// ---- room -------------------------------------------------------------------------------------

// Samples that only wait to be copied into the second tier go by themselves: a consumer waits for
// that, and takes nothing from others meanwhile.
bool Leases::MakeRoom(uint64_t bytes, StreamId for_stream, DueRoom due) {
  while (!arena_.Fits(bytes)) {
    if (residency_.EvictOneParked()) continue;
    if (residency_.bytes().storing > 0) {
      if (stores_.FreeOneWriting()) continue;
      if (due == DueRoom::kAwait) return false;
      if (stores_.GiveUpOneDue()) continue;
    }
    if (!lookahead_.RetractOne() && !residency_.EvictOne() && !StealOne(for_stream) &&
        !arena_.GiveUpLargePlace()) {
      return false;
    }
  }
  return true;
}

// A waiting consumer may take from leases that nobody waits for yet, and from those of younger
// streams. A complete one is left alone: its consumer is about to take it.
bool Leases::MayStealFrom(const Lease& lease, StreamId for_stream) const {
  if (lease.state != State::kGathering && lease.state != State::kReady) return false;
  return !lease.wanted() || (lease.stream > for_stream && !lease.ready());
}

bool Leases::StealOne(StreamId for_stream) {
  if (!may_steal_) return false;
  for (const bool wanted : {false, true}) {
    for (auto it = pending_.rbegin(); it != pending_.rend(); ++it) {
      Lease& lease = leases_.at(*it);
      if (lease.wanted() != wanted || !MayStealFrom(lease, for_stream)) continue;
      const bool has_block = lease.block != Arena::kNone;
      if (lease.missing.size() == lease.samples.size() && !has_block) continue;
      StartOver(lease);
      if (has_block) FreeCopy(lease);
      MarkDue(lease);
      return true;
    }
  }
  return false;
}

// ---- contiguous copies ------------------------------------------------------------------------

void Leases::StartCopyIfDue(LeaseId id, Lease& lease) {
  if (lease.kind != Kind::kContiguous || lease.state != State::kGathering) return;
  if (!lease.missing.empty()) return;
  uint64_t bytes = 0;
  for (SampleId s : lease.samples) bytes += entry(lease.dataset, s).length;
  Consumer& own = consumers_[lease.stream];
  lease.SetBlocked(false);
  // Copies are made in order, so an earlier one's release makes room for this one.
  for (LeaseId before : own.queue) {
    if (before == id) break;
    if (leases_.at(before).block == Arena::kNone) return;
  }
  if (lease.block == Arena::kNone) {
    lease.block = own.copies.Allocate(bytes);
    lease.in_region = lease.block != Arena::kNone;
  }
  // The region is made for the mean batch. A larger one, or one whose predecessors are still held,
  // gets a place among the samples once its consumer waits.
  if (lease.block == Arena::kNone) {
    if (!lease.wanted()) return;
    if (MustYield(lease) || !MakeRoom(bytes, lease.stream)) {
      lease.SetBlocked(true);
      ReserveCopy(lease, bytes);
      return;
    }
    lease.block = arena_.Allocate(bytes);
  }
  lease.MoveTo(State::kCopying);
  CopyAction copy;
  copy.lease = id;
  copy.dest = CopyOffset(lease);
  for (SampleId s : lease.samples) {
    const Entry& e = entry(lease.dataset, s);
    copy.from.push_back(e.offset);
    copy.lengths.push_back(e.length);
  }
  copies_.push_back(std::move(copy));
}

uint64_t Leases::CopyOffset(const Lease& lease) const {
  const Consumer& own = consumers_[lease.stream];
  if (!lease.in_region) return arena_.offset(lease.block);
  return arena_.offset(own.region) + own.copies.offset(lease.block);
}

void Leases::FreeCopy(Lease& lease) {
  if (lease.in_region) {
    consumers_[lease.stream].copies.Free(lease.block);
  } else {
    arena_.Free(lease.block);
  }
  lease.block = Arena::kNone;
  lease.in_region = false;
}

// Where the lease's own samples lie in the way of its copy, they are given up, the copy gets its
// place first, and they are read again around it.
void Leases::ReserveCopy(Lease& lease, uint64_t bytes) {
  if (!may_steal_ || lease.reserved || reads_.Moving()) return;
  for (LeaseId id : pending_) {
    if (leases_.at(id).copying()) return;
  }
  lease.reserved = true;  // only a release makes another try worth its reads
  StartOver(lease);
  if (MakeRoom(bytes, lease.stream)) lease.block = arena_.Allocate(bytes);
}

void Leases::OnCopyDone(LeaseId id) {
  auto it = leases_.find(id);
  if (it == leases_.end()) return;
  Lease& lease = it->second;
  for (SampleId s : lease.samples) residency_.Unpin(lease.dataset, s);
  std::erase(pending_, id);
  if (lease.state == State::kCancelled) {
    Drop(id);
    return;
  }
  lease.MoveTo(State::kReady);
  MarkDue(lease);
}

std::vector<CopyAction> Leases::TakeCopies() { return std::exchange(copies_, {}); }
std::vector<SizeAction> Leases::TakeSizes() { return std::exchange(sizes_, {}); }

}  // namespace forebay
