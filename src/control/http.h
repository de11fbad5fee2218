// As much of an HTTP/1.1 client as etcd's gateway needs: POST over a connection, plain or by TLS,
// that is kept. No call waits past the time it is given.
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>

#include "base/clock.h"
#include "base/owned.h"
#include "base/status.h"
#include "control/http_answer.h"
#include "transport/tls_client.h"

namespace forebay::control {

struct HttpEndpoint {
  std::string host;
  uint16_t port = 0;
  bool tls = false;

  // "host:port", "http://host:port", "https://[::1]:port".
  static Result<HttpEndpoint> Parse(std::string_view text);
  std::string ToString() const;
  // It names this machine by a loopback address, or is "localhost".
  bool loopback() const;
};

// Confined to one thread. Times are the steady clock's.
class HttpConnection {
 public:
  // `tls`: for https; its files are read anew each time, since certificates are renewed. A server
  // that is not who it should be, or that does not take us, is kUnavailable, and the message says
  // why.
  static Result<std::unique_ptr<HttpConnection>> Connect(const HttpEndpoint& endpoint,
                                                         const tcp::TlsClientOptions& tls,
                                                         Nanos until);

  // The value of the header "Authorization" from now on; empty: none.
  void SetAuthorization(std::string value) { authorization_ = std::move(value); }

  // Sends, and reads the answer's head: its status code. After an error the connection is of no
  // use, but see answered().
  Result<int> Post(std::string_view path, std::string_view body, Nanos until);
  // The next piece of the answer's body; none at its end. kDeadlineExceeded loses nothing: ask
  // again.
  Result<std::optional<std::string>> NextPiece(Nanos until);
  Result<std::string> WholeBody(Nanos until);

  bool tls() const { return tls_ != nullptr; }
  // Whether a byte of the answer to the last Post came. If none did, the server had perhaps closed
  // the idle connection before it saw the request.
  bool answered() const { return answered_; }
  // The answer was read to its end and the server keeps the connection.
  bool reusable() const { return answer_.reusable(); }

 private:
  HttpConnection(OwnedFd fd, std::string host) : fd_(std::move(fd)), host_(std::move(host)) {}

  Status StartTls(const std::string& host, const tcp::TlsClientOptions& options, Nanos until);
  // Bytes, or an errno, negative.
  ssize_t WriteSome(std::string_view bytes);
  ssize_t ReadSome(std::span<char> room);
  // What to tell of an errno: what TLS knows of it, if it does.
  Status Lost(int error, const char* what) const;
  Status Send(std::string_view bytes, Nanos until);
  // More bytes into answer_; false at the end of the stream.
  Result<bool> Receive(Nanos until);

  OwnedFd fd_;
  std::unique_ptr<tcp::TlsClient> tls_;           // null: plain
  std::unique_ptr<tcp::TlsClientStream> stream_;  // of fd_, by tls_
  const std::string host_;
  std::string authorization_;
  HttpAnswer answer_;
  bool answered_ = false;
  bool speaks_http_ = false;  // it has answered something
};

}  // namespace forebay::control
