// A job's limits on the source, and what the source can give. Pure: the caller passes the time, so
// nothing here waits, locks or reads a clock. Each object is confined to one thread or guarded by
// its owner.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <limits>
#include <optional>
#include <span>

#include "base/clock.h"
#include "control/fair_share.h"

namespace forebay::control {

inline constexpr Nanos kNever = std::numeric_limits<Nanos>::max();

// Tokens that come at a rate; at most `burst` worth of them is kept. A request is let through while
// no debt is left and may itself make one, so that a read may be larger than the burst; the debt is
// one request's at most, and the rate holds over any time longer than the burst.
class TokenBucket {
 public:
  explicit TokenBucket(double rate = kUnlimited, Nanos burst = 50 * kMilli)
      : rate_(rate), burst_(burst) {}

  // Tokens at `now` stay as they are, cut to the new burst; a debt is paid at the new rate.
  void SetRate(double rate, Nanos now);
  double rate() const { return rate_; }

  // When a request may go: `now`, later, or kNever with a rate of 0. A time in the past counts as
  // the latest that was seen.
  Nanos ReadyAt(Nanos now);
  void Take(double amount) {
    if (rate_ < kUnlimited) level_ -= amount;
  }
  // For what was taken and not used.
  void GiveBack(double amount);

 private:
  void Refill(Nanos now);
  double Room() const { return rate_ * static_cast<double>(burst_) / kSecond; }

  double rate_;
  Nanos burst_;
  double level_ = 0;
  Nanos at_ = std::numeric_limits<Nanos>::min();
};

struct RateLimits {
  double bytes_per_s = kUnlimited;
  double operations_per_s = kUnlimited;

  bool operator==(const RateLimits&) const = default;
};

// One job's two buckets. The caller asks before each read and never waits here: it asks again at
// the time it was told, or when the limits changed.
class RateLimiter {
 public:
  explicit RateLimiter(RateLimits limits = {}, Nanos burst = 50 * kMilli)
      : bytes_(limits.bytes_per_s, burst), operations_(limits.operations_per_s, burst) {}

  void SetLimits(RateLimits limits, Nanos now);
  RateLimits limits() const { return {bytes_.rate(), operations_.rate()}; }

  // A read of `bytes` may start now: it is charged, and the answer is at most `now`. Otherwise
  // nothing is charged and the answer is when to ask again (kNever: when the limits changed).
  Nanos Admit(uint64_t bytes, Nanos now);
  // How many of these reads, in their order, may start now; those are charged. `again`, if given,
  // gets when to ask for the next one.
  size_t AdmitMany(std::span<const uint64_t> sizes, Nanos now, Nanos* again = nullptr);
  // For a read that was admitted and not made.
  void GiveBack(uint64_t bytes);

  // Whether a read was held back since the last call: the job wants more than its limits.
  bool TakeHeldBack();

 private:
  TokenBucket bytes_;
  TokenBucket operations_;
  bool held_back_ = false;
};

// What a job would take if it could: without bound when its limits held it back, else somewhat more
// than it got, so that it can grow.
double EstimateDemand(double delivered, bool held_back);

struct CapacityOptions {
  Nanos window = 250 * kMilli;
  int remembered = 12;        // windows
  double fade = 0.98;         // an older window's rate counts for less, by this for each newer one
  double cruise_gain = 1.03;  // handed out over the estimate: limits alone would wear it down
  int probe_every = 8;        // windows
  double probe_gain = 1.25;   // handed out in a probe, over the estimate
  double probe_met = 1.08;    // a probe that delivered this much more goes on
  Nanos forget = 60 * kSecond;  // without unmet demand: the next load finds out anew
};

// The source's capacity in one unit, from what it delivered while demand was unmet.
//
// Time is cut into windows; one during which demand was unmet throughout tells a rate. The estimate
// is the largest of the last ones, older ones faded: a few slow windows do not lower it, a slower
// source does within seconds. Since the limits that come from the estimate hide what a faster
// source could give, every few windows a little more is handed out (Allowance); as long as that is
// delivered the next window gets more again. Time without unmet demand does not fade.
class SourceCapacity {
 public:
  explicit SourceCapacity(CapacityOptions options = {}) : options_(options) {}

  // `delivered` since the call before, and whether somebody waited for more all that time.
  void Observe(double delivered, bool unmet, Nanos now);

  // Units a second; none until demand was unmet for a whole window.
  std::optional<double> Estimate() const;
  // What to divide among the jobs now: somewhat more than the estimate, in a probe yet more,
  // kUnlimited while it is unknown.
  double Allowance() const;
  // Takes over what another found, such as the controller before this one.
  void Assume(double estimate, Nanos now);

 private:
  void Close(Nanos length);

  CapacityOptions options_;
  std::deque<double> rates_;  // of saturated windows, oldest first
  std::optional<Nanos> last_;
  Nanos spent_ = 0;       // in the open window
  double delivered_ = 0;  // likewise
  Nanos met_ = 0;         // time since demand was last unmet
  int until_probe_ = 0;
  double gain_ = options_.cruise_gain;
};

}  // namespace forebay::control
