#include "metrics/epoch_log.h"

#include <algorithm>

namespace forebay {
namespace {

constexpr size_t kEpochsKept = 1000;

}  // namespace

void EpochLog::Begin(Nanos now) {
  if (under_way_) return;
  under_way_ = true;
  start_ = last_handout_ = now;
}

EpochStats& EpochLog::Current() {
  if (!has_entry_) {
    has_entry_ = true;
    epochs_.emplace_back();
    if (epochs_.size() > kEpochsKept) epochs_.pop_front();
  }
  return epochs_.back();
}

void EpochLog::Count(uint64_t epoch, uint64_t samples, uint64_t bytes, Nanos now, bool timed) {
  EpochStats& stats = Current();
  stats.epoch = epoch;
  ++stats.batches;
  stats.samples += samples;
  stats.bytes += bytes;
  if (timed) {
    stats.batch_us.push_back(
        static_cast<uint32_t>(std::min<Nanos>((now - last_handout_) / kMicro, ~uint32_t{0})));
  }
  last_handout_ = now;
}

void EpochLog::Waited(StallCause cause, Nanos waited) {
  if (waited != 0) Current().wait_ns[static_cast<size_t>(cause)] += waited;
}

void EpochLog::WaitedAfter(StallCause cause, Nanos waited) {
  if (!epochs_.empty()) epochs_.back().wait_ns[static_cast<size_t>(cause)] += waited;
}

EpochStats* EpochLog::End(Nanos now) {
  under_way_ = false;
  if (!has_entry_) return nullptr;
  has_entry_ = false;
  epochs_.back().wall_ns = now - start_;
  return &epochs_.back();
}

void EpochLog::EndOfStream() {
  if (has_entry_ && epochs_.back().batches == 0) epochs_.pop_back();
  under_way_ = has_entry_ = false;
}

std::vector<EpochStats> EpochLog::Stats(Nanos now) const {
  std::vector<EpochStats> out(epochs_.begin(), epochs_.end());
  if (has_entry_) out.back().wall_ns = now - start_;
  return out;
}

}  // namespace forebay
