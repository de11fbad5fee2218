#include "core/prisma_tuner.h"

#include <algorithm>
#include <cmath>

namespace forebay {
namespace {

constexpr int64_t kSilent = 15'000'000'000;
constexpr int64_t kEvery = 100'000'000;
constexpr uint64_t kFiles = 10;

}  // namespace

PrismaTuner::PrismaTuner(const TuneOptions& options) : options_(options), files_(kFiles) {
  decision_ = {.reads = 1, .ahead_bytes = options.max_ahead_bytes, .reason = "Silent at first."};
}

const TuneDecision& PrismaTuner::Step(const TuneObservation& seen) {
  if (!started_) {
    started_ = true;
    start_ns_ = seen.now_ns;
    due_ns_ = seen.now_ns + kSilent;
  }
  if (seen.reads == 0) return decision_;
  const uint64_t file = std::max<uint64_t>(1, seen.read_bytes / seen.reads);
  decision_.ahead_bytes = std::min(options_.max_ahead_bytes, files_ * file);
  if (stopped_ || seen.now_ns - start_ns_ < kSilent) return decision_;
  const double occupied =
      100.0 * static_cast<double>(seen.ahead_bytes) / static_cast<double>(decision_.ahead_bytes);
  sum_ += occupied;
  squares_ += occupied * occupied;
  ++samples_;
  if (seen.now_ns < due_ns_ || samples_ < 2) return decision_;
  due_ns_ = seen.now_ns + kEvery;
  Decide();
  decision_.ahead_bytes = std::min(options_.max_ahead_bytes, files_ * file);
  return decision_;
}

void PrismaTuner::Decide() {
  const auto n = static_cast<double>(samples_);
  const double mean = sum_ / n;
  const double deviation = std::sqrt(std::max(0.0, squares_ / n - mean * mean));
  sum_ = squares_ = 0;
  samples_ = 0;
  if (mean >= 80 && deviation <= 20) {
    stopped_ = true;
    decision_.reason = "The buffer counts as full: stopped for good.";
  } else if (mean <= 30 || deviation <= 20) {
    decision_.reads = std::min(options_.cores, decision_.reads + 1);
    decision_.reason = "The buffer counts as empty or steady: one thread more.";
  } else {
    files_ += kFiles;
    decision_.reason = "The buffer's occupancy varies: ten files more.";
  }
}

}  // namespace forebay
