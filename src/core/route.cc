#include "core/route.h"

#include <algorithm>

namespace forebay::peer {

Choice Choose(const Found& found, uint32_t self, std::span<const Reach> reach, bool may_wait) {
  const auto at = [&](uint32_t node) {
    return node < reach.size() && node != self ? reach[node] : Reach::kNone;
  };
  if (found.home != self && found.home != kNoNode) {
    const Reach home = at(found.home);
    if (home >= Reach::kUnannounced) {
      return {.to = Choice::To::kPeer, .node = found.home, .held_only = false};
    }
    if (home == Reach::kExpected && may_wait) {
      return {.to = Choice::To::kWait, .node = found.home, .held_only = false};
    }
  }
  if (found.holder != kNoNode && at(found.holder) >= Reach::kUnannounced) {
    return {.to = Choice::To::kPeer, .node = found.holder, .held_only = true};
  }
  // Those that have not said what they hold may have a copy from an earlier run.
  if (found.home == self && found.holder == kNoNode && may_wait) {
    for (uint32_t node = 0; node < reach.size(); ++node) {
      const Reach other = at(node);
      if (other == Reach::kExpected || other == Reach::kUnannounced) {
        return {.to = Choice::To::kWait, .node = node, .held_only = false};
      }
    }
  }
  return {};
}

void PeerCost::OnAsk(Nanos now) {
  if (in_flight_++ == 0) active_at_ = now;
}

void PeerCost::OnAnswer(uint64_t bytes, size_t depth, Nanos latency, Nanos now) {
  if (in_flight_ > 0) --in_flight_;
  active_at_ = now;
  refused_ = 0;
  model_.OnRead(bytes, depth, latency);
}

void PeerCost::OnFailure(Nanos now) {
  if (in_flight_ > 0) --in_flight_;
  active_at_ = now;
}

void PeerCost::OnRefused(Nanos now) {
  OnFailure(now);
  refused_ = std::min(refused_ + 1, kMostRefused);
}

void PeerCost::OnTimeout(uint64_t bytes, size_t depth, Nanos waited, Nanos now) {
  OnAnswer(bytes, depth, waited, now);
}

bool PeerCost::Avoid(uint64_t bytes, const OriginModel& source, size_t source_depth, Nanos now) {
  if (refused_ == kMostRefused) return !Probe(now);
  if (!source.known()) return false;
  Nanos expected = model_.known() ? model_.Expect(bytes, in_flight_ + 1) : 0;
  // How long it has been silent tells before its answers do.
  if (in_flight_ > 0) expected = std::max(expected, now - active_at_);
  if (expected <= healthy_ || expected <= kSlower * source.Expect(bytes, source_depth + 1)) {
    return false;
  }
  return !Probe(now);
}

bool PeerCost::Probe(Nanos now) {
  if (now - probed_ < kProbeEvery) return false;
  probed_ = now;
  return true;
}

}  // namespace forebay::peer
