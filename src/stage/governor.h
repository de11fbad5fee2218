// ReadGovernor: how many source reads to keep in flight. Pure: completions in, a limit out.
//
// Latency tells whether more parallelism helps. While the storage has room, latency stays where it
// was and throughput grows with the number in flight; once it is saturated, latency grows instead
// (the reasoning of TCP Vegas, Brakmo and Peterson 1994). The governor starts high enough for common
// storage, doubles while the latency of a window stays near the lowest seen, and steps back when the
// queue in the storage is more than half of what is in flight.
#pragma once

#include <cstddef>
#include <cstdint>

namespace forebay {

class ReadGovernor {
 public:
  struct Options {
    size_t minimum = 4;
    size_t maximum = 256;
    size_t initial = 32;
  };
  explicit ReadGovernor(const Options& options);

  // One read finished after `latency_ns`; `hungry` tells that the consumer could have used more.
  void OnRead(int64_t latency_ns, bool hungry);

  size_t limit() const { return limit_; }
  // Pins the limit (a knob set by hand); 0 hands it back to the governor.
  void Fix(size_t limit);

 private:
  void CloseWindow();

  Options options_;
  size_t limit_;
  size_t fixed_ = 0;
  double base_ns_ = 0;       // lowest mean latency of a window; drifts up so that it is re-learned
  double window_ns_ = 0;
  size_t window_reads_ = 0;
  size_t window_hungry_ = 0;
  size_t to_skip_ = 0;       // reads started under the previous limit say nothing about this one
};

}  // namespace forebay
