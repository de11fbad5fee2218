// As much of an HTTP/1.1 client as etcd's gateway needs: POST over a plain connection that is kept,
// answers of known length, in chunks, or as a stream without end. No call waits past the time it is
// given.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>

#include "base/clock.h"
#include "base/owned.h"
#include "base/status.h"

namespace forebay::control {

struct HttpEndpoint {
  std::string host;
  uint16_t port = 0;

  // "host:port", "http://host:port", "http://[::1]:port".
  static Result<HttpEndpoint> Parse(std::string_view text);
  std::string ToString() const;
};

// Confined to one thread. Times are the steady clock's.
class HttpConnection {
 public:
  static constexpr size_t kMaxHead = 64 << 10;
  static constexpr size_t kMaxBody = 256 << 20;

  static Result<std::unique_ptr<HttpConnection>> Connect(const HttpEndpoint& endpoint, Nanos until);

  // Sends, and reads the answer's head: its status code. After an error the connection is of no
  // use, but see answered().
  Result<int> Post(std::string_view path, std::string_view body, Nanos until);
  // The next piece of the answer's body; none at its end. kDeadlineExceeded loses nothing: ask
  // again.
  Result<std::optional<std::string>> NextPiece(Nanos until);
  Result<std::string> WholeBody(Nanos until);

  // Whether a byte of the answer to the last Post came. If none did, the server had perhaps closed
  // the idle connection before it saw the request.
  bool answered() const { return answered_; }
  // The answer was read to its end and the server keeps the connection.
  bool reusable() const { return ended_ && keep_; }

 private:
  HttpConnection(OwnedFd fd, std::string host) : fd_(std::move(fd)), host_(std::move(host)) {}

  Status Send(std::string_view bytes, Nanos until);
  // More bytes into in_; false at the end of the stream.
  Result<bool> Receive(Nanos until);
  Status ParseHead(std::string_view head, int* code);

  OwnedFd fd_;
  const std::string host_;
  std::string in_;  // received, not yet given out
  size_t at_ = 0;   // of in_ is given out
  bool answered_ = false;
  bool keep_ = true;
  bool ended_ = true;
  bool chunked_ = false;
  size_t left_ = 0;  // of the body, or of the chunk; SIZE_MAX: until the connection ends
  bool in_chunk_ = false;
};

}  // namespace forebay::control
