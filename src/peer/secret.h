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

// FIPS 180-4 and RFC 2104.
Digest Sha256(std::span<const std::byte> data);
Digest HmacSha256(std::span<const std::byte> key, std::span<const std::byte> data);
// Takes the same time wherever they differ.
bool SameDigest(const Digest& a, const Digest& b);
// From the kernel.
Digest RandomDigest();
// Lower case.
std::string Hex(std::span<const std::byte> bytes);

// Where the job's secret lies: FOREBAY_PEER_SECRET's file, or ~/.forebay/run/secret-HASH, HASH
// being of the job's name.
Result<std::string> SecretFile(const ClusterSpec& cluster);

// Beside it, one a job: several may have one FOREBAY_PEER_SECRET. See holder_file.h.
Result<std::string> HolderFile(const ClusterSpec& cluster);

// The secret of the cluster's job, 32 bytes: read from its file, which the first one makes (mode
// 0600, refused when others can read it or it is not ours), or from etcd. Waits for storage: two
// seconds at most for etcd, or for a file that its maker has not finished.
Result<std::string> JobSecret(const ClusterSpec& cluster);

// In etcd the secret lies under a lease of its own, which reading it renews, so that it vanishes
// some time after the job: this key below a job's prefix.
std::string EtcdPrefix(const ClusterSpec& cluster);

// Both sides send a nonce; each proves the secret by a MAC over both nonces, its role and both node
// numbers. Roles differ, so a proof cannot be sent back to whom it came from.
struct Challenge {
  Digest initiator{};  // nonce of who connected
  Digest acceptor{};
  uint32_t initiator_node = 0;
  uint32_t acceptor_node = 0;
};
Digest Proof(std::string_view secret, const Challenge& challenge, bool by_initiator);

// Of the job's TLS connections (RFC 8446's external pre-shared key): says nothing of the secret.
std::string TlsKey(std::string_view secret);

}  // namespace forebay::peer
