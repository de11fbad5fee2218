// FaultSource: another source with seeded faults, for tests.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "base/rng.h"
#include "base/slots.h"
#include "base/status.h"
#include "source/source.h"
#include "source/wake_fd.h"

namespace forebay {

struct FaultOptions {
  uint64_t seed = 1;
  // The share of reads that meet each fault; at most 1 together.
  double error = 0;       // ends with kUnavailable, as EIO does
  double short_read = 0;  // ends with kChanged, as a file that shrank does
  double flip = 0;        // ok, but one bit of dest differs from the bytes that `crc` was made from
  double hang = 0;        // does not complete before Release
  Status Validate() const;
};

struct FaultCounts {
  uint64_t error = 0;
  uint64_t short_read = 0;
  uint64_t flip = 0;
  uint64_t hang = 0;
};

// Confined to one thread, as every Source. Which reads fail depends on the seed and on the order of
// the accepted reads alone. Destruction drops reads that hang.
class FaultSource final : public Source {
 public:
  static Result<std::unique_ptr<FaultSource>> Make(std::unique_ptr<Source> inner,
                                                   const FaultOptions& options);

  size_t Submit(std::span<const SourceRead> reads) override;
  size_t Reap(std::span<SourceDone> out) override;
  int event_fd() const override { return wake_.get(); }
  size_t capacity() const override { return slots_.capacity(); }
  std::string Describe() const override;

  // Completes every read that hangs now.
  void Release();
  const FaultCounts& counts() const { return counts_; }

 private:
  enum class Fault : uint8_t { kNone, kError, kShortRead, kFlip, kHang };
  struct Slot {
    SourceRead read;
    Fault fault = Fault::kNone;
    uint64_t random = 0;  // which bit flips
    SourceDone done;
  };

  FaultSource(std::unique_ptr<Source> inner, const FaultOptions& options, WakeFd wake);
  Fault Draw();
  void Inject(Slot& slot);

  const FaultOptions options_;
  SplitMix64 rng_;
  FaultCounts counts_;
  Slots<Slot> slots_;
  std::vector<SourceRead> to_inner_;  // of the Submit under way
  std::vector<uint32_t> hanging_;     // read by the inner source, kept back
  std::vector<uint32_t> released_;
  WakeFd wake_;
  std::unique_ptr<Source> inner_;
};

}  // namespace forebay
