#include "metrics/registry.h"

namespace forebay {

void Metric::Raise(uint64_t n) {
  uint64_t seen = value_.load(std::memory_order_relaxed);
  while (seen < n && !value_.compare_exchange_weak(seen, n, std::memory_order_relaxed)) {
  }
}

Status Knob::Set(int64_t value) {
  if (value < minimum_ || value > maximum_) {
    return Status(Code::kInvalidArgument, StrCat("knob ", name_, " cannot be ", value,
                                                 "; it takes ", minimum_, " to ", maximum_));
  }
  value_.store(value, std::memory_order_relaxed);
  return Status();
}

Metric& Registry::Add(std::string name, std::string help, Kind kind) {
  MutexLock lock(mutex_);
  for (Entry& entry : entries_) {
    if (entry.name == name) return entry.metric;
  }
  entries_.emplace_back(std::move(name), std::move(help), kind);
  return entries_.back().metric;
}

Metric& Registry::AddCounter(std::string name, std::string help) {
  return Add(std::move(name), std::move(help), Kind::kCounter);
}

Metric& Registry::AddGauge(std::string name, std::string help) {
  return Add(std::move(name), std::move(help), Kind::kGauge);
}

Knob& Registry::AddKnob(std::string name, int64_t minimum, int64_t maximum, int64_t initial,
                        std::string meaning) {
  MutexLock lock(mutex_);
  knobs_.emplace_back(std::move(name), minimum, maximum, initial, std::move(meaning));
  return knobs_.back();
}

std::vector<Registry::Sample> Registry::Snapshot() const {
  MutexLock lock(mutex_);
  std::vector<Sample> out;
  out.reserve(entries_.size());
  for (const Entry& e : entries_) out.push_back({e.name, e.help, e.kind, e.metric.value()});
  return out;
}

std::vector<const Knob*> Registry::Knobs() const {
  MutexLock lock(mutex_);
  std::vector<const Knob*> out;
  for (const Knob& knob : knobs_) out.push_back(&knob);
  return out;
}

Status Registry::SetKnob(std::string_view name, int64_t value) {
  MutexLock lock(mutex_);
  std::string known;
  for (Knob& knob : knobs_) {
    if (knob.name() == name) return knob.Set(value);
    known += StrCat(known.empty() ? "" : ", ", knob.name());
  }
  return Status(Code::kInvalidArgument,
                StrCat("no knob is called '", name, "'; there are: ", known));
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
