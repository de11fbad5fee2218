#include <algorithm>
#include <chrono>

#include "files/copy_job.h"

namespace forebay::files {

bool Ticket::BeginPublishing() {
  const MutexLock lock(mutex_);
  publishing_ = !dropped_;
  return publishing_;
}

void Ticket::EndPublishing() {
  const MutexLock lock(mutex_);
  publishing_ = false;
  ended_.notify_all();
}

bool Ticket::dropped() const {
  const MutexLock lock(mutex_);
  return dropped_;
}

void Ticket::Drop(bool wait) {
  MutexLock lock(mutex_);
  dropped_ = true;
  if (!wait) return;
  ended_.wait_for(lock.native(), std::chrono::nanoseconds(kPatience),
                  [&]() NO_THREAD_SAFETY_ANALYSIS { return !publishing_; });
}

CopyPlace Room::Find(uint64_t bytes, bool may_stage, bool urgent) const {
  for (const CopyPlace place : {CopyPlace::kKept, CopyPlace::kStaged}) {
    if (place == CopyPlace::kStaged && !may_stage) break;
    const size_t i = Of(place);
    const uint64_t over = place == CopyPlace::kStaged && urgent ? most_[i] / 4 : 0;
    if (bytes <= most_[i] && used_[i] <= most_[i] + over - bytes) return place;
  }
  return CopyPlace::kNone;
}

CopyPlace Room::Reserve(uint64_t bytes, bool may_stage, bool urgent) {
  const MutexLock lock(mutex_);
  const CopyPlace place = Find(bytes, may_stage, urgent);
  if (place != CopyPlace::kNone) used_[Of(place)] += bytes;
  return place;
}

bool Room::Fits(uint64_t bytes, bool may_stage, bool urgent) const {
  const MutexLock lock(mutex_);
  return Find(bytes, may_stage, urgent) != CopyPlace::kNone;
}

void Room::Release(CopyPlace place, uint64_t bytes) {
  if (place == CopyPlace::kNone) return;
  const MutexLock lock(mutex_);
  used_[Of(place)] -= std::min(bytes, used_[Of(place)]);
}

void Room::Found(uint64_t bytes) {
  const MutexLock lock(mutex_);
  used_[0] += bytes;
}

void Room::SetMost(uint64_t kept, uint64_t staged) {
  const MutexLock lock(mutex_);
  most_[0] = kept;
  most_[1] = staged;
}

uint64_t Room::used(CopyPlace place) const {
  const MutexLock lock(mutex_);
  return used_[Of(place)];
}

uint64_t Room::left() const {
  const MutexLock lock(mutex_);
  return most_[0] - std::min(most_[0], used_[0]);
}

uint64_t Room::most(CopyPlace place) const {
  const MutexLock lock(mutex_);
  return most_[Of(place)];
}

}  // namespace forebay::files
