// The table that the file service shares with its clients: which files have copies.
//
// It lies in CACHE/table, mapped by all. Only the service adds slots and sets states; clients count
// their opens and may close the table. A state is a hint: the copy itself, CACHE/copies/NAME, is
// there or not, and is complete when it is there (it gets that name when its last byte is written).
// So a service that was killed leaves nothing that is wrong, and a client needs no service to find
// a copy. Nothing here allocates, locks or calls the system.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "base/boot_id.h"
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
  static constexpr uint64_t kMagic = 0x3242415446594246;  // "FBYFTAB2"
  uint64_t magic;
  uint64_t slots;  // a power of two
  // Not 0: no copy may be used any more. A client sets it when it cannot tell the service of a
  // change.
  std::atomic<uint32_t> closed;
  // Not 0: a program was started that tells of no changes, so copies are compared with the source.
  std::atomic<uint32_t> unwatched;
  // Milliseconds of the monotonic clock: a question was not answered in time, so nobody asks
  // before.
  std::atomic<int64_t> quiet_until_ms;
  std::atomic<uint64_t> plain;  // programs that were started without the library: it does not fit
  std::atomic<uint64_t> large;  // copies of large files that are complete: grows with each
  // Not 0: the disk that has the copies hangs, so files are opened and read at the source.
  std::atomic<uint32_t> passed_by;
  uint32_t unused;
  // Since when the machine runs. Copies of another start may be torn: they were not synced.
  uint64_t boot_high;
  uint64_t boot_low;
  uint64_t reserved[7];
};
static_assert(sizeof(FileTableHeader) == 128);
static_assert(offsetof(FileTableHeader, passed_by) == 48);  // tests write to it

// A view; whoever maps it owns the mapping.
class FileTable {
 public:
  FileTable() = default;
  explicit FileTable(FileTableHeader* header)
      : header_(header), slots_(reinterpret_cast<FileSlot*>(header + 1)) {}

  static size_t BytesFor(uint64_t slots) {
    return sizeof(FileTableHeader) + slots * sizeof(FileSlot);
  }
  // Of a new, zeroed mapping of BytesFor(slots).
  static FileTable Make(void* mapping, uint64_t slots, const BootId& boot = {});
  // Checks a mapping of `bytes`; not valid() when it is no such table.
  static FileTable Of(void* mapping, size_t bytes);
  // Whether it was made since the machine was started, as far as its maker knew. If not, no copy
  // may be used.
  bool OfBoot(const BootId& boot) const {
    const BootId made{.high = header_->boot_high, .low = header_->boot_low};
    return !made.known() || made == boot;
  }

  bool valid() const { return header_ != nullptr; }
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
  uint64_t size() const { return header_->slots; }

  FileSlot* Find(const FileKey& key) const;  // nullptr: not there
  // The service's only, in one thread. nullptr when it is too full to stay fast.
  FileSlot* Add(const FileKey& key, FileState state);

  static FileState StateOf(const FileSlot& slot) {
    return static_cast<FileState>(slot.state.load(std::memory_order_acquire));
  }
  static void Set(FileSlot& slot, FileState state) {
    slot.state.store(static_cast<uint32_t>(state), std::memory_order_release);
  }

 private:
  FileTableHeader* header_ = nullptr;
  FileSlot* slots_ = nullptr;
  uint64_t used_ = 0;
};

}  // namespace forebay::files
