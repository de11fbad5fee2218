// How UCX is set up: by its environment variables where they are given, else as Forebay needs it.
#pragma once

#include <ucp/api/ucp.h>

#include "base/status.h"
#include "transport/socket_address.h"

namespace forebay {

// To be given back with ucp_config_release. `eager`: payloads up to this size come with their
// header, without a rendezvous.
Result<ucp_config_t*> UcxConfig(const SocketAddress& listen, size_t* eager);
// In a process that is somebody's training nothing is printed and nobody's code is rewritten,
// unless UCX_LOG_LEVEL or UCX_MEM_EVENTS ask for it. Before the first UcxConfig.
void QuietUcx(bool told);

}  // namespace forebay
