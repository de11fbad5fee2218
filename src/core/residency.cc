#include "core/residency.h"

#include <algorithm>
#include <cassert>
#include <utility>

namespace forebay {

// ---- what a tier holds ------------------------------------------------------------------------

void Residency::Dataset::Touch(SampleId s) {
  if (announced_.empty() || is_touched_[s]) return;
  is_touched_[s] = true;
  touched_.push_back(s);
}

std::vector<std::byte> Residency::Dataset::HeldBits() const {
  const auto n = static_cast<SampleId>(entries.size());
  std::vector<std::byte> bits((n + 7) / 8);
  for (SampleId s = 0; s < n; ++s) {
    if (Held(s)) bits[s / 8] |= std::byte{1} << (s % 8);
  }
  return bits;
}

HeldChanges Residency::Dataset::TakeHeldChanges() {
  if (announced_.empty()) {
    announced_.resize(entries.size());
    is_touched_.resize(entries.size());
    for (SampleId s = 0; s < entries.size(); ++s) Touch(s);
  }
  HeldChanges changes;
  for (const SampleId s : touched_) {
    is_touched_[s] = false;
    const bool held = Held(s);
    if (held == announced_[s]) continue;
    announced_[s] = held;
    (held ? changes.got : changes.lost).push_back(s);
  }
  touched_.clear();
  return changes;
}

// ---- data sets --------------------------------------------------------------------------------

DatasetId Residency::Add(Dataset dataset) {
  const auto id = static_cast<DatasetId>(datasets_.size());
  AddAs(id, std::move(dataset));
  return id;
}

void Residency::AddAs(DatasetId d, Dataset dataset) {
  if (d >= datasets_.size()) datasets_.resize(size_t{d} + 1);
  assert(datasets_[d].entries.empty());
  dataset.id = d;
  dataset.remote = remote_;
  datasets_[d] = std::move(dataset);
  ChooseStaging();
}

void Residency::Park(DatasetId d) {
  SetShare(d, {});  // what lives elsewhere is no matter of one that is not shared any more
  datasets_[d].parked = ++parked_;
  ++parked_now_;
  // No place is kept free for what is not read.
  uint32_t largest = 0;
  for (const Dataset& dataset : datasets_) {
    if (dataset.parked == 0) largest = std::max(largest, dataset.largest);
  }
  arena_.ExpectNoMoreThan(largest);
  ChooseStaging();
}

void Residency::Unpark(DatasetId d) {
  datasets_[d].parked = 0;
  --parked_now_;
  arena_.Expect(datasets_[d].largest);
  ChooseStaging();
  EvictExcess();
}

bool Residency::GiveUpParked(DatasetId d, SampleId* next, size_t most) {
  const Dataset& dataset = datasets_[d];
  const auto n = static_cast<SampleId>(dataset.entries.size());
  const auto end = static_cast<SampleId>(std::min<uint64_t>(n, uint64_t{*next} + most));
  for (; *next < end && dataset.kept_bytes > 0; ++*next) {
    if (dataset.entries[*next].flags & kKept) FreeBlock(d, *next);
  }
  return *next == n || dataset.kept_bytes == 0;
}

void Residency::ForgetParked(DatasetId d, SampleId s) {
  assert(datasets_[d].parked != 0);
  if (entry(d, s).flags & kKept) FreeBlock(d, s);
  // Other bytes are no sign of damage.
  entry(d, s).flags &= static_cast<uint8_t>(~(kCrcKnown | kSuspect));
}

Residency::Dataset Residency::Remove(DatasetId d) {
  assert(datasets_[d].parked != 0 && datasets_[d].kept_bytes == 0);
  --parked_now_;
  Dataset removed = std::exchange(datasets_[d], Dataset());
  ChooseStaging();
  return removed;
}

// The oldest first, each as a whole: a part of a data set is worth little to who opens it again.
void Residency::LetParkedGo(uint64_t open_bytes) {
  while (true) {
    uint64_t parked_bytes = 0;
    const Dataset* oldest = nullptr;
    for (const Dataset& dataset : datasets_) {
      if (dataset.parked == 0 || dataset.kept_bytes == 0) continue;
      parked_bytes += dataset.kept_bytes;
      if (oldest == nullptr || dataset.parked < oldest->parked) oldest = &dataset;
    }
    if (oldest == nullptr || open_bytes + parked_bytes <= keep_quota()) return;
    SampleId next = 0;
    (void)GiveUpParked(oldest->id, &next, oldest->entries.size());
  }
}

bool Residency::EvictOneParked() {
  if (parked_now_ == 0) return false;
  Dataset* oldest = nullptr;
  for (Dataset& dataset : datasets_) {
    if (dataset.parked == 0 || dataset.kept_bytes == 0) continue;
    if (oldest == nullptr || dataset.parked < oldest->parked) oldest = &dataset;
  }
  if (oldest == nullptr) return false;
  while (!(oldest->entries[oldest->clock_hand].flags & kKept)) {
    oldest->clock_hand = (oldest->clock_hand + 1) % static_cast<SampleId>(oldest->entries.size());
  }
  FreeBlock(oldest->id, oldest->clock_hand);
  ++common_.counters.evicted;
  return true;
}

Residency::Dataset Residency::Dataset::Sized(std::span<const uint32_t> lengths) {
  Dataset dataset;
  dataset.entries.resize(lengths.size());
  dataset.crcs.resize(lengths.size());
  dataset.uncovered = lengths.size();
  for (size_t i = 0; i < lengths.size(); ++i) {
    dataset.entries[i].length = lengths[i];
    dataset.rounded_bytes += ArenaAllocator::Rounded(lengths[i]);
    dataset.largest = std::max(dataset.largest, lengths[i]);
  }
  dataset.sized_bytes = dataset.rounded_bytes;
  dataset.mean_rounded = lengths.empty() ? 0 : dataset.rounded_bytes / lengths.size();
  return dataset;
}

Residency::Dataset Residency::Dataset::Unsized(size_t samples, uint32_t guess) {
  Dataset dataset;
  dataset.entries.resize(samples, Entry{.state = State::kUnsized});
  dataset.crcs.resize(samples);
  dataset.uncovered = samples;
  dataset.unsized = samples;
  dataset.mean_rounded = ArenaAllocator::Rounded(guess);
  dataset.rounded_bytes = samples * dataset.mean_rounded;
  return dataset;
}

void Residency::Dataset::Resize(size_t samples, std::span<const uint8_t> shares) {
  entries.resize(samples);
  crcs.resize(samples);
  if (!announced_.empty()) {
    announced_.resize(samples);
    is_touched_.resize(samples);
  }
  // All of a data set have one, or none has.
  const bool all_have = share.size() == samples - shares.size();
  if (shares.empty() ? share.empty() : !all_have) return;
  share.insert(share.end(), shares.begin(), shares.end());
  share.resize(samples, static_cast<uint8_t>(KeepShare::kHome));
}

void Residency::Dataset::UpdateMean() {
  const size_t alive = entries.size() - dead;
  mean_rounded = alive == 0 ? 0 : rounded_bytes / alive;
}

void Residency::Append(DatasetId d, std::span<const uint32_t> lengths,
                       std::span<const uint8_t> shares) {
  Dataset& dataset = datasets_[d];
  const size_t before = dataset.entries.size();
  dataset.Resize(before + lengths.size(), shares);
  for (size_t i = 0; i < lengths.size(); ++i) {
    const auto s = static_cast<SampleId>(before + i);
    dataset.entries[s].length = lengths[i];
    dataset.largest = std::max(dataset.largest, lengths[i]);
    dataset.sized_bytes += ArenaAllocator::Rounded(lengths[i]);
    dataset.rounded_bytes += ArenaAllocator::Rounded(lengths[i]);
    Uncover(d, s);
  }
  dataset.UpdateMean();
  ChooseStaging();
  EvictExcess();
}

void Residency::Invalidate(DatasetId d, SampleId s) {
  Entry& e = entry(d, s);
  assert(e.state != State::kUnsized && e.store == Store::kNone && !e.dead);
  if (e.flags & kKept) Unkeep(d, s);
  if (e.flags & kInTier) ClearFlag(d, s, kInTier);
  e.flags &= static_cast<uint8_t>(~(kFailedSoon | kFailedNow | kSuspect | kCrcKnown));
  Cover(d, s);  // nobody waits for a tier to take it
  e.dead = true;
  Dataset& dataset = datasets_[d];
  dataset.sized_bytes -= ArenaAllocator::Rounded(e.length);
  dataset.rounded_bytes -= ArenaAllocator::Rounded(e.length);
  ++dataset.dead;
  dataset.UpdateMean();
  ChooseStaging();
  MaybeFree(d, s);
}

bool Residency::OnLengths(DatasetId d, std::span<const SampleLength> lengths) {
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
    dataset.largest = std::max(dataset.largest, told.length);
    e.state = State::kAbsent;
    --dataset.unsized;
    dataset.sized_bytes += ArenaAllocator::Rounded(e.length);
    if (!dataset.share.empty() && dataset.ShareOf(told.sample) == KeepShare::kHome &&
        !(e.flags & (kKept | kInTier))) {
      bytes_.reserved += ArenaAllocator::Rounded(e.length) - before;
    }
  }
  const size_t sized = dataset.entries.size() - dataset.unsized;
  if (sized != 0) {
    dataset.mean_rounded = dataset.sized_bytes / sized;
    dataset.rounded_bytes = dataset.sized_bytes + dataset.unsized * dataset.mean_rounded;
  }
  ChooseStaging();
  EvictExcess();
  return failed;
}

void Residency::SetShare(DatasetId d, std::vector<uint8_t> share) {
  Dataset& dataset = datasets_[d];
  if (share.size() != dataset.entries.size()) share.clear();
  if (share == dataset.share) return;
  const auto n = static_cast<SampleId>(dataset.entries.size());
  // Counted under the old shares, taken out, and counted again.
  for (SampleId s = 0; s < n; ++s) {
    const Entry& e = dataset.entries[s];
    if (Uncovered(e)) Cover(d, s);
    if (dataset.Spare(s)) bytes_.spare -= arena_.size(e.block);
  }
  dataset.share = std::move(share);
  for (SampleId s = 0; s < n; ++s) {
    const Entry& e = dataset.entries[s];
    if (Uncovered(e)) Uncover(d, s);
    if (dataset.Spare(s)) bytes_.spare += arena_.size(e.block);
  }
  ChooseStaging();
  EvictExcess();
}

void Residency::ChangeShares(DatasetId d, std::span<const std::pair<SampleId, KeepShare>> changes) {
  Dataset& dataset = datasets_[d];
  if (dataset.share.empty()) return;
  for (const auto& [s, share] : changes) {
    const Entry& e = dataset.entries[s];
    if (Uncovered(e)) Cover(d, s);
    if (dataset.Spare(s)) bytes_.spare -= arena_.size(e.block);
    dataset.share[s] = static_cast<uint8_t>(share);
    if (Uncovered(e)) Uncover(d, s);
    if (dataset.Spare(s)) bytes_.spare += arena_.size(e.block);
  }
  ChooseStaging();
  EvictExcess();
}

// ---- how much is kept -------------------------------------------------------------------------

void Residency::ChooseStaging() {
  arena_.NoteRoom();  // shares change: what was blocked may go on
  uint64_t batches = 0;
  uint64_t everything = 0;
  bool all_kept = true;
  bool shared = false;
  for (const Dataset& dataset : datasets_) {
    if (dataset.parked != 0) continue;
    shared |= !dataset.share.empty();
    batches += 4 * dataset.batch_samples * dataset.mean_rounded;
    everything += dataset.rounded_bytes;
    all_kept &= !dataset.passing &&
                std::find(dataset.share.begin(), dataset.share.end(),
                          static_cast<uint8_t>(KeepShare::kNone)) == dataset.share.end();
  }
  const uint64_t usable = arena_.usable();
  const uint64_t regions = arena_.regions();
  if (options_.staging_bytes != 0) {
    staging_bytes_ = std::min(options_.staging_bytes, arena_.capacity());
  } else if (everything <= usable && all_kept) {
    staging_bytes_ = regions;  // every sample is kept where it lands
  } else {
    // Where the tier's size is given, all else is staging anyway.
    const uint64_t floor = options_.keep_bytes != 0 ? 0 : uint64_t{64} << 20;
    uint64_t staging = std::min(usable / 2, std::max(batches, floor));
    // Nodes of a cluster were told what this one can keep, and count on it.
    if (ahead_need_ != 0 && !shared) staging = std::min(staging, batches / 2 + ahead_need_);
    // The batch on loan and the next one find room whatever the use was.
    if (used_need_ != 0 && !shared) {
      staging = std::min(staging, std::max({batches / 2, used_need_, ahead_need_ / 2}));
    }
    staging_bytes_ = regions + staging;
  }
  if (parked_now_ != 0) LetParkedGo(everything);
}

uint64_t Residency::keep_quota() const {
  const uint64_t usable = arena_.capacity() - arena_.set_aside();
  if (!options_.keep) return 0;
  const uint64_t quota = usable - std::min(usable, staging_bytes_);
  return options_.keep_bytes == 0 ? quota : std::min(quota, options_.keep_bytes);
}

void Residency::SetAheadBytes(uint64_t bytes) {
  // A quarter more than now, so that a step of the tuner that is taken back evicts nothing.
  const auto stays = [](uint64_t known, uint64_t now) {
    return known != 0 && now <= known && now + now / 4 >= known - known / 4;
  };
  const uint64_t used = RecentUse();
  // What comes near to all that staging has may be held up by it.
  const bool same_use = used == 0 || stays(used_need_ - used_need_ / 16, used);
  if (stays(ahead_need_, bytes) && same_use) return;
  if (!stays(ahead_need_, bytes)) ahead_need_ = bytes + bytes / 4;
  if (!same_use) used_need_ = used + used / 4;
  ChooseStaging();
  EvictExcess();
}

// A window is as long as it takes to read several times what staging held: then each of its bytes
// has come and gone.
uint64_t Residency::RecentUse() {
  constexpr uint64_t kTurns = 4;
  // Free memory lies in holes, some too small for any sample: of that, use tells nothing. Kept
  // samples that go for others, which are kept in their place and go again, do.
  constexpr uint64_t kThrash = 16;
  if (use_before_ != 0 && kThrash * use_evicted_ > std::max(use_begun_, use_peak_)) {
    use_floor_ = std::max(use_floor_, used_need_);
    use_evicted_ = 0;
  }
  if (use_begun_ >= kTurns * use_peak_) {
    use_before_ = std::exchange(use_peak_, StagingUsed());
    use_begun_ = 0;
    use_evicted_ = 0;
    use_floor_ -= use_floor_ / kThrash;
  }
  return use_before_ == 0 ? 0 : std::max({use_before_, use_peak_, use_floor_});
}

void Residency::SetKeepBytes(uint64_t bytes) {
  if (bytes == options_.keep_bytes) return;
  options_.keep_bytes = bytes;
  ChooseStaging();
  EvictExcess();
}

void Residency::EvictExcess() {
  const uint64_t evicted = use_evicted_;
  while (bytes_.kept > keep_quota() && EvictOne()) {
  }
  use_evicted_ = evicted;  // staging has grown: it does not lack this
}

// Memory is for what the folder lacks, until the two cover everything.
bool Residency::WouldKeep(DatasetId d, SampleId s, JobId job) const {
  const Entry& e = entry(d, s);
  const Dataset& dataset = datasets_[d];
  const bool elsewhere = (e.flags & kInTier) && !dataset.tier.holds_all && dataset.uncovered > 0;
  return !elsewhere && MayKeep(d, s, ArenaAllocator::Rounded(e.length), job);
}

bool Residency::MayKeep(DatasetId d, SampleId s, uint64_t bytes, JobId job) const {
  if (entry(d, s).dead || datasets_[d].passing) return false;
  const JobStats& stats = common_.jobs.stats(job);
  if (!common_.admit_memory || stats.kept_bytes + bytes > stats.limits.memory_bytes) return false;
  const uint64_t quota = keep_quota();
  if (datasets_[d].share.empty()) return bytes_.kept + bytes <= quota;
  switch (datasets_[d].ShareOf(s)) {
    case KeepShare::kNone:
      return false;
    case KeepShare::kHome:
      return bytes_.kept - bytes_.spare + bytes <= quota;
    case KeepShare::kReplica:
      return bytes_.kept + bytes_.reserved + bytes <= quota;
  }
  return false;
}

void Residency::KeepIfMay(DatasetId d, SampleId s, JobId job) {
  const uint64_t bytes = arena_.size(entry(d, s).block);
  if (!MayKeep(d, s, bytes, job)) return;
  while (bytes_.kept + bytes > keep_quota() && (EvictAmong(nullptr, true) || LetSpareGo())) {
  }
  if (bytes_.kept + bytes <= keep_quota()) Keep(d, s, job);
}

// Copies in use, such as those that were begun before the shares were known: they are not for
// keeping any more, and go when their use ends.
bool Residency::LetSpareGo() {
  if (bytes_.spare == 0) return false;
  for (DatasetId d = 0; d < datasets_.size(); ++d) {
    Dataset& dataset = datasets_[d];
    const auto n = static_cast<SampleId>(dataset.entries.size());
    for (SampleId step = 0; step < n; ++step) {
      const SampleId s = dataset.clock_hand;
      dataset.clock_hand = s + 1 == n ? 0 : s + 1;
      if (!dataset.Spare(s)) continue;
      Unkeep(d, s);
      return true;
    }
  }
  return false;
}

bool Residency::EvictOne(const JobId* job) {
  if (job == nullptr && EvictOneParked()) return true;
  const uint64_t before = bytes_.kept;
  if (!EvictAmong(job, true) && !EvictAmong(job, false)) return false;
  if (job == nullptr) use_evicted_ += before - bytes_.kept;
  return true;
}

// `spare_only`: what does not live here.
bool Residency::EvictAmong(const JobId* job, bool spare_only) {
  if ((spare_only ? bytes_.spare : bytes_.kept) == 0) return false;
  for (DatasetId d = 0; d < datasets_.size(); ++d) {
    Dataset& dataset = datasets_[d];
    const auto n = static_cast<SampleId>(dataset.entries.size());
    for (SampleId step = 0; step < n; ++step) {
      const SampleId s = dataset.clock_hand;
      dataset.clock_hand = s + 1 == n ? 0 : s + 1;
      const Entry& e = dataset.entries[s];
      if (e.state != State::kResident || e.pins != 0 || !(e.flags & kKept)) continue;
      if (job != nullptr && e.owner != *job) continue;
      if (spare_only && !dataset.Spare(s)) continue;
      FreeBlock(d, s);
      ++common_.counters.evicted;
      return true;
    }
  }
  return false;
}

void Residency::Keep(DatasetId d, SampleId s, JobId job) {
  SetFlag(d, s, kKept);
  Entry& e = entry(d, s);
  e.owner = job;
  bytes_.kept += arena_.size(e.block);
  datasets_[d].kept_bytes += arena_.size(e.block);
  if (datasets_[d].Spare(s)) bytes_.spare += arena_.size(e.block);
  common_.jobs.stats(job).kept_bytes += arena_.size(e.block);
}

void Residency::Unkeep(DatasetId d, SampleId s) {
  const Entry& e = entry(d, s);
  bytes_.kept -= arena_.size(e.block);
  datasets_[d].kept_bytes -= arena_.size(e.block);
  if (datasets_[d].Spare(s)) bytes_.spare -= arena_.size(e.block);
  common_.jobs.stats(e.owner).kept_bytes -= arena_.size(e.block);
  ClearFlag(d, s, kKept);
}

// ---- memory of a sample -----------------------------------------------------------------------

Arena::Block Residency::FindBlock(DatasetId d, SampleId s, bool keep) {
  const uint32_t length = entry(d, s).length;
  const Dataset& dataset = datasets_[d];
  Arena::Block block = arena_.Allocate(length);
  while (block == Arena::kNone && EvictOneParked()) block = arena_.Allocate(length);
  // What lives here goes before copies of what does not.
  while (block == Arena::kNone && keep && !dataset.share.empty() &&
         dataset.ShareOf(s) == KeepShare::kHome && EvictAmong(nullptr, true)) {
    block = arena_.Allocate(length);
  }
  return block;
}

void Residency::BeginRead(DatasetId d, SampleId s, Arena::Block block, bool asked, bool keep,
                          JobId job) {
  Entry& e = entry(d, s);
  ++datasets_[d].allotted;
  e.block = block;
  e.offset = arena_.offset(block);
  e.state = State::kReading;
  e.flags &= static_cast<uint8_t>(~(kFailedSoon | kFailedNow | kUrgent));
  Count(e);
  use_begun_ += arena_.size(block);
  if (asked) e.flags |= kUrgent;
  if (keep) KeepIfMay(d, s, job);
}

Arena::Block Residency::ReplaceBlock(DatasetId d, SampleId s, Arena::Block block) {
  Entry& e = entry(d, s);
  Uncount(e);
  const Arena::Block before = std::exchange(e.block, block);
  e.offset = arena_.offset(block);
  Count(e);
  return before;
}

bool Residency::Accept(const ReadAction& read, uint32_t crc, Origin from) {
  NoteOrigin(read, from);
  Entry& e = entry(read.dataset, read.sample);
  uint32_t& known = datasets_[read.dataset].crcs[read.sample];
  const bool suspect = (e.flags & kSuspect) != 0;
  const bool differs = (e.flags & kCrcKnown) && known != crc;
  if (differs && !suspect) {
    // Either this read or the first was corrupted, or the file changed: a second look tells.
    e.flags |= kSuspect;
    known = crc;
    return false;
  }
  if (suspect) ++common_.counters.changed;  // if the same new bytes twice: the file has changed
  e.flags &= static_cast<uint8_t>(~kSuspect);
  SetResident(read.dataset, read.sample, crc);
  return true;
}

// The tiers that have it are set right.
void Residency::NoteOrigin(const ReadAction& read, Origin from) {
  const DatasetId d = read.dataset;
  const SampleId s = read.sample;
  const Entry& e = entry(d, s);
  if (from == Origin::kTier) {
    SetInTier(d, s, true);
    // Memory is for what the folder lacks, until the two cover everything.
    if ((e.flags & kKept) && !datasets_[d].tier.holds_all && datasets_[d].uncovered > 0) {
      Unkeep(d, s);
    }
    return;
  }
  if (read.origin == Origin::kTier) SetInTier(d, s, false);  // not there, or damaged
  // Room that had been meant for what the folder turned out to have.
  if (!(e.flags & kKept) && WouldKeep(d, s, read.job)) KeepIfMay(d, s, read.job);
}

void Residency::SetResident(DatasetId d, SampleId s, uint32_t crc) {
  Entry& e = entry(d, s);
  datasets_[d].crcs[s] = crc;
  e.flags |= kCrcKnown;
  Uncount(e);
  e.state = State::kResident;
  Count(e);
  datasets_[d].Touch(s);
}

void Residency::Adopt(DatasetId d, SampleId s, Arena::Block block, uint32_t crc) {
  arena_.Adopt(block);
  Entry& e = entry(d, s);
  assert(e.state == State::kAbsent);
  e.offset = arena_.offset(block);
  e.block = block;
  Count(e);
  SetResident(d, s, crc);
  if (WouldKeep(d, s, kNoJob)) KeepIfMay(d, s, kNoJob);
  MaybeFree(d, s);
}

void Residency::SetInTier(DatasetId d, SampleId s, bool in_tier) {
  if (entry(d, s).dead) return;
  if (in_tier) {
    SetFlag(d, s, kInTier);
  } else {
    ClearFlag(d, s, kInTier);
  }
}

void Residency::SetStore(DatasetId d, SampleId s, Store store) {
  Entry& e = entry(d, s);
  Uncount(e);
  e.store = store;
  Count(e);
}

void Residency::Unpin(DatasetId d, SampleId s) {
  Entry& e = entry(d, s);
  Uncount(e);
  --e.pins;
  Count(e);
  MaybeFree(d, s);
}

void Residency::MaybeFree(DatasetId d, SampleId s) {
  const Entry& e = entry(d, s);
  if (e.state != State::kResident || e.pins != 0 || (e.flags & kKept)) return;
  // Room for copies comes as what lives here arrives, and after some were read.
  const bool storing = e.store != Store::kNone;
  if (!datasets_[d].share.empty() && !storing && WouldKeep(d, s, kNoJob)) {
    KeepIfMay(d, s, kNoJob);
  }
  if ((e.ahead == 0 || e.dead) && !(e.flags & kKept) && !storing) FreeBlock(d, s);
}

void Residency::FreeBlock(DatasetId d, SampleId s) {
  Entry& e = entry(d, s);
  if (e.flags & kKept) Unkeep(d, s);
  if (e.store == Store::kDue) return;  // freed when its copy was taken
  Uncount(e);
  e.store = Store::kNone;
  arena_.Free(e.block);
  e.block = Arena::kNone;
  e.state = State::kAbsent;
}

void Residency::Uncount(const Entry& e) {
  if (e.block == Arena::kNone || (e.flags & kKept)) return;
  if (e.pins != 0) {
    bytes_.pinned -= arena_.size(e.block);
    return;
  }
  if (OnlyStoring(e)) {
    bytes_.storing -= arena_.size(e.block);
    return;
  }
  bytes_.ahead -= arena_.size(e.block);
  if (e.state == State::kResident) bytes_.ready -= arena_.size(e.block);
}

void Residency::Count(const Entry& e) {
  if (e.block == Arena::kNone || (e.flags & kKept)) return;
  if (e.pins != 0) {
    bytes_.pinned += arena_.size(e.block);
  } else if (OnlyStoring(e)) {
    bytes_.storing += arena_.size(e.block);
  } else {
    bytes_.ahead += arena_.size(e.block);
    if (e.state == State::kResident) bytes_.ready += arena_.size(e.block);
  }
  use_peak_ = std::max(use_peak_, StagingUsed());
}

void Residency::SetFlag(DatasetId d, SampleId s, uint8_t flag) {
  Entry& e = entry(d, s);
  if (!(e.flags & (kKept | kInTier))) Cover(d, s);
  Uncount(e);
  e.flags |= flag;
  Count(e);
  datasets_[d].Touch(s);
}

void Residency::ClearFlag(DatasetId d, SampleId s, uint8_t flag) {
  Entry& e = entry(d, s);
  const bool covered = (e.flags & (kKept | kInTier)) != 0;
  Uncount(e);
  e.flags &= static_cast<uint8_t>(~flag);
  Count(e);
  if (covered && !(e.flags & (kKept | kInTier))) Uncover(d, s);
  datasets_[d].Touch(s);
}

void Residency::Cover(DatasetId d, SampleId s) {
  const KeepShare share = datasets_[d].ShareOf(s);
  if (share != KeepShare::kNone) --datasets_[d].uncovered;
  if (!datasets_[d].share.empty() && share == KeepShare::kHome) {
    bytes_.reserved -= ArenaAllocator::Rounded(entry(d, s).length);
  }
}

void Residency::Uncover(DatasetId d, SampleId s) {
  const KeepShare share = datasets_[d].ShareOf(s);
  if (share != KeepShare::kNone) ++datasets_[d].uncovered;
  if (!datasets_[d].share.empty() && share == KeepShare::kHome) {
    bytes_.reserved += ArenaAllocator::Rounded(entry(d, s).length);
  }
}

}  // namespace forebay
