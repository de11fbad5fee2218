// TCP sockets of our own, with or without TLS: what a member may do is what the frames say
// (tcp_frames.h), and nobody writes to another process's memory. A payload goes from where it lies
// by sendmsg, and is received where the handler says.
//
// Sockets are watched by their edges. What Send takes goes out with the next Progress or Wait, all
// that has gathered in one call.
//
// Strangers, who connected and have proven nothing, are kMostStrangers at most. One more takes the
// place of the oldest one from the host that has most of them: a host that floods only loses its
// own. Each has connect_wait to prove the secret.
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cassert>
#include <cerrno>
#include <cstring>
#include <map>
#include <set>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "base/fork.h"
#include "base/owned.h"
#include "transport/socket_address.h"
#include "transport/tcp_frames.h"
#include "transport/tcp_stream.h"
#include "transport/transport.h"

namespace forebay {
namespace {

using tcp::FrameReader;
using tcp::FrameWriter;
using tcp::Role;

constexpr size_t kMostStrangers = 64;
constexpr int kBacklog = 1024;
// Connections taken at once, before others have their turn.
constexpr int kMostAccepted = 32;
// Bytes read from one connection, or written to it, before others have their turn.
constexpr size_t kTurnBytes = 2 << 20;
// Messages that may wait on one connection; a member asks for far fewer at a time.
constexpr size_t kMostQueued = 1 << 16;
constexpr size_t kPieces = 64;  // of one sendmsg
constexpr Nanos kAcceptPause = 100 * kMilli;
// The kernel gives up a peer that is cut off; who asks it notices sooner, by its own waits.
constexpr int kIdleSeconds = 10;
constexpr int kProbeSeconds = 5;
constexpr int kProbes = 4;
constexpr int kUserTimeoutMillis = 30'000;

struct TcpConnection {
  TcpConnection(ConnectionId number, OwnedFd socket, Role own)
      : id(number),
        fd(std::move(socket)),
        accepted(own == Role::kAccepted),
        reader(accepted ? Role::kConnected : Role::kAccepted) {}

  const ConnectionId id;
  OwnedFd fd;
  const bool accepted;
  std::string at;  // the other side's address
  std::string host;
  FrameReader reader;
  FrameWriter writer;
  std::unique_ptr<tcp::Stream> stream;  // null: the socket as it is
  bool connecting = false;              // connect() is under way
  bool open = false;
  bool proven = false;
  bool closing = false;
  bool readable = false;  // there may be bytes
  bool ended = false;     // the other side has closed; what it sent before may still be there
  bool writable = true;   // there may be room
  bool flushing = false;  // is in flush_
  bool reading = false;   // is in readable_
  int low_water = 1;
  uint64_t payload_tag = 0;  // of the payload that is coming
  Nanos deadline = 0;        // until it is proven
  Status why;
};

std::string HostOf(const std::string& at) { return at.substr(0, at.rfind(':')); }

class TcpTransport final : public Transport {
 public:
  TcpTransport(const TransportOptions& options, TransportHandler& handler,
               std::unique_ptr<tcp::StreamMaker> streams)
      : options_(options), handler_(handler), streams_(std::move(streams)) {}
  ~TcpTransport() override;

  Status Start();

  std::string address() const override { return address_; }
  std::string Describe() const override {
    return streams_ == nullptr ? "tcp" : streams_->Describe();
  }
  Status Register(std::span<std::byte>) override { return Status(); }
  Result<ConnectionId> Connect(const std::string& address) override;
  void Close(ConnectionId id) override;
  void SetProven(ConnectionId id) override;
  uint64_t strangers() const override { return dropped_strangers_; }
  Status Send(ConnectionId id, std::span<const std::byte> header,
              std::span<const std::byte> payload, uint64_t tag) override;
  bool Progress() override;
  void Wait(std::span<const int> wake_fds, Nanos wait) override;
  void Wake() override;

 private:
  static constexpr uint64_t kListenKey = 0;

  TcpConnection* Find(ConnectionId id) {
    const auto it = connections_.find(id);
    return it == connections_.end() || it->second->closing ? nullptr : it->second.get();
  }
  Result<TcpConnection*> Add(OwnedFd fd, Role role, const std::string& at);
  void Accept();
  void MakeRoom();
  void OnEvents(TcpConnection& connection, uint32_t events);
  void Receive(TcpConnection& connection);
  bool TakeFrames(TcpConnection& connection);
  void SetLowWater(TcpConnection& connection);
  void Touch(TcpConnection& connection);
  void FlushAll();
  void Flush(TcpConnection& connection);
  void DeliverSent();
  void Shut(TcpConnection& connection, Status why);
  void EndAll();
  void End(ConnectionId id);
  void KeepTime();
  bool pending() const {
    return !flush_.empty() || !readable_.empty() || !sent_.empty() || !ending_.empty();
  }

  const TransportOptions options_;
  TransportHandler& handler_;
  const std::unique_ptr<tcp::StreamMaker> streams_;
  OwnedFd epoll_;
  OwnedFd wake_;
  OwnedFd listener_;
  std::string address_;
  std::unordered_map<ConnectionId, std::unique_ptr<TcpConnection>> connections_;
  ConnectionId next_connection_ = kListenKey + 1;
  std::set<ConnectionId> unproven_;     // those that the clock matters to; the oldest first
  std::vector<ConnectionId> flush_;     // have something to send, and perhaps room for it
  std::vector<ConnectionId> readable_;  // have perhaps more to read
  std::vector<ConnectionId> ending_;    // closing, and the handler has not been told
  std::vector<std::pair<ConnectionId, uint64_t>> sent_;  // the handler has not been told
  std::vector<uint64_t> tags_;
  size_t strangers_ = 0;
  uint64_t dropped_strangers_ = 0;
  Nanos accept_again_ = 0;  // no descriptors: nobody is accepted until then
  bool polled_ = false;     // Wait has looked: there is nothing new
  const uint64_t generation_ = ForkGeneration();
};

// ---- the life of the transport

Status TcpTransport::Start() {
  epoll_ = OwnedFd(::epoll_create1(EPOLL_CLOEXEC));
  wake_ = OwnedFd(::eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC));
  if (!epoll_.valid() || !wake_.valid()) return ErrnoStatus(errno, "making descriptors for peers");
  const Result<SocketAddress> listen = ParseSocketAddress(options_.listen);
  if (!listen) return listen.error();
  listener_ =
      OwnedFd(::socket(listen->storage.ss_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!listener_.valid()) return ErrnoStatus(errno, "socket");
  const int on = 1;
  ::setsockopt(listener_.get(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
  if (::bind(listener_.get(), listen->get(), listen->length) != 0 ||
      ::listen(listener_.get(), kBacklog) != 0) {
    return ErrnoStatus(errno, StrCat("listen at ", options_.listen));
  }
  SocketAddress at;
  at.length = sizeof at.storage;
  if (::getsockname(listener_.get(), reinterpret_cast<sockaddr*>(&at.storage), &at.length) != 0) {
    return ErrnoStatus(errno, "getsockname");
  }
  address_ = at.ToString();
  epoll_event event{};
  event.events = EPOLLIN;
  event.data.u64 = kListenKey;
  if (::epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, listener_.get(), &event) != 0) {
    return ErrnoStatus(errno, "epoll_ctl");
  }
  return Status();
}

TcpTransport::~TcpTransport() {
  if (generation_ != ForkGeneration()) return;  // its sockets are the parent's, who goes on
  for (auto& [id, connection] : connections_) {
    if (!connection->closing) Shut(*connection, Status(Code::kCancelled, "the transport ends"));
  }
  if (listener_.valid()) ::shutdown(listener_.get(), SHUT_RDWR);
}

// ---- connections

Result<TcpConnection*> TcpTransport::Add(OwnedFd fd, Role role, const std::string& at) {
  const int on = 1;
  const auto set = [&fd](int level, int name, int value) {
    ::setsockopt(fd.get(), level, name, &value, sizeof value);
  };
  set(IPPROTO_TCP, TCP_NODELAY, on);
  set(SOL_SOCKET, SO_KEEPALIVE, on);
  set(IPPROTO_TCP, TCP_KEEPIDLE, kIdleSeconds);
  set(IPPROTO_TCP, TCP_KEEPINTVL, kProbeSeconds);
  set(IPPROTO_TCP, TCP_KEEPCNT, kProbes);
  set(IPPROTO_TCP, TCP_USER_TIMEOUT, kUserTimeoutMillis);
  const ConnectionId id = next_connection_++;
  auto connection = std::make_unique<TcpConnection>(id, std::move(fd), role);
  connection->at = at;
  connection->host = HostOf(at);
  connection->deadline = SteadyClock().Now() + options_.connect_wait;
  if (streams_ != nullptr) {
    Result<std::unique_ptr<tcp::Stream>> stream = streams_->Make(connection->fd.get(), role);
    if (!stream) return stream.error();
    connection->stream = *std::move(stream);
  }
  epoll_event event{};
  event.events = EPOLLIN | EPOLLOUT | EPOLLRDHUP | EPOLLET;
  event.data.u64 = id;
  if (::epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, connection->fd.get(), &event) != 0) {
    return ErrnoStatus(errno, "epoll_ctl");
  }
  unproven_.insert(id);
  return connections_.emplace(id, std::move(connection)).first->second.get();
}

Result<ConnectionId> TcpTransport::Connect(const std::string& address) {
  const Result<SocketAddress> to = ParseSocketAddress(address);
  if (!to) return to.error();
  OwnedFd fd(::socket(to->storage.ss_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!fd.valid()) return ErrnoStatus(errno, "socket");
  const int socket = fd.get();
  if (::connect(socket, to->get(), to->length) != 0 && errno != EINPROGRESS) {
    return Status(Code::kUnavailable, StrCat("connect to ", address, ": ", std::strerror(errno)));
  }
  const Result<TcpConnection*> added = Add(std::move(fd), Role::kConnected, address);
  if (!added) return added.error();
  (*added)->connecting = true;
  (*added)->writer.AddHello(Role::kConnected);
  return (*added)->id;
}

void TcpTransport::Accept() {
  for (int i = 0; i < kMostAccepted; ++i) {
    SocketAddress from;
    from.length = sizeof from.storage;
    OwnedFd fd(::accept4(listener_.get(), reinterpret_cast<sockaddr*>(&from.storage), &from.length,
                         SOCK_CLOEXEC | SOCK_NONBLOCK));
    if (!fd.valid()) {
      if (errno == EINTR || errno == ECONNABORTED) continue;
      if (errno != EAGAIN && errno != EWOULDBLOCK) {
        // No descriptors: those that wait would wake the thread without end.
        ::epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, listener_.get(), nullptr);
        accept_again_ = SteadyClock().Now() + kAcceptPause;
      }
      return;
    }
    if (strangers_ >= kMostStrangers) MakeRoom();
    const Result<TcpConnection*> added = Add(std::move(fd), Role::kAccepted, from.ToString());
    if (added) ++strangers_;
  }
}

// Drops the oldest stranger of the host that has most of them.
void TcpTransport::MakeRoom() {
  std::map<std::string_view, std::pair<size_t, ConnectionId>> hosts;  // how many, the oldest
  for (const ConnectionId id : unproven_) {
    const TcpConnection& connection = *connections_.at(id);
    if (!connection.accepted || connection.closing) continue;
    auto& [count, oldest] = hosts[connection.host];
    if (count++ == 0) oldest = id;
  }
  ConnectionId victim = 0;
  size_t most = 0;
  for (const auto& [host, one] : hosts) {
    if (one.first > most || (one.first == most && one.second < victim)) {
      most = one.first;
      victim = one.second;
    }
  }
  if (victim == 0) return;
  ++dropped_strangers_;
  Shut(*connections_.at(victim),
       Status(Code::kResourceExhausted, "too many connections that have proven nothing"));
  EndAll();  // at once: the handler, too, counts them
}

void TcpTransport::SetProven(ConnectionId id) {
  TcpConnection* const connection = Find(id);
  if (connection == nullptr || std::exchange(connection->proven, true)) return;
  connection->reader.SetProven();
  unproven_.erase(id);
  if (connection->accepted) --strangers_;
}

void TcpTransport::Close(ConnectionId id) {
  if (TcpConnection* const connection = Find(id)) {
    Shut(*connection, Status(Code::kCancelled, "closed here"));
  }
}

// From here on nothing of it touches anyone's memory; the handler is told by End.
void TcpTransport::Shut(TcpConnection& connection, Status why) {
  assert(!connection.closing);
  connection.closing = true;
  connection.why = std::move(why);
  ending_.push_back(connection.id);
  unproven_.erase(connection.id);
  if (connection.accepted && !connection.proven) --strangers_;
  connection.stream.reset();
  ::epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, connection.fd.get(), nullptr);
  // A stranger leaves nothing in the kernel, nor does what cannot be sent any more.
  if (!connection.proven || !connection.writer.empty()) {
    const linger now{.l_onoff = 1, .l_linger = 0};
    ::setsockopt(connection.fd.get(), SOL_SOCKET, SO_LINGER, &now, sizeof now);
  }
  // A forked child may have a copy of the descriptor: closing ours ends nothing then.
  ::shutdown(connection.fd.get(), SHUT_RDWR);
  connection.fd.Reset();
}

void TcpTransport::End(ConnectionId id) {
  const auto it = connections_.find(id);
  const std::unique_ptr<TcpConnection> connection = std::move(it->second);
  connections_.erase(it);
  std::vector<uint64_t> unsent;
  connection->writer.Abandon(&unsent);
  for (const uint64_t tag : unsent) handler_.OnSent(id, tag, connection->why);
  if (connection->reader.filling()) {
    handler_.OnPayload(id, connection->payload_tag, connection->why);
  }
  // One that never spoke was not shown to the handler.
  if (connection->open || !connection->accepted) handler_.OnClosed(id, connection->why);
}

void TcpTransport::EndAll() {
  while (!ending_.empty()) {
    DeliverSent();
    for (const ConnectionId id : std::exchange(ending_, {})) End(id);
  }
}

void TcpTransport::KeepTime() {
  if (unproven_.empty() && accept_again_ == 0) return;
  const Nanos now = SteadyClock().Now();
  if (accept_again_ != 0 && now >= accept_again_) {
    accept_again_ = 0;
    epoll_event event{};
    event.events = EPOLLIN;
    event.data.u64 = kListenKey;
    ::epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, listener_.get(), &event);
  }
  const std::vector<ConnectionId> all(unproven_.begin(), unproven_.end());
  for (const ConnectionId id : all) {
    TcpConnection& connection = *connections_.at(id);
    if (now < connection.deadline) continue;
    if (connection.accepted) ++dropped_strangers_;
    Shut(connection, Status(Code::kDeadlineExceeded,
                            connection.open ? "no proof of the secret in time"
                                            : StrCat("no answer from ", connection.at)));
  }
}

// ---- bytes

void TcpTransport::OnEvents(TcpConnection& connection, uint32_t events) {
  if (connection.connecting) {
    int error = 0;
    socklen_t size = sizeof error;
    ::getsockopt(connection.fd.get(), SOL_SOCKET, SO_ERROR, &error, &size);
    if (error != 0) {
      Shut(connection, Status(Code::kUnavailable,
                              StrCat("connect to ", connection.at, ": ", std::strerror(error))));
      return;
    }
    if ((events & EPOLLOUT) == 0) return;
    connection.connecting = false;
    Touch(connection);
  }
  // TLS may want to write before it can read, and the other way round.
  const bool both = connection.stream != nullptr;
  if ((events & EPOLLOUT) != 0 || both) {
    connection.writable = true;
    if (!connection.writer.empty() || both) Touch(connection);
  }
  constexpr uint32_t kEnded = EPOLLRDHUP | EPOLLHUP | EPOLLERR;
  if ((events & (EPOLLIN | kEnded)) != 0 || both) {
    connection.readable = true;
    connection.ended |= (events & kEnded) != 0;
    Receive(connection);
  }
}

void TcpTransport::Receive(TcpConnection& connection) {
  size_t turn = 0;
  while (connection.readable && !connection.closing) {
    if (turn >= kTurnBytes) {
      if (!std::exchange(connection.reading, true)) readable_.push_back(connection.id);
      return;
    }
    FrameReader::Space space = connection.reader.Where();
    const size_t pieces = space[1].iov_len > 0 ? 2 : 1;
    ssize_t got = 0;
    if (connection.stream != nullptr) {
      got = connection.stream->Read({space.data(), pieces});
    } else {
      msghdr message{};
      message.msg_iov = space.data();
      message.msg_iovlen = pieces;
      got = ::recvmsg(connection.fd.get(), &message, 0);
      if (got < 0) got = -errno;
    }
    if (got == -EINTR) continue;
    if (connection.stream != nullptr && connection.stream->pending()) Touch(connection);
    if (got == -EAGAIN) {
      connection.readable = false;
      break;
    }
    if (got <= 0) {
      std::string why = got == 0 ? "the other side has closed the connection"
                                 : StrCat("receive: ", std::strerror(static_cast<int>(-got)));
      if (connection.stream != nullptr && !connection.stream->error().empty()) {
        why = connection.stream->error();
      }
      if (connection.accepted && !connection.proven) ++dropped_strangers_;
      Shut(connection, Status(Code::kUnavailable,
                              StrCat(connection.at, ": ", why,
                                     connection.open || connection.accepted
                                         ? ""
                                         : " without a word; FOREBAY_PEER_TRANSPORT must be the "
                                           "same on all nodes")));
      return;
    }
    turn += static_cast<size_t>(got);
    // Less than there was room for: the socket is empty, and what comes is another edge.
    const size_t room = space[0].iov_len + (pieces > 1 ? space[1].iov_len : 0);
    if (connection.stream == nullptr && !connection.ended && static_cast<size_t>(got) < room) {
      connection.readable = false;
    }
    connection.reader.Took(static_cast<size_t>(got));
    if (!TakeFrames(connection)) return;
  }
  if (!connection.closing) SetLowWater(connection);
}

// False: the connection is closing.
bool TcpTransport::TakeFrames(TcpConnection& connection) {
  using Kind = FrameReader::Step::Kind;
  const ConnectionId id = connection.id;
  while (true) {
    const std::span<std::byte> place = connection.reader.place();
    const Result<FrameReader::Step> step = connection.reader.Next();
    if (!step) {
      if (connection.accepted && !connection.proven) ++dropped_strangers_;
      Shut(connection,
           Status(step.error().code(), StrCat(connection.at, ": ", step.error().message())));
      return false;
    }
    switch (step->kind) {
      case Kind::kNothing:
        return true;
      case Kind::kHello:
        connection.open = true;
        connection.deadline = SteadyClock().Now() + options_.connect_wait;
        if (connection.accepted) {
          connection.writer.AddHello(Role::kAccepted);
          Touch(connection);
        }
        handler_.OnOpen(id, connection.accepted);
        break;
      case Kind::kMessage: {
        uint64_t tag = 0;
        const std::span<std::byte> to =
            handler_.OnMessage(id, step->bytes, step->payload_bytes, &tag);
        if (step->payload_bytes == 0) break;
        connection.payload_tag = tag;
        connection.reader.SetPlace(to);
        break;
      }
      case Kind::kPayload:
        if (!step->bytes.empty()) handler_.OnCopy(connection.payload_tag, place, step->bytes);
        handler_.OnPayload(id, connection.payload_tag, Status());
        break;
    }
    if (connection.closing) return false;
  }
}

// Where a payload is on its way, its pieces wake nobody.
void TcpTransport::SetLowWater(TcpConnection& connection) {
  constexpr size_t kMostLowWater = 128 << 10;
  if (connection.stream != nullptr || !connection.proven) return;
  const int wanted = static_cast<int>(std::min(connection.reader.wanted(), kMostLowWater));
  if (wanted == connection.low_water) return;
  connection.low_water = wanted;
  ::setsockopt(connection.fd.get(), SOL_SOCKET, SO_RCVLOWAT, &wanted, sizeof wanted);
}

void TcpTransport::Touch(TcpConnection& connection) {
  if (!std::exchange(connection.flushing, true)) flush_.push_back(connection.id);
}

Status TcpTransport::Send(ConnectionId id, std::span<const std::byte> header,
                          std::span<const std::byte> payload, uint64_t tag) {
  if (header.size() > kMaxHeader || payload.size() > kMaxPayload) {
    return Status(Code::kInvalidArgument, StrCat("a message of ", header.size(), " + ",
                                                 payload.size(), " bytes is too large"));
  }
  TcpConnection* const connection = Find(id);
  if (connection == nullptr || !connection->open) {
    return Status(Code::kNotFound, StrCat("no open connection ", id));
  }
  if (connection->writer.size() >= kMostQueued) {
    return Status(Code::kResourceExhausted,
                  StrCat(kMostQueued, " messages wait for ", connection->at));
  }
  connection->writer.Add(header, payload, tag);
  if (connection->writable) Touch(*connection);
  return Status();
}

void TcpTransport::FlushAll() {
  for (const ConnectionId id : std::exchange(flush_, {})) {
    TcpConnection* const connection = Find(id);
    if (connection == nullptr) continue;
    connection->flushing = false;
    if (!connection->connecting) Flush(*connection);
  }
}

void TcpTransport::Flush(TcpConnection& connection) {
  std::array<iovec, kPieces> pieces;
  size_t turn = 0;
  const auto more = [&] {
    return !connection.writer.empty() ||
           (connection.stream != nullptr && connection.stream->pending());
  };
  while (more()) {
    if (turn >= kTurnBytes) {
      Touch(connection);
      return;
    }
    const size_t count = connection.writer.Fill(pieces);
    ssize_t wrote = 0;
    if (connection.stream != nullptr) {
      wrote = connection.stream->Write(std::span(pieces).first(count));
    } else {
      msghdr message{};
      message.msg_iov = pieces.data();
      message.msg_iovlen = count;
      wrote = ::sendmsg(connection.fd.get(), &message, MSG_NOSIGNAL);
      if (wrote < 0) wrote = -errno;
    }
    if (wrote == -EINTR) continue;
    if (wrote == -EAGAIN) {
      connection.writable = false;  // until the edge
      return;
    }
    if (wrote < 0) {
      const std::string why = connection.stream != nullptr ? connection.stream->error() : "";
      Shut(connection,
           Status(Code::kUnavailable,
                  StrCat(connection.at, ": send: ",
                         why.empty() ? std::strerror(static_cast<int>(-wrote)) : why.c_str())));
      return;
    }
    turn += static_cast<size_t>(wrote);
    tags_.clear();
    connection.writer.Wrote(static_cast<size_t>(wrote), &tags_);
    for (const uint64_t tag : tags_) sent_.emplace_back(connection.id, tag);
  }
}

void TcpTransport::DeliverSent() {
  for (const auto& [id, tag] : std::exchange(sent_, {})) handler_.OnSent(id, tag, Status());
}

// ---- running

bool TcpTransport::Progress() {
  FlushAll();
  DeliverSent();
  for (const ConnectionId id : std::exchange(readable_, {})) {
    if (TcpConnection* const connection = Find(id)) {
      connection->reading = false;
      Receive(*connection);
    }
  }
  if (!std::exchange(polled_, false)) {
    std::array<epoll_event, 64> events;
    const int count = ::epoll_wait(epoll_.get(), events.data(), static_cast<int>(events.size()), 0);
    for (int i = 0; i < count; ++i) {
      const epoll_event& event = events[static_cast<size_t>(i)];
      if (event.data.u64 == kListenKey) {
        Accept();
      } else if (TcpConnection* const connection = Find(event.data.u64)) {
        OnEvents(*connection, event.events);
      }
    }
  }
  FlushAll();
  KeepTime();
  EndAll();
  return pending();
}

void TcpTransport::Wait(std::span<const int> wake_fds, Nanos wait) {
  FlushAll();
  if (pending()) return;
  if (!unproven_.empty() || accept_again_ != 0) {
    Nanos next = accept_again_ != 0 ? accept_again_ : INT64_MAX;
    for (const ConnectionId id : unproven_) {
      next = std::min(next, connections_.at(id)->deadline);
    }
    wait = std::min(wait, next - SteadyClock().Now());
  }
  constexpr size_t kOwn = 2;
  pollfd few[kOwn + 6];
  std::vector<pollfd> many;
  pollfd* fds = few;
  if (wake_fds.size() + kOwn > std::size(few)) {
    many.resize(wake_fds.size() + kOwn);
    fds = many.data();
  }
  fds[0] = {epoll_.get(), POLLIN, 0};
  fds[1] = {wake_.get(), POLLIN, 0};
  for (size_t i = 0; i < wake_fds.size(); ++i) fds[kOwn + i] = {wake_fds[i], POLLIN, 0};
  const Nanos bound = std::max<Nanos>(wait, 0);
  const timespec time{bound / kSecond, bound % kSecond};
  const int ready = ::ppoll(fds, wake_fds.size() + kOwn, &time, nullptr);
  polled_ = ready >= 0 && (fds[0].revents & POLLIN) == 0;
  if (ready > 0 && (fds[1].revents & POLLIN) != 0) {
    uint64_t count = 0;
    [[maybe_unused]] const ssize_t got = ::read(wake_.get(), &count, sizeof count);
  }
}

void TcpTransport::Wake() {
  const uint64_t one = 1;
  [[maybe_unused]] const ssize_t wrote = ::write(wake_.get(), &one, sizeof one);
}

}  // namespace

Result<std::unique_ptr<Transport>> tcp::MakeStreamTransport(
    const TransportOptions& options, TransportHandler& handler,
    std::unique_ptr<tcp::StreamMaker> streams) {
  FOREBAY_RETURN_IF_ERROR(options.Validate());
  auto transport = std::make_unique<TcpTransport>(options, handler, std::move(streams));
  FOREBAY_RETURN_IF_ERROR(transport->Start());
  return std::unique_ptr<Transport>(std::move(transport));
}

Result<std::unique_ptr<Transport>> MakeTcpTransport(const TransportOptions& options,
                                                    TransportHandler& handler) {
  return tcp::MakeStreamTransport(options, handler, nullptr);
}

Result<std::unique_ptr<Transport>> MakeTlsTransport(const TransportOptions& options,
                                                    TransportHandler& handler) {
  Result<std::unique_ptr<tcp::StreamMaker>> streams =
      tcp::MakeTlsStreams(options.tls_key, tcp::KernelHasTls());
  if (!streams) return streams.error();
  return tcp::MakeStreamTransport(options, handler, *std::move(streams));
}

}  // namespace forebay
