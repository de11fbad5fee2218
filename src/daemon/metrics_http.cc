#include "daemon/metrics_http.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <poll.h>
#include <pthread.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <string>
#include <string_view>

#include "base/clock.h"

namespace forebay {
namespace {

constexpr size_t kLongestRequest = size_t{8} << 10;
constexpr Nanos kForEach = kSecond;
constexpr int kBacklog = 16;

bool Await(int fd, short events, Nanos deadline) {
  const Nanos left = deadline - SteadyClock().Now();
  if (left <= 0) return false;
  pollfd watched = {fd, events, 0};
  return poll(&watched, 1, static_cast<int>(left / kMilli) + 1) > 0;
}

std::string Answer(std::string_view status, std::string_view type, std::string_view body,
                   bool head) {
  return StrCat("HTTP/1.1 ", status, "\r\nContent-Type: ", type,
                "\r\nContent-Length: ", body.size(), "\r\nConnection: close\r\n\r\n",
                head ? std::string_view() : body);
}

}  // namespace

Result<std::unique_ptr<MetricsHttp>> MetricsHttp::Start(const Registry& registry, uint16_t port) {
  std::unique_ptr<MetricsHttp> http(new MetricsHttp(registry));
  http->listen_ = OwnedFd(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  http->wake_ = OwnedFd(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (!http->listen_.valid() || !http->wake_.valid()) {
    return ErrnoStatus(errno, "making the metrics port's descriptors");
  }
  const int on = 1;
  (void)setsockopt(http->listen_.get(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
  sockaddr_in address = {};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  address.sin_port = htons(port);
  socklen_t size = sizeof address;
  if (bind(http->listen_.get(), reinterpret_cast<sockaddr*>(&address), size) != 0 ||
      listen(http->listen_.get(), kBacklog) != 0 ||
      getsockname(http->listen_.get(), reinterpret_cast<sockaddr*>(&address), &size) != 0) {
    return ErrnoStatus(errno, StrCat("serving metrics on 127.0.0.1:", port));
  }
  http->port_ = ntohs(address.sin_port);
  MetricsHttp* const self = http.get();
  http->thread_ = std::jthread([self](std::stop_token stop) { self->Run(stop); });
  pthread_setname_np(http->thread_.native_handle(), "forebay-metrics");
  return http;
}

MetricsHttp::~MetricsHttp() {
  if (!thread_.joinable()) return;
  thread_.request_stop();
  const uint64_t one = 1;
  (void)!write(wake_.get(), &one, sizeof one);
}

void MetricsHttp::Run(std::stop_token stop) {
  while (!stop.stop_requested()) {
    std::array<pollfd, 2> fds = {pollfd{listen_.get(), POLLIN, 0}, pollfd{wake_.get(), POLLIN, 0}};
    if (poll(fds.data(), fds.size(), 10000) <= 0 || stop.stop_requested()) continue;
    const OwnedFd connection(
        accept4(listen_.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
    if (connection.valid()) {
      Serve(connection.get());
    } else if (errno != EAGAIN && errno != EINTR && errno != ECONNABORTED) {
      // Out of descriptors: the connection stays in the queue; look again later.
      pollfd wake = {wake_.get(), POLLIN, 0};
      (void)poll(&wake, 1, 100);
    }
  }
}

void MetricsHttp::Serve(int connection) {
  const Nanos deadline = SteadyClock().Now() + kForEach;
  std::string request;
  std::array<char, 2048> room;
  while (request.find("\r\n\r\n") == std::string::npos) {
    if (request.size() > kLongestRequest || !Await(connection, POLLIN, deadline)) return;
    const ssize_t n = recv(connection, room.data(), room.size(), MSG_DONTWAIT);
    if (n < 0 && (errno == EAGAIN || errno == EINTR)) continue;
    if (n <= 0) return;
    request.append(room.data(), static_cast<size_t>(n));
  }
  const std::string_view line = std::string_view(request).substr(0, request.find("\r\n"));
  const bool head = line.starts_with("HEAD ");
  const bool get = line.starts_with("GET ");
  std::string_view path = line.substr(std::min(line.size(), line.find(' ') + 1));
  path = path.substr(0, path.find_first_of(" ?"));
  std::string answer;
  if (!head && !get) {
    answer = Answer("405 Method Not Allowed", "text/plain", "only GET\n", false);
  } else if (path != "/metrics") {
    answer = Answer("404 Not Found", "text/plain", "there is /metrics\n", head);
  } else {
    answer = Answer("200 OK", "text/plain; version=0.0.4; charset=utf-8",
                    registry_.PrometheusText(), head);
  }
  size_t sent = 0;
  while (sent < answer.size()) {
    const ssize_t n =
        send(connection, answer.data() + sent, answer.size() - sent, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (n >= 0) {
      sent += static_cast<size_t>(n);
    } else if (errno != EINTR && (errno != EAGAIN || !Await(connection, POLLOUT, deadline))) {
      return;
    }
  }
  // Closing with unread bytes would reset the connection under the answer.
  shutdown(connection, SHUT_WR);
}

}  // namespace forebay
