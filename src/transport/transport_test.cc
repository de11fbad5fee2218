// One suite for every transport; what only loopback can do follows at the end.
#include "transport/transport.h"

#include <dlfcn.h>
#include <fcntl.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <spawn.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <filesystem>
#include <functional>
#include <map>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "base/owned.h"
#include "transport/loopback.h"
#include "transport/socket_address.h"
#include "transport/tcp_stream.h"

namespace {

std::atomic<ssize_t> longest_sent = 0;  // by one sendmsg of this process

}  // namespace

// In the place of libc's, for UCX as well: what is written at once.
extern "C" __attribute__((visibility("default"))) ssize_t sendmsg(int fd, const msghdr* message,
                                                                  int flags) {
  const ssize_t sent = ::syscall(SYS_sendmsg, fd, message, flags);
  ssize_t longest = longest_sent;
  while (sent > longest && !longest_sent.compare_exchange_weak(longest, sent)) {
  }
  return sent;
}

namespace forebay {
namespace {

constexpr size_t kSample = 110 << 10;

std::vector<std::byte> Bytes(size_t size, uint64_t seed) {
  std::vector<std::byte> bytes(size);
  uint64_t x = seed * 0x9E3779B97F4A7C15 + 1;
  for (std::byte& b : bytes) {
    x = x * 6364136223846793005 + 1442695040888963407;
    b = static_cast<std::byte>(x >> 56);
  }
  return bytes;
}

std::vector<std::byte> Text(const std::string& text) {
  const auto* data = reinterpret_cast<const std::byte*>(text.data());
  return {data, data + text.size()};
}

std::string ToText(std::span<const std::byte> bytes) {
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

// Writes down what it is told, and checks the order that the interface promises.
class Recorder : public TransportHandler {
 public:
  void OnOpen(ConnectionId connection, bool accepted) override {
    EXPECT_FALSE(closed.contains(connection));
    EXPECT_TRUE(opened.emplace(connection, accepted).second) << "opened twice";
    if (transport != nullptr) transport->SetProven(connection);
    if (accepted) {
      peer = connection;
    }
    if (on_open) on_open(connection);
  }
  void OnClosed(ConnectionId connection, const Status& why) override {
    EXPECT_FALSE(why.ok());
    EXPECT_TRUE(closed.emplace(connection, why).second) << "closed twice";
    for (const auto& [tag, to] : awaited) EXPECT_NE(to, connection) << "a place is still in use";
    for (const auto& [tag, to] : sending) EXPECT_NE(to, connection) << "a send has not ended";
    if (on_closed) on_closed(connection);
  }
  std::span<std::byte> OnMessage(ConnectionId connection, std::span<const std::byte> header,
                                 uint64_t payload_bytes, uint64_t* tag) override {
    EXPECT_TRUE(opened.contains(connection));
    EXPECT_FALSE(closed.contains(connection));
    messages.push_back(ToText(header));
    if (on_message) on_message(connection, header);
    if (payload_bytes == 0 || drop) return {};
    *tag = next_tag++;
    awaited[*tag] = connection;
    if (!arena.empty()) {
      const size_t at = std::exchange(arena_used, arena_used + payload_bytes);
      places[*tag] = arena.subspan(at, payload_bytes);
      return places[*tag];
    }
    own[*tag].resize(payload_bytes);
    places[*tag] = own[*tag];
    return places[*tag];
  }
  void OnPayload(ConnectionId connection, uint64_t tag, const Status& status) override {
    EXPECT_EQ(awaited.count(tag), 1u) << "a payload ends once";
    EXPECT_EQ(awaited[tag], connection);
    awaited.erase(tag);
    (status.ok() ? payloads : lost).push_back(tag);
    if (on_payload) on_payload(connection, tag);
  }
  void OnSent(ConnectionId connection, uint64_t tag, const Status& status) override {
    EXPECT_EQ(sending.count(tag), 1u) << "a send ends once";
    EXPECT_EQ(sending[tag], connection);
    sending.erase(tag);
    (status.ok() ? sent : unsent).push_back(tag);
    if (on_sent) on_sent(connection, tag);
  }

  Transport* transport = nullptr;  // takes everybody for proven; null: nobody
  std::map<ConnectionId, bool> opened;
  std::map<ConnectionId, Status> closed;
  std::vector<std::string> messages;
  std::map<uint64_t, ConnectionId> awaited, sending;  // by tag
  std::map<uint64_t, std::vector<std::byte>> own;
  std::map<uint64_t, std::span<std::byte>> places;
  std::vector<uint64_t> payloads, lost, sent, unsent;  // tags
  std::span<std::byte> arena;
  size_t arena_used = 0;
  uint64_t next_tag = 1000;
  ConnectionId peer = 0;  // the last one that was accepted
  bool drop = false;
  std::function<void(ConnectionId)> on_open, on_closed;
  std::function<void(ConnectionId, std::span<const std::byte>)> on_message;
  std::function<void(ConnectionId, uint64_t)> on_payload, on_sent;
};

// One of the transports under test.
class Fabric {
 public:
  virtual ~Fabric() = default;
  virtual Result<std::unique_ptr<Transport>> Make(const std::string& name,
                                                  TransportHandler& handler,
                                                  Nanos connect_wait) = 0;
  virtual std::string Nowhere() const = 0;  // an address that nobody has
};

class LoopbackFabric final : public Fabric {
 public:
  Result<std::unique_ptr<Transport>> Make(const std::string& name, TransportHandler& handler,
                                          Nanos connect_wait) override {
    return network_.Make(name, handler, connect_wait);
  }
  std::string Nowhere() const override { return "nobody"; }

 private:
  LoopbackNetwork network_;
};

class UcxFabric final : public Fabric {
 public:
  Result<std::unique_ptr<Transport>> Make(const std::string&, TransportHandler& handler,
                                          Nanos connect_wait) override {
    return MakeUcxTransport({.listen = "127.0.0.1:0", .connect_wait = connect_wait}, handler);
  }
  std::string Nowhere() const override { return "127.0.0.1:9"; }
};

class TcpFabric final : public Fabric {
 public:
  // `kind`: tcp; tls; tls_socket, as where the kernel encrypts.
  explicit TcpFabric(std::string kind) : kind_(std::move(kind)) {}
  Result<std::unique_ptr<Transport>> Make(const std::string&, TransportHandler& handler,
                                          Nanos connect_wait) override {
    const TransportOptions options{.listen = "127.0.0.1:0", .connect_wait = connect_wait};
    if (kind_ == "tcp") return MakeTcpTransport(options, handler);
    Result<std::unique_ptr<tcp::StreamMaker>> streams =
        tcp::MakeTlsStreams(std::string(32, 'k'), kind_ == "tls_socket");
    if (!streams) return streams.error();
    return tcp::MakeStreamTransport(options, handler, *std::move(streams));
  }
  std::string Nowhere() const override { return "127.0.0.1:9"; }

 private:
  const std::string kind_;
};

// A transport with its recorder; names are those of the loopback network.
struct EndPoint {
  Recorder recorder;
  std::unique_ptr<Transport> transport;

  Status Send(ConnectionId to, std::span<const std::byte> header,
              std::span<const std::byte> payload, uint64_t tag) {
    const Status status = transport->Send(to, header, payload, tag);
    if (status.ok()) recorder.sending[tag] = to;
    return status;
  }
};

bool Within(Nanos wait, const std::function<bool()>& done) {
  const Nanos until = SteadyClock().Now() + wait;
  while (!done()) {
    if (SteadyClock().Now() > until) return false;
  }
  return true;
}

class TransportTest : public testing::TestWithParam<const char*> {
 protected:
  void SetUp() override {
    if (std::string(GetParam()) == "ucx") {
      const Result<std::string> version = UcxVersion();
      if (!version) GTEST_SKIP() << version.error().message();
      fabric_ = std::make_unique<UcxFabric>();
    } else if (std::string(GetParam()) != "loopback") {
      const Result<std::string> version = TlsVersion();
      if (!version && std::string(GetParam()) != "tcp") GTEST_SKIP() << version.error().message();
      fabric_ = std::make_unique<TcpFabric>(GetParam());
    } else {
      fabric_ = std::make_unique<LoopbackFabric>();
    }
  }

  std::unique_ptr<EndPoint> Make(const std::string& name, Nanos connect_wait = 5 * kSecond) {
    auto end = std::make_unique<EndPoint>();
    Result<std::unique_ptr<Transport>> made = fabric_->Make(name, end->recorder, connect_wait);
    EXPECT_TRUE(made.has_value()) << made.status().ToString();
    if (made) end->transport = std::move(*made);
    end->recorder.transport = end->transport.get();
    return end;
  }

  // Runs them until it holds; false: ten seconds have passed.
  static bool Run(std::vector<EndPoint*> ends, const std::function<bool()>& done) {
    const Nanos until = SteadyClock().Now() + 10 * kSecond;
    while (!done()) {
      bool more = false;
      for (EndPoint* end : ends) more |= end->transport->Progress();
      if (done()) return true;
      if (SteadyClock().Now() > until) return false;
      if (!more) ends.front()->transport->Wait({}, ends.size() > 1 ? kMilli / 5 : 20 * kMilli);
    }
    return true;
  }

  ConnectionId Join(EndPoint& a, EndPoint& b) {
    const size_t before = b.recorder.opened.size();
    const Result<ConnectionId> id = a.transport->Connect(b.transport->address());
    EXPECT_TRUE(id.has_value());
    if (!id) return 0;
    EXPECT_TRUE(Run({&a, &b}, [&] {
      return a.recorder.opened.contains(*id) && b.recorder.opened.size() > before;
    }));
    return *id;
  }

  std::unique_ptr<Fabric> fabric_;
};

INSTANTIATE_TEST_SUITE_P(, TransportTest,
                         testing::Values("loopback", "tcp", "tls", "tls_socket", "ucx"),
                         [](const auto& one) { return std::string(one.param); });

TEST_P(TransportTest, OpensOnBothSides) {
  const auto a = Make("a"), b = Make("b");
  const ConnectionId id = Join(*a, *b);
  EXPECT_FALSE(a->recorder.opened.at(id));
  EXPECT_TRUE(b->recorder.opened.at(b->recorder.peer));
  EXPECT_TRUE(a->recorder.closed.empty());
  EXPECT_FALSE(a->transport->Describe().empty());
}

TEST_P(TransportTest, MessagesKeepTheirOrderBothWays) {
  const auto a = Make("a"), b = Make("b");
  const ConnectionId id = Join(*a, *b);
  constexpr int kCount = 500;
  std::vector<std::string> expected;
  for (int i = 0; i < kCount; ++i) {
    expected.push_back(StrCat("message ", i));
    EXPECT_TRUE(a->Send(id, Text(expected.back()), {}, i).ok());
    EXPECT_TRUE(b->Send(b->recorder.peer, Text(expected.back()), {}, i).ok());
  }
  EXPECT_TRUE(Run({a.get(), b.get()}, [&] {
    return a->recorder.messages.size() == kCount && b->recorder.messages.size() == kCount &&
           a->recorder.sent.size() == kCount && b->recorder.sent.size() == kCount;
  }));
  EXPECT_EQ(a->recorder.messages, expected);
  EXPECT_EQ(b->recorder.messages, expected);
}

TEST_P(TransportTest, PayloadsOfAllSizesLandInTheirPlace) {
  const auto a = Make("a"), b = Make("b");
  const ConnectionId id = Join(*a, *b);
  uint64_t tag = 1;
  for (const size_t size : {size_t{1}, size_t{7}, size_t{1000}, size_t{4096}, size_t{8192},
                            size_t{16000}, size_t{65536}, kSample, size_t{3} << 20}) {
    for (const size_t header_size : {size_t{0}, size_t{40}, Transport::kMaxHeader}) {
      const std::vector<std::byte> header = Bytes(header_size, tag);
      std::vector<std::byte> payload = Bytes(size, tag);
      const std::vector<std::byte> expected = payload;
      ASSERT_TRUE(a->Send(id, header, payload, tag).ok());
      // Once it is sent, the sender may use its memory for something else.
      ASSERT_TRUE(Run({a.get(), b.get()}, [&] { return a->recorder.sent.size() == tag; }));
      std::fill(payload.begin(), payload.end(), std::byte{0xEE});
      ASSERT_TRUE(Run({a.get(), b.get()}, [&] { return b->recorder.payloads.size() == tag; }));
      EXPECT_EQ(b->recorder.messages.back(), ToText(header));
      EXPECT_EQ(b->recorder.own.at(b->recorder.payloads.back()), expected)
          << size << " bytes behind a header of " << header_size;
      ++tag;
    }
  }
}

TEST_P(TransportTest, ManyUnderWayAtOnceInRegisteredMemory) {
  constexpr size_t kCount = 96;
  std::vector<std::byte> from(kCount * kSample), to(kCount * kSample);
  for (size_t i = 0; i < kCount; ++i) {
    const std::vector<std::byte> bytes = Bytes(kSample, i);
    std::copy(bytes.begin(), bytes.end(), from.begin() + i * kSample);
  }
  const auto a = Make("a"), b = Make("b"), c = Make("c");
  EXPECT_TRUE(a->transport->Register(from).ok());
  EXPECT_TRUE(c->transport->Register(to).ok());
  const ConnectionId ac = Join(*a, *c), bc = Join(*b, *c);
  c->recorder.arena = to;
  std::vector<uint64_t> which;  // sample of each message
  c->recorder.on_message = [&](ConnectionId, std::span<const std::byte> header) {
    uint64_t i = 0;
    ASSERT_EQ(header.size(), sizeof i);
    std::memcpy(&i, header.data(), sizeof i);
    which.push_back(i);
  };
  for (uint64_t i = 0; i < kCount; ++i) {
    EndPoint& sender = i % 2 == 0 ? *a : *b;
    const ConnectionId id = i % 2 == 0 ? ac : bc;
    const auto header = std::as_bytes(std::span(&i, 1));
    const auto payload = std::span<const std::byte>(from).subspan(i * kSample, kSample);
    ASSERT_TRUE(sender.Send(id, header, payload, i).ok());
  }
  ASSERT_TRUE(Run({a.get(), b.get(), c.get()}, [&] {
    return c->recorder.payloads.size() == kCount && a->recorder.sending.empty() &&
           b->recorder.sending.empty();
  }));
  for (size_t i = 0; i < kCount; ++i) {
    EXPECT_EQ(std::memcmp(to.data() + i * kSample, from.data() + which[i] * kSample, kSample), 0)
        << "the " << i << "th that came";
  }
}

TEST_P(TransportTest, AnUnwantedPayloadIsDropped) {
  const auto a = Make("a"), b = Make("b");
  const ConnectionId id = Join(*a, *b);
  b->recorder.drop = true;
  uint64_t tag = 0;
  for (const size_t size : {size_t{100}, kSample, size_t{2} << 20}) {
    const std::vector<std::byte> payload = Bytes(size, tag);
    ASSERT_TRUE(a->Send(id, Text("unwanted"), payload, tag++).ok());
    ASSERT_TRUE(Run({a.get(), b.get()}, [&] {
      return a->recorder.sent.size() == tag && b->recorder.messages.size() == tag;
    }));
  }
  b->recorder.drop = false;
  const std::vector<std::byte> wanted = Bytes(kSample, 9);
  ASSERT_TRUE(a->Send(id, Text("wanted"), wanted, tag).ok());
  ASSERT_TRUE(Run({a.get(), b.get()}, [&] { return b->recorder.payloads.size() == 1; }));
  EXPECT_EQ(b->recorder.own.begin()->second, wanted);
}

TEST_P(TransportTest, AHandlerMaySendAndClose) {
  const auto a = Make("a"), b = Make("b");
  const std::vector<std::byte> sample = Bytes(kSample, 3);
  b->recorder.on_message = [&](ConnectionId from, std::span<const std::byte> header) {
    EXPECT_TRUE(b->Send(from, header, sample, 1).ok());
  };
  a->recorder.on_open = [&](ConnectionId id) { EXPECT_TRUE(a->Send(id, Text("get"), {}, 2).ok()); };
  a->recorder.on_payload = [&](ConnectionId id, uint64_t) { a->transport->Close(id); };
  const Result<ConnectionId> id = a->transport->Connect(b->transport->address());
  ASSERT_TRUE(id.has_value());
  ASSERT_TRUE(Run({a.get(), b.get()},
                  [&] { return a->recorder.closed.contains(*id) && !b->recorder.closed.empty(); }));
  EXPECT_EQ(a->recorder.payloads.size(), 1u);
  EXPECT_EQ(a->recorder.own.begin()->second, sample);
}

TEST_P(TransportTest, NobodyThereIsToldInTime) {
  const auto a = Make("a", kSecond);
  const Result<ConnectionId> id = a->transport->Connect(fabric_->Nowhere());
  if (!id) {
    EXPECT_EQ(id.error().code(), Code::kUnavailable);
    return;
  }
  EXPECT_TRUE(Run({a.get()}, [&] { return a->recorder.closed.contains(*id); }));
  EXPECT_TRUE(a->recorder.opened.empty());
}

TEST_P(TransportTest, OneWhoDoesNotAnswerIsGivenUp) {
  const auto a = Make("a", kSecond / 5), b = Make("b");
  // Nobody runs b.
  const Result<ConnectionId> id = a->transport->Connect(b->transport->address());
  ASSERT_TRUE(id.has_value());
  if (!Run({a.get()},
           [&] { return a->recorder.closed.contains(*id) || a->recorder.opened.contains(*id); })) {
    FAIL() << "neither open nor closed";
  }
}

TEST_P(TransportTest, CloseEndsWhatIsUnderWay) {
  const auto a = Make("a"), b = Make("b");
  const ConnectionId id = Join(*a, *b);
  const std::vector<std::byte> payload = Bytes(8 << 20, 1);
  for (uint64_t i = 0; i < 8; ++i) ASSERT_TRUE(a->Send(id, Text("data"), payload, i).ok());
  // Some have begun to arrive.
  ASSERT_TRUE(Run({a.get(), b.get()}, [&] { return !b->recorder.messages.empty(); }));
  a->transport->Close(id);
  EXPECT_EQ(a->transport->Send(id, Text("late"), {}, 99).code(), Code::kNotFound);
  a->transport->Close(id);  // a second time is nothing
  ASSERT_TRUE(Run({a.get(), b.get()}, [&] {
    return a->recorder.closed.contains(id) && b->recorder.closed.contains(b->recorder.peer);
  }));
  EXPECT_EQ(a->recorder.sent.size() + a->recorder.unsent.size(), 8u);
  EXPECT_TRUE(b->recorder.awaited.empty());
}

TEST_P(TransportTest, TheReceiverMayCloseWhileBytesAreComing) {
  const auto a = Make("a"), b = Make("b");
  const ConnectionId id = Join(*a, *b);
  const std::vector<std::byte> payload = Bytes(8 << 20, 1);
  b->recorder.on_message = [&](ConnectionId from, std::span<const std::byte>) {
    b->transport->Close(from);
  };
  for (uint64_t i = 0; i < 8; ++i) ASSERT_TRUE(a->Send(id, Text("data"), payload, i).ok());
  ASSERT_TRUE(Run({a.get(), b.get()}, [&] {
    return a->recorder.closed.contains(id) && b->recorder.closed.contains(b->recorder.peer);
  }));
  EXPECT_EQ(b->recorder.messages.size(), 1u) << "nothing arrives after Close";
  EXPECT_EQ(a->recorder.sent.size() + a->recorder.unsent.size(), 8u);
  // Nothing is written any more.
  const std::vector<std::byte> after = b->recorder.own.begin()->second;
  Run({a.get(), b.get()},
      [until = SteadyClock().Now() + 20 * kMilli] { return SteadyClock().Now() > until; });
  EXPECT_EQ(after, b->recorder.own.begin()->second);
}

TEST_P(TransportTest, APeerThatVanishesEndsItsConnections) {
  const auto a = Make("a");
  auto b = Make("b");
  const ConnectionId id = Join(*a, *b);
  const std::vector<std::byte> payload = Bytes(4 << 20, 1);
  for (uint64_t i = 0; i < 4; ++i) ASSERT_TRUE(a->Send(id, Text("data"), payload, i).ok());
  a->transport->Progress();
  b->transport.reset();
  ASSERT_TRUE(Run({a.get()}, [&] { return a->recorder.closed.contains(id); }));
  EXPECT_TRUE(a->recorder.sending.empty());
  EXPECT_EQ(a->transport->Send(id, Text("late"), {}, 99).code(), Code::kNotFound);
}

TEST_P(TransportTest, ATransportEndsWithEverythingUnderWay) {
  const auto a = Make("a");
  auto b = Make("b");
  const ConnectionId id = Join(*a, *b);
  {
    const std::vector<std::byte> payload = Bytes(4 << 20, 1);
    for (uint64_t i = 0; i < 4; ++i) {
      ASSERT_TRUE(b->Send(b->recorder.peer, Text("data"), payload, i).ok());
      ASSERT_TRUE(a->Send(id, Text("data"), payload, i).ok());
    }
    Run({a.get(), b.get()}, [&] { return !a->recorder.messages.empty(); });
    b->transport.reset();
    a->transport.reset();
  }
  // Both are gone with places and payloads of theirs; the sanitizer sees who still touches them.
}

TEST_P(TransportTest, NumbersOfConnectionsAreNotUsedAgain) {
  const auto a = Make("a"), b = Make("b");
  std::set<ConnectionId> ids;
  for (int i = 0; i < 4; ++i) {
    const ConnectionId id = Join(*a, *b);
    EXPECT_TRUE(ids.insert(id).second);
    a->transport->Close(id);
    ASSERT_TRUE(Run({a.get(), b.get()}, [&] {
      return a->recorder.closed.contains(id) && b->recorder.closed.contains(b->recorder.peer);
    }));
  }
  EXPECT_EQ(b->recorder.opened.size(), 4u);
}

TEST_P(TransportTest, RefusesWhatIsTooLarge) {
  const auto a = Make("a"), b = Make("b");
  const ConnectionId id = Join(*a, *b);
  const std::vector<std::byte> header(Transport::kMaxHeader + 1);
  EXPECT_EQ(a->transport->Send(id, header, {}, 1).code(), Code::kInvalidArgument);
  EXPECT_EQ(a->transport->Send(id + 77, {}, {}, 1).code(), Code::kNotFound);
}

TEST_P(TransportTest, WaitEndsByWakeByDescriptorAndByTime) {
  const auto a = Make("a"), b = Make("b");
  Join(*a, *b);
  const auto settle = [&] {
    while (a->transport->Progress()) {
    }
  };
  settle();
  // A waker that lasts: a Wait may return early once, never go on sleeping.
  std::atomic<bool> woken = false;
  std::thread other([&] {
    ::usleep(20'000);
    woken = true;
    a->transport->Wake();
  });
  while (!woken) a->transport->Wait({}, 10 * kSecond);
  other.join();

  const OwnedFd event(::eventfd(1, EFD_CLOEXEC));
  const int fd = event.get();
  settle();
  const Nanos start = SteadyClock().Now();
  a->transport->Wait(std::span(&fd, 1), 10 * kSecond);
  EXPECT_LT(SteadyClock().Now() - start, 9 * kSecond);

  // With nothing to do it sleeps: it returns a few times at most.
  const Nanos began = SteadyClock().Now();
  int returns = 0;
  while (SteadyClock().Now() - began < 200 * kMilli) {
    settle();
    a->transport->Wait({}, 200 * kMilli);
    ++returns;
  }
  EXPECT_LT(returns, 20);
}

TEST_P(TransportTest, EachOnItsOwnThread) {
  const auto a = Make("a"), b = Make("b");
  constexpr uint64_t kCount = 200;
  const std::vector<std::byte> sample = Bytes(kSample, 5);
  uint64_t served = 0;
  b->recorder.on_message = [&](ConnectionId from, std::span<const std::byte> header) {
    EXPECT_TRUE(b->Send(from, header, sample, served++).ok());
  };
  std::atomic<bool> stop = false;
  std::thread server([&] {
    while (!stop) {
      while (b->transport->Progress()) {
      }
      b->transport->Wait({}, kSecond);
    }
  });
  const Result<ConnectionId> id = a->transport->Connect(b->transport->address());
  uint64_t asked = 0;
  const auto ask = [&](ConnectionId to) {
    if (asked < kCount) {
      EXPECT_TRUE(a->Send(to, Text(StrCat(asked)), {}, asked).ok());
      ++asked;
    }
  };
  a->recorder.on_open = [&](ConnectionId to) {
    for (int i = 0; i < 8; ++i) ask(to);
  };
  a->recorder.on_payload = [&](ConnectionId to, uint64_t tag) {
    EXPECT_EQ(a->recorder.own[tag], sample);
    a->recorder.own.erase(tag);
    ask(to);
  };
  EXPECT_TRUE(Run({a.get()}, [&] { return a->recorder.payloads.size() == kCount; }));
  stop = true;
  b->transport->Wake();
  server.join();
}

// A fragmented payload is put together by UCX, and copied once more.
TEST(Ucx, APayloadIsOneSegmentOfTcp) {
  const Result<std::string> version = UcxVersion();
  if (!version) GTEST_SKIP() << version.error().message();
  if (std::filesystem::exists("/sys/class/infiniband")) GTEST_SKIP() << "rendezvous is better here";
  ::setenv("UCX_TLS", "tcp", 1);
  EndPoint a, b;
  a.transport = std::move(*MakeUcxTransport({.listen = "127.0.0.1:0"}, a.recorder));
  b.transport = std::move(*MakeUcxTransport({.listen = "127.0.0.1:0"}, b.recorder));
  ::unsetenv("UCX_TLS");
  const Result<ConnectionId> id = a.transport->Connect(b.transport->address());
  ASSERT_TRUE(id.has_value());
  const auto both = [&] {
    a.transport->Progress();
    b.transport->Progress();
    return a.recorder.opened.contains(*id);
  };
  ASSERT_TRUE(Within(10 * kSecond, both));
  longest_sent = 0;
  const std::vector<std::byte> payload = Bytes(kSample, 1);
  ASSERT_TRUE(a.Send(*id, Text("header"), payload, 1).ok());
  ASSERT_TRUE(Within(10 * kSecond, [&] { return both() && b.recorder.payloads.size() == 1; }));
  EXPECT_EQ(b.recorder.own.at(b.recorder.payloads.front()), payload);
  EXPECT_GT(longest_sent, static_cast<ssize_t>(kSample));
}

TEST(SocketAddress, ReadsNumbersAndNothingElse) {
  for (const char* good : {"10.0.0.1:7711", "127.0.0.1:0", "[::1]:65535", "[fe80::1:2]:1"}) {
    const Result<SocketAddress> address = ParseSocketAddress(good);
    ASSERT_TRUE(address.has_value()) << good;
    EXPECT_EQ(address->ToString(), good);
  }
  for (const char* bad : {"", ":", "host:1", "10.0.0.1", "10.0.0.1:", "10.0.0.1:65536", "1.2.3:4",
                          "10.0.0.1:1x", "::1:80", "[::1]", "[]:1", "10.0.0.1:-1"}) {
    EXPECT_FALSE(ParseSocketAddress(bad).has_value()) << bad;
  }
}

#ifdef LINKPERF
// The first bytes of a function of libc, before anything of UCX is in the process.
std::string Code16(void* function) { return {static_cast<const char*>(function), 16}; }
const std::string mmap_code = Code16(reinterpret_cast<void*>(&::mmap));
const std::string munmap_code = Code16(reinterpret_cast<void*>(&::munmap));

// The other end is a process of its own.
class TransportProcessTest : public testing::TestWithParam<const char*> {
 protected:
  void SetUp() override {
    const bool ucx = std::string(GetParam()) == "ucx";
    if (const Result<std::string> version = ucx ? UcxVersion() : Result<std::string>("");
        !version) {
      GTEST_SKIP() << version.error().message();
    }
    int fds[2];
    ASSERT_EQ(::pipe2(fds, O_CLOEXEC), 0);
    const OwnedFd from(fds[0]);
    OwnedFd to(fds[1]);
    posix_spawn_file_actions_t actions;
    posix_spawn_file_actions_init(&actions);
    posix_spawn_file_actions_adddup2(&actions, to.get(), 1);
    std::string program = LINKPERF, transport = GetParam(), mode = "serve", listen = "127.0.0.1:0";
    char* arguments[] = {program.data(), transport.data(), mode.data(), listen.data(), nullptr};
    const int error = ::posix_spawn(&child_, LINKPERF, &actions, nullptr, arguments, environ);
    posix_spawn_file_actions_destroy(&actions);
    ASSERT_EQ(error, 0);
    to.Reset();
    char address[64] = "";
    const ssize_t got = ::read(from.get(), address, sizeof address - 1);
    ASSERT_GT(got, 1);
    const std::string at(address, static_cast<size_t>(got) - 1);
    const TransportOptions options{.listen = "127.0.0.1:0"};
    end_.transport = std::move(ucx ? *MakeUcxTransport(options, end_.recorder)
                                   : *MakeTcpTransport(options, end_.recorder));
    end_.recorder.transport = end_.transport.get();
    const Result<ConnectionId> id = end_.transport->Connect(at);
    ASSERT_TRUE(id.has_value());
    id_ = *id;
    ASSERT_TRUE(Run([&] { return end_.recorder.opened.contains(id_); }));
  }
  void TearDown() override { End(); }
  void End() {
    if (child_ <= 0) return;
    ::kill(child_, SIGKILL);
    ::waitpid(child_, nullptr, 0);
    child_ = 0;
  }
  bool Run(const std::function<bool()>& done) {
    const Nanos until = SteadyClock().Now() + 10 * kSecond;
    while (!done()) {
      if (SteadyClock().Now() > until) return false;
      if (!end_.transport->Progress() && !done()) end_.transport->Wait({}, 20 * kMilli);
    }
    return true;
  }
  // Asks forebay-linkperf for payloads.
  void Ask(uint32_t bytes, uint64_t tag) {
    const struct {
      uint32_t kind = 3;
      uint32_t bytes;
      uint64_t count = 0;
    } order{.bytes = bytes};
    ASSERT_TRUE(end_.Send(id_, std::as_bytes(std::span(&order, 1)), {}, tag).ok());
  }

  pid_t child_ = 0;
  EndPoint end_;
  ConnectionId id_ = 0;
};

INSTANTIATE_TEST_SUITE_P(, TransportProcessTest, testing::Values("tcp", "ucx"),
                         [](const auto& one) { return std::string(one.param); });

TEST_P(TransportProcessTest, AKilledPeerEndsItsConnectionWithoutAWord) {
  testing::internal::CaptureStdout();
  testing::internal::CaptureStderr();
  for (uint64_t i = 0; i < 200; ++i) Ask(512 << 10, i);
  EXPECT_TRUE(Run([&] { return end_.recorder.payloads.size() > 5; }));
  End();
  EXPECT_TRUE(Run([&] { return end_.recorder.closed.contains(id_); }));
  EXPECT_TRUE(end_.recorder.awaited.empty());
  EXPECT_TRUE(end_.recorder.sending.empty());
  end_.transport.reset();
  EXPECT_EQ(testing::internal::GetCapturedStderr(), "");
  EXPECT_EQ(testing::internal::GetCapturedStdout(), "");
}

TEST_P(TransportProcessTest, CloseDoesNotWaitForAPeerThatHasStopped) {
  for (uint64_t i = 0; i < 32; ++i) Ask(512 << 10, i);
  EXPECT_TRUE(Run([&] { return end_.recorder.payloads.size() > 2; }));
  ::kill(child_, SIGSTOP);
  ::waitpid(child_, nullptr, WUNTRACED);
  const std::vector<std::byte> payload = Bytes(1 << 20, 1);
  for (uint64_t i = 100; i < 116; ++i) {
    EXPECT_TRUE(end_.Send(id_, Text("sixteen bytes .."), payload, i).ok());
  }
  Run([&, until = SteadyClock().Now() + 50 * kMilli] { return SteadyClock().Now() > until; });
  EXPECT_FALSE(end_.recorder.sending.empty());
  end_.transport->Close(id_);
  EXPECT_TRUE(Run([&] { return end_.recorder.closed.contains(id_); }));
  EXPECT_TRUE(end_.recorder.awaited.empty());
  EXPECT_TRUE(end_.recorder.sending.empty());
}

TEST_P(TransportProcessTest, AForkedChildLeavesTheConnectionToItsParent) {
  const pid_t child = ::fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    end_.transport.reset();
    ::_exit(0);
  }
  int status = 1;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
  Ask(100 << 10, 1);
  EXPECT_TRUE(Run([&] { return end_.recorder.payloads.size() == 1; }));
  EXPECT_TRUE(end_.recorder.closed.empty());
}

TEST_P(TransportProcessTest, LeavesSignalsAndLibcAlone) {
  for (const int signal : {SIGSEGV, SIGILL, SIGBUS, SIGFPE, SIGHUP}) {
    struct sigaction action {};
    ASSERT_EQ(::sigaction(signal, nullptr, &action), 0);
    Dl_info info{};
    if (::dladdr(reinterpret_cast<void*>(action.sa_handler), &info) != 0) {
      EXPECT_EQ(std::strstr(info.dli_fname, "libuc"), nullptr) << signal;
    }
  }
  EXPECT_EQ(Code16(reinterpret_cast<void*>(&::mmap)), mmap_code);
  EXPECT_EQ(Code16(reinterpret_cast<void*>(&::munmap)), munmap_code);
}
#endif  // LINKPERF

// What loopback does on demand.
class LoopbackTest : public testing::Test {
 protected:
  void SetUp() override {
    a_.transport = std::move(*network_.Make("a", a_.recorder, 50 * kMilli));
    b_.transport = std::move(*network_.Make("b", b_.recorder));
    id_ = *a_.transport->Connect("b");
    Run([&] { return a_.recorder.opened.size() + b_.recorder.opened.size() == 2; });
  }
  bool Run(const std::function<bool()>& done) {
    const Nanos until = SteadyClock().Now() + 10 * kSecond;
    while (!done()) {
      if (SteadyClock().Now() > until) return false;
      if (!a_.transport->Progress() && !b_.transport->Progress() && !done()) {
        a_.transport->Wait({}, kMilli / 5);
      }
    }
    return true;
  }
  void Settle() {
    while (a_.transport->Progress() || b_.transport->Progress()) {
    }
  }

  LoopbackNetwork network_;
  EndPoint a_, b_;
  ConnectionId id_ = 0;
};

TEST_F(LoopbackTest, ACutHoldsEverythingUntilItIsHealed) {
  const std::vector<std::byte> payload = Bytes(kSample, 1);
  network_.Cut("b", "a");
  ASSERT_TRUE(a_.Send(id_, Text("held"), payload, 1).ok());
  Settle();
  EXPECT_TRUE(b_.recorder.messages.empty());
  EXPECT_TRUE(a_.recorder.sent.empty());
  // A new connection gets no answer.
  const Result<ConnectionId> other = a_.transport->Connect("b");
  ASSERT_TRUE(other.has_value());
  EXPECT_TRUE(Run([&] { return a_.recorder.closed.contains(*other); }));
  EXPECT_EQ(a_.recorder.closed.at(*other).code(), Code::kDeadlineExceeded);
  network_.Heal("a", "b");
  EXPECT_TRUE(Run([&] { return b_.recorder.payloads.size() == 1; }));
  EXPECT_EQ(b_.recorder.own.begin()->second, payload);
}

TEST_F(LoopbackTest, WhatIsClosedDuringACutNeverArrives) {
  const std::vector<std::byte> payload = Bytes(kSample, 1);
  network_.Cut("a", "b");
  ASSERT_TRUE(a_.Send(id_, Text("held"), payload, 1).ok());
  a_.transport->Close(id_);
  Settle();
  EXPECT_EQ(a_.recorder.unsent.size(), 1u);
  EXPECT_TRUE(a_.recorder.closed.contains(id_));
  EXPECT_TRUE(b_.recorder.closed.empty()) << "the news is held up, too";
  network_.Heal("a", "b");
  EXPECT_TRUE(Run([&] { return b_.recorder.closed.size() == 1; }));
  EXPECT_TRUE(b_.recorder.messages.empty());
}

TEST_F(LoopbackTest, ARateHoldsPayloadsUp) {
  network_.SetRate("a", 1 << 20);
  const std::vector<std::byte> payload = Bytes(64 << 10, 1);
  const Nanos start = SteadyClock().Now();
  ASSERT_TRUE(a_.Send(id_, Text("slow"), payload, 1).ok());
  ASSERT_TRUE(a_.Send(id_, Text("slow"), payload, 2).ok());
  Settle();
  EXPECT_EQ(b_.recorder.messages.size(), 2u);
  EXPECT_TRUE(b_.recorder.payloads.empty());
  EXPECT_TRUE(Run([&] { return b_.recorder.payloads.size() == 2; }));
  EXPECT_GE(SteadyClock().Now() - start, kSecond / 8);
  EXPECT_TRUE(Run([&] { return a_.recorder.sent.size() == 2; }));
}

TEST_F(LoopbackTest, OneBitOfEveryNthPayloadIsFlipped) {
  network_.CorruptEvery("a", 3);
  const std::vector<std::byte> payload = Bytes(1000, 1);
  for (uint64_t i = 0; i < 9; ++i) ASSERT_TRUE(a_.Send(id_, {}, payload, i).ok());
  EXPECT_TRUE(Run([&] { return b_.recorder.payloads.size() == 9; }));
  const auto wrong = std::count_if(b_.recorder.own.begin(), b_.recorder.own.end(),
                                   [&](const auto& one) { return one.second != payload; });
  EXPECT_EQ(wrong, 3);
}

TEST_F(LoopbackTest, ANameIsFreeAgainWhenItsTransportHasGone) {
  Recorder other;
  EXPECT_FALSE(network_.Make("b", other).has_value());
  b_.transport.reset();
  EXPECT_TRUE(network_.Make("b", other).has_value());
}

}  // namespace
}  // namespace forebay
