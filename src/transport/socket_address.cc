#include "transport/socket_address.h"

#include <arpa/inet.h>
#include <netinet/in.h>

#include <charconv>
#include <cstdint>
#include <cstring>

namespace forebay {

Result<SocketAddress> ParseSocketAddress(std::string_view text) {
  const auto wrong = [&] {
    return Status(Code::kInvalidArgument,
                  StrCat("\"", text, "\" is no address such as 10.0.0.1:7711 or [::1]:7711"));
  };
  const size_t colon = text.rfind(':');
  if (colon == std::string_view::npos) return wrong();
  std::string_view host = text.substr(0, colon);
  const std::string_view digits = text.substr(colon + 1);
  uint16_t port = 0;
  const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), port);
  if (error != std::errc() || end != digits.data() + digits.size()) return wrong();
  SocketAddress address;
  if (host.size() > 2 && host.front() == '[' && host.back() == ']') {
    host = host.substr(1, host.size() - 2);
    sockaddr_in6 six{};
    six.sin6_family = AF_INET6;
    six.sin6_port = htons(port);
    if (inet_pton(AF_INET6, std::string(host).c_str(), &six.sin6_addr) != 1) return wrong();
    std::memcpy(&address.storage, &six, sizeof six);
    address.length = sizeof six;
    return address;
  }
  sockaddr_in four{};
  four.sin_family = AF_INET;
  four.sin_port = htons(port);
  if (inet_pton(AF_INET, std::string(host).c_str(), &four.sin_addr) != 1) return wrong();
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
    return StrCat("[", text, "]:", ntohs(six.sin6_port));
  }
  sockaddr_in four;
  std::memcpy(&four, &storage, sizeof four);
  inet_ntop(AF_INET, &four.sin_addr, text, sizeof text);
  return StrCat(text, ":", ntohs(four.sin_port));
}

}  // namespace forebay
