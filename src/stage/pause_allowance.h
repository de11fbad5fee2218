// PauseAllowance: how long read-ahead may stand still for the cache folder's sake. Pure.
#pragma once

#include <algorithm>

#include "base/clock.h"

namespace forebay {

// One part in fifty of the time; what is not used is kept, up to a second, so that a folder that
// begins to hang late in a long job cannot hold the reader up for longer than that.
class PauseAllowance {
 public:
  static constexpr Nanos kOneIn = 50;
  static constexpr Nanos kMost = kSecond;

  explicit PauseAllowance(Nanos now) : asked_(now) {}

  bool pausing() const { return pausing_; }
  // Whether to stand still from now on, until the next call.
  bool Ask(bool wanted, Nanos now) {
    const Nanos passed = now - asked_;
    asked_ = now;
    left_ = std::min(left_ + passed / kOneIn, kMost);
    if (pausing_) left_ -= passed;
    pausing_ = wanted && left_ > 0;
    return pausing_;
  }

 private:
  Nanos asked_;
  Nanos left_ = 0;
  bool pausing_ = false;
};

}  // namespace forebay
