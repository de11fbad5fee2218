#include "core/turns.h"

#include <algorithm>

namespace forebay::peer {
namespace {

double Rate(uint64_t bytes_per_second) {
  return bytes_per_second == 0 ? kUnlimited : static_cast<double>(bytes_per_second);
}

}  // namespace

void Turns::SetRates(uint64_t all, uint64_t link, Nanos now) {
  rate_.SetRate(Rate(all), now);
  for (Queue& queue : queues_) queue.rate.SetRate(Rate(link), now);
}

bool Turns::Add(const Turn& turn) {
  Queue& queue = queues_.at(turn.node);
  if (queue.turns.size() >= kMostWaiting) return false;
  if (queue.turns.empty()) ring_.push_back(turn.node);
  const auto at = turn.urgent ? std::find_if(queue.turns.begin(), queue.turns.end(),
                                             [](const Turn& other) { return !other.urgent; })
                              : queue.turns.end();
  queue.turns.insert(at, turn);
  ++waiting_;
  return true;
}

std::optional<Turn> Turns::Next(uint64_t room, Nanos now) {
  ready_at_ = kNeverReady;
  if (waiting_ == 0) return std::nullopt;
  if (const Nanos at = rate_.ReadyAt(now); at > now) {
    ready_at_ = at;
    return std::nullopt;
  }
  for (size_t looked = ring_.size(); looked > 0; --looked) {
    const uint32_t node = ring_.front();
    Queue& queue = queues_[node];
    if (const Nanos at = queue.rate.ReadyAt(now); at > now) {
      ready_at_ = std::min(ready_at_, at);
      ring_.pop_front();
      ring_.push_back(node);
      continue;
    }
    const Turn turn = queue.turns.front();
    if (turn.bytes > room) return std::nullopt;
    ring_.pop_front();
    queue.turns.pop_front();
    if (!queue.turns.empty()) ring_.push_back(node);
    --waiting_;
    rate_.Take(static_cast<double>(turn.bytes));
    queue.rate.Take(static_cast<double>(turn.bytes));
    return turn;
  }
  return std::nullopt;
}

void Turns::Cancel(uint32_t node, uint32_t request) {
  Queue& queue = queues_.at(node);
  const size_t gone =
      std::erase_if(queue.turns, [&](const Turn& turn) { return turn.request == request; });
  waiting_ -= gone;
  if (gone > 0 && queue.turns.empty()) std::erase(ring_, node);
}

void Turns::Drop(uint32_t node) {
  Queue& queue = queues_.at(node);
  waiting_ -= queue.turns.size();
  if (!queue.turns.empty()) std::erase(ring_, node);
  queue.turns.clear();
}

}  // namespace forebay::peer
