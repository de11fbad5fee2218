#include "base/host_port.h"

#include <charconv>

namespace forebay {

std::string HostPort::ToString() const {
  const bool six = host.find(':') != std::string::npos;
  return six ? StrCat("[", host, "]:", port) : StrCat(host, ":", port);
}

bool PlainHost(std::string_view host) {
  return !host.empty() && host.size() <= 255 &&
         host.find_first_of(" \t\r\n/,@[]") == std::string_view::npos;
}

Result<HostPort> ParseHostPort(std::string_view text, uint16_t lowest) {
  const auto wrong = [](std::string why) { return Status(Code::kInvalidArgument, std::move(why)); };
  const size_t colon = text.rfind(':');
  if (colon == std::string_view::npos) return wrong("the port is missing");
  std::string_view host = text.substr(0, colon);
  if (host.starts_with('[') && host.ends_with(']')) {
    host = host.substr(1, host.size() - 2);
  } else if (host.find(':') != std::string_view::npos) {
    return wrong("an address of IPv6 stands in brackets");
  }
  if (!PlainHost(host)) return wrong("there is no host in it");
  const std::string_view digits = text.substr(colon + 1);
  const char* const end = digits.data() + digits.size();
  uint16_t port = 0;
  const auto [stop, error] = std::from_chars(digits.data(), end, port);
  if (error != std::errc() || stop != end || port < lowest) {
    return wrong(StrCat("the port is no number from ", lowest, " to 65535"));
  }
  return HostPort{std::string(host), port};
}

}  // namespace forebay
