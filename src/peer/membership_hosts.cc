#include "peer/membership_hosts.h"

#include <ifaddrs.h>
#include <net/if.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <array>
#include <cerrno>
#include <cstring>
#include <optional>

#include "base/owned.h"

namespace forebay::peer {
namespace {

using Found = Result<std::vector<HostAddress>>;

// The address that packets to `to` leave from. No packet is sent.
std::optional<HostAddress> RouteTo(const HostAddress& to) {
  const OwnedFd fd(::socket(to.family(), SOCK_DGRAM | SOCK_CLOEXEC, 0));
  if (!fd.valid() || ::connect(fd.get(), to.get(), to.size) != 0) return std::nullopt;
  HostAddress own;
  own.size = sizeof own.bytes;
  if (::getsockname(fd.get(), reinterpret_cast<sockaddr*>(&own.bytes), &own.size) != 0) {
    return std::nullopt;
  }
  return own;
}

bool IsOwn(HostAddress address) {
  if (address.family() == AF_INET) {
    reinterpret_cast<sockaddr_in*>(&address.bytes)->sin_port = 0;
  } else {
    reinterpret_cast<sockaddr_in6*>(&address.bytes)->sin6_port = 0;
  }
  const OwnedFd fd(::socket(address.family(), SOCK_DGRAM | SOCK_CLOEXEC, 0));
  return fd.valid() && ::bind(fd.get(), address.get(), address.size) == 0;
}

// An interface of this host that others may reach: IPv4 before IPv6, no link-local ones.
std::optional<HostAddress> AnyInterface() {
  ifaddrs* list = nullptr;
  if (::getifaddrs(&list) != 0) return std::nullopt;
  std::optional<HostAddress> best;
  for (const ifaddrs* one = list; one != nullptr; one = one->ifa_next) {
    if (one->ifa_addr == nullptr || (one->ifa_flags & IFF_UP) == 0 ||
        (one->ifa_flags & IFF_LOOPBACK) != 0) {
      continue;
    }
    HostAddress address;
    if (one->ifa_addr->sa_family == AF_INET) {
      address.size = sizeof(sockaddr_in);
    } else if (one->ifa_addr->sa_family == AF_INET6) {
      address.size = sizeof(sockaddr_in6);
    } else {
      continue;
    }
    std::memcpy(&address.bytes, one->ifa_addr, address.size);
    if (address.family() == AF_INET6) {
      const auto* six = reinterpret_cast<const sockaddr_in6*>(&address.bytes);
      if (IN6_IS_ADDR_LINKLOCAL(&six->sin6_addr)) continue;
    }
    if (!best || (best->family() == AF_INET6 && address.family() == AF_INET)) best = address;
  }
  ::freeifaddrs(list);
  return best;
}

OwnedFd TryListen(const HostAddress& address, int* error) {
  OwnedFd fd(::socket(address.family(), SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!fd.valid()) {
    *error = errno == EAFNOSUPPORT ? EADDRNOTAVAIL : errno;
    return fd;
  }
  const int on = 1;
  const int off = 0;
  ::setsockopt(fd.get(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
  if (address.family() == AF_INET6) {
    ::setsockopt(fd.get(), IPPROTO_IPV6, IPV6_V6ONLY, &off, sizeof off);
  }
  if (::bind(fd.get(), address.get(), address.size) == 0 && ::listen(fd.get(), 1024) == 0) {
    return fd;
  }
  *error = errno;
  return OwnedFd();
}

// All addresses of this host, over IPv6 (which has IPv4 in it) and over IPv4 alone.
std::array<HostAddress, 2> AllAddresses(uint16_t port) {
  std::array<HostAddress, 2> all;
  auto* six = reinterpret_cast<sockaddr_in6*>(&all[0].bytes);
  six->sin6_family = AF_INET6;
  six->sin6_port = htons(port);
  six->sin6_addr = in6addr_any;
  all[0].size = sizeof *six;
  auto* four = reinterpret_cast<sockaddr_in*>(&all[1].bytes);
  four->sin_family = AF_INET;
  four->sin_port = htons(port);
  all[1].size = sizeof *four;
  return all;
}

}  // namespace

Result<OwnedFd> ListenAt(const HostPort& at, const std::vector<HostAddress>& addresses,
                         uint32_t node) {
  const Status taken(Code::kUnavailable,
                     StrCat("port ", at.port, " of ", at.host,
                            " is taken, perhaps by another job; set FOREBAY_PEER_PORT to a free "
                            "one, the same on all nodes"));
  int error = EADDRNOTAVAIL;
  const bool here = at.host == "localhost" || at.host.starts_with("127.") || at.host == "::1";
  for (const HostAddress& address : addresses) {
    if (address.loopback() && !here) continue;
    if (OwnedFd fd = TryListen(address, &error); fd.valid()) return fd;
    if (error == EADDRINUSE) return taken;
  }
  if (error == EADDRNOTAVAIL && !here) {
    for (const HostAddress& address : AllAddresses(at.port)) {
      if (OwnedFd fd = TryListen(address, &error); fd.valid()) return fd;
      if (error == EADDRINUSE) return taken;
    }
  }
  return Status(Code::kUnavailable, StrCat("node ", node, " cannot listen on ", at.ToString(), ": ",
                                           std::strerror(error)));
}

Result<std::string> OwnHost(const ClusterSpec& cluster, Nanos wait) {
  if (!cluster.listen.empty()) {
    // With or without a port.
    const Result<HostPort> at = ParseHostPort(cluster.listen);
    const Found found = HostLookup(HostPort{at ? at->host : cluster.listen, 1}).Wait(wait);
    if (!found) return found.error();
    return found->front().host();
  }
  std::string text;
  switch (cluster.method) {
    case ClusterSpec::Method::kNone:
      return std::string("127.0.0.1");
    case ClusterSpec::Method::kLauncher:
      text = cluster.master;
      break;
    case ClusterSpec::Method::kStatic:
      text = cluster.nodes_at[cluster.node];
      break;
    case ClusterSpec::Method::kEtcd:
      text = cluster.etcd.substr(0, cluster.etcd.find(','));
      break;
  }
  const Result<HostPort> at = ParseHostPort(text);
  if (!at) return Status(Code::kInvalidArgument, StrCat("'", text, "' is not host:port"));
  const Found found = HostLookup(*at).Wait(wait);
  if (!found) return found.error();
  for (const HostAddress& address : *found) {
    std::optional<HostAddress> own = RouteTo(address);
    if (IsOwn(address)) own = address;
    if (!own) continue;
    // Everything is on this host when the address itself is a loopback one. A host's own name that
    // leads to loopback (127.0.1.1) says nothing of where others see it.
    const bool all_here = address.loopback() &&
                          (IsNumericHost(at->host) || at->host == "localhost") &&
                          cluster.method != ClusterSpec::Method::kEtcd;
    if (!own->loopback() || all_here) return own->host();
  }
  if (const std::optional<HostAddress> own = AnyInterface()) return own->host();
  if (!found->empty() && found->front().loopback()) return found->front().host();
  return Status(Code::kUnavailable,
                StrCat("no way to ", at->host, "; set FOREBAY_PEER_LISTEN to this host's address"));
}

}  // namespace forebay::peer
