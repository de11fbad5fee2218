// What both loops do alike with an op's destinations.
#pragma once

#include <sys/uio.h>

#include <cstddef>
#include <cstdint>
#include <span>

#include "io/loop.h"

namespace forebay {

// Most pieces of memory that one read request names; the system takes 1,024.
inline constexpr size_t kMostVectors = 256;
// Receives the bytes that nobody wants, again and again. Every thread has its own; mostly they are
// the headers between two files of an archive.
inline constexpr size_t kWasteBytes = 4 << 10;

// The length of the file range that `op` reads, gaps included.
uint64_t RangeBytes(const ReadOp& op);

// Fills `out` with the memory for what follows the first `done` bytes of the range, as far as it
// has room, and returns the number of pieces; `bytes` receives their size. Gaps go to `waste`,
// which must not be empty if there are any.
size_t Vectors(const ReadOp& op, uint64_t done, std::span<std::byte> waste, std::span<iovec> out,
               uint64_t& bytes);

// Fills the checksums that `op` asks for.
void Checksum(const ReadOp& op, Completion& done);

}  // namespace forebay
