// Measures a link as peers use it, beside ucx_perftest's ucp_am_bw:
//
//   forebay-linkperf [KIND] serve ADDRESS                  answers one client, then ends
//   forebay-linkperf [KIND] push|pull|ping ADDRESS [SIZE [COUNT [WINDOW]]]
//   forebay-linkperf [KIND] here [SIZE [COUNT [WINDOW]]]   both ends in this process, one after
//   another
//
// KIND: tcp, which it is where nothing is said, tls (with a key that everybody knows), or ucx.
// push: payloads one way, WINDOW at once, as ucp_am_bw does. pull: each is asked for first. ping:
// one empty message at a time, there and back. One line of JSON for each.
#include <algorithm>
#include <charconv>
#include <cstdio>
#include <cstring>
#include <optional>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "transport/choose.h"
#include "transport/transport.h"

namespace forebay {
namespace {

struct Order {
  uint32_t kind = 0;  // of Kind
  uint32_t bytes = 0;
  uint64_t count = 0;
};
enum Kind : uint32_t { kPush, kPull, kPing, kAsk, kData, kDone };

struct Measure {
  std::string transport = "tcp";
  std::string mode = "push";
  size_t size = 112640;
  uint64_t count = 20000;
  uint64_t window = 32;
};

std::span<const std::byte> Bytes(const Order& order) { return std::as_bytes(std::span(&order, 1)); }

// Keeps the transport and its memory.
class Side : public TransportHandler {
 public:
  Status Open(const std::string& kind, const std::string& listen) {
    memory_.resize(kPlaces * kMostBytes);
    const TransportOptions options{
        .listen = listen, .connect_wait = 10 * kSecond, .tls_key = std::string(32, 'k')};
    std::string trust;
    Result<std::unique_ptr<Transport>> made =
        MakeTransport(*ParseTransportKind(kind), options, *this, &trust);
    if (!made) return made.error();
    transport_ = std::move(*made);
    return transport_->Register(memory_);
  }
  void Run() {
    while (!ended_) {
      while (transport_->Progress() && !ended_) {
      }
      if (!ended_) transport_->Wait({}, kSecond);
    }
  }
  Transport& transport() { return *transport_; }
  const Status& why() const { return why_; }

  void OnOpen(ConnectionId id, bool) override { transport_->SetProven(id); }
  void OnClosed(ConnectionId, const Status& why) override {
    why_ = why;
    ended_ = true;
  }
  void OnPayload(ConnectionId, uint64_t, const Status&) override {}
  void OnSent(ConnectionId, uint64_t, const Status&) override {}

 protected:
  static constexpr size_t kPlaces = 64;
  static constexpr size_t kMostBytes = 1 << 20;
  std::span<std::byte> Place(size_t bytes) {
    // Side by side, as they lie in the arena.
    const size_t stride = (bytes + 4095) / 4096 * 4096;
    return std::span(memory_).subspan(next_++ % kPlaces * stride, bytes);
  }
  std::span<std::byte> OnePlace(size_t bytes) { return std::span(memory_).first(bytes); }
  void Say(ConnectionId to, const Order& order, std::span<const std::byte> payload = {}) {
    const Status sent = transport_->Send(to, Bytes(order), payload, order.kind);
    if (!sent.ok()) OnClosed(to, sent);
  }
  static std::optional<Order> Read(std::span<const std::byte> header, uint64_t payload_bytes) {
    Order order;
    if (header.size() != sizeof order || payload_bytes > kMostBytes) return std::nullopt;
    std::memcpy(&order, header.data(), sizeof order);
    if (order.bytes > kMostBytes) return std::nullopt;
    return order;
  }

  std::unique_ptr<Transport> transport_;
  bool ended_ = false;
  Status why_;

 private:
  std::vector<std::byte> memory_;
  size_t next_ = 0;
};

class Server final : public Side {
 public:
  std::span<std::byte> OnMessage(ConnectionId from, std::span<const std::byte> header,
                                 uint64_t payload_bytes, uint64_t*) override {
    const std::optional<Order> order = Read(header, payload_bytes);
    if (!order) return {};
    if (order->kind == kPush) left_ = order->count;
    if (order->kind == kPing) Say(from, {kDone, 0, 0});
    if (order->kind == kAsk) Say(from, {kData, order->bytes, 0}, Place(order->bytes));
    if (order->kind == kData) return OnePlace(payload_bytes);
    return {};
  }
  void OnPayload(ConnectionId from, uint64_t, const Status& status) override {
    if (status.ok() && --left_ == 0) Say(from, {kDone, 0, 0});
  }

 private:
  uint64_t left_ = 0;
};

class Client final : public Side {
 public:
  explicit Client(Measure measure) : measure_(std::move(measure)) {}

  Result<double> Seconds(const std::string& address) {
    const Result<ConnectionId> id = transport_->Connect(address);
    if (!id) return id.error();
    Run();
    if (finish_ == 0) return why_;
    return static_cast<double>(finish_ - start_) / 1e9;
  }

  void OnOpen(ConnectionId to, bool) override {
    transport_->SetProven(to);
    // The first ones find everything cold.
    total_ = std::max<uint64_t>(measure_.count / 10, 1);
    Begin(to);
  }
  std::span<std::byte> OnMessage(ConnectionId from, std::span<const std::byte> header,
                                 uint64_t payload_bytes, uint64_t*) override {
    const std::optional<Order> order = Read(header, payload_bytes);
    if (!order) return {};
    if (order->kind == kData) return Place(payload_bytes);
    if (order->kind != kDone) return {};
    if (measure_.mode == "ping" && ++done_ < total_) {
      Next(from);
    } else {
      End(from);
    }
    return {};
  }
  void OnPayload(ConnectionId from, uint64_t, const Status&) override {
    if (++done_ == total_) {
      End(from);
    } else {
      Next(from);
    }
  }
  void OnSent(ConnectionId to, uint64_t kind, const Status& status) override {
    if (kind == kData && status.ok()) Next(to);
  }

 private:
  void Begin(ConnectionId to) {
    asked_ = 0;
    done_ = 0;
    start_ = SteadyClock().Now();
    if (measure_.mode == "push") Say(to, {kPush, 0, total_});
    const uint64_t first = measure_.mode == "ping" ? 1 : measure_.window;
    for (uint64_t i = 0; i < first; ++i) Next(to);
  }
  void Next(ConnectionId to) {
    if (asked_ == total_) return;
    ++asked_;
    const auto bytes = static_cast<uint32_t>(measure_.size);
    if (measure_.mode == "push") {
      Say(to, {kData, bytes, 0}, OnePlace(bytes));
    } else {
      Say(to, {measure_.mode == "ping" ? kPing : kAsk, bytes, 0});
    }
  }
  void End(ConnectionId to) {
    if (total_ != measure_.count) {
      total_ = measure_.count;
      Begin(to);
      return;
    }
    finish_ = SteadyClock().Now();
    ended_ = true;
  }

  const Measure measure_;
  uint64_t total_ = 0, asked_ = 0, done_ = 0;
  Nanos start_ = 0, finish_ = 0;
};

int Fail(const Status& status) {
  std::fprintf(stderr, "forebay-linkperf: %s\n", status.ToString().c_str());
  return 1;
}

int Ask(const Measure& measure, const std::string& address) {
  // From any address of this machine; for one of its own, the same interface.
  const std::string host = address.substr(0, address.rfind(':'));
  Client client(measure);
  Status open = client.Open(measure.transport, StrCat(host, ":0"));
  if (!open.ok()) open = client.Open(measure.transport, "0.0.0.0:0");
  if (!open.ok()) return Fail(open);
  const Result<double> seconds = client.Seconds(address);
  if (!seconds) return Fail(seconds.error());
  const double count = static_cast<double>(measure.count);
  std::printf(
      "{\"mode\": \"%s\", \"bytes\": %zu, \"count\": %llu, \"window\": %llu, \"seconds\": %.6f, "
      "\"bytes_per_s\": %.0f, \"us\": %.3f, \"transport\": \"%s\"}\n",
      measure.mode.c_str(), measure.mode == "ping" ? size_t{0} : measure.size,
      static_cast<unsigned long long>(measure.count),
      static_cast<unsigned long long>(measure.mode == "ping" ? 1 : measure.window), *seconds,
      measure.mode == "ping" ? 0.0 : count * static_cast<double>(measure.size) / *seconds,
      *seconds / count * 1e6, client.transport().Describe().c_str());
  std::fflush(stdout);
  return 0;
}

int Here(Measure measure) {
  for (const char* mode : {"push", "pull", "ping"}) {
    measure.mode = mode;
    Server server;
    const Status open = server.Open(measure.transport, "127.0.0.1:0");
    if (!open.ok()) return Fail(open);
    const std::string address = server.transport().address();
    std::thread thread([&] { server.Run(); });
    int failed = 0;
    failed = Ask(measure, address);  // its end closes the connection, which ends the server
    thread.join();
    if (failed != 0) return failed;
  }
  return 0;
}

template <typename N>
bool Number(std::string_view text, N* out, N most) {
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), *out);
  return error == std::errc() && end == text.data() + text.size() && *out > 0 && *out <= most;
}

int Main(std::vector<std::string> arguments) {
  Measure measure;
  if (!arguments.empty() &&
      (arguments.front() == "tcp" || arguments.front() == "tls" || arguments.front() == "ucx")) {
    measure.transport = arguments.front();
    arguments.erase(arguments.begin());
  }
  const std::string mode = arguments.empty() ? "" : arguments.front();
  const bool here = mode == "here";
  const size_t numbers = here ? 1 : 2;
  const auto given = [&](size_t i, auto* out, auto most) {
    return arguments.size() <= numbers + i || Number(arguments[numbers + i], out, most);
  };
  const bool known = mode == "serve" || mode == "push" || mode == "pull" || mode == "ping" || here;
  if (!known || arguments.size() < numbers || arguments.size() > numbers + 3 ||
      !given(0, &measure.size, size_t{1} << 20) || !given(1, &measure.count, uint64_t{1} << 40) ||
      !given(2, &measure.window, uint64_t{64})) {
    std::fprintf(stderr,
                 "usage: forebay-linkperf [tcp|tls|ucx] serve ADDRESS\n"
                 "       forebay-linkperf [tcp|tls|ucx] push|pull|ping ADDRESS [SIZE [COUNT "
                 "[WINDOW]]]\n"
                 "       forebay-linkperf [tcp|tls|ucx] here [SIZE [COUNT [WINDOW]]]\n");
    return 2;
  }
  if (here) return Here(measure);
  if (mode != "serve") {
    measure.mode = mode;
    return Ask(measure, arguments[1]);
  }
  Server server;
  const Status open = server.Open(measure.transport, arguments[1]);
  if (!open.ok()) return Fail(open);
  std::printf("%s\n", server.transport().address().c_str());
  std::fflush(stdout);
  server.Run();
  return 0;
}

}  // namespace
}  // namespace forebay

int main(int argc, char** argv) {
  return forebay::Main(std::vector<std::string>(argv + 1, argv + argc));
}
