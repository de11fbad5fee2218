#include "control/rate_limit.h"

#include <algorithm>
#include <cmath>

namespace forebay::control {

void TokenBucket::Refill(Nanos now) {
  if (at_ == std::numeric_limits<Nanos>::min()) {
    at_ = now;
    level_ = rate_ < kUnlimited ? Room() : 0;
    return;
  }
  if (now <= at_) return;
  if (rate_ < kUnlimited) {
    const double gained = rate_ * static_cast<double>(now - at_) / kSecond;
    level_ = std::min(Room(), level_ + gained);
  }
  at_ = now;
}

void TokenBucket::SetRate(double rate, Nanos now) {
  Refill(now);
  const bool was_free = !(rate_ < kUnlimited);
  rate_ = rate > 0 ? rate : 0;
  if (!(rate_ < kUnlimited)) {
    level_ = 0;
  } else if (was_free) {
    level_ = 0;  // what was taken without a limit is no debt, and gives no burst either
  } else {
    level_ = std::min(level_, Room());
  }
}

Nanos TokenBucket::ReadyAt(Nanos now) {
  Refill(now);
  if (!(rate_ < kUnlimited)) return now;
  // Without tokens coming, those left are still good.
  if (level_ > 0 || (level_ == 0 && rate_ > 0)) return now;
  if (!(rate_ > 0)) return kNever;
  const double wait = std::ceil(-level_ / rate_ * kSecond);
  if (!(wait < static_cast<double>(kNever / 2))) return kNever;
  // A debt below a nanosecond's worth is none.
  if (wait < 1) return now;
  return at_ + static_cast<Nanos>(wait);
}

void TokenBucket::GiveBack(double amount) {
  if (rate_ < kUnlimited) level_ = std::min(Room(), level_ + amount);
}

void RateLimiter::SetLimits(RateLimits limits, Nanos now) {
  if (limits == this->limits()) return;
  bytes_.SetRate(limits.bytes_per_s, now);
  operations_.SetRate(limits.operations_per_s, now);
}

Nanos RateLimiter::Admit(uint64_t bytes, Nanos now) {
  const Nanos when = std::max(bytes_.ReadyAt(now), operations_.ReadyAt(now));
  if (when > now) {
    held_back_ = true;
    return when;
  }
  bytes_.Take(static_cast<double>(bytes));
  operations_.Take(1);
  return when;
}

size_t RateLimiter::AdmitMany(std::span<const uint64_t> sizes, Nanos now, Nanos* again) {
  size_t count = 0;
  Nanos when = now;
  while (count < sizes.size() && (when = Admit(sizes[count], now)) <= now) ++count;
  if (again != nullptr) *again = when;
  return count;
}

void RateLimiter::GiveBack(uint64_t bytes) {
  bytes_.GiveBack(static_cast<double>(bytes));
  operations_.GiveBack(1);
}

bool RateLimiter::TakeHeldBack() {
  const bool held = held_back_;
  held_back_ = false;
  return held;
}

double EstimateDemand(double delivered, bool held_back) {
  return held_back ? kUnlimited : delivered * 1.25;
}

void SourceCapacity::Observe(double delivered, bool unmet, Nanos now) {
  if (!last_) {  // nobody knows since when this was delivered
    last_ = now;
    return;
  }
  const Nanos passed = std::max<Nanos>(0, now - *last_);
  last_ = std::max(*last_, now);
  if (!unmet) {
    spent_ = 0;
    delivered_ = 0;
    met_ += passed;
    if (met_ >= options_.forget) {
      rates_.clear();
      gain_ = options_.cruise_gain;
    }
    return;
  }
  met_ = 0;
  spent_ += passed;
  delivered_ += delivered > 0 ? delivered : 0;
  if (spent_ >= options_.window) Close(spent_);
}

void SourceCapacity::Close(Nanos length) {
  const double rate = delivered_ * kSecond / static_cast<double>(length);
  const std::optional<double> before = Estimate();
  spent_ = 0;
  delivered_ = 0;
  gain_ = options_.cruise_gain;
  rates_.push_back(rate);
  if (rates_.size() > static_cast<size_t>(options_.remembered)) rates_.pop_front();
  if (!before) {
    until_probe_ = options_.probe_every;
  } else if (rate >= *before * options_.probe_met) {
    // Only a probe lets so much through, perhaps one of some windows ago: limits take time to
    // arrive.
    gain_ = options_.probe_gain;
  } else if (--until_probe_ <= 0) {
    gain_ = options_.probe_gain;
    until_probe_ = options_.probe_every;
  }
}

std::optional<double> SourceCapacity::Estimate() const {
  double largest = 0;
  double faded = 1;
  for (auto rate = rates_.rbegin(); rate != rates_.rend(); ++rate) {
    largest = std::max(largest, *rate * faded);
    faded *= options_.fade;
  }
  if (!(largest > 0)) return std::nullopt;
  return largest;
}

double SourceCapacity::Allowance() const {
  const std::optional<double> estimate = Estimate();
  return estimate ? *estimate * gain_ : kUnlimited;
}

void SourceCapacity::Assume(double estimate, Nanos now) {
  if (!(estimate > 0) || std::isinf(estimate)) return;
  rates_.assign(1, estimate);
  until_probe_ = options_.probe_every;
  gain_ = options_.cruise_gain;
  met_ = 0;
  spent_ = 0;
  delivered_ = 0;
  last_ = now;
}

}  // namespace forebay::control
