#include "tier/folder_index.h"

#include <algorithm>

namespace forebay {

size_t FolderIndex::Home(uint64_t name) const {
  // Names are hashes; those of tests may not be.
  return static_cast<size_t>((name * 0x9e3779b97f4a7c15) >> 20) & (slots_.size() - 1);
}

size_t FolderIndex::Place(const TierKey& key) const {
  size_t at = Home(key.name);
  while (!slots_[at].empty() && slots_[at].Key() != key) at = (at + 1) & (slots_.size() - 1);
  return at;
}

const CopyEntry* FolderIndex::Find(const TierKey& key) const {
  if (slots_.empty()) return nullptr;
  const Slot& slot = slots_[Place(key)];
  return slot.empty() ? nullptr : &slot.entry;
}

CopyEntry* FolderIndex::Find(const TierKey& key) {
  return const_cast<CopyEntry*>(std::as_const(*this).Find(key));
}

void FolderIndex::Resize(size_t slots) {
  std::vector<Slot> old(slots);
  old.swap(slots_);
  taken_ = 0;
  hand_ = 0;
  for (const Slot& slot : old) {
    if (slot.empty() || slot.entry.length == CopyEntry::kAbsent) continue;
    slots_[Place(slot.Key())] = slot;
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
  Slot& slot = slots_[Place(key)];
  slot.name[0] = static_cast<uint32_t>(key.name);
  slot.name[1] = static_cast<uint32_t>(key.name >> 32);
  slot.check = key.check;
  slot.entry = CopyEntry{};
  ++taken_;
  return &slot.entry;
}

void FolderIndex::Count(const CopyEntry& copy) {
  Group& group = groups_[copy.group];
  const uint64_t charge = Charge(copy.length);
  used_ += charge;
  group.charged += charge;
  group.bytes += copy.length;
  ++group.copies;
  group.needed += copy.needed;
  ++copies_;
  if (!copy.packed) return;
  if (group.packed.size() <= copy.segment) group.packed.resize(copy.segment + size_t{1});
  ++group.packed[copy.segment];
  group.next_segment = std::max(group.next_segment, copy.segment + uint32_t{1});
}

void FolderIndex::Uncount(const CopyEntry& copy) {
  Group& group = groups_[copy.group];
  const uint64_t charge = Charge(copy.length);
  used_ -= charge;
  group.charged -= charge;
  group.bytes -= copy.length;
  --group.copies;
  group.needed -= copy.needed;
  --copies_;
  if (copy.packed) --group.packed[copy.segment];
}

bool FolderIndex::Set(const TierKey& key, CopyEntry copy) {
  CopyEntry* entry = Make(key);
  if (entry == nullptr) return false;
  if (entry->held()) {
    if (entry->needed) copy.needed = 1;
    Uncount(*entry);
  }
  *entry = copy;
  Count(copy);
  return true;
}

void FolderIndex::Clear(const TierKey& key, uint32_t length) {
  CopyEntry* entry = Find(key);
  if (entry == nullptr) return;
  if (entry->held()) Uncount(*entry);
  *entry = CopyEntry{};
  entry->length = length;
}

bool FolderIndex::Need(const TierKey& key) {
  CopyEntry* entry = Find(key);
  if (entry == nullptr || !entry->held()) return false;
  if (!entry->needed) {
    entry->needed = 1;
    ++groups_[entry->group].needed;
  }
  return true;
}

void FolderIndex::TakeOverUses(const FolderIndex& before) {
  for (const Group& group : before.groups_) {
    if (!group.used) continue;
    Group& here = At(group.id);
    here.used = true;
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
    Uncount(slot.entry);
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
      path.append(PathPiece(record));
      return;
    }
    case LogRecord::Kind::kLimit:
      limit_ = ValueOf(record);
      return;
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
  for (const Slot& slot : slots_) {
    if (!slot.empty() && slot.entry.held()) emit(RecordOf(slot.Key(), slot.entry));
  }
}

bool FolderIndex::Oldest(uint64_t* group) const {
  const Group* oldest = nullptr;
  for (const Group& each : groups_) {
    if (each.used || each.leaving || each.copies == 0) continue;
    if (oldest != nullptr && each.last_used_s >= oldest->last_used_s) continue;
    oldest = &each;
    *group = each.id;
  }
  return oldest != nullptr;
}

bool FolderIndex::HasSpare() const {
  return std::any_of(groups_.begin(), groups_.end(), [](const Group& group) {
    return group.used && group.sorted && group.copies > group.needed;
  });
}

bool FolderIndex::Spare(TierKey* key) {
  if (!HasSpare()) return false;
  for (size_t i = 0; i < slots_.size(); ++i) {
    hand_ = (hand_ + 1) & (slots_.size() - 1);
    const Slot& slot = slots_[hand_];
    if (slot.empty() || !slot.entry.held() || slot.entry.needed) continue;
    const Group& group = groups_[slot.entry.group];
    if (!group.used || !group.sorted) continue;
    *key = slot.Key();
    key->group = group.id;
    return true;
  }
  return false;
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
