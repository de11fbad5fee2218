// ReadsUnderWay: what the loop thread has handed to sources and not had back, by tag.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "base/nanos.h"
#include "core/scheduler.h"

namespace forebay {

// One thread only.
class ReadsUnderWay {
 public:
  struct Read {
    ReadAction action;
    Nanos start = 0;
    uint32_t depth = 0;      // requests to the same origin when it began, itself included
    bool first = true;       // of its group
    bool looked_at = false;  // a second read was tried, or is one itself
    bool live = false;
    bool lost = false;  // its place was left: nobody waits for it
  };

  // Every round of the loop, which sleeps far less than kStopped at a time. A longer one: the
  // process was stopped, and its reads with it.
  static constexpr Nanos kStopped = 500 * kMilli;
  void Tick(Nanos now);
  // When it went on after the last stop.
  Nanos resumed() const { return resumed_; }

  uint64_t Add(const ReadAction& action, Nanos now, bool first_of_group);
  Read Remove(uint64_t tag);
  const Read& at(uint64_t tag) const { return reads_[tag]; }

  size_t size() const { return reads_.size() - free_.size(); }
  // Requests to an origin, of any data set; groups count once.
  size_t depth(Origin origin) const { return depth_[static_cast<size_t>(origin)]; }
  // How long the oldest read from a folder had taken at the last FindOldest; 0: none is left.
  Nanos oldest_tier_age() const { return depth(Origin::kTier) == 0 ? 0 : oldest_tier_age_; }
  void FindOldest(Nanos now);
  // Requests that had taken longer than kHangs at the last FindOldest.
  static constexpr Nanos kHangs = 500 * kMilli;
  size_t hanging() const { return hanging_; }
  // In any order; entries that are not live are skipped by the caller.
  std::vector<Read>& all() { return reads_; }

 private:
  std::vector<Read> reads_;
  std::vector<uint32_t> free_;
  std::array<size_t, 3> depth_{};
  Nanos ticked_ = 0;
  Nanos resumed_ = 0;
  Nanos oldest_tier_age_ = 0;
  size_t hanging_ = 0;
};

inline void ReadsUnderWay::FindOldest(Nanos now) {
  oldest_tier_age_ = 0;
  hanging_ = 0;
  for (const Read& read : reads_) {
    if (!read.live) continue;
    if (read.first && now - read.start > kHangs) ++hanging_;
    if (read.action.likely != Origin::kTier || read.lost) continue;
    oldest_tier_age_ = std::max(oldest_tier_age_, now - read.start);
  }
}

inline void ReadsUnderWay::Tick(Nanos now) {
  const Nanos passed = now - ticked_;
  if (ticked_ != 0 && passed > kStopped) {
    for (Read& read : reads_) read.start += passed;
    resumed_ = now;
  }
  ticked_ = now;
}

inline uint64_t ReadsUnderWay::Add(const ReadAction& action, Nanos now, bool first_of_group) {
  if (free_.empty()) {
    free_.push_back(static_cast<uint32_t>(reads_.size()));
    reads_.emplace_back();
  }
  const uint32_t tag = free_.back();
  free_.pop_back();
  size_t& depth = depth_[static_cast<size_t>(action.likely)];
  if (first_of_group) ++depth;
  reads_[tag] = {.action = action,
                 .start = now,
                 .depth = static_cast<uint32_t>(depth),
                 .first = first_of_group,
                 .live = true};
  return tag;
}

inline ReadsUnderWay::Read ReadsUnderWay::Remove(uint64_t tag) {
  Read& read = reads_[tag];
  if (read.first) --depth_[static_cast<size_t>(read.action.likely)];
  read.live = false;
  free_.push_back(static_cast<uint32_t>(tag));
  return read;
}

}  // namespace forebay
