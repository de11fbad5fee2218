// "host:port" as people write it.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "base/status.h"

namespace forebay {

struct HostPort {
  std::string host;  // without brackets
  uint16_t port = 0;
  std::string ToString() const;
};

// "host:port" or "[v6]:port", the port from `lowest` on. kInvalidArgument, with words that go
// behind the text: "the port is missing".
Result<HostPort> ParseHostPort(std::string_view text, uint16_t lowest = 1);

// Whether it may be a name or an address: nothing of a list, a URL or a line is in it.
bool PlainHost(std::string_view host);

}  // namespace forebay
