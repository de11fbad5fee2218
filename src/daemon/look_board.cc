#include "daemon/look_board.h"

#include <algorithm>
#include <utility>

namespace forebay {

LookBoard::Answer LookBoard::Ask(const Question& question, Nanos now) {
  Expire(now);
  if (question.rank >= limits_.ranks) return {};
  if (jobs_.size() >= limits_.jobs && !jobs_.contains(question.job)) return {};
  jobs_[question.job].insert(question.client);
  // What the job wrote is seen by all of it.
  if (question.wrote_at != Question::kNever) {
    for (auto look = looks_.begin(); look != looks_.end();) {
      const bool old = look->second.job == question.job && look->second.began <= question.wrote_at;
      look = old ? Erase(look) : std::next(look);
    }
  }
  Answer answer = Begin(question, now);
  Forget();
  return answer;
}

LookBoard::Answer LookBoard::Begin(const Question& question, Nanos now) {
  Asked& asked = asked_[{question.job, question.name, question.rank}];
  if (question.waited_for == 0) asked.before = std::exchange(asked.last, now);
  if (const auto found = Find(question); found != looks_.end()) {
    const auto& [ticket, look] = *found;
    if (look.began > asked.before && !look.ranks.contains(question.rank)) {
      if (look.state == State::kDropped) return {};
      if (look.state == State::kOffered) return Take(question, found);
      if (now - look.moved > limits_.still || now - look.began > limits_.longest) return {};
      return {.turn = Turn::kWait, .ticket = ticket, .seen = nullptr};
    }
    // Others may wait for it.
    if (look.state == State::kUnderWay) return {};
    Erase(found);
  }
  const auto of_client = std::count_if(looks_.begin(), looks_.end(), [&](const auto& entry) {
    return entry.second.client == question.client && entry.second.state == State::kUnderWay;
  });
  if (looks_.size() >= limits_.looks || static_cast<size_t>(of_client) >= limits_.looks_of_client) {
    return {};
  }
  looks_[next_] = {.job = question.job,
                   .name = question.name,
                   .opening = question.opening,
                   .client = question.client,
                   .state = State::kUnderWay,
                   .began = now,
                   .moved = now,
                   .ranks = {question.rank},
                   .seen = nullptr};
  return {.turn = Turn::kLook, .ticket = next_++, .seen = nullptr};
}

LookBoard::Answer LookBoard::Take(const Question& question, Looks::iterator look) {
  look->second.ranks.insert(question.rank);
  Answer answer{.turn = Turn::kTake, .ticket = look->first, .seen = look->second.seen};
  if (question.ranks != 0 && look->second.ranks.size() >= question.ranks) Erase(look);
  return answer;
}

void LookBoard::Progress(ClientId client, Ticket ticket, Nanos now) {
  if (Look* const look = UnderWay(client, ticket)) look->moved = now;
}

void LookBoard::Drop(ClientId client, Ticket ticket, Nanos now) {
  Look* const look = UnderWay(client, ticket);
  if (look == nullptr) return;
  // Everybody looks, and not one after the other: whatever is the matter is so for all.
  look->state = State::kDropped;
  look->moved = now;
}

void LookBoard::Wrote(ClientId client) {
  for (auto look = looks_.begin(); look != looks_.end();) {
    const auto job = jobs_.find(look->second.job);
    const bool own = job != jobs_.end() && job->second.contains(client);
    look = own ? Erase(look) : std::next(look);
  }
}

bool LookBoard::HandIn(ClientId client, Ticket ticket, Seen seen, Nanos now) {
  Look* const look = UnderWay(client, ticket);
  if (look == nullptr) return false;
  if (seen.bytes > limits_.bytes - std::min(limits_.bytes, bytes_)) {
    Drop(client, ticket, now);
    return false;
  }
  bytes_ += seen.bytes;
  look->seen = std::make_shared<const Seen>(std::move(seen));
  look->state = State::kOffered;
  look->moved = now;
  return true;
}

void LookBoard::Gone(ClientId client) {
  for (auto job = jobs_.begin(); job != jobs_.end();) {
    const bool last = job->second.erase(client) != 0 && job->second.empty();
    for (auto look = looks_.begin(); look != looks_.end();) {
      const bool of_job = look->second.job == job->first;
      const bool unfinished =
          look->second.client == client && look->second.state == State::kUnderWay;
      look = of_job && (last || unfinished) ? Erase(look) : std::next(look);
    }
    job = last ? jobs_.erase(job) : std::next(job);
  }
  Forget();
}

void LookBoard::Expire(Nanos now) {
  bool some = false;
  for (auto look = looks_.begin(); look != looks_.end();) {
    const bool over =
        look->second.state != State::kUnderWay && now - look->second.moved >= limits_.offered;
    some |= over;
    look = over ? Erase(look) : std::next(look);
  }
  if (some) Forget();
}

Nanos LookBoard::NextExpiry() const {
  Nanos next = kNothing;
  for (const auto& [ticket, look] : looks_) {
    if (look.state == State::kUnderWay) continue;
    const Nanos at = look.moved + limits_.offered;
    next = next == kNothing ? at : std::min(next, at);
  }
  return next;
}

LookBoard::Looks::iterator LookBoard::Find(const Question& question) {
  return std::find_if(looks_.begin(), looks_.end(), [&](const auto& entry) {
    const Look& look = entry.second;
    return look.opening == question.opening && look.name == question.name &&
           look.job == question.job;
  });
}

LookBoard::Look* LookBoard::UnderWay(ClientId client, Ticket ticket) {
  const auto found = looks_.find(ticket);
  if (found == looks_.end()) return nullptr;
  Look& look = found->second;
  return look.client == client && look.state == State::kUnderWay ? &look : nullptr;
}

LookBoard::Looks::iterator LookBoard::Erase(Looks::iterator look) {
  if (look->second.seen != nullptr) bytes_ -= look->second.seen->bytes;
  return looks_.erase(look);
}

void LookBoard::Forget() {
  std::erase_if(asked_, [this](const auto& entry) {
    return std::none_of(looks_.begin(), looks_.end(), [&](const auto& look) {
      return look.second.job == entry.first.job && look.second.name == entry.first.name;
    });
  });
}

}  // namespace forebay
