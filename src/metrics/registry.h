// Registry: the one place where a process's metrics and knobs are declared.
//
// Names follow forebay_<part>_<what>_<unit>; each is listed in docs/metrics.md (checked in CI).
#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"
#include "base/thread_annotations.h"

namespace forebay {

// A value that only grows, or a gauge that is set. Safe for concurrent use by multiple threads.
class Metric {
 public:
  void Add(uint64_t n) { value_.fetch_add(n, std::memory_order_relaxed); }
  void Set(uint64_t n) { value_.store(n, std::memory_order_relaxed); }
  void Raise(uint64_t n);  // keeps the largest
  uint64_t value() const { return value_.load(std::memory_order_relaxed); }

 private:
  std::atomic<uint64_t> value_{0};
};

// A tunable number with its range and meaning. Safe for concurrent use by multiple threads.
class Knob {
 public:
  Knob(std::string name, int64_t minimum, int64_t maximum, int64_t initial, std::string meaning)
      : name_(std::move(name)),
        minimum_(minimum),
        maximum_(maximum),
        meaning_(std::move(meaning)),
        value_(initial) {}

  int64_t value() const { return value_.load(std::memory_order_relaxed); }
  // kInvalidArgument, naming knob and range, leaves the value as it was.
  Status Set(int64_t value);

  const std::string& name() const { return name_; }
  int64_t minimum() const { return minimum_; }
  int64_t maximum() const { return maximum_; }
  const std::string& meaning() const { return meaning_; }

 private:
  const std::string name_;
  const int64_t minimum_;
  const int64_t maximum_;
  const std::string meaning_;
  std::atomic<int64_t> value_;
};

// Metrics and knobs live as long as the registry; references stay valid. Safe for concurrent use.
class Registry {
 public:
  enum class Kind { kCounter, kGauge };
  struct Sample {
    std::string name;
    std::string help;
    Kind kind;
    uint64_t value;
  };

  Metric& AddCounter(std::string name, std::string help);
  Metric& AddGauge(std::string name, std::string help);
  Knob& AddKnob(std::string name, int64_t minimum, int64_t maximum, int64_t initial,
                std::string meaning);

  std::vector<Sample> Snapshot() const;
  std::vector<const Knob*> Knobs() const;
  // An unknown name's error lists the knobs there are.
  Status SetKnob(std::string_view name, int64_t value);
  // Prometheus text exposition format 0.0.4.
  std::string PrometheusText() const;

 private:
  struct Entry {
    std::string name;
    std::string help;
    Kind kind;
    Metric metric;
    Entry(std::string n, std::string h, Kind k) : name(std::move(n)), help(std::move(h)), kind(k) {}
  };
  Metric& Add(std::string name, std::string help, Kind kind);

  mutable Mutex mutex_;
  std::deque<Entry> entries_ GUARDED_BY(mutex_);  // deque: references survive growth
  std::deque<Knob> knobs_ GUARDED_BY(mutex_);
};

}  // namespace forebay
