// Registry: the one place where a process's metrics and knobs are declared.
//
// What can be tuned is a mechanism: prefetch, read-ahead, a tier. Its knobs are the only way to
// tune it, and those of several mechanisms are set together or not at all.
//
// Names follow forebay_<part>_<what>_<unit>; each is listed in docs/metrics.md (checked in CI).
#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <span>
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

enum class KnobType : uint8_t { kCount, kSwitch, kBytes, kBytesPerSecond, kPerSecond, kSeconds };
std::string_view KnobTypeName(KnobType type);

// A tunable number with its type, range and meaning. Only Registry::Apply sets it. Safe for
// concurrent use by multiple threads.
class Knob {
 public:
  Knob(std::string name, KnobType type, int64_t minimum, int64_t maximum, int64_t initial,
       std::string meaning)
      : name_(std::move(name)),
        type_(type),
        minimum_(minimum),
        maximum_(maximum),
        meaning_(std::move(meaning)),
        value_(initial) {}

  int64_t value() const { return value_.load(std::memory_order_relaxed); }
  const std::string& name() const { return name_; }
  KnobType type() const { return type_; }
  int64_t minimum() const { return minimum_; }
  int64_t maximum() const { return maximum_; }
  const std::string& meaning() const { return meaning_; }

 private:
  friend class Registry;
  const std::string name_;
  const KnobType type_;
  const int64_t minimum_;
  const int64_t maximum_;
  const std::string meaning_;
  std::atomic<int64_t> value_;
};

class Registry;

// A part of the data plane that can be tuned while it runs: a name, its knobs and its metrics. Made
// by Registry::AddMechanism, which keeps it. Safe for concurrent use by multiple threads.
class Mechanism {
 public:
  Mechanism(Registry& registry, std::string name, std::string meaning)
      : registry_(registry), name_(std::move(name)), meaning_(std::move(meaning)) {}

  Metric& AddCounter(std::string name, std::string help);
  Metric& AddGauge(std::string name, std::string help);
  Knob& AddKnob(std::string name, KnobType type, int64_t minimum, int64_t maximum, int64_t initial,
                std::string meaning);

  const std::string& name() const { return name_; }
  const std::string& meaning() const { return meaning_; }

 private:
  Registry& registry_;
  const std::string name_;
  const std::string meaning_;
};

struct KnobSetting {
  std::string name;
  int64_t value = 0;
};

// Metrics, mechanisms and knobs live as long as the registry; references stay valid. Safe for
// concurrent use.
class Registry {
 public:
  enum class Kind { kCounter, kGauge };
  struct Sample {
    std::string name;
    std::string help;
    Kind kind;
    uint64_t value;
  };
  // What a mechanism has, for those who list it.
  struct MechanismInfo {
    const Mechanism* mechanism;
    std::vector<const Knob*> knobs;
    std::vector<std::string> metrics;
  };

  // Each returns what there is under that name already.
  Mechanism& AddMechanism(std::string name, std::string meaning);
  Metric& AddCounter(std::string name, std::string help);
  Metric& AddGauge(std::string name, std::string help);

  std::vector<Sample> Snapshot() const;
  std::vector<MechanismInfo> Mechanisms() const;
  std::vector<const Knob*> Knobs() const;
  // All of them, or none: kInvalidArgument names what is wrong and what may be, and leaves every
  // knob as it was.
  Status Apply(std::span<const KnobSetting> settings);
  Status SetKnob(std::string name, int64_t value) {
    const KnobSetting one{std::move(name), value};
    return Apply({&one, 1});
  }
  // If a knob was set since `*seen` (0 at first), `read` is called while none can be set, so that
  // it sees all that was set together or nothing of it.
  template <typename Read>
  void ReadKnobs(uint64_t* seen, Read read) const {
    if (version_.load(std::memory_order_acquire) == *seen) return;
    MutexLock lock(mutex_);
    *seen = version_.load(std::memory_order_relaxed);
    read();
  }
  // Prometheus text exposition format 0.0.4.
  std::string PrometheusText() const;

 private:
  friend class Mechanism;
  struct Entry {
    std::string name;
    std::string help;
    Kind kind;
    const Mechanism* mechanism;
    Metric metric;
    Entry(std::string n, std::string h, Kind k, const Mechanism* m)
        : name(std::move(n)), help(std::move(h)), kind(k), mechanism(m) {}
  };
  struct Tunable {
    const Mechanism* mechanism;
    Knob knob;
    Tunable(const Mechanism* m, std::string name, KnobType type, int64_t minimum, int64_t maximum,
            int64_t initial, std::string meaning)
        : mechanism(m),
          knob(std::move(name), type, minimum, maximum, initial, std::move(meaning)) {}
  };
  Metric& Add(std::string name, std::string help, Kind kind, const Mechanism* mechanism);
  Status Check(const KnobSetting& setting, Knob** found) REQUIRES(mutex_);

  mutable Mutex mutex_;
  // Deques: references survive growth.
  std::deque<Entry> entries_ GUARDED_BY(mutex_);
  std::deque<Mechanism> mechanisms_ GUARDED_BY(mutex_);
  std::deque<Tunable> knobs_ GUARDED_BY(mutex_);
  std::atomic<uint64_t> version_{1};
};

}  // namespace forebay
