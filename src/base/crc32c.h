// CRC-32C (Castagnoli), the one checksum of Forebay: TFRecord files carry it, and the SSE4.2
// instruction makes it cheaper than the memory it reads.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace forebay {

// Extends `crc` (0 for a fresh start) over `bytes`.
uint32_t Crc32c(std::span<const std::byte> bytes, uint32_t crc = 0);

// Copies `from` to `to`, which must not overlap and be as long, and returns the checksum of what
// was copied, all in one pass. Long pieces go past the caches where the processor can: they are for
// somebody who reads them later, and fetching the lines they overwrite takes longer than the rest.
uint32_t CopyCrc32c(std::span<std::byte> to, std::span<const std::byte> from);

// The portable implementation, exposed so that a test can compare both.
uint32_t Crc32cPortable(std::span<const std::byte> bytes, uint32_t crc = 0);

// Of two pieces one after the other, from the checksums of each; `bytes` is how long the second is.
uint32_t Crc32cJoin(uint32_t first, uint32_t second, uint64_t bytes);

// TFRecord stores rotated checksums, so that a CRC over data with embedded CRCs stays useful.
inline uint32_t MaskCrc(uint32_t crc) { return ((crc >> 15) | (crc << 17)) + 0xa282ead8u; }
inline uint32_t UnmaskCrc(uint32_t masked) {
  const uint32_t rotated = masked - 0xa282ead8u;
  return (rotated >> 17) | (rotated << 15);
}

}  // namespace forebay
