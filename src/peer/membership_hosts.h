// Where a member listens, and this host's own address in the cluster.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "base/clock.h"
#include "base/host_lookup.h"
#include "base/host_port.h"
#include "base/owned.h"
#include "base/status.h"
#include "peer/cluster.h"

namespace forebay::peer {

// A listening socket that does not block, on the named address where it is this host's; a name that
// leads to loopback, or to an address that is only forwarded here, means all of them. `node` is for
// the message.
Result<OwnedFd> ListenAt(const HostPort& at, const std::vector<HostAddress>& addresses,
                         uint32_t node);

// The numeric host that this node's transport should listen on, for options.listen: what the user
// said, or the address of the interface that leads to the others. Waits for a look-up at most.
Result<std::string> OwnHost(const ClusterSpec& cluster, Nanos wait = 2 * kSecond);

}  // namespace forebay::peer
