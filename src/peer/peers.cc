#include "peer/peers.h"

#include <arpa/inet.h>
#include <netdb.h>
#include <sys/socket.h>

#include <cstdlib>
#include <string_view>
#include <utility>

#include "base/owned.h"
#include "peer/node.h"

namespace forebay::peer {
namespace {

// "host:port" of somebody else of the cluster.
std::string SomebodyElse(const ClusterSpec& cluster) {
  switch (cluster.method) {
    case ClusterSpec::Method::kLauncher:
      return cluster.master;
    case ClusterSpec::Method::kStatic:
      return cluster.nodes_at[cluster.node == 0 ? 1 : 0];
    case ClusterSpec::Method::kEtcd: {
      std::string at = cluster.etcd;
      if (const size_t scheme = at.find("://"); scheme != std::string::npos) {
        at = at.substr(scheme + 3);
      }
      return at.substr(0, at.find('/'));
    }
    case ClusterSpec::Method::kNone:
      break;
  }
  return "";
}

// The address by which this machine reaches `other`; nothing is sent.
Result<std::string> AddressTowards(const std::string& other) {
  const size_t colon = other.rfind(':');
  std::string host = other.substr(0, colon);
  const std::string port = colon == std::string::npos ? "1" : other.substr(colon + 1);
  if (host.size() > 1 && host.front() == '[' && host.back() == ']') {
    host = host.substr(1, host.size() - 2);
  }
  addrinfo hints{};
  hints.ai_socktype = SOCK_DGRAM;
  addrinfo* found = nullptr;
  if (const int error = getaddrinfo(host.c_str(), port.c_str(), &hints, &found); error != 0) {
    return Status(Code::kUnavailable, StrCat(host, ": ", gai_strerror(error)));
  }
  std::string out;
  for (const addrinfo* at = found; at != nullptr && out.empty(); at = at->ai_next) {
    const OwnedFd fd(socket(at->ai_family, SOCK_DGRAM | SOCK_CLOEXEC, 0));
    sockaddr_storage own{};
    socklen_t size = sizeof own;
    char name[NI_MAXHOST];
    if (!fd.valid() || connect(fd.get(), at->ai_addr, at->ai_addrlen) != 0 ||
        getsockname(fd.get(), reinterpret_cast<sockaddr*>(&own), &size) != 0 ||
        getnameinfo(reinterpret_cast<sockaddr*>(&own), size, name, sizeof name, nullptr, 0,
                    NI_NUMERICHOST) != 0) {
      continue;
    }
    out = own.ss_family == AF_INET6 ? StrCat("[", name, "]") : std::string(name);
  }
  freeaddrinfo(found);
  if (out.empty()) return Status(Code::kUnavailable, StrCat("no way to reach ", other));
  return out;
}

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
  transport.listen = options.cluster.listen;
  if (transport.listen.empty()) {
    Result<std::string> own = AddressTowards(SomebodyElse(options.cluster));
    if (!own) return own.error();
    transport.listen = StrCat(*own, ":0");
  }
  NodeParts parts;
  parts.secret = *secret;
  parts.corrupt_every = CorruptEvery();
  parts.transport = [transport](TransportHandler& handler) {
    return MakeUcxTransport(transport, handler);
  };
  parts.membership = [&options, &secret](const Member& self) {
    return Join(
        {.cluster = options.cluster, .self = self, .lease = options.lease, .secret = *secret});
  };
  return AttachWith(engine, options, std::move(parts));
}

}  // namespace forebay::peer
