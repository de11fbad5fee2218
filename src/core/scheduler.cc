#include "core/scheduler.h"

#include <algorithm>
#include <cassert>
#include <functional>
#include <limits>
#include <string>
#include <utility>

namespace forebay {
namespace {

// Contiguous batches prepared ahead of the one the consumer holds.
constexpr size_t kCopyDepth = 3;
// Small enough to find holes between samples, large enough for whole pages to be given up.
constexpr uint64_t kAsideBlock = uint64_t{1} << 20;
// The part of memory, and of what is not kept, that other nodes' requests may take.
constexpr uint64_t kServingOneIn = 8;
// The part of memory that samples which come before their data set leave free.
constexpr uint64_t kEarlyLeavesOneIn = 16;

}  // namespace

Scheduler::Scheduler(const Options& options) : options_(options), arena_(options.arena_bytes) {}

DatasetId Scheduler::AddDataset(std::span<const uint32_t> lengths, uint64_t metadata_bytes) {
  if (metadata_bytes > 0) {
    // The youngest possible stream asks, so that no waiting lease is robbed for it.
    if (!MakeRoom(metadata_bytes, ~StreamId{0}, HeldRoom::kTake)) return kNoRoom;
    metadata_bytes_ += arena_.size(arena_.Allocate(metadata_bytes));
  }
  Dataset dataset;
  dataset.entries.resize(lengths.size());
  dataset.crcs.resize(lengths.size());
  for (size_t i = 0; i < lengths.size(); ++i) {
    dataset.entries[i].length = lengths[i];
    dataset.rounded_bytes += ArenaAllocator::Rounded(lengths[i]);
  }
  dataset.sized_bytes = dataset.rounded_bytes;
  dataset.uncovered = lengths.size();
  dataset.mean_rounded = lengths.empty() ? 0 : dataset.rounded_bytes / lengths.size();
  datasets_.push_back(std::move(dataset));
  ChooseStaging();
  return static_cast<DatasetId>(datasets_.size() - 1);
}

DatasetId Scheduler::AddUnsized(size_t samples, uint32_t guess) {
  Dataset dataset;
  dataset.entries.resize(samples, Entry{.state = State::kUnsized});
  dataset.crcs.resize(samples);
  dataset.unsized = samples;
  dataset.uncovered = samples;
  dataset.mean_rounded = ArenaAllocator::Rounded(guess);
  dataset.rounded_bytes = samples * dataset.mean_rounded;
  datasets_.push_back(std::move(dataset));
  ChooseStaging();
  return static_cast<DatasetId>(datasets_.size() - 1);
}

bool Scheduler::SetAside(uint64_t bytes, std::vector<ArenaAllocator::Block>* blocks,
                         uint64_t leave) {
  if (!MaySetAside(bytes, leave)) return false;  // it must not cost the samples that are kept
  for (uint64_t left = bytes; left > 0;) {
    const uint64_t piece = std::min(left, kAsideBlock);
    if (!MakeRoom(piece, ~StreamId{0}, HeldRoom::kTake)) {
      ReturnAside(*blocks);
      blocks->clear();
      return false;
    }
    blocks->push_back(arena_.Allocate(piece));
    metadata_bytes_ += arena_.size(blocks->back());
    left -= piece;
  }
  ChooseStaging();
  return true;
}

void Scheduler::ReturnAside(std::span<const ArenaAllocator::Block> blocks) {
  for (const ArenaAllocator::Block block : blocks) {
    metadata_bytes_ -= arena_.size(block);
    arena_.Free(block);
  }
  for (LeaseId waiting : pending_) {
    leases_.at(waiting).reserved = false;
    MarkDue(streams_[leases_.at(waiting).stream]);  // room may have come free for it
  }
  ChooseStaging();
}

ArenaAllocator::Block Scheduler::AllotEarly(uint32_t length) {
  const ArenaAllocator::Block block = arena_.Allocate(length);
  if (block != ArenaAllocator::kNone) metadata_bytes_ += arena_.size(block);
  return block;
}

uint64_t Scheduler::EarlyRoom(uint64_t samples) const {
  const uint64_t taken =
      arena_.used() + arena_.capacity() / kEarlyLeavesOneIn + MetadataBytes(samples);
  return arena_.capacity() - std::min(arena_.capacity(), taken);
}

void Scheduler::Adopt(DatasetId d, SampleId s, ArenaAllocator::Block block, uint32_t crc) {
  metadata_bytes_ -= arena_.size(block);
  Entry& e = entry(d, s);
  assert(e.state == State::kAbsent);
  e.block = block;
  e.offset = arena_.offset(block);
  e.state = State::kResident;
  e.flags |= kCrcKnown;
  datasets_[d].crcs[s] = crc;
  Count(e);
  Touch(d, s);
  if (WouldKeep(d, s, kNoJob)) KeepIfMay(d, s, kNoJob);
  MaybeFree(d, s);
}

StreamId Scheduler::OpenStream(const StreamShape& shape, std::optional<StreamId> closed) {
  Stream stream;
  stream.shape = shape;
  stream.job = jobs_.Open(shape.job);
  stream.next_epoch = shape.first_epoch;
  stream.next_first_position = shape.first_position;
  if (shape.contiguous) MakeRegion(stream);
  if (shape.serving) ++serving_streams_;
  const StreamId id = closed.value_or(static_cast<StreamId>(streams_.size()));
  if (closed) {
    // What was under way for the old one comes too late, and is known by these.
    stream.generation = streams_[id].generation + 1;
    stream.changes = streams_[id].changes + 1;
    streams_[id] = std::move(stream);
  } else {
    streams_.push_back(std::move(stream));
  }
  ChooseStaging();
  WantOrder(streams_[id], id);
  return id;
}

// A small budget has no room for a region: what is left beside it must take a batch that is held,
// the next one's samples and its copy, however large. Then copies lie among the samples.
void Scheduler::MakeRegion(Stream& stream) {
  const Dataset& dataset = datasets_[stream.shape.dataset];
  const uint64_t batch = stream.shape.batch_size * dataset.mean_rounded;
  const uint64_t usable = UsableBytes();
  const uint64_t beside = 3 * LargestBatch(dataset, stream.shape.batch_size);
  if (beside >= usable) return;
  // Batches differ in size; a quarter more than the mean leaves few of them waiting.
  uint64_t bytes = std::min({usable / 2, usable - beside, (kCopyDepth + 2) * (batch + batch / 4)});
  // Pinned samples of other streams may stand in the way of the whole of it.
  for (; bytes >= 2 * batch; bytes -= bytes / 8 + 1) {
    if (!MakeRoom(bytes, ~StreamId{0}, HeldRoom::kTake)) continue;
    stream.region = arena_.Allocate(bytes);
    stream.copies = ArenaAllocator(arena_.size(stream.region));
    return;
  }
}

uint64_t Scheduler::LargestBatch(const Dataset& dataset, size_t batch_size) {
  std::vector<uint64_t> sizes;
  sizes.reserve(dataset.entries.size());
  for (const Entry& e : dataset.entries) sizes.push_back(ArenaAllocator::Rounded(e.length));
  const size_t n = std::min(batch_size, sizes.size());
  std::nth_element(sizes.begin(), sizes.begin() + static_cast<int64_t>(n), sizes.end(),
                   std::greater<>());
  uint64_t sum = 0;
  for (size_t i = 0; i < n; ++i) sum += sizes[i];
  return sum;
}

// Room for single samples.
uint64_t Scheduler::UsableBytes() const {
  uint64_t usable = arena_.capacity() - metadata_bytes_;
  for (const Stream& stream : streams_) {
    if (stream.region != ArenaAllocator::kNone) usable -= arena_.size(stream.region);
  }
  return usable;
}

void Scheduler::FreeRegionIfUnused(Stream& stream) {
  if (stream.open || stream.leases != 0 || stream.region == ArenaAllocator::kNone) return;
  arena_.Free(stream.region);
  stream.region = ArenaAllocator::kNone;
  ++frees_;
}

void Scheduler::CloseStream(StreamId id) {
  Stream& stream = streams_[id];
  DropWaiting(stream);
  Unplan(stream);
  if (stream.open) jobs_.Close(stream.job);
  if (stream.open && stream.shape.serving) --serving_streams_;
  stream.open = false;
  FreeRegionIfUnused(stream);
  ++stream.generation;
  ChooseStaging();
}

void Scheduler::Seek(StreamId id, uint64_t epoch, uint64_t first_position) {
  Stream& stream = streams_[id];
  DropWaiting(stream);
  Unplan(stream);
  ++stream.generation;
  stream.next_epoch = epoch;
  stream.next_first_position = first_position;
  stream.last_known = false;
  stream.order_asked = false;
  stream.batch_index = 0;
  WantOrder(stream, id);
}

void Scheduler::EndHorizon(StreamId id) {
  streams_[id].last_known = true;
  MarkDue(streams_[id]);
}

void Scheduler::WantOrder(Stream& stream, StreamId id) {
  // The epoch being consumed and the one after it are known; look-ahead crosses the boundary.
  if (!stream.open || stream.last_known || stream.order_asked || stream.epochs.size() >= 2) return;
  if (stream.shape.serving) return;
  if (stream.shape.epochs != 0 &&
      stream.next_epoch >= stream.shape.first_epoch + stream.shape.epochs) {
    stream.last_known = true;
    return;
  }
  stream.order_asked = true;
  orders_.push_back({id, stream.next_epoch, stream.next_first_position, stream.generation});
}

void Scheduler::ExtendOrder(StreamId id, uint64_t generation, uint64_t epoch,
                            std::vector<SampleId> order, bool last) {
  Stream& stream = streams_[id];
  if (!stream.open || generation != stream.generation) return;
  stream.epochs.push_back({epoch, std::move(order)});
  stream.order_asked = false;
  stream.next_epoch = epoch + 1;
  stream.next_first_position = 0;
  stream.last_known |= last;
  MarkDue(stream);
  WantOrder(stream, id);
}

// ---- memory ----------------------------------------------------------------------------------

void Scheduler::ChooseStaging() {
  ++frees_;  // shares change: what was blocked may go on
  if (options_.staging_bytes != 0) {
    staging_bytes_ = std::min(options_.staging_bytes, arena_.capacity());
    return;
  }
  uint64_t batches = 0;
  for (const Stream& stream : streams_) {
    if (!stream.open) continue;
    batches += 4 * stream.shape.batch_size * datasets_[stream.shape.dataset].mean_rounded;
  }
  uint64_t everything = 0;
  bool all_kept = true;
  for (const Dataset& dataset : datasets_) {
    everything += dataset.rounded_bytes;
    all_kept &= std::find(dataset.share.begin(), dataset.share.end(),
                          static_cast<uint8_t>(KeepShare::kNone)) == dataset.share.end();
  }
  const uint64_t usable = UsableBytes();
  const uint64_t regions = arena_.capacity() - metadata_bytes_ - usable;
  if (everything <= usable && all_kept) {
    staging_bytes_ = regions;  // every sample is kept where it lands
    return;
  }
  // Where the tier's size is given, all else is staging anyway.
  const uint64_t floor = options_.keep_bytes != 0 ? 0 : uint64_t{64} << 20;
  staging_bytes_ = regions + std::min(usable / 2, std::max(batches, floor));
}

uint64_t Scheduler::keep_quota() const {
  const uint64_t usable = arena_.capacity() - metadata_bytes_;
  if (!options_.keep) return 0;
  const uint64_t quota = usable - std::min(usable, staging_bytes_);
  return options_.keep_bytes == 0 ? quota : std::min(quota, options_.keep_bytes);
}

void Scheduler::SetKeepBytes(uint64_t bytes) {
  if (bytes == options_.keep_bytes) return;
  options_.keep_bytes = bytes;
  ChooseStaging();
  while (kept_bytes_ > keep_quota() && EvictOne()) {
  }
}

void Scheduler::FreeBlock(DatasetId d, SampleId s) {
  Entry& e = entry(d, s);
  if (e.flags & kKept) Unkeep(d, s);
  if (e.flags & kCopyDue) return;  // freed when its copy was taken
  Uncount(e);
  e.storing = false;
  arena_.Free(e.block);
  e.block = ArenaAllocator::kNone;
  e.state = State::kAbsent;
  ++frees_;
}

void Scheduler::MaybeFree(DatasetId d, SampleId s) {
  const Entry& e = entry(d, s);
  if (e.state != State::kResident || e.pins != 0 || (e.flags & kKept)) return;
  // Room for copies comes as what lives here arrives, and after some were read.
  const bool copied = (e.flags & kCopyDue) || e.storing;
  if (!datasets_[d].share.empty() && !copied && WouldKeep(d, s, kNoJob)) {
    KeepIfMay(d, s, kNoJob);
  }
  if (e.ahead == 0 && !(e.flags & kKept) && !copied) FreeBlock(d, s);
}

void Scheduler::Uncount(const Entry& e) {
  if (e.block == ArenaAllocator::kNone || e.pins != 0 || (e.flags & kKept)) return;
  if (OnlyHeld(e)) {
    held_bytes_ -= arena_.size(e.block);
    return;
  }
  ahead_bytes_ -= arena_.size(e.block);
  if (e.state == State::kResident) ready_bytes_ -= arena_.size(e.block);
}

void Scheduler::Count(const Entry& e) {
  if (e.block == ArenaAllocator::kNone || e.pins != 0 || (e.flags & kKept)) return;
  if (OnlyHeld(e)) {
    held_bytes_ += arena_.size(e.block);
    return;
  }
  ahead_bytes_ += arena_.size(e.block);
  if (e.state == State::kResident) ready_bytes_ += arena_.size(e.block);
}

// Memory is for what the folder lacks, until the two cover everything.
bool Scheduler::WouldKeep(DatasetId d, SampleId s, JobId job) const {
  const Entry& e = entry(d, s);
  const Dataset& dataset = datasets_[d];
  const bool elsewhere = (e.flags & kInTier) && !dataset.tier.holds_all && dataset.uncovered > 0;
  return !elsewhere && MayKeep(d, s, ArenaAllocator::Rounded(e.length), job);
}

size_t Scheduler::ActiveStreams() const {
  return static_cast<size_t>(
      std::count_if(streams_.begin(), streams_.end(),
                    [](const Stream& stream) { return stream.open && !stream.epochs.empty(); }));
}

uint64_t Scheduler::batch_bytes() const {
  uint64_t bytes = 0;
  for (const Stream& stream : streams_) {
    if (!stream.open || stream.epochs.empty()) continue;
    bytes += stream.shape.batch_size * datasets_[stream.shape.dataset].mean_rounded;
  }
  return bytes;
}

// Finds a block for an absent sample and marks it reading. Look-ahead takes only what is free and
// within the staging share, of which it leaves a part to serving streams; an urgent read makes
// room.
bool Scheduler::Allot(DatasetId d, SampleId s, Need need, StreamId for_stream) {
  const bool urgent = need == Need::kUrgent;
  Entry& e = entry(d, s);
  const uint64_t rounded = ArenaAllocator::Rounded(e.length);
  const JobId job = streams_[for_stream].job;
  const bool keep = WouldKeep(d, s, job);
  if (!urgent && !keep) {
    // What is neither kept nor free is staging; streams share it evenly.
    const uint64_t active = ActiveStreams();
    const uint64_t staged = arena_.used() - kept_bytes_ - metadata_bytes_;
    uint64_t room = arena_.capacity() - metadata_bytes_ - keep_quota();
    if (need == Need::kAhead && serving_streams_ > 0) room -= room / kServingOneIn;
    if (staged + rounded > room) return false;
    if (need == Need::kAhead && active > 1) {
      const uint64_t own = streams_[for_stream].window() * datasets_[d].mean_rounded;
      if (own + rounded > room / active && own > 0 && staged + rounded > room / 2) return false;
    }
  }
  ArenaAllocator::Block block = arena_.Allocate(e.length);
  // What lives here goes before copies of what does not.
  while (block == ArenaAllocator::kNone && keep && !datasets_[d].share.empty() &&
         ShareOf(d, s) == KeepShare::kHome && EvictAmong(nullptr, true)) {
    block = arena_.Allocate(e.length);
  }
  if (block == ArenaAllocator::kNone) {
    if (!urgent || !MakeRoom(e.length, for_stream)) return false;
    block = arena_.Allocate(e.length);
    if (block == ArenaAllocator::kNone) return false;
  }
  Entry& placed = entry(d, s);
  ++datasets_[d].allotted;
  placed.block = block;
  placed.offset = arena_.offset(block);
  placed.state = State::kReading;
  placed.flags &= static_cast<uint8_t>(~(kFailedSoon | kFailedNow | kUrgent));
  Count(placed);
  if (need != Need::kAhead) placed.flags |= kUrgent;
  if (keep) KeepIfMay(d, s, job);
  return true;
}

bool Scheduler::MayKeep(DatasetId d, SampleId s, uint64_t bytes, JobId job) const {
  const JobStats& stats = jobs_.stats(job);
  if (!admit_memory_ || stats.kept_bytes + bytes > stats.limits.memory_bytes) return false;
  const uint64_t quota = keep_quota();
  if (datasets_[d].share.empty()) return kept_bytes_ + bytes <= quota;
  switch (ShareOf(d, s)) {
    case KeepShare::kNone:
      return false;
    case KeepShare::kHome:
      return kept_bytes_ - spare_bytes_ + bytes <= quota;
    case KeepShare::kReplica:
      return kept_bytes_ + reserved_bytes_ + bytes <= quota;
  }
  return false;
}

void Scheduler::KeepIfMay(DatasetId d, SampleId s, JobId job) {
  const uint64_t bytes = arena_.size(entry(d, s).block);
  if (!MayKeep(d, s, bytes, job)) return;
  while (kept_bytes_ + bytes > keep_quota() && (EvictAmong(nullptr, true) || LetSpareGo())) {
  }
  if (kept_bytes_ + bytes <= keep_quota()) Keep(d, s, job);
}

// Copies in use, such as those that were begun before the shares were known: they are not for
// keeping any more, and go when their use ends.
bool Scheduler::LetSpareGo() {
  if (spare_bytes_ == 0) return false;
  for (DatasetId d = 0; d < datasets_.size(); ++d) {
    Dataset& dataset = datasets_[d];
    const auto n = static_cast<SampleId>(dataset.entries.size());
    for (SampleId step = 0; step < n; ++step) {
      const SampleId s = dataset.clock_hand;
      dataset.clock_hand = s + 1 == n ? 0 : s + 1;
      if (!Spare(d, s)) continue;
      Unkeep(d, s);
      return true;
    }
  }
  return false;
}

void Scheduler::Keep(DatasetId d, SampleId s, JobId job) {
  SetFlag(d, s, kKept);
  Entry& e = entry(d, s);
  e.owner = job;
  kept_bytes_ += arena_.size(e.block);
  if (Spare(d, s)) spare_bytes_ += arena_.size(e.block);
  jobs_.stats(job).kept_bytes += arena_.size(e.block);
}

void Scheduler::Unkeep(DatasetId d, SampleId s) {
  const Entry& e = entry(d, s);
  kept_bytes_ -= arena_.size(e.block);
  if (Spare(d, s)) spare_bytes_ -= arena_.size(e.block);
  jobs_.stats(e.owner).kept_bytes -= arena_.size(e.block);
  ClearFlag(d, s, kKept);
}

void Scheduler::SetJobLimits(std::string_view name, const JobLimits& limits) {
  const JobId job = jobs_.Find(name);
  if (job == kNoJob || jobs_.stats(job).limits == limits) return;
  jobs_.SetLimits(job, limits, now_);
  while (jobs_.stats(job).kept_bytes > limits.memory_bytes && EvictOne(&job)) {
  }
}

void Scheduler::Advance(Nanos now) {
  // Drivers call at least every so often; while the process stood still, so did the second tier.
  constexpr Nanos kLongestStep = kSecond;
  MarkWaiting();
  if (now - now_ > kLongestStep) copies_moved_ += now - now_ - kLongestStep;
  now_ = std::max(now_, now);
  if (copies_under_way() == 0) copies_hang_ = false;
  if (CopiesMove() && now_ - copies_moved_ > options_.copy_patience) GiveUpCopies();
  jobs_.BeginRound(now_);
}

// Whose batches lack something that comes from the source, or is held back.
void Scheduler::MarkWaiting() {
  for (const LeaseId id : pending_) {
    const Lease& lease = leases_.at(id);
    if (lease.serving) continue;
    const bool waits =
        lease.held || std::any_of(lease.missing.begin(), lease.missing.end(), [&](SampleId s) {
          const Entry& e = entry(lease.dataset, s);
          return e.state == State::kReading && !(e.flags & kInTier) && !Elsewhere(lease.dataset, s);
        });
    if (waits) jobs_.MarkWaiting(streams_[lease.stream].job);
  }
}

void Scheduler::SetFlag(DatasetId d, SampleId s, uint8_t flag) {
  Entry& e = entry(d, s);
  if (!(e.flags & (kKept | kInTier))) Cover(d, s);
  Uncount(e);
  e.flags |= flag;
  Count(e);
  Touch(d, s);
}

void Scheduler::ClearFlag(DatasetId d, SampleId s, uint8_t flag) {
  Entry& e = entry(d, s);
  const bool covered = (e.flags & (kKept | kInTier)) != 0;
  Uncount(e);
  e.flags &= static_cast<uint8_t>(~flag);
  Count(e);
  if (covered && !(e.flags & (kKept | kInTier))) Uncover(d, s);
  Touch(d, s);
}

void Scheduler::Cover(DatasetId d, SampleId s) {
  const KeepShare share = ShareOf(d, s);
  if (share != KeepShare::kNone) --datasets_[d].uncovered;
  if (!datasets_[d].share.empty() && share == KeepShare::kHome) {
    reserved_bytes_ -= ArenaAllocator::Rounded(entry(d, s).length);
  }
}

void Scheduler::Uncover(DatasetId d, SampleId s) {
  const KeepShare share = ShareOf(d, s);
  if (share != KeepShare::kNone) ++datasets_[d].uncovered;
  if (!datasets_[d].share.empty() && share == KeepShare::kHome) {
    reserved_bytes_ += ArenaAllocator::Rounded(entry(d, s).length);
  }
}

void Scheduler::SetShare(DatasetId d, std::vector<uint8_t> share) {
  Dataset& dataset = datasets_[d];
  if (share.size() != dataset.entries.size()) share.clear();
  if (share == dataset.share) return;
  const auto n = static_cast<SampleId>(dataset.entries.size());
  // Counted under the old shares, taken out, and counted again.
  for (SampleId s = 0; s < n; ++s) {
    const Entry& e = dataset.entries[s];
    if (!(e.flags & (kKept | kInTier))) Cover(d, s);
    if (Spare(d, s)) spare_bytes_ -= arena_.size(e.block);
  }
  dataset.share = std::move(share);
  for (SampleId s = 0; s < n; ++s) {
    const Entry& e = dataset.entries[s];
    if (!(e.flags & (kKept | kInTier))) Uncover(d, s);
    if (Spare(d, s)) spare_bytes_ += arena_.size(e.block);
  }
  ChooseStaging();
  while (kept_bytes_ > keep_quota() && EvictOne()) {
  }
}

void Scheduler::Touch(DatasetId d, SampleId s) {
  Dataset& dataset = datasets_[d];
  if (dataset.told.empty() || dataset.is_touched[s]) return;
  dataset.is_touched[s] = true;
  dataset.touched.push_back(s);
}

std::vector<std::byte> Scheduler::HeldBits(DatasetId d) const {
  const auto n = static_cast<SampleId>(datasets_[d].entries.size());
  std::vector<std::byte> bits((n + 7) / 8);
  for (SampleId s = 0; s < n; ++s) {
    if (Held(d, s)) bits[s / 8] |= std::byte{1} << (s % 8);
  }
  return bits;
}

HeldChanges Scheduler::TakeHeldChanges(DatasetId d) {
  Dataset& dataset = datasets_[d];
  if (dataset.told.empty()) {
    dataset.told.resize(dataset.entries.size());
    dataset.is_touched.resize(dataset.entries.size());
    for (SampleId s = 0; s < dataset.entries.size(); ++s) Touch(d, s);
  }
  HeldChanges changes;
  for (const SampleId s : dataset.touched) {
    dataset.is_touched[s] = false;
    const bool held = Held(d, s);
    if (held == dataset.told[s]) continue;
    dataset.told[s] = held;
    (held ? changes.got : changes.lost).push_back(s);
  }
  dataset.touched.clear();
  return changes;
}

std::vector<SampleId> Scheduler::Upcoming(DatasetId d, size_t most) const {
  constexpr size_t kLookAt = 8192;  // positions, so that a lock held around it is short
  const Dataset& dataset = datasets_[d];
  std::vector<SampleId> next, own;
  size_t looked = 0;
  const auto all = [&] {
    own.resize(std::min(own.size(), most - next.size()));
    next.insert(next.end(), own.begin(), own.end());
    return next;
  };
  for (const Stream& stream : streams_) {
    if (!stream.open || stream.shape.dataset != d) continue;
    for (size_t i = stream.cursor_epoch; i < stream.epochs.size(); ++i) {
      const std::vector<SampleId>& order = stream.epochs[i].order;
      for (uint64_t p = i == stream.cursor_epoch ? stream.cursor : 0; p < order.size(); ++p) {
        if (next.size() >= most || ++looked > kLookAt) return all();
        const Entry& e = dataset.entries[order[p]];
        if (e.state != State::kAbsent || (e.flags & (kInTier | kFailedSoon | kFailedNow))) continue;
        if (!WouldKeep(d, order[p], kNoJob)) continue;
        std::vector<SampleId>& to = ShareOf(d, order[p]) == KeepShare::kHome ? own : next;
        if (to.size() < most) to.push_back(order[p]);
      }
    }
  }
  return all();
}

// A single one however large.
bool Scheduler::Admit(Lease& lease) {
  if (lease.admitted) return true;
  if (serving_bytes_ != 0 && serving_bytes_ + lease.bytes > UsableBytes() / kServingOneIn) {
    return false;
  }
  lease.admitted = true;
  serving_bytes_ += lease.bytes;
  return true;
}

// Every sample is kept where it lands.
bool Scheduler::FitsMemory() const {
  uint64_t everything = 0;
  for (const Dataset& dataset : datasets_) everything += dataset.rounded_bytes;
  return everything <= keep_quota();
}

// Samples that only wait to be copied go by themselves: a consumer waits for that, and takes
// nothing from others meanwhile.
bool Scheduler::MakeRoom(uint64_t bytes, StreamId for_stream, HeldRoom held) {
  auto fits = [&] {
    const ArenaAllocator::Block block = arena_.Allocate(bytes);
    if (block == ArenaAllocator::kNone) return false;
    arena_.Free(block);
    return true;
  };
  while (!fits()) {
    if (held_bytes_ > 0) {
      if (FreeOneStoring()) continue;
      if (held == HeldRoom::kAwait) return false;
      if (GiveUpOneHeld()) continue;
    }
    if (!RetractOne() && !EvictOne() && !StealOne(for_stream)) return false;
  }
  return true;
}

// Takes back the look-ahead position farthest from use, of the stream with the longest window.
bool Scheduler::RetractOne() {
  Stream* longest = nullptr;
  uint64_t length = 0;
  for (Stream& stream : streams_) {
    if (!stream.open || stream.shape.itemised || stream.epochs.empty()) continue;
    if (stream.window() > length) {
      longest = &stream;
      length = stream.window();
    }
  }
  if (longest == nullptr) return false;
  if (longest->cursor == 0) {
    --longest->cursor_epoch;
    longest->cursor = longest->epochs[longest->cursor_epoch].order.size();
    if (longest->cursor == 0) return false;
  }
  --longest->cursor;
  const SampleId s = longest->epochs[longest->cursor_epoch].order[longest->cursor];
  UnplanPosition(*longest, s);
  ++counters_.retracted;
  return true;
}

bool Scheduler::EvictOne(const JobId* job) {
  return EvictAmong(job, true) || EvictAmong(job, false);
}

// `spare_only`: what does not live here.
bool Scheduler::EvictAmong(const JobId* job, bool spare_only) {
  if ((spare_only ? spare_bytes_ : kept_bytes_) == 0) return false;
  for (DatasetId d = 0; d < datasets_.size(); ++d) {
    Dataset& dataset = datasets_[d];
    const auto n = static_cast<SampleId>(dataset.entries.size());
    for (SampleId step = 0; step < n; ++step) {
      const SampleId s = dataset.clock_hand;
      dataset.clock_hand = s + 1 == n ? 0 : s + 1;
      const Entry& e = dataset.entries[s];
      if (e.state != State::kResident || e.pins != 0 || !(e.flags & kKept)) continue;
      if (job != nullptr && e.owner != *job) continue;
      if (spare_only && !Spare(d, s)) continue;
      FreeBlock(d, s);
      ++counters_.evicted;
      return true;
    }
  }
  return false;
}

// Pinned are a lease's samples less the missing ones, as multisets.
void Scheduler::Unpin(const Lease& lease) {
  std::unordered_map<SampleId, int> missing;
  for (SampleId s : lease.missing) ++missing[s];
  for (SampleId s : lease.samples) {
    if (!missing.empty()) {
      auto found = missing.find(s);
      if (found != missing.end() && found->second-- > 0) continue;
    }
    Unpin(lease.dataset, s);
  }
}

// A waiting consumer may take from leases that nobody waits for yet, and from those of younger
// streams. A complete one is left alone: its consumer is about to take it.
bool Scheduler::MayStealFrom(const Lease& lease, StreamId for_stream) const {
  if (lease.handed_out || lease.copying || lease.released) return false;
  return !lease.wanted || (lease.stream > for_stream && !lease.ready());
}

// Unpins what a lease has gathered; it will be read again for it.
bool Scheduler::StealOne(StreamId for_stream) {
  if (!may_steal_) return false;
  for (const bool wanted : {false, true}) {
    for (auto it = pending_.rbegin(); it != pending_.rend(); ++it) {
      Lease& lease = leases_.at(*it);
      if (lease.wanted != wanted || !MayStealFrom(lease, for_stream)) continue;
      const bool has_block = lease.block != ArenaAllocator::kNone;
      if (lease.missing.size() == lease.samples.size() && !has_block) continue;
      Unpin(lease);
      lease.missing = lease.samples;
      if (has_block) FreeCopy(lease);
      MarkDue(streams_[lease.stream]);
      return true;
    }
  }
  return false;
}

// Whether a lease must let others go first. While a consumer finds no room, whoever comes after it
// starts nothing, so that what is under way runs out and its memory can be had in one piece. When
// nothing is under way only a release helps the one, and the others may go on. Other nodes are
// served within their part as long as this one waits for any of them: two whose consumers wait for
// memory that reads from each other hold would else wait until these are given up.
bool Scheduler::MustYield(const Lease& lease) const {
  bool busy = Moving();
  bool starving = false;
  for (LeaseId id : pending_) {
    const Lease& other = leases_.at(id);
    if (other.serving) continue;  // nobody of this node waits for it
    if (lease.serving) {
      if (other.blocked && peer_reads_ == 0) return true;
      continue;
    }
    busy |= other.copying;
    starving |= &other != &lease && other.blocked && (!lease.wanted || other.stream < lease.stream);
  }
  return starving && (busy || !lease.wanted);
}

// ---- leases ----------------------------------------------------------------------------------

// Starts reads for what a lease misses and nobody reads yet. Only a lease that a consumer waits for
// makes room for itself; while it cannot, look-ahead stands still.
void Scheduler::AskMissing(LeaseId, Lease& lease) {
  if (MustYield(lease) || (lease.serving && !Admit(lease))) {
    lease.blocked = lease.wanted;
    return;
  }
  const Need need = lease.serving ? Need::kServing : lease.wanted ? Need::kUrgent : Need::kAhead;
  const JobId job = streams_[lease.stream].job;
  // One that had its turn and found no room may take it from others now.
  const bool in_turn = handing_out_ || lease.blocked || !jobs_.Limited(job);
  lease.blocked = false;
  lease.held = false;
  for (size_t i = 0; i < lease.missing.size();) {
    const SampleId s = lease.missing[i];
    Entry& e = entry(lease.dataset, s);
    if (e.state == State::kResident && e.pins < kMaxRefs) {
      Pin(e);
      lease.missing[i] = lease.missing.back();
      lease.missing.pop_back();
      continue;
    }
    if (e.state == State::kReading) e.flags |= kUrgent;
    if (e.state == State::kUnsized && !(e.flags & (kFailedNow | kUrgent))) {
      e.flags |= kUrgent;
      sizes_.push_back({lease.dataset, s});
    }
    if (e.state == State::kAbsent && !(e.flags & kFailedNow) && !AwaitsStore(lease.dataset, s)) {
      const bool from_source = !(e.flags & kInTier) && !Elsewhere(lease.dataset, s);
      if ((!in_turn && from_source) || !MayRead(lease.dataset, s, job)) {
        lease.held = true;
        ++i;
        continue;
      }
      if (!Allot(lease.dataset, s, need, lease.stream)) {
        // Its own samples may lie so that no hole is left for the last one: once, it starts over.
        if (need == Need::kUrgent && !lease.restarted && !lease.unsized && !Moving() &&
            lease.missing.size() < lease.samples.size()) {
          lease.restarted = true;
          Unpin(lease);
          lease.missing = lease.samples;
          i = 0;
          continue;
        }
        lease.blocked = lease.wanted;
        return;
      }
      const Entry& placed = entry(lease.dataset, s);
      ReadAction read = {lease.dataset, s, placed.offset, placed.length};
      read.job = job;
      read.urgent = lease.wanted;
      read.serving = lease.serving;
      if (from_source) Charge(read);
      (lease.serving ? serving_urgent_ : urgent_).push_back(read);
    }
    ++i;
  }
}

LeaseId Scheduler::MakeBatchLease(StreamId id, Stream& stream) {
  const std::vector<SampleId>& order = stream.epochs.front().order;
  const uint64_t n = std::min<uint64_t>(stream.shape.batch_size, order.size() - stream.taken);
  const DatasetId d = stream.shape.dataset;
  Lease lease;
  lease.stream = id;
  lease.dataset = d;
  lease.epoch = stream.epochs.front().epoch;
  lease.index = stream.batch_index++;
  lease.samples.assign(order.begin() + static_cast<int64_t>(stream.taken),
                       order.begin() + static_cast<int64_t>(stream.taken + n));
  const uint64_t planned = stream.cursor_epoch > 0 ? order.size() : stream.cursor;
  for (uint64_t i = 0; i < n; ++i) {
    const SampleId s = lease.samples[i];
    Entry& e = entry(d, s);
    if (stream.taken + i < planned) AddAhead(e, -1);
    lease.bytes += ArenaAllocator::Rounded(e.length);
    lease.unsized |= e.state == State::kUnsized;
    if (e.state == State::kResident && e.pins < kMaxRefs) {
      Pin(e);
      ++counters_.hits;
      counters_.hit_bytes += e.length;
    } else {
      lease.missing.push_back(s);
    }
  }
  stream.taken += n;
  if (stream.cursor_epoch == 0 && stream.cursor < stream.taken) stream.cursor = stream.taken;
  lease.copy_wanted = stream.shape.contiguous;
  const LeaseId lease_id = next_lease_++;
  leased_bytes_ += lease.bytes;
  ++stream.leases;
  const bool pending = !lease.missing.empty() || lease.copy_wanted;
  leases_.emplace(lease_id, std::move(lease));
  if (pending) pending_.push_back(lease_id);
  return lease_id;
}

void Scheduler::StartCopyIfDue(LeaseId id, Lease& lease) {
  if (!lease.missing.empty() || !lease.copy_wanted || lease.copying) return;
  uint64_t bytes = 0;
  for (SampleId s : lease.samples) bytes += entry(lease.dataset, s).length;
  Stream& stream = streams_[lease.stream];
  lease.blocked = false;
  // Copies are made in order, so an earlier one's release makes room for this one.
  for (LeaseId before : stream.queue) {
    if (before == id) break;
    if (leases_.at(before).block == ArenaAllocator::kNone) return;
  }
  if (lease.block == ArenaAllocator::kNone) {
    lease.block = stream.copies.Allocate(bytes);
    lease.in_region = lease.block != ArenaAllocator::kNone;
  }
  // The region is made for the mean batch. A larger one, or one whose predecessors are still held,
  // gets a place among the samples once its consumer waits.
  if (lease.block == ArenaAllocator::kNone) {
    if (!lease.wanted) return;
    if (MustYield(lease) || !MakeRoom(bytes, lease.stream)) {
      lease.blocked = true;
      ReserveCopy(lease, bytes);
      return;
    }
    lease.block = arena_.Allocate(bytes);
  }
  lease.copying = true;
  lease.copy_wanted = false;
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

uint64_t Scheduler::BytesOf(const Lease& lease) const {
  uint64_t bytes = 0;
  for (const SampleId s : lease.samples) {
    bytes += ArenaAllocator::Rounded(entry(lease.dataset, s).length);
  }
  return bytes;
}

uint64_t Scheduler::CopyOffset(const Lease& lease) const {
  const Stream& stream = streams_[lease.stream];
  if (!lease.in_region) return arena_.offset(lease.block);
  return arena_.offset(stream.region) + stream.copies.offset(lease.block);
}

void Scheduler::FreeCopy(Lease& lease) {
  if (lease.in_region) {
    streams_[lease.stream].copies.Free(lease.block);
  } else {
    arena_.Free(lease.block);
    ++frees_;
  }
  lease.block = ArenaAllocator::kNone;
  lease.in_region = false;
}

// Where the lease's own samples lie in the way of its copy, they are given up, the copy gets its
// place first, and they are read again around it.
void Scheduler::ReserveCopy(Lease& lease, uint64_t bytes) {
  if (!may_steal_ || lease.reserved || Moving()) return;
  for (LeaseId id : pending_) {
    if (leases_.at(id).copying) return;
  }
  lease.reserved = true;  // only a release makes another try worth its reads
  Unpin(lease);
  lease.missing = lease.samples;
  if (MakeRoom(bytes, lease.stream)) lease.block = arena_.Allocate(bytes);
}

void Scheduler::OnCopyDone(LeaseId id) {
  auto it = leases_.find(id);
  if (it == leases_.end()) return;
  Lease& lease = it->second;
  lease.copying = false;
  for (SampleId s : lease.samples) {
    Unpin(lease.dataset, s);
  }
  std::erase(pending_, id);
  if (lease.released) {
    Drop(id);
    return;
  }
  MarkDue(streams_[lease.stream]);
}

void Scheduler::Fill(const Lease& lease, Handout* out) const {
  out->epoch = lease.epoch;
  out->index = lease.index;
  out->samples = lease.samples;
  const size_t n = lease.samples.size();
  out->offsets.resize(n);
  out->lengths.resize(n);
  if (lease.serving) {
    out->crcs.resize(n);
    for (size_t i = 0; i < n; ++i) out->crcs[i] = datasets_[lease.dataset].crcs[lease.samples[i]];
  }
  uint64_t at = lease.block == ArenaAllocator::kNone ? 0 : CopyOffset(lease);
  for (size_t i = 0; i < n; ++i) {
    const Entry& e = entry(lease.dataset, lease.samples[i]);
    out->lengths[i] = e.length;
    if (lease.block == ArenaAllocator::kNone) {
      out->offsets[i] = e.offset;
    } else {
      out->offsets[i] = at;
      at += e.length;
    }
  }
}

bool Scheduler::FindFailure(Lease& lease, Handout* out) {
  for (SampleId s : lease.missing) {
    Entry& e = entry(lease.dataset, s);
    if (!(e.flags & kFailedNow)) continue;
    e.flags &= static_cast<uint8_t>(~kFailedNow);  // the next ask reads again
    out->failed = s;
    out->epoch = lease.epoch;
    out->index = lease.index;
    return true;
  }
  return false;
}

Scheduler::Take Scheduler::Finish(LeaseId id, Lease& lease, Handout* out) {
  const uint64_t usable = UsableBytes();
  const Stream& own = streams_[lease.stream];
  if (lease.bytes > usable ||
      (own.shape.contiguous && lease.bytes > own.copies.capacity() && 2 * lease.bytes > usable)) {
    out->bytes = lease.bytes;
    return Take::kTooLarge;
  }
  lease.wanted = true;
  if (!lease.missing.empty()) {
    if (FindFailure(lease, out)) return Take::kFailed;
    AskMissing(id, lease);
  }
  StartCopyIfDue(id, lease);
  if (!lease.ready()) return Take::kPending;
  std::erase(pending_, id);
  lease.handed_out = true;
  out->lease = id;
  Fill(lease, out);
  return Take::kReady;
}

Scheduler::Take Scheduler::TakeBatch(StreamId id, Handout* out) {
  Stream& stream = streams_[id];
  stream.due = false;
  if (!stream.open) return Take::kEndOfStream;
  // A contiguous stream prepares several batches; the others only the one asked for.
  const size_t depth = stream.shape.contiguous ? kCopyDepth : 1;
  bool ended = false;
  while (stream.queue.size() < depth && !stream.epochs.empty()) {
    const uint64_t left = stream.epochs.front().order.size() - stream.taken;
    if (left == 0 || (stream.shape.drop_last && left < stream.shape.batch_size)) {
      ended = true;
      break;
    }
    stream.queue.push_back(MakeBatchLease(id, stream));
  }
  if (stream.queue.empty()) {
    if (ended) {
      // Positions a dropped last batch had planned are given up.
      const std::vector<SampleId>& order = stream.epochs.front().order;
      const uint64_t planned = stream.cursor_epoch > 0 ? order.size() : stream.cursor;
      for (uint64_t p = stream.taken; p < planned; ++p) UnplanPosition(stream, order[p]);
      stream.epochs.pop_front();
      stream.taken = 0;
      stream.batch_index = 0;
      if (stream.cursor_epoch > 0) {
        --stream.cursor_epoch;
      } else {
        stream.cursor = 0;
      }
      WantOrder(stream, id);
      return Take::kEndOfEpoch;
    }
    if (stream.last_known) return Take::kEndOfStream;
    WantOrder(stream, id);
    return Take::kPending;
  }
  const LeaseId head = stream.queue.front();
  const Take result = Finish(head, leases_.at(head), out);
  if (result == Take::kReady) stream.queue.pop_front();
  if (result == Take::kReady || result == Take::kPending) {
    for (LeaseId waiting : stream.queue) {
      if (waiting == head) continue;
      Lease& lease = leases_.at(waiting);
      if (!lease.missing.empty()) AskMissing(waiting, lease);
      StartCopyIfDue(waiting, lease);
    }
  }
  return result;
}

// Itemised: an epoch is over when as many samples were fetched as it has, and all were planned; the
// balance by sample carries what is out of order.
void Scheduler::PopFetched(Stream& stream, StreamId id) {
  while (!stream.epochs.empty() && stream.fetched >= stream.epochs.front().order.size()) {
    const uint64_t size = stream.epochs.front().order.size();
    if (stream.cursor_epoch == 0 && stream.cursor < size) break;
    stream.fetched -= size;
    stream.epochs.pop_front();
    if (stream.cursor_epoch > 0) {
      --stream.cursor_epoch;
    } else {
      stream.cursor = 0;
    }
  }
  WantOrder(stream, id);
}

// A fetch that is cancelled before it had its sample was none.
void Scheduler::UndoFetch(Stream& stream, SampleId sample) {
  if (!stream.open || stream.fetched == 0) return;  // its epoch is over, or forgotten
  --stream.fetched;
  int32_t& balance = stream.outstanding[sample];
  if (++balance > 0) AddAhead(entry(stream.shape.dataset, sample), 1);
  if (balance == 0) stream.outstanding.erase(sample);
}

Scheduler::Take Scheduler::FetchSample(StreamId id, SampleId sample, LeaseId* lease_id,
                                       Handout* out) {
  Stream& stream = streams_[id];
  stream.due = false;
  if (*lease_id == kNoLease) {
    Lease lease;
    lease.stream = id;
    lease.dataset = stream.shape.dataset;
    Entry& e = entry(lease.dataset, sample);
    lease.samples = {sample};
    if (!stream.epochs.empty()) lease.epoch = stream.epochs.front().epoch;
    lease.bytes = ArenaAllocator::Rounded(e.length);
    lease.unsized = e.state == State::kUnsized;
    lease.serving = stream.shape.serving;
    if (stream.shape.itemised) {
      int32_t& balance = stream.outstanding[sample];
      if (balance > 0) AddAhead(e, -1);
      if (--balance == 0) stream.outstanding.erase(sample);
      ++stream.fetched;
      PopFetched(stream, id);
    }
    if (e.state == State::kResident && e.pins < kMaxRefs && (!lease.serving || Admit(lease))) {
      Pin(e);
      ++counters_.hits;
      counters_.hit_bytes += e.length;
    } else {
      lease.missing = {sample};
    }
    *lease_id = next_lease_++;
    leased_bytes_ += lease.bytes;
    ++stream.leases;
    if (!lease.missing.empty()) pending_.push_back(*lease_id);
    leases_.emplace(*lease_id, std::move(lease));
  }
  Lease& lease = leases_.at(*lease_id);
  return Finish(*lease_id, lease, out);
}

void Scheduler::Drop(LeaseId id) {
  auto it = leases_.find(id);
  Lease& lease = it->second;
  Stream& own = streams_[lease.stream];
  if (lease.block != ArenaAllocator::kNone) FreeCopy(lease);
  for (LeaseId waiting : pending_) leases_.at(waiting).reserved = false;
  leased_bytes_ -= lease.bytes;
  if (lease.admitted) serving_bytes_ -= lease.bytes;
  --own.leases;
  leases_.erase(it);
  FreeRegionIfUnused(own);
  for (Stream& stream : streams_) {
    if (!stream.queue.empty()) MarkDue(stream);  // room may have come free for it
  }
}

void Scheduler::Release(LeaseId id) {
  auto it = leases_.find(id);
  if (it == leases_.end()) return;
  Lease& lease = it->second;
  if (lease.copying) {  // the copier still reads and writes: the end of the copy frees
    lease.released = true;
    return;
  }
  // Once the copy is made the samples are no longer pinned.
  if (lease.block == ArenaAllocator::kNone || lease.copy_wanted) Unpin(lease);
  if (!lease.handed_out) {
    std::erase(pending_, id);
    if (streams_[lease.stream].shape.itemised) UndoFetch(streams_[lease.stream], lease.samples[0]);
  }
  Drop(id);
}

// ---- events ----------------------------------------------------------------------------------

std::vector<CopyAction> Scheduler::NextCopies() { return std::exchange(copies_, {}); }
std::vector<OrderAction> Scheduler::NextOrders() { return std::exchange(orders_, {}); }
std::vector<SizeAction> Scheduler::NextSizes() { return std::exchange(sizes_, {}); }

bool Scheduler::IsDue(StreamId stream) const { return streams_[stream].due; }

bool Scheduler::FirstMissing(StreamId id, DatasetId* dataset, SampleId* sample) const {
  for (LeaseId candidate : pending_) {
    const Lease& lease = leases_.at(candidate);
    if (lease.stream != id || lease.missing.empty()) continue;
    *dataset = lease.dataset;
    *sample = lease.missing.front();
    return true;
  }
  return false;
}

StallCause Scheduler::WaitCause(StreamId id) const {
  const Stream& stream = streams_[id];
  const Lease* lease = nullptr;
  for (LeaseId candidate : pending_) {
    const Lease& l = leases_.at(candidate);
    if (l.stream == id) {
      lease = &l;
      break;
    }
  }
  if (lease == nullptr) return stream.epochs.empty() ? StallCause::kPlan : StallCause::kSource;
  return CauseOf(*lease);
}

StallCause Scheduler::LeaseWaitCause(LeaseId id) const {
  const auto found = leases_.find(id);
  return found == leases_.end() ? StallCause::kSource : CauseOf(found->second);
}

StallCause Scheduler::CauseOf(const Lease& lease) const {
  if (lease.held) return StallCause::kShare;
  bool from_tier = false;
  bool from_peer = false;
  for (SampleId s : lease.missing) {
    const Entry& e = entry(lease.dataset, s);
    from_tier |= e.state == State::kAbsent && AwaitsStore(lease.dataset, s);
    if (e.state == State::kUnsized) return StallCause::kSource;
    if (e.state != State::kReading) continue;
    if (e.flags & kInTier) {
      from_tier = true;
    } else if (Elsewhere(lease.dataset, s)) {
      from_peer = true;
    } else {
      return StallCause::kSource;
    }
  }
  if (from_peer) return StallCause::kPeer;
  if (from_tier) return StallCause::kTier;
  // What waits to be copied into the folder has the memory.
  if (held_bytes_ > 0 && !lease.copying) return StallCause::kTier;
  if (!lease.missing.empty()) return StallCause::kMemory;
  return lease.copying ? StallCause::kDecode : StallCause::kMemory;
}

bool Scheduler::AwaitsLength(const Lease& lease) const {
  return lease.unsized && std::any_of(lease.missing.begin(), lease.missing.end(), [&](SampleId s) {
           const Entry& e = entry(lease.dataset, s);
           return e.state == State::kUnsized && (e.flags & kUrgent);
         });
}

bool Scheduler::OnlyReleaseHelps(StreamId id) const {
  if (Moving() || !copies_.empty()) return false;
  if (streams_[id].due) return false;
  for (LeaseId candidate : pending_) {
    const Lease& l = leases_.at(candidate);
    if (l.copying || AwaitsLength(l) || (l.held && !l.serving)) return false;
    if (l.stream == id) return true;
  }
  return false;
}

bool Scheduler::Waiting() const {
  return std::any_of(pending_.begin(), pending_.end(), [this](LeaseId id) {
    const Lease& lease = leases_.at(id);
    return lease.wanted && !lease.serving && !lease.missing.empty();
  });
}

size_t Scheduler::WaitingForReads() const {
  return static_cast<size_t>(std::count_if(pending_.begin(), pending_.end(), [this](LeaseId id) {
    const Lease& lease = leases_.at(id);
    return lease.wanted && !lease.serving && !lease.blocked && !lease.held &&
           !lease.missing.empty();
  }));
}

std::string Scheduler::CheckInvariants() const {
  uint64_t used = metadata_bytes_;
  uint64_t kept = 0;
  uint64_t not_kept = 0;
  uint64_t ready = 0;
  uint64_t held = 0;
  size_t due = 0;
  std::vector<std::vector<uint32_t>> pins(datasets_.size());
  std::vector<std::vector<uint32_t>> ahead(datasets_.size());
  for (size_t d = 0; d < datasets_.size(); ++d) {
    pins[d].resize(datasets_[d].entries.size());
    ahead[d].resize(datasets_[d].entries.size());
  }
  uint64_t leased = 0;
  uint64_t serving = 0;
  for (const auto& [id, lease] : leases_) {
    leased += lease.bytes;
    if (lease.bytes != BytesOf(lease)) return "a lease's bytes do not add up";
    if (lease.admitted) serving += lease.bytes;
    if (lease.serving && !lease.admitted && lease.missing.size() != lease.samples.size()) {
      return "serving without being admitted";
    }
    const bool has_block = lease.block != ArenaAllocator::kNone;
    if (has_block && !lease.in_region) used += arena_.size(lease.block);
    if (has_block && !lease.copying && !lease.copy_wanted) continue;
    for (SampleId s : lease.samples) ++pins[lease.dataset][s];
    for (SampleId s : lease.missing) --pins[lease.dataset][s];
  }
  for (const uint64_t key : taking_) ++pins[key >> 32][static_cast<SampleId>(key)];
  if (leased != leased_bytes_) return "leased bytes do not add up";
  if (serving != serving_bytes_) return "serving bytes do not add up";
  for (const Stream& stream : streams_) {
    if (stream.region != ArenaAllocator::kNone) used += arena_.size(stream.region);
    if (stream.shape.itemised) {
      for (const auto& [s, n] : stream.outstanding) {
        if (n > 0) ahead[stream.shape.dataset][s] += static_cast<uint32_t>(n);
      }
      continue;
    }
    for (size_t i = 0; i < stream.epochs.size() && i <= stream.cursor_epoch; ++i) {
      const auto& order = stream.epochs[i].order;
      const uint64_t begin = i == 0 ? stream.taken : 0;
      const uint64_t end = i < stream.cursor_epoch ? order.size() : stream.cursor;
      for (uint64_t p = begin; p < end; ++p) ++ahead[stream.shape.dataset][order[p]];
    }
  }
  for (const auto& [serial, block] : orphans_) used += arena_.size(block);
  for (const auto& [key, race] : races_) {
    used += arena_.size(race.second_block);
    if (entry(static_cast<DatasetId>(key >> 32), static_cast<SampleId>(key)).state !=
        State::kReading) {
      return "a race for a sample that is not being read";
    }
  }
  uint64_t reserved = 0;
  uint64_t spare = 0;
  for (DatasetId d = 0; d < datasets_.size(); ++d) {
    uint64_t uncovered = 0;
    uint64_t sized = 0;
    size_t unsized = 0;
    for (SampleId s = 0; s < datasets_[d].entries.size(); ++s) {
      const Entry& e = datasets_[d].entries[s];
      if (e.state == State::kUnsized) {
        ++unsized;
      } else {
        sized += ArenaAllocator::Rounded(e.length);
      }
      if (Spare(d, s)) spare += arena_.size(e.block);
      if ((e.flags & (kKept | kInTier)) || ShareOf(d, s) == KeepShare::kNone) continue;
      ++uncovered;
      if (!datasets_[d].share.empty() && ShareOf(d, s) == KeepShare::kHome) {
        reserved += ArenaAllocator::Rounded(e.length);
      }
    }
    if (unsized != datasets_[d].unsized || sized != datasets_[d].sized_bytes) {
      return "lengths do not add up";
    }
    if (uncovered != datasets_[d].uncovered) return "uncovered samples do not add up";
    for (SampleId s = 0; s < datasets_[d].entries.size(); ++s) {
      const Entry& e = datasets_[d].entries[s];
      const std::string where = " (sample " + std::to_string(s) + ")";
      if (e.pins != pins[d][s]) return "pins do not add up" + where;
      if (e.ahead != ahead[d][s]) return "look-ahead does not add up" + where;
      const bool has_place = e.state == State::kReading || e.state == State::kResident;
      if (has_place != (e.block != ArenaAllocator::kNone)) {
        return "block without state" + where;
      }
      if (e.state != State::kResident && e.pins != 0) return "pinned but not resident" + where;
      if (e.block != ArenaAllocator::kNone) used += arena_.size(e.block);
      if (e.flags & kCopyDue) {
        ++due;
        if (e.state != State::kResident) return "a copy of nothing is due" + where;
        if (e.flags & kInTier) return "a copy is due that is there" + where;
        if (storing_.contains(Key(d, s))) return "a copy is due and under way" + where;
      }
      if (e.block != ArenaAllocator::kNone && e.pins == 0 && !(e.flags & kKept) && OnlyHeld(e)) {
        held += arena_.size(e.block);
      } else if (e.block != ArenaAllocator::kNone && e.pins == 0 && !(e.flags & kKept)) {
        not_kept += arena_.size(e.block);
        if (e.state == State::kResident) ready += arena_.size(e.block);
      }
      if (e.flags & kKept) {
        if (e.block == ArenaAllocator::kNone) return "kept without a block" + where;
        kept += arena_.size(e.block);
      }
      if (e.storing && !storing_.contains(Key(d, s))) return "held for no copy" + where;
      if (e.state == State::kResident && e.pins == 0 && e.ahead == 0 &&
          !(e.flags & (kKept | kCopyDue)) && !e.storing) {
        return "resident without a reason" + where;
      }
    }
  }
  if (used != arena_.used()) return "arena bytes do not add up";
  if (kept != kept_bytes_) return "kept bytes do not add up";
  if (spare != spare_bytes_) return "spare bytes do not add up";
  if (reserved != reserved_bytes_) return "reserved bytes do not add up";
  if (held != held_bytes_) return "held bytes do not add up";
  if (due != due_.size()) return "copies that are due do not add up";
  if (copies_hang_ && due > 0) return "copies are due though nobody waits for them";
  if (not_kept != ahead_bytes_) return "look-ahead bytes do not add up";
  if (ready != ready_bytes_) return "ready bytes do not add up";
  if (used > arena_.capacity()) return "more than the arena";
  return {};
}

}  // namespace forebay
