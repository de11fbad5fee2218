#include "core/cost_model.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <numeric>

namespace forebay {
namespace {

constexpr double kMemory = 512;     // reads that a bucket remembers
constexpr double kMature = 64;      // reads after which a bucket waits for the window
constexpr double kAfterChange = 8;  // reads that what was known counts for after a change
constexpr double kChange = 0.585;   // log2 of 1.5: less is no change
constexpr double kOutlier = 16;     // times the expected latency: more counts as that much
constexpr uint64_t kStale = 65536;  // reads after which a depth that is no longer used is forgotten
constexpr uint64_t kTailReads = 128;   // before these the tail is not known
constexpr uint64_t kSureReads = 1024;  // before these the 99.9 % point is a guess
constexpr double kTailTimes = 3;       // the 99.9 % point
constexpr double kTailLeast = 8;       // times the expected latency

size_t BucketOf(double depth) {
  const auto whole = static_cast<uint64_t>(std::clamp(depth, 1.0, 4096.0));
  return static_cast<size_t>(std::bit_width(whole)) - 1;
}

uint64_t Bounded(double bytes, uint64_t least, uint64_t most) {
  if (!(bytes > static_cast<double>(least))) return least;
  return bytes < static_cast<double>(most) ? static_cast<uint64_t>(bytes) : most;
}

Nanos ToNanos(double latency) {
  constexpr double kMost = 9e18;
  return std::max<Nanos>(1, static_cast<Nanos>(std::min(latency, kMost)));
}

}  // namespace

void OriginModel::Bucket::Feed(double read_bytes, double read_depth, double read_latency) {
  weight = std::min(weight + 1, kMemory);
  const double share = 1 / weight;
  const double more_bytes = read_bytes - bytes;
  const double more_latency = read_latency - latency;
  depth += share * (read_depth - depth);
  bytes += share * more_bytes;
  latency += share * more_latency;
  var_bytes = (1 - share) * (var_bytes + share * more_bytes * more_bytes);
  var_latency = (1 - share) * (var_latency + share * more_latency * more_latency);
  cov = (1 - share) * (cov + share * more_bytes * more_latency);
}

void OriginModel::Bucket::Scale(double factor) {
  latency *= factor;
  cov *= factor;
  var_latency *= factor * factor;
  weight = std::min(weight, kAfterChange);
}

bool OriginModel::Bucket::SizesDiffer() const {
  constexpr double kLeast = 0.05;
  return weight >= 8 && var_bytes > kLeast * bytes * kLeast * bytes;
}

double OriginModel::Bucket::Slope() const {
  if (!SizesDiffer()) return 0;
  const double slope = cov / var_bytes;
  const double error = std::sqrt(std::max(0.0, var_latency - slope * cov) / (var_bytes * weight));
  if (slope < 2 * error) return 0;  // as likely chance
  return std::min(slope, latency / bytes);
}

double OriginModel::Bucket::SlopeHigh() const {
  const double all = latency / std::max(bytes, 1.0);
  if (!SizesDiffer()) return all;
  const double slope = cov / var_bytes;
  const double error = std::sqrt(std::max(0.0, var_latency - slope * cov) / (var_bytes * weight));
  return std::clamp(slope + error, 1e-9, std::max(all, 1e-9));
}

double OriginModel::Bucket::At(double read_bytes) const {
  return std::max(1.0, latency + Slope() * (read_bytes - bytes));
}

void OriginModel::Ratios::Add(double log2_ratio) {
  const double at = std::clamp((log2_ratio - kLowest) * kBinsPerOctave, 0.0, kBins - 1.0);
  bins_[static_cast<size_t>(at)] += static_cast<float>(step_);
  sum_ += step_;
  ++count_;
  step_ *= growth_;
  if (step_ < 1e6) return;
  sum_ = 0;
  for (float& bin : bins_) {
    bin = static_cast<float>(bin / step_);
    sum_ += bin;
  }
  step_ = 1;
}

void OriginModel::Ratios::Clear() {
  bins_.fill(0);
  step_ = 1;
  sum_ = 0;
  count_ = 0;
}

double OriginModel::Ratios::Quantile(double share) const {
  double left = share * sum_;
  size_t bin = 0;
  for (; bin + 1 < kBins && left > bins_[bin]; ++bin) left -= bins_[bin];
  const double within = bins_[bin] > 0 ? std::min(1.0, left / bins_[bin]) : 1;
  return kLowest + (static_cast<double>(bin) + within) / kBinsPerOctave;
}

const OriginModel::Bucket* OriginModel::Nearest(double depth) const {
  const Bucket* nearest = nullptr;
  double distance = 0;
  for (const Bucket& bucket : buckets_) {
    if (bucket.weight == 0) continue;
    const double off = std::abs(std::log2(bucket.depth / std::max(depth, 1.0)));
    if (nearest != nullptr && off >= distance) continue;
    nearest = &bucket;
    distance = off;
  }
  return nearest;
}

double OriginModel::Predict(double bytes, double depth) const {
  if (known_ == 0) return 0;
  const size_t at = BucketOf(depth);
  const bool here = (known_ >> at & 1) != 0;
  const bool above = here && buckets_[at].depth <= depth;
  // The known buckets on both sides of `depth`.
  const uint32_t low = known_ & ((uint32_t{1} << (at + (above ? 1 : 0))) - 1);
  const uint32_t high = known_ & ~low;
  if (low == 0) return buckets_[static_cast<size_t>(std::countr_zero(high))].At(bytes);
  const Bucket& below = buckets_[static_cast<size_t>(std::bit_width(low)) - 1];
  if (high == 0) return below.At(bytes);
  const Bucket& beyond = buckets_[static_cast<size_t>(std::countr_zero(high))];
  const double from = below.At(bytes);
  const double share = (depth - below.depth) / (beyond.depth - below.depth);
  return from + std::clamp(share, 0.0, 1.0) * (beyond.At(bytes) - from);
}

void OriginModel::Feed(const Seen& seen) {
  const size_t at = BucketOf(seen.depth);
  Bucket& bucket = buckets_[at];
  double latency = seen.latency;
  if (bucket.weight >= kAfterChange) {
    latency = std::min(latency, kOutlier * Predict(seen.bytes, seen.depth));
  }
  if (bucket.weight == 0 && known_ != 0) {
    // What the neighbours say counts as one read, so that the first one here does not decide alone.
    bucket.Feed(seen.bytes, seen.depth, Predict(seen.bytes, seen.depth));
  }
  bucket.Feed(seen.bytes, seen.depth, latency);
  bucket.last = reads_;
  known_ |= uint32_t{1} << at;
}

void OriginModel::OnRead(uint64_t bytes, size_t depth, Nanos latency) {
  ++reads_;
  Seen seen{.bytes = static_cast<double>(bytes),
            .latency = static_cast<double>(std::max<Nanos>(latency, 1)),
            .depth = static_cast<float>(std::clamp<size_t>(depth, 1, 1 << 20))};
  const double expected = Predict(seen.bytes, seen.depth);
  if (expected > 0) seen.log2_ratio = static_cast<float>(std::log2(seen.latency / expected));
  seen.fed = buckets_[BucketOf(seen.depth)].weight < kMature;
  if (seen.fed) Feed(seen);

  if (window_size_ == kWindow) {
    Settle(window_[window_head_]);
    window_head_ = (window_head_ + 1) % kWindow;
    --window_size_;
  }
  window_[(window_head_ + window_size_++) % kWindow] = seen;
  if (reads_ % 32 == 0) FindTypical();
  if (reads_ % 4 == 0) FollowChange();
}

// A read leaves the window: it belongs to the storage as it is.
void OriginModel::Settle(const Seen& seen) {
  if (!seen.fed) Feed(seen);
  typical_.Add(seen.log2_ratio);
  all_.Add(seen.log2_ratio);
}

void OriginModel::FindTypical() {
  for (size_t i = 0; i < kBuckets; ++i) {
    if (buckets_[i].weight == 0 || reads_ - buckets_[i].last < kStale) continue;
    buckets_[i] = Bucket();
    known_ &= ~(uint32_t{1} << i);
  }
  median_ = 0;
  slow_ = 2;
  fast_ = -2;
  late_ = std::exp2(slow_);
  if (typical_.count() >= 2 * kWindow) {
    // Half of a window beyond what a tenth of the reads go beyond is no chance, whatever the
    // latencies' distribution. A bin more, because many may be alike.
    constexpr double kBin = 1 / Ratios::kBinsPerOctave;
    median_ = typical_.Quantile(0.5);
    slow_ = std::max(median_ + kChange, typical_.Quantile(0.9) + kBin);
    fast_ = std::min(median_ - kChange, typical_.Quantile(0.1) - kBin);
    late_ = std::max(1.0, std::exp2(typical_.Quantile(0.9)));
  }
  tail_ratio_ = 0;
  if (all_.count() >= kTailReads) {
    const double least = all_.count() >= kSureReads ? kTailLeast : 2 * kTailLeast;
    tail_ratio_ = std::max(least, kTailTimes * std::exp2(all_.Quantile(0.999)));
  }
}

void OriginModel::FollowChange() {
  if (window_size_ <= kWindow / 2) return;
  const auto slow = static_cast<float>(slow_);
  const auto fast = static_cast<float>(fast_);
  size_t slower = 0;
  size_t faster = 0;
  for (const Seen& seen : window_) {
    slower += seen.log2_ratio > slow ? 1 : 0;
    faster += seen.log2_ratio < fast ? 1 : 0;
  }
  if (slower > kWindow / 2) Rescale(true);
  if (faster > kWindow / 2) Rescale(false);
}

void OriginModel::Rescale(bool slower) {
  // More than half of the window is off, a few of it by chance: the youngest are new.
  constexpr size_t kYoung = 12;
  std::array<double, kYoung> ratios{};
  for (size_t i = 0; i < kYoung; ++i) {
    const Seen& seen = window_[(window_head_ + window_size_ - kYoung + i) % kWindow];
    ratios[i] = std::log2(seen.latency / Predict(seen.bytes, seen.depth));
  }
  std::sort(ratios.begin(), ratios.end());
  const double now = std::accumulate(ratios.begin() + 4, ratios.begin() + 8, 0.0) / 4;
  if (slower ? now < slow_ : now > fast_) return;  // it was no more than an episode
  for (Bucket& bucket : buckets_) bucket.Scale(std::exp2(now - median_));
  for (size_t i = 0; i < window_size_; ++i) {
    const Seen& seen = window_[(window_head_ + i) % kWindow];
    const bool young = i + kYoung >= window_size_;
    if (young && !seen.fed) Feed(seen);
    // What may be of either time is left out.
    const bool old = slower ? seen.log2_ratio < slow_ : seen.log2_ratio > fast_;
    if (!young && old) all_.Add(seen.log2_ratio);
  }
  window_.fill({});
  window_size_ = 0;
  typical_.Clear();
  FindTypical();
}

Nanos OriginModel::Expect(uint64_t bytes, size_t depth) const {
  return ToNanos(Predict(static_cast<double>(bytes), static_cast<double>(depth)));
}

double OriginModel::Rate(uint64_t bytes, size_t depth) const {
  const double latency =
      std::max(1.0, Predict(static_cast<double>(bytes), static_cast<double>(depth)));
  return static_cast<double>(bytes) * static_cast<double>(depth) / latency * kSecond;
}

Nanos OriginModel::Tail(uint64_t bytes, size_t depth) const {
  if (tail_ratio_ == 0) return kNever;
  return ToNanos(tail_ratio_ * Predict(static_cast<double>(bytes), static_cast<double>(depth)));
}

// The bytes whose transfer takes as long as what a request costs by itself, or nothing while the
// cost of a byte is not known.
//
// Deep down most of the fixed part may be waiting for others, and sparing a request spares none of
// it: what counts is the fixed part at the smallest depth known. Where the others' bytes are what
// is waited for, the place moves as many bytes as it can, and unwanted ones only take room: told by
// a fixed part that grew, and by a rate of all reads near that of one read's own bytes.
std::optional<double> OriginModel::Balance(const Bucket& bucket) const {
  if (!bucket.SizesDiffer()) return std::nullopt;
  const double slope = bucket.SlopeHigh();
  const double fixed = std::max(0.0, bucket.latency - slope * bucket.bytes);
  double least = fixed;
  bool shallower = bucket.depth < 2;
  for (const Bucket& other : buckets_) {
    if (other.weight == 0 || other.depth > bucket.depth / 2) continue;
    shallower = true;
    const double own = other.SizesDiffer() ? other.SlopeHigh() : slope;
    least = std::min(least, std::max(0.0, other.latency - own * other.bytes));
  }
  const double alone = !shallower || fixed <= 0 ? 0 : least / fixed;
  const double moving = std::min(1.0, slope * bucket.depth * bucket.bytes / bucket.latency);
  const double idle = 1 - moving * (1 - alone);
  return idle * idle * least / slope;
}

uint64_t OriginModel::MergeGap(size_t depth) const {
  const Bucket* bucket = Nearest(static_cast<double>(depth));
  if (bucket == nullptr) return kMinGap;
  return Bounded(Balance(*bucket).value_or(0), kMinGap, kMaxGap);
}

uint64_t OriginModel::MergeBytes(size_t depth) const {
  const Bucket* bucket = Nearest(static_cast<double>(depth));
  if (bucket == nullptr) return kMinMerge;
  return Bounded(Balance(*bucket).value_or(2 * bucket->bytes), kMinMerge, kMaxMerge);
}

}  // namespace forebay
