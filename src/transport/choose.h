// Which transport peers get: by name, or what suits the fabric.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>

#include "base/status.h"
#include "transport/transport.h"

namespace forebay {

// kAuto: UCX where a port of InfiniBand is up and UCX is there, else TCP.
enum class TransportKind : uint8_t { kAuto, kTcp, kTls, kUcx };

// "auto", "tcp", "tls", "ucx"; kInvalidArgument names them.
Result<TransportKind> ParseTransportKind(std::string_view text);

// Whether the folder, laid out as /sys/class/infiniband, has a port of InfiniBand that is up. RoCE
// is Ethernet: there UCX has to be asked for.
bool HasInfiniBand(const std::string& folder = "/sys/class/infiniband");

// Makes it. `trust` is set to whom that transport trusts beyond the job's members, in words for a
// log; empty: nobody.
Result<std::unique_ptr<Transport>> MakeTransport(TransportKind kind,
                                                 const TransportOptions& options,
                                                 TransportHandler& handler, std::string* trust);

}  // namespace forebay
