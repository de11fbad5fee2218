#include "sim/faults/network.h"

#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <optional>
#include <variant>

#include "peer/message.h"

namespace forebay::sim {
namespace {

constexpr Nanos kConnectWait = 5 * kSecond;
constexpr int kEventsAtOnce = 16;

std::pair<uint32_t, uint32_t> Pair(uint32_t a, uint32_t b) {
  return a < b ? std::pair(a, b) : std::pair(b, a);
}

}  // namespace

struct FaultNetwork::Endpoint {
  uint32_t node = 0;
  TransportHandler* handler = nullptr;  // null: the transport is gone
  std::deque<std::function<void()>> inbox;
  std::map<ConnectionId, std::shared_ptr<Link>> connections;
  ConnectionId next = 1;
};

// A connection, with its two sides; 0 has made it.
struct FaultNetwork::Link {
  struct Sent {
    uint64_t tag = 0;
    std::span<const std::byte> payload;
  };
  struct Side {
    std::shared_ptr<Endpoint> endpoint;
    ConnectionId id = 0;
    bool open = false;
    bool ended = false;  // nothing of it touches anyone's memory any more
    Nanos last = 0;      // when what it has sent last arrives
    std::map<uint64_t, Sent> sent;
    std::map<uint64_t, std::pair<uint64_t, std::span<std::byte>>> places;  // tag, where
  };
  uint64_t number = 0;
  std::array<Side, 2> sides;
  uint64_t next = 0;
};

// A connection of members: the simulator's ends of two pairs of sockets.
struct FaultNetwork::Tube {
  std::array<uint32_t, 2> node{};
  std::array<OwnedFd, 2> fd;
  std::array<Nanos, 2> last{};  // when what the side has sent last arrives
  std::array<bool, 2> over{};   // the side has ended
  std::array<std::string, 2> early;
};

FaultNetwork::FaultNetwork(World& world, uint32_t nodes)
    : world_(world),
      nodes_(nodes),
      slow_(nodes),
      corrupt_(nodes),
      garble_(nodes),
      down_(nodes),
      silent_(nodes),
      woken_(nodes),
      members_poked_(nodes),
      endpoints_(nodes),
      proxies_(size_t{nodes} * nodes),
      dialed_(nodes),
      ports_(nodes) {
  world_.sockets.dialed = [this](uint32_t from, const std::string& host) {
    // "10.0.0.7" is node 6.
    const auto to = static_cast<uint32_t>(std::stoul(host.substr(host.rfind('.') + 1))) - 1;
    const bool hangs = silent_[to] || Passable(from, to, world_.now()) > world_.now();
    if (hangs) {
      in_use_ = true;
      return Name("hole", 0, 0);
    }
    if (down_[to]) return Name("nobody", to, 0);
    dialed_[from] = true;
    OwnedFd& proxy = proxies_[from * nodes_ + to];
    if (!proxy.valid()) proxy = ListenAs(Name("proxy", from, to));
    return Name("proxy", from, to);
  };
  world_.sockets.listening = [this](uint32_t node) {
    return Name("port", node, static_cast<uint32_t>(++ports_[node]));
  };
  hole_ = ListenAs(Name("hole", 0, 0));
}

FaultNetwork::~FaultNetwork() { world_.sockets = {}; }

// ---- faults ----------------------------------------------------------------------------------

void FaultNetwork::Cut(uint32_t a, uint32_t b, Nanos until) {
  Nanos& cut = cuts_[Pair(a, b)];
  cut = std::max(cut, until);
}

void FaultNetwork::Slow(uint32_t node, Nanos until, Nanos by) { slow_[node] = {until, by}; }

Nanos FaultNetwork::Delay(uint32_t from, uint32_t to) {
  Nanos delay = world_.Between(20 * kMicro, 300 * kMicro);
  if (world_.OneIn(200)) delay += world_.Between(0, 20 * kMilli);
  for (const uint32_t node : {from, to}) {
    if (slow_[node].first > world_.now()) delay += slow_[node].second;
  }
  return delay;
}

Nanos FaultNetwork::Passable(uint32_t a, uint32_t b, Nanos at) {
  const auto cut = cuts_.find(Pair(a, b));
  if (cut == cuts_.end() || cut->second <= at) return at;
  // The sender's stack tries again after growing pauses.
  return cut->second + world_.Between(kMilli, 300 * kMilli);
}

void FaultNetwork::Reset(uint32_t a, uint32_t b) {
  for (const std::weak_ptr<Link>& weak : links_) {
    const std::shared_ptr<Link> link = weak.lock();
    if (link == nullptr || link->sides[0].endpoint == nullptr ||
        link->sides[1].endpoint == nullptr ||
        Pair(link->sides[0].endpoint->node, link->sides[1].endpoint->node) != Pair(a, b)) {
      continue;
    }
    for (int side = 0; side < 2; ++side) {
      Post(link->sides[static_cast<size_t>(side)].endpoint, world_.now() + Delay(a, b),
           [this, link, side] { EndSide(link, side, Status(Code::kUnavailable, "was reset")); });
    }
  }
  for (const std::shared_ptr<Tube>& tube : tubes_) {
    if (Pair(tube->node[0], tube->node[1]) != Pair(a, b)) continue;
    Deliver(tube, 0, "", true);
    Deliver(tube, 1, "", true);
  }
}

void FaultNetwork::Kill(uint32_t node, bool silent) {
  down_[node] = true;
  silent_[node] = silent;
  for (const std::shared_ptr<Tube>& tube : tubes_) {
    for (size_t side = 0; side < 2; ++side) {
      if (tube->node[side] != node || tube->over[side]) continue;
      tube->over[side] = true;
      tube->fd[side].Reset();
      if (!silent) Deliver(tube, static_cast<int>(1 - side), "", true);
    }
  }
}

void FaultNetwork::Revive(uint32_t node) {
  if (silent_[node]) {
    // The machine answers for what it knows nothing of any more.
    for (const std::weak_ptr<Link>& weak : links_) {
      const std::shared_ptr<Link> link = weak.lock();
      if (link == nullptr) continue;
      for (size_t side = 0; side < 2; ++side) {
        if (link->sides[side].endpoint == nullptr || link->sides[side].endpoint->node != node) {
          continue;
        }
        TellOther(link, static_cast<int>(side), "its machine was started anew");
      }
    }
    for (const std::shared_ptr<Tube>& tube : tubes_) {
      for (size_t side = 0; side < 2; ++side) {
        if (tube->node[side] == node) Deliver(tube, static_cast<int>(1 - side), "", true);
      }
    }
  }
  down_[node] = false;
  silent_[node] = false;
}

// ---- peers -----------------------------------------------------------------------------------

class FaultNetwork::SimTransport final : public Transport {
 public:
  SimTransport(FaultNetwork& network, std::shared_ptr<Endpoint> endpoint)
      : network_(network), endpoint_(std::move(endpoint)) {}
  ~SimTransport() override {
    endpoint_->handler = nullptr;
    endpoint_->inbox.clear();
    for (const auto& [id, link] : endpoint_->connections) {
      const int side = link->sides[0].endpoint == endpoint_ ? 0 : 1;
      Link::Side& own = link->sides[static_cast<size_t>(side)];
      own.ended = true;
      own.sent.clear();
      own.places.clear();
      if (!network_.silent_[endpoint_->node]) network_.TellOther(link, side, "its process ended");
    }
    endpoint_->connections.clear();
  }
  std::string address() const override { return Address(endpoint_->node); }
  std::string Describe() const override { return "simulated"; }
  Status Register(std::span<std::byte>) override { return Status(); }

  Result<ConnectionId> Connect(const std::string& address) override {
    FaultNetwork& net = network_;
    const uint32_t from = endpoint_->node;
    const auto to = static_cast<uint32_t>(std::stoul(address.substr(1)));
    auto link = std::make_shared<Link>();
    link->number = net.next_link_++;
    link->sides[0].endpoint = endpoint_;
    link->sides[0].id = endpoint_->next++;
    endpoint_->connections[link->sides[0].id] = link;
    net.links_.push_back(link);
    net.Post(endpoint_, net.world_.now() + kConnectWait, [this, link] {
      if (!link->sides[0].open) {
        network_.EndSide(link, 0, Status(Code::kDeadlineExceeded, "no answer to a connection"));
      }
    });
    const Nanos at = net.Passable(from, to, net.world_.now() + net.Delay(from, to));
    net.world_.At(at, to, [&net, link, from, to] {
      if (net.silent_[to]) return;
      const std::shared_ptr<Endpoint>& other = net.endpoints_[to];
      const Nanos back = net.Passable(from, to, net.world_.now() + net.Delay(from, to));
      const std::shared_ptr<Endpoint> self = link->sides[0].endpoint;
      if (net.down_[to] || other == nullptr || other->handler == nullptr) {
        net.Post(self, back, [&net, link] {
          net.EndSide(link, 0, Status(Code::kUnavailable, "nobody listens there"));
        });
        return;
      }
      if (link->sides[0].ended) return;
      Link::Side& side = link->sides[1];
      side.endpoint = other;
      side.id = other->next++;
      side.open = true;
      other->connections[side.id] = link;
      net.Post(other, net.world_.now(), [link] {
        const Link::Side& there = link->sides[1];
        if (!there.ended) there.endpoint->handler->OnOpen(there.id, true);
      });
      link->sides[1].last = back;
      net.Post(self, back, [link] {
        Link::Side& here = link->sides[0];
        if (here.ended) return;
        here.open = true;
        here.endpoint->handler->OnOpen(here.id, false);
      });
    });
    return link->sides[0].id;
  }

  void Close(ConnectionId id) override {
    const auto at = endpoint_->connections.find(id);
    if (at == endpoint_->connections.end()) return;
    const std::shared_ptr<Link> link = at->second;
    const int side = SideOf(*link);
    if (std::exchange(closing_[id], true)) return;
    network_.TellOther(link, side, "it has closed");
    network_.Post(endpoint_, network_.world_.now(), [this, link, side, id] {
      closing_.erase(id);
      network_.EndSide(link, side, Status(Code::kCancelled, "closed here"));
    });
  }

  Status Send(ConnectionId id, std::span<const std::byte> header,
              std::span<const std::byte> payload, uint64_t tag) override {
    const auto found = endpoint_->connections.find(id);
    if (found == endpoint_->connections.end() || closing_.contains(id)) {
      return Status(Code::kNotFound, "no such connection");
    }
    FaultNetwork& net = network_;
    const std::shared_ptr<Link> link = found->second;
    const int side = SideOf(*link);
    Link::Side& own = link->sides[static_cast<size_t>(side)];
    if (!own.open || own.ended) return Status(Code::kNotFound, "the connection is not open");
    net.CheckAnswers(link->number * 2 + static_cast<uint64_t>(side), header);
    const uint32_t from = endpoint_->node;
    const std::shared_ptr<Endpoint> other = link->sides[static_cast<size_t>(1 - side)].endpoint;
    const uint64_t number = link->next++;
    own.sent[number] = {tag, payload};
    std::vector<std::byte> bytes(header.begin(), header.end());
    const bool garbled = net.garble_[from];
    if (garbled) {
      net.garble_[from] = false;
      bytes.resize(bytes.size() / 2);
    }
    own.last = std::max(
        own.last, net.Passable(from, other->node, net.world_.now() + net.Delay(from, other->node)));
    if (payload.empty()) {
      net.Post(endpoint_, net.world_.now(),
               [&net, link, side, number] { Acknowledge(net, link, side, number); });
    }
    const uint64_t size = payload.size();
    net.Post(other, own.last, [&net, link, side, number, bytes = std::move(bytes), size] {
      Arrive(net, link, side, number, bytes, size);
    });
    return Status();
  }

  bool Progress() override {
    for (int i = 0; i < kEventsAtOnce; ++i) {
      if (endpoint_->inbox.empty()) return false;
      const std::function<void()> what = std::move(endpoint_->inbox.front());
      endpoint_->inbox.pop_front();
      what();
    }
    return !endpoint_->inbox.empty();
  }
  void Wait(std::span<const int>, Nanos) override {}
  void Wake() override { network_.woken_[endpoint_->node] = true; }

 private:
  int SideOf(const Link& link) const { return link.sides[0].endpoint == endpoint_ ? 0 : 1; }

  static void Acknowledge(FaultNetwork&, const std::shared_ptr<Link>& link, int side,
                          uint64_t number) {
    Link::Side& own = link->sides[static_cast<size_t>(side)];
    const auto at = own.sent.find(number);
    if (own.ended || at == own.sent.end()) return;
    const uint64_t tag = at->second.tag;
    own.sent.erase(at);
    own.endpoint->handler->OnSent(own.id, tag, Status());
  }

  // At the receiver.
  static void Arrive(FaultNetwork& net, const std::shared_ptr<Link>& link, int from,
                     uint64_t number, const std::vector<std::byte>& header, uint64_t size) {
    Link::Side& here = link->sides[static_cast<size_t>(1 - from)];
    if (here.ended) return;
    // Proofs are the first messages.
    if (number < 8) net.members_poked_[here.endpoint->node] = true;
    uint64_t tag = 0;
    const std::span<std::byte> place =
        here.endpoint->handler->OnMessage(here.id, header, size, &tag);
    if (size == 0) return;
    const std::shared_ptr<Endpoint>& sender = link->sides[static_cast<size_t>(from)].endpoint;
    const Nanos took = net.world_.Between(0, kMilli) + static_cast<Nanos>(size) * 2;
    if (place.empty()) {
      net.Post(sender, net.world_.now() + took,
               [&net, link, from, number] { Acknowledge(net, link, from, number); });
      return;
    }
    if (here.ended) return;
    here.places[number] = {tag, place};
    net.Post(here.endpoint,
             net.Passable(sender->node, here.endpoint->node, net.world_.now() + took),
             [&net, link, from, number] { Copy(net, link, from, number); });
  }

  static void Copy(FaultNetwork& net, const std::shared_ptr<Link>& link, int from,
                   uint64_t number) {
    Link::Side& here = link->sides[static_cast<size_t>(1 - from)];
    Link::Side& there = link->sides[static_cast<size_t>(from)];
    const auto place = here.places.find(number);
    const auto sent = there.sent.find(number);
    // Who has closed, or is no more, has its memory back: the rest comes with the end.
    if (here.ended || place == here.places.end() || sent == there.sent.end() || there.ended) return;
    const auto [tag, to] = place->second;
    here.places.erase(place);
    std::vector<std::byte> payload(sent->second.payload.begin(), sent->second.payload.end());
    if (net.corrupt_[there.endpoint->node] > net.world_.now() && net.world_.OneIn(3)) {
      payload[net.world_.chance().Below(payload.size())] ^= std::byte{1};
    }
    if (net.world_.OneIn(2)) {
      here.endpoint->handler->OnCopy(tag, to, payload);
    } else {
      std::memcpy(to.data(), payload.data(), payload.size());
    }
    net.Post(there.endpoint,
             net.world_.now() + net.Delay(here.endpoint->node, there.endpoint->node),
             [&net, link, from, number] { Acknowledge(net, link, from, number); });
    here.endpoint->handler->OnPayload(here.id, tag, Status());
  }

  FaultNetwork& network_;
  const std::shared_ptr<Endpoint> endpoint_;  // shared with what is on its way
  std::map<ConnectionId, bool> closing_;
};

Result<std::unique_ptr<Transport>> FaultNetwork::Make(uint32_t node, TransportHandler& handler) {
  auto endpoint = std::make_shared<Endpoint>();
  endpoint->node = node;
  endpoint->handler = &handler;
  endpoints_[node] = endpoint;
  return std::unique_ptr<Transport>(std::make_unique<SimTransport>(*this, std::move(endpoint)));
}

void FaultNetwork::Post(const std::shared_ptr<Endpoint>& to, Nanos at, std::function<void()> what) {
  world_.At(at, to->node, [this, to, what = std::move(what)] {
    if (to->handler == nullptr) return;
    to->inbox.push_back(what);
    woken_[to->node] = true;
  });
}

void FaultNetwork::EndSide(const std::shared_ptr<Link>& link, int side, const Status& why) {
  Link::Side& own = link->sides[static_cast<size_t>(side)];
  if (own.ended || own.endpoint == nullptr || own.endpoint->handler == nullptr) return;
  own.ended = true;
  own.open = false;
  members_poked_[own.endpoint->node] = true;
  const std::shared_ptr<Endpoint> endpoint = own.endpoint;
  endpoint->connections.erase(own.id);
  const auto places = std::exchange(own.places, {});
  const auto sent = std::exchange(own.sent, {});
  for (const auto& [number, place] : places) {
    endpoint->handler->OnPayload(own.id, place.first, why);
  }
  for (const auto& [number, one] : sent) endpoint->handler->OnSent(own.id, one.tag, why);
  endpoint->handler->OnClosed(own.id, why);
}

// In order behind what the side has sent.
void FaultNetwork::TellOther(const std::shared_ptr<Link>& link, int side, const std::string& why) {
  Link::Side& own = link->sides[static_cast<size_t>(side)];
  Link::Side& other = link->sides[static_cast<size_t>(1 - side)];
  if (other.endpoint == nullptr || other.ended || own.endpoint == nullptr) return;
  const uint32_t a = own.endpoint->node;
  const uint32_t b = other.endpoint->node;
  own.last = std::max(own.last, Passable(a, b, world_.now() + Delay(a, b)));
  Post(other.endpoint, own.last,
       [this, link, side, why] { EndSide(link, 1 - side, Status(Code::kUnavailable, why)); });
}

void FaultNetwork::CheckAnswers(uint64_t link, std::span<const std::byte> header) {
  const Result<peer::Message> message = peer::Decode(header);
  if (!message) {
    violation_ = "a node sent what is no message";
    return;
  }
  const auto answer = [&](uint32_t request) {
    if (answered_.emplace(link, request).second || !violation_.empty()) return;
    violation_ = StrCat("request ", request, " was answered twice on one connection");
  };
  if (const auto* data = std::get_if<peer::DataMessage>(&*message)) {
    for (const peer::Given& given : data->given) answer(given.request);
  } else if (const auto* refused = std::get_if<peer::RefusedMessage>(&*message)) {
    answer(refused->request);
  }
}

bool FaultNetwork::TakeWoken(uint32_t node) {
  const bool woken = woken_[node];
  woken_[node] = false;
  return woken;
}

bool FaultNetwork::TakeMembersPoked(uint32_t node) {
  const bool poked = members_poked_[node];
  members_poked_[node] = false;
  return poked;
}

// ---- members ---------------------------------------------------------------------------------

std::string FaultNetwork::Name(const std::string& what, uint32_t a, uint32_t b) const {
  return StrCat("forebay-faults-", getpid(), "-", what, "-", a, "-", b);
}

namespace {

sockaddr_un At(const std::string& name, socklen_t* size) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  std::memcpy(address.sun_path + 1, name.data(), name.size());  // NOLINT
  *size = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size());
  return address;
}

}  // namespace

OwnedFd FaultNetwork::ListenAs(const std::string& name) const {
  socklen_t size = 0;
  const sockaddr_un address = At(name, &size);
  OwnedFd fd(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (::bind(fd.get(), reinterpret_cast<const sockaddr*>(&address), size) != 0 ||
      ::listen(fd.get(), 256) != 0) {
    return OwnedFd();
  }
  return fd;
}

OwnedFd FaultNetwork::ConnectTo(const std::string& name) const {
  socklen_t size = 0;
  const sockaddr_un address = At(name, &size);
  OwnedFd fd(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (::connect(fd.get(), reinterpret_cast<const sockaddr*>(&address), size) != 0) return OwnedFd();
  return fd;
}

void FaultNetwork::PumpMembers(uint32_t node) {
  while (in_use_) {
    OwnedFd fd(::accept4(hole_.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
    if (!fd.valid()) break;
    in_hole_.push_back(std::move(fd));
    if (in_hole_.size() > 256) in_hole_.erase(in_hole_.begin());
  }
  if (dialed_[node]) {
    dialed_[node] = false;
    for (uint32_t to = 0; to < nodes_; ++to) {
      const OwnedFd& proxy = proxies_[node * nodes_ + to];
      while (proxy.valid()) {
        OwnedFd fd(::accept4(proxy.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
        if (!fd.valid()) break;
        auto tube = std::make_shared<Tube>();
        tube->node = {node, to};
        tube->fd[0] = std::move(fd);
        tubes_.push_back(tube);
        const Nanos at = Passable(node, to, world_.now() + Delay(node, to));
        tube->last[0] = at;
        world_.At(at, to, [this, tube, to] {
          members_poked_[to] = true;
          if (silent_[to] || tube->over[0]) return;
          tube->fd[1] = down_[to] ? OwnedFd()
                                  : ConnectTo(Name("port", to, static_cast<uint32_t>(ports_[to])));
          if (!tube->fd[1].valid()) {
            tube->over[1] = true;
            Deliver(tube, 0, "", true);
          }
        });
      }
    }
  }
  for (const std::shared_ptr<Tube>& tube : tubes_) {
    for (size_t side = 0; side < 2; ++side) {
      if (tube->node[side] != node || tube->over[side] || !tube->fd[side].valid()) continue;
      std::array<char, 8192> bytes;
      while (true) {
        const ssize_t got = ::recv(tube->fd[side].get(), bytes.data(), bytes.size(), 0);
        if (got < 0) break;
        if (got > 0) {
          Deliver(tube, static_cast<int>(1 - side),
                  std::string(bytes.data(), static_cast<size_t>(got)), false);
          continue;
        }
        tube->over[side] = true;
        tube->fd[side].Reset();
        Deliver(tube, static_cast<int>(1 - side), "", true);
        break;
      }
    }
  }
  std::erase_if(tubes_,
                [](const std::shared_ptr<Tube>& tube) { return tube->over[0] && tube->over[1]; });
}

// To `side`, from the other one.
void FaultNetwork::Deliver(const std::shared_ptr<Tube>& tube, int side, std::string bytes,
                           bool end) {
  const auto to = static_cast<size_t>(side);
  Nanos& last = tube->last[1 - to];
  const uint32_t a = tube->node[0];
  const uint32_t b = tube->node[1];
  last = std::max(last, Passable(a, b, world_.now() + Delay(a, b)));
  world_.At(last, tube->node[to], [this, tube, to, bytes = std::move(bytes), end] {
    members_poked_[tube->node[to]] = true;
    if (tube->over[to] || !tube->fd[to].valid()) {
      if (end) tube->over[to] = true;
      return;
    }
    if (!bytes.empty()) (void)!::send(tube->fd[to].get(), bytes.data(), bytes.size(), MSG_NOSIGNAL);
    if (!end) return;
    tube->over[to] = true;
    tube->fd[to].Reset();
  });
}

}  // namespace forebay::sim
