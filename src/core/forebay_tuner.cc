#include "core/forebay_tuner.h"

#include <algorithm>
#include <cmath>

namespace forebay {
namespace {

constexpr int64_t kMs = 1'000'000;
constexpr double kSecondNs = 1e9;

// Consumers that wait for less of their time are fed.
constexpr double kFedShare = 0.02;
// A doubling is worth it when it brings a quarter of what it could.
constexpr double kWorthIt = 0.25;
// A step down is fine when the rate stays so near the best.
constexpr double kAsGood = 0.975;
constexpr double kPlainly = 0.88;  // and has plainly failed when it falls below this
// Beyond this share of hits it is the cache folder whose rate counts.
constexpr double kHitsOnly = 0.95;
constexpr double kStepDown = 0.8;
constexpr double kStepUp = 1.25;
// Reads beyond demand x latency, so that a buffer that was drained fills again.
constexpr double kSpare = 1.12;
// A stall so soon after a step down was caused by it.
constexpr int64_t kBlame = 1'500 * kMs;
constexpr int64_t kBlameLeast = 700 * kMs;
constexpr int64_t kHoldFirst = 4'000 * kMs;
// A buffer's trial ends early and costs little, and noise may fail it.
constexpr int64_t kBufferHoldFirst = 1'500 * kMs;
constexpr int64_t kHoldLongest = 32'000 * kMs;
constexpr int64_t kProbeFirst = 1'500 * kMs;
constexpr int64_t kProbeLongest = 6'000 * kMs;
constexpr uint64_t kHeldByShare = 2;  // TuneObservation::shared

}  // namespace

ForebayTuner::ForebayTuner(const TuneOptions& options) : options_(options) {
  constexpr uint64_t kInitialBytes = uint64_t{64} << 20;
  decision_ = {.reads = std::clamp<size_t>(kInitialReads, 1, options.max_reads),
               .ahead_bytes = std::min(options.max_ahead_bytes, kInitialBytes),
               .flight_bytes = kInitialFlight,
               .reason = "The start."};
  probe_every_ns_ = kProbeFirst;
  read_hold_ns_ = kHoldFirst;
  buffer_hold_ns_ = kBufferHoldFirst;
}

// Consumers that take often have said sooner what a step down did to them.
int64_t ForebayTuner::Blame() const {
  constexpr double kTakes = 8;
  return std::clamp(static_cast<int64_t>(kTakes * take_seconds_ * kSecondNs), kBlameLeast, kBlame);
}

double ForebayTuner::ReadBytes() const { return std::max(1.0, mean_bytes_); }

void ForebayTuner::SetReads(double reads, const char* reason) {
  const auto n =
      static_cast<size_t>(std::clamp(reads, 1.0, static_cast<double>(options_.max_reads)));
  if (n == decision_.reads || last_.fixed_reads != 0) return;
  const double longer =
      std::max(1.0, static_cast<double>(n) / static_cast<double>(decision_.reads));
  const auto trip = static_cast<int64_t>(mean_latency_ * kSecondNs * longer);
  skip_until_ns_ = last_.now_ns + std::clamp<int64_t>(trip, 10 * kMs, 500 * kMs);
  decision_.reads = n;
  decision_.reason = reason;
}

void ForebayTuner::SetBuffer(double bytes, const char* reason) {
  // The batch that comes next can always be read while the one before is used.
  const double least = static_cast<double>(last_.batch_bytes);
  const auto most = static_cast<double>(options_.max_ahead_bytes);
  const auto n = static_cast<uint64_t>(std::min(std::max(bytes, least), most));
  if (n == decision_.ahead_bytes || last_.fixed_bytes != 0) return;
  const auto trip = static_cast<int64_t>(mean_latency_ * kSecondNs);
  skip_until_ns_ =
      std::max(skip_until_ns_, last_.now_ns + std::clamp<int64_t>(trip, 10 * kMs, 500 * kMs));
  decision_.ahead_bytes = n;
  decision_.reason = reason;
}

ForebayTuner::Window ForebayTuner::Close(const TuneObservation& seen) const {
  Window w;
  w.seconds = static_cast<double>(seen.now_ns - from_.now_ns) / kSecondNs;
  const auto reads = static_cast<double>(seen.reads - from_.reads);
  const auto bytes = static_cast<double>(seen.read_bytes - from_.read_bytes);
  w.reads = reads / w.seconds;
  // How many hits of the cache folder come in between is chance, and says nothing about storage.
  const auto hits = static_cast<double>(seen.hits - from_.hits);
  const bool hits_only = hits > kHitsOnly * reads;
  const double far = hits_only ? reads : reads - hits;
  const double far_bytes =
      hits_only ? bytes : bytes - static_cast<double>(seen.hit_bytes - from_.hit_bytes);
  // Sizes vary: storage that is short of operations gives an even number, storage that is short of
  // bandwidth even bytes. Half of each is steadier than either.
  w.rate = (far + far_bytes / ReadBytes()) / w.seconds / 2;
  if (reads > 0) {
    w.latency = static_cast<double>(seen.latency_ns - from_.latency_ns) / reads / kSecondNs;
  }
  w.busy = w.reads * w.latency;
  const double consumer_seconds = w.seconds * static_cast<double>(std::max<uint64_t>(
                                                  1, std::max(seen.consumers, from_.consumers)));
  w.stalled = std::min(
      1.0, static_cast<double>(seen.stall_ns - from_.stall_ns) / kSecondNs / consumer_seconds);
  const double consumed =
      static_cast<double>(seen.consumed_bytes - from_.consumed_bytes) / ReadBytes() / w.seconds;
  // Hits need no read, and what stays in memory may be read long before it is used.
  w.demand = std::min(w.reads, consumed) / (1 - std::min(0.5, w.stalled));
  w.takes = seen.takes - from_.takes;
  w.ready_low = ready_low_;
  w.ahead_high = ahead_high_;
  return w;
}

bool ForebayTuner::OnTrial() const {
  return !fed_ &&
         ((phase_ == Phase::kShrink && static_cast<double>(decision_.reads) < good_reads_) ||
          (phase_ == Phase::kHold && shrunk_buffer_ns_ != 0));
}

// A step down that seems to cost a little is watched for longer: it may be noise.
bool ForebayTuner::Doubtful(const TuneObservation& seen) const {
  if (!OnTrial()) return false;
  const double rate = Close(seen).rate;
  return rate < kAsGood * best_rate_ && rate > kPlainly * best_rate_;
}

// A step down that has plainly failed, or storage that is plainly another, is not watched to the
// end of the window.
bool ForebayTuner::Failing(const TuneObservation& seen) const {
  const int64_t elapsed = seen.now_ns - from_.now_ns;
  if (elapsed < 40 * kMs) return false;
  const Window w = Close(seen);
  if (fed_) {
    const int64_t shrunk = std::max(shrunk_reads_ns_, shrunk_buffer_ns_);
    const bool trial = shrunk != 0 && seen.now_ns - shrunk < Blame();
    return elapsed >= (trial ? 40 : 150) * kMs && w.stalled > (trial ? 5 * kFedShare : 0.5);
  }
  if (phase_ == Phase::kGrow) return false;
  if (elapsed >= 150 * kMs && w.rate < 0.5 * best_rate_) return true;
  return OnTrial() && elapsed >= 80 * kMs && w.rate < kPlainly * best_rate_ &&
         static_cast<double>(elapsed) >= 3 * mean_latency_ * kSecondNs;
}

// Whether consumers have gone away, for validation, a checkpoint or for good: what was measured
// across a pause is neither their pace nor the storage's.
bool ForebayTuner::Paused(const TuneObservation& seen) {
  constexpr int64_t kGap = 250 * kMs;
  if (seen.takes != last_.takes || seen.stall_ns != last_.stall_ns) active_ns_ = seen.now_ns;
  const auto usual = static_cast<int64_t>(5 * take_seconds_ * kSecondNs);
  return seen.now_ns - last_.now_ns > kGap ||
         seen.now_ns - active_ns_ > std::max<int64_t>(100 * kMs, usual);
}

void ForebayTuner::NoteLatency(const TuneObservation& seen) {
  const double least = static_cast<double>(seen.latency_low_ns) / kSecondNs;
  if (least > 0 && (least_latency_ == 0 || least < least_latency_)) least_latency_ = least;
}

// As at the start: how many of them are in flight is then the part's doing, by Little's law.
void ForebayTuner::OpenForShare() {
  const double most = std::max(1.0, static_cast<double>(kInitialFlight) / ReadBytes());
  const double reads = std::min(static_cast<double>(kInitialReads), most);
  if (static_cast<double>(decision_.reads) >= reads) return;
  constexpr const char* kReason = "Reads wait for their job's part of the source.";
  SetReads(reads, kReason);
  const double room =
      static_cast<double>(decision_.reads) * ReadBytes() + static_cast<double>(last_.batch_bytes);
  if (room > static_cast<double>(decision_.ahead_bytes)) SetBuffer(room, kReason);
}

void ForebayTuner::StartWindow(const TuneObservation& seen) {
  from_ = seen;
  ready_low_ = ~uint64_t{0};
  ahead_high_ = 0;
}

double ForebayTuner::Worth() const {
  const auto reads = static_cast<double>(decision_.reads);
  return before_rate_ * (1 + kWorthIt * (reads / std::max(1.0, before_reads_) - 1));
}

// That more reads help is seen at once. That they do not takes some round trips: answers may come
// in bursts, all reads of a burst having begun together.
bool ForebayTuner::GrowthIsClear(const TuneObservation& seen) const {
  constexpr double kTrips = 3;
  const Window w = Close(seen);
  if (before_rate_ > 0 && w.rate >= Worth()) return true;
  return w.seconds >= kTrips * w.latency &&
         w.reads * w.seconds >= kTrips * static_cast<double>(AtOnce(seen));
}

// How many reads of the window's mean size may be in flight.
size_t ForebayTuner::AtOnce(const TuneObservation& seen) const {
  const uint64_t bytes = seen.read_bytes - from_.read_bytes;
  if (decision_.flight_bytes == 0 || bytes == 0) return decision_.reads;
  const auto reads = static_cast<double>(seen.reads - from_.reads);
  const double most =
      static_cast<double>(decision_.flight_bytes) * reads / static_cast<double>(bytes);
  return std::clamp<size_t>(static_cast<size_t>(most), 1, decision_.reads);
}

// Once it is known how large reads are, their number says the same.
void ForebayTuner::EndFlightBound(const TuneObservation& seen) {
  const size_t reads = AtOnce(seen);
  if (reads < decision_.reads) {
    decision_.reads = reads;
    decision_.reason = "So many large reads fill the pipe at first.";
  }
  decision_.flight_bytes = 0;
}

const TuneDecision& ForebayTuner::Step(const TuneObservation& seen) {
  if (seen.fixed_reads != 0) decision_.reads = seen.fixed_reads;
  if (seen.fixed_bytes != 0) decision_.ahead_bytes = seen.fixed_bytes;
  if (seen.fixed_reads != 0) decision_.flight_bytes = 0;
  const bool first = last_.now_ns == 0;
  if (first || Paused(seen) || seen.now_ns < skip_until_ns_ ||
      (seen.reads == from_.reads && seen.stall_ns == from_.stall_ns)) {
    // Also on the way to a new limit, and while nothing is read.
    last_ = seen;
    NoteLatency(seen);
    StartWindow(seen);
    return decision_;
  }
  last_ = seen;
  NoteLatency(seen);
  if (seen.shared == kHeldByShare) {
    OpenForShare();
    StartWindow(seen);
    return decision_;
  }
  if (seen.ready_low_bytes < ready_low_) ready_low_ = seen.ready_low_bytes;
  ahead_high_ = std::max(ahead_high_, seen.ahead_bytes);

  // It may be the beginning of a pause.
  const auto usual = static_cast<int64_t>(2 * take_seconds_ * kSecondNs);
  if (seen.now_ns - active_ns_ > std::max<int64_t>(30 * kMs, usual)) return decision_;

  const bool growing = !fed_ && phase_ == Phase::kGrow;
  const int64_t shortest = growing ? 20 * kMs : 200 * kMs;
  const int64_t longest = growing ? 600 * kMs : 1'000 * kMs;
  const size_t at_once = AtOnce(seen);
  const uint64_t enough =
      growing ? std::max<uint64_t>(8, at_once) : std::max<uint64_t>(128, 2 * at_once);
  const int64_t elapsed = seen.now_ns - from_.now_ns;
  if (elapsed < longest && (elapsed < shortest || seen.reads - from_.reads < enough) &&
      !Failing(seen)) {
    return decision_;
  }
  if (growing && elapsed < longest && !GrowthIsClear(seen)) return decision_;
  if (!growing && elapsed < 300 * kMs && Doubtful(seen)) return decision_;

  const auto reads = static_cast<double>(seen.reads - from_.reads);
  if (reads > 0) {
    const double mean = static_cast<double>(seen.read_bytes - from_.read_bytes) / reads;
    const double weight = mean_bytes_ == 0 ? 1 : std::min(0.5, reads / (reads + 1000));
    mean_bytes_ += weight * (mean - mean_bytes_);
    EndFlightBound(seen);
  }
  const Window w = Close(seen);
  if (w.latency > 0) mean_latency_ = w.latency;
  if (w.takes > 0) take_seconds_ = w.seconds / static_cast<double>(w.takes);
  if (w.stalled > kFedShare) {
    OnStarved(w);
  } else {
    OnFed(w);
  }
  StartWindow(seen);
  return decision_;
}

// ---- fed -------------------------------------------------------------------------------------

void ForebayTuner::OnFed(const Window& w) {
  fed_ = true;
  starved_windows_ = 0;
  if (w.takes == 0 || w.reads <= 0) return;  // a pause says nothing about what follows it
  const int64_t now = last_.now_ns;
  const auto reads = static_cast<double>(decision_.reads);
  double target = std::max(1.0, std::ceil(w.demand * w.latency * kSpare - 0.02));
  if (now < read_floor_until_ns_) target = std::max(target, std::min(read_floor_, reads));
  if (target >= reads && now >= read_floor_until_ns_ && now - shrunk_reads_ns_ > Blame()) {
    // Reads of one batch wait for each other, which is no latency of the storage: fewer may do.
    const double fewer = std::max(1.0, std::min(std::ceil(reads * kStepDown), reads - 1));
    if (w.demand * w.latency * 0.75 <= fewer) target = fewer;
  }
  if (target < reads) {
    before_shrink_reads_ = reads;
    shrunk_reads_ns_ = now;
    SetReads(std::max(target, std::floor(reads * 0.7)), "Consumers are fed with fewer reads.");
  } else if (target > reads) {
    SetReads(target, "What consumers take needs more reads at this latency.");
  }
  // Of what no take needed, half goes; and all that was never used.
  const auto buffer = static_cast<double>(decision_.ahead_bytes);
  const auto batch = static_cast<double>(last_.batch_bytes);
  double wanted = buffer;
  if (static_cast<double>(w.ahead_high) * 1.25 < wanted) {
    wanted = static_cast<double>(w.ahead_high) * 1.25;
  }
  if (w.takes >= 3 && static_cast<double>(w.ready_low) > batch / 8) {
    wanted = std::min(wanted, buffer - static_cast<double>(w.ready_low) / 2);
  } else if (target >= reads && now >= buffer_floor_until_ns_ &&
             now - std::max(shrunk_reads_ns_, shrunk_buffer_ns_) > Blame()) {
    wanted = std::min(wanted, buffer * kStepDown);  // the buffer's turn to be tried
  }
  wanted = std::max(wanted, std::max(batch, static_cast<double>(decision_.reads) * ReadBytes()));
  if (now < buffer_floor_until_ns_) wanted = std::max(wanted, std::min(buffer_floor_, buffer));
  if (wanted < buffer * 0.97) {
    before_shrink_buffer_ = buffer;
    shrunk_buffer_ns_ = now;
    SetBuffer(wanted, "No batch needed all of the buffer.");
  }
}

// ---- starved ---------------------------------------------------------------------------------

void ForebayTuner::OnStarved(const Window& w) {
  const int64_t now = last_.now_ns;
  const auto reads = static_cast<double>(decision_.reads);
  const auto buffer = static_cast<double>(decision_.ahead_bytes);
  if (fed_) {
    bool blamed = false;
    if (shrunk_reads_ns_ != 0 && now - shrunk_reads_ns_ < Blame()) {
      blamed = true;
      shrunk_reads_ns_ = 0;
      read_floor_ = before_shrink_reads_;
      read_floor_until_ns_ = now + read_hold_ns_;
      read_hold_ns_ = std::min(2 * read_hold_ns_, kHoldLongest);
      SetReads(std::max(reads, before_shrink_reads_), "Fewer reads made consumers wait.");
    }
    if (shrunk_buffer_ns_ != 0 && now - shrunk_buffer_ns_ < Blame()) {
      blamed = true;
      shrunk_buffer_ns_ = 0;
      buffer_floor_ = before_shrink_buffer_;
      buffer_floor_until_ns_ = now + buffer_hold_ns_;
      buffer_hold_ns_ = std::min(2 * buffer_hold_ns_, kHoldLongest);
      SetBuffer(std::max(buffer, before_shrink_buffer_), "A smaller buffer made consumers wait.");
    }
    constexpr double kShort = 0.25;
    constexpr size_t kFew = 3;
    if (++starved_windows_ < kFew && w.stalled < kShort) {
      if (blamed) return;
      if (w.busy > 0.8 * reads) {
        SetReads(std::ceil(reads * kStepUp), "Consumers waited while all reads were in flight.");
      } else {
        SetBuffer(buffer * kStepUp, "Consumers waited while the buffer was full of reads.");
      }
      return;
    }
    StartGrowing("Consumers wait: the storage or their pace has changed.");
    return;
  }
  switch (phase_) {
    case Phase::kGrow:
      return Grow(w);
    case Phase::kShrink:
      return Shrink(w);
    case Phase::kHold:
      return Hold(w);
    case Phase::kLift:
      return Lift(w);
  }
}

void ForebayTuner::StartGrowing(const char* reason) {
  fed_ = false;
  starved_windows_ = 0;
  odd_windows_ = 0;
  phase_ = Phase::kGrow;
  before_rate_ = 0;
  best_rate_ = 0;
  least_latency_ = 0;
  may_leap_ = true;
  probe_every_ns_ = kProbeFirst;
  read_floor_until_ns_ = buffer_floor_until_ns_ = 0;
  read_hold_ns_ = kHoldFirst;
  buffer_hold_ns_ = kBufferHoldFirst;
  // The window lies across the change: its rate is nothing to compare with.
  Widen(reason);
}

// Twice as many reads, and the buffer that they may need.
void ForebayTuner::Widen(const char* reason) {
  SetReads(2 * static_cast<double>(decision_.reads), reason);
  const double room = 1.5 * static_cast<double>(decision_.reads) * ReadBytes() +
                      2 * static_cast<double>(last_.batch_bytes);
  if (room > static_cast<double>(decision_.ahead_bytes)) SetBuffer(room, reason);
}

// More than this no number of reads can use: those in flight, as many that came before their turn,
// and the batches around.
void ForebayTuner::TrimBuffer() {
  const double most = 2 * static_cast<double>(decision_.reads) * ReadBytes() +
                      4 * static_cast<double>(last_.batch_bytes);
  if (static_cast<double>(decision_.ahead_bytes) > most) {
    SetBuffer(most, "So many reads need no larger buffer.");
  }
}

void ForebayTuner::Grow(const Window& w) {
  const auto reads = static_cast<double>(decision_.reads);
  const auto buffer = static_cast<double>(decision_.ahead_bytes);
  const bool full = static_cast<double>(w.ahead_high) >= 0.85 * buffer;
  if (w.busy < 0.75 * reads && last_.in_flight < decision_.reads && full &&
      decision_.ahead_bytes < options_.max_ahead_bytes) {
    SetBuffer(buffer * 1.5, "The buffer kept reads from being in flight.");
    return;
  }
  if (before_rate_ > 0 && w.rate < Worth()) {
    // Saturated. Somewhere between the two limits, by what the last doubling brought.
    best_rate_ = std::max(w.rate, before_rate_);
    const double gain = std::max(1.0, w.rate / before_rate_);
    good_reads_ =
        gain > 1.03 ? std::min(reads, std::ceil(before_reads_ * gain * 1.1)) : before_reads_;
    phase_ = Phase::kShrink;
    SetReads(good_reads_, "More reads bring no more bytes.");
    if (good_reads_ == before_reads_ && before_buffer_ < buffer) {
      SetBuffer(before_buffer_, "More reads bring no more bytes.");
    }
    TrimBuffer();
    return;
  }
  // Reads that are not even asked for: the limit is not what holds consumers up. What is in flight
  // right now tells of reads that take longer than any that was answered.
  const double flying = std::max(w.busy, static_cast<double>(last_.in_flight));
  if (decision_.reads >= options_.max_reads || (flying < 0.5 * reads && !full)) {
    best_rate_ = w.rate;
    good_reads_ = reads;
    phase_ = Phase::kShrink;
    TrimBuffer();
    return;
  }
  before_rate_ = w.rate;
  before_reads_ = reads;
  before_buffer_ = buffer;
  Widen("Consumers wait and more reads may help.");
}

// The limit in force is on trial; good_reads_ is known to do.
void ForebayTuner::Shrink(const Window& w) {
  const auto reads = static_cast<double>(decision_.reads);
  if (w.rate > best_rate_)
    best_rate_ += (w.rate > 1.05 * best_rate_ ? 1 : 0.25) * (w.rate - best_rate_);
  if (reads >= good_reads_ && w.rate < kAsGood * best_rate_) {  // not on trial
    StartLift(w);
    return;
  }
  if (w.rate < kAsGood * best_rate_ && reads < std::floor(good_reads_ * kStepDown)) {
    may_leap_ = false;
    SetReads(std::floor(good_reads_ * kStepDown), "The leap was too far: a step instead.");
    return;
  }
  if (w.rate < kAsGood * best_rate_ && reads < good_reads_) {
    phase_ = Phase::kHold;
    probe_at_ns_ = last_.now_ns + probe_every_ns_;
    probe_every_ns_ = std::min(2 * probe_every_ns_, kProbeLongest);
    SetReads(good_reads_, "Fewer reads bring fewer bytes.");
    return;
  }
  if (reads <= 1) {
    phase_ = Phase::kHold;
    probe_at_ns_ = last_.now_ns + probe_every_ns_;
    good_reads_ = reads;
    return;
  }
  if (reads < good_reads_) probe_every_ns_ = kProbeFirst;
  good_reads_ = reads;
  TrimBuffer();
  double fewer = std::floor(reads * kStepDown);
  // Of a source that others share, fewer reads are a smaller part while the leap is watched.
  if (may_leap_ && least_latency_ > 0 && last_.shared == 0) {
    // Single reads are faster than the mean; what is not enough is seen at once.
    constexpr double kMean = 1.5;
    fewer = std::min(fewer, std::ceil(best_rate_ * least_latency_ * kMean));
  }
  SetReads(fewer, "Fewer reads may bring as many bytes.");
}

void ForebayTuner::Hold(const Window& w) {
  const auto reads = static_cast<double>(decision_.reads);
  const auto buffer = static_cast<double>(decision_.ahead_bytes);
  const int64_t now = last_.now_ns;
  if (shrunk_buffer_ns_ != 0 && w.rate < kAsGood * best_rate_) {
    shrunk_buffer_ns_ = 0;
    buffer_floor_ = before_shrink_buffer_;
    buffer_floor_until_ns_ = now + buffer_hold_ns_;
    buffer_hold_ns_ = std::min(2 * buffer_hold_ns_, kHoldLongest);
    SetBuffer(before_shrink_buffer_, "A smaller buffer brings fewer bytes.");
    return;
  }
  if (w.rate < 0.75 * best_rate_ || w.rate > 1.15 * best_rate_) {
    if (++odd_windows_ >= 2) StartGrowing("The storage's rate has changed.");
    return;
  }
  odd_windows_ = 0;
  if (w.busy < 0.85 * reads && std::ceil(w.busy * 1.1) < reads) {
    good_reads_ = std::ceil(w.busy * 1.1);
    SetReads(good_reads_, "The buffer holds no more reads than this.");
    return;
  }
  if (w.rate > best_rate_) {
    best_rate_ += 0.15 * (w.rate - best_rate_);
  } else if (w.rate < 0.955 * best_rate_) {
    StartLift(w);
    return;
  } else {
    best_rate_ += 0.05 * (w.rate - best_rate_);
  }
  // A leap first, to the reads in flight and the batch that they fill; what it was too far by is
  // found in steps.
  const auto batch = static_cast<double>(last_.batch_bytes);
  double smaller = buffer * kStepDown;
  if (buffer_hold_ns_ == kBufferHoldFirst) smaller = std::min(smaller, batch + reads * ReadBytes());
  if (smaller > batch && (now >= buffer_floor_until_ns_ || smaller >= buffer_floor_)) {
    before_shrink_buffer_ = buffer;
    shrunk_buffer_ns_ = now;
    SetBuffer(smaller, "A smaller buffer may do.");
    return;
  }
  shrunk_buffer_ns_ = 0;
  if (now < probe_at_ns_) return;
  probe_up_ = !probe_up_;
  if (probe_up_ && decision_.reads < options_.max_reads) {
    phase_ = Phase::kGrow;
    before_rate_ = 0;
    Grow(w);
  } else {
    phase_ = Phase::kShrink;
    Shrink(w);
  }
}

void ForebayTuner::StartLift(const Window& w) {
  constexpr const char* kReason = "The rate is below the best: a few reads more.";
  before_rate_ = w.rate;
  good_reads_ = static_cast<double>(decision_.reads);
  phase_ = Phase::kLift;
  SetReads(std::ceil(good_reads_ * kStepUp), kReason);
  const double room =
      static_cast<double>(decision_.reads) * ReadBytes() + static_cast<double>(last_.batch_bytes);
  if (static_cast<double>(decision_.ahead_bytes) < room) SetBuffer(room, kReason);
}

void ForebayTuner::Lift(const Window& w) {
  probe_at_ns_ = last_.now_ns + probe_every_ns_;
  if (w.rate > before_rate_ * 1.03) {
    phase_ = Phase::kHold;
    good_reads_ = static_cast<double>(decision_.reads);
    return;
  }
  // Then it was no limit: the storage gives less than it once seemed to.
  best_rate_ = std::max(w.rate, before_rate_);
  phase_ = Phase::kShrink;
  SetReads(good_reads_, "A few reads more bring no more bytes.");
}

}  // namespace forebay
