#include "daemon/web_server.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <utility>

#include "base/fork.h"
#include "base/thread.h"
#include "daemon/web_request.h"

namespace forebay {
namespace {

constexpr size_t kMostConnections = 32;
constexpr Nanos kForEach = 5 * kSecond;
constexpr Nanos kToGo = kSecond;  // after the answer
constexpr int kBacklog = 64;
constexpr int kReadsAtOnce = 16;
constexpr Nanos kIdle = 10 * kSecond;

std::string_view Reason(int status) {
  switch (status) {
    case 200:
      return "OK";
    case 403:
      return "Forbidden";
    case 404:
      return "Not Found";
    case 405:
      return "Method Not Allowed";
    case 431:
      return "Request Header Fields Too Large";
    case 503:
      return "Service Unavailable";
    default:
      return "Bad Request";
  }
}

std::string Message(int status, std::string_view type, std::string_view body, bool head) {
  // Nothing of it may be shown inside, read by, or kept for another site, and the page loads
  // nothing from elsewhere.
  return StrCat("HTTP/1.1 ", status, " ", Reason(status), "\r\nContent-Type: ", type,
                "\r\nContent-Length: ", body.size(),
                "\r\nConnection: close\r\nCache-Control: no-store"
                "\r\nX-Content-Type-Options: nosniff\r\nReferrer-Policy: no-referrer"
                "\r\nCross-Origin-Resource-Policy: same-origin"
                "\r\nContent-Security-Policy: default-src 'none'; script-src 'unsafe-inline'; "
                "style-src 'unsafe-inline'; connect-src 'self'; img-src data:; "
                "frame-ancestors 'none'; base-uri 'none'; form-action 'none'",
                status == 405 ? "\r\nAllow: GET, HEAD" : "", "\r\n\r\n",
                head ? std::string_view() : body);
}

std::string Refusal(int status, bool head) {
  return Message(status, "text/plain; charset=utf-8", StrCat(Reason(status), "\n"), head);
}

}  // namespace

WebServer::WebServer() : fork_generation_(ForkGeneration()) {}

void WebServerDelete::operator()(WebServer* web) const {
  if (web == nullptr || web->fork_generation_ != ForkGeneration()) return;
  delete web;
}

Result<WebServerPtr> WebServer::Listen(uint16_t port) {
  WebServerPtr web(new WebServer());
  web->listen_ = OwnedFd(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  web->wake_ = OwnedFd(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (!web->listen_.valid() || !web->wake_.valid()) {
    return ErrnoStatus(errno, "making the metrics port's descriptors");
  }
  const int on = 1;
  (void)setsockopt(web->listen_.get(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
  sockaddr_in address = {};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  address.sin_port = htons(port);
  socklen_t size = sizeof address;
  if (bind(web->listen_.get(), reinterpret_cast<sockaddr*>(&address), size) != 0 ||
      listen(web->listen_.get(), kBacklog) != 0 ||
      getsockname(web->listen_.get(), reinterpret_cast<sockaddr*>(&address), &size) != 0) {
    return ErrnoStatus(errno, StrCat("serving metrics on 127.0.0.1:", port));
  }
  web->port_ = ntohs(address.sin_port);
  return web;
}

Status WebServer::Serve(std::vector<WebPage> pages) {
  pages_ = std::move(pages);
  auto started = StartThread("forebay-web", [this](std::stop_token stop) { Run(stop); });
  if (!started) return started.error();
  thread_ = *std::move(started);
  return Status();
}

WebServer::~WebServer() {
  if (!thread_.joinable()) return;
  thread_.request_stop();
  const uint64_t one = 1;
  (void)!write(wake_.get(), &one, sizeof one);
}

void WebServer::Run(std::stop_token stop) {
  std::vector<pollfd> fds;
  while (!stop.stop_requested()) {
    Nanos now = SteadyClock().Now();
    Nanos wait = kIdle;
    if (accept_again_ != 0) wait = accept_again_ - now;
    const bool accepts = accept_again_ == 0 && connections_.size() < kMostConnections;
    fds.assign({pollfd{wake_.get(), POLLIN, 0},
                pollfd{listen_.get(), static_cast<short>(accepts ? POLLIN : 0), 0}});
    for (const Connection& connection : connections_) {
      const bool writing = connection.sent < connection.out.size();
      fds.push_back({connection.socket.get(), static_cast<short>(writing ? POLLOUT : POLLIN), 0});
      wait = std::min(wait, connection.deadline - now);
    }
    const Nanos milliseconds = (std::max<Nanos>(wait, 0) + kMilli - 1) / kMilli;
    (void)poll(fds.data(), fds.size(), static_cast<int>(milliseconds));
    if (stop.stop_requested()) return;
    now = SteadyClock().Now();
    if (now >= accept_again_) accept_again_ = 0;
    size_t at = 2;
    std::erase_if(connections_, [&](Connection& connection) {
      const bool ready = fds[at++].revents != 0;
      return (ready && !Advance(connection)) || now >= connection.deadline;
    });
    if (fds[1].revents != 0) Accept();
  }
}

void WebServer::Accept() {
  while (connections_.size() < kMostConnections) {
    OwnedFd socket(accept4(listen_.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
    if (!socket.valid()) {
      if (errno == ECONNABORTED || errno == EINTR) continue;
      // Out of descriptors: the connection stays in the queue; look again later.
      if (errno != EAGAIN) accept_again_ = SteadyClock().Now() + 100 * kMilli;
      return;
    }
    Connection connection;
    connection.socket = std::move(socket);
    connection.deadline = SteadyClock().Now() + kForEach;
    connections_.push_back(std::move(connection));
  }
}

bool WebServer::Advance(Connection& connection) {
  const int socket = connection.socket.get();
  std::array<char, 4096> room;
  // A bound: one that sends without end gets no more than its turn.
  for (int i = 0; i < kReadsAtOnce && connection.sent == connection.out.size(); ++i) {
    const ssize_t n = recv(socket, room.data(), room.size(), MSG_DONTWAIT);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) return errno == EAGAIN;
    if (n == 0) return false;
    // Closing with unread bytes would reset the connection under the answer: read on for a while.
    if (connection.answered) continue;
    connection.in.append(room.data(), static_cast<size_t>(n));
    const size_t end = connection.in.find("\r\n\r\n");
    if (end == std::string::npos && connection.in.size() <= kLongestWebHead) continue;
    connection.out = end == std::string::npos || end > kLongestWebHead
                         ? Refusal(431, false)
                         : Answer(std::string_view(connection.in).substr(0, end + 2));
    connection.answered = true;
    connection.in = {};
  }
  if (connection.sent == connection.out.size()) return true;
  while (connection.sent < connection.out.size()) {
    const ssize_t n = send(socket, connection.out.data() + connection.sent,
                           connection.out.size() - connection.sent, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) return errno == EAGAIN;
    connection.sent += static_cast<size_t>(n);
  }
  shutdown(socket, SHUT_WR);
  connection.deadline = std::min(connection.deadline, SteadyClock().Now() + kToGo);
  return true;
}

std::string WebServer::Answer(std::string_view head) {
  const WebRequest request = ParseWebRequest(head);
  if (request.status != 200) return Refusal(request.status, request.head);
  for (const WebPage& page : pages_) {
    if (page.path != request.path) continue;
    const Result<std::string> body = page.body();
    if (!body) return Refusal(503, request.head);
    return Message(200, page.type, *body, request.head);
  }
  return Refusal(404, request.head);
}

}  // namespace forebay
