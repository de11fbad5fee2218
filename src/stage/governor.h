// ReadGovernor: how many source reads to keep in flight. Pure: completions in, a limit out.
//
// By Little's law the storage delivers limit / latency reads a second. The governor starts high
// enough for common storage and doubles the limit as long as that rate rises by a fifth with each
// doubling; when it does not, the storage is saturated: it takes the last step back and settles. It
// opens again when the latency at the settled limit changes by half, and probes once in a while.
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
  void MoveTo(size_t limit);

  Options options_;
  size_t limit_;
  size_t fixed_ = 0;
  double rate_before_ = 0;  // limit / latency before the last doubling; 0: none to compare with
  double settled_ns_ = 0;   // mean latency when the limit settled; 0: still growing
  size_t settled_windows_ = 0;
  double window_ns_ = 0;
  size_t window_reads_ = 0;
  size_t window_hungry_ = 0;
  size_t to_skip_ = 0;  // reads started under the previous limit say nothing about this one
};

}  // namespace forebay
