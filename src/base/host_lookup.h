// Hosts by name. Name servers may be silent for longer than anyone wants to wait, so look-ups have
// threads of their own.
#pragma once

#include <sys/socket.h>

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/clock.h"
#include "base/host_port.h"
#include "base/status.h"

namespace forebay {

struct HostAddress {
  sockaddr_storage bytes{};
  socklen_t size = 0;
  int family() const { return bytes.ss_family; }
  const sockaddr* get() const { return reinterpret_cast<const sockaddr*>(&bytes); }
  bool loopback() const;
  std::string host() const;  // numeric
};

// One look-up. Numeric hosts are ready at once; others have a thread, one a name at most, which the
// destructor does not wait for.
class HostLookup {
 public:
  explicit HostLookup(const HostPort& at);
  // None: not yet.
  std::optional<Result<std::vector<HostAddress>>> Poll() const;
  // kDeadlineExceeded when there is no answer in time.
  Result<std::vector<HostAddress>> Wait(Nanos wait) const;

 private:
  struct State;
  class Running;
  std::string host_;
  std::shared_ptr<State> state_;  // the thread, or another look-up of the name, may outlive this
};

// An address, not a name.
bool IsNumericHost(const std::string& host);

}  // namespace forebay
