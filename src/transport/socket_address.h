// Addresses as people write them, "10.0.0.1:7711" or "[fe80::1]:7711", as sockets take them.
#pragma once

#include <sys/socket.h>

#include <string>
#include <string_view>

#include "base/status.h"

namespace forebay {

struct SocketAddress {
  sockaddr_storage storage{};
  socklen_t length = 0;
  const sockaddr* get() const { return reinterpret_cast<const sockaddr*>(&storage); }
  std::string ToString() const;
};

// Numbers only: no name is looked up.
Result<SocketAddress> ParseSocketAddress(std::string_view text);

}  // namespace forebay
