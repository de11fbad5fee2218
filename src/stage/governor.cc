#include "stage/governor.h"

#include <algorithm>

namespace forebay {

ReadGovernor::ReadGovernor(const Options& options)
    : options_(options), limit_(std::clamp(options.initial, options.minimum, options.maximum)) {}

void ReadGovernor::Fix(size_t limit) {
  fixed_ = std::min(limit, options_.maximum);
  if (fixed_ != 0) limit_ = fixed_;
}

void ReadGovernor::OnRead(int64_t latency_ns, bool hungry) {
  if (fixed_ != 0) return;
  if (to_skip_ > 0) {
    --to_skip_;
    return;
  }
  window_ns_ += static_cast<double>(latency_ns);
  window_hungry_ += hungry ? 1 : 0;
  if (++window_reads_ >= std::max<size_t>(8, limit_ / 2)) CloseWindow();
}

void ReadGovernor::MoveTo(size_t limit) {
  limit = std::clamp(limit, options_.minimum, options_.maximum);
  // First end those that were under way, then the burst that fills the difference: only what begins
  // after it meets the storage as it will be.
  if (limit != limit_) to_skip_ = std::max(limit, limit_) + limit - std::min(limit, limit_);
  limit_ = limit;
}

void ReadGovernor::CloseWindow() {
  constexpr double kWorthIt = 1.2;
  constexpr double kChanged = 1.5;
  constexpr size_t kProbeEvery = 64;
  const double mean = std::max(1.0, window_ns_ / static_cast<double>(window_reads_));
  const bool hungry = 2 * window_hungry_ >= window_reads_;
  const double rate = static_cast<double>(limit_) / mean;
  window_ns_ = 0;
  window_reads_ = 0;
  window_hungry_ = 0;

  if (settled_ns_ != 0) {
    const bool changed = mean > settled_ns_ * kChanged || mean < settled_ns_ / kChanged;
    if (!hungry || (!changed && ++settled_windows_ < kProbeEvery)) return;
    settled_ns_ = 0;
    rate_before_ = 0;
  }
  if (rate_before_ != 0 && rate < rate_before_ * kWorthIt) {
    // The last doubling brought nothing: undo it. What a read takes at the smaller limit follows.
    settled_ns_ = mean / 2;
    settled_windows_ = 0;
    rate_before_ = 0;
    MoveTo(limit_ / 2);
    return;
  }
  if (!hungry || limit_ == options_.maximum) {
    rate_before_ = 0;
    return;
  }
  rate_before_ = rate;
  MoveTo(limit_ * 2);
}

}  // namespace forebay
