#include "transport/socket_address.h"

#include <arpa/inet.h>
#include <netinet/in.h>

#include <cstring>

#include "base/host_port.h"

namespace forebay {

Result<SocketAddress> ParseSocketAddress(std::string_view text) {
  const auto wrong = [&] {
    return Status(Code::kInvalidArgument,
                  StrCat("\"", text, "\" is no address such as 10.0.0.1:7711 or [::1]:7711"));
  };
  const Result<HostPort> at = ParseHostPort(text, 0);
  if (!at) return wrong();
  SocketAddress address;
  if (text.starts_with('[')) {
    sockaddr_in6 six{};
    six.sin6_family = AF_INET6;
    six.sin6_port = htons(at->port);
    if (inet_pton(AF_INET6, at->host.c_str(), &six.sin6_addr) != 1) return wrong();
    std::memcpy(&address.storage, &six, sizeof six);
    address.length = sizeof six;
    return address;
  }
  sockaddr_in four{};
  four.sin_family = AF_INET;
  four.sin_port = htons(at->port);
  if (inet_pton(AF_INET, at->host.c_str(), &four.sin_addr) != 1) return wrong();
  std::memcpy(&address.storage, &four, sizeof four);
  address.length = sizeof four;
  return address;
}

std::string SocketAddress::ToString() const {
  char text[INET6_ADDRSTRLEN] = "";
  if (storage.ss_family == AF_INET6) {
    sockaddr_in6 six;
    std::memcpy(&six, &storage, sizeof six);
    inet_ntop(AF_INET6, &six.sin6_addr, text, sizeof text);
    return HostPort{text, ntohs(six.sin6_port)}.ToString();
  }
  sockaddr_in four;
  std::memcpy(&four, &storage, sizeof four);
  inet_ntop(AF_INET, &four.sin_addr, text, sizeof text);
  return HostPort{text, ntohs(four.sin_port)}.ToString();
}

}  // namespace forebay
