#include "peer/peers.h"

#include <cstdint>
#include <cstdlib>
#include <optional>
#include <string>
#include <string_view>
#include <utility>

#include "base/thread.h"
#include "peer/membership_hosts.h"
#include "peer/node.h"

namespace forebay::peer {
namespace {

// FOREBAY_PEER_FAULT=corrupt:N, for tests only: a bit of every Nth reply is flipped after its
// checksum was taken.
uint64_t CorruptEvery() {
  const char* fault = std::getenv("FOREBAY_PEER_FAULT");
  constexpr std::string_view kCorrupt = "corrupt:";
  if (fault == nullptr || !std::string_view(fault).starts_with(kCorrupt)) return 0;
  return std::strtoull(fault + kCorrupt.size(), nullptr, 10);
}

}  // namespace

Result<std::unique_ptr<Peers>> Peers::Attach(Engine& engine, const PeerOptions& options) {
  FOREBAY_RETURN_IF_ERROR(options.cluster.Validate());
  FOREBAY_RETURN_IF_ERROR(options.Validate());
  Result<std::string> secret = JobSecret(options.cluster);
  if (!secret) return secret.error();
  TransportOptions transport;
  const Result<std::string> own = OwnHost(options.cluster);
  if (!own) return own.error();
  const Result<HostPort> given = ParseHostPort(options.cluster.listen);
  transport.listen = HostPort{*own, given ? given->port : uint16_t{0}}.ToString();
  NodeParts parts;
  parts.secret = *secret;
  parts.corrupt_every = CorruptEvery();
  transport.tls_key = TlsKey(*secret);
  parts.transport = [transport, kind = options.transport,
                     trust = parts.trust](TransportHandler& handler) {
    return MakeTransport(kind, transport, handler, trust.get());
  };
  const Result<std::string> holder_file = HolderFile(options.cluster);
  parts.membership = [&](const Member& self) {
    return Join({.cluster = options.cluster,
                 .self = self,
                 .lease = options.lease,
                 .secret = *secret,
                 .host = *own,
                 .holder_file = holder_file ? *holder_file : ""});
  };
  const SignalsBlocked blocked;  // UCX, too, starts a thread
  return AttachWith(engine, options, std::move(parts));
}

}  // namespace forebay::peer
