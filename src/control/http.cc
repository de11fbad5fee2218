#include "control/http.h"

#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
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

std::string Lower(std::string_view text) {
  std::string out(text);
  for (char& c : out) {
    if (c >= 'A' && c <= 'Z') c = static_cast<char>(c - 'A' + 'a');
  }
  return out;
}

std::string_view Trim(std::string_view text) {
  while (!text.empty() && (text.front() == ' ' || text.front() == '\t')) text.remove_prefix(1);
  while (!text.empty() && (text.back() == ' ' || text.back() == '\t')) text.remove_suffix(1);
  return text;
}

Status Malformed(std::string_view what) {
  return Status(Code::kUnavailable, StrCat("not an HTTP/1.1 answer: ", what));
}

}  // namespace

Result<HttpEndpoint> HttpEndpoint::Parse(std::string_view text) {
  const auto wrong = [&](std::string_view why) {
    return Status(Code::kInvalidArgument,
                  StrCat("endpoint '", text, "': ", why, "; write http://host:port"));
  };
  std::string_view rest = text;
  if (rest.starts_with("https://")) return wrong("TLS is not supported");
  if (rest.starts_with("http://")) rest.remove_prefix(7);
  if (rest.ends_with('/')) rest.remove_suffix(1);
  Result<HostPort> at = ParseHostPort(rest);
  if (!at) return wrong(at.error().message());
  return HttpEndpoint{std::move(at->host), at->port};
}

std::string HttpEndpoint::ToString() const {
  return StrCat("http://", HostPort{host, port}.ToString());
}

Result<std::unique_ptr<HttpConnection>> HttpConnection::Connect(const HttpEndpoint& endpoint,
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
    if (fd) {
      return std::unique_ptr<HttpConnection>(new HttpConnection(*std::move(fd), at.ToString()));
    }
    last = fd.error();
  }
  return last;
}

Status HttpConnection::Send(std::string_view bytes, Nanos until) {
  while (!bytes.empty()) {
    const ssize_t sent = ::send(fd_.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL);
    if (sent >= 0) {
      bytes.remove_prefix(static_cast<size_t>(sent));
      continue;
    }
    if (errno == EINTR) continue;
    if (errno != EAGAIN) return Gone(errno, "send");
    const Result<bool> ready = Ready(fd_.get(), POLLOUT, until);
    if (!ready) return ready.error();
    if (!*ready) return TooLate("send");
  }
  return Status();
}

Result<bool> HttpConnection::Receive(Nanos until) {
  if (at_ > 0) {
    in_.erase(0, at_);
    at_ = 0;
  }
  const size_t before = in_.size();
  in_.resize(before + (64 << 10));
  while (true) {
    const ssize_t got = ::recv(fd_.get(), in_.data() + before, in_.size() - before, 0);
    const int error = errno;
    if (got < 0 && error == EINTR) continue;
    if (got < 0 && error == EAGAIN) {
      const Result<bool> ready = Ready(fd_.get(), POLLIN, until);
      if (ready && *ready) continue;
      in_.resize(before);
      if (!ready) return ready.error();
      return TooLate("receive");
    }
    in_.resize(before + static_cast<size_t>(std::max<ssize_t>(0, got)));
    if (got < 0) return Gone(error, "receive");
    if (got > 0) answered_ = true;
    return got > 0;
  }
}

Result<int> HttpConnection::Post(std::string_view path, std::string_view body, Nanos until) {
  answered_ = false;
  ended_ = false;
  keep_ = false;
  in_.clear();
  at_ = 0;
  std::string request =
      StrCat("POST ", path, " HTTP/1.1\r\nHost: ", host_,
             "\r\nContent-Type: application/json\r\nContent-Length: ", body.size(), "\r\n\r\n");
  request.append(body);
  FOREBAY_RETURN_IF_ERROR(Send(request, until));
  while (true) {
    const size_t end = in_.find("\r\n\r\n");
    if (end != std::string::npos) {
      int code = 0;
      FOREBAY_RETURN_IF_ERROR(ParseHead(std::string_view(in_).substr(0, end), &code));
      at_ = end + 4;
      if (code >= 100 && code < 200) {  // an interim answer: the real one follows
        in_.erase(0, at_);
        at_ = 0;
        continue;
      }
      return code;
    }
    if (in_.size() > kMaxHead) return Malformed("its head is too long");
    const Result<bool> more = Receive(until);
    if (!more) return more.error();
    if (!*more) return Status(Code::kUnavailable, "the connection was closed");
  }
}

Status HttpConnection::ParseHead(std::string_view head, int* code) {
  const size_t line = std::min(head.find("\r\n"), head.size());
  const std::string_view first = head.substr(0, line);
  if (first.size() < 12 || !first.starts_with("HTTP/1.") ||
      std::from_chars(first.data() + 9, first.data() + 12, *code).ec != std::errc()) {
    return Malformed(first.substr(0, 40));
  }
  keep_ = first[7] == '1';
  chunked_ = false;
  in_chunk_ = false;
  left_ = SIZE_MAX;
  size_t at = line;
  while (at < head.size()) {
    at += 2;
    const size_t end = std::min(head.find("\r\n", at), head.size());
    const std::string_view field = head.substr(at, end - at);
    at = end;
    const size_t colon = field.find(':');
    if (colon == std::string_view::npos) return Malformed(field.substr(0, 40));
    const std::string name = Lower(field.substr(0, colon));
    const std::string_view value = Trim(field.substr(colon + 1));
    if (name == "content-length") {
      const auto [stop, error] = std::from_chars(value.data(), value.data() + value.size(), left_);
      if (error != std::errc() || stop != value.data() + value.size() || left_ > kMaxBody) {
        return Malformed(field.substr(0, 80));
      }
    } else if (name == "transfer-encoding") {
      if (Lower(value) != "chunked") return Malformed(field.substr(0, 80));
      chunked_ = true;
    } else if (name == "connection" && Lower(value) == "close") {
      keep_ = false;
    }
  }
  if (chunked_) left_ = 0;
  ended_ = !chunked_ && left_ == 0;
  return Status();
}

Result<std::optional<std::string>> HttpConnection::NextPiece(Nanos until) {
  while (!ended_) {
    const std::string_view have = std::string_view(in_).substr(at_);
    if (chunked_ && left_ == 0) {
      // The line break after a chunk, then the next one's length, then perhaps trailers.
      const size_t skip = in_chunk_ ? 2 : 0;
      const size_t end = have.find("\r\n", skip);
      if (end != std::string_view::npos && have.size() >= skip) {
        const std::string_view line = have.substr(skip, end - skip);
        size_t length = 0;
        const auto [stop, error] =
            std::from_chars(line.data(), line.data() + line.size(), length, 16);
        if ((in_chunk_ && !have.starts_with("\r\n")) || error != std::errc() ||
            (stop != line.data() + line.size() && *stop != ';') || length > kMaxBody) {
          return Malformed("a chunk's length");
        }
        if (length > 0) {
          at_ += end + 2;
          left_ = length;
          in_chunk_ = true;
          continue;
        }
        const size_t last =
            have.substr(end).starts_with("\r\n\r\n") ? end : have.find("\r\n\r\n", end);
        if (last != std::string_view::npos) {
          at_ += last + 4;
          ended_ = true;
          break;
        }
      }
      if (have.size() > kMaxHead) return Malformed("a chunk's length");
    } else if (!have.empty()) {
      const size_t take = std::min(left_, have.size());
      std::string piece(have.substr(0, take));
      at_ += take;
      if (left_ != SIZE_MAX) left_ -= take;
      if (!chunked_ && left_ == 0) ended_ = true;
      return std::optional<std::string>(std::move(piece));
    }
    const Result<bool> more = Receive(until);
    if (!more) return more.error();
    if (!*more) {
      keep_ = false;
      if (!chunked_ && left_ == SIZE_MAX) {
        ended_ = true;
        break;
      }
      return Status(Code::kUnavailable, "the connection was closed in the middle of an answer");
    }
  }
  return std::optional<std::string>();
}

Result<std::string> HttpConnection::WholeBody(Nanos until) {
  std::string body;
  while (true) {
    Result<std::optional<std::string>> piece = NextPiece(until);
    if (!piece) return piece.error();
    if (!*piece) return body;
    if (body.size() + (*piece)->size() > kMaxBody) return Malformed("its body is too long");
    if (body.empty()) {
      body = std::move(**piece);
    } else {
      body += **piece;
    }
  }
}

}  // namespace forebay::control
