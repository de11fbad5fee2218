#include "stage/governor.h"

#include <algorithm>

namespace forebay {

ReadGovernor::ReadGovernor(const Options& options)
    : options_(options),
      limit_(std::clamp(options.initial, options.minimum, options.maximum)) {}

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

void ReadGovernor::CloseWindow() {
  const double mean = window_ns_ / static_cast<double>(window_reads_);
  const bool hungry = 2 * window_hungry_ >= window_reads_;
  window_ns_ = 0;
  window_reads_ = 0;
  window_hungry_ = 0;
  // One percent a window lets the base follow storage that became slower for good.
  base_ns_ = base_ns_ == 0 ? mean : std::min(base_ns_ * 1.01, mean);
  // Share of what is in flight that waits inside the storage (Little's law at the base latency).
  const double queued = mean <= 0 ? 0 : 1.0 - base_ns_ / mean;
  const size_t before = limit_;
  if (hungry && queued < 0.25) {
    limit_ = std::min(options_.maximum, limit_ * 2);
  } else if (queued > 0.5) {
    limit_ = std::max(options_.minimum, limit_ - limit_ / 4);
  }
  if (limit_ != before) to_skip_ = before;
}

}  // namespace forebay
