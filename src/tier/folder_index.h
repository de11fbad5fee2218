// What a cache folder holds, in memory: an entry of 36 bytes a copy in a hash table. Filled from
// the log; touches no file. Not safe for concurrent use.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>
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
  // The index's count of copies when this one came, or was last asked for.
  uint32_t turn : 30 = 0;
  uint32_t linked : 1 = 0;   // has a second name, which somebody else removes first
  uint32_t checked : 1 = 0;  // its bytes were right, in this process
  uint32_t stamp = 0;        // see TierOp
  bool held() const { return length <= kLongest; }
  // The same copy, in the same place.
  bool Same(const CopyEntry& other) const {
    return length == other.length && crc == other.crc && offset == other.offset &&
           segment == other.segment && group == other.group && packed == other.packed;
  }
};
static_assert(sizeof(CopyEntry) == 24);

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
    uint64_t needed = 0;  // of them
    uint64_t kept = 0;    // of them, needed or linked
    uint64_t bytes = 0;   // of the samples
    uint32_t users = 0;   // that named it, and did not say that they are done
    uint32_t next_segment = 0;
    struct Segment {
      uint32_t copies = 0;
      // Of dropped copies: blocks that they shared with others, which the disk still has.
      uint64_t lost = 0;
    };
    // By number: a log that names a high one claims no memory for those below it.
    std::unordered_map<uint16_t, Segment> segments;
    // Copies with a file of their own, by the folder they lie in; empty while there are none.
    std::vector<uint32_t> pages;
  };

  // `block` is what the disk rounds a file up to; 1: only bytes and records count.
  explicit FolderIndex(uint64_t block = 1) : block_(block) {}

  // What a copy counts against the limit: its bytes and its record; one in a file of its own whole
  // blocks, and one more for the file's name and attributes.
  uint64_t Charge(uint64_t length, bool packed) const {
    return sizeof(LogRecord) + (packed ? length : RoundUp(length) + Extra());
  }
  // The same, and what the folders and the segment take that it may be the first one in.
  uint64_t ChargeAtMost(uint64_t length, bool packed) const {
    return Charge(length, packed) + 2 * Extra();
  }
  uint64_t RoundUp(uint64_t bytes) const { return (bytes + block_ - 1) / block_ * block_; }
  // What a folder takes, or a file beside its bytes.
  uint64_t Extra() const { return block_ > 1 ? block_ : 0; }
  uint64_t block() const { return block_; }

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
  // Somebody needs it. True: it is held, and stays.
  bool Need(const TierKey& key);
  // A copy that is held has, or has no longer, a second name.
  void SetLinked(const TierKey& key, bool linked);
  // What is in groups that nobody uses is needed by nobody.
  void ForgetNeeds();
  // What is used and needed according to `before`, here too.
  void TakeOverUses(const FolderIndex& before);
  void Forget(uint64_t group);
  void Apply(const LogRecord& record);
  // The records that make this index again.
  void Write(const FolderLog::Emit& emit) const;
  LogRecord RecordOf(const TierKey& key, const CopyEntry& copy) const;
  // What follows that one where the copy has a stamp.
  LogRecord StampRecordOf(const TierKey& key, const CopyEntry& copy) const;

  // The group's number, which stays; made when there is none. The last one there can be is shared
  // by all that come later.
  uint16_t NumberOf(uint64_t group);
  Group& At(uint64_t group) { return groups_[NumberOf(group)]; }
  const std::deque<Group>& groups() const { return groups_; }
  bool Uses(uint64_t group) const;   // somebody of this process
  bool Holds(uint64_t group) const;  // anything of it
  uint64_t IdOf(const CopyEntry& copy) const { return groups_[copy.group].id; }
  // The group that was named longest ago, of those that hold something and nobody here uses any
  // of. False: there is none.
  bool Oldest(uint64_t* group) const;
  // A held copy that nobody here needs and that has no second name, in a group that nobody uses, or
  // that is sorted: the one that came, or was asked for, longest ago. False: there is none.
  bool Spare(TierKey* key);
  bool HasSpare() const;
  // Those that would be spare without their second name, longest ago first, until they are `bytes`.
  std::vector<TierKey> LinkedSpare(uint64_t bytes) const;
  // What the packed copies of each segment take, by the group's id and the segment's number.
  std::map<std::pair<uint64_t, uint16_t>, uint64_t> SegmentBytes() const;
  // Copies that are held and that `take` takes.
  std::vector<TierKey> KeysIf(const std::function<bool(const CopyEntry&)>& take) const;
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
  struct Slot {
    // In two halves: a slot needs no alignment of eight bytes.
    uint32_t name_low = 0;
    uint32_t name_high = 0;
    uint32_t check = 0;
    CopyEntry entry{.length = kEmpty};
    bool empty() const { return entry.length == kEmpty; }
    TierKey Key() const {
      return {.group = 0, .name = uint64_t{name_high} << 32 | name_low, .check = check};
    }
  };
  static_assert(sizeof(Slot) == 36);
  struct Candidate {
    uint64_t rank = 0;  // the lowest goes first
    TierKey key;
  };

  size_t Home(uint64_t name) const;
  // The slot that has the key, or the empty one where it would be. The table has an empty one.
  size_t SlotOf(const TierKey& key) const;
  void Resize(size_t slots);
  void Count(const TierKey& key, const CopyEntry& copy);
  void Uncount(const TierKey& key, const CopyEntry& copy);
  // Of a packed copy: what lies in blocks that it shares with others.
  uint64_t SharedBytes(const CopyEntry& copy) const;
  // A turn has 30 bits; after so many copies the order starts anew.
  static constexpr uint32_t kTurns = (1u << 30) - 1;
  bool GivesUp(const Group& group) const { return group.used ? group.sorted : group.kept > 0; }
  bool IsSpare(const CopyEntry& copy, bool linked) const;
  // Groups that nobody uses come before those in use, then the turn counts.
  uint64_t Rank(const CopyEntry& copy) const {
    return uint64_t{groups_[copy.group].used} << 32 | copy.turn;
  }
  // At most `most`, the first to go last.
  std::vector<Candidate> Candidates(bool linked, size_t most) const;

  uint64_t block_;
  std::vector<Slot> slots_;       // a power of two of them, or none
  size_t taken_ = 0;              // slots that are not empty
  uint64_t turns_ = 0;            // copies that were ever set
  uint64_t linked_ = 0;           // copies that have a second name and are not needed
  std::vector<Candidate> spare_;  // for Spare; looked up again before it is believed
  std::deque<Group> groups_;
  std::map<uint64_t, uint16_t> numbers_;
  uint64_t used_ = 0;
  uint64_t copies_ = 0;
  uint64_t limit_ = 0;
};

}  // namespace forebay
