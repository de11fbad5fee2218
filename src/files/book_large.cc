// Files that are copied in blocks, and read meanwhile.
#include <algorithm>
#include <utility>

#include "base/crc32c.h"
#include "files/book_entry.h"

namespace forebay::files {

using Outcome = CopyResult::Outcome;

namespace {

constexpr size_t kMostRuns = 16;  // of a file: about as many as it has readers
constexpr uint64_t kLongRun = 4;  // blocks
constexpr uint64_t kHead = 64 << 10;
constexpr uint64_t kNear = 2;              // blocks
constexpr size_t kMostAhead = 64;          // blocks
constexpr size_t kMostAwaited = 32;        // blocks: nobody's patience ends before
constexpr size_t kFewestIdle = 4;          // blocks at a time
constexpr Nanos kIdleStep = 250 * kMilli;  // then twice as many
constexpr Nanos kLookAtDirect = 100 * kMilli;
constexpr uint32_t kPassedBy = 8;      // reads, until those who read do not wait for an answer
constexpr size_t kNextToNothing = 64;  // one block of so many

}  // namespace

void Book::FoundLarge(Entry& entry, CopyResult& result) {
  Rare& rare = *entry.rare;
  auto large = std::make_unique<Large>();
  large->size = static_cast<uint64_t>(result.job.source->stat.st_size);
  large->job = result.job.job;
  large->place = result.job.place;
  large->reserved = result.job.reserved;
  large->source = std::move(result.job.source);
  large->part = std::move(result.job.part);
  large->left = (large->size + options_.block - 1) / options_.block;
  large->blocks.assign(large->left, Large::kAbsent);
  large->crcs.assign(large->left, 0);
  large->passed_of.assign(large->left, 0);
  large->grows = result.job.grows;
  rare.large = std::move(large);
  rare.owner = next_owner_++;
  owners_.emplace(rare.owner, &entry);
  entry.copying = entry.pinned = true;
  // One that was begun ahead of its reader, since those before it were read in the order of their
  // names: it is copied if they were read as a whole.
  rare.large->whole = rare.waiters.empty() && sequential_;
  large_.push_back(&entry);
  // Its slot counts the parts: without one nobody could tell them apart.
  if (!SetState(entry, FileState::kComing)) {
    EndLarge(entry);
    return Refuse(entry);
  }
  if (rare.large->size > options_.partial) {
    AnswerAll(entry, Answer::kPartial, rare.large->size);
  } else if (!rare.waiters.empty()) {
    HurryLarge(entry, rare.large->job);
  }
}

// Somebody waits for all of it.
void Book::HurryLarge(Entry& entry, JobNumber job) {
  for (size_t block = 0; block < entry.large()->blocks.size(); ++block) {
    if (entry.large()->blocks[block] == Large::kAbsent) (void)StartBlock(entry, block, true, job);
  }
}

// Whoever has read of the part, which goes, asks again.
void Book::EndParts(Entry& entry) {
  if (entry.slot != nullptr) entry.slot->parts.fetch_add(1, std::memory_order_acq_rel);
  for (Entry* alias : entry.rare->aliases) {
    if (alias->slot != nullptr) alias->slot->parts.fetch_add(1, std::memory_order_acq_rel);
  }
}

void Book::EndLarge(Entry& entry) {
  if (entry.large() == nullptr) return;
  Rare& rare = *entry.rare;
  const std::unique_ptr<Large> large = std::move(rare.large);
  owners_.erase(rare.owner);
  rare.owner = 0;
  entry.copying = false;
  std::erase(large_, &entry);
  EndParts(entry);
  if (entry.slot != nullptr) {
    const FileState state = FileTable::StateOf(*entry.slot);
    if (state == FileState::kComing || state == FileState::kPassedBy) {
      (void)SetState(entry, IdleState(entry));
    }
  }
  actions_.RemovePart(entry.key);
  room_.Release(large->place, large->reserved);
  for (const Large::Reader& reader : large->readers) {
    actions_.Answer(reader.waiter, Answer::kSource, 0);
  }
  for (const uint64_t waiter : large->awaiting) actions_.Answer(waiter, Answer::kSource, 0);
}

void Book::LookAtLarge(Entry& entry) {
  ++entry.large()->looks;
  CopyJob job;
  job.kind = CopyJob::Kind::kLook;
  job.urgent = true;
  job.job = entry.large()->job;
  job.owner = entry.rare->owner;
  job.path = *entry.path;
  job.source = entry.large()->source;
  Submit(std::move(job));
}

void Book::DoneLook(Entry& entry, const CopyResult& result, Nanos now) {
  const bool last = --entry.large()->looks == 0;
  if (result.outcome != Outcome::kDone) return FailedLarge(entry, result, now);
  if (last) entry.looked = looks_;
}

bool Book::StartBlock(Entry& entry, size_t block, bool urgent, JobNumber for_job) {
  Large& large = *entry.large();
  if (large.grows) {
    large.full = large.full || room_.Reserve(options_.block, false) == CopyPlace::kNone;
    if (large.full) return false;
    large.reserved += options_.block;
  }
  large.blocks[block] = Large::kComing;
  EndPassingBy(entry);
  CopyJob job;
  job.kind = CopyJob::Kind::kBlock;
  job.urgent = urgent;
  job.job = for_job;
  job.owner = entry.rare->owner;
  job.path = *entry.path;
  job.key = entry.key;
  job.ticket = entry.rare->ticket;
  job.source = large.source;
  job.part = large.part;
  job.offset = block * options_.block;
  job.bytes = std::min(options_.block, large.size - job.offset);
  Submit(std::move(job));
  return true;
}

Book::Entry* Book::Find(std::string_view path) {
  const auto found = entries_.find(path);
  Entry* entry = found == entries_.end() ? nullptr : &found->second;
  if (entry != nullptr && entry->real != nullptr) entry = entry->real;
  return entry == nullptr || entry->changed || table_.closed() ? nullptr : entry;
}

// From near the start on, beyond what formats have there; or for so long that going on is likely: a
// record that is read at random is read in a few pieces, too.
bool Book::IsSequential(const Run& run) const {
  return (run.begin < kHead && run.end >= kHead) ||
         run.end - run.begin >= kLongRun * options_.block;
}

Book::Run& Book::RunOf(Large& large, uint64_t offset, uint64_t bytes, Nanos now) const {
  const auto goes_on = [&](const Run& run) {
    if (offset == run.end) return true;
    // Who reads ahead with several threads asks in a slightly other order, and who has been given
    // whole blocks asks when it needs the next one.
    const uint64_t near = std::min(run.end - run.begin, kNear * options_.block);
    return IsSequential(run) && offset + near >= run.end && offset <= run.end + near;
  };
  auto run = std::find_if(large.runs.begin(), large.runs.end(), goes_on);
  if (run != large.runs.end()) {
    run->end = std::max(run->end, offset + bytes);
    run->at = now;
    return *run;
  }
  if (large.runs.size() < kMostRuns) {
    run = large.runs.emplace(run);
  } else {
    run = std::min_element(large.runs.begin(), large.runs.end(),
                           [](const Run& a, const Run& b) { return a.at < b.at; });
  }
  *run = {.begin = offset, .end = offset + bytes, .ahead = 0, .at = now};
  return *run;
}

// Whether this read is one of a sequential reader, which is then read ahead of: the farther, the
// longer it has gone on.
bool Book::Follow(Large& large, uint64_t offset, uint64_t bytes, Nanos now, JobNumber job) const {
  Run& run = RunOf(large, offset, bytes, now);
  run.job = job;
  if (!IsSequential(run)) return false;
  const uint64_t end = (offset + bytes - 1) / options_.block + 1;
  run.end = std::max(run.end, std::min(end * options_.block, large.size));
  const auto length = static_cast<size_t>((run.end - run.begin) / options_.block);
  run.ahead = length < 2 ? 0 : static_cast<size_t>(end) + std::min(2 * length, kMostAhead);
  return true;
}

// Whether half of each block that is not there has been read past the service, with these bytes:
// then those who read at random come by again and again.
bool Book::IsWorn(Large& large, uint64_t offset, uint64_t bytes) const {
  bool worn = true;
  for (uint64_t at = offset; at < offset + bytes;) {
    const size_t block = at / options_.block;
    const uint64_t end = std::min((block + 1) * options_.block, offset + bytes);
    if (large.blocks[block] == Large::kAbsent) {
      uint32_t& passed = large.passed_of[block];
      passed = static_cast<uint32_t>(std::min(passed + (end - at), options_.block));
      worn = worn && passed > options_.block / 2;
    }
    at = end;
  }
  return worn;
}

// A read of bytes that are left to the source. Where that has been so for some time and next to
// nothing can be had here, an answer tells nobody anything, and waiting for it takes 70 us a read.
void Book::PassBy(Entry& entry, uint64_t bytes) {
  Large& large = *entry.large();
  // What else is in their blocks may never be read.
  large.passed += bytes;
  sequential_ = sequential_ && large.passed < large.size / 8;
  if (large.passed_in_row >= kPassedBy) return;
  const auto absent = std::count(large.blocks.begin(), large.blocks.end(), Large::kAbsent);
  const size_t held = large.blocks.size() - static_cast<size_t>(absent);
  if (held > large.blocks.size() / kNextToNothing) return;
  if (++large.passed_in_row == kPassedBy) (void)SetState(entry, FileState::kPassedBy);
}

void Book::EndPassingBy(Entry& entry) {
  Large& large = *entry.large();
  if (large.passed_in_row >= kPassedBy) (void)SetState(entry, FileState::kComing);
  large.passed_in_row = 0;
}

// Its readers want all of it, and there is room.
bool Book::CopiesAll(const Entry& entry) const {
  const Large& large = *entry.large();
  return !large.grows && (large.whole || entry.announced > 0 || large.size <= options_.partial);
}

bool Book::NextBlock(Entry& entry) {
  Large& large = *entry.large();
  if (!MayStart(large.job)) return false;
  const size_t count = large.blocks.size();
  for (size_t n = 0; n < count; ++n) {
    const size_t block = (large.cursor + n) % count;
    if (large.blocks[block] != Large::kAbsent) continue;
    large.cursor = block + 1;
    return StartBlock(entry, block, false, large.job);
  }
  return false;
}

// What sequential readers come to next.
bool Book::NextAhead(Entry& entry) {
  Large& large = *entry.large();
  for (const Run& run : large.runs) {
    if (!MayStart(run.job)) continue;
    const size_t end = std::min(run.ahead, large.blocks.size());
    for (size_t block = run.end / options_.block; block < end; ++block) {
      if (large.blocks[block] == Large::kAbsent) return StartBlock(entry, block, false, run.job);
    }
  }
  return false;
}

// What somebody may wait for as a whole is not begun and left lying: oldest first.
bool Book::PumpBegun() {
  return std::any_of(large_.begin(), large_.end(), [this](Entry* entry) {
    return entry->large()->size <= options_.partial && NextBlock(*entry);
  });
}

// One block of each in turn.
bool Book::PumpLarge() {
  for (size_t n = 0; n < large_.size(); ++n) {
    Entry* const entry = large_.front();
    std::rotate(large_.begin(), large_.begin() + 1, large_.end());
    if (CopiesAll(*entry) ? NextBlock(*entry) : NextAhead(*entry)) return true;
  }
  return false;
}

void Book::LookAtDirect(Nanos now) {
  if (now - looked_ < kLookAtDirect) return;
  looked_ = now;
  std::erase_if(direct_, [&](DirectReader& reader) {
    const ReadProgress progress = actions_.Progress(reader.process, reader.fd);
    if (progress.mark != 0 && progress.mark != reader.seen.mark) last_read_ = now;
    if (reader.seen.mark != 0 && progress.bytes > reader.seen.bytes) {
      mapped_bytes_ += progress.bytes - reader.seen.bytes;
    }
    reader.seen = progress;
    return progress.mark == 0;
  });
}

// Whether as much was read through mappings as they have bytes: those who never rest are about to
// read them again.
bool Book::HasPaidForMapped() const {
  uint64_t bytes = 0;
  for (const Entry* entry : large_) bytes += entry->large()->mapped ? entry->large()->size : 0;
  return bytes > 0 && mapped_bytes_ >= bytes;
}

// The rest of large files, while nobody reads the source: few blocks at a time at first, since
// whoever comes back waits for them.
Nanos Book::PumpIdle(Nanos now) {
  if (large_.empty()) return 0;
  LookAtDirect(now);
  const Nanos idle = now - last_read_;
  if (idle < options_.idle && !HasPaidForMapped()) {
    return direct_.empty() ? options_.idle - idle : std::min(options_.idle - idle, kLookAtDirect);
  }
  const auto steps = std::clamp<Nanos>((idle - options_.idle) / kIdleStep, 0, 3);
  const size_t most = std::min(options_.in_flight, kFewestIdle << steps);
  // What does not fit as a whole is copied as it is read.
  const auto next = [this](Entry* entry) { return !entry->large()->grows && NextBlock(*entry); };
  while (in_flight_ < most && std::any_of(large_.begin(), large_.end(), next)) {
  }
  return kLookAtDirect;
}

void Book::Direct(std::string_view path, int64_t process, int64_t fd, uint64_t waiter, Nanos now) {
  Entry* const entry = Find(path);
  Large* const large = entry == nullptr ? nullptr : entry->large();
  if (large == nullptr) {
    const bool there = entry != nullptr && entry->place != CopyPlace::kNone;
    return actions_.Answer(waiter, there ? Answer::kReady : Answer::kSource, 0);
  }
  if (!large->grows && large->left <= kMostAwaited && large->left * 2 <= large->blocks.size()) {
    large->awaiting.push_back(waiter);
    return HurryLarge(*entry, large->job);
  }
  last_read_ = now;
  large->mapped = large->mapped || fd < 0;
  if (direct_.empty()) mapped_bytes_ = 0;
  const bool known = std::any_of(direct_.begin(), direct_.end(), [&](const DirectReader& reader) {
    return reader.process == process && reader.fd == fd;
  });
  if (process != 0 && !known) direct_.push_back({process, fd, {}});
  actions_.Answer(waiter, Answer::kSource, 0);
}

void Book::Range(std::string_view path, uint64_t offset, uint64_t bytes, uint64_t waiter, Nanos now,
                 JobNumber job) {
  Entry* const entry = Find(path);
  if (entry == nullptr) return actions_.Answer(waiter, Answer::kSource, 0);
  Large* const large = entry->large();
  if (large == nullptr) {
    const bool there = entry->place != CopyPlace::kNone;
    return actions_.Answer(waiter, there ? Answer::kReady : Answer::kSource, 0);
  }
  if (large->looks > 0) return actions_.Answer(waiter, Answer::kSource, 0);
  if (offset >= large->size || bytes == 0) return actions_.Answer(waiter, Answer::kReady, 0);
  bytes = std::min(bytes, large->size - offset);
  const size_t first = offset / options_.block;
  const size_t end = (offset + bytes - 1) / options_.block + 1;
  const auto from = large->blocks.begin() + static_cast<ptrdiff_t>(first);
  const auto to = large->blocks.begin() + static_cast<ptrdiff_t>(end);
  const bool there = std::all_of(from, to, [](uint8_t state) { return state == Large::kThere; });
  const bool sequential = Follow(*large, offset, bytes, now, job);
  if (!there) last_read_ = now;
  if (there) {
    EndPassingBy(*entry);
    return actions_.Answer(waiter, Answer::kReady, 0);
  }
  const bool absent = std::find(from, to, Large::kAbsent) != to;
  const auto leave = [&] {
    PassBy(*entry, bytes);
    actions_.Answer(waiter, Answer::kSource, 0);
  };
  if (absent && !sequential && !CopiesAll(*entry) && !IsWorn(*large, offset, bytes)) {
    return leave();
  }
  for (size_t block = first; block < end; ++block) {
    if (large->blocks[block] == Large::kAbsent && !StartBlock(*entry, block, true, job))
      return leave();
  }
  if (end < large->blocks.size()) large->cursor = end;  // a reader goes on from there
  large->readers.push_back({waiter, first, end});
}

void Book::DoneBlock(Entry& entry, CopyResult& result, Nanos now) {
  Large& large = *entry.large();
  if (result.outcome != Outcome::kDone) return FailedLarge(entry, result, now);
  if (result.job.kind == CopyJob::Kind::kFinish) {
    result.job.place = large.place;
    result.job.reserved = large.reserved;
    owners_.erase(entry.rare->owner);
    entry.rare->owner = 0;
    entry.copying = false;
    std::erase(large_, &entry);
    const std::unique_ptr<Large> ended = std::move(entry.rare->large);
    sequential_ = std::any_of(ended->runs.begin(), ended->runs.end(), [&](const Run& run) {
      return run.begin < kHead && run.end >= ended->size / 2;
    });
    EndParts(entry);
    Placed(entry, result);
    for (const Large::Reader& reader : ended->readers) {
      actions_.Answer(reader.waiter, Answer::kReady, 0);
    }
    for (const uint64_t waiter : ended->awaiting) actions_.Answer(waiter, Answer::kReady, 0);
    if (ended->size > options_.partial) table_.CountLarge();
    return;
  }
  const size_t block = result.job.offset / options_.block;
  large.blocks[block] = Large::kThere;
  large.crcs[block] = result.crc;
  --large.left;
  std::erase_if(large.readers, [&](const Large::Reader& reader) {
    const auto from = large.blocks.begin();
    if (block < reader.first || block >= reader.end ||
        !std::all_of(from + static_cast<ptrdiff_t>(reader.first),
                     from + static_cast<ptrdiff_t>(reader.end),
                     [](uint8_t state) { return state == Large::kThere; })) {
      return false;
    }
    actions_.Answer(reader.waiter, Answer::kReady, 0);
    return true;
  });
  if (large.left > 0) return;
  CopyJob job;
  job.kind = CopyJob::Kind::kFinish;
  job.urgent = true;
  job.job = large.job;
  job.owner = entry.rare->owner;
  job.path = *entry.path;
  job.key = entry.key;
  job.ticket = entry.rare->ticket;
  job.source = large.source;
  job.part = large.part;
  job.place = large.place;
  for (size_t i = 0; i < large.crcs.size(); ++i) {
    const uint64_t bytes = std::min(options_.block, large.size - i * options_.block);
    job.crc = i == 0 ? large.crcs[0] : Crc32cJoin(job.crc, large.crcs[i], bytes);
  }
  Submit(std::move(job));
}

void Book::FailedLarge(Entry& entry, const CopyResult& result, Nanos now) {
  entry.rare->ticket->Drop(!table_.passed_by());
  EndLarge(entry);
  if (result.outcome == Outcome::kRefused) return Refuse(entry);
  Failed(entry, result, now);
}

}  // namespace forebay::files
