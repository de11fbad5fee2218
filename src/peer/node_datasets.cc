// The peer thread: data sets, where their samples are, and what this node tells of its own.
#include <algorithm>
#include <iterator>
#include <utility>

#include "peer/node.h"

namespace forebay::peer {
namespace {

constexpr Nanos kAnnounceEvery = 50 * kMilli;
constexpr Nanos kSoon = 2 * kSecond;
constexpr size_t kBitmapInstead = 8192;  // changes beyond which the bitmap is sent as a whole

bool BitOf(std::span<const std::byte> bits, SampleId sample) {
  return sample / 8 < bits.size() &&
         (std::to_integer<unsigned>(bits[sample / 8]) >> (sample % 8) & 1) != 0;
}

void SetBit(std::span<std::byte> bits, SampleId sample, bool on) {
  if (sample / 8 >= bits.size()) return;
  const std::byte mask{static_cast<unsigned char>(1u << (sample % 8))};
  std::byte& at = bits[sample / 8];
  at = on ? (at | mask) : (at & ~mask);
}

}  // namespace

void Node::AddDatasets(std::vector<std::shared_ptr<PeerDataset>>& datasets) {
  for (std::shared_ptr<PeerDataset>& dataset : datasets) {
    PeerDatasetState state;
    state.dataset = std::move(dataset);
    datasets_.emplace(next_dataset_++, std::move(state));
  }
  datasets.clear();
  ReadyDatasets();
  PlanDatasets(SteadyClock().Now());
}

// A source is made before the engine knows its data set.
void Node::ReadyDatasets() {
  for (auto& [number, state] : datasets_) {
    const PeerDataset& dataset = *state.dataset;
    if (state.ready || dataset.leaving()) continue;
    const Result<StreamId> serving = engine_.OpenServing(dataset.id);
    if (!serving) continue;
    state.serving = *serving;
    state.held = engine_.HeldBits(dataset.id);
    state.held.resize((dataset.catalog->size() + 7) / 8);
    if (dataset.growing) {
      state.homes.emplace(self_);
    } else {
      state.early.emplace(self_, engine_.TierLengths(dataset.id));
    }
    state.ready = true;
    for (uint32_t node = 0; node < nodes_; ++node) {
      if (node == self_) continue;
      UpdateReach(node);
      if (others_[node].in != 0) Announce(node, number);
    }
  }
}

// Other nodes that still ask are told that there is no such sample, and read it themselves.
void Node::LeaveDatasets() {
  for (auto it = datasets_.begin(); it != datasets_.end();) {
    PeerDatasetState& state = it->second;
    if (state.dataset->leaving() && !state.left) Leave(it->first, state);
    // The engine's last word on it was the end of its source; answers to that went before.
    const bool over = state.left && state.dataset->retired() && state.answers.empty();
    it = over ? datasets_.erase(it) : std::next(it);
  }
}

void Node::Leave(uint32_t number, PeerDatasetState& state) {
  for (const Turn& turn : std::exchange(state.early_turns, {})) {
    Refuse(turn, Refusal::kNoSuchSample);
  }
  bool sending = false;
  for (size_t i = 0; i < serves_.capacity(); ++i) {
    const Serve& serve = serves_[i];
    if (serve.at == Serve::At::kFree || serve.turn.dataset != number) continue;
    if (serve.at != Serve::At::kReading) {
      sending = true;
      continue;
    }
    if (!serve.pull) Refuse(serve.turn, Refusal::kNoSuchSample);
    std::erase(reading_, i);
    EndServe(i);
  }
  if (sending) return;  // it ends soon, and this is looked at again
  state.left = true;
  if (!state.ready) return;
  state.ready = false;
  (void)engine_.CloseStream(state.serving);
  for (const Other& other : others_) {
    if (other.in != 0) {
      Send(other.in, DatasetMessage{.number = number, .name = state.dataset->name});
    }
  }
}

void Node::Plan(uint32_t number, Directory plan) {
  PeerDatasetState& state = datasets_.at(number);
  const uint64_t before = plan.plan_digest();
  if (state.in_use != nullptr && state.in_use->digest != before) {
    AnnounceChanges(number, engine_.TakeHeldChanges(state.dataset->id));
    plan.Adopt(state.in_use, state.held);
  }
  const bool adopted = plan.plan_digest() != before;
  const bool changed = plan.OnView(view_);
  state.home_bytes = plan.home_bytes(self_);
  if (changed || adopted || state.early) engine_.SetShare(state.dataset->id, plan.Shares());
  state.early.reset();
  state.dataset->SetPlan(std::move(plan));
  ServeEarly(state);
}

void Node::WantPlans(Nanos now) {
  plans_at_ = now + kMilli;
  if (!options_.coordinate || !options_.by_use || !planned_) return;
  for (auto& [number, state] : datasets_) {
    if (!state.ready || state.dataset->growing) continue;
    const std::optional<DatasetUse> use = engine_.UseOf(state.dataset->id);
    if (!use) continue;
    std::optional<HomePlanSpec> spec = HomePlanSpec::For(*use, self_, Directory::Rooms(view_));
    if (!spec || state.wanted == spec) continue;
    state.wanted = std::move(spec);
    state.plan.reset();
    plan_worker_->Want(
        {.number = number, .catalog = state.dataset->catalog, .spec = *state.wanted});
  }
}

void Node::TakePlans() {
  for (PlanWorker::Done& done : plan_worker_->Take()) {
    const auto found = datasets_.find(done.number);
    if (found == datasets_.end() || !found->second.ready) continue;
    PeerDatasetState& state = found->second;
    if (state.wanted != done.spec) continue;
    state.plan = std::move(done.plan);
    state.plan_told = false;
    state.tell_at = 0;
  }
}

void Node::TellPlansInTime(Nanos now) {
  for (auto& [number, state] : datasets_) {
    if (!state.ready || state.plan == nullptr || state.plan_told || now < state.tell_at) continue;
    state.plan_told = LosesNothing(state);
    // Each look goes over all samples.
    constexpr Nanos kLooksOneIn = 20;
    const Nanos took = SteadyClock().Now() - now;
    state.tell_at = now + kAnnounceEvery + kLooksOneIn * took;
    for (uint32_t node = 0; node < nodes_ && state.plan_told; ++node) TellPlan(node, number);
    AdoptIfAgreed(number);
  }
}

// All that lives here is here, and told to the others before the plan is. So whoever learns that
// all have told knows where each sample is, and nothing needs to be read from the source any more.
// Were the plan taken into use before, what nobody has read would find its new home full of what
// waits to leave, and would be read again and again.
bool Node::LosesNothing(const PeerDatasetState& state) const {
  const std::optional<Directory> now = state.dataset->Plan();
  if (!now) return false;
  for (SampleId s = 0; s < now->size(); ++s) {
    if (now->Locate(s).home == self_ && !Holds(state, s)) return false;
  }
  return true;
}

void Node::TellPlan(uint32_t node, uint32_t number) {
  const PeerDatasetState& state = datasets_.at(number);
  const ConnectionId connection = others_[node].in;
  if (connection == 0) return;
  if (state.in_use != nullptr) {
    Send(connection, PlanMessage{.dataset = number, .plan = state.in_use->digest, .in_use = 1});
  }
  if (state.plan == nullptr || state.plan == state.in_use || !state.plan_told) return;
  Send(connection, PlanMessage{.dataset = number, .plan = state.plan->digest, .in_use = 0});
}

const PlanMessage* Node::PlanOf(const PeerDatasetState& state, uint32_t node,
                                uint64_t digest) const {
  const auto theirs = others_[node].plans.find(state.dataset->name);
  if (theirs == others_[node].plans.end() || theirs->second.plan != digest) return nullptr;
  return &theirs->second;
}

void Node::AdoptIfAgreed(uint32_t number) {
  const PeerDatasetState& state = datasets_.at(number);
  if (state.plan == nullptr || state.plan == state.in_use) return;
  bool all = state.plan_told, any = false;
  for (const Member& member : view_.members) {
    if (!member.alive || member.node == self_ || member.node >= nodes_) continue;
    const PlanMessage* theirs = PlanOf(state, member.node, state.plan->digest);
    all = all && theirs != nullptr;
    any = any || (theirs != nullptr && theirs->in_use != 0);
  }
  if (all || any) AdoptPlan(number);
}

void Node::AdoptPlan(uint32_t number) {
  PeerDatasetState& state = datasets_.at(number);
  std::optional<Directory> directory = state.dataset->Plan();
  if (!directory) return;  // TellPlansInTime looks again
  state.in_use = state.plan;
  state.plan_told = true;
  // Whoever uses the plan has heard everybody. Where this node has not yet, what lives there is.
  for (uint32_t node = 0; node < nodes_; ++node) {
    if (node == self_ || PlanOf(state, node, state.plan->digest) != nullptr) continue;
    for (SampleId s = 0; s < directory->size(); ++s) {
      if (directory->Locate(s).home == node) directory->OnGot(node, s);
    }
  }
  Plan(number, *std::move(directory));
  // The losses that these messages follow were the last ones by the former homes.
  AnnounceChanges(number, engine_.TakeHeldChanges(state.dataset->id));
  for (uint32_t node = 0; node < nodes_; ++node) {
    if (node == self_) continue;
    TellPlan(node, number);
    OnPlanUsed(state, number, node);
  }
  state.adopted_at = SteadyClock().Now();
  // What is not here yet, and lives with another node now, is asked for there.
  for (const size_t i : std::vector<size_t>(reading_)) {
    const Serve& serve = serves_[i];
    if (serve.pull || serve.turn.dataset != number || Holds(state, serve.turn.sample) ||
        state.dataset->Locate(serve.turn.sample).home == self_) {
      continue;
    }
    Refuse(serve.turn, Refusal::kMoved);
    std::erase(reading_, i);
    EndServe(i);
  }
}

void Node::OnPlanInUse(PeerDatasetState& state, uint32_t number, uint64_t digest) {
  if (state.plan == nullptr || state.plan == state.in_use || state.plan->digest != digest) return;
  AdoptPlan(number);
}

void Node::OnPlanUsed(PeerDatasetState& state, uint32_t number, uint32_t node) {
  if (state.in_use == nullptr) return;
  const PlanMessage* theirs = PlanOf(state, node, state.in_use->digest);
  if (theirs == nullptr || theirs->in_use == 0) return;
  Correct(state, [&](Directory& directory) { directory.OnPlanUsed(node); });
  if (others_[node].in != 0) SendHave(others_[node].in, number, true);
}

void Node::PlanGrowing(uint32_t number) {
  PeerDatasetState& state = datasets_.at(number);
  if (!state.homes || !state.homes->OnView(view_)) return;
  state.dataset->SetHomes(*state.homes);
  engine_.SetShare(state.dataset->id, state.dataset->GrowingShares());
  ServeEarly(state);
}

void Node::ServeEarly(PeerDatasetState& state) {
  for (const Turn& turn : std::exchange(state.early_turns, {})) StartServe(turn);
}

// What was announced is an estimate, made before there were data sets and streams, and each data
// set is planned as if it had all of it.
uint64_t Node::UnkeptBytes() const {
  uint64_t bytes = 0;
  for (const auto& [number, state] : datasets_) bytes += state.home_bytes;
  if (bytes == 0) return 0;
  return bytes - std::min(bytes, engine_.TierQuota());
}

void Node::PlanDatasets(Nanos now) {
  if (!options_.coordinate) return;
  if (!planned_) {
    if (view_.version == 0) return;
    planned_ = view_.complete() || now - attached_ >= options_.join_wait;
    if (!planned_) return;
  }
  for (auto& [number, state] : datasets_) {
    if (state.ready && state.early) Plan(number, *state.early);
    if (state.ready && state.homes && !state.dataset->planned()) PlanGrowing(number);
  }
}

void Node::UpdateReach(uint32_t node) {
  const Other& other = others_[node];
  const Nanos now = SteadyClock().Now();
  for (const auto& [number, state] : datasets_) {
    if (!state.ready) continue;
    Reach reach = Reach::kNone;
    const bool growing = state.dataset->growing;
    const auto theirs = other.theirs.find(state.dataset->name);
    if (other.out_ready && theirs != other.theirs.end() &&
        (theirs->second.growing != 0) == growing) {
      const bool announced = growing || other.announced.contains(state.dataset->name);
      reach = announced ? Reach::kReady : Reach::kUnannounced;
    } else if (other.known && !other.was_ready && other.seen.state != "refused" &&
               other.backoff < kSecond &&
               (now - state.dataset->added < kSoon ||
                (growing ? !other.out_ready : other.theirs.empty()))) {
      // One that has told of other data sets has this one soon, or never. Folders that grow are
      // opened by programs, which need not open the same ones everywhere.
      reach = Reach::kExpected;
    }
    state.dataset->SetReach(node, reach);
  }
}

Node::PeerDatasetState* Node::DatasetOf(uint32_t node, uint32_t their_number) {
  for (const auto& [name, dataset] : others_[node].theirs) {
    if (dataset.number != their_number) continue;
    for (auto& [number, state] : datasets_) {
      if (state.ready && state.dataset->name == name && !state.dataset->growing &&
          state.dataset->catalog->size() == dataset.samples) {
        return &state;
      }
    }
  }
  return nullptr;
}

void Node::Correct(PeerDatasetState& state, const std::function<void(Directory&)>& change) {
  if (state.early) {
    change(*state.early);
  } else {
    state.dataset->Correct(change);
  }
}

void Node::Announce(uint32_t node, uint32_t number) {
  const ConnectionId connection = others_[node].in;
  const PeerDatasetState& state = datasets_.at(number);
  if (!state.ready) return;
  const bool growing = state.dataset->growing;
  Send(
      connection,
      DatasetMessage{.number = number,
                     .name = state.dataset->name,
                     .samples = growing ? 0 : static_cast<uint32_t>(state.dataset->catalog->size()),
                     .growing = static_cast<uint8_t>(growing ? 1 : 0)});
  TellPlan(node, number);
  // Who has not got the data set yet cannot use it, and asks for it by its own announcement.
  if (others_[node].theirs.contains(state.dataset->name)) SendHave(connection, number, false);
}

void Node::SendHave(ConnectionId connection, uint32_t number, bool all) {
  if (datasets_.at(number).dataset->growing) return;  // its numbers mean nothing to others
  const std::span<const std::byte> held = datasets_.at(number).held;
  for (size_t at = 0; at < held.size(); at += kHaveBytes) {
    const std::span<const std::byte> part =
        held.subspan(at, std::min(kHaveBytes, held.size() - at));
    const bool none = std::ranges::all_of(part, [](std::byte b) { return b == std::byte{0}; });
    // The last part says that all has been told.
    if (none && !all && at + part.size() < held.size()) continue;
    Send(connection, HaveMessage{.dataset = number,
                                 .first = static_cast<SampleId>(at * 8),
                                 .bits = {part.begin(), part.end()}});
  }
}

bool Node::Holds(const PeerDatasetState& state, SampleId sample) const {
  return BitOf(state.held, sample);
}

void Node::NoteHeld(PeerDatasetState& state, const HeldChanges& changes) {
  if (state.dataset->growing) state.held.resize((state.dataset->catalog->size() + 7) / 8);
  for (const SampleId sample : changes.got) SetBit(state.held, sample, true);
  for (const SampleId sample : changes.lost) SetBit(state.held, sample, false);
}

void Node::AnnounceHeld(Nanos now) {
  if (now < held_at_) return;
  held_at_ = now + kAnnounceEvery;
  for (auto& [number, state] : datasets_) {
    if (!state.ready) continue;
    AnnounceChanges(number, engine_.TakeHeldChanges(state.dataset->id));
    LetGo(state);
  }
}

// What its new home has got need not be kept for it any more.
void Node::LetGo(PeerDatasetState& state) {
  std::vector<std::pair<SampleId, KeepShare>> changes;
  Correct(state, [&](Directory& directory) {
    for (const SampleId s : directory.TakeLeft()) changes.emplace_back(s, directory.ShareOf(s));
  });
  if (!changes.empty()) engine_.ChangeShares(state.dataset->id, changes);
}

void Node::AnnounceChanges(uint32_t number, const HeldChanges& changes) {
  if (changes.got.empty() && changes.lost.empty()) return;
  NoteHeld(datasets_.at(number), changes);
  if (datasets_.at(number).dataset->growing) return;
  const bool whole = changes.got.size() + changes.lost.size() > kBitmapInstead;
  std::vector<ChangesMessage> messages;
  const auto add = [&](const std::vector<SampleId>& samples, bool got) {
    for (size_t at = 0; at < samples.size(); at += kMostChanges) {
      ChangesMessage& message = messages.emplace_back();
      message.dataset = number;
      (got ? message.got : message.lost)
          .assign(samples.begin() + static_cast<ptrdiff_t>(at),
                  samples.begin() +
                      static_cast<ptrdiff_t>(std::min(at + kMostChanges, samples.size())));
    }
  };
  if (!whole) {
    add(changes.got, true);
    add(changes.lost, false);
  }
  for (const Other& other : others_) {
    if (other.in == 0) continue;
    if (whole) SendHave(other.in, number, true);
    for (const ChangesMessage& message : messages) Send(other.in, message);
  }
}

}  // namespace forebay::peer
