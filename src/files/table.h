// The table that the file service shares with its clients: which files have copies.
//
// It lies in memory that the service makes (table_memory.h) and hands to each client by its
// descriptor (Kind::kTable), mapped by all. Only the service adds slots and sets states; clients
// count their opens and may close the table. A state is a hint: the copy itself, CACHE/copies/NAME,
// is there or not, and is complete when it is there (it gets that name when its last byte is
// written). It is in parts, each of which is a hash table of its own, so that it grows without
// moving a slot: those that are in use have memory, the others only addresses. With the service's
// thread it ends for all, however that thread ended. Nothing here allocates, locks or calls the
// system.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>

#include "files/key.h"

namespace forebay::files {

enum class FileState : uint32_t {
  kEmpty = 0,    // no slot
  kKnown = 1,    // no copy: ask the service
  kComing = 2,   // being copied: ask the service, which answers when it is there
  kKept = 3,     // a copy is there
  kStaged = 4,   // a copy is there, and goes once it has been opened
  kChanged = 5,  // a program has written to it: the source for as long as this table lives
  kSource = 6,   // not to be copied: no regular file, no room, an error; the source
  // Large, next to nothing of it is there or coming, and it is read at random: the source. The
  // service is told of each read, and not waited for.
  kPassedBy = 7,
};

struct FileSlot {
  std::atomic<uint64_t> high;
  std::atomic<uint64_t> low;
  std::atomic<uint32_t> state;  // a FileState; stored after the key, with release
  std::atomic<uint32_t> opens;  // of the copy, by all clients
  // Grows whenever a part that was read while it was copied goes, before another may take its name.
  std::atomic<uint64_t> parts;
};
static_assert(sizeof(FileSlot) == 32);

struct FileTableHeader {
  static constexpr uint64_t kMagic = 0x3342415446594246;  // "FBYFTAB3"
  // What the kernel sets in `owner` when the thread that held it ends (FUTEX_OWNER_DIED).
  static constexpr uint32_t kOwnerDied = 0x40000000;
  uint64_t magic;
  uint64_t slots;  // of the first part, a power of two
  uint64_t most;   // of the last part, a power of two
  // The service's thread, see TableHold. 0: of none, which is not said to have ended.
  std::atomic<uint32_t> owner;
  // Not 0: no copy may be used any more. A client sets it when it cannot tell the service of a
  // change.
  std::atomic<uint32_t> closed;
  // Not 0: a program was started that tells of no changes, so copies are compared with the source.
  std::atomic<uint32_t> unwatched;
  std::atomic<uint32_t> parts;  // in use, at least 1; stored once they have memory, with release
  // Milliseconds of the monotonic clock: a question was not answered in time, so nobody asks
  // before.
  std::atomic<int64_t> quiet_until_ms;
  // Not 0: the disk that has the copies hangs, so files are opened and read at the source.
  std::atomic<uint32_t> passed_by;
  uint32_t unused;
  std::atomic<uint64_t> plain;  // programs that were started without the library: it does not fit
  std::atomic<uint64_t> large;  // copies of large files that are complete: grows with each
  uint64_t reserved[7];
};
static_assert(sizeof(FileTableHeader) == 128);
static_assert(offsetof(FileTableHeader, passed_by) == 48);  // tests write to it

// A view; whoever maps it owns the mapping.
class FileTable {
 public:
  static constexpr uint64_t kFirstSlots = 1 << 15;  // 1 MiB
  static constexpr uint64_t kGrowth = 4;            // each part has so many times the slots
  static constexpr size_t kMostParts = 8;

  FileTable() = default;

  // Of all parts, or of the first `parts`.
  static size_t BytesFor(uint64_t slots, uint64_t most, size_t parts = kMostParts);
  static size_t BytesFor(uint64_t slots) { return BytesFor(slots, slots); }
  // Of a new, zeroed mapping of BytesFor(slots, most), of which the first part has memory.
  static FileTable Make(void* mapping, uint64_t slots, uint64_t most);
  static FileTable Make(void* mapping, uint64_t slots) { return Make(mapping, slots, slots); }
  // Checks a mapping of `bytes`; not valid() when it is no such table.
  static FileTable Of(void* mapping, size_t bytes);

  bool valid() const { return header_ != nullptr; }
  // Copies may be used: it is not closed, and the service has not ended, killed or not.
  bool usable() const {
    return !closed() &&
           (header_->owner.load(std::memory_order_acquire) & FileTableHeader::kOwnerDied) == 0;
  }
  bool closed() const { return header_->closed.load(std::memory_order_acquire) != 0; }
  void Close() { header_->closed.store(1, std::memory_order_release); }
  bool unwatched() const { return header_->unwatched.load(std::memory_order_acquire) != 0; }
  void SetUnwatched() { header_->unwatched.store(1, std::memory_order_release); }
  uint64_t plain() const { return header_->plain.load(std::memory_order_relaxed); }
  void CountPlain() { header_->plain.fetch_add(1, std::memory_order_relaxed); }
  int64_t quiet_until_ms() const { return header_->quiet_until_ms.load(std::memory_order_relaxed); }
  void KeepQuiet(int64_t until_ms) {
    header_->quiet_until_ms.store(until_ms, std::memory_order_relaxed);
  }
  uint64_t large() const { return header_->large.load(std::memory_order_acquire); }
  void CountLarge() { header_->large.fetch_add(1, std::memory_order_release); }
  bool passed_by() const { return header_->passed_by.load(std::memory_order_acquire) != 0; }
  void SetPassedBy(bool pass) { header_->passed_by.store(pass ? 1 : 0, std::memory_order_release); }
  std::atomic<uint32_t>& owner() const { return header_->owner; }

  size_t parts() const {
    const size_t parts = header_->parts.load(std::memory_order_acquire);
    return parts < most_parts_ ? parts : most_parts_;
  }
  size_t most_parts() const { return most_parts_; }
  // The service's only: one more part, which has memory now.
  void AddPart() { header_->parts.fetch_add(1, std::memory_order_release); }

  FileSlot* Find(const FileKey& key) const;  // nullptr: not there
  // The service's only, in one thread and by one view. nullptr when the last part is too full to
  // stay fast.
  FileSlot* Add(const FileKey& key, FileState state);

  static FileState StateOf(const FileSlot& slot) {
    return static_cast<FileState>(slot.state.load(std::memory_order_acquire));
  }
  static void Set(FileSlot& slot, FileState state) {
    slot.state.store(static_cast<uint32_t>(state), std::memory_order_release);
  }

 private:
  struct Part {
    FileSlot* slots = nullptr;
    uint64_t mask = 0;
  };
  static FileTable View(FileTableHeader* header);

  FileTableHeader* header_ = nullptr;
  size_t most_parts_ = 0;
  std::array<Part, kMostParts> parts_ = {};  // also those that are not in use
  size_t filling_ = 0;                       // which part Add() adds to
  uint64_t used_ = 0;                        // slots of that part
};

}  // namespace forebay::files
