#include "transport/loopback.h"

#include <poll.h>
#include <sys/eventfd.h>

#include <algorithm>
#include <cassert>
#include <cerrno>
#include <cstring>
#include <deque>
#include <list>
#include <map>
#include <set>
#include <utility>
#include <vector>

#include "base/owned.h"
#include "base/thread_annotations.h"

namespace forebay {
namespace {

constexpr int kEventsAtOnce = 64;

struct Node;

// A payload that its sender has lent, until the receiver has copied it.
struct Lent {
  uint64_t tag = 0;
  std::span<const std::byte> bytes;
  Nanos due = 0;  // when the link has carried its last byte
};

// Both ends of a connection; side 0 asked for it.
struct Link {
  std::shared_ptr<Node> node[2];  // both must know the other's name and queue after its end
  ConnectionId id[2] = {0, 0};
  bool gone[2] = {false, false};     // the side has closed, or its transport is no more
  std::map<uint64_t, Lent> lent[2];  // by number, of the side that sends
  uint64_t next = 0;
};

struct Event {
  enum class Kind { kAsked, kOpen, kMessage, kSent, kClosed } kind = Kind::kOpen;
  std::shared_ptr<Link> link;
  int side = 0;         // of the node in whose queue it is
  bool remote = false;  // came over the network: a cut holds it up
  std::vector<std::byte> header;
  uint64_t number = 0;  // kMessage: of the lent payload
  uint64_t payload_bytes = 0;
  uint64_t tag = 0;  // kSent
  Status status;     // kSent, kClosed
};

// A payload whose place is known.
struct Incoming {
  std::shared_ptr<Link> link;
  int side = 0;
  uint64_t number = 0;
  uint64_t tag = 0;
  std::span<std::byte> place;
  Nanos due = 0;
};

struct Connection {
  std::shared_ptr<Link> link;
  int side = 0;
  bool open = false;
  bool closing = false;
  Nanos give_up = 0;  // while it is not open
};

struct Node {
  explicit Node(std::string n) : name(std::move(n)) {}
  void Signal() const {
    const uint64_t one = 1;
    // Full means that it is readable already.
    [[maybe_unused]] const ssize_t wrote = ::write(wake.get(), &one, sizeof one);
  }

  const std::string name;
  OwnedFd wake;
  // All below are guarded by the network's mutex.
  std::deque<Event> events;
  std::list<Incoming> incoming;
  std::map<ConnectionId, Connection> connections;
  ConnectionId next_connection = 1;
  Nanos link_free = 0;
  uint64_t payloads = 0;
};

}  // namespace

struct LoopbackNetwork::State {
  bool IsCut(const Link& link) const REQUIRES(mutex) {
    return !cuts.empty() && cuts.contains(Pair(link.node[0]->name, link.node[1]->name));
  }
  static std::pair<std::string, std::string> Pair(const std::string& a, const std::string& b) {
    return a < b ? std::pair(a, b) : std::pair(b, a);
  }
  void Post(Node& to, Event event) REQUIRES(mutex) {
    to.events.push_back(std::move(event));
    to.Signal();
  }
  // The side takes no further part; the other is told.
  void Leave(const std::shared_ptr<Link>& link, int side, const std::string& why) REQUIRES(mutex) {
    if (std::exchange(link->gone[side], true)) return;
    if (link->gone[1 - side] || link->node[1 - side] == nullptr) return;
    Event event;
    event.kind = Event::Kind::kClosed;
    event.link = link;
    event.side = 1 - side;
    event.remote = true;
    event.status = Status(Code::kUnavailable, why);
    Post(*link->node[1 - side], std::move(event));
  }

  Mutex mutex;
  std::map<std::string, std::shared_ptr<Node>> nodes GUARDED_BY(mutex);
  std::set<std::pair<std::string, std::string>> cuts GUARDED_BY(mutex);
  std::map<std::string, uint64_t> rates GUARDED_BY(mutex);
  std::map<std::string, uint64_t> corrupt GUARDED_BY(mutex);
};

class LoopbackTransport final : public Transport {
 public:
  LoopbackTransport(std::shared_ptr<LoopbackNetwork::State> state, std::shared_ptr<Node> node,
                    TransportHandler& handler, Nanos connect_wait)
      : state_(std::move(state)),
        node_(std::move(node)),
        handler_(handler),
        connect_wait_(connect_wait) {}
  ~LoopbackTransport() override {
    MutexLock lock(state_->mutex);
    for (auto& [id, connection] : node_->connections) {
      if (connection.link != nullptr) {
        state_->Leave(connection.link, connection.side, StrCat(node_->name, " has gone"));
      }
    }
    for (const Event& event : node_->events) {
      if (event.kind == Event::Kind::kAsked) {
        state_->Leave(event.link, 1, StrCat(node_->name, " has gone"));
      }
    }
    node_->connections.clear();
    node_->events.clear();
    node_->incoming.clear();
    const auto it = state_->nodes.find(node_->name);
    if (it != state_->nodes.end() && it->second == node_) state_->nodes.erase(it);
  }

  std::string address() const override { return node_->name; }
  std::string Describe() const override { return "loopback"; }
  Status Register(std::span<std::byte>) override { return Status(); }

  Result<ConnectionId> Connect(const std::string& address) override {
    MutexLock lock(state_->mutex);
    const ConnectionId id = node_->next_connection++;
    Connection& connection = node_->connections[id];
    connection.give_up = SteadyClock().Now() + connect_wait_;
    const auto link = std::make_shared<Link>();
    link->node[0] = node_;
    link->id[0] = id;
    connection.link = link;
    const auto it = state_->nodes.find(address);
    Event event;
    event.link = link;
    if (it == state_->nodes.end()) {
      // Beyond a cut nobody can say so.
      if (state_->cuts.contains(LoopbackNetwork::State::Pair(node_->name, address))) return id;
      event.kind = Event::Kind::kClosed;
      event.status = Status(Code::kUnavailable, StrCat("nobody listens at ", address));
      state_->Post(*node_, std::move(event));
      return id;
    }
    link->node[1] = it->second;
    event.kind = Event::Kind::kAsked;
    event.side = 1;
    event.remote = true;
    state_->Post(*it->second, std::move(event));
    return id;
  }

  void Close(ConnectionId id) override {
    MutexLock lock(state_->mutex);
    const auto it = node_->connections.find(id);
    if (it == node_->connections.end() || it->second.closing) return;
    End(it->second, Status(Code::kCancelled, "closed here"));
  }

  Status Send(ConnectionId id, std::span<const std::byte> header,
              std::span<const std::byte> payload, uint64_t tag) override {
    if (header.size() > kMaxHeader || payload.size() > kMaxPayload) {
      return Status(Code::kInvalidArgument, StrCat("a message of ", header.size(), " + ",
                                                   payload.size(), " bytes is too large"));
    }
    MutexLock lock(state_->mutex);
    const auto it = node_->connections.find(id);
    if (it == node_->connections.end() || it->second.closing || !it->second.open) {
      return Status(Code::kNotFound, StrCat("no open connection ", id));
    }
    Link& link = *it->second.link;
    const int side = it->second.side;
    Event event;
    event.kind = Event::Kind::kMessage;
    event.link = it->second.link;
    event.side = 1 - side;
    event.remote = true;
    event.header.assign(header.begin(), header.end());
    event.payload_bytes = payload.size();
    event.number = link.next++;
    Nanos due = 0;
    if (!payload.empty()) {
      const auto rate = state_->rates.find(node_->name);
      if (rate != state_->rates.end()) {
        const Nanos start = std::max(SteadyClock().Now(), node_->link_free);
        due = start + static_cast<Nanos>(static_cast<double>(payload.size()) * 1e9 /
                                         static_cast<double>(rate->second));
        node_->link_free = due;
      }
    }
    if (payload.empty()) {
      Event sent;
      sent.kind = Event::Kind::kSent;
      sent.link = it->second.link;
      sent.side = side;
      sent.tag = tag;
      state_->Post(*node_, std::move(sent));
    } else {
      // Also when the other side has gone: it ends with the connection.
      link.lent[side][event.number] = Lent{tag, payload, due};
    }
    if (!link.gone[1 - side]) state_->Post(*link.node[1 - side], std::move(event));
    return Status();
  }

  bool Progress() override {
    GiveUp();
    for (int i = 0; i < kEventsAtOnce; ++i) {
      if (!OnePayload() && !OneEvent()) return false;
    }
    return true;
  }

  void Wait(std::span<const int> wake_fds, Nanos wait) override {
    {
      MutexLock lock(state_->mutex);
      const Nanos now = SteadyClock().Now();
      const Nanos next = NextDue();
      if (next <= now || FirstEvent() != node_->events.end()) return;
      wait = std::min(wait, next - now);
    }
    std::vector<pollfd> fds{{node_->wake.get(), POLLIN, 0}};
    for (const int fd : wake_fds) fds.push_back({fd, POLLIN, 0});
    const Nanos bound = std::max<Nanos>(wait, 0);
    const timespec time{bound / kSecond, bound % kSecond};
    ::ppoll(fds.data(), fds.size(), &time, nullptr);
    uint64_t count = 0;
    [[maybe_unused]] const ssize_t got = ::read(node_->wake.get(), &count, sizeof count);
  }

  void Wake() override { node_->Signal(); }

 private:
  // From here on no byte of this end is read or written by anyone; the handler is told in Progress.
  void End(Connection& connection, Status why) REQUIRES(state_->mutex) {
    connection.closing = true;
    state_->Leave(connection.link, connection.side, StrCat(node_->name, " has closed"));
    Event event;
    event.kind = Event::Kind::kClosed;
    event.link = connection.link;
    event.side = connection.side;
    event.status = std::move(why);
    state_->Post(*node_, std::move(event));
  }

  void GiveUp() {
    MutexLock lock(state_->mutex);
    const Nanos now = SteadyClock().Now();
    for (auto& [id, connection] : node_->connections) {
      if (connection.open || connection.closing || connection.give_up > now) continue;
      End(connection, Status(Code::kDeadlineExceeded, "no answer to a connection"));
    }
  }

  std::deque<Event>::iterator FirstEvent() REQUIRES(state_->mutex) {
    auto it = node_->events.begin();
    while (it != node_->events.end() && it->remote && state_->IsCut(*it->link)) ++it;
    return it;
  }

  // Neither side has closed, and the way is free.
  bool Flows(const Incoming& in) REQUIRES(state_->mutex) {
    return !in.link->gone[0] && !in.link->gone[1] && !state_->IsCut(*in.link);
  }

  // When there will be something to do that nobody signals.
  Nanos NextDue() REQUIRES(state_->mutex) {
    Nanos due = INT64_MAX;
    for (const Incoming& in : node_->incoming) {
      if (Flows(in)) due = std::min(due, in.due);
    }
    for (const auto& [id, connection] : node_->connections) {
      if (!connection.open && !connection.closing) due = std::min(due, connection.give_up);
    }
    return due;
  }

  // Copies one payload whose time has come.
  bool OnePayload() {
    Incoming in;
    {
      MutexLock lock(state_->mutex);
      const Nanos now = SteadyClock().Now();
      auto it = node_->incoming.begin();
      while (it != node_->incoming.end() && (it->due > now || !Flows(*it))) ++it;
      if (it == node_->incoming.end()) return false;
      in = *it;
      node_->incoming.erase(it);
      Link& link = *in.link;
      const int from = 1 - in.side;
      const auto lent = link.lent[from].find(in.number);
      std::memcpy(in.place.data(), lent->second.bytes.data(), in.place.size());
      Node& sender = *link.node[from];
      const auto corrupt = state_->corrupt.find(sender.name);
      if (corrupt != state_->corrupt.end() && ++sender.payloads % corrupt->second == 0) {
        in.place[in.place.size() / 2] ^= std::byte{1};
      }
      TakeBack(in.link, from, in.number);
    }
    handler_.OnPayload(in.link->id[in.side], in.tag, Status());
    return true;
  }

  // The sender may have its payload back.
  void TakeBack(const std::shared_ptr<Link>& link, int from, uint64_t number)
      REQUIRES(state_->mutex) {
    const auto it = link->lent[from].find(number);
    if (it == link->lent[from].end()) return;
    Event sent;
    sent.kind = Event::Kind::kSent;
    sent.link = link;
    sent.side = from;
    sent.tag = it->second.tag;
    link->lent[from].erase(it);
    if (!link->gone[from]) state_->Post(*link->node[from], std::move(sent));
  }

  bool OneEvent() {
    Event event;
    {
      MutexLock lock(state_->mutex);
      const auto it = FirstEvent();
      if (it == node_->events.end()) return false;
      event = std::move(*it);
      node_->events.erase(it);
    }
    switch (event.kind) {
      case Event::Kind::kAsked:
        return Asked(event);
      case Event::Kind::kOpen:
        return Opened(event);
      case Event::Kind::kMessage:
        return Arrived(event);
      case Event::Kind::kSent:
        handler_.OnSent(event.link->id[event.side], event.tag, event.status);
        return true;
      case Event::Kind::kClosed:
        return Closed(event);
    }
    return true;
  }

  bool Asked(const Event& event) {
    ConnectionId id = 0;
    {
      MutexLock lock(state_->mutex);
      Link& link = *event.link;
      if (link.gone[0]) return true;
      id = node_->next_connection++;
      link.id[1] = id;
      node_->connections[id] = Connection{event.link, 1, true, false, 0};
      Event open;
      open.link = event.link;
      open.remote = true;
      state_->Post(*link.node[0], std::move(open));
    }
    handler_.OnOpen(id, true);
    return true;
  }

  bool Opened(const Event& event) {
    const ConnectionId id = event.link->id[0];
    {
      MutexLock lock(state_->mutex);
      const auto it = node_->connections.find(id);
      if (it == node_->connections.end() || it->second.closing) return true;
      it->second.open = true;
    }
    handler_.OnOpen(id, false);
    return true;
  }

  bool Arrived(const Event& event) {
    const ConnectionId id = event.link->id[event.side];
    Nanos due = 0;
    {
      MutexLock lock(state_->mutex);
      const auto it = node_->connections.find(id);
      if (it == node_->connections.end() || it->second.closing) return true;
      if (event.payload_bytes > 0) {
        // Its sender has closed and has its bytes back.
        if (event.link->gone[1 - event.side]) return true;
        due = event.link->lent[1 - event.side].at(event.number).due;
      }
    }
    uint64_t tag = 0;
    const std::span<std::byte> place =
        handler_.OnMessage(id, event.header, event.payload_bytes, &tag);
    if (event.payload_bytes == 0) return true;
    assert(place.empty() || place.size() == event.payload_bytes);
    MutexLock lock(state_->mutex);
    if (place.empty()) {
      TakeBack(event.link, 1 - event.side, event.number);
    } else {
      node_->incoming.push_back(Incoming{event.link, event.side, event.number, tag, place, due});
    }
    return true;
  }

  bool Closed(const Event& event) {
    const ConnectionId id = event.link->id[event.side];
    std::vector<uint64_t> places;
    std::vector<Event> sent;
    std::map<uint64_t, Lent> lent;
    {
      MutexLock lock(state_->mutex);
      const auto it = node_->connections.find(id);
      if (it == node_->connections.end()) return true;
      event.link->gone[event.side] = true;
      // Our own closing ends it, not the news of the other's.
      if (it->second.closing && event.remote) return true;
      node_->connections.erase(it);
      lent.swap(event.link->lent[event.side]);
      for (auto in = node_->incoming.begin(); in != node_->incoming.end();) {
        if (in->link == event.link && in->side == event.side) {
          places.push_back(in->tag);
          in = node_->incoming.erase(in);
        } else {
          ++in;
        }
      }
      std::erase_if(node_->events, [&](Event& other) {
        if (other.link != event.link || other.side != event.side) return false;
        if (other.kind == Event::Kind::kSent) sent.push_back(std::move(other));
        return true;
      });
    }
    for (const uint64_t tag : places) handler_.OnPayload(id, tag, event.status);
    for (const Event& one : sent) handler_.OnSent(id, one.tag, one.status);
    for (const auto& [number, one] : lent) handler_.OnSent(id, one.tag, event.status);
    handler_.OnClosed(id, event.status);
    return true;
  }

  const std::shared_ptr<LoopbackNetwork::State> state_;
  const std::shared_ptr<Node> node_;
  TransportHandler& handler_;
  const Nanos connect_wait_;
};

LoopbackNetwork::LoopbackNetwork() : state_(std::make_shared<State>()) {}
LoopbackNetwork::~LoopbackNetwork() = default;

Result<std::unique_ptr<Transport>> LoopbackNetwork::Make(const std::string& name,
                                                         TransportHandler& handler,
                                                         Nanos connect_wait) {
  auto node = std::make_shared<Node>(name);
  node->wake = OwnedFd(::eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC));
  if (!node->wake.valid()) return ErrnoStatus(errno, "eventfd");
  MutexLock lock(state_->mutex);
  if (!state_->nodes.emplace(name, node).second) {
    return Status(Code::kInvalidArgument, StrCat(name, " is taken"));
  }
  return std::unique_ptr<Transport>(
      std::make_unique<LoopbackTransport>(state_, std::move(node), handler, connect_wait));
}

void LoopbackNetwork::Cut(const std::string& a, const std::string& b) {
  MutexLock lock(state_->mutex);
  state_->cuts.insert(State::Pair(a, b));
}

void LoopbackNetwork::Heal(const std::string& a, const std::string& b) {
  MutexLock lock(state_->mutex);
  state_->cuts.erase(State::Pair(a, b));
  for (const std::string& name : {a, b}) {
    const auto it = state_->nodes.find(name);
    if (it != state_->nodes.end()) it->second->Signal();
  }
}

void LoopbackNetwork::SetRate(const std::string& name, uint64_t bytes_per_second) {
  MutexLock lock(state_->mutex);
  if (bytes_per_second == 0) {
    state_->rates.erase(name);
  } else {
    state_->rates[name] = bytes_per_second;
  }
}

void LoopbackNetwork::CorruptEvery(const std::string& name, uint64_t nth) {
  MutexLock lock(state_->mutex);
  if (nth == 0) {
    state_->corrupt.erase(name);
  } else {
    state_->corrupt[name] = nth;
  }
}

}  // namespace forebay
