#include "control/http.h"

#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>

#include "base/host_lookup.h"
#include "base/host_port.h"

namespace forebay::control {
namespace {

// Waits until the socket is ready for `events`; false when the time is over.
Result<bool> Ready(int fd, int16_t events, Nanos until) {
  while (true) {
    const Nanos left = until - SteadyClock().Now();
    const timespec wait{std::max<Nanos>(0, left) / kSecond, std::max<Nanos>(0, left) % kSecond};
    pollfd one{fd, events, 0};
    const int ready = ::ppoll(&one, 1, &wait, nullptr);
    if (ready > 0) return true;
    if (ready == 0 && left <= 0) return false;
    if (ready < 0 && errno != EINTR) return ErrnoStatus(errno, "poll");
  }
}

Status Gone(int error, const char* what) {
  return Status(Code::kUnavailable, StrCat(what, ": ", std::strerror(error)));
}

Status TooLate(const char* what) {
  return Status(Code::kDeadlineExceeded, StrCat(what, ": no answer in time"));
}

Result<OwnedFd> ConnectTo(const HostAddress& address, Nanos until) {
  OwnedFd fd(::socket(address.family(), SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!fd.valid()) return ErrnoStatus(errno, "socket");
  const int on = 1;
  ::setsockopt(fd.get(), IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));
  // A stream whose other end is cut off is noticed within a quarter of a minute.
  ::setsockopt(fd.get(), SOL_SOCKET, SO_KEEPALIVE, &on, sizeof(on));
  const int idle = 5;
  const int interval = 3;
  const int count = 3;
  ::setsockopt(fd.get(), IPPROTO_TCP, TCP_KEEPIDLE, &idle, sizeof(idle));
  ::setsockopt(fd.get(), IPPROTO_TCP, TCP_KEEPINTVL, &interval, sizeof(interval));
  ::setsockopt(fd.get(), IPPROTO_TCP, TCP_KEEPCNT, &count, sizeof(count));
  if (::connect(fd.get(), address.get(), address.size) == 0) return fd;
  if (errno != EINPROGRESS) return Gone(errno, "connect");
  const Result<bool> ready = Ready(fd.get(), POLLOUT, until);
  if (!ready) return ready.error();
  if (!*ready) return TooLate("connect");
  int error = 0;
  socklen_t size = sizeof(error);
  ::getsockopt(fd.get(), SOL_SOCKET, SO_ERROR, &error, &size);
  if (error != 0) return Gone(error, "connect");
  return fd;
}

}  // namespace

Result<HttpEndpoint> HttpEndpoint::Parse(std::string_view text) {
  const auto wrong = [&](std::string_view why) {
    return Status(Code::kInvalidArgument, StrCat("endpoint '", text, "': ", why,
                                                 "; write https://host:port, or http://host:port"));
  };
  std::string_view rest = text;
  const bool tls = rest.starts_with("https://");
  if (tls) {
    rest.remove_prefix(8);
  } else if (rest.starts_with("http://")) {
    rest.remove_prefix(7);
  }
  if (rest.ends_with('/')) rest.remove_suffix(1);
  if (rest.find('@') != std::string_view::npos) {
    // Not shown: it would be in every log.
    return Status(Code::kInvalidArgument,
                  "an endpoint has no user and password in it; FOREBAY_ETCD_USER and "
                  "FOREBAY_ETCD_PASSWORD_FILE are for these");
  }
  Result<HostPort> at = ParseHostPort(rest);
  if (!at) return wrong(at.error().message());
  return HttpEndpoint{std::move(at->host), at->port, tls};
}

std::string HttpEndpoint::ToString() const {
  return StrCat(tls ? "https://" : "http://", HostPort{host, port}.ToString());
}

bool HttpEndpoint::loopback() const {
  if (host == "localhost") return true;
  if (!IsNumericHost(host)) return false;
  const auto found = HostLookup(HostPort{host, port}).Poll();  // numeric ones are ready at once
  return found && *found && !(*found)->empty() && (**found)[0].loopback();
}

Result<std::unique_ptr<HttpConnection>> HttpConnection::Connect(const HttpEndpoint& endpoint,
                                                                const tcp::TlsClientOptions& tls,
                                                                Nanos until) {
  const HostPort at{endpoint.host, endpoint.port};
  const auto addresses = HostLookup(at).Wait(until - SteadyClock().Now());
  if (!addresses) return addresses.error();
  Status last(Code::kUnavailable, "no address");
  for (size_t i = 0; i < addresses->size(); ++i) {
    // A silent address leaves time for the others.
    const Nanos now = SteadyClock().Now();
    const Nanos part = (until - now) / static_cast<Nanos>(addresses->size() - i);
    Result<OwnedFd> fd = ConnectTo((*addresses)[i], now + part);
    if (!fd) {
      last = fd.error();
      continue;
    }
    std::unique_ptr<HttpConnection> made(new HttpConnection(*std::move(fd), at.ToString()));
    if (endpoint.tls) last = made->StartTls(endpoint.host, tls, now + part);
    if (!endpoint.tls || last.ok()) return made;
  }
  return last;
}

Status HttpConnection::StartTls(const std::string& host, const tcp::TlsClientOptions& options,
                                Nanos until) {
  Result<std::unique_ptr<tcp::TlsClient>> tls = tcp::MakeTlsClient(options);
  if (!tls) return tls.error();
  tls_ = *std::move(tls);
  Result<std::unique_ptr<tcp::TlsClientStream>> stream = tls_->Make(fd_.get(), host);
  if (!stream) return stream.error();
  stream_ = *std::move(stream);
  while (true) {
    const ssize_t done = stream_->Handshake();
    if (done == 0) return Status();
    if (done != -EAGAIN) return Lost(static_cast<int>(-done), "TLS");
    const Result<bool> ready = Ready(fd_.get(), stream_->pending() ? POLLOUT : POLLIN, until);
    if (!ready) return ready.error();
    if (!*ready) return TooLate("TLS");
  }
}

Status HttpConnection::Lost(int error, const char* what) const {
  if (stream_ != nullptr && !stream_->error().empty()) {
    return Status(Code::kUnavailable, stream_->error());
  }
  // etcd hangs up on who speaks plain HTTP where it wants TLS.
  const bool hint = stream_ == nullptr && !speaks_http_;
  return Status(Code::kUnavailable,
                StrCat(what, ": ", error != 0 ? std::strerror(error) : "the connection was closed",
                       hint ? "; is it https instead of http?" : ""));
}

ssize_t HttpConnection::WriteSome(std::string_view bytes) {
  if (stream_ != nullptr) {
    const iovec piece{const_cast<char*>(bytes.data()), bytes.size()};
    return stream_->Write({&piece, bytes.empty() ? size_t{0} : size_t{1}});
  }
  while (true) {
    const ssize_t sent = ::send(fd_.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL);
    if (sent >= 0) return sent;
    if (errno != EINTR) return -errno;
  }
}

ssize_t HttpConnection::ReadSome(std::span<char> room) {
  if (stream_ != nullptr) {
    const iovec piece{room.data(), room.size()};
    return stream_->Read({&piece, 1});
  }
  while (true) {
    const ssize_t got = ::recv(fd_.get(), room.data(), room.size(), 0);
    if (got >= 0) return got;
    if (errno != EINTR) return -errno;
  }
}

Status HttpConnection::Send(std::string_view bytes, Nanos until) {
  const auto pending = [this] { return stream_ != nullptr && stream_->pending(); };
  while (!bytes.empty() || pending()) {
    const ssize_t sent = WriteSome(bytes);
    if (sent > 0) {
      bytes.remove_prefix(static_cast<size_t>(sent));
      continue;
    }
    if (sent == 0 && bytes.empty()) continue;
    if (sent != -EAGAIN) {
      // By TLS 1.3 a server refuses our certificate after we have begun to write: read why.
      std::array<char, 256> room;
      if (stream_ != nullptr) (void)ReadSome(room);
      return Lost(sent == 0 ? EPIPE : static_cast<int>(-sent), "send");
    }
    const Result<bool> ready = Ready(fd_.get(), POLLOUT, until);
    if (!ready) return ready.error();
    if (!*ready) return TooLate("send");
  }
  return Status();
}

Result<bool> HttpConnection::Receive(Nanos until) {
  std::array<char, 64 << 10> room;
  while (true) {
    const ssize_t got = ReadSome(room);
    if (got >= 0) {
      if (got > 0) answered_ = speaks_http_ = true;
      answer_.Append({room.data(), static_cast<size_t>(got)});
      return got > 0;
    }
    if (got != -EAGAIN) return Lost(static_cast<int>(-got), "receive");
    const Result<bool> ready = Ready(fd_.get(), POLLIN, until);
    if (!ready) return ready.error();
    if (!*ready) return TooLate("receive");
  }
}

Result<int> HttpConnection::Post(std::string_view path, std::string_view body, Nanos until) {
  answered_ = false;
  answer_.Begin();
  std::string request =
      StrCat("POST ", path, " HTTP/1.1\r\nHost: ", host_,
             authorization_.empty() ? "" : "\r\nAuthorization: ", authorization_,
             "\r\nContent-Type: application/json\r\nContent-Length: ", body.size(), "\r\n\r\n");
  request.append(body);
  FOREBAY_RETURN_IF_ERROR(Send(request, until));
  while (true) {
    const Result<std::optional<int>> code = answer_.Head();
    if (!code) return code.error();
    if (*code) return **code;
    const Result<bool> more = Receive(until);
    if (!more) return more.error();
    if (!*more) return Lost(0, "receive");
  }
}

Result<std::optional<std::string>> HttpConnection::NextPiece(Nanos until) {
  std::string piece;
  while (true) {
    const Result<HttpAnswer::Step> step = answer_.Next(&piece);
    if (!step) return step.error();
    if (*step == HttpAnswer::Step::kPiece) return std::optional<std::string>(std::move(piece));
    if (*step == HttpAnswer::Step::kEnd) return std::optional<std::string>();
    const Result<bool> more = Receive(until);
    if (!more) return more.error();
    if (!*more) FOREBAY_RETURN_IF_ERROR(answer_.OnClose());
  }
}

Result<std::string> HttpConnection::WholeBody(Nanos until) {
  std::string body;
  while (true) {
    Result<std::optional<std::string>> piece = NextPiece(until);
    if (!piece) return piece.error();
    if (!*piece) return body;
    if (body.size() + (*piece)->size() > HttpAnswer::kMaxBody) {
      return Status(Code::kUnavailable, "the answer is too long");
    }
    body += **piece;
    // One that sends slowly, but always something, has no more time than a silent one.
    if (SteadyClock().Now() > until && !answer_.ended()) return TooLate("receive");
  }
}

}  // namespace forebay::control
