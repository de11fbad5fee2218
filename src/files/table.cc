#include "files/table.h"

namespace forebay::files {

FileTable FileTable::Make(void* mapping, uint64_t slots, const BootId& boot) {
  auto* header = static_cast<FileTableHeader*>(mapping);
  header->slots = slots;
  header->boot_high = boot.high;
  header->boot_low = boot.low;
  header->magic = FileTableHeader::kMagic;
  return FileTable(header);
}

FileTable FileTable::Of(void* mapping, size_t bytes) {
  auto* header = static_cast<FileTableHeader*>(mapping);
  if (bytes < sizeof(FileTableHeader) || header->magic != FileTableHeader::kMagic ||
      header->slots == 0 || (header->slots & (header->slots - 1)) != 0 ||
      header->slots > bytes / sizeof(FileSlot) || BytesFor(header->slots) > bytes) {
    return FileTable();
  }
  return FileTable(header);
}

FileSlot* FileTable::Find(const FileKey& key) const {
  const uint64_t mask = header_->slots - 1;
  for (uint64_t n = 0; n <= mask; ++n) {
    FileSlot& slot = slots_[(key.low + n) & mask];
    if (StateOf(slot) == FileState::kEmpty) return nullptr;
    if (slot.low.load(std::memory_order_relaxed) == key.low &&
        slot.high.load(std::memory_order_relaxed) == key.high) {
      return &slot;
    }
  }
  return nullptr;
}

FileSlot* FileTable::Add(const FileKey& key, FileState state) {
  if (used_ >= header_->slots / 4 * 3) return nullptr;
  const uint64_t mask = header_->slots - 1;
  for (uint64_t n = 0;; ++n) {
    FileSlot& slot = slots_[(key.low + n) & mask];
    if (StateOf(slot) != FileState::kEmpty) continue;
    slot.high.store(key.high, std::memory_order_relaxed);
    slot.low.store(key.low, std::memory_order_relaxed);
    Set(slot, state);
    ++used_;
    return &slot;
  }
}

}  // namespace forebay::files
