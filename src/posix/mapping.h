// Mappings of large files of the source, which move to the copy once that is complete: the same
// bytes at the same addresses, from then on without the source.
//
// The kernel replaces a mapping in one step, so whoever reads through it never finds a gap. Only
// mappings that nobody can write to are moved, and only if they are still what was mapped:
// /proc/self/maps is read before, and each call that could change one (munmap, mprotect, mremap,
// another mmap over it) takes it out of this table first. A call waits for a move that is under
// way; otherwise nothing here waits, and nothing allocates.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "posix/partial.h"

namespace forebay::posix {

extern std::atomic<bool> any_mapping;

// A mapping of the source that was just made. `copies`: Client::large_copies() when it was found
// not to be complete.
void TrackMapping(void* at, size_t bytes, int flags, long offset, const PartialFile& file,
                  uint64_t copies);
// What lies there is about to be changed, or is to stay as it is.
void ForgetMappings(const void* at, size_t bytes);
// MADV_NORMAL, MADV_RANDOM or MADV_SEQUENTIAL, which hold for the copy, too.
void AdviseMapping(const void* at, size_t bytes, int advice);

void MoveMappingsNow();
// Called by what programs call often: moves those whose copies are complete.
inline void MoveMappings() {
  if (any_mapping.load(std::memory_order_relaxed)) [[unlikely]]
    MoveMappingsNow();
}

}  // namespace forebay::posix
