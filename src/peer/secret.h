// The job's secret, and the challenge by which two processes show each other that they have it.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include "base/status.h"
#include "peer/cluster.h"

namespace forebay::peer {

using Digest = std::array<std::byte, 32>;

Digest Sha256(std::span<const std::byte> data);
Digest HmacSha256(std::span<const std::byte> key, std::span<const std::byte> data);
// Takes the same time wherever they differ.
bool SameDigest(const Digest& a, const Digest& b);
// From the kernel.
Digest RandomDigest();

// The secret of the cluster's job, 32 bytes: read from its file, which the first one makes (mode
// 0600, refused when others can read it or it is not ours), or from etcd.
Result<std::string> JobSecret(const ClusterSpec& cluster);

// Both sides send a nonce; each proves the secret by a MAC over both nonces, its role and both node
// numbers. Roles differ, so a proof cannot be sent back to whom it came from.
struct Challenge {
  Digest initiator;  // nonce of who connected
  Digest acceptor;
  uint32_t initiator_node = 0;
  uint32_t acceptor_node = 0;
};
Digest Proof(std::string_view secret, const Challenge& challenge, bool by_initiator);

}  // namespace forebay::peer
