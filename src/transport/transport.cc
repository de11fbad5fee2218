#include "transport/transport.h"

#include "transport/socket_address.h"

namespace forebay {

Status TransportOptions::Validate() const {
  FOREBAY_RETURN_IF_ERROR(ParseSocketAddress(listen).status());
  if (connect_wait <= 0) {
    return Status(Code::kInvalidArgument, "connect_wait must be longer than nothing");
  }
  return Status();
}

}  // namespace forebay
