// How a scan walks over a shard: header by header with small reads (hop), or through everything in
// large ones (stream). What is read whole on the way goes to an EarlySink.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "base/clock.h"
#include "base/status.h"
#include "catalog/byte_reader.h"
#include "catalog/early_sink.h"

namespace forebay {

// What the scans of all shards of a build share: what a small read costs, how much is left, and
// who reads payloads. Safe for concurrent use by multiple threads.
class ScanPlan {
 public:
  enum class Step : uint8_t {
    kHop,      // step over the payload
    kPayload,  // read the payload and what follows it; EndPayload when it is there
    kStream,   // read everything from here on
  };
  // Payloads that are read while other shards are walked by small reads. Small reads wait for
  // nobody else, so without these the storage's bandwidth would lie idle meanwhile; more of them
  // would hold up the small ones. Four of 110 KiB use 300 MB/s at 1 ms.
  static constexpr int kPayloadReads = 4;
  // Larger ones are left to the engine, which reads them in the order of their use.
  static constexpr uint64_t kMaxPayload = uint64_t{1} << 20;
  // What a storage is taken to give to large reads, before anything is known of it.
  static constexpr double kBytesPerSecond = 5e8;

  // `sink` may be null; it is borrowed.
  ScanPlan(size_t shards, EarlySink* sink);
  // A shard of so many bytes is about to be scanned; what the others have is estimated by those.
  void OnOpen(uint64_t bytes);

  // What to do about `gap` bytes of payload, with `left` bytes of the shard to go.
  Step Next(uint64_t gap, uint64_t left);
  void EndPayload() { payload_reads_.fetch_sub(1, std::memory_order_relaxed); }
  // A small read took so long.
  void OnHop(Nanos took);
  // A scan has come so much farther.
  void OnProgress(uint64_t bytes) {
    left_.fetch_sub(static_cast<int64_t>(bytes), std::memory_order_relaxed);
  }
  void OnShardDone() { done_.fetch_add(1, std::memory_order_relaxed); }
  size_t piece_bytes() const { return piece_bytes_; }
  EarlySink* sink() const { return sink_; }

 private:
  EarlySink* const sink_;
  const size_t piece_bytes_;
  const int64_t shards_;
  std::atomic<int64_t> opened_ = 0;
  std::atomic<int64_t> done_ = 0;
  std::atomic<int64_t> opened_bytes_ = 0;
  std::atomic<int64_t> left_ = 0;  // bytes to go in those
  std::atomic<Nanos> hop_ = 0;     // what a small read takes; 0: not known
  std::atomic<int> payload_reads_ = 0;
};

// A window over one shard. For one thread.
class ShardReader {
 public:
  // Without a plan: gaps above this are stepped over.
  static constexpr uint64_t kSkip = uint64_t{128} << 10;
  static constexpr size_t kPiece = size_t{960} << 10;

  // Small reads take `small_read` bytes at first, and then what turned out to be needed between two
  // payloads. Both are borrowed; `plan` may be null.
  ShardReader(ByteReader& reader, size_t small_read, ScanPlan* plan)
      : reader_(reader),
        plan_(plan),
        first_small_(small_read),
        small_(small_read),
        contiguous_(plan == nullptr) {
    if (plan_ != nullptr) plan_->OnOpen(reader_.size());
  }
  ~ShardReader();

  // Where payloads end, as far as an index file is to be believed: what follows them is read many
  // at a time, by up to `threads` threads. Sorted.
  void SetHints(std::vector<uint64_t> payload_ends, size_t threads) {
    hints_ = std::move(payload_ends);
    hint_threads_ = threads;
  }

  // `length` bytes at `offset`, fewer only at the end of the object. Valid until the next call.
  Result<std::span<const std::byte>> At(uint64_t offset, size_t length);

  // A sample begins here: its bytes are held together, if they are read at all, until the next one
  // begins.
  void BeginSample(uint64_t offset) { sample_ = offset; }
  // The scan has no use for these bytes of the sample.
  Status SkipPayload(uint64_t offset, uint64_t length);
  // The bytes of the sample since BeginSample, when all of them were read; else empty.
  std::span<const std::byte> Held(uint64_t offset, uint64_t length) const;

 private:
  uint64_t end() const { return start_ + buffer_.size(); }
  // Whether the open sample's bytes are there from its beginning, for the sink.
  bool HoldsSample() const;
  Status Fetch(uint64_t offset, size_t length);
  // In place of what is there.
  Status ReadAt(uint64_t offset, size_t length);
  // Behind what is there, of which only what lies at or after `keep` stays: on to `until`, and
  // `least` bytes at least.
  Status ReadOn(uint64_t keep, uint64_t until, size_t least);
  void LearnSmall(uint64_t payload);
  // Puts what was read by a hint into the place of what is there; false: there is none.
  bool TakeHinted(uint64_t offset, size_t length);
  void ReadHinted(uint64_t offset, size_t length);

  ByteReader& reader_;
  ScanPlan* const plan_;
  const size_t first_small_;
  size_t small_;
  size_t most_needed_ = 0;
  size_t hops_ = 0;
  uint64_t hop_start_ = 0;  // where the bytes between two payloads begin
  bool contiguous_;         // large pieces one after the other; else payloads are stepped over
  std::vector<std::byte> buffer_;
  uint64_t start_ = 0;   // where in the object buffer_ begins
  uint64_t sample_ = 0;  // where the open sample begins
  uint64_t told_ = 0;    // progress, as the plan knows it
  std::vector<uint64_t> hints_;
  size_t hint_threads_ = 1;
  size_t next_hint_ = 0;  // those before it were read
  struct Hinted {
    uint64_t offset = 0;
    size_t length = 0;
    std::vector<std::byte> bytes;  // empty: not read
  };
  std::vector<Hinted> hinted_;  // by offset
};

}  // namespace forebay
