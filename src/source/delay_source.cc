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
      inner_(std::move(inner)) {}

size_t DelaySource::Submit(std::span<const SourceRead> reads) {
  to_inner_.assign(reads.begin(),
                   reads.begin() + static_cast<ptrdiff_t>(std::min(reads.size(), slots_.left())));
  for (size_t i = 0; i < to_inner_.size(); ++i) to_inner_[i].tag = slots_.Next(i);
  const size_t taken = inner_->Submit(to_inner_);
  const Nanos now = SteadyClock().Now();
  reads = reads.first(taken);
  for (size_t i = 0; i < reads.size();) {
    // What the inner source groups is not known here: neighbours with one number are a group.
    const uint32_t group = reads[i].group;
    size_t end = i + 1;
    while (group != 0 && end < reads.size() && reads[end].group == group) ++end;
    const uint32_t first = slots_.Next();
    uint64_t bytes = 0;
    for (uint32_t next = kNone; i < end; ++i) {
      const uint32_t index = slots_.Take();
      slots_[index] = {.read = reads[i],
                       .start = now,
                       .step = open_each_ ? Step::kOpen : Step::kRead,
                       .done = {}};
      bytes += reads[i].dest.size();
      if (next != kNone) slots_[next].next = index;
      next = index;
      ++slots_[first].group_size;
    }
    slots_[first].bytes = bytes;
    Admit(first, now);
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
    out[i].group_size = slot.group_size;
    if (slot.error != 0) {
      out[i].status = Status(
          Code::kUnavailable,
          ErrnoStatus(slot.error, StrCat("delayed read of sample ", slot.read.sample)).message());
    }
    slots_.Free(index);
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
      model_.Admit(opens ? OpKind::kOpen : OpKind::kRead, opens ? 0 : slot.bytes, now);
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
    for (uint32_t index = due.index; index != kNone; index = slots_[index].next) {
      Slot& member = slots_[index];
      member.step = Step::kOver;
      member.end = due.at;
      member.error = slot.error;
      member.group_size = slot.group_size;
      if (member.inner_done) ready_.push_back(index);
    }
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

Result<std::unique_ptr<Source>> MakeDelayedSource(const Catalog& catalog,
                                                  const std::string& settings) {
  DelayOptions options;
  Result<StorageSettings> storage = StorageSettings::Parse(settings);
  if (!storage) return storage.error();
  options.storage = *std::move(storage);
  Result<std::unique_ptr<Source>> inner = MakePosixSource(catalog, {});
  if (!inner) return inner.error();
  Result<std::unique_ptr<DelaySource>> delayed = DelaySource::Make(*std::move(inner), options);
  if (!delayed) return delayed.error();
  return std::unique_ptr<Source>(*std::move(delayed));
}

}  // namespace forebay
