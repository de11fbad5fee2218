// A network in one process: transports that reach each other by name, with faults on demand.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "transport/transport.h"

namespace forebay {

// Safe for concurrent use by multiple threads. Must outlive its transports.
class LoopbackNetwork {
 public:
  LoopbackNetwork();
  ~LoopbackNetwork();
  // Its address is `name`. A name whose transport is gone may be used again.
  Result<std::unique_ptr<Transport>> Make(const std::string& name, TransportHandler& handler,
                                          Nanos connect_wait = 5 * kSecond);

  // Until it is healed, nothing gets from one to the other, not even the news that a connection was
  // closed (a partition). What was sent meanwhile arrives then, unless its connection was closed.
  void Cut(const std::string& a, const std::string& b);
  void Heal(const std::string& a, const std::string& b);
  // Payload bytes a second out of `name`; 0: no limit. A header is not held up by it.
  void SetRate(const std::string& name, uint64_t bytes_per_second);
  // One bit of every nth payload out of `name` is flipped; 0: none.
  void CorruptEvery(const std::string& name, uint64_t nth);

 private:
  struct State;
  friend class LoopbackTransport;
  const std::shared_ptr<State> state_;
};

}  // namespace forebay
