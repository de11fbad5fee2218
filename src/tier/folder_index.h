// What a cache folder holds, in memory: an entry of 28 bytes a copy in a hash table. Filled from
// the log; touches no file. Not safe for concurrent use.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <string>
#include <vector>

#include "tier/folder_log.h"
#include "tier/tier.h"

namespace forebay {

struct CopyEntry {
  static constexpr uint32_t kAbsent = ~uint32_t{0} - 1;
  // Somebody writes or removes the copy, and alone may touch it.
  static constexpr uint32_t kBusy = kAbsent - 1;
  static constexpr uint32_t kLongest = kBusy - 1;

  uint32_t length = kAbsent;
  uint32_t crc = 0;
  uint32_t offset = 0;      // packed: where in the segment
  uint16_t segment = 0;     // packed: which one of the group
  uint16_t group : 14 = 0;  // the index's number of the group that it lies in
  uint16_t packed : 1 = 0;
  uint16_t needed : 1 = 0;  // somebody of this process asked for it
  bool held() const { return length <= kLongest; }
  // The same copy, in the same place.
  bool Same(const CopyEntry& other) const {
    return length == other.length && crc == other.crc && offset == other.offset &&
           segment == other.segment && group == other.group && packed == other.packed;
  }
};
static_assert(sizeof(CopyEntry) == 16);

class FolderIndex {
 public:
  // The table never takes more than a GiB.
  static constexpr size_t kMostCopies = 16 << 20;
  static constexpr size_t kMostGroups = 1 << 14;

  // Copies that were put for one data folder: listed, used and, when nobody uses them, given up
  // together.
  struct Group {
    uint64_t id = 0;
    bool used = false;     // somebody of this process named it: it stays
    bool leaving = false;  // its files are being removed: nothing is put
    // Who named it has asked for all that it needs: the rest may go, copy by copy.
    bool sorted = false;
    int64_t last_used_s = 0;
    std::string path;
    uint64_t copies = 0;
    uint64_t needed = 0;   // of them
    uint64_t bytes = 0;    // of the samples
    uint64_t charged = 0;  // what they count against the limit
    uint32_t next_segment = 0;
    std::vector<uint32_t> packed;  // copies held in each segment
  };

  // What a copy counts against the limit: its bytes and its record.
  static uint64_t Charge(uint64_t length) { return length + sizeof(LogRecord); }

  // Entries move when others are made, by Make, Set and Apply. Between two of those calls other
  // threads may, under the caller's lock, do all else: what Write has begun stays in its order.
  const CopyEntry* Find(const TierKey& key) const;
  CopyEntry* Find(const TierKey& key);
  // Adds an absent one; null when there is no room for more.
  CopyEntry* Make(const TierKey& key);
  // What the entry says now counts, in the group that `copy` names; false when there is no room.
  bool Set(const TierKey& key, CopyEntry copy);
  // The copy counts no more; `length` is what the entry has from now on.
  void Clear(const TierKey& key, uint32_t length = CopyEntry::kAbsent);
  // Somebody needs it. True: it is held.
  bool Need(const TierKey& key);
  // What is used and needed according to `before`, here too.
  void TakeOverUses(const FolderIndex& before);
  void Forget(uint64_t group);
  void Apply(const LogRecord& record);
  // The records that make this index again.
  void Write(const FolderLog::Emit& emit) const;
  LogRecord RecordOf(const TierKey& key, const CopyEntry& copy) const;

  // The group's number, which stays; made when there is none. The last one there can be is shared
  // by all that come later.
  uint16_t NumberOf(uint64_t group);
  Group& At(uint64_t group) { return groups_[NumberOf(group)]; }
  const std::deque<Group>& groups() const { return groups_; }
  bool Holds(uint64_t group) const;  // anything of it
  uint64_t IdOf(const CopyEntry& copy) const { return groups_[copy.group].id; }
  // The group that was named longest ago, of those that hold something and nobody here uses. False:
  // there is none.
  bool Oldest(uint64_t* group) const;
  // A held copy that nobody here needs, in a group that is used and sorted. False: there is none.
  bool Spare(TierKey* key);
  bool HasSpare() const;
  // What is held of a group, by name.
  std::vector<TierKey> Keys(uint64_t group) const;

  uint64_t used() const { return used_; }
  uint64_t copies() const { return copies_; }
  size_t slots() const { return slots_.size(); }  // of the table
  // The last writer's; 0: not known.
  uint64_t limit() const { return limit_; }
  void set_limit(uint64_t bytes) { limit_ = bytes; }

 private:
  static constexpr uint32_t kEmpty = CopyEntry::kAbsent + 1;
  // The name in halves: in one piece it would make the slot 32 bytes long.
  struct Slot {
    uint32_t name[2] = {0, 0};
    uint32_t check = 0;
    CopyEntry entry{.length = kEmpty};
    bool empty() const { return entry.length == kEmpty; }
    TierKey Key() const {
      return {.group = 0, .name = uint64_t{name[1]} << 32 | name[0], .check = check};
    }
  };
  static_assert(sizeof(Slot) == 28);

  size_t Home(uint64_t name) const;
  // The slot that has the key, or the empty one where it would be. The table has an empty one.
  size_t Place(const TierKey& key) const;
  void Resize(size_t slots);
  void Count(const CopyEntry& copy);
  void Uncount(const CopyEntry& copy);

  std::vector<Slot> slots_;  // a power of two of them, or none
  size_t taken_ = 0;         // slots that are not empty
  size_t hand_ = 0;          // where the search for a spare copy goes on
  std::deque<Group> groups_;
  std::map<uint64_t, uint16_t> numbers_;
  uint64_t used_ = 0;
  uint64_t copies_ = 0;
  uint64_t limit_ = 0;
};

}  // namespace forebay
