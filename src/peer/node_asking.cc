// The peer thread: asks of this node's sources, and their answers.
#include <algorithm>
#include <cstring>
#include <utility>

#include "base/crc32c.h"
#include "peer/node.h"

namespace forebay::peer {
namespace {

// A peer has at most so much of this node's under way: more would only wait there.
constexpr uint64_t kCreditBytes = 16 << 20;
// Answers wake the engine's loop, which costs about as much as taking a sample. While the peer
// thread has more to do, so many go together, at the latest so long after the last ones.
constexpr size_t kTogether = 16;
constexpr Nanos kTogetherWait = 200 * kMicro;

// Requests that travel in one message: of one data set, and alike.
class GetBatch {
 public:
  // False: it does not go with the others. `dataset`: the receiver's number.
  bool Add(uint32_t id, const Ask& ask, uint32_t dataset) {
    const bool alike = ids_.empty() || (of_ == ask.dataset.get() && held_only_ == ask.held_only &&
                                        urgent_ == ask.urgent && plan_ == ask.plan);
    if (!alike || ids_.size() == kMostWanted) return false;
    if (ask.dataset->growing) {
      FileSample sample = FileSampleOf(*ask.dataset->catalog, ask.sample);
      const size_t bytes = kNamedBytes + sample.path.size();
      if (!ids_.empty() && header_bytes_ + bytes > Transport::kMaxHeader) return false;
      header_bytes_ += bytes;
      by_name_.push_back({.request = id, .sample = std::move(sample)});
    } else {
      by_number_.push_back({.request = id, .sample = ask.sample});
    }
    ids_.push_back(id);
    of_ = ask.dataset.get();
    dataset_ = dataset;
    held_only_ = ask.held_only;
    urgent_ = ask.urgent;
    plan_ = ask.plan;
    return true;
  }

  const std::vector<uint32_t>& ids() const { return ids_; }
  Message Get() const {
    const uint8_t urgent = urgent_ ? 1 : 0;
    if (!by_name_.empty()) {
      return GetNamedMessage{.dataset = dataset_, .urgent = urgent, .wanted = by_name_};
    }
    return GetMessage{.dataset = dataset_,
                      .held_only = static_cast<uint8_t>(held_only_ ? 1 : 0),
                      .urgent = urgent,
                      .wanted = by_number_,
                      .plan = plan_};
  }

 private:
  // Of a GetNamedMessage, and of each NamedWanted beside its path.
  static constexpr size_t kMessageBytes = 10;
  static constexpr size_t kNamedBytes = 36;

  const PeerDataset* of_ = nullptr;
  uint32_t dataset_ = 0;
  bool held_only_ = false;
  bool urgent_ = false;
  uint64_t plan_ = 0;
  size_t header_bytes_ = kMessageBytes;
  std::vector<uint32_t> ids_;
  std::vector<Wanted> by_number_;
  std::vector<NamedWanted> by_name_;
};

}  // namespace

void Node::Enqueue(std::vector<Ask>& asks) {
  for (Ask& ask : asks) {
    Other& other = others_[ask.node];
    if (!other.out_ready || requests_.full()) {
      const Answer answer{.slot = ask.slot, .outcome = Outcome::kLost, .crc = 0};
      ask.dataset->Deliver({&answer, 1});
      continue;
    }
    if (other.queue.empty()) asking_.push_back(ask.node);
    const uint32_t node = ask.node;
    const Nanos give_up = ask.start + options_.request_wait;
    others_[node].queue.push_back(requests_.Add(std::move(ask), give_up));
  }
  asks.clear();
}

void Node::SendAsks(Nanos now) {
  for (const uint32_t node : std::exchange(asking_, {})) {
    Other& other = others_[node];
    if (other.flying == 0 && other.last_received >= other.gave_up) other.oldest = now;
    SendAsksTo(node);
    if (!other.queue.empty()) asking_.push_back(node);
  }
}

void Node::SendAsksTo(uint32_t node) {
  Other& other = others_[node];
  GetBatch batch;
  const auto flush = [&] {
    if (batch.ids().empty()) return;
    if (!Send(other.out, batch.Get())) {
      for (const uint32_t id : batch.ids()) End(id, Outcome::kLost);
    }
    batch = GetBatch();
  };
  const auto most = static_cast<size_t>(metrics_.requests.value());
  while (!other.queue.empty() && other.flying < most) {
    const uint32_t id = other.queue.front();
    Request* request = requests_.Find(id);
    if (request == nullptr) {  // given up meanwhile
      other.queue.pop_front();
      continue;
    }
    const uint64_t bytes = request->ask.dest.size();
    if (other.flying > 0 && other.flying_bytes + bytes > kCreditBytes) break;
    other.queue.pop_front();
    const auto theirs = other.theirs.find(request->ask.dataset->name);
    if (!other.out_ready || theirs == other.theirs.end()) {
      End(id, Outcome::kLost);
      continue;
    }
    const uint32_t number = theirs->second.number;
    if (!batch.Add(id, request->ask, number)) {
      flush();
      (void)batch.Add(id, request->ask, number);  // the first one always goes
    }
    request->at = Request::At::kSent;
    request->connection = other.out;
    ++other.flying;
    other.flying_bytes += bytes;
  }
  flush();
}

void Node::End(uint32_t id, Outcome outcome, uint32_t crc) {
  Request* request = requests_.Find(id);
  if (request == nullptr) return;
  const Ask& ask = request->ask;
  Other& other = others_[ask.node];
  const Nanos now = SteadyClock().Now();
  if (request->at != Request::At::kQueued) {
    --other.flying;
    other.flying_bytes -= ask.dest.size();
    // What is given up is no sign of life.
    if (outcome != Outcome::kTimeout && outcome != Outcome::kLost) other.oldest = now;
  }
  switch (outcome) {
    case Outcome::kArrived: {
      ++other.seen.reads;
      other.seen.bytes += ask.dest.size();
      const Nanos took = now - ask.start;
      Nanos& typical = other.seen.latency_ns;
      typical = typical == 0 ? took : typical + (took - typical) / 16;
      break;
    }
    case Outcome::kTimeout:
      other.gave_up = now;
      ++other.seen.timeouts;
      metrics_.timeouts.Add(1);
      break;
    case Outcome::kRefused:
      ++other.seen.refused;
      metrics_.refused.Add(1);
      break;
    case Outcome::kMoved:
      break;  // it is asked for elsewhere
    case Outcome::kLost:
      ++other.seen.lost;
      metrics_.lost.Add(1);
      break;
    case Outcome::kCorrupt:
      ++other.seen.corrupt;
      metrics_.corrupt.Add(1);
      Fault(ask.node, "sent wrong bytes");
      break;
  }
  const Answer answer{.slot = ask.slot, .outcome = outcome, .crc = crc};
  // Data sets are few.
  for (auto& [number, state] : datasets_) {
    if (state.dataset == ask.dataset) state.answers.push_back(answer);
  }
  ++answers_;
  requests_.Remove(id);
}

void Node::EndAllOf(uint32_t node, ConnectionId connection, Outcome outcome) {
  const std::vector<uint32_t> ids = requests_.Select([&](const Request& request) {
    return request.ask.node == node &&
           (request.at == Request::At::kQueued ||
            (request.at == Request::At::kSent && request.connection == connection));
  });
  for (const uint32_t id : ids) End(id, outcome);
}

void Node::GiveUpLate(Nanos now) {
  if (requests_.size() == 0) return;
  const std::vector<uint32_t> late =
      requests_.Select([&](const Request& request) { return now > request.give_up; });
  for (const uint32_t id : late) {
    const Request* request = requests_.Find(id);
    if (request == nullptr) continue;
    const uint32_t node = request->ask.node;
    const ConnectionId connection = request->connection;
    const bool arriving = request->at == Request::At::kArriving;
    Fault(node, arriving ? "a reply did not end in time" : "a request was not answered in time");
    if (arriving) {
      // Its memory is free only when the connection is gone.
      const auto it = connections_.find(connection);
      if (it != connections_.end()) it->second.late = true;
      Close(connection, "a reply did not end in time");
      continue;
    }
    if (request->at == Request::At::kSent) Send(connection, CancelMessage{.request = id});
    End(id, Outcome::kTimeout);
  }
}

std::span<std::byte> Node::OnData(ConnectionId id, const DataMessage& data, uint64_t payload_bytes,
                                  uint64_t* tag) {
  const uint32_t node = connections_.at(id).node;
  uint64_t sum = 0;
  bool right = !data.given.empty();
  bool wanted = false;
  for (const Given& given : data.given) {
    sum += given.length;
    const Request* request = requests_.Find(given.request);
    if (request == nullptr || request->connection != id) continue;  // given up
    const bool same = request->ask.dataset->growing || request->ask.sample == given.sample;
    right = right && request->at == Request::At::kSent && same &&
            request->ask.dest.size() == given.length;
    wanted = true;
  }
  if (!right || sum != payload_bytes || (data.given.size() > 1 && sum > kGatherBytes)) {
    Fault(node, "sent a reply that nobody asked for");
    Close(id, "a reply that nobody asked for");
    return {};
  }
  if (!wanted) return {};
  const Nanos give_up = SteadyClock().Now() + options_.request_wait;
  for (const Given& given : data.given) {
    Request* request = requests_.Find(given.request);
    if (request == nullptr || request->connection != id) continue;
    if (payload_bytes == 0) {
      End(given.request, given.crc == Crc32c({}) ? Outcome::kArrived : Outcome::kCorrupt,
          given.crc);
      continue;
    }
    request->at = Request::At::kArriving;
    request->give_up = std::max(request->give_up, give_up);
  }
  if (payload_bytes == 0) return {};
  const uint32_t index = gathered_.Take();
  Gathered& gathered = gathered_[index];
  gathered.given.assign(data.given.begin(), data.given.end());
  gathered.size = payload_bytes;
  gathered.crc.reset();
  *tag = index;
  if (data.given.size() == 1) return requests_.Find(data.given[0].request)->ask.dest;
  if (gathered.bytes == nullptr) {
    gathered.bytes = std::make_unique_for_overwrite<std::byte[]>(kGatherBytes);
  }
  return {gathered.bytes.get(), static_cast<size_t>(payload_bytes)};
}

void Node::OnCopy(uint64_t tag, std::span<std::byte> place, std::span<const std::byte> payload) {
  Gathered& gathered = gathered_[tag];
  if (gathered.given.size() == 1) {
    gathered.crc = CopyCrc32c(place, payload);
  } else {
    std::memcpy(place.data(), payload.data(), payload.size());
  }
}

void Node::OnPayload(ConnectionId id, uint64_t tag, const Status& status) {
  Gathered& gathered = gathered_[tag];
  uint64_t at = 0;
  const auto it = connections_.find(id);
  const bool late = it != connections_.end() && it->second.late;
  if (it != connections_.end()) others_[it->second.node].last_received = SteadyClock().Now();
  for (const Given& given : gathered.given) {
    Request* request = requests_.Find(given.request);
    const bool live =
        request != nullptr && request->connection == id && request->at == Request::At::kArriving;
    if (live && !status.ok()) {
      End(given.request, late ? Outcome::kTimeout : Outcome::kLost);
    } else if (live) {
      if (gathered.given.size() > 1 && given.length > 0) {
        std::memcpy(request->ask.dest.data(), gathered.bytes.get() + at, given.length);
      }
      // Here, while the bytes are in this core's cache.
      const uint32_t crc = gathered.crc ? *gathered.crc : Crc32c(request->ask.dest);
      const bool right = crc == given.crc;
      End(given.request, right ? Outcome::kArrived : Outcome::kCorrupt, given.crc);
    }
    at += given.length;
  }
  gathered_.Free(tag);
}

void Node::OnRefused(ConnectionId id, const RefusedMessage& refused) {
  const Request* request = requests_.Find(refused.request);
  if (request == nullptr || request->connection != id || request->at != Request::At::kSent) return;
  const uint32_t node = request->ask.node;
  const bool moved = refused.why == Refusal::kMoved;
  if (moved) {
    for (auto& [number, state] : datasets_) {
      if (state.dataset == request->ask.dataset) OnPlanInUse(state, number, refused.plan);
    }
  }
  if (moved || refused.why == Refusal::kNotHeld) {
    const SampleId sample = request->ask.sample;
    request->ask.dataset->Correct([&](Directory& directory) { directory.OnLost(node, sample); });
  }
  End(refused.request, moved ? Outcome::kMoved : Outcome::kRefused);
}

// `more`: there is work without waiting for it.
void Node::Deliver(bool more, Nanos now) {
  if (answers_ == 0 || (more && answers_ < kTogether && now < deliver_at_)) return;
  answers_ = 0;
  deliver_at_ = now + kTogetherWait;
  for (auto& [number, state] : datasets_) {
    if (state.answers.empty()) continue;
    state.dataset->Deliver(state.answers);
    state.answers.clear();
  }
}

}  // namespace forebay::peer
