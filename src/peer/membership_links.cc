#include "peer/membership_links.h"

#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <utility>

#include "peer/membership_role.h"
#include "peer/secret.h"

namespace forebay::peer {
namespace {

constexpr size_t kMostUnproven = 64;  // connections at a time
// At a time: who connects without end must not keep the thread from the others.
constexpr int kMostAccepted = 64;
// A member says Hello as soon as it is connected.
constexpr Nanos kUnprovenTime = 2 * kSecond;

std::string AddressOf(const sockaddr_storage& at) {
  const auto bytes = [](const auto& field) {
    return std::string(reinterpret_cast<const char*>(&field), sizeof field);
  };
  if (at.ss_family == AF_INET) return bytes(reinterpret_cast<const sockaddr_in&>(at).sin_addr);
  if (at.ss_family == AF_INET6) return bytes(reinterpret_cast<const sockaddr_in6&>(at).sin6_addr);
  return "";
}

}  // namespace

Status Links::Open(Role* role) {
  role_ = role;
  uint64_t seed = 0;
  std::memcpy(&seed, RandomDigest().data(), sizeof seed);
  draw_ = SplitMix64(seed);
  epoll_ = OwnedFd(::epoll_create1(EPOLL_CLOEXEC));
  wake_ = OwnedFd(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (!epoll_.valid() || !wake_.valid()) {
    return ErrnoStatus(errno, "making descriptors for the cluster's members");
  }
  Watch(wake_.get(), kWakeKey, EPOLLIN);
  return Status();
}

bool Links::ListenHere(const std::string& host) {
  const auto addresses = HostLookup(HostPort{host, 1}).Poll();  // numeric: at once
  if (!addresses || !*addresses) {
    listening_ = Status(Code::kInvalidArgument, StrCat("'", host, "' is no numeric address"));
    return false;
  }
  std::vector<HostAddress> any_port = **addresses;
  for (HostAddress& address : any_port) {
    // The port has the same place in both.
    reinterpret_cast<sockaddr_in*>(&address.bytes)->sin_port = 0;
  }
  Result<OwnedFd> listener = ListenAt(HostPort{host, 0}, any_port, options_.cluster.node);
  if (!listener) {
    listening_ = listener.error();
    return false;
  }
  sockaddr_storage bound{};
  socklen_t size = sizeof bound;
  if (::getsockname(listener->get(), reinterpret_cast<sockaddr*>(&bound), &size) != 0) {
    listening_ = ErrnoStatus(errno, "getsockname");
    return false;
  }
  const uint16_t port = ntohs(reinterpret_cast<const sockaddr_in*>(&bound)->sin_port);
  own_at_ = HostPort{host, port}.ToString();
  if (own_at_.size() > kLongestRegistrar) own_at_.clear();
  listener_ = *std::move(listener);
  listening_ = Status();
  Watch(listener_.get(), kListenKey, EPOLLIN);
  return true;
}

void Links::StopListening() {
  listen_at_.reset();
  listen_pause_ = 0;
  if (!listener_.valid()) return;
  ::epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, listener_.get(), nullptr);
  ::shutdown(listener_.get(), SHUT_RDWR);
  listener_.Reset();
}

void Links::EndDial(uint32_t node) {
  const auto at = std::ranges::find(dials_, node, &Dial::node);
  if (at == dials_.end()) return;
  const uint64_t link = at->link;
  dials_.erase(at);
  Close(link, Status(Code::kCancelled, "nobody needs it"));
}

void Links::DialTo(uint32_t node, const HostPort& at) {
  const auto there = std::ranges::find(dials_, node, &Dial::node);
  if (there != dials_.end()) {
    if (there->at.ToString() == at.ToString()) return;
    EndDial(node);
  }
  Dial& dial = dials_.emplace_back();
  dial.node = node;
  dial.at = at;
}

void Links::Wake() {
  const uint64_t one = 1;
  (void)!::write(wake_.get(), &one, sizeof one);
}

void Links::Advance() {
  Listen();
  for (Dial& dial : dials_) Call(dial);
  KeepTime();
}

void Links::Wait(int most_millis) {
  std::array<epoll_event, 64> events;
  const int count =
      ::epoll_wait(epoll_.get(), events.data(), static_cast<int>(events.size()), most_millis);
  ReadClock();
  for (int i = 0; i < count; ++i) {
    const uint64_t key = events[static_cast<size_t>(i)].data.u64;
    if (key == kWakeKey) {
      uint64_t ignored = 0;
      (void)!::read(wake_.get(), &ignored, sizeof ignored);
    } else if (key == kListenKey) {
      Accept();
    } else {
      OnReady(key, events[static_cast<size_t>(i)].events);
    }
  }
}

int Links::WaitMillis() const {
  // Deadlines are kept to a twentieth of the lease.
  Nanos until = now_ + std::clamp<Nanos>(options_.lease / 20, 2 * kMilli, 250 * kMilli);
  for (const Dial& dial : dials_) {
    if (dial.stopped || dial.link != 0) continue;
    until = std::min(until, dial.lookup ? now_ + 10 * kMilli : dial.retry);
  }
  if (listen_retry_ > 0) until = std::min(until, listen_retry_);
  return static_cast<int>(std::max<Nanos>(0, until - now_ + kMilli - 1) / kMilli);
}

void Links::Watch(int fd, uint64_t key, uint32_t events) {
  epoll_event event{};
  event.events = events;
  event.data.u64 = key;
  if (::epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, fd, &event) != 0 && errno == EEXIST) {
    ::epoll_ctl(epoll_.get(), EPOLL_CTL_MOD, fd, &event);
  }
}

// What is wrong is tried again: a predecessor's children may still hold the port.
void Links::Listen() {
  if (!listen_at_ || listener_.valid() || now_ < listen_retry_) return;
  if (!listen_lookup_) listen_lookup_.emplace(*listen_at_);
  const auto found = listen_lookup_->Poll();
  if (!found) {
    listen_retry_ = now_ + 10 * kMilli;
    return;
  }
  listen_lookup_.reset();
  Result<OwnedFd> listener =
      *found ? ListenAt(*listen_at_, **found, options_.cluster.node) : found->error();
  if (!listener) {
    listening_ = listener.error();
    PublishHealth();
    listen_retry_ = now_ + 200 * kMilli;
    return;
  }
  listener_ = *std::move(listener);
  listen_retry_ = 0;
  Watch(listener_.get(), kListenKey, EPOLLIN);
  published_.CountContact();
  listening_ = Status();
  PublishHealth();
}

void Links::SetTrouble(uint32_t node, Status why) {
  troubles_[node] = std::move(why);
  PublishHealth();
}

void Links::PublishHealth() {
  const Status trouble = troubles_.empty() ? Status() : troubles_.begin()->second;
  published_.SetHealth(listening_.ok() ? trouble : listening_);
}

// Strangers that connect without end take places from each other, not from members: the address
// with the most connections gives one up, and of its connections one that has not even said Hello.
// Which of these is drawn: a stranger cannot time its connections so that a member's is the next.
uint64_t Links::OneTooMany() {
  size_t unproven = 0;
  std::map<std::string_view, size_t> addresses;
  for (const auto& [id, link] : links_) {
    if (!link.unproven()) continue;
    ++unproven;
    ++addresses[link.from];
  }
  if (unproven < kMostUnproven) return 0;
  const auto most =
      std::max_element(addresses.begin(), addresses.end(),
                       [](const auto& a, const auto& b) { return a.second < b.second; });
  std::vector<uint64_t> silent;
  std::vector<uint64_t> others;
  for (const auto& [id, link] : links_) {
    if (!link.unproven() || link.from != most->first) continue;
    (link.phase == Link::Phase::kHello ? silent : others).push_back(id);
  }
  const std::vector<uint64_t>& from = silent.empty() ? others : silent;
  return from[draw_.Below(from.size())];
}

void Links::Accept() {
  for (int accepted = 0; accepted < kMostAccepted; ++accepted) {
    sockaddr_storage address{};
    socklen_t size = sizeof address;
    OwnedFd fd(::accept4(listener_.get(), reinterpret_cast<sockaddr*>(&address), &size,
                         SOCK_CLOEXEC | SOCK_NONBLOCK));
    if (!fd.valid()) {
      if (errno == EINTR || errno == ECONNABORTED) continue;
      if (errno != EAGAIN && errno != EWOULDBLOCK) {
        // No descriptors: waiting connections would wake the thread without end.
        ::epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, listener_.get(), nullptr);
        listen_pause_ = now_ + 100 * kMilli;
      }
      return;
    }
    if (const uint64_t one = OneTooMany(); one != 0) Refuse(one);
    Link& link = Add(std::move(fd));
    link.accepted = true;
    link.from = AddressOf(address);
    link.phase = Link::Phase::kHello;
    link.deadline = now_ + std::min<Nanos>(options_.lease, kUnprovenTime);
    Watch(link.fd.get(), link.id, EPOLLIN);
    // A member's Hello mostly came with its connection: who has said it stays before who has not.
    Receive(link.id);
  }
}

Link& Links::Add(OwnedFd fd) {
  const uint64_t id = ++last_id_;
  Link& link = links_[id];
  link.id = id;
  const int on = 1;
  ::setsockopt(fd.get(), IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
  link.fd = std::move(fd);
  return link;
}

void Links::Call(Dial& dial) {
  if (dial.link != 0 || dial.stopped || now_ < dial.retry) return;
  if (IsCut(dial.node)) {
    dial.reached = false;
    Later(dial, Status(Code::kDeadlineExceeded, "the link is cut"));
    return;
  }
  if (dial.next_address >= dial.addresses.size()) {
    // Names are looked up anew each time: a restarted node 0 may be elsewhere.
    if (!dial.lookup) dial.lookup.emplace(dial.at);
    auto found = dial.lookup->Poll();
    if (!found) return;
    dial.lookup.reset();
    if (!*found) {
      Later(dial, found->error());
      return;
    }
    dial.addresses = **std::move(found);
    dial.next_address = 0;
  }
  const HostAddress address = dial.addresses[dial.next_address++];
  dial.reached = false;
  OwnedFd fd(::socket(address.family(), SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!fd.valid()) {
    Later(dial, ErrnoStatus(errno, "socket"));
    return;
  }
  if (::connect(fd.get(), address.get(), address.size) != 0 && errno != EINPROGRESS) {
    ConnectFailed(dial, errno);
    return;
  }
  Link& link = Add(std::move(fd));
  link.phase = Link::Phase::kConnecting;
  link.node = dial.node;
  link.deadline = now_ + std::min<Nanos>(options_.lease, 2 * kSecond);
  dial.link = link.id;
  Watch(link.fd.get(), link.id, EPOLLOUT);
}

void Links::ConnectFailed(Dial& dial, int error) {
  const Status status(Code::kUnavailable, StrCat("connect: ", std::strerror(error)));
  if (dial.next_address < dial.addresses.size()) {
    dial.last = status;  // its next address
    return;
  }
  if (error == ECONNREFUSED) role_->OnLost(dial.node);  // the host is there, the process is not
  Later(dial, status);
}

void Links::Later(Dial& dial, Status why) {
  dial.last = std::move(why);
  dial.pause = std::clamp(2 * dial.pause, std::min(options_.lease / 5, 20 * kMilli),
                          std::min<Nanos>(options_.lease / 5, 2 * kSecond));
  dial.retry = now_ + dial.pause;
  dial.addresses.clear();
  dial.next_address = 0;
  role_->OnUnreached(dial);
}

Dial* Links::DialOf(const Link& link) {
  for (Dial& dial : dials_) {
    if (dial.link == link.id) return &dial;
  }
  return nullptr;
}

void Links::KeepTime() {
  if (listen_pause_ > 0 && now_ >= listen_pause_) {
    listen_pause_ = 0;
    Watch(listener_.get(), kListenKey, EPOLLIN);
  }
  std::vector<uint64_t> late;
  std::vector<uint64_t> beats;
  for (auto& [id, link] : links_) {
    if (now_ >= link.deadline || (!link.unproven() && IsCut(link.node))) {
      late.push_back(id);
    } else if (!link.accepted && link.phase >= Link::Phase::kRegister && now_ >= link.next_beat) {
      link.next_beat = now_ + options_.lease / 5;
      if (link.out.empty()) beats.push_back(id);
    }
  }
  for (const uint64_t id : late) {
    const auto at = links_.find(id);
    if (at == links_.end()) continue;
    if (at->second.unproven()) {
      Refuse(id);
    } else {
      Close(id, Status(Code::kDeadlineExceeded, "it is silent"));
    }
  }
  for (const uint64_t id : beats) {
    const auto at = links_.find(id);
    if (at != links_.end()) (void)Send(at->second, frame::Beat{});
  }
}

bool Links::Send(Link& link, const frame::Frame& message) {
  frame::Append(message, &link.out);
  return Flush(link);
}

void Links::SendLast(Link& link, const frame::Refused& refused) {
  if (link.unproven()) published_.CountRefused(++refused_);
  const uint64_t id = link.id;
  if (Send(link, refused)) Close(id, Status(Code::kPermissionDenied, refused.why));
}

// False: the link is gone.
bool Links::Flush(Link& link) {
  size_t sent = 0;
  while (sent < link.out.size()) {
    const ssize_t wrote = ::send(link.fd.get(), link.out.data() + sent, link.out.size() - sent,
                                 MSG_NOSIGNAL | MSG_DONTWAIT);
    if (wrote < 0 && errno == EINTR) continue;
    if (wrote < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) break;
    if (wrote < 0) {
      Close(link.id, Status(Code::kUnavailable, StrCat("send: ", std::strerror(errno))));
      return false;
    }
    sent += static_cast<size_t>(wrote);
  }
  link.out.erase(0, sent);
  const bool writing = !link.out.empty();
  if (writing != link.writing) {
    link.writing = writing;
    Watch(link.fd.get(), link.id, writing ? EPOLLIN | EPOLLOUT : EPOLLIN);
  }
  return true;
}

void Links::Refuse(uint64_t id) {
  published_.CountRefused(++refused_);
  if (const auto at = links_.find(id); at != links_.end()) OnUnproven(at->second);
  Close(id, Status(Code::kPermissionDenied, "sent what is not of this protocol"));
}

// A forked child may have a copy of the descriptor: closing ours ends nothing then.
void Links::End(Link& link) {
  ::epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, link.fd.get(), nullptr);
  ::shutdown(link.fd.get(), SHUT_RDWR);
  link.fd.Reset();
}

void Links::Close(uint64_t id, const Status& why) {
  const auto at = links_.find(id);
  if (at == links_.end()) return;
  Link link = std::move(at->second);
  links_.erase(at);
  End(link);
  const bool ready = link.phase == Link::Phase::kReady;
  if (ready) role_->OnEnd(link);
  for (Dial& dial : dials_) {
    if (dial.link != id) continue;
    dial.link = 0;
    // A connection that was good is tried again at once.
    if (ready) dial.pause = 0;
    Later(dial, why);
    if (ready && !dial.stopped) dial.retry = now_;
  }
}

void Links::SendLeaves() {
  const Nanos until = SteadyClock().Now() + 100 * kMilli;
  std::vector<uint64_t> ids;
  for (const auto& [id, link] : links_) {
    if (link.phase >= Link::Phase::kRegister) ids.push_back(id);
  }
  for (const uint64_t id : ids) {
    const auto at = links_.find(id);
    if (at == links_.end() || SteadyClock().Now() > until) continue;
    (void)Send(at->second, frame::Leave{});
  }
  for (auto& [id, link] : links_) End(link);
  links_.clear();
  if (listener_.valid()) ::shutdown(listener_.get(), SHUT_RDWR);
  listener_.Reset();
}

}  // namespace forebay::peer
