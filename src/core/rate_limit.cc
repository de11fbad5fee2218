#include "core/rate_limit.h"

#include <algorithm>
#include <cmath>
#include <utility>

namespace forebay {

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
  if (!(rate_ > 0)) return kNeverReady;
  const double wait = std::ceil(-level_ / rate_ * kSecond);
  if (!(wait < static_cast<double>(kNeverReady / 2))) return kNeverReady;
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

Nanos RateLimiter::ReadyAt(Nanos now) {
  const Nanos bytes = bytes_.ReadyAt(now);
  const Nanos operations = operations_.ReadyAt(now);
  held_back_.bytes |= bytes > now;
  held_back_.operations |= operations > now;
  return std::max(bytes, operations);
}

void RateLimiter::Charge(uint64_t bytes) {
  bytes_.Take(static_cast<double>(bytes));
  operations_.Take(1);
}

Nanos RateLimiter::Admit(uint64_t bytes, Nanos now) {
  const Nanos when = ReadyAt(now);
  if (when <= now) Charge(bytes);
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

RateLimiter::HeldBack RateLimiter::TakeHeldBack() { return std::exchange(held_back_, {}); }

}  // namespace forebay
