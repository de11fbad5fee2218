// What only TCP has: a stream that anybody can reach. Strangers, and the frames themselves.
#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <filesystem>
#include <fstream>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "base/owned.h"
#include "transport/choose.h"
#include "transport/socket_address.h"
#include "transport/tcp_frames.h"
#include "transport/transport.h"

namespace forebay {
namespace {

std::vector<std::byte> ToBytes(const std::string& text) {
  const auto* data = reinterpret_cast<const std::byte*>(text.data());
  return {data, data + text.size()};
}

// Takes for proven whoever sends "secret", and answers every message of those.
class Member : public TransportHandler {
 public:
  explicit Member(const std::string& kind, Nanos connect_wait = 5 * kSecond, char key = 'k') {
    Result<std::unique_ptr<Transport>> made = MakeTransport(
        *ParseTransportKind(kind),
        {.listen = "127.0.0.1:0", .connect_wait = connect_wait, .tls_key = std::string(32, key)},
        *this, &trust);
    EXPECT_TRUE(made.has_value()) << made.status().ToString();
    transport = std::move(*made);
  }
  void OnOpen(ConnectionId id, bool accepted) override {
    opened[id] = accepted;
    if (!accepted) {
      transport->SetProven(id);
      EXPECT_TRUE(transport->Send(id, ToBytes("secret"), {}, 1).ok());
    }
  }
  void OnClosed(ConnectionId id, const Status& why) override { closed[id] = why; }
  std::span<std::byte> OnMessage(ConnectionId id, std::span<const std::byte> header,
                                 uint64_t payload_bytes, uint64_t*) override {
    const std::string text(reinterpret_cast<const char*>(header.data()), header.size());
    messages.push_back(text);
    EXPECT_EQ(payload_bytes, 0u);
    if (text == "secret" && opened.at(id)) {
      transport->SetProven(id);
      EXPECT_TRUE(transport->Send(id, ToBytes("welcome"), {}, 2).ok());
    }
    return {};
  }
  void OnPayload(ConnectionId, uint64_t, const Status&) override {}
  void OnSent(ConnectionId, uint64_t, const Status&) override {}

  std::unique_ptr<Transport> transport;
  std::map<ConnectionId, bool> opened;
  std::map<ConnectionId, Status> closed;
  std::vector<std::string> messages;
  std::string trust;
};

bool RunUntil(std::vector<Member*> members, const std::function<bool()>& done) {
  const Nanos until = SteadyClock().Now() + 10 * kSecond;
  while (!done()) {
    bool more = false;
    for (Member* one : members) more |= one->transport->Progress();
    if (done()) return true;
    if (SteadyClock().Now() > until) return false;
    if (!more) members.front()->transport->Wait({}, kMilli / 5);
  }
  return true;
}

// A plain socket of somebody.
class Stranger {
 public:
  explicit Stranger(const std::string& at, const char* from = "127.0.0.1") {
    fd_ = OwnedFd(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
    sockaddr_in own{};
    own.sin_family = AF_INET;
    ::inet_pton(AF_INET, from, &own.sin_addr);
    EXPECT_EQ(::bind(fd_.get(), reinterpret_cast<sockaddr*>(&own), sizeof own), 0);
    const SocketAddress to = *ParseSocketAddress(at);
    EXPECT_EQ(::connect(fd_.get(), to.get(), to.length), 0);
  }
  void Say(std::span<const std::byte> bytes) {
    [[maybe_unused]] const ssize_t sent =
        ::send(fd_.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL);
  }
  // Whether the other side has closed; what it said until now is in `heard`.
  bool Ended() {
    char bytes[512];
    while (true) {
      const ssize_t got = ::recv(fd_.get(), bytes, sizeof bytes, MSG_DONTWAIT);
      if (got > 0) {
        heard.append(bytes, static_cast<size_t>(got));
      } else {
        return got == 0 || errno == ECONNRESET;
      }
    }
  }
  std::string heard;

 private:
  OwnedFd fd_;
};

std::vector<std::byte> Frame(uint32_t header_bytes, uint64_t payload_bytes, size_t sent) {
  std::vector<std::byte> frame(tcp::kPrefixBytes + sent);
  std::memcpy(frame.data(), &header_bytes, sizeof header_bytes);
  std::memcpy(frame.data() + 8, &payload_bytes, sizeof payload_bytes);
  return frame;
}

class TcpStrangersTest : public testing::TestWithParam<const char*> {
 protected:
  void SetUp() override {
    const Result<std::string> version = TlsVersion();
    if (!version && std::string(GetParam()) == "tls") GTEST_SKIP() << version.error().message();
  }
};
INSTANTIATE_TEST_SUITE_P(, TcpStrangersTest, testing::Values("tcp", "tls"),
                         [](const auto& one) { return std::string(one.param); });

TEST_P(TcpStrangersTest, TakeNoMembersPlace) {
  Member one(GetParam()), other(GetParam());
  std::deque<Stranger> strangers;
  for (int i = 0; i < 300; ++i) strangers.emplace_back(one.transport->address(), "127.0.0.2");
  const Result<ConnectionId> id = other.transport->Connect(one.transport->address());
  ASSERT_TRUE(id.has_value());
  EXPECT_TRUE(RunUntil({&one, &other},
                       [&] { return other.messages == std::vector<std::string>{"welcome"}; }));
  for (int i = 0; i < 300; ++i) strangers.emplace_back(one.transport->address(), "127.0.0.2");
  size_t ended = 0;
  EXPECT_TRUE(RunUntil({&one, &other}, [&] {
    ended = 0;
    for (Stranger& stranger : strangers) ended += stranger.Ended() ? 1 : 0;
    return ended >= 600 - 64;
  })) << ended;
  EXPECT_EQ(one.opened.size(), 1u) << "who says nothing is not heard of";
  EXPECT_GE(one.transport->strangers(), 600u - 64);
  EXPECT_TRUE(one.closed.empty());
}

TEST_P(TcpStrangersTest, OfOneHostDoNotPushOutAnother) {
  Member one(GetParam());
  Stranger slow(one.transport->address());
  one.transport->Progress();
  std::deque<Stranger> strangers;
  for (int i = 0; i < 300; ++i) strangers.emplace_back(one.transport->address(), "127.0.0.2");
  EXPECT_TRUE(RunUntil({&one}, [&] { return one.transport->strangers() >= 300 - 63; }));
  EXPECT_FALSE(slow.Ended());
}

TEST_P(TcpStrangersTest, HaveABoundedTime) {
  Member one(GetParam(), 50 * kMilli);
  Stranger silent(one.transport->address()), slow(one.transport->address());
  const auto hello = tcp::Hello(tcp::Role::kConnected);
  slow.Say(std::span(hello).first(3));
  EXPECT_TRUE(RunUntil({&one}, [&] { return silent.Ended() && slow.Ended(); }));
  EXPECT_EQ(silent.heard + slow.heard, "");
}

TEST_P(TcpStrangersTest, HearNoMoreThanARefusal) {
  Member one(GetParam(), kSecond / 5);
  std::deque<Stranger> strangers;
  for (const char* text : {"GET / HTTP/1.1\r\n\r\n", "FBYTCP0\n", "\x16\x03\x01\x02\x00garbage",
                           "SSH-2.0-OpenSSH_9.2\r\n"}) {
    strangers.emplace_back(one.transport->address()).Say(ToBytes(text));
  }
  EXPECT_TRUE(RunUntil({&one}, [&] {
    return std::all_of(strangers.begin(), strangers.end(), [](Stranger& s) { return s.Ended(); });
  }));
  for (const Stranger& stranger : strangers) {
    EXPECT_LE(stranger.heard.size(), tcp::kHelloBytes) << "an alert of TLS has 7 bytes";
  }
  EXPECT_TRUE(one.opened.empty());
}

TEST(TcpTest, WhatHasNoPlaceBeforeTheProofEndsTheConnection) {
  Member one("tcp");
  const auto hello = tcp::Hello(tcp::Role::kConnected);
  std::deque<Stranger> strangers;
  for (const auto& frame : {Frame(tcp::kMostUnproven + 1, 0, 300), Frame(6, 1, 6),
                            Frame(6, uint64_t{1} << 40, 6), Frame(UINT32_MAX, UINT64_MAX, 0)}) {
    Stranger& stranger = strangers.emplace_back(one.transport->address());
    stranger.Say(hello);
    stranger.Say(frame);
  }
  EXPECT_TRUE(RunUntil({&one}, [&] {
    return std::all_of(strangers.begin(), strangers.end(), [](Stranger& s) { return s.Ended(); });
  }));
  EXPECT_TRUE(one.messages.empty());
  // Those that were shown to the handler are shown to have ended.
  EXPECT_EQ(one.closed.size(), one.opened.size());
}

TEST(TcpTest, AnotherKeyIsRefusedByTls) {
  if (!TlsVersion()) GTEST_SKIP() << TlsVersion().error().message();
  Member one("tls"), other("tls", 5 * kSecond, 'x');
  const Result<ConnectionId> id = other.transport->Connect(one.transport->address());
  ASSERT_TRUE(id.has_value());
  EXPECT_TRUE(RunUntil({&one, &other}, [&] { return other.closed.contains(*id); }));
  EXPECT_NE(other.closed.at(*id).message().find("secret"), std::string::npos)
      << other.closed.at(*id).ToString();
  EXPECT_TRUE(one.opened.empty());
  EXPECT_TRUE(other.opened.empty());
}

TEST(TcpTest, AnotherTransportIsNamedInTheError) {
  if (!TlsVersion()) GTEST_SKIP() << TlsVersion().error().message();
  Member plain("tcp"), tls("tls");
  const Result<ConnectionId> a = plain.transport->Connect(tls.transport->address());
  const Result<ConnectionId> b = tls.transport->Connect(plain.transport->address());
  EXPECT_TRUE(RunUntil({&plain, &tls},
                       [&] { return plain.closed.contains(*a) && tls.closed.contains(*b); }));
  EXPECT_NE(plain.closed.at(*a).message().find("FOREBAY_PEER_TRANSPORT"), std::string::npos)
      << plain.closed.at(*a).ToString();
}

TEST(TcpTest, TrustsNobodyAndUcxSaysWhomItDoes) {
  Member tcp("tcp");
  EXPECT_EQ(tcp.trust, "");
  // Said also where this machine has no UCX.
  std::string trust;
  (void)MakeTransport(TransportKind::kUcx, {.listen = "127.0.0.1:0"}, tcp, &trust);
  EXPECT_NE(trust.find("only the job's nodes may reach them"), std::string::npos) << trust;
  EXPECT_NE(trust.find("FOREBAY_PEER_TRANSPORT=tcp or tls"), std::string::npos) << trust;
}

TEST(TcpTest, TheKindIsChosenByNameOrByTheFabric) {
  EXPECT_EQ(*ParseTransportKind("tls"), TransportKind::kTls);
  EXPECT_FALSE(ParseTransportKind("rdma").has_value());
  std::string folder = testing::TempDir() + "forebay_infiniband_XXXXXX";
  ASSERT_NE(::mkdtemp(folder.data()), nullptr);
  EXPECT_FALSE(HasInfiniBand(folder + "/none"));
  const std::filesystem::path port = std::filesystem::path(folder) / "mlx5_0/ports/1";
  std::filesystem::create_directories(port);
  const auto put = [&](const char* layer, const char* state) {
    std::ofstream(port / "link_layer") << layer << "\n";
    std::ofstream(port / "state") << state << "\n";
  };
  put("Ethernet", "4: ACTIVE");
  EXPECT_FALSE(HasInfiniBand(folder));
  put("InfiniBand", "1: DOWN");
  EXPECT_FALSE(HasInfiniBand(folder));
  put("InfiniBand", "4: ACTIVE");
  EXPECT_TRUE(HasInfiniBand(folder));
  std::filesystem::remove_all(folder);
}

}  // namespace
}  // namespace forebay
