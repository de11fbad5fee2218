// The peer thread: what other nodes ask for, and what this one fetches ahead of need.
#include <algorithm>
#include <cstring>
#include <limits>
#include <utility>

#include "base/planted_bug.h"
#include "catalog/paths.h"
#include "peer/node.h"

namespace forebay::peer {
namespace {

// Samples up to this size are copied together into one reply; larger ones go without a copy.
constexpr uint64_t kGatherEach = 16 << 10;
constexpr size_t kSendBuffers = 64;
constexpr uint64_t kBufferTag = uint64_t{1} << 63;
constexpr size_t kMostPulls = 16;
constexpr Nanos kPullPause = 200 * kMilli;

}  // namespace

void Node::OnGet(ConnectionId id, uint32_t node, const GetMessage& get) {
  if (others_[node].in != id) return;
  for (const Wanted& wanted : get.wanted) {
    Turn turn{.node = node,
              .dataset = get.dataset,
              .request = wanted.request,
              .sample = wanted.sample,
              .bytes = 0,
              .held_only = get.held_only != 0,
              .urgent = get.urgent != 0,
              .connection = id,
              .plan = get.plan};
    const auto found = datasets_.find(get.dataset);
    if (found == datasets_.end() || !found->second.ready ||
        wanted.sample >= found->second.dataset->catalog->size()) {
      Refuse(turn, Refusal::kNoSuchSample);
      continue;
    }
    OnPlanInUse(found->second, found->first, get.plan);
    turn.bytes = found->second.dataset->catalog->length(wanted.sample);
    if (!turns_.Add(turn)) Refuse(turn, Refusal::kBusy);
  }
}

void Node::OnGetNamed(ConnectionId id, uint32_t node, const GetNamedMessage& get) {
  if (others_[node].in != id) return;
  for (const NamedWanted& wanted : get.wanted) {
    Turn turn{.node = node,
              .dataset = get.dataset,
              .request = wanted.request,
              .sample = 0,
              .bytes = wanted.sample.length(),
              .held_only = false,
              .urgent = get.urgent != 0,
              .connection = id,
              .plan = 0};
    Resolved resolved;
    const auto found = datasets_.find(get.dataset);
    if (found != datasets_.end() && found->second.ready && found->second.dataset->growing) {
      resolved = Resolve(found->second, wanted.sample);
    }
    if (!resolved.sample) {
      Refuse(turn, resolved.why);
      continue;
    }
    turn.sample = *resolved.sample;
    if (!turns_.Add(turn)) Refuse(turn, Refusal::kBusy);
  }
}

// What this node has never seen it takes for what the asker says: its source reads no other version
// of the file, and a copy in its folder has the version in its name. Nothing is asked of the
// storage here.
Node::Resolved Node::Resolve(PeerDatasetState& state, const FileSample& wanted) {
  const PeerDataset& dataset = *state.dataset;
  const std::string path = JoinPath(dataset.catalog->root(), wanted.path);
  const NewFile file{
      .path = path, .size = wanted.bytes, .mtime_ns = wanted.modified_ns, .block = wanted.block};
  const auto number = [&](const Appended& samples) {
    const uint64_t index = wanted.block == 0 ? 0 : wanted.offset / wanted.block;
    return Resolved{.sample = samples.first + static_cast<SampleId>(index)};
  };
  if (const std::optional<Appended> found = dataset.catalog->Find(file)) return number(*found);
  // Before the first plan the asker's word counts; StartServe looks again.
  if (dataset.planned() && dataset.HomeOf(HomeName(wanted)) != self_)
    return {.why = Refusal::kNotHeld};
  std::vector<Appended> added;
  if (!engine_.AppendSamples(dataset.id, {&file, 1}, &added).ok()) return {.why = Refusal::kBusy};
  return number(added.front());
}

void Node::OnCancel(uint32_t node, uint32_t request) {
  turns_.Cancel(node, request);
  for (auto& [number, state] : datasets_) {
    std::erase_if(state.early_turns,
                  [&](const Turn& turn) { return turn.node == node && turn.request == request; });
  }
  for (const size_t i : reading_) {
    Serve& serve = serves_[i];
    if (serve.pull || serve.turn.node != node || serve.turn.request != request) continue;
    std::erase(reading_, i);
    EndServe(i);
    return;
  }
}

// Nobody is there any more to take what came by that connection.
void Node::DropServing(uint32_t node, ConnectionId id) {
  Other& other = others_[node];
  turns_.Drop(node);
  if (other.gather != SIZE_MAX) {
    send_buffers_.Free(std::exchange(other.gather, SIZE_MAX));
    other.gather_message.given.clear();
  }
  for (auto& [number, state] : datasets_) {
    std::erase_if(state.early_turns, [&](const Turn& turn) { return turn.connection == id; });
  }
  for (size_t i = 0; i < serves_.capacity(); ++i) {
    const Serve& serve = serves_[i];
    if (serve.at == Serve::At::kReading && !serve.pull && serve.connection == id) {
      if (FOREBAY_PLANTED(kLeaseLeak)) serves_[i].lease = kNoLease;
      std::erase(reading_, i);
      EndServe(i);
    }
  }
}

void Node::Refuse(const Turn& turn, Refusal why) {
  if (turn.connection == 0 || turn.connection != others_[turn.node].in) return;
  const auto found = datasets_.find(turn.dataset);
  const uint64_t plan = found == datasets_.end() ? 0 : found->second.dataset->plan_digest();
  if (why == Refusal::kNotHeld && !turn.held_only && turn.plan != plan) why = Refusal::kMoved;
  Send(turn.connection, RefusedMessage{.request = turn.request, .why = why, .plan = plan});
}

// Samples that are being served cannot be given up for others: they have an eighth of the arena.
uint64_t Node::Room() const {
  const uint64_t most = engine_.arena_bytes() / 8;
  if (pinned_ == 0) return std::numeric_limits<uint64_t>::max();
  return pinned_ < most ? most - pinned_ : 0;
}

void Node::TakeTurns(Nanos now) {
  while (turns_.waiting() > 0 && serves_.used() < kMostServes) {
    const std::optional<Turn> turn = turns_.Next(Room(), now);
    if (!turn) return;
    StartServe(*turn);
    if (FOREBAY_PLANTED(kDoubleServe) && turn->request % 64 == 7) StartServe(*turn);
  }
}

void Node::StartServe(const Turn& turn) {
  if (turn.connection == 0 || turn.connection != others_[turn.node].in) return;
  const auto found = datasets_.find(turn.dataset);
  if (found == datasets_.end() || !found->second.ready) {
    Refuse(turn, Refusal::kNoSuchSample);
    return;
  }
  PeerDatasetState& state = found->second;
  if (!options_.coordinate) {
    Refuse(turn, Refusal::kNotHeld);
    return;
  }
  if (!state.dataset->planned()) {
    // Both see the same cluster soon.
    if (state.early_turns.size() < Turns::kMostWaiting) {
      state.early_turns.push_back(turn);
    } else {
      Refuse(turn, Refusal::kBusy);
    }
    return;
  }
  // Only its home reads a sample from the source for others: two nodes whose views differ for a
  // moment would wait for each other.
  const bool home = state.dataset->Locate(turn.sample).home == self_;
  if (!Holds(state, turn.sample) && (turn.held_only || !home)) {
    AnnounceChanges(turn.dataset, engine_.TakeHeldChanges(state.dataset->id));
    if (!Holds(state, turn.sample)) {
      Refuse(turn, Refusal::kNotHeld);
      return;
    }
  }
  if (home && state.in_use != nullptr) EndCrossing(state, turn);
  const size_t index = NewServe();
  Serve& serve = serves_[index];
  serve.turn = turn;
  serve.connection = turn.connection;
  serve.pull = false;
  pinned_ += turn.bytes;
  PollServe(index);
}

void Node::EndCrossing(const PeerDatasetState& state, const Turn& turn) {
  // Whatever was asked by the former plan has ended after that time.
  if (SteadyClock().Now() - state.adopted_at > 2 * options_.request_wait) return;
  const std::vector<uint32_t> ids = requests_.Select([&](const Request& request) {
    return request.ask.node == turn.node && request.ask.sample == turn.sample &&
           request.ask.dataset == state.dataset && request.ask.plan != state.in_use->digest &&
           !request.ask.held_only && request.at != Request::At::kArriving;
  });
  for (const uint32_t id : ids) {
    const Request& request = *requests_.Find(id);
    if (request.at == Request::At::kSent) {
      Send(request.connection, CancelMessage{.request = id});
    }
    End(id, Outcome::kMoved);
  }
}

size_t Node::NewServe() {
  const size_t index = serves_.Take();
  serves_[index].at = Serve::At::kReading;
  serves_[index].lease = kNoLease;
  return index;
}

// Asks the engine once; what is not there yet is looked at again.
void Node::PollServe(size_t index) {
  Serve& serve = serves_[index];
  const bool first = serve.lease == kNoLease;
  const StreamId stream = datasets_.at(serve.turn.dataset).serving;
  const Result<TakeKind> taken =
      engine_.Fetch(stream, serve.turn.sample, 0, &serve.lease, &serve.loan);
  if (taken && *taken == TakeKind::kPending) {
    if (!first) return;
    // It was held a moment ago. Were it read from its home, which may be asking for it here, the
    // two would wait for each other.
    const uint32_t number = serve.turn.dataset;
    PeerDatasetState& state = datasets_.at(number);
    if (!serve.pull && state.dataset->Locate(serve.turn.sample).home != self_) {
      AnnounceChanges(number, engine_.TakeHeldChanges(state.dataset->id));
      if (!Holds(state, serve.turn.sample)) {
        Refuse(serve.turn, Refusal::kNotHeld);
        EndServe(index);
        return;
      }
    }
    reading_.push_back(index);
    return;
  }
  if (!first) std::erase(reading_, index);
  if (!taken || *taken != TakeKind::kBatch) {
    if (!serve.pull) Refuse(serve.turn, Refusal::kReadFailed);
    EndServe(index);
    return;
  }
  serve.lease = serve.loan.lease;
  if (serve.pull) {
    metrics_.pulled.Add(1);
    EndServe(index);
    return;
  }
  Reply(index);
}

void Node::PollReading() {
  const std::vector<size_t> reading = reading_;
  for (const size_t index : reading) PollServe(index);
}

void Node::Reply(size_t index) {
  Serve& serve = serves_[index];
  Other& other = others_[serve.turn.node];
  if (serve.connection != other.in) {
    EndServe(index);
    return;
  }
  std::span<const std::byte> bytes{engine_.base() + serve.loan.offsets[0], serve.loan.lengths[0]};
  const uint32_t crc = serve.loan.crcs[0];
  ++other.seen.served;
  other.seen.served_bytes += bytes.size();
  metrics_.served.Add(1);
  metrics_.served_bytes.Add(bytes.size());
  ++replies_;
  const bool damage =
      parts_.corrupt_every != 0 && replies_ % parts_.corrupt_every == 0 && !bytes.empty();
  if (damage) {
    serve.damaged.assign(bytes.begin(), bytes.end());
    serve.damaged[bytes.size() / 2] ^= std::byte{16};
    bytes = serve.damaged;
  }
  if (bytes.size() <= kGatherEach && Gather(serve, bytes, crc)) {
    EndServe(index);
    return;
  }
  const DataMessage message{.given = {{.request = serve.turn.request,
                                       .sample = serve.turn.sample,
                                       .length = static_cast<uint32_t>(bytes.size()),
                                       .crc = crc}}};
  serve.at = Serve::At::kSending;
  if (!transport_->Send(serve.connection, Encode(message), bytes, index + 1).ok()) EndServe(index);
}

bool Node::Gather(Serve& serve, std::span<const std::byte> bytes, uint32_t crc) {
  const uint32_t node = serve.turn.node;
  Other& other = others_[node];
  if (other.gather != SIZE_MAX && (other.gathered + bytes.size() > kGatherBytes ||
                                   other.gather_message.given.size() == kMostWanted)) {
    FlushGather(node);
  }
  if (other.gather == SIZE_MAX) {
    if (send_buffers_.used() >= kSendBuffers) return false;
    other.gather = send_buffers_.Take();
    std::unique_ptr<std::byte[]>& buffer = send_buffers_[other.gather];
    if (buffer == nullptr) buffer = std::make_unique_for_overwrite<std::byte[]>(kGatherBytes);
    other.gathered = 0;
    gathering_.push_back(node);
  }
  if (!bytes.empty()) {
    std::memcpy(send_buffers_[other.gather].get() + other.gathered, bytes.data(), bytes.size());
  }
  other.gathered += bytes.size();
  other.gather_message.given.push_back({.request = serve.turn.request,
                                        .sample = serve.turn.sample,
                                        .length = static_cast<uint32_t>(bytes.size()),
                                        .crc = crc});
  return true;
}

void Node::FlushGather(uint32_t node) {
  Other& other = others_[node];
  if (other.gather == SIZE_MAX) return;
  const size_t buffer = std::exchange(other.gather, SIZE_MAX);
  const std::span<const std::byte> bytes{send_buffers_[buffer].get(),
                                         static_cast<size_t>(other.gathered)};
  const bool sent =
      other.in != 0 &&
      transport_->Send(other.in, Encode(other.gather_message), bytes, kBufferTag | buffer).ok();
  if (!sent) send_buffers_.Free(buffer);
  other.gather_message.given.clear();
}

void Node::OnSent(ConnectionId, uint64_t tag, const Status&) {
  if (tag == 0) return;
  if (tag & kBufferTag) {
    send_buffers_.Free(tag & ~kBufferTag);
    return;
  }
  EndServe(static_cast<size_t>(tag - 1));
}

void Node::EndServe(size_t index) {
  Serve& serve = serves_[index];
  if (serve.lease != kNoLease) (void)engine_.Release(serve.lease);
  if (serve.pull) {
    --pulls_;
  } else {
    pinned_ -= serve.turn.bytes;
  }
  serve.lease = kNoLease;
  serve.at = Serve::At::kFree;
  serves_.Free(index);
}

// Copies near their next user, while nobody waits for the link. The receiver pulls: it alone knows
// its room and its future.
void Node::Pull(Nanos now) {
  if (!planned_ || metrics_.pull.value() == 0) return;
  for (auto& [number, state] : datasets_) {
    if (!state.ready || now < state.pull_at || !state.dataset->planned()) continue;
    if (pulls_ >= kMostPulls || requests_.size() > pulls_) return;
    bool any = false;
    for (const SampleId sample : engine_.Upcoming(state.dataset->id, kMostPulls - pulls_)) {
      if (state.dataset->ChooseOne(sample, false).to != Choice::To::kPeer) continue;
      any = true;
      const size_t index = NewServe();
      Serve& serve = serves_[index];
      serve.turn = {.node = self_,
                    .dataset = number,
                    .request = 0,
                    .sample = sample,
                    .bytes = 0,
                    .held_only = false,
                    .urgent = false,
                    .connection = 0,
                    .plan = 0};
      serve.pull = true;
      ++pulls_;
      PollServe(index);
    }
    if (!any) state.pull_at = now + kPullPause;
  }
}

}  // namespace forebay::peer
