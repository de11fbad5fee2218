// What is between the frames and a socket where it is more than nothing: TLS.
#pragma once

#include <sys/types.h>
#include <sys/uio.h>

#include <memory>
#include <span>
#include <string>

#include "base/status.h"
#include "transport/tcp_frames.h"
#include "transport/transport.h"

namespace forebay::tcp {

// Of one socket, which it borrows and which does not block.
class Stream {
 public:
  virtual ~Stream() = default;
  // Bytes; 0: the other side has closed; -EAGAIN: not now; another errno, negative: it is lost,
  // and error() may say more.
  virtual ssize_t Read(std::span<const iovec> to) = 0;
  virtual ssize_t Write(std::span<const iovec> from) = 0;
  // It has bytes of its own to send: Write, of nothing even, when there is room.
  virtual bool pending() const = 0;
  virtual std::string error() const = 0;
};

// Makes the streams of a transport.
class StreamMaker {
 public:
  virtual ~StreamMaker() = default;
  virtual Result<std::unique_ptr<Stream>> Make(int fd, Role role) = 0;
  virtual std::string Describe() const = 0;
};

// TLS 1.3 with `key` for a pre-shared key. `kernel`: the kernel encrypts, where it can.
Result<std::unique_ptr<StreamMaker>> MakeTlsStreams(const std::string& key, bool kernel);
// Whether the kernel says that it can.
bool KernelHasTls();

Result<std::unique_ptr<Transport>> MakeStreamTransport(const TransportOptions& options,
                                                       TransportHandler& handler,
                                                       std::unique_ptr<StreamMaker> streams);

}  // namespace forebay::tcp
