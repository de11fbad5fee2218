// PeerOptions as the environment has them.
#pragma once

#include <string_view>

#include "base/status.h"
#include "peer/cluster.h"
#include "peer/peers.h"

namespace forebay::peer {

// The cluster by ClusterFromEnvironment; FOREBAY_PEER_COORDINATE (0: every node reads for itself);
// FOREBAY_PEER_TRANSPORT (auto, tcp, tls, ucx); in seconds FOREBAY_PEER_LEASE, FOREBAY_PEER_WAIT
// (for an answer) and FOREBAY_PEER_JOIN_WAIT. A variable that makes no sense is an error that names
// it. `suffix`: as for ClusterFromEnvironment.
Result<PeerOptions> PeerOptionsFromEnvironment(const GetEnv& get, std::string_view suffix = "");

}  // namespace forebay::peer
