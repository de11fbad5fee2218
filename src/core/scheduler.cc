#include "core/scheduler.h"

#include <algorithm>
#include <utility>

namespace forebay {
namespace {

// Small enough to find holes between samples, large enough for whole pages to be given up.
constexpr uint64_t kAsideBlock = uint64_t{1} << 20;
// Asks for memory as the youngest possible stream, so that no waiting lease is robbed.
constexpr StreamId kYoungest = ~StreamId{0};

}  // namespace

Scheduler::Scheduler(const Options& options, const RemoteSamples* remote)
    : arena_(options.arena_bytes),
      residency_(options, arena_, common_, remote),
      stores_(options.copy_patience, residency_, common_),
      lookahead_(arena_, residency_, stores_, common_),
      reads_(options.max_samples, arena_, residency_, stores_, lookahead_, common_),
      leases_(arena_, residency_, stores_, lookahead_, reads_, common_) {}

// ---- data sets and memory ---------------------------------------------------------------------

DatasetId Scheduler::AddDataset(std::span<const uint32_t> lengths, uint64_t metadata_bytes) {
  if (metadata_bytes > 0) {
    if (!leases_.MakeRoom(metadata_bytes, kYoungest, Leases::DueRoom::kTake)) return kNoRoom;
    arena_.SetAside(metadata_bytes);
  }
  if (!lengths.empty()) arena_.Expect(*std::max_element(lengths.begin(), lengths.end()));
  return residency_.Add(Residency::Dataset::Sized(lengths));
}

bool Scheduler::AppendSamples(DatasetId d, std::span<const uint32_t> lengths,
                              uint64_t metadata_bytes, std::span<const uint8_t> shares) {
  std::vector<Arena::Block> tables;
  if (metadata_bytes > 0 && !SetAside(metadata_bytes, &tables)) return false;
  residency_.Append(d, lengths, shares);
  return true;
}

void Scheduler::Invalidate(DatasetId d, SampleId s) {
  if (residency_.dataset(d).Dead(s)) return;
  stores_.Drop(d, s);
  residency_.Invalidate(d, s);
  leases_.OnInvalidated(d, s);
}

bool Scheduler::SetAside(uint64_t bytes, std::vector<Arena::Block>* blocks, uint64_t leave) {
  if (!arena_.MaySetAside(bytes, leave))
    return false;  // it must not cost the samples that are kept
  for (uint64_t left = bytes; left > 0;) {
    const uint64_t piece = std::min(left, kAsideBlock);
    if (!leases_.MakeRoom(piece, kYoungest, Leases::DueRoom::kTake)) {
      ReturnAside(*blocks);
      blocks->clear();
      return false;
    }
    blocks->push_back(arena_.SetAside(piece));
    left -= piece;
  }
  residency_.ChooseStaging();
  return true;
}

void Scheduler::ReturnAside(std::span<const Arena::Block> blocks) {
  for (const Arena::Block block : blocks) arena_.ReturnAside(block);
  leases_.OnRoom();
  residency_.ChooseStaging();
}

void Scheduler::SetJobLimits(std::string_view name, const JobLimits& limits) {
  JobTable& jobs = common_.jobs;
  const JobId job = jobs.Find(name);
  if (job == kNoJob || jobs.stats(job).limits == limits) return;
  jobs.SetLimits(job, limits, common_.now);
  while (jobs.stats(job).kept_bytes > limits.memory_bytes && residency_.EvictOne(&job)) {
  }
}

// ---- streams ----------------------------------------------------------------------------------

StreamId Scheduler::OpenStream(const StreamShape& shape, std::optional<StreamId> closed) {
  const JobId job = common_.jobs.Open(shape.job);
  // Leases first: where memory runs out between the two, they know one stream too many, whose
  // number the next one has. A stream that they do not know would be met when its order comes.
  leases_.Open(closed.value_or(static_cast<StreamId>(lookahead_.streams().size())), shape);
  const StreamId id = lookahead_.Open(shape, job, closed);
  residency_.ChooseStaging();
  return id;
}

void Scheduler::CloseStream(StreamId id) {
  leases_.CancelWaiting(id);
  lookahead_.Close(id);
  leases_.FreeRegionIfUnused(id);
  residency_.ChooseStaging();
}

void Scheduler::Seek(StreamId id, uint64_t epoch, uint64_t first_position) {
  leases_.CancelWaiting(id);
  lookahead_.Seek(id, epoch, first_position);
}

void Scheduler::ExtendOrder(StreamId id, uint64_t generation, uint64_t epoch,
                            std::vector<SampleId> order, bool last) {
  if (lookahead_.Extend(id, generation, epoch, std::move(order), last)) leases_.MarkDue(id);
}

void Scheduler::EndHorizon(StreamId id) {
  lookahead_.EndHorizon(id);
  leases_.MarkDue(id);
}

// ---- events -----------------------------------------------------------------------------------

void Scheduler::Advance(Nanos now) {
  MarkWaiting();
  const Nanos step = now - common_.now;
  common_.now = std::max(common_.now, now);
  if (stores_.Advance(step)) {
    // Some wait for copies on their way, and may be read from the source now.
    arena_.NoteRoom();
    leases_.MarkAllDue();
  }
  common_.jobs.BeginRound(common_.now);
}

// Whose batches lack something that comes from the source, or is held back.
void Scheduler::MarkWaiting() {
  for (const LeaseId id : leases_.pending()) {
    const Leases::Lease& l = leases_.leases().at(id);
    if (l.serving()) continue;
    const Residency::Dataset& dataset = residency_.dataset(l.dataset);
    const bool waits =
        l.throttled || std::any_of(l.missing.begin(), l.missing.end(), [&](SampleId s) {
          const Residency::Entry& e = dataset.entries[s];
          return e.state == Residency::State::kReading && !(e.flags & Residency::kInTier) &&
                 !dataset.Remote(s);
        });
    if (waits) common_.jobs.MarkWaiting(lookahead_.streams()[l.stream].job);
  }
}

void Scheduler::OnReadDone(const ReadAction& read, bool ok, uint32_t crc, Origin from) {
  const Reads::Outcome outcome = reads_.OnDone(read, ok, crc, from);
  if (outcome == Reads::Outcome::kNone) return;
  leases_.OnRead(read.dataset, read.sample, outcome == Reads::Outcome::kArrived);
}

void Scheduler::OnLengths(DatasetId d, std::span<const SampleLength> lengths) {
  for (const SampleLength& length : lengths) arena_.Expect(length.length);
  leases_.OnLengths(d, residency_.OnLengths(d, lengths));
}

void Scheduler::OnStoreEnded(DatasetId d, SampleId s, bool stored) {
  if (stores_.OnEnded(d, s, stored)) leases_.MarkDueFor(d, s);
}

void Scheduler::SetTierLeft(bool left) {
  if (common_.tier_left == left) return;
  common_.tier_left = left;
  if (!left) {
    stores_.OnTierBack();
    return;
  }
  stores_.OnTierLeft();
  arena_.NoteRoom();
  leases_.MarkAllDue();
}

bool Scheduler::Hedge(const ReadAction& hanging, ReadAction* out, bool left) {
  if (!reads_.MayHedge(hanging, left)) return false;
  const Residency::Entry& e = residency_.dataset(hanging.dataset).entries[hanging.sample];
  Arena::Block block = arena_.Allocate(e.length);
  if (block == Arena::kNone && (e.flags & Residency::kUrgent) &&
      leases_.MakeRoom(e.length, kYoungest)) {
    block = arena_.Allocate(e.length);
  }
  if (block == Arena::kNone) return false;
  *out = reads_.Hedge(hanging, block, left);
  return true;
}

}  // namespace forebay
