// PRISMA's rule, to compare with: silent for 15 s; then every 100 ms the mean and the deviation of
// the buffer's occupancy (in percent, reads in flight included) decide. Mean >= 80 and deviation <=
// 20: it stops for good. Mean <= 30 or deviation <= 20: one thread more. Otherwise ten files more
// buffer. It never shrinks, and has no more threads than cores.
#pragma once

#include "core/tuner.h"

namespace forebay {

class PrismaTuner : public Tuner {
 public:
  explicit PrismaTuner(const TuneOptions& options);
  const TuneDecision& Step(const TuneObservation& seen) override;
  const TuneDecision& decision() const override { return decision_; }

 private:
  void Decide();

  const TuneOptions options_;
  TuneDecision decision_;
  uint64_t files_;
  bool started_ = false;
  bool stopped_ = false;
  int64_t start_ns_ = 0;
  int64_t due_ns_ = 0;
  double sum_ = 0, squares_ = 0;  // of the occupancy since the last decision
  size_t samples_ = 0;
};

}  // namespace forebay
