// A source that reads through a tier: what the tier holds comes from there, the rest from the inner
// source. Whoever has read a sample may then give a copy of it to the tier.
//
// Whatever happens to the tier, a read ends as the inner source would end it: a miss, a damaged
// copy or a failing store costs a second read, never an error.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "base/clock.h"
#include "base/status.h"
#include "catalog/catalog.h"
#include "metrics/registry.h"
#include "source/source.h"
#include "source/wake_fd.h"
#include "tier/copy_names.h"
#include "tier/tier.h"

namespace forebay {

// Names the bytes behind a catalog's sample numbers to other nodes: sizes, names, place, and
// modification times.
uint64_t TierDataset(const Catalog& catalog);

// False: the catalog has no modification times at all (an old kFileList), so that copies kept from
// an earlier job, or by another node, could be of other bytes.
bool MayOutliveTheJob(const Catalog& catalog);

// Bytes that copies on their way into tiers may take, shared by several sources. Small copies count
// for more than they have, so that Free() tells of their number, too. Safe for concurrent use by
// multiple threads.
class WriteBuffer {
 public:
  // About what a source has under way: neighbours of one read all come at once.
  static constexpr size_t kMostCopies = 2048;
  static constexpr uint64_t kLeastCharge = 1024;

  explicit WriteBuffer(uint64_t bytes) : bytes_(bytes), left_(bytes) {}
  // For one copy. False, and nothing taken, when fewer are left.
  bool Take(uint64_t bytes);
  void Give(uint64_t bytes) { left_.fetch_add(Charge(bytes), std::memory_order_relaxed); }
  uint64_t bytes() const { return bytes_; }
  uint64_t used_bytes() const { return bytes_ - left_.load(std::memory_order_relaxed); }
  double Free() const {
    return static_cast<double>(left_.load(std::memory_order_relaxed)) / static_cast<double>(bytes_);
  }

 private:
  uint64_t Charge(uint64_t bytes) const {
    return std::max({bytes, bytes_ / kMostCopies, kLeastCharge});
  }

  const uint64_t bytes_;
  std::atomic<uint64_t> left_;  // a bound only: publishes nothing
};

struct TierMetrics {
  explicit TierMetrics(Registry& registry);
  explicit TierMetrics(Mechanism& mechanism);
  Metric& hits;
  Metric& misses;
  Metric& writes;
  Metric& skipped;
  Metric& used;
  // Whoever leaves the folder sets this.
  Metric& passed_by;
  // Whoever keeps samples in memory until they are copied sets these.
  Metric& under_way;
  Metric& held;
};

class TieredSource final : public Source {
 public:
  // Copies in flight to the tier at one time, for `tier`'s capacity: inner->capacity() more are
  // reads.
  static constexpr size_t kMostWrites = WriteBuffer::kMostCopies;

  // `buffer` and `metrics` must outlive the source; samples larger than the buffer are not copied.
  // `as_files`: each copy is to be a file of its own (TierOp::as_file).
  static Result<std::unique_ptr<TieredSource>> Make(std::unique_ptr<Source> inner,
                                                    std::unique_ptr<Tier> tier, CopyNames names,
                                                    WriteBuffer& buffer, TierMetrics& metrics,
                                                    bool as_files = false);
  // Also waits for copies on their way into the tier, at most two seconds.
  ~TieredSource() override;

  size_t Submit(std::span<const SourceRead> reads) override;
  size_t Reap(std::span<SourceDone> out) override;
  int event_fd() const override { return wake_.get(); }
  size_t capacity() const override { return slots_.size(); }
  std::string Describe() const override;
  int32_t Elsewhere(SampleId sample) const override { return inner_->Elsewhere(sample); }
  bool AwaitsNodes(SampleId sample) const override { return inner_->AwaitsNodes(sample); }
  void Retire() override { inner_->Retire(); }

  // Whether completion `i` of the last Reap came from the tier.
  bool FromTier(size_t i) const { return from_tier_[i]; }
  // Whether the tier was passed by for it: where its copy is was not looked for.
  bool PassedBy(size_t i) const { return passed_by_[i]; }
  // Tags of the reads that the tier has and has not ended.
  std::vector<uint64_t> AtTier() const;
  // Of its copies.
  uint64_t group() const { return names_.group(); }
  // Whether the tier has the sample, as far as is known.
  bool Holds(SampleId sample) const {
    const TierKey key = names_.Of(sample);
    return tier_->Has(key) && !Doubtful(sample, key);
  }

  // ---- Copies. They are made of the source's own memory: the sample's is free after Store.
  //
  // Room for one of so many bytes, for one Store; nothing when there is none until others end.
  std::optional<uint32_t> ReserveCopy(size_t bytes);
  // False: the tier has it, or has no room for it; else it will be in TakeEnded once. `bytes` has
  // the length that was reserved. A copy that is not believed is compared with them, and stays if
  // it is the same.
  bool Store(uint32_t reserved, SampleId sample, std::span<const std::byte> bytes, uint32_t crc);
  // Instead of Store: the room is free again.
  void Abandon(uint32_t reserved) { FreeWrite(reserved); }
  struct Ended {
    SampleId sample = 0;
    bool stored = false;  // the tier has it
  };
  // Since the last call; Reap finds them.
  std::vector<Ended> TakeEnded() { return std::exchange(ended_, {}); }
  // Forgets the copy of a sample that no Store is under way for. False: the tier takes no more ops
  // now; else it will be in TakeDropped once, and the tier does not have it then.
  bool Drop(SampleId sample);
  std::vector<SampleId> TakeDropped() { return std::exchange(dropped_, {}); }
  // Part of the write buffer that is free, 0 to 1.
  double write_room() const { return buffer_.Free(); }
  // Copies on their way into the tier.
  size_t writes_in_flight() const { return writes_.size() - free_writes_.size(); }
  const Tier& tier() const { return *tier_; }

 private:
  struct Slot {
    SourceRead read;
    Nanos start = 0;
    bool at_tier = false;
    bool passed_by = false;
  };
  struct Write {
    std::unique_ptr<std::byte[]> bytes;
    size_t size = 0;
    SampleId sample = 0;
  };

  TieredSource(std::unique_ptr<Source> inner, std::unique_ptr<Tier> tier, CopyNames names,
               WriteBuffer& buffer, TierMetrics& metrics, bool as_files, WakeFd wake);
  // The file was changed since its copy was made, in some way that its name does not tell: the copy
  // is not believed until it was compared with what the source has.
  bool Doubtful(SampleId sample, const TierKey& key) const {
    const uint32_t now = names_.StampOfFile(sample);
    const uint32_t then = now == 0 ? 0 : tier_->StampOfCopy(key);
    return then != 0 && then != now;
  }
  size_t ReapTier(std::span<SourceDone> out);
  size_t ReapInner(std::span<SourceDone> out);
  void FlushInner();
  void EndWrite(const TierDone& done);
  void FreeWrite(uint32_t index);

  const CopyNames names_;
  const bool as_files_;
  const pid_t creator_;
  WriteBuffer& buffer_;
  TierMetrics& metrics_;
  std::vector<Slot> slots_;
  std::vector<uint32_t> free_;
  std::vector<SourceRead> to_inner_;  // accepted, and not yet by the inner source
  std::vector<Write> writes_;
  std::vector<uint32_t> free_writes_;
  std::vector<bool> from_tier_;  // of the last Reap
  std::vector<bool> passed_by_;  // of the last Reap
  std::vector<Ended> ended_;
  std::vector<SampleId> dropped_;
  WakeFd wake_;
  // After the writes: its threads read their bytes.
  std::unique_ptr<Tier> tier_;
  std::unique_ptr<Source> inner_;
};

}  // namespace forebay
