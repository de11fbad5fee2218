// Transport: moves messages and extents between the engines of a cluster.
//
// A message is a short header and, optionally, a payload. The receiver names the payload's place
// when the header has come, so bytes land where they are used (straight in the arena where the
// fabric can), and learns when the last of them is there: nobody reads a buffer before that.
//
// Three implementations pass one conformance suite: TCP of our own (tcp_transport.cc), UCX (its own
// library, loaded when it is needed) and loopback (in one process, for tests, with faults on
// demand).
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <span>
#include <string>

#include "base/clock.h"
#include "base/status.h"

namespace forebay {

// Names a connection of one transport; never used again for another.
using ConnectionId = uint64_t;

// Called from Transport::Progress only, on its thread. A handler may call Send, Connect and Close.
class TransportHandler {
 public:
  virtual ~TransportHandler() = default;
  // The connection can be used: one that Connect asked for, or one that somebody else made.
  virtual void OnOpen(ConnectionId connection, bool accepted) = 0;
  // Called once for each connection, last of all; after it nothing of it touches anyone's memory.
  // Sends and payloads under way have ended with an error before.
  virtual void OnClosed(ConnectionId connection, const Status& why) = 0;
  // A message has come; `header` is valid during the call. A payload of `payload_bytes` follows if
  // that is not 0: return where it goes, of exactly that size, and `*tag` for OnPayload; an empty
  // span drops it, without OnPayload.
  virtual std::span<std::byte> OnMessage(ConnectionId connection, std::span<const std::byte> header,
                                         uint64_t payload_bytes, uint64_t* tag) = 0;
  // Where the transport has the payload in memory of its own, the handler copies it: it may want to
  // do more in one pass. OnPayload follows. Not called where the fabric writes to the place.
  virtual void OnCopy(uint64_t tag, std::span<std::byte> place,
                      std::span<const std::byte> payload) {
    static_cast<void>(tag);
    std::memcpy(place.data(), payload.data(), payload.size());
  }
  // Ok: every byte of the payload is in its place. In any case the place is the handler's again.
  virtual void OnPayload(ConnectionId connection, uint64_t tag, const Status& status) = 0;
  // The payload of that Send may be overwritten; an error: it may not have arrived.
  virtual void OnSent(ConnectionId connection, uint64_t tag, const Status& status) = 0;
};

// Confined to one thread, except Wake.
class Transport {
 public:
  static constexpr size_t kMaxHeader = 4096;
  static constexpr uint64_t kMaxPayload = uint64_t{1} << 32;

  // Closes all connections; the handler is not called any more.
  virtual ~Transport() = default;

  // What others give to Connect: "10.0.0.1:7711".
  virtual std::string address() const = 0;
  // For logs and reports: "tcp", "ucx 1.13 (tcp)".
  virtual std::string Describe() const = 0;
  // Memory that payloads come from and go to is registered once, where the fabric profits; other
  // memory works too. It must outlive the transport.
  virtual Status Register(std::span<std::byte> memory) = 0;

  // Returns at once; OnOpen or OnClosed follows, at the latest after the options' connect_wait.
  virtual Result<ConnectionId> Connect(const std::string& address) = 0;
  // The other side has proven who it is. Before that a transport that strangers can reach takes
  // short messages without payload only, and closes the connection after connect_wait, or sooner
  // where there are many such.
  virtual void SetProven(ConnectionId connection) { static_cast<void>(connection); }
  // How many were closed so that somebody else had made and nobody had proven.
  virtual uint64_t strangers() const { return 0; }
  // OnClosed follows. What is under way is ended.
  virtual void Close(ConnectionId connection) = 0;
  // The header is copied; the payload must stay as it is until OnSent(tag), which comes exactly
  // once for each accepted Send. kNotFound: no such connection. Messages of a connection arrive in
  // their order; payloads may end in any.
  virtual Status Send(ConnectionId connection, std::span<const std::byte> header,
                      std::span<const std::byte> payload, uint64_t tag) = 0;

  // Does what there is to do and calls the handler; true: there may be more.
  virtual bool Progress() = 0;
  // Sleeps until there is something to do, `wake_fds` has become readable, Wake was called, or
  // `wait` has passed. Never spins.
  virtual void Wait(std::span<const int> wake_fds, Nanos wait) = 0;
  // Ends a Wait; from any thread.
  virtual void Wake() = 0;
};

struct TransportOptions {
  std::string listen;  // "10.0.0.1:0": address and port (0: any free one)
  Nanos connect_wait = 5 * kSecond;
  std::string tls_key = {};  // TLS: 32 bytes that only those who may connect know
  Status Validate() const;
};

// Needs nothing but Linux. `handler` must outlive the transport.
Result<std::unique_ptr<Transport>> MakeTcpTransport(const TransportOptions& options,
                                                    TransportHandler& handler);

// The same, encrypted: TLS 1.3 with options.tls_key for a pre-shared key. kUnavailable, with the
// remedy in words, where this build has no OpenSSL 3.
Result<std::unique_ptr<Transport>> MakeTlsTransport(const TransportOptions& options,
                                                    TransportHandler& handler);
// Whether it would find it: "OpenSSL 3.0.15".
Result<std::string> TlsVersion();

// kUnavailable, with the remedy in words, where the library libforebay_ucx.so or UCX itself is
// missing. `handler` must outlive the transport.
Result<std::unique_ptr<Transport>> MakeUcxTransport(const TransportOptions& options,
                                                    TransportHandler& handler);
// Whether MakeUcxTransport would find UCX: its version, "1.13.1".
Result<std::string> UcxVersion();

}  // namespace forebay
