#include "source/fault_source.h"

#include <algorithm>
#include <array>
#include <cerrno>
#include <utility>

namespace forebay {

Status FaultOptions::Validate() const {
  const double shares[] = {error, short_read, flip, hang};
  double sum = 0;
  for (const double share : shares) {
    if (!(share >= 0)) return Status(Code::kInvalidArgument, "a fault's share is below 0");
    sum += share;
  }
  if (sum > 1) {
    return Status(Code::kInvalidArgument, StrCat("the faults' shares add up to ", sum));
  }
  return Status();
}

Result<std::unique_ptr<FaultSource>> FaultSource::Make(std::unique_ptr<Source> inner,
                                                       const FaultOptions& options) {
  FOREBAY_RETURN_IF_ERROR(options.Validate());
  Result<WakeFd> wake = WakeFd::Make();
  if (!wake) return wake.error();
  FOREBAY_RETURN_IF_ERROR(wake->Watch(inner->event_fd()));
  return std::unique_ptr<FaultSource>(new FaultSource(std::move(inner), options, *std::move(wake)));
}

FaultSource::FaultSource(std::unique_ptr<Source> inner, const FaultOptions& options, WakeFd wake)
    : options_(options),
      rng_(options.seed),
      slots_(inner->capacity()),
      wake_(std::move(wake)),
      inner_(std::move(inner)) {}

size_t FaultSource::Submit(std::span<const SourceRead> reads) {
  // At once, because the neighbours of a group belong to one Submit.
  to_inner_.assign(reads.begin(),
                   reads.begin() + static_cast<ptrdiff_t>(std::min(reads.size(), slots_.left())));
  for (size_t i = 0; i < to_inner_.size(); ++i) to_inner_[i].tag = slots_.Next(i);
  const size_t taken = inner_->Submit(to_inner_);
  for (const SourceRead& read : reads.first(taken)) {
    Slot& slot = slots_[slots_.Take()];
    slot.read = read;
    slot.fault = Draw();
    slot.random = rng_.Next();
  }
  return taken;
}

size_t FaultSource::Reap(std::span<SourceDone> out) {
  size_t taken = 0;
  for (; taken < out.size() && !released_.empty(); ++taken) {
    const uint32_t index = released_.back();
    released_.pop_back();
    out[taken] = std::move(slots_[index].done);
    slots_.Free(index);
  }
  if (released_.empty()) wake_.SetTime(WakeFd::kNever);
  std::array<SourceDone, 32> batch;
  while (taken < out.size()) {
    const size_t n =
        inner_->Reap(std::span(batch).first(std::min(batch.size(), out.size() - taken)));
    if (n == 0) break;
    for (SourceDone& done : std::span(batch).first(n)) {
      const uint32_t index = static_cast<uint32_t>(done.tag);
      Slot& slot = slots_[index];
      slot.done = std::move(done);
      slot.done.tag = slot.read.tag;
      // A read that failed by itself keeps its own error.
      if (slot.done.status.ok()) Inject(slot);
      if (slot.fault == Fault::kHang) {
        ++counts_.hang;
        hanging_.push_back(index);
        continue;
      }
      out[taken++] = std::move(slot.done);
      slots_.Free(index);
    }
  }
  return taken;
}

std::string FaultSource::Describe() const { return StrCat("faulty ", inner_->Describe()); }

void FaultSource::Release() {
  if (hanging_.empty()) return;
  released_.insert(released_.end(), hanging_.begin(), hanging_.end());
  hanging_.clear();
  wake_.SetTime(0);
}

FaultSource::Fault FaultSource::Draw() {
  double at = rng_.Uniform();
  if ((at -= options_.error) < 0) return Fault::kError;
  if ((at -= options_.short_read) < 0) return Fault::kShortRead;
  if ((at -= options_.flip) < 0) return Fault::kFlip;
  if ((at -= options_.hang) < 0) return Fault::kHang;
  return Fault::kNone;
}

void FaultSource::Inject(Slot& slot) {
  const std::span<std::byte> dest = slot.read.dest;
  switch (slot.fault) {
    case Fault::kNone:
    case Fault::kHang:
      return;
    case Fault::kError:
      ++counts_.error;
      slot.done.status =
          ErrnoStatus(EIO, StrCat("injected fault: read of sample ", slot.read.sample));
      return;
    case Fault::kShortRead:
      ++counts_.short_read;
      slot.done.status =
          Status(Code::kChanged, StrCat("injected fault: sample ", slot.read.sample, " has ",
                                        dest.size(), " bytes, found ", dest.size() / 2));
      return;
    case Fault::kFlip:
      if (dest.empty()) return;
      ++counts_.flip;
      dest[slot.random / 8 % dest.size()] ^= std::byte{1} << (slot.random % 8);
      return;
  }
}

}  // namespace forebay
