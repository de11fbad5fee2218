#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdint>
#include <deque>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/clock.h"
#include "base/slots.h"
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
        slots_(loop->capacity() * PosixSourceOptions::kReadsPerOp),
        wake_(std::move(wake)),
        loop_(std::move(loop)) {
    ops_.reserve(loop_->capacity());
  }

  size_t Submit(std::span<const SourceRead> reads) override {
    const size_t taken = std::min(reads.size(), slots_.left());
    reads = reads.first(taken);
    for (size_t i = 0; i < reads.size();) {
      const uint32_t index = Admit(reads[i]);
      ++i;
      Slot& slot = slots_[index];
      if (!slot.valid) {
        slot.done = Refuse(slot.read);
        ready_.push_back(index);
        continue;
      }
      slot.members.clear();
      for (uint32_t last = index; i < reads.size() && Follows(slots_[last], reads[i]); ++i) {
        last = Admit(reads[i]);
        slot.members.push_back(last);
      }
      QueueOp(index);
    }
    Flush();
    SetAlarm();
    return taken;
  }

  size_t Reap(std::span<SourceDone> out) override {
    size_t taken = TakeReady(out);
    std::array<Completion, 64> batch;
    while (taken < out.size()) {
      const size_t n =
          loop_->Reap(std::span(batch).first(std::min(batch.size(), out.size() - taken)));
      if (n == 0) break;
      for (const Completion& completion : std::span(batch).first(n)) Finish(completion);
      taken += TakeReady(out.subspan(taken));
    }
    RequeueDue();
    Flush();
    SetAlarm();
    return taken;
  }

  int event_fd() const override { return wake_.get(); }
  size_t capacity() const override { return slots_.capacity(); }
  std::string Describe() const override {
    return StrCat("posix (", loop_->name(), ") ", catalog_.root());
  }

 private:
  struct Slot {
    SourceRead read;
    Extent extent;
    bool valid = false;  // such a sample exists, and `dest` fits it
    std::string path;    // the loop reads it until the op is reaped
    bool has_shard = false;
    std::shared_ptr<const OwnedFd> opened;  // by somebody else; kept until the op is reaped
    bool just_opened = false;
    uint32_t retries = 0;
    // Of the first one of a group: the others, and what the loop is asked for.
    std::vector<uint32_t> members;
    std::vector<ReadPart> parts;
    SourceDone done;  // of a read that is in ready_
  };
  struct Retry {
    Nanos due = 0;
    uint32_t index = 0;
  };

  uint32_t Admit(const SourceRead& read) {
    const uint32_t index = slots_.Take();
    Slot& slot = slots_[index];
    slot.read = read;
    slot.retries = 0;
    slot.members.clear();
    slot.valid = IsValid(read);
    if (slot.valid) slot.extent = catalog_.extent(read.sample);
    return index;
  }

  bool IsValid(const SourceRead& read) const {
    return read.sample < catalog_.size() && read.dest.size() == catalog_.length(read.sample);
  }

  // Whether `next` may be read together with `last`.
  bool Follows(const Slot& last, const SourceRead& next) const {
    if (next.group == 0 || next.group != last.read.group || !IsValid(next)) return false;
    if (last.extent.whole_object) return false;
    const Extent extent = catalog_.extent(next.sample);
    return extent.object == last.extent.object && !extent.whole_object &&
           extent.offset >= last.extent.offset + last.extent.length;
  }

  void QueueOp(uint32_t index) {
    Slot& slot = slots_[index];
    slot.path = catalog_.ObjectPath(slot.extent.object);
    const std::optional<FileVersion> version = VersionOf(slot.extent.object);
    int fd = UseOpened(slot);
    if (slot.opened == nullptr && !slot.extent.whole_object) {
      // The first reads of a shard go by path while its descriptor is being opened.
      fd = shards_.Acquire(slot.extent.object, slot.path, version.value_or(FileVersion{}));
      slot.has_shard = fd >= 0;
      // ShardFds asks the storage every second; each read compares what the kernel knows.
      if (catalog_.format() != Format::kGrowing) slot.just_opened = slot.has_shard;
    }
    ReadOp op{.tag = index,
              .fd = fd,
              .path = slot.path.c_str(),
              .offset = slot.extent.offset,
              .version = version,
              .just_opened = slot.just_opened,
              .change_time = catalog_.LacksStamps(),
              .checksum = true};
    if (slot.members.empty()) {
      op.dest = slot.read.dest;
      op.expect_end = slot.extent.whole_object;
    } else {
      slot.parts.assign(1, {.dest = slot.read.dest});
      uint64_t end = slot.extent.offset + slot.extent.length;
      for (const uint32_t member : slot.members) {
        const Extent& extent = slots_[member].extent;
        slot.parts.push_back({.gap = extent.offset - end, .dest = slots_[member].read.dest});
        end = extent.offset + extent.length;
      }
      op.parts = slot.parts;
    }
    ops_.push_back(op);
  }

  // The descriptor of one that somebody has open, or -1. Another attempt starts from the path.
  int UseOpened(Slot& slot) const {
    slot.has_shard = false;
    slot.opened = nullptr;
    slot.just_opened = false;
    if (catalog_.format() != Format::kGrowing || slot.retries > 0) return -1;
    HeldFile file = catalog_.OpenedFile(slot.extent.object);
    if (file.fd == nullptr) return -1;
    slot.opened = std::move(file.fd);
    slot.just_opened = file.just_opened;
    if (file.readable) return slot.opened->get();
    slot.path = StrCat("/proc/self/fd/", slot.opened->get());
    return -1;
  }

  bool IsLoose() const {
    return catalog_.format() == Format::kFolder || catalog_.format() == Format::kFileList;
  }

  // Files of a growing catalog are named by what they were when they were met. In a shard of
  // another version other bytes lie where its index says that a sample is. A loose file that has
  // changed since it was looked at is served as it is, and told.
  std::optional<FileVersion> VersionOf(ObjectId object) const {
    if (IsLoose() && !(catalog_.has_object_times() && catalog_.looked_at())) return std::nullopt;
    return FileVersion{.bytes = catalog_.ObjectSize(object),
                       .modified_ns = catalog_.ObjectTime(object)};
  }

  void Flush() {
    if (ops_.empty()) return;
    const size_t taken = loop_->Submit(ops_);
    ops_.erase(ops_.begin(), ops_.begin() + static_cast<ptrdiff_t>(taken));
  }

  // Its reads go to ready_, or are put aside for another attempt.
  void Finish(const Completion& completion) {
    const uint32_t index = static_cast<uint32_t>(completion.tag);
    Slot& slot = slots_[index];
    if (slot.has_shard) {
      // Another attempt starts from the path: the descriptor itself may be what went stale.
      if (completion.error != 0 || completion.changed) shards_.Forget(slot.extent.object);
      shards_.Release(slot.extent.object);
    }
    if (slot.opened != nullptr) {
      slot.opened = nullptr;
      slot.path = catalog_.ObjectPath(slot.extent.object);  // as errors name it
    }
    if (LacksDescriptors(completion.error)) shards_.Shrink();
    if (!slot.members.empty()) {
      FinishGroup(slot, completion);
      return;
    }
    if (MayPass(completion.error) && slot.retries < kPauses.size()) {
      const Nanos due = SteadyClock().Now() + kPauses[slot.retries++];
      const auto place = std::upper_bound(retries_.begin(), retries_.end(), due,
                                          [](Nanos t, const Retry& r) { return t > r.due; });
      retries_.insert(place, Retry{due, index});
      return;
    }
    slot.done = {.tag = slot.read.tag,
                 .status = Judge(slot, completion),
                 .crc = completion.crc,
                 .latency_ns = completion.latency_ns,
                 .retries = slot.retries,
                 .changed = completion.changed,
                 .stamp = completion.change_time_ns == 0 ? 0 : StampOf(completion.change_time_ns)};
    ready_.push_back(index);
  }

  void FinishGroup(Slot& first, const Completion& completion) {
    // Read again below, the first one is no longer a group's.
    const std::vector<uint32_t> members = std::exchange(first.members, {});
    const Extent& last = slots_[members.back()].extent;
    const bool whole = completion.error == 0 && !completion.changed &&
                       completion.bytes == last.offset + last.length - first.extent.offset;
    for (size_t i = 0; i <= members.size(); ++i) {
      const uint32_t index = i == 0 ? static_cast<uint32_t>(completion.tag) : members[i - 1];
      Slot& slot = slots_[index];
      const uint32_t crc = first.parts[i].crc;
      if (!whole || (slot.extent.has_crc && slot.extent.crc != crc)) {
        QueueOp(index);
        continue;
      }
      slot.done = {.tag = slot.read.tag,
                   .status = Status(),
                   .crc = crc,
                   .latency_ns = completion.latency_ns,
                   .group_size = static_cast<uint32_t>(members.size() + 1),
                   .gap_bytes = first.parts[i].gap};
      ready_.push_back(index);
    }
    std::vector<ReadPart>().swap(first.parts);  // there are many slots, and groups may be large
  }

  size_t TakeReady(std::span<SourceDone> out) {
    size_t taken = 0;
    for (; taken < out.size() && !ready_.empty(); ++taken) {
      const uint32_t index = ready_.front();
      ready_.pop_front();
      out[taken] = std::move(slots_[index].done);
      slots_.Free(index);
    }
    return taken;
  }

  SourceDone Refuse(const SourceRead& read) const {
    std::string why =
        read.sample >= catalog_.size()
            ? StrCat("sample ", read.sample, " does not exist; the catalog has ", catalog_.size())
            : StrCat("sample ", read.sample, " has ", catalog_.length(read.sample),
                     " bytes; the destination has ", read.dest.size());
    return {.tag = read.tag, .status = Status(Code::kInvalidArgument, std::move(why))};
  }

  Status Judge(const Slot& slot, const Completion& completion) const {
    const Extent& extent = slot.extent;
    if (completion.error == ENOENT || completion.error == ENOTDIR) {
      return Status(Code::kNotFound, StrCat(slot.path, ": no such file; ", Remedy()));
    }
    if (completion.error == EISDIR) {
      return Status(Code::kChanged, StrCat(slot.path, ": is now a folder; ", Remedy()));
    }
    if (completion.error == ESPIPE) {
      return Status(Code::kChanged, StrCat(slot.path, ": is no regular file any more; ", Remedy()));
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
    if (completion.changed && !IsLoose()) {
      return Status(Code::kChanged,
                    StrCat(slot.path, ": has another size or modification time; ", Remedy()));
    }
    if (extent.has_crc && extent.crc != completion.crc) {
      return Status(Code::kDataLoss,
                    StrCat(slot.path, ": the ", extent.length, " bytes at offset ", extent.offset,
                           " have CRC-32C ", completion.crc, ", the data set says ", extent.crc));
    }
    return Status();
  }

  std::string Remedy() const {
    if (catalog_.format() == Format::kGrowing) return "the file changed since it was opened";
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
    if (!ready_.empty()) {
      wake_.SetTime(0);
    } else {
      wake_.SetTime(retries_.empty() ? WakeFd::kNever : retries_.back().due);
    }
  }

  const Catalog& catalog_;
  ShardFds shards_;
  Slots<Slot> slots_;           // the loop holds pointers into it
  std::vector<ReadOp> ops_;     // to be submitted
  std::vector<Retry> retries_;  // latest first
  std::deque<uint32_t> ready_;  // to be reaped
  WakeFd wake_;
  std::unique_ptr<Loop> loop_;  // last: it is done with all of the above before they go
};

}  // namespace

Result<std::unique_ptr<Source>> MakePosixSource(const Catalog& catalog,
                                                const PosixSourceOptions& options) {
  FOREBAY_RETURN_IF_ERROR(options.Validate());
  const LoopOptions loop_options{.max_in_flight = options.max_in_flight};
  Result<std::unique_ptr<Loop>> loop =
      options.io == PosixSourceOptions::Io::kUring ? MakeUringLoop(loop_options)
      : options.pool != nullptr                    ? MakeThreadLoopOn(options.pool, loop_options)
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
