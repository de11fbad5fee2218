#include <algorithm>

#include "files/copy_job.h"

namespace forebay::files {

Place Room::Find(uint64_t bytes, bool may_stage, bool urgent) const {
  for (const Place place : {Place::kKept, Place::kStaged}) {
    if (place == Place::kStaged && !may_stage) break;
    const size_t i = Of(place);
    const uint64_t over = place == Place::kStaged && urgent ? most_[i] / 4 : 0;
    if (bytes <= most_[i] && used_[i] <= most_[i] + over - bytes) return place;
  }
  return Place::kNone;
}

Place Room::Reserve(uint64_t bytes, bool may_stage, bool urgent) {
  const MutexLock lock(mutex_);
  const Place place = Find(bytes, may_stage, urgent);
  if (place != Place::kNone) used_[Of(place)] += bytes;
  return place;
}

bool Room::Fits(uint64_t bytes, bool may_stage, bool urgent) const {
  const MutexLock lock(mutex_);
  return Find(bytes, may_stage, urgent) != Place::kNone;
}

void Room::Release(Place place, uint64_t bytes) {
  if (place == Place::kNone) return;
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

uint64_t Room::used(Place place) const {
  const MutexLock lock(mutex_);
  return used_[Of(place)];
}

uint64_t Room::left() const {
  const MutexLock lock(mutex_);
  return most_[0] - std::min(most_[0], used_[0]);
}

uint64_t Room::most(Place place) const {
  const MutexLock lock(mutex_);
  return most_[Of(place)];
}

}  // namespace forebay::files
