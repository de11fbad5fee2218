// Hosts by name, and this host's own address in the cluster. Name servers may be silent for longer
// than anyone wants to wait, so look-ups have threads of their own.
#pragma once

#include <sys/socket.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/clock.h"
#include "base/owned.h"
#include "base/status.h"
#include "peer/cluster.h"

namespace forebay::peer {

struct HostAddress {
  sockaddr_storage bytes{};
  socklen_t size = 0;
  int family() const { return bytes.ss_family; }
  const sockaddr* get() const { return reinterpret_cast<const sockaddr*>(&bytes); }
  bool loopback() const;
  std::string host() const;  // numeric
};

// One look-up. Numeric hosts are ready at once; others have a thread, which the destructor does not
// wait for.
class HostLookup {
 public:
  explicit HostLookup(const HostPort& at);
  // None: not yet.
  std::optional<Result<std::vector<HostAddress>>> Poll() const;
  Result<std::vector<HostAddress>> Wait(Nanos wait) const;

 private:
  struct State;
  std::shared_ptr<State> state_;  // the thread may outlive this
};

// A listening socket that does not block, on the named address where it is this host's; a name that
// leads to loopback, or to an address that is only forwarded here, means all of them. `node` is for
// the message.
Result<OwnedFd> ListenAt(const HostPort& at, const std::vector<HostAddress>& addresses,
                         uint32_t node);

// The numeric host that this node's transport should listen on, for options.listen: what the user
// said, or the address of the interface that leads to the others. Waits for a look-up at most.
Result<std::string> OwnHost(const ClusterSpec& cluster, Nanos wait = 2 * kSecond);

}  // namespace forebay::peer
