// TLS as HTTPS has it: the server is known by its certificate, and perhaps the client by one, too.
#pragma once

#include <sys/types.h>

#include <memory>
#include <string>

#include "base/status.h"
#include "transport/tcp_stream.h"

namespace forebay::tcp {

struct TlsClientOptions {
  std::string ca_file;    // PEM, of the authorities that are believed; empty: the system's
  std::string cert_file;  // PEM, of this client, with what leads to its authority; empty: none
  std::string key_file;   // PEM, without a password; needs cert_file
  // What sets them, for messages.
  std::string ca_setting = "a CA file";
  std::string cert_setting = "a client certificate";
  std::string key_setting = "its key";
};

class TlsClientStream : public Stream {
 public:
  // Before Read and Write. 0: the server is who it should be; -EAGAIN: call again when the socket
  // has bytes, or, with pending(), has room; another errno, negative: error() says why.
  virtual ssize_t Handshake() = 0;
};

// Connections by TLS 1.2 or later. Safe for concurrent use by multiple threads.
class TlsClient {
 public:
  virtual ~TlsClient() = default;
  // `fd` is borrowed and does not block. `host`: the name or the address that the server's
  // certificate must have.
  virtual Result<std::unique_ptr<TlsClientStream>> Make(int fd, const std::string& host) = 0;
};

// Reads the files. kInvalidArgument, kNotFound or kPermissionDenied: one of them cannot be used;
// the message names it. A key that others can read is refused. kUnimplemented: this build has no
// TLS.
Result<std::unique_ptr<TlsClient>> MakeTlsClient(const TlsClientOptions& options);

}  // namespace forebay::tcp
