// The virtual world of the fault simulator: one clock, one queue of events, one source of chance.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "base/clock.h"
#include "base/rng.h"

namespace forebay::sim {

// One thread only. While it lives SteadyClock() tells the time of its current node.
class World {
 public:
  static constexpr uint32_t kNobody = UINT32_MAX;

  World(uint64_t seed, uint32_t nodes);
  ~World();
  World(const World&) = delete;
  World& operator=(const World&) = delete;
  // The one that lives; null: none does.
  static World* Current();

  Nanos now() const { return now_; }
  // Of the node's own clock.
  Nanos Local(uint32_t node) const { return now_ + offsets_[node]; }
  Nanos Local() const { return current_ == kNobody ? now_ : Local(current_); }
  void Jump(uint32_t node, Nanos by) { offsets_[node] += by; }
  // Whose code runs.
  void SetCurrent(uint32_t node) { current_ = node; }
  uint32_t current() const { return current_; }

  // `node` runs after the event.
  void At(Nanos time, uint32_t node, std::function<void()> what);
  void In(Nanos wait, uint32_t node, std::function<void()> what) {
    At(now_ + wait, node, std::move(what));
  }
  Nanos NextEvent() const;  // INT64_MAX: there is none
  // Goes to `time`; events that are due by then come first.
  uint32_t RunEvent();
  void GoTo(Nanos time) {
    if (time > now_) now_ = time;
  }

  SplitMix64& chance() { return chance_; }
  Nanos Between(Nanos low, Nanos high) {
    return low + static_cast<Nanos>(chance_.Below(static_cast<uint64_t>(high - low) + 1));
  }
  bool OneIn(uint64_t n) { return n != 0 && chance_.Below(n) == 0; }
  // What the system's random numbers are drawn from.
  SplitMix64& entropy() { return entropy_; }

  // ---- for the substitutes of the sockets of membership (substitutes.cc)
  // Names in the abstract namespace of Unix sockets.
  struct Sockets {
    // Where a connection of `from` to host:port leads.
    std::function<std::string(uint32_t from, const std::string& host)> dialed;
    std::function<std::string(uint32_t node)> listening;
  } sockets;
  // Who holds the list of members, and where, by the file that nodes share; empty: there is none.
  std::pair<uint32_t, std::string> holder_note;

 private:
  struct Event {
    uint32_t node = 0;
    std::function<void()> what;
  };
  Nanos now_ = 1000 * kSecond;
  std::vector<Nanos> offsets_;
  uint32_t current_ = kNobody;
  std::map<std::pair<Nanos, uint64_t>, Event> events_;
  uint64_t next_ = 0;
  SplitMix64 chance_;
  SplitMix64 entropy_;
};

}  // namespace forebay::sim
