#include "core/capacity.h"

#include <algorithm>
#include <cmath>

namespace forebay::control {

double EstimateDemand(double delivered, bool held_back) {
  return held_back ? kUnlimited : delivered * 1.25;
}

CapacityOptions CapacityOptions::OfSeveralNodes() {
  constexpr int kTimes = 3;
  CapacityOptions out;
  out.window *= kTimes;
  out.remembered /= kTimes;
  out.fade = std::pow(out.fade, kTimes);
  out.probe_every /= kTimes;
  out.cruise_gain = 1.02;
  out.probe_gain = 1.08;
  out.probe_met = 1.05;
  return out;
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
    gain_ = options_.grow_gain;
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
