// Decode: the step between a sample's bytes as they are stored and as a batch holds them.
//
// Today one kind exists, which copies. Image decoding and augmentation join here: the engine asks
// for the output's size, places it in the batch, and runs the step on its decode threads.
#pragma once

#include <cstdint>
#include <span>

#include "base/status.h"

namespace forebay {

enum class DecodeKind : uint8_t { kCopy };

// Bytes the step writes for a sample of `stored` bytes.
uint64_t DecodedBytes(DecodeKind kind, uint64_t stored);

// Fills `out`, which has DecodedBytes(kind, in.size()) bytes; the two do not overlap. Pure, and
// safe for concurrent use by multiple threads.
Status Decode(DecodeKind kind, std::span<const std::byte> in, std::span<std::byte> out);

}  // namespace forebay
