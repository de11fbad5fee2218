// Where a consumer's time goes. Every wait is charged to exactly one cause.
#pragma once

#include <array>
#include <cstdint>
#include <string_view>
#include <vector>

namespace forebay {

enum class StallCause : uint8_t {
  kSource = 0,  // a read from the source was under way
  kMemory,      // the budget was full: unreleased batches held it
  kDecode,      // bytes were there, the decode step was not done
  kPlan,        // the order of the epoch was not known yet
  kCopy,        // the batch was finished, its copy to the accelerator was not
  kTier,        // a read from the cache folder was under way
  kShare,       // reads waited for the job's share of the source
  kPeer,        // a read from another node of the cluster was under way, or held back for its join
};
inline constexpr size_t kStallCauses = 8;

inline constexpr std::array<std::string_view, kStallCauses> kStallCauseNames = {
    "source", "memory", "decode", "plan", "copy", "tier", "share", "peer"};

// One epoch of one stream.
struct EpochStats {
  uint64_t epoch = 0;
  uint64_t batches = 0;
  uint64_t samples = 0;
  uint64_t bytes = 0;
  uint64_t source_reads =
      0;  // reads finished while the epoch was consumed, for this stream's data set
  uint64_t source_bytes = 0;
  uint64_t peer_reads = 0;  // the same, of what other nodes of the cluster gave
  uint64_t peer_bytes = 0;
  int64_t wall_ns = 0;  // from the first ask to the end of the epoch
  std::array<int64_t, kStallCauses> wait_ns{};
  // Time from one batch handed out to the next, in microseconds, in order.
  std::vector<uint32_t> batch_us;

  int64_t total_wait_ns() const {
    int64_t sum = 0;
    for (int64_t w : wait_ns) sum += w;
    return sum;
  }
};

}  // namespace forebay
