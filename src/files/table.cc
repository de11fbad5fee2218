#include "files/table.h"

namespace forebay::files {
namespace {

bool IsPowerOfTwo(uint64_t value) { return value != 0 && (value & (value - 1)) == 0; }

uint64_t NextPart(uint64_t slots, uint64_t most) {
  return slots < most / FileTable::kGrowth ? slots * FileTable::kGrowth : most;
}

}  // namespace

size_t FileTable::BytesFor(uint64_t slots, uint64_t most, size_t parts) {
  size_t bytes = sizeof(FileTableHeader);
  for (size_t n = 0; n < parts && n < kMostParts; ++n) {
    bytes += slots * sizeof(FileSlot);
    if (slots == most) break;
    slots = NextPart(slots, most);
  }
  return bytes;
}

FileTable FileTable::View(FileTableHeader* header) {
  FileTable out;
  out.header_ = header;
  auto* at = reinterpret_cast<FileSlot*>(header + 1);
  uint64_t slots = header->slots;
  while (out.most_parts_ < kMostParts) {
    out.parts_[out.most_parts_++] = {.slots = at, .mask = slots - 1};
    if (slots == header->most) break;
    at += slots;
    slots = NextPart(slots, header->most);
  }
  return out;
}

FileTable FileTable::Make(void* mapping, uint64_t slots, uint64_t most) {
  auto* header = static_cast<FileTableHeader*>(mapping);
  header->slots = slots;
  header->most = most;
  header->parts.store(1, std::memory_order_relaxed);
  header->magic = FileTableHeader::kMagic;
  return View(header);
}

FileTable FileTable::Of(void* mapping, size_t bytes) {
  auto* header = static_cast<FileTableHeader*>(mapping);
  if (bytes < sizeof(FileTableHeader) || header->magic != FileTableHeader::kMagic ||
      !IsPowerOfTwo(header->slots) || !IsPowerOfTwo(header->most) || header->slots > header->most ||
      header->most > bytes / sizeof(FileSlot) || BytesFor(header->slots, header->most) > bytes ||
      header->parts.load(std::memory_order_relaxed) == 0) {
    return FileTable();
  }
  return View(header);
}

FileSlot* FileTable::Find(const FileKey& key) const {
  for (size_t n = parts(); n-- > 0;) {
    const Part& part = parts_[n];  // the last one has the most
    for (uint64_t i = 0; i <= part.mask; ++i) {
      FileSlot& slot = part.slots[(key.low + i) & part.mask];
      if (StateOf(slot) == FileState::kEmpty) break;
      if (slot.low.load(std::memory_order_relaxed) == key.low &&
          slot.high.load(std::memory_order_relaxed) == key.high) {
        return &slot;
      }
    }
  }
  return nullptr;
}

FileSlot* FileTable::Add(const FileKey& key, FileState state) {
  if (filling_ + 1 < parts()) {
    filling_ = parts() - 1;
    used_ = 0;
  }
  const Part& part = parts_[filling_];
  if (used_ >= (part.mask + 1) / 4 * 3) return nullptr;
  for (uint64_t i = 0;; ++i) {
    FileSlot& slot = part.slots[(key.low + i) & part.mask];
    if (StateOf(slot) != FileState::kEmpty) continue;
    slot.high.store(key.high, std::memory_order_relaxed);
    slot.low.store(key.low, std::memory_order_relaxed);
    Set(slot, state);
    ++used_;
    return &slot;
  }
}

}  // namespace forebay::files
