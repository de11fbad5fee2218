#include "metrics/registry.h"

#include <algorithm>
#include <cstddef>

namespace forebay {

void Metric::Raise(uint64_t n) {
  uint64_t seen = value_.load(std::memory_order_relaxed);
  while (seen < n && !value_.compare_exchange_weak(seen, n, std::memory_order_relaxed)) {
  }
}

std::string_view KnobTypeName(KnobType type) {
  switch (type) {
    case KnobType::kCount:
      return "count";
    case KnobType::kSwitch:
      return "switch";
    case KnobType::kBytes:
      return "bytes";
    case KnobType::kBytesPerSecond:
      return "bytes_per_second";
    case KnobType::kPerSecond:
      return "per_second";
    case KnobType::kSeconds:
      return "seconds";
  }
  return "count";
}

Metric& Mechanism::AddCounter(std::string name, std::string help) {
  return registry_.Add(std::move(name), std::move(help), Registry::Kind::kCounter, this);
}

Metric& Mechanism::AddGauge(std::string name, std::string help) {
  return registry_.Add(std::move(name), std::move(help), Registry::Kind::kGauge, this);
}

Knob& Mechanism::AddKnob(std::string name, KnobType type, int64_t minimum, int64_t maximum,
                         int64_t initial, std::string meaning) {
  MutexLock lock(registry_.mutex_);
  for (Registry::Tunable& each : registry_.knobs_) {
    if (each.knob.name() == name) return each.knob;
  }
  registry_.knobs_.emplace_back(this, std::move(name), type, minimum, maximum, initial,
                                std::move(meaning));
  return registry_.knobs_.back().knob;
}

Mechanism& Registry::AddMechanism(std::string name, std::string meaning) {
  MutexLock lock(mutex_);
  for (Mechanism& each : mechanisms_) {
    if (each.name() == name) return each;
  }
  return mechanisms_.emplace_back(*this, std::move(name), std::move(meaning));
}

Metric& Registry::Add(std::string name, std::string help, Kind kind, const Mechanism* mechanism) {
  MutexLock lock(mutex_);
  for (Entry& entry : entries_) {
    if (entry.name == name) return entry.metric;
  }
  return entries_.emplace_back(std::move(name), std::move(help), kind, mechanism).metric;
}

Metric& Registry::AddCounter(std::string name, std::string help) {
  return Add(std::move(name), std::move(help), Kind::kCounter, nullptr);
}

Metric& Registry::AddGauge(std::string name, std::string help) {
  return Add(std::move(name), std::move(help), Kind::kGauge, nullptr);
}

std::vector<Registry::Sample> Registry::Snapshot() const {
  MutexLock lock(mutex_);
  std::vector<Sample> out;
  out.reserve(entries_.size());
  for (const Entry& e : entries_) out.push_back({e.name, e.help, e.kind, e.metric.value()});
  return out;
}

std::vector<Registry::MechanismInfo> Registry::Mechanisms() const {
  MutexLock lock(mutex_);
  std::vector<MechanismInfo> out;
  for (const Mechanism& mechanism : mechanisms_) {
    MechanismInfo& info = out.emplace_back();
    info.mechanism = &mechanism;
    for (const Tunable& each : knobs_) {
      if (each.mechanism == &mechanism) info.knobs.push_back(&each.knob);
    }
    for (const Entry& each : entries_) {
      if (each.mechanism == &mechanism) info.metrics.push_back(each.name);
    }
  }
  return out;
}

std::vector<const Knob*> Registry::Knobs() const {
  MutexLock lock(mutex_);
  std::vector<const Knob*> out;
  for (const Tunable& each : knobs_) out.push_back(&each.knob);
  return out;
}

Status Registry::Check(const KnobSetting& setting, Knob** found) {
  std::string known;
  for (Tunable& each : knobs_) {
    Knob& knob = each.knob;
    known += StrCat(known.empty() ? "" : ", ", knob.name());
    if (knob.name() != setting.name) continue;
    if (setting.value < knob.minimum() || setting.value > knob.maximum()) {
      return Status(Code::kInvalidArgument,
                    StrCat("knob ", knob.name(), " cannot be ", setting.value, "; it takes ",
                           knob.minimum(), " to ", knob.maximum()));
    }
    *found = &knob;
    return Status();
  }
  return Status(Code::kInvalidArgument,
                StrCat("no knob is called '", setting.name, "'; there are: ", known));
}

Status Registry::Apply(std::span<const KnobSetting> settings) {
  MutexLock lock(mutex_);
  std::vector<Knob*> found(settings.size());
  for (size_t i = 0; i < settings.size(); ++i) {
    FOREBAY_RETURN_IF_ERROR(Check(settings[i], &found[i]));
    if (std::find(found.begin(), found.begin() + static_cast<ptrdiff_t>(i), found[i]) !=
        found.begin() + static_cast<ptrdiff_t>(i)) {
      return Status(Code::kInvalidArgument,
                    StrCat("knob ", settings[i].name, " is set twice; name it once"));
    }
  }
  for (size_t i = 0; i < settings.size(); ++i) {
    found[i]->value_.store(settings[i].value, std::memory_order_relaxed);
  }
  version_.fetch_add(1, std::memory_order_release);
  return Status();
}

std::string Registry::PrometheusText() const {
  std::string out;
  for (const Sample& s : Snapshot()) {
    out += StrCat("# HELP ", s.name, " ", s.help, "\n# TYPE ", s.name, " ",
                  s.kind == Kind::kCounter ? "counter" : "gauge", "\n", s.name, " ", s.value, "\n");
  }
  return out;
}

}  // namespace forebay
