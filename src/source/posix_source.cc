#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "base/clock.h"
#include "io/loop.h"
#include "source/shard_fds.h"
#include "source/source.h"
#include "source/wake_fd.h"

namespace forebay {
namespace {

constexpr std::array<Nanos, 3> kPauses = {10 * kMilli, 50 * kMilli, 250 * kMilli};

bool LacksDescriptors(int error) { return error == EMFILE || error == ENFILE; }

bool MayPass(int error) {
  return error == EIO || error == EAGAIN || error == ESTALE || error == ETIMEDOUT ||
         LacksDescriptors(error);
}

class PosixSource final : public Source {
 public:
  PosixSource(const Catalog& catalog, size_t max_open_shards, std::unique_ptr<Loop> loop,
              WakeFd wake)
      : catalog_(catalog),
        shards_(max_open_shards),
        slots_(loop->capacity()),
        wake_(std::move(wake)),
        loop_(std::move(loop)) {
    free_.reserve(slots_.size());
    for (size_t i = slots_.size(); i > 0; --i) free_.push_back(static_cast<uint32_t>(i - 1));
    ops_.reserve(slots_.size());
  }

  size_t Submit(std::span<const SourceRead> reads) override {
    const size_t taken = std::min(reads.size(), free_.size());
    for (const SourceRead& read : reads.first(taken)) {
      const uint32_t index = free_.back();
      free_.pop_back();
      Slot& slot = slots_[index];
      slot.read = read;
      slot.retries = 0;
      if (read.sample >= catalog_.size() || read.dest.size() != catalog_.length(read.sample)) {
        refused_.push_back(index);
        continue;
      }
      slot.extent = catalog_.extent(read.sample);
      slot.path = catalog_.ObjectPath(slot.extent.object);
      QueueOp(index);
    }
    Flush();
    SetAlarm();
    return taken;
  }

  size_t Reap(std::span<SourceDone> out) override {
    size_t taken = 0;
    for (; taken < out.size() && !refused_.empty(); ++taken) {
      const uint32_t index = refused_.back();
      refused_.pop_back();
      out[taken] = Refuse(slots_[index]);
      free_.push_back(index);
    }
    std::array<Completion, 64> batch;
    while (taken < out.size()) {
      const size_t n =
          loop_->Reap(std::span(batch).first(std::min(batch.size(), out.size() - taken)));
      for (const Completion& completion : std::span(batch).first(n)) {
        if (Finish(completion, out[taken])) ++taken;
      }
      if (n == 0) break;
    }
    RequeueDue();
    Flush();
    SetAlarm();
    return taken;
  }

  int event_fd() const override { return wake_.get(); }
  size_t capacity() const override { return slots_.size(); }
  std::string Describe() const override {
    return StrCat("posix (", loop_->name(), ") ", catalog_.root());
  }

 private:
  struct Slot {
    SourceRead read;
    Extent extent;
    std::string path;  // the loop reads it until the op is reaped
    bool has_shard = false;
    uint32_t retries = 0;
  };
  struct Retry {
    Nanos due = 0;
    uint32_t index = 0;
  };

  void QueueOp(uint32_t index) {
    Slot& slot = slots_[index];
    // The first reads of a shard go by path while its descriptor is being opened.
    const int fd = slot.extent.whole_object ? -1 : shards_.Acquire(slot.extent.object, slot.path);
    slot.has_shard = fd >= 0;
    ops_.push_back({.tag = index,
                    .fd = fd,
                    .path = slot.path.c_str(),
                    .offset = slot.extent.offset,
                    .dest = slot.read.dest,
                    .expect_end = slot.extent.whole_object,
                    .checksum = true});
  }

  void Flush() {
    if (ops_.empty()) return;
    const size_t taken = loop_->Submit(ops_);
    ops_.erase(ops_.begin(), ops_.begin() + static_cast<ptrdiff_t>(taken));
  }

  // Fills `done` and returns true, or puts the read aside for another attempt.
  bool Finish(const Completion& completion, SourceDone& done) {
    const uint32_t index = static_cast<uint32_t>(completion.tag);
    Slot& slot = slots_[index];
    if (slot.has_shard) {
      // Another attempt starts from the path: the descriptor itself may be what went stale.
      if (completion.error != 0) shards_.Forget(slot.extent.object);
      shards_.Release(slot.extent.object);
    }
    if (LacksDescriptors(completion.error)) shards_.Shrink();
    if (MayPass(completion.error) && slot.retries < kPauses.size()) {
      const Nanos due = SteadyClock().Now() + kPauses[slot.retries++];
      const auto place = std::upper_bound(retries_.begin(), retries_.end(), due,
                                          [](Nanos t, const Retry& r) { return t > r.due; });
      retries_.insert(place, Retry{due, index});
      return false;
    }
    done = {.tag = slot.read.tag,
            .status = Judge(slot, completion),
            .crc = completion.crc,
            .latency_ns = completion.latency_ns,
            .retries = slot.retries};
    free_.push_back(index);
    return true;
  }

  SourceDone Refuse(const Slot& slot) const {
    const SampleId sample = slot.read.sample;
    std::string why =
        sample >= catalog_.size()
            ? StrCat("sample ", sample, " does not exist; the catalog has ", catalog_.size())
            : StrCat("sample ", sample, " has ", catalog_.length(sample),
                     " bytes; the destination has ", slot.read.dest.size());
    return {.tag = slot.read.tag, .status = Status(Code::kInvalidArgument, std::move(why))};
  }

  Status Judge(const Slot& slot, const Completion& completion) const {
    const Extent& extent = slot.extent;
    if (completion.error == ENOENT || completion.error == ENOTDIR) {
      return Status(Code::kNotFound, StrCat(slot.path, ": no such file; ", Remedy()));
    }
    if (completion.error == EISDIR) {
      return Status(Code::kChanged, StrCat(slot.path, ": is now a folder; ", Remedy()));
    }
    if (completion.error != 0) {
      const Status status = ErrnoStatus(
          completion.error,
          StrCat(slot.path, ": read of ", extent.length, " bytes at offset ", extent.offset));
      if (slot.retries == 0) return status;
      return Status(status.code(), StrCat(status.message(), " (", slot.retries + 1, " attempts)"));
    }
    if (completion.bytes < extent.length) {
      return Status(Code::kChanged,
                    StrCat(slot.path, ": expected ", extent.length, " bytes at offset ",
                           extent.offset, ", found ", completion.bytes, "; ", Remedy()));
    }
    if (completion.longer) {
      return Status(Code::kChanged, StrCat(slot.path, ": expected ", extent.length,
                                           " bytes, found more; ", Remedy()));
    }
    if (extent.has_crc && extent.crc != completion.crc) {
      return Status(Code::kDataLoss,
                    StrCat(slot.path, ": the ", extent.length, " bytes at offset ", extent.offset,
                           " have CRC-32C ", completion.crc, ", the data set says ", extent.crc));
    }
    return Status();
  }

  std::string Remedy() const {
    return StrCat("the data set changed since it was indexed; run `forebay index --rebuild ",
                  catalog_.root(), "`");
  }

  void RequeueDue() {
    if (retries_.empty()) return;
    const Nanos now = SteadyClock().Now();
    while (!retries_.empty() && retries_.back().due <= now) {
      QueueOp(retries_.back().index);
      retries_.pop_back();
    }
  }

  void SetAlarm() {
    if (!refused_.empty()) {
      wake_.SetTime(0);
    } else {
      wake_.SetTime(retries_.empty() ? WakeFd::kNever : retries_.back().due);
    }
  }

  const Catalog& catalog_;
  ShardFds shards_;
  std::vector<Slot> slots_;  // never resized: the loop holds pointers into it
  std::vector<uint32_t> free_;
  std::vector<ReadOp> ops_;        // to be submitted
  std::vector<Retry> retries_;     // latest first
  std::vector<uint32_t> refused_;  // reads that never were valid
  WakeFd wake_;
  std::unique_ptr<Loop> loop_;  // last: it is done with all of the above before they go
};

}  // namespace

Result<std::unique_ptr<Source>> MakePosixSource(const Catalog& catalog,
                                                const PosixSourceOptions& options) {
  FOREBAY_RETURN_IF_ERROR(options.Validate());
  const LoopOptions loop_options{.max_in_flight = options.max_in_flight};
  Result<std::unique_ptr<Loop>> loop = options.io == PosixSourceOptions::Io::kUring
                                           ? MakeUringLoop(loop_options)
                                           : MakeThreadLoop(loop_options);
  if (!loop) return loop.error();
  return MakePosixSourceOn(catalog, options, *std::move(loop));
}

Result<std::unique_ptr<Source>> MakePosixSourceOn(const Catalog& catalog,
                                                  const PosixSourceOptions& options,
                                                  std::unique_ptr<Loop> loop) {
  FOREBAY_RETURN_IF_ERROR(options.Validate());
  Result<WakeFd> wake = WakeFd::Make();
  if (!wake) return wake.error();
  FOREBAY_RETURN_IF_ERROR(wake->Watch(loop->event_fd()));
  return std::unique_ptr<Source>(std::make_unique<PosixSource>(catalog, options.max_open_shards,
                                                               std::move(loop), *std::move(wake)));
}

}  // namespace forebay
