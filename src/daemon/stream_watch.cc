#include "daemon/stream_watch.h"

#include <algorithm>

namespace forebay {

double StreamWatch::Recent::WaitingShare() const {
  Nanos sum = 0;
  for (const Nanos wait : waits) sum += wait;
  return span <= 0 ? 0.0 : std::min(1.0, static_cast<double>(sum) / static_cast<double>(span));
}

void StreamWatch::Enter(uint64_t epoch) {
  epoch_ = epoch;
  epoch_batches_ = 0;
  epoch_waits_ = {};
}

void StreamWatch::Took(uint64_t epoch, uint64_t index, uint64_t samples, uint64_t bytes) {
  if (epoch != epoch_) Enter(epoch);
  epoch_batches_ = index + 1;
  ++batches_;
  samples_ += samples;
  bytes_ += bytes;
}

void StreamWatch::Fetched(uint64_t epoch, uint64_t samples, uint64_t bytes) {
  if (epoch > epoch_) Enter(epoch);
  samples_ += samples;
  bytes_ += bytes;
}

void StreamWatch::Waited(StallCause cause, Nanos from, Nanos to) {
  if (to <= from) return;
  const auto at = static_cast<size_t>(cause);
  waits_[at] += to - from;
  epoch_waits_[at] += to - from;
  // What is older than the window has no place in it.
  from = std::max(from, (to / kSecond - kRecentSeconds + 1) * kSecond);
  while (from < to) {
    const int64_t number = from / kSecond;
    const Nanos until = std::min(to, (number + 1) * kSecond);
    Second& second = seconds_[static_cast<size_t>(number % kRecentSeconds)];
    if (second.number != number) second = {number, {}};
    second.waits[at] += until - from;
    from = until;
  }
}

StreamWatch::Recent StreamWatch::LastSeconds(Nanos now) const {
  Recent recent;
  const int64_t first = now / kSecond - kRecentSeconds + 1;
  for (const Second& second : seconds_) {
    if (second.number < 0 || second.number < first) continue;
    for (size_t i = 0; i < kStallCauses; ++i) recent.waits[i] += second.waits[i];
  }
  recent.span = now - std::max(opened_, first * kSecond);
  return recent;
}

}  // namespace forebay
