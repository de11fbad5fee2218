#include "core/tuner.h"

#include <algorithm>

#include "core/forebay_tuner.h"
#include "core/prisma_tuner.h"

namespace forebay {

std::unique_ptr<Tuner> MakeTuner(const TuneOptions& options) {
  if (options.policy == TunePolicy::kPrisma) return std::make_unique<PrismaTuner>(options);
  return std::make_unique<ForebayTuner>(options);
}

void TuneMeter::OnRequest(int64_t latency_ns, Origin from) {
  ++seen_.reads;
  const auto latency = static_cast<uint64_t>(latency_ns > 0 ? latency_ns : 1);
  seen_.latency_ns += latency;
  if (from == Origin::kTier) {
    ++seen_.hits;
  } else if (latency_low_ == 0 || latency < latency_low_) {
    latency_low_ = latency;
  }
}

void TuneMeter::OnBytes(uint64_t bytes, Origin from) {
  seen_.read_bytes += bytes;
  if (from == Origin::kTier) seen_.hit_bytes += bytes;
}

void TuneMeter::OnTake(uint64_t bytes, uint64_t ready_bytes) {
  ++seen_.takes;
  seen_.consumed_bytes += bytes;
  ready_low_ = std::min(ready_low_, ready_bytes);
}

void TuneMeter::OnWaiting(uint64_t consumers, int64_t now_ns) {
  if (waiting_ > 0 && now_ns > waiting_since_) {
    seen_.stall_ns += waiting_ * static_cast<uint64_t>(now_ns - waiting_since_);
  }
  waiting_ = consumers;
  waiting_since_ = now_ns;
}

TuneObservation TuneMeter::Observe(const Now& values, int64_t now_ns) {
  OnWaiting(waiting_, now_ns);
  seen_.now_ns = now_ns;
  seen_.consumers = std::max<uint64_t>({1, values.consumers, waiting_});
  seen_.in_flight = values.in_flight;
  seen_.ready_bytes = values.ready_bytes;
  seen_.ready_low_bytes = std::min(ready_low_, values.ready_bytes);
  seen_.ahead_bytes = values.ahead_bytes;
  seen_.batch_bytes = values.batch_bytes;
  seen_.fixed_reads = values.fixed_reads;
  seen_.fixed_bytes = values.fixed_bytes;
  seen_.shared = values.shared;
  seen_.latency_low_ns = latency_low_;
  ready_low_ = ~uint64_t{0};
  latency_low_ = 0;
  return seen_;
}

}  // namespace forebay
