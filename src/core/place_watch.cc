#include "core/place_watch.h"

#include <algorithm>

namespace forebay {

Nanos PlaceWatch::Patience(Nanos tail, Nanos source) {
  constexpr Nanos kMuchSlower = 4;  // than the source: it is no use to leave a place for a slower
  const Nanos own = std::clamp(tail, kLeastPatience, kMostPatience);
  return source > OriginModel::kNever / kMuchSlower ? OriginModel::kNever
                                                    : std::max(own, kMuchSlower * source);
}

void PlaceWatch::PauseLonger() {
  pause_ = pause_ == 0 ? kFirstPause : std::min(2 * pause_, kLongestPause);
}

bool PlaceWatch::Suspects(Nanos now, Nanos silent, Nanos patience) {
  if (left_ || silent <= patience) return false;
  left_ = true;
  if (now - used_since_ > kServedLong) pause_ = 0;
  PauseLonger();
  probe_at_ = now + pause_;
  return true;
}

bool PlaceWatch::OnProbeAnswered(Nanos now, Nanos took, Nanos patience) {
  probing_ = false;
  if (!left_) return false;
  if (took > patience) {
    PauseLonger();
    probe_at_ = now + pause_;
    return false;
  }
  left_ = false;
  used_since_ = now;
  return true;
}

}  // namespace forebay
