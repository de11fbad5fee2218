#include "tier/folder_index.h"

#include <algorithm>
#include <utility>

namespace forebay {
namespace {

constexpr size_t kPages = 256;       // folders that a group's files lie in
constexpr size_t kMostSpare = 4096;  // found by one pass over the table
constexpr size_t kMostLinked = 64;
constexpr uint64_t kLargestSegment = uint64_t{1} << 32;

size_t PageOf(const TierKey& key) { return static_cast<size_t>(key.name >> 56); }

}  // namespace

size_t FolderIndex::Home(uint64_t name) const {
  // Names are hashes; those of tests may not be.
  return static_cast<size_t>((name * 0x9e3779b97f4a7c15) >> 20) & (slots_.size() - 1);
}

size_t FolderIndex::SlotOf(const TierKey& key) const {
  size_t at = Home(key.name);
  while (!slots_[at].empty() && slots_[at].Key() != key) at = (at + 1) & (slots_.size() - 1);
  return at;
}

const CopyEntry* FolderIndex::Find(const TierKey& key) const {
  if (slots_.empty()) return nullptr;
  const Slot& slot = slots_[SlotOf(key)];
  return slot.empty() ? nullptr : &slot.entry;
}

CopyEntry* FolderIndex::Find(const TierKey& key) {
  return const_cast<CopyEntry*>(std::as_const(*this).Find(key));
}

void FolderIndex::Resize(size_t slots) {
  std::vector<Slot> old(slots);
  old.swap(slots_);
  taken_ = 0;
  for (const Slot& slot : old) {
    if (slot.empty() || slot.entry.length == CopyEntry::kAbsent) continue;
    slots_[SlotOf(slot.Key())] = slot;
    ++taken_;
  }
}

CopyEntry* FolderIndex::Make(const TierKey& key) {
  if (CopyEntry* entry = Find(key); entry != nullptr) return entry;
  // One in eight stays empty. Absent ones count until the table is made anew.
  if (slots_.empty() || (taken_ + 1) * 8 > slots_.size() * 7) {
    size_t wanted = 1024;
    while (wanted * 3 < (copies_ + 1) * 4) wanted *= 2;
    if (copies_ >= kMostCopies) return nullptr;
    Resize(std::max(wanted, slots_.size()));
    if ((taken_ + 1) * 8 > slots_.size() * 7) Resize(slots_.size() * 2);
  }
  Slot& slot = slots_[SlotOf(key)];
  slot.name_low = static_cast<uint32_t>(key.name);
  slot.name_high = static_cast<uint32_t>(key.name >> 32);
  slot.check = key.check;
  slot.entry = CopyEntry{};
  ++taken_;
  return &slot.entry;
}

void FolderIndex::Count(const TierKey& key, const CopyEntry& copy) {
  Group& group = groups_[copy.group];
  used_ += Charge(copy.length, copy.packed);
  group.bytes += copy.length;
  if (++group.copies == 1) used_ += Extra();
  group.needed += copy.needed;
  group.kept += copy.needed | copy.linked;
  linked_ += copy.linked && !copy.needed;
  ++copies_;
  if (!copy.packed) {
    if (group.pages.empty()) group.pages.resize(kPages);
    if (++group.pages[PageOf(key)] == 1) used_ += Extra();
    return;
  }
  if (++group.segments[copy.segment].copies == 1) used_ += Extra();
  group.next_segment = std::max(group.next_segment, copy.segment + uint32_t{1});
}

void FolderIndex::Uncount(const TierKey& key, const CopyEntry& copy) {
  Group& group = groups_[copy.group];
  used_ -= Charge(copy.length, copy.packed);
  group.bytes -= copy.length;
  if (--group.copies == 0) used_ -= Extra();
  group.needed -= copy.needed;
  group.kept -= copy.needed | copy.linked;
  linked_ -= copy.linked && !copy.needed;
  --copies_;
  if (!copy.packed) {
    if (--group.pages[PageOf(key)] == 0) used_ -= Extra();
    return;
  }
  Group::Segment& segment = group.segments[copy.segment];
  if (--segment.copies == 0) {
    used_ -= segment.lost + Extra();
    segment.lost = 0;
    return;
  }
  // Records may say that copies overlap: it is never more than the segment.
  const uint64_t before = segment.lost;
  segment.lost = std::min(before + SharedBytes(copy), kLargestSegment);
  used_ += segment.lost - before;
}

uint64_t FolderIndex::SharedBytes(const CopyEntry& copy) const {
  const uint64_t first = RoundUp(copy.offset);
  const uint64_t end = (uint64_t{copy.offset} + copy.length) / block_ * block_;
  return copy.length - (end > first ? end - first : 0);
}

bool FolderIndex::Set(const TierKey& key, CopyEntry copy) {
  CopyEntry* entry = Make(key);
  if (entry == nullptr) return false;
  if (entry->held()) {
    if (entry->needed) copy.needed = 1;
    if (entry->linked) copy.linked = 1;
    Uncount(key, *entry);
  }
  ++turns_;
  copy.turn = turns_ & kTurns;
  *entry = copy;
  Count(key, copy);
  return true;
}

void FolderIndex::Clear(const TierKey& key, uint32_t length) {
  CopyEntry* entry = Find(key);
  if (entry == nullptr) return;
  if (entry->held()) Uncount(key, *entry);
  *entry = CopyEntry{};
  entry->length = length;
}

bool FolderIndex::Need(const TierKey& key) {
  CopyEntry* entry = Find(key);
  if (entry == nullptr || !entry->held() || groups_[entry->group].leaving) return false;
  entry->turn = turns_ & kTurns;
  if (!entry->needed) {
    entry->needed = 1;
    ++groups_[entry->group].needed;
    if (entry->linked) {
      --linked_;
    } else {
      ++groups_[entry->group].kept;
    }
  }
  return true;
}

void FolderIndex::SetLinked(const TierKey& key, bool linked) {
  CopyEntry* entry = Find(key);
  if (entry == nullptr || !entry->held() || entry->linked == linked) return;
  entry->linked = linked;
  if (linked) entry->turn = ++turns_ & kTurns;
  if (entry->needed) return;
  linked ? ++linked_ : --linked_;
  linked ? ++groups_[entry->group].kept : --groups_[entry->group].kept;
}

void FolderIndex::ForgetNeeds() {
  for (Slot& slot : slots_) {
    CopyEntry& entry = slot.entry;
    if (slot.empty() || !entry.held() || !entry.needed || groups_[entry.group].used) continue;
    entry.needed = 0;
    --groups_[entry.group].needed;
    if (entry.linked) {
      ++linked_;
    } else {
      --groups_[entry.group].kept;
    }
  }
}

void FolderIndex::TakeOverUses(const FolderIndex& before) {
  for (const Group& group : before.groups_) {
    if (!group.used) continue;
    Group& here = At(group.id);
    here.used = true;
    here.users = group.users;
    here.sorted = group.sorted;
  }
  for (const Slot& slot : before.slots_) {
    if (!slot.empty() && slot.entry.held() && slot.entry.needed) (void)Need(slot.Key());
  }
}

void FolderIndex::Forget(uint64_t group) {
  const auto number = numbers_.find(group);
  if (number == numbers_.end()) return;
  for (Slot& slot : slots_) {
    if (slot.empty() || !slot.entry.held() || slot.entry.group != number->second) continue;
    Uncount(slot.Key(), slot.entry);
    slot.entry = CopyEntry{};
  }
}

uint16_t FolderIndex::NumberOf(uint64_t group) {
  const auto found = numbers_.find(group);
  if (found != numbers_.end()) return found->second;
  if (groups_.size() < kMostGroups) groups_.emplace_back().id = group;
  const auto number = static_cast<uint16_t>(groups_.size() - 1);
  numbers_.emplace(group, number);
  return number;
}

bool FolderIndex::Uses(uint64_t group) const {
  const auto number = numbers_.find(group);
  return number != numbers_.end() && groups_[number->second].used;
}

bool FolderIndex::Holds(uint64_t group) const {
  const auto number = numbers_.find(group);
  return number != numbers_.end() && groups_[number->second].copies > 0;
}

void FolderIndex::Apply(const LogRecord& record) {
  const TierKey key{.group = record.group, .name = record.name, .check = record.name_check};
  switch (record.kind) {
    case LogRecord::Kind::kFile:
    case LogRecord::Kind::kPacked: {
      if (record.length > CopyEntry::kLongest) return;
      CopyEntry copy;
      copy.length = record.length;
      copy.crc = record.crc;
      copy.group = NumberOf(record.group) & (kMostGroups - 1);
      copy.packed = record.kind == LogRecord::Kind::kPacked;
      if (copy.packed) {
        copy.offset = record.offset;
        copy.segment = record.segment;
      }
      // One that lies in a folder which the index cannot name any more is not found again.
      if (groups_[copy.group].id == record.group) (void)Set(key, copy);
      return;
    }
    case LogRecord::Kind::kStamp: {
      CopyEntry* entry = Find(key);
      // Of these very bytes: the record of the copy that it belongs to may have been lost.
      if (entry != nullptr && entry->held() && entry->crc == ValueOf(record) >> 32) {
        entry->stamp = static_cast<uint32_t>(ValueOf(record));
      }
      return;
    }
    case LogRecord::Kind::kDrop:
      Clear(key);
      return;
    case LogRecord::Kind::kForget:
      Forget(record.group);
      return;
    case LogRecord::Kind::kUse: {
      Group& group = At(record.group);
      group.last_used_s = std::max(group.last_used_s, static_cast<int64_t>(ValueOf(record)));
      return;
    }
    case LogRecord::Kind::kPath: {
      std::string& path = At(record.group).path;
      if (record.name == 0) path.clear();
      if (path.size() < kLongestPath) path.append(PathPiece(record));
      return;
    }
    case LogRecord::Kind::kLimit:
      limit_ = ValueOf(record);
      return;
    case LogRecord::Kind::kLost: {
      Group& group = At(record.group);
      const auto found = group.segments.find(record.segment);
      if (found == group.segments.end()) return;
      Group::Segment& segment = found->second;
      if (segment.copies == 0 || block_ == 1) return;
      used_ -= segment.lost;
      segment.lost = std::min(ValueOf(record), kLargestSegment);
      used_ += segment.lost;
      return;
    }
  }
}

LogRecord FolderIndex::RecordOf(const TierKey& key, const CopyEntry& copy) const {
  LogRecord record;
  record.name = key.name;
  record.name_check = key.check;
  record.group = IdOf(copy);
  record.length = copy.length;
  record.crc = copy.crc;
  record.offset = copy.offset;
  record.segment = copy.segment;
  record.kind = copy.packed ? LogRecord::Kind::kPacked : LogRecord::Kind::kFile;
  return record;
}

LogRecord FolderIndex::StampRecordOf(const TierKey& key, const CopyEntry& copy) const {
  LogRecord record = LimitRecord(uint64_t{copy.crc} << 32 | copy.stamp);
  record.name = key.name;
  record.name_check = key.check;
  record.group = IdOf(copy);
  record.kind = LogRecord::Kind::kStamp;
  return record;
}

void FolderIndex::Write(const FolderLog::Emit& emit) const {
  if (limit_ != 0) emit(LimitRecord(limit_));
  for (size_t i = 0; i < groups_.size(); ++i) {
    const Group& group = groups_[i];
    if (group.copies == 0 && !group.used) continue;
    if (!group.path.empty()) {
      for (const LogRecord& piece : PathRecords(group.id, group.path)) emit(piece);
    }
    if (group.last_used_s != 0) emit(UseRecord(group.id, group.last_used_s));
  }
  // In the order in which they came, which the next reader of the log takes for theirs.
  std::vector<uint32_t> order;
  order.reserve(copies_);
  for (size_t i = 0; i < slots_.size(); ++i) {
    if (!slots_[i].empty() && slots_[i].entry.held()) order.push_back(static_cast<uint32_t>(i));
  }
  std::sort(order.begin(), order.end(),
            [this](uint32_t a, uint32_t b) { return slots_[a].entry.turn < slots_[b].entry.turn; });
  for (const uint32_t i : order) {
    const TierKey key = slots_[i].Key();
    const CopyEntry copy = slots_[i].entry;  // `emit` may let others change it
    if (!copy.held()) continue;
    emit(RecordOf(key, copy));
    if (copy.stamp != 0) emit(StampRecordOf(key, copy));
  }
  for (size_t i = 0; i < groups_.size(); ++i) {
    for (const auto& [number, segment] : groups_[i].segments) {
      if (segment.lost > 0) emit(LostRecord(groups_[i].id, number, segment.lost));
    }
  }
}

bool FolderIndex::Oldest(uint64_t* group) const {
  const Group* oldest = nullptr;
  for (const Group& each : groups_) {
    if (each.used || each.leaving || each.copies == 0 || each.kept > 0) continue;
    if (oldest != nullptr && each.last_used_s >= oldest->last_used_s) continue;
    oldest = &each;
    *group = each.id;
  }
  return oldest != nullptr;
}

bool FolderIndex::HasSpare() const {
  return std::any_of(groups_.begin(), groups_.end(), [this](const Group& group) {
    return !group.leaving && GivesUp(group) && group.copies > group.kept;
  });
}

bool FolderIndex::IsSpare(const CopyEntry& copy, bool linked) const {
  if (!copy.held() || copy.needed || copy.linked != linked) return false;
  const Group& group = groups_[copy.group];
  return !group.leaving && GivesUp(group);
}

std::vector<FolderIndex::Candidate> FolderIndex::Candidates(bool linked, size_t most) const {
  const auto sooner = [](const Candidate& a, const Candidate& b) { return a.rank < b.rank; };
  std::vector<Candidate> found;
  for (const Slot& slot : slots_) {
    if (slot.empty() || !IsSpare(slot.entry, linked)) continue;
    found.push_back({Rank(slot.entry), slot.Key()});
    found.back().key.group = groups_[slot.entry.group].id;
    if (found.size() < 2 * most) continue;
    std::nth_element(found.begin(), found.begin() + static_cast<ptrdiff_t>(most), found.end(),
                     sooner);
    found.resize(most);
  }
  std::sort(found.begin(), found.end(), [&](const auto& a, const auto& b) { return sooner(b, a); });
  if (found.size() > most) found.erase(found.begin(), found.end() - static_cast<ptrdiff_t>(most));
  return found;
}

bool FolderIndex::Spare(TierKey* key) {
  if (!HasSpare()) return false;
  for (const bool fresh : {false, true}) {
    if (fresh) spare_ = Candidates(false, kMostSpare);
    while (!spare_.empty()) {
      const TierKey found = spare_.back().key;
      spare_.pop_back();
      const CopyEntry* entry = std::as_const(*this).Find(found);
      if (entry == nullptr || !IsSpare(*entry, false)) continue;
      *key = found;
      key->group = IdOf(*entry);
      return true;
    }
  }
  return false;
}

std::vector<TierKey> FolderIndex::LinkedSpare(uint64_t bytes) const {
  std::vector<TierKey> found;
  if (linked_ == 0) return found;
  std::vector<Candidate> all = Candidates(true, kMostLinked);
  for (uint64_t freed = 0; freed < bytes && !all.empty(); all.pop_back()) {
    found.push_back(all.back().key);
    freed += Charge(Find(found.back())->length, false);
  }
  return found;
}

std::map<std::pair<uint64_t, uint16_t>, uint64_t> FolderIndex::SegmentBytes() const {
  std::map<std::pair<uint64_t, uint16_t>, uint64_t> bytes;
  for (const Slot& slot : slots_) {
    if (slot.empty() || !slot.entry.held() || !slot.entry.packed) continue;
    bytes[{groups_[slot.entry.group].id, slot.entry.segment}] += slot.entry.length;
  }
  for (const Group& group : groups_) {
    for (const auto& [number, segment] : group.segments) {
      if (segment.copies > 0) bytes[{group.id, number}] += segment.lost;
    }
  }
  return bytes;
}

std::vector<TierKey> FolderIndex::KeysIf(const std::function<bool(const CopyEntry&)>& take) const {
  std::vector<TierKey> found;
  for (const Slot& slot : slots_) {
    if (slot.empty() || !slot.entry.held() || !take(slot.entry)) continue;
    found.push_back(slot.Key());
    found.back().group = groups_[slot.entry.group].id;
  }
  return found;
}

std::vector<TierKey> FolderIndex::Keys(uint64_t group) const {
  std::vector<TierKey> found;
  const auto number = numbers_.find(group);
  if (number == numbers_.end()) return found;
  for (const Slot& slot : slots_) {
    if (slot.empty() || !slot.entry.held() || slot.entry.group != number->second) continue;
    found.push_back(slot.Key());
    found.back().group = group;
  }
  std::sort(found.begin(), found.end(), [](const TierKey& a, const TierKey& b) {
    return std::pair(a.name, a.check) < std::pair(b.name, b.check);
  });
  return found;
}

}  // namespace forebay
