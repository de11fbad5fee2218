// StreamWatch: what a server has seen of one stream's consumer.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include "base/clock.h"
#include "metrics/stall.h"

namespace forebay {

// Pure: times are given. Waits of one stream are told in their order.
class StreamWatch {
 public:
  using Waits = std::array<Nanos, kStallCauses>;
  static constexpr int64_t kRecentSeconds = 10;

  // Waits of the last seconds.
  struct Recent {
    Nanos span = 0;  // at most kRecentSeconds
    Waits waits{};
    double WaitingShare() const;
  };

  explicit StreamWatch(uint64_t epoch = 0, Nanos now = 0) : epoch_(epoch), opened_(now) {}

  // The consumer has taken the batch `index` of `epoch`.
  void Took(uint64_t epoch, uint64_t index, uint64_t samples, uint64_t bytes);
  // The consumer's workers have fetched single samples. A late one of an epoch that is over counts
  // for the present one.
  void Fetched(uint64_t epoch, uint64_t samples, uint64_t bytes);
  void EndedEpoch() { Enter(epoch_ + 1); }
  void Sought(uint64_t epoch) { Enter(epoch); }
  void Waited(StallCause cause, Nanos from, Nanos to);

  uint64_t epoch() const { return epoch_; }
  uint64_t epoch_batches() const { return epoch_batches_; }  // the place in the epoch
  uint64_t batches() const { return batches_; }
  uint64_t samples() const { return samples_; }
  uint64_t bytes() const { return bytes_; }
  const Waits& waits() const { return waits_; }
  const Waits& epoch_waits() const { return epoch_waits_; }
  Recent LastSeconds(Nanos now) const;

 private:
  struct Second {
    int64_t number = -1;
    Waits waits{};
  };
  void Enter(uint64_t epoch);

  uint64_t epoch_;
  Nanos opened_;
  uint64_t epoch_batches_ = 0;
  uint64_t batches_ = 0;
  uint64_t samples_ = 0;
  uint64_t bytes_ = 0;
  Waits waits_{};
  Waits epoch_waits_{};
  std::array<Second, kRecentSeconds> seconds_{};  // by number modulo their count
};

}  // namespace forebay
