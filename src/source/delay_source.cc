#include "source/delay_source.h"

#include <algorithm>
#include <array>
#include <utility>

namespace forebay {

Status DelayOptions::Validate() const { return storage.Validate(); }

Result<std::unique_ptr<DelaySource>> DelaySource::Make(std::unique_ptr<Source> inner,
                                                       const DelayOptions& options) {
  FOREBAY_RETURN_IF_ERROR(options.Validate());
  Result<WakeFd> wake = WakeFd::Make();
  if (!wake) return wake.error();
  FOREBAY_RETURN_IF_ERROR(wake->Watch(inner->event_fd()));
  return std::unique_ptr<DelaySource>(new DelaySource(std::move(inner), options, *std::move(wake)));
}

DelaySource::DelaySource(std::unique_ptr<Source> inner, const DelayOptions& options, WakeFd wake)
    : open_each_(options.open_each),
      model_(options.storage, SteadyClock().Now()),
      slots_(inner->capacity()),
      wake_(std::move(wake)),
      inner_(std::move(inner)) {
  for (size_t i = slots_.size(); i > 0; --i) free_.push_back(static_cast<uint32_t>(i - 1));
}

size_t DelaySource::Submit(std::span<const SourceRead> reads) {
  const Nanos now = SteadyClock().Now();
  size_t taken = 0;
  while (taken < reads.size() && !free_.empty()) {
    const uint32_t index = free_.back();
    SourceRead read = reads[taken];
    read.tag = index;
    if (inner_->Submit(std::span(&read, 1)) == 0) break;
    free_.pop_back();
    slots_[index] = {.read = reads[taken],
                     .start = now,
                     .step = open_each_ ? Step::kOpen : Step::kRead,
                     .done = {}};
    Admit(index, now);
    ++taken;
  }
  SetAlarm();
  return taken;
}

size_t DelaySource::Reap(std::span<SourceDone> out) {
  TakeInner();
  Advance(SteadyClock().Now());
  const size_t taken = std::min(out.size(), ready_.size());
  for (size_t i = 0; i < taken; ++i) {
    const uint32_t index = ready_[i];
    Slot& slot = slots_[index];
    out[i] = std::move(slot.done);
    out[i].tag = slot.read.tag;
    out[i].latency_ns = std::max(out[i].latency_ns, slot.end - slot.start);
    if (slot.error != 0) {
      out[i].status = Status(
          Code::kUnavailable,
          ErrnoStatus(slot.error, StrCat("delayed read of sample ", slot.read.sample)).message());
    }
    free_.push_back(index);
  }
  ready_.erase(ready_.begin(), ready_.begin() + static_cast<ptrdiff_t>(taken));
  SetAlarm();
  return taken;
}

std::string DelaySource::Describe() const { return StrCat("delayed ", inner_->Describe()); }

Status DelaySource::Apply(const StorageSettings& storage) {
  FOREBAY_RETURN_IF_ERROR(storage.Validate());
  const Nanos now = SteadyClock().Now();
  model_.Apply(storage, now);
  for (const uint32_t index : std::exchange(swallowed_, {})) Admit(index, now);
  SetAlarm();
  return Status();
}

void DelaySource::Admit(uint32_t index, Nanos now) {
  Slot& slot = slots_[index];
  const bool opens = slot.step == Step::kOpen;
  const StorageModel::Decision decision =
      model_.Admit(opens ? OpKind::kOpen : OpKind::kRead, opens ? 0 : slot.read.dest.size(), now);
  if (decision.finish_at == StorageModel::kNever) {
    swallowed_.push_back(index);
    return;
  }
  slot.error = decision.error;
  due_.push({decision.finish_at, index});
}

void DelaySource::Advance(Nanos now) {
  while (!due_.empty() && due_.top().at <= now) {
    const Due due = due_.top();
    due_.pop();
    Slot& slot = slots_[due.index];
    if (slot.step == Step::kOpen && slot.error == 0) {
      slot.step = Step::kRead;
      Admit(due.index, now);
      continue;
    }
    slot.step = Step::kOver;
    slot.end = due.at;
    if (slot.inner_done) ready_.push_back(due.index);
  }
}

void DelaySource::TakeInner() {
  std::array<SourceDone, 32> batch;
  while (const size_t n = inner_->Reap(batch)) {
    for (SourceDone& done : std::span(batch).first(n)) {
      const uint32_t index = static_cast<uint32_t>(done.tag);
      Slot& slot = slots_[index];
      slot.done = std::move(done);
      slot.inner_done = true;
      if (slot.step == Step::kOver) ready_.push_back(index);
    }
  }
}

void DelaySource::SetAlarm() {
  if (!ready_.empty()) {
    wake_.SetTime(0);
  } else {
    wake_.SetTime(due_.empty() ? WakeFd::kNever : due_.top().at);
  }
}

}  // namespace forebay
