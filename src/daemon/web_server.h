// WebServer: a few pages on the loopback interface, for a browser of this machine and Prometheus.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <stop_token>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "base/clock.h"
#include "base/owned.h"
#include "base/status.h"

namespace forebay {

struct WebPage {
  std::string path;  // "/metrics"
  std::string type;
  std::function<Result<std::string>()> body;  // called by the server's thread; an error is a 503
};

class WebServer;

// Deletes it in the process that made it; in a forked child its thread does not exist.
struct WebServerDelete {
  void operator()(WebServer* web) const;
};
using WebServerPtr = std::unique_ptr<WebServer, WebServerDelete>;

// GET and HEAD, one request a connection, few connections at once, seconds for each: who hangs
// keeps nobody waiting but other viewers, and those not for long.
class WebServer {
 public:
  // `port` 0: any free one. Nothing is answered before Serve.
  static Result<WebServerPtr> Listen(uint16_t port);
  Status Serve(std::vector<WebPage> pages);
  ~WebServer();

  uint16_t port() const { return port_; }
  std::string url() const { return StrCat("http://127.0.0.1:", port_, "/"); }

 private:
  struct Connection {
    OwnedFd socket;
    std::string in;
    std::string out;
    size_t sent = 0;
    bool answered = false;
    Nanos deadline = 0;
  };

  WebServer();
  friend struct WebServerDelete;
  void Run(std::stop_token stop);
  void Accept();
  // False when the connection is over.
  bool Advance(Connection& connection);
  std::string Answer(std::string_view head);

  // Constant after Serve.
  const uint64_t fork_generation_;
  OwnedFd listen_;
  OwnedFd wake_;
  uint16_t port_ = 0;
  std::vector<WebPage> pages_;
  // The thread's own.
  std::vector<Connection> connections_;
  Nanos accept_again_ = 0;  // not 0: out of descriptors until then
  std::jthread thread_;
};

}  // namespace forebay
