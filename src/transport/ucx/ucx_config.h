// How UCX is set up: by its environment variables where they are given, else as Forebay needs it.
#pragma once

#include <ucp/api/ucp.h>

#include "base/status.h"
#include "transport/socket_address.h"

namespace forebay {

// To be given back with ucp_config_release.
Result<ucp_config_t*> UcxConfig(const SocketAddress& listen);
// Nothing is printed in a process that is somebody's training, unless UCX_LOG_LEVEL asks for it.
void QuietUcx();

}  // namespace forebay
