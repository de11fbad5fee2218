#include "sim/faults/world.h"

namespace forebay::sim {
namespace {

World* current_world = nullptr;

}  // namespace

World::World(uint64_t seed, uint32_t nodes)
    : chance_(seed * 2 + 1), entropy_(seed ^ 0x5deece66dULL) {
  for (uint32_t node = 0; node < nodes; ++node) {
    offsets_.push_back(static_cast<Nanos>(chance_.Below(100)) * kSecond);
  }
  current_world = this;
}

World::~World() { current_world = nullptr; }

World* World::Current() { return current_world; }

void World::At(Nanos time, uint32_t node, std::function<void()> what) {
  events_.emplace(std::pair(time > now_ ? time : now_, next_++), Event{node, std::move(what)});
}

Nanos World::NextEvent() const {
  return events_.empty() ? INT64_MAX : events_.begin()->first.first;
}

uint32_t World::RunEvent() {
  auto first = events_.begin();
  GoTo(first->first.first);
  const Event event = std::move(first->second);
  events_.erase(first);
  current_ = event.node;
  event.what();
  return event.node;
}

}  // namespace forebay::sim
