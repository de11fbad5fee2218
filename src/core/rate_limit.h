// A job's limits on the source. Pure: the caller passes the time, so nothing here waits, locks or
// reads a clock. Each object is confined to one thread or guarded by its owner.
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>

#include "base/nanos.h"

namespace forebay {

inline constexpr double kUnlimited = std::numeric_limits<double>::infinity();
inline constexpr Nanos kNeverReady = std::numeric_limits<Nanos>::max();

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

  // When a request may go: `now`, later, or kNeverReady with a rate of 0. A time in the past counts
  // as the latest that was seen.
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
  // nothing is charged and the answer is when to ask again (kNeverReady: when the limits changed).
  Nanos Admit(uint64_t bytes, Nanos now);
  // How many of these reads, in their order, may start now; those are charged. `again`, if given,
  // gets when to ask for the next one.
  size_t AdmitMany(std::span<const uint64_t> sizes, Nanos now, Nanos* again = nullptr);
  // For a read that was admitted and not made.
  void GiveBack(uint64_t bytes);

  // The two halves of Admit, for who learns a read's size only when it starts: when the next read
  // may start, and what it was. A time after `now` counts as held back.
  Nanos ReadyAt(Nanos now);
  void Charge(uint64_t bytes);

  // Which limits held a read back since the last call: the job wants more of that than it gets.
  struct HeldBack {
    bool bytes = false;
    bool operations = false;
    explicit operator bool() const { return bytes || operations; }
  };
  HeldBack TakeHeldBack();

 private:
  TokenBucket bytes_;
  TokenBucket operations_;
  HeldBack held_back_;
};

}  // namespace forebay
