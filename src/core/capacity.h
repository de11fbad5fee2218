// What the source can give. Pure, and confined to one thread.
#pragma once

#include <deque>
#include <optional>

#include "base/nanos.h"
#include "core/rate_limit.h"

namespace forebay::control {

// What a job would take if it could: without bound when its limits held it back, else somewhat more
// than it got, so that it can grow.
double EstimateDemand(double delivered, bool held_back);

struct CapacityOptions {
  Nanos window = 250 * kMilli;
  int remembered = 12;        // windows
  double fade = 0.98;         // an older window's rate counts for less, by this for each newer one
  double cruise_gain = 1.03;  // handed out over the estimate: limits alone would wear it down
  int probe_every = 8;        // windows
  double probe_gain = 1.1;    // handed out in a probe, over the estimate
  double probe_met = 1.06;    // a probe that delivered this much more goes on
  double grow_gain = 1.25;    // and hands out this much
  Nanos forget = 60 * kSecond;  // without unmet demand: the next load finds out anew

  // Nodes tell of what they read one after the other: a window counts some of it too early or too
  // late. So windows are longer, and as much time is remembered as otherwise. And what is handed
  // out too much makes the source's queue longer, at the cost of those with small parts: it is
  // less.
  static CapacityOptions OfSeveralNodes();
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
