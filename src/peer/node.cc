// The peer thread itself, its connections, and who is there.
#include "peer/node.h"

#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <utility>

#include "base/thread.h"
#include "peer/peer_source.h"

namespace forebay::peer {
namespace {

constexpr Nanos kTick = 20 * kMilli;
constexpr Nanos kIdleTick = 50 * kMilli;
constexpr Nanos kHandshakeWait = 5 * kSecond;
constexpr Nanos kPingEvery = kSecond;
// Less may be a node whose processors are all busy.
constexpr Nanos kLeastSilence = kSecond;
constexpr Nanos kFirstRetry = 100 * kMilli;
constexpr Nanos kLastRetry = 2 * kSecond;
constexpr Nanos kRefusedRetry = 5 * kSecond;
// Connections that have proven nothing yet, beyond one for each node.
constexpr size_t kStrangers = 64;

uint64_t RandomNumber() {
  const Digest digest = RandomDigest();
  uint64_t out;
  std::memcpy(&out, digest.data(), sizeof out);
  return out;
}

std::string Seconds(Nanos time) {
  const Nanos tenths = time / (100 * kMilli);
  return StrCat(tenths / 10, ".", tenths % 10, " s");
}

}  // namespace

Status PeerOptions::Validate() const {
  if (lease < 100 * kMilli || request_wait < 10 * kMilli || join_wait < 0) {
    return Status(Code::kInvalidArgument,
                  "a lease takes at least 0.1 s, request_wait 0.01 s, join_wait 0 s");
  }
  if (cluster.nodes < 1 || cluster.node >= cluster.nodes) {
    return Status(Code::kInvalidArgument,
                  StrCat("node ", cluster.node, " of ", cluster.nodes, " does not exist"));
  }
  return Status();
}

PeerMetrics::PeerMetrics(Registry& registry, const PeerOptions& options)
    : mechanism(registry.AddMechanism("peers", "samples from and for other nodes")),
      served(mechanism.AddCounter("forebay_peer_served_samples_total",
                                  "Samples that other nodes took from this one")),
      served_bytes(mechanism.AddCounter("forebay_peer_served_bytes_total",
                                        "Bytes that other nodes took from this one")),
      timeouts(mechanism.AddCounter("forebay_peer_timeouts_total",
                                    "Asks of peers that were given up and went to the source")),
      refused(mechanism.AddCounter("forebay_peer_refused_total",
                                   "Asks that a peer refused and that went to the source")),
      corrupt(mechanism.AddCounter("forebay_peer_corrupt_total",
                                   "Samples that came from a peer with wrong bytes")),
      lost(mechanism.AddCounter("forebay_peer_lost_total",
                                "Asks that were lost with their connection")),
      avoided(mechanism.AddCounter("forebay_peer_avoided_total",
                                   "Reads that went to the source because the peer was slow")),
      strangers(mechanism.AddCounter("forebay_peer_strangers_total",
                                     "Connections that did not prove the job's secret")),
      pulled(mechanism.AddCounter("forebay_peer_pulled_samples_total",
                                  "Samples copied from peers ahead of their use")),
      connected(mechanism.AddGauge("forebay_peer_connected", "Nodes that can be asked")),
      alive(mechanism.AddGauge("forebay_peer_alive", "Nodes of the job that are there")),
      unkept(mechanism.AddGauge("forebay_peer_unkept_bytes",
                                "Bytes that live here and that the tiers have no room for")),
      planned(mechanism.AddGauge("forebay_peer_planned_datasets",
                                 "Data sets whose samples live with the node that uses them most")),
      deaths(mechanism.AddCounter("forebay_peer_deaths_total",
                                  "Nodes that left, fell silent or were started anew")),
      bytes_per_second(
          mechanism.AddKnob("peer_bytes_per_second", KnobType::kBytesPerSecond, 0, int64_t{1} << 50,
                            static_cast<int64_t>(options.bytes_per_second),
                            "most that this node sends to all others together; 0: no limit")),
      link_bytes_per_second(
          mechanism.AddKnob("peer_link_bytes_per_second", KnobType::kBytesPerSecond, 0,
                            int64_t{1} << 50, static_cast<int64_t>(options.link_bytes_per_second),
                            "most that this node sends to one other; 0: no limit")),
      requests(mechanism.AddKnob("peer_requests_in_flight", KnobType::kCount, 1, 4096, 256,
                                 "most samples asked of one node and not there yet")),
      pull(mechanism.AddKnob("peer_pull", KnobType::kSwitch, 0, 1, 1,
                             "copies of what is used next are fetched while the link is idle")) {}

Node::Node(Engine& engine, const PeerOptions& options, NodeParts parts)
    : engine_(engine),
      options_(options),
      self_(options.cluster.node),
      nodes_(options.cluster.nodes),
      identity_{.node = self_, .incarnation = RandomNumber()},
      creator_(getpid()),
      parts_(std::move(parts)),
      metrics_(engine.registry(), options),
      exchange_(std::make_shared<Exchange>(options.join_wait, options.request_wait,
                                           options.coordinate, metrics_.avoided)),
      attached_(SteadyClock().Now()),
      others_(nodes_),
      turns_(nodes_) {
  for (uint32_t i = 0; i < nodes_; ++i) {
    others_[i].seen.node = i;
    others_[i].seen.state = "connecting";
  }
}

Status Node::Start() {
  Result<std::unique_ptr<Transport>> transport = parts_.transport(*this);
  if (!transport) return transport.error();
  transport_ = *std::move(transport);
  // Where the fabric does not take it, payloads go the slower way.
  (void)transport_->Register(
      {const_cast<std::byte*>(engine_.base()), static_cast<size_t>(engine_.arena_bytes())});
  const NodeRoom room = engine_.TierRoom();
  Result<std::unique_ptr<Membership>> membership =
      parts_.membership({.node = self_,
                         .incarnation = identity_.incarnation,
                         .address = transport_->address(),
                         .memory = room.memory,
                         .folder = room.folder,
                         .alive = true});
  if (!membership) return membership.error();
  membership_ = *std::move(membership);
  {
    MutexLock lock(mutex_);
    reached_by_ = StrCat(nodes_, " nodes by ", options_.cluster.source, ", ",
                         transport_->Describe(), " at ", transport_->address());
  }
  exchange_->Open([this] { transport_->Wake(); });
  plan_worker_ = std::make_unique<PlanWorker>(engine_, self_, [this] { transport_->Wake(); });
  Publish();
  engine_.SetSourceWrap([exchange = exchange_, self = self_](
                            DatasetId id, std::shared_ptr<const Catalog> catalog,
                            std::unique_ptr<Source> inner) -> Result<std::unique_ptr<Source>> {
    Result<std::shared_ptr<PeerDataset>> dataset =
        PeerDataset::Make(id, std::move(catalog), self, SteadyClock().Now());
    if (!dataset) return dataset.error();
    Result<std::unique_ptr<PeerSource>> made =
        PeerSource::Make(exchange, *dataset, std::move(inner));
    if (!made) return made.error();
    exchange->Add(*std::move(dataset));
    return std::unique_ptr<Source>(*std::move(made));
  });
  engine_.SetClusterReport([this] {
    ClusterReport report;
    report.node = self_;
    report.nodes = nodes_;
    report.coordinated = options_.coordinate;
    MutexLock lock(mutex_);
    report.description = describe_;
    report.health = health_;
    report.peers = seen_;
    return report;
  });
  if (!parts_.own_thread) return Status();
  auto thread = StartThread("forebay-peer", [this](const std::stop_token& stop) { Run(stop); });
  if (!thread) return thread.error();
  thread_ = *std::move(thread);
  return Status();
}

Node::~Node() {
  if (getpid() != creator_) {
    // In a forked child the thread does not exist, and what it used is the parent's.
    if (thread_.joinable()) thread_.detach();
    (void)transport_.release();
    (void)membership_.release();
    (void)plan_worker_.release();
    return;
  }
  engine_.SetSourceWrap(nullptr);
  engine_.SetClusterReport(nullptr);
  if (thread_.joinable()) {
    thread_.request_stop();
    transport_->Wake();
    thread_.join();
  }
  plan_worker_.reset();  // it wakes the transport
  Shutdown();
}

void Node::Shutdown() {
  std::vector<Ask> left = exchange_->Close();
  membership_.reset();
  // From here on nothing is written to anyone's memory.
  transport_.reset();
  for (const Ask& ask : left) {
    const Answer answer{.slot = ask.slot, .outcome = Outcome::kLost, .crc = 0};
    ask.dataset->Deliver({&answer, 1});
  }
  for (const uint32_t id : requests_.Select([](const Request&) { return true; })) {
    End(id, Outcome::kLost);
  }
  Deliver(false, 0);
  for (const auto& [number, state] : datasets_) state.dataset->Abandon();
  for (size_t i = 0; i < serves_.capacity(); ++i) {
    if (serves_[i].at != Serve::At::kFree) EndServe(i);
  }
  for (const auto& [number, state] : datasets_) {
    if (state.ready) (void)engine_.CloseStream(state.serving);
  }
}

std::vector<PeerStatus> Node::Seen() const {
  MutexLock lock(mutex_);
  return seen_;
}

std::string Node::Describe() const {
  MutexLock lock(mutex_);
  return describe_;
}

void Node::Publish() {
  std::vector<PeerStatus> seen;
  size_t connected = 0;
  for (const Other& other : others_) {
    if (other.seen.node == self_) continue;
    seen.push_back(other.seen);
    seen.back().address = other.member.address;
    connected += other.out_ready ? 1 : 0;
  }
  metrics_.connected.Set(connected);
  metrics_.alive.Set(static_cast<uint64_t>(std::count_if(
      view_.members.begin(), view_.members.end(), [](const Member& one) { return one.alive; })));
  const MembershipCounts counts = membership_->counts();
  metrics_.deaths.Add(counts.deaths - counted_.deaths);
  metrics_.strangers.Add(counts.refused - counted_.refused);
  counted_ = counts;
  const uint64_t strangers = transport_->strangers();
  metrics_.strangers.Add(strangers - std::exchange(counted_strangers_, strangers));
  metrics_.planned.Set(
      static_cast<uint64_t>(std::count_if(datasets_.begin(), datasets_.end(), [](const auto& one) {
        return one.second.in_use != nullptr;
      })));
  const uint64_t unkept = UnkeptBytes();
  metrics_.unkept.Set(unkept);
  std::string health = membership_->health().message();
  if (health.empty() && unkept > 0) {
    health = StrCat((unkept >> 20) + 1,
                    " MiB of the samples that live here find no room; raise memory=");
  }
  for (const Other& other : others_) {
    if (!health.empty()) break;
    if (!other.went_silent) continue;
    health = StrCat("node ", other.seen.node, " at ", other.member.address, " does not answer (",
                    other.seen.fault,
                    "): what it has is read from the source until it does; look at that machine "
                    "and the network to it");
  }
  const std::string holder = membership_->Holder();
  MutexLock lock(mutex_);
  describe_ = holder.empty() ? reached_by_ : StrCat(reached_by_, ", ", holder);
  health_ = std::move(health);
  seen_ = std::move(seen);
}

void Node::Run(const std::stop_token& stop) {
  const std::array<int, 2> fds = {membership_->event_fd(), engine_.serving_fd()};
  while (!stop.stop_requested()) {
    const Nanos wait = Round();
    if (wait > 0) transport_->Wait(fds, wait);
  }
}

bool Node::Woken() const {
  std::array<pollfd, 2> fds{
      {{membership_->event_fd(), POLLIN, 0}, {engine_.serving_fd(), POLLIN, 0}}};
  return poll(fds.data(), fds.size(), 0) > 0;
}

std::optional<Directory> Node::PlanOf(DatasetId dataset) const {
  for (const auto& [number, state] : datasets_) {
    if (state.ready && state.dataset->id == dataset) return state.dataset->Plan();
  }
  return std::nullopt;
}

// Returns for how long there is nothing to do, unless something comes.
Nanos Node::Round() {
  if (slept_) {
    pollfd member{membership_->event_fd(), POLLIN, 0};
    if (poll(&member, 1, 0) > 0) tick_at_ = 0;
  }
  const bool more = transport_->Progress();
  exchange_->Take(&asks_, &new_datasets_);
  const Nanos now = SteadyClock().Now();
  if (!new_datasets_.empty()) AddDatasets(new_datasets_);
  TakePlans();
  TellPlansInTime(now);
  if (!asks_.empty()) {
    // A stream has been opened, it may be: a plan that comes late moves what was read before.
    if (now >= plans_at_) WantPlans(now);
    Enqueue(asks_);
  }
  SendAsks(now);
  uint64_t count;
  if ((slept_ || !reading_.empty()) && read(engine_.serving_fd(), &count, sizeof count) > 0) {
    PollReading();
  }
  TakeTurns(now);
  if (now >= tick_at_) Tick(now);
  for (const uint32_t node : std::exchange(gathering_, {})) FlushGather(node);
  slept_ = !more && exchange_->MaySleep();
  Deliver(!slept_, now);
  if (!slept_) return 0;
  return std::max<Nanos>(0, std::min(tick_at_, TurnAt()) - SteadyClock().Now());
}

// When a request that a rate holds back can be served.
Nanos Node::TurnAt() const {
  return serves_.used() < kMostServes ? turns_.ready_at() : kNeverReady;
}

void Node::Tick(Nanos now) {
  engine_.registry().ReadKnobs(&knobs_seen_, [&] {
    turns_.SetRates(static_cast<uint64_t>(metrics_.bytes_per_second.value()),
                    static_cast<uint64_t>(metrics_.link_bytes_per_second.value()), now);
  });
  if (pollfd member{membership_->event_fd(), POLLIN, 0};
      view_.version == 0 || poll(&member, 1, 0) > 0) {
    TakeView(now);
  }
  LeaveDatasets();
  ReadyDatasets();
  PlanDatasets(now);
  WantPlans(now);
  for (uint32_t node = 0; node < nodes_; ++node) UpdateReach(node);
  Reconnect(now);
  CheckSilence(now);
  GiveUpLate(now);
  PollReading();
  AnnounceHeld(now);
  Pull(now);
  Publish();
  const bool busy = requests_.size() > 0 || !reading_.empty() || turns_.waiting() > 0;
  tick_at_ = now + (busy || !planned_ ? kTick : kIdleTick);
}

// ---- who is there ----------------------------------------------------------------------------

void Node::TakeView(Nanos now) {
  View view = membership_->Current();
  if (view.version == view_.version) return;
  view_ = std::move(view);
  std::vector<bool> alive(nodes_, false);
  for (const Member& member : view_.members) {
    if (member.node >= nodes_ || member.node == self_) continue;
    others_[member.node].suspected = member.suspected;
    if (!member.alive) continue;
    alive[member.node] = true;
    Other& other = others_[member.node];
    const bool same = other.known && other.member.incarnation == member.incarnation &&
                      other.member.address == member.address;
    if (same) continue;
    if (other.known) Forget(member.node, "it was started anew", member.incarnation);
    other.member = member;
    other.known = true;
    other.was_ready = false;
    other.retry_at = now;
    other.backoff = 0;
    other.seen.state = other.out_ready ? "connected" : "connecting";
    UpdateReach(member.node);
  }
  for (uint32_t node = 0; node < nodes_; ++node) {
    if (alive[node] || !others_[node].known) continue;
    others_[node].known = false;
    others_[node].retry_at = now + options_.lease;
    Forget(node, "it is dead");
    others_[node].seen.state = "dead";
    Fault(node, "it was silent for its lease, or has left");
  }
  if (!planned_) return;
  for (auto& [number, state] : datasets_) {
    if (state.left) continue;  // the engine may have another one under its number
    if (state.dataset->growing) {
      PlanGrowing(number);
    } else if (std::optional<Directory> plan = state.dataset->Plan()) {
      Plan(number, *std::move(plan));
      AdoptIfAgreed(number);  // who is dead need not agree
    }
  }
}

// What it had is not there any more, and what it was asked for does not come.
void Node::Forget(uint32_t node, const std::string& why, uint64_t incarnation) {
  Other& other = others_[node];
  if (other.out != 0) Close(other.out, why);
  // The one that was started anew may be here before the news of it.
  const auto in = connections_.find(other.in);
  if (in != connections_.end() && in->second.handshake->other().incarnation != incarnation) {
    Close(other.in, why);
  }
  other.theirs.clear();
  other.announced.clear();
  other.plans.clear();
  for (auto& [number, state] : datasets_) {
    Correct(state, [&](Directory& directory) { directory.OnDead(node); });
  }
  UpdateReach(node);
}

void Node::Reconnect(Nanos now) {
  for (auto& [id, connection] : connections_) {
    const bool proven = connection.handshake && connection.handshake->proven();
    if (!connection.closing && !proven && now - connection.since > kHandshakeWait) {
      Close(id, "no proof of the secret in time");
    }
  }
  if (!options_.coordinate) return;
  for (uint32_t node = 0; node < nodes_; ++node) {
    Other& other = others_[node];
    const bool wanted = other.known || other.suspected;
    if (!wanted || other.out != 0 || now < other.retry_at) continue;
    const Result<ConnectionId> made = transport_->Connect(other.member.address);
    other.backoff = other.known ? std::clamp(other.backoff * 2, kFirstRetry, kLastRetry)
                                : options_.lease;  // each return is a new plan
    other.retry_at = now + other.backoff;
    if (!made) {
      Fault(node, made.error().message());
      continue;
    }
    other.out = *made;
    Connection& connection = connections_[*made];
    connection.asking = true;
    connection.node = node;
    connection.since = now;
  }
}

// A peer of which nothing comes at all, no answer to a ping either, is left sooner than one that
// only takes long for a request: nobody is to wait two seconds for a machine that stands still.
// Large samples over a slow link are nothing but bytes for as long as they take.
Nanos Node::SilencePatience(const Other& other) const {
  constexpr Nanos kTimesTypical = 8;
  const Nanos least =
      std::max(options_.request_wait / 2, std::min(options_.request_wait, kLeastSilence));
  return std::clamp(kTimesTypical * other.seen.latency_ns, least, options_.request_wait);
}

void Node::CheckSilence(Nanos now) {
  for (uint32_t node = 0; node < nodes_; ++node) {
    Other& other = others_[node];
    if (!other.out_ready) continue;
    const bool asked = other.flying > 0;
    const Nanos silent = now - other.last_received;
    const Nanos patience = SilencePatience(other);
    const bool unanswered = asked && silent > patience && now - other.oldest > patience;
    if (unanswered || silent > options_.lease) {
      other.seen.state = "silent";
      other.went_silent = true;
      Fault(node, StrCat("silent for ", Seconds(silent)));
      Close(other.out, "silent");
      continue;
    }
    const Nanos every = std::min(kPingEvery, (asked ? patience : options_.lease) / 4);
    if (now - other.last_received > every && now - other.pinged > every) {
      other.pinged = now;
      Send(other.out, PingMessage{.stamp = static_cast<uint64_t>(now), .reply = 0});
    }
  }
}

void Node::LostOut(uint32_t node) {
  Other& other = others_[node];
  other.was_ready = other.was_ready || other.out_ready;
  other.out_ready = false;
}

void Node::Fault(uint32_t node, std::string what) {
  PeerStatus& seen = others_[node].seen;
  seen.fault = std::move(what);
  ++seen.faults;
}

// ---- connections -----------------------------------------------------------------------------

void Node::Close(ConnectionId id, const std::string& why) {
  const auto it = connections_.find(id);
  if (it == connections_.end() || it->second.closing) return;
  Connection& connection = it->second;
  connection.closing = true;
  connection.why = why;
  if (connection.asking) {
    LostOut(connection.node);
    UpdateReach(connection.node);
    // What has begun to arrive ends with OnPayload.
    EndAllOf(connection.node, id, Outcome::kLost);
  }
  transport_->Close(id);
}

void Node::CloseOldestStranger() {
  ConnectionId oldest = 0;
  Nanos since = 0;
  for (const auto& [id, connection] : connections_) {
    const bool proven = connection.handshake && connection.handshake->proven();
    if (connection.asking || connection.closing || proven) continue;
    if (oldest != 0 && connection.since >= since) continue;
    oldest = id;
    since = connection.since;
  }
  if (oldest != 0) Close(oldest, "others wait to prove themselves");
}

bool Node::Send(ConnectionId connection, const Message& message) {
  return transport_->Send(connection, Encode(message), {}, 0).ok();
}

void Node::OnOpen(ConnectionId id, bool accepted) {
  const Nanos now = SteadyClock().Now();
  if (accepted) {
    // Strangers take places from each other: a member proves itself long before it is the oldest.
    if (strangers_ >= kStrangers + nodes_) CloseOldestStranger();
    ++strangers_;
    Connection& connection = connections_[id];
    connection.since = now;
    connection.open = true;
    connection.handshake = Handshake::Accept(parts_.secret, identity_, nodes_, RandomDigest());
    return;
  }
  const auto it = connections_.find(id);
  if (it == connections_.end() || it->second.closing) return;
  Connection& connection = it->second;
  connection.open = true;
  connection.since = now;
  connection.handshake =
      Handshake::Initiate(parts_.secret, identity_, connection.node, RandomDigest());
  Send(id, connection.handshake->Hello());
}

void Node::OnClosed(ConnectionId id, const Status& why) {
  const auto it = connections_.find(id);
  if (it == connections_.end()) return;
  const Connection connection = std::move(it->second);
  connections_.erase(it);
  const bool proven = connection.handshake && connection.handshake->proven();
  if (!connection.asking && !proven) --strangers_;
  if (connection.node == kNoNode) return;
  Other& other = others_[connection.node];
  if (connection.asking) {
    if (other.out != id) return;
    other.out = 0;
    LostOut(connection.node);
    other.theirs.clear();
    other.announced.clear();
    other.plans.clear();
    if (!connection.closing) {
      Fault(connection.node, StrCat("connection lost: ", why.message()));
      if (other.seen.state != "refused") other.seen.state = other.known ? "connecting" : "dead";
    }
    EndAllOf(connection.node, id, Outcome::kLost);
    UpdateReach(connection.node);
    if (other.known) {
      membership_->Suspect(connection.node, other.member.incarnation,
                           connection.why.empty() ? why.message() : connection.why);
    }
  } else if (other.in == id) {
    other.in = 0;
    DropServing(connection.node, id);
  }
}

void Node::Shake(ConnectionId id, Connection& connection, const Message& message, bool payload) {
  if (!connection.handshake || payload) {
    Close(id, "it spoke before it proved the secret");
    return;
  }
  Result<Handshake::Step> step = connection.handshake->OnMessage(message);
  if (!step) {
    if (connection.asking) {
      Other& other = others_[connection.node];
      Fault(connection.node, step.error().message());
      if (step.error().code() == Code::kPermissionDenied) {
        other.seen.state = "refused";
        other.retry_at = SteadyClock().Now() + kRefusedRetry;
      }
    } else {
      metrics_.strangers.Add(1);
    }
    Close(id, step.error().message());
    return;
  }
  if (step->reply) Send(id, *step->reply);
  if (step->proven) Proven(id, connection);
}

void Node::Proven(ConnectionId id, Connection& connection) {
  transport_->SetProven(id);
  const uint32_t node = connection.handshake->other().node;
  Other& other = others_[node];
  const Nanos now = SteadyClock().Now();
  if (connection.asking) {
    other.out_ready = true;
    other.went_silent = false;
    other.last_received = now;
    other.backoff = 0;
    other.seen.state = "connected";
    membership_->Trust(node, connection.handshake->other().incarnation);
    return;
  }
  --strangers_;
  connection.node = node;
  // It comes anew: the old connection is gone, or soon will be.
  const ConnectionId old = std::exchange(other.in, id);
  if (old != 0) {
    DropServing(node, old);
    Close(old, "replaced");
  }
  for (const auto& [number, state] : datasets_) Announce(node, number);
}

std::span<std::byte> Node::OnMessage(ConnectionId id, std::span<const std::byte> header,
                                     uint64_t payload_bytes, uint64_t* tag) {
  const auto it = connections_.find(id);
  if (it == connections_.end() || it->second.closing) return {};
  Connection& connection = it->second;
  Result<Message> decoded = Decode(header);
  if (!decoded) {
    if (connection.node != kNoNode) Fault(connection.node, "sent what is no message");
    Close(id, decoded.error().message());
    return {};
  }
  const Message& message = *decoded;
  if (!connection.handshake || !connection.handshake->proven()) {
    Shake(id, connection, message, payload_bytes != 0);
    return {};
  }
  const uint32_t node = connection.node;
  Other& other = others_[node];
  if (connection.asking) other.last_received = SteadyClock().Now();
  if (const auto* data = std::get_if<DataMessage>(&message); data != nullptr && connection.asking) {
    return OnData(id, *data, payload_bytes, tag);
  }
  bool right = payload_bytes == 0;
  if (const auto* ping = std::get_if<PingMessage>(&message)) {
    if (ping->reply == 0) Send(id, PingMessage{.stamp = ping->stamp, .reply = 1});
  } else if (!connection.asking) {
    if (const auto* get = std::get_if<GetMessage>(&message)) {
      OnGet(id, node, *get);
    } else if (const auto* named = std::get_if<GetNamedMessage>(&message)) {
      OnGetNamed(id, node, *named);
    } else if (const auto* cancel = std::get_if<CancelMessage>(&message)) {
      OnCancel(node, cancel->request);
    } else {
      right = false;
    }
  } else if (const auto* refused = std::get_if<RefusedMessage>(&message)) {
    OnRefused(id, *refused);
  } else if (const auto* dataset = std::get_if<DatasetMessage>(&message)) {
    constexpr size_t kMostDatasets = 4096;
    const auto known = other.theirs.find(dataset->name);
    if (dataset->over()) {
      // It may have opened the same one again, under another number.
      if (known != other.theirs.end() && known->second.number == dataset->number) {
        other.theirs.erase(known);
        other.announced.erase(dataset->name);
        other.plans.erase(dataset->name);
      }
    } else if (other.theirs.size() < kMostDatasets) {
      other.theirs.insert_or_assign(dataset->name, *dataset);
    }
    UpdateReach(node);
    // Before, it could not have made use of it.
    for (const auto& [number, state] : datasets_) {
      if (!state.ready || state.dataset->name != dataset->name || other.in == 0) continue;
      SendHave(other.in, number, false);
    }
  } else if (const auto* have = std::get_if<HaveMessage>(&message)) {
    if (PeerDatasetState* state = DatasetOf(node, have->dataset)) {
      const uint64_t end = uint64_t{have->first} + have->bits.size() * 8;
      const uint64_t samples = state->dataset->catalog->size();
      if (have->first % 8 == 0 && end < samples + 8) {
        Correct(*state, [&](Directory& d) { d.OnHave(node, have->first, have->bits); });
        if (end >= samples && other.announced.insert(state->dataset->name).second)
          UpdateReach(node);
      }
    }
  } else if (const auto* plan = std::get_if<PlanMessage>(&message)) {
    for (const auto& [name, theirs] : other.theirs) {
      if (theirs.number != plan->dataset) continue;
      other.plans.insert_or_assign(name, *plan);
      for (auto& [number, state] : datasets_) {
        if (!state.ready || state.dataset->name != name) continue;
        AdoptIfAgreed(number);
        if (plan->in_use != 0) OnPlanUsed(state, number, node);
      }
    }
  } else if (const auto* changes = std::get_if<ChangesMessage>(&message)) {
    if (PeerDatasetState* state = DatasetOf(node, changes->dataset)) {
      const SampleId samples = static_cast<SampleId>(state->dataset->catalog->size());
      Correct(*state, [&](Directory& d) {
        for (const SampleId s : changes->got) {
          if (s < samples) d.OnGot(node, s);
        }
        for (const SampleId s : changes->lost) {
          if (s < samples) d.OnLost(node, s);
        }
      });
    }
  } else {
    right = false;
  }
  if (!right) {
    Fault(node, "sent a message that has no place");
    Close(id, "a message that has no place");
  }
  return {};
}

Result<std::unique_ptr<Peers>> AttachWith(Engine& engine, const PeerOptions& options,
                                          NodeParts parts) {
  FOREBAY_RETURN_IF_ERROR(options.Validate());
  auto node = std::make_unique<Node>(engine, options, std::move(parts));
  FOREBAY_RETURN_IF_ERROR(node->Start());
  return std::unique_ptr<Peers>(std::move(node));
}

}  // namespace forebay::peer
