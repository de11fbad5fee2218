#include "files/disk_turns.h"

namespace forebay::files {

DiskTurns::Turn::Turn(DiskTurns& turns, bool urgent, uint64_t number, const std::stop_token& stop)
    : turns_(turns) {
  MutexLock lock(turns_.mutex_);
  if (turns_.given_ < kMost) {
    ++turns_.given_;
    given_ = true;
    return;
  }
  const auto place = turns_.waiting_.emplace(std::pair(!urgent, number), this);
  turn_.wait(lock.native(), stop, [this] { return given_; });
  if (!given_) turns_.waiting_.erase(place);
}

DiskTurns::Turn::~Turn() {
  if (!given_) return;
  const MutexLock lock(turns_.mutex_);
  if (turns_.waiting_.empty()) {
    --turns_.given_;
    return;
  }
  const auto next = turns_.waiting_.begin();
  next->second->given_ = true;
  next->second->turn_.notify_one();
  turns_.waiting_.erase(next);
}

size_t DiskTurns::given() const {
  const MutexLock lock(mutex_);
  return given_;
}

size_t DiskTurns::waiting() const {
  const MutexLock lock(mutex_);
  return waiting_.size();
}

}  // namespace forebay::files
