// Files that are copied in blocks, and read meanwhile.
#include <algorithm>
#include <utility>

#include "base/crc32c.h"
#include "files/book_entry.h"

namespace forebay::files {

using Outcome = CopyResult::Outcome;

void Book::FoundLarge(Entry& entry, CopyResult& result) {
  Rare& rare = *entry.rare;
  auto large = std::make_unique<Large>();
  large->size = static_cast<uint64_t>(result.job.source->stat.st_size);
  large->place = result.job.place;
  large->reserved = result.job.reserved;
  large->source = std::move(result.job.source);
  large->part = std::move(result.job.part);
  large->left = (large->size + options_.block - 1) / options_.block;
  large->blocks.assign(large->left, Large::kAbsent);
  large->crcs.assign(large->left, 0);
  rare.large = std::move(large);
  rare.owner = next_owner_++;
  owners_.emplace(rare.owner, &entry);
  entry.copying = entry.pinned = true;
  large_.push_back(&entry);
  // Its slot counts the parts: without one nobody could tell them apart.
  if (!SetState(entry, FileState::kComing)) {
    EndLarge(entry);
    return Refuse(entry);
  }
  if (rare.large->size > options_.partial) {
    AnswerAll(entry, Answer::kPartial, rare.large->size);
  } else if (!rare.waiters.empty()) {
    HurryLarge(entry);
  }
}

// Somebody waits for all of it.
void Book::HurryLarge(Entry& entry) {
  for (size_t block = 0; block < entry.large()->blocks.size(); ++block) {
    if (entry.large()->blocks[block] == Large::kAbsent) StartBlock(entry, block, true);
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
  if (entry.slot != nullptr && FileTable::StateOf(*entry.slot) == FileState::kComing) {
    (void)SetState(entry, IdleState(entry));
  }
  actions_.RemovePart(entry.key);
  room_.Release(large->place, large->reserved);
  for (const Large::Reader& reader : large->readers) {
    actions_.Answer(reader.waiter, Answer::kSource, 0);
  }
}

void Book::StartBlock(Entry& entry, size_t block, bool urgent) {
  Large& large = *entry.large();
  large.blocks[block] = Large::kComing;
  CopyJob job;
  job.kind = CopyJob::Kind::kBlock;
  job.urgent = urgent;
  job.owner = entry.rare->owner;
  job.path = *entry.path;
  job.key = entry.key;
  job.ticket = entry.rare->ticket;
  job.source = large.source;
  job.part = large.part;
  job.offset = block * options_.block;
  job.bytes = std::min(options_.block, large.size - job.offset);
  Submit(std::move(job));
}

bool Book::NextBlock(Entry& entry) {
  Large& large = *entry.large();
  const size_t count = large.blocks.size();
  for (size_t n = 0; n < count; ++n) {
    const size_t block = (large.cursor + n) % count;
    if (large.blocks[block] != Large::kAbsent) continue;
    large.cursor = block + 1;
    StartBlock(entry, block, false);
    return true;
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
    if (NextBlock(*entry)) return true;
  }
  return false;
}

void Book::Range(std::string_view path, uint64_t offset, uint64_t bytes, uint64_t waiter) {
  const auto found = entries_.find(path);
  Entry* entry = found == entries_.end() ? nullptr : &found->second;
  if (entry != nullptr && entry->real != nullptr) entry = entry->real;
  if (entry == nullptr || entry->changed || table_.closed()) {
    return actions_.Answer(waiter, Answer::kSource, 0);
  }
  Large* const large = entry->large();
  if (large == nullptr) {
    const bool there = entry->place != Place::kNone;
    return actions_.Answer(waiter, there ? Answer::kReady : Answer::kSource, 0);
  }
  if (offset >= large->size || bytes == 0) return actions_.Answer(waiter, Answer::kReady, 0);
  bytes = std::min(bytes, large->size - offset);
  const size_t first = offset / options_.block;
  const size_t end = (offset + bytes - 1) / options_.block + 1;
  bool there = true;
  for (size_t block = first; block < end; ++block) {
    if (large->blocks[block] == Large::kAbsent) StartBlock(*entry, block, true);
    there = there && large->blocks[block] == Large::kThere;
  }
  if (end < large->blocks.size()) large->cursor = end;  // a reader goes on from there
  if (there) return actions_.Answer(waiter, Answer::kReady, 0);
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
    EndParts(entry);
    Placed(entry, result);
    for (const Large::Reader& reader : ended->readers) {
      actions_.Answer(reader.waiter, Answer::kReady, 0);
    }
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
  {
    const MutexLock lock(entry.rare->ticket->mutex);
    entry.rare->ticket->dropped = true;
  }
  EndLarge(entry);
  if (result.outcome == Outcome::kRefused) return Refuse(entry);
  Failed(entry, result, now);
}

}  // namespace forebay::files
