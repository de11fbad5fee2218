// MetricsHttp: GET /metrics on the loopback interface, for Prometheus.
#pragma once

#include <cstdint>
#include <memory>
#include <stop_token>
#include <thread>

#include "base/owned.h"
#include "base/status.h"
#include "metrics/registry.h"

namespace forebay {

// One connection at a time, one request a connection, a second for each: a scraper that hangs keeps
// nobody but other scrapers waiting.
class MetricsHttp {
 public:
  // `port` 0: any free one. `registry` must outlive it.
  static Result<std::unique_ptr<MetricsHttp>> Start(const Registry& registry, uint16_t port);
  ~MetricsHttp();

  uint16_t port() const { return port_; }

 private:
  explicit MetricsHttp(const Registry& registry) : registry_(registry) {}
  void Run(std::stop_token stop);
  void Serve(int connection);

  // Constant after Start.
  const Registry& registry_;
  OwnedFd listen_;
  OwnedFd wake_;
  uint16_t port_ = 0;
  std::jthread thread_;
};

}  // namespace forebay
