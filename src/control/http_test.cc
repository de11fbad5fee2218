// What a server may send, whole and in pieces, against a real socket.
#include "control/http.h"

#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <chrono>
#include <string>
#include <thread>
#include <vector>

#include "base/rng.h"
#include "control/base64.h"
#include "control/etcd_store.h"

namespace forebay::control {
namespace {

Nanos Soon() { return SteadyClock().Now() + 10 * kSecond; }

// Accepts one connection after the other; answers each request on it with the next of `answers`,
// cut into pieces of `piece` bytes, and hangs up after the last.
class FakeServer {
 public:
  FakeServer(std::vector<std::string> answers, size_t piece)
      : fd_(::socket(AF_INET, SOCK_STREAM, 0)) {
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t size = sizeof(address);
    EXPECT_EQ(::bind(fd_.get(), reinterpret_cast<sockaddr*>(&address), size), 0);
    EXPECT_EQ(::listen(fd_.get(), 4), 0);
    ::getsockname(fd_.get(), reinterpret_cast<sockaddr*>(&address), &size);
    endpoint_.host = "127.0.0.1";
    endpoint_.port = ntohs(address.sin_port);
    thread_ = std::jthread([this, answers = std::move(answers), piece] { Serve(answers, piece); });
  }

  const HttpEndpoint& endpoint() const { return endpoint_; }
  std::unique_ptr<HttpConnection> Connect() {
    auto connection = HttpConnection::Connect(endpoint_, {}, Soon());
    EXPECT_TRUE(connection) << connection.status().message();
    return *std::move(connection);
  }

 private:
  void Serve(const std::vector<std::string>& answers, size_t piece) {
    const OwnedFd peer(::accept(fd_.get(), nullptr, nullptr));
    for (const std::string& answer : answers) {
      std::string request;
      char byte = 0;
      while (request.find("\r\n\r\n") == std::string::npos) {
        if (::recv(peer.get(), &byte, 1, 0) != 1) return;
        request.push_back(byte);
      }
      const size_t length = std::stoul(request.substr(request.find("Content-Length: ") + 16));
      for (size_t i = 0; i < length; ++i) {
        if (::recv(peer.get(), &byte, 1, 0) != 1) return;
      }
      for (size_t at = 0; at < answer.size(); at += piece) {
        const std::string part = answer.substr(at, piece);
        if (::send(peer.get(), part.data(), part.size(), MSG_NOSIGNAL) < 0) return;
        if (piece < answer.size()) std::this_thread::sleep_for(std::chrono::microseconds(200));
      }
    }
  }

  OwnedFd fd_;
  HttpEndpoint endpoint_;
  std::jthread thread_;  // joined before what it uses goes
};

TEST(Http, AnswersInEveryCut) {
  const std::vector<std::string> answers = {
      "HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello",
      "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nhel\r\n2;x=y\r\nlo\r\n0\r\n\r\n",
      "HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 404 No\r\nx: y\r\ncontent-length:  0 \r\n\r\n",
      "HTTP/1.1 200 OK\r\nTransfer-Encoding: CHUNKED\r\n\r\nA\r\n0123456789\r\n0\r\nTrailer: "
      "z\r\n\r\n",
  };
  for (const size_t piece : {size_t{1}, size_t{2}, size_t{7}, size_t{4096}}) {
    FakeServer server(answers, piece);
    const auto connection = server.Connect();
    const std::vector<std::pair<int, std::string>> wanted = {
        {200, "hello"}, {200, "hello"}, {404, ""}, {200, "0123456789"}};
    for (const auto& [code, body] : wanted) {
      const Result<int> got = connection->Post("/x", "{}", Soon());
      ASSERT_TRUE(got) << got.error().message();
      EXPECT_EQ(*got, code);
      const Result<std::string> text = connection->WholeBody(Soon());
      ASSERT_TRUE(text) << text.error().message();
      EXPECT_EQ(*text, body);
      EXPECT_TRUE(connection->reusable());
    }
  }
}

TEST(Http, ConnectionsThatAreNotKept) {
  for (const char* head :
       {"HTTP/1.0 200 OK\r\n\r\n", "HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n"}) {
    FakeServer server({std::string(head) + "rest"}, 4096);
    const auto connection = server.Connect();
    ASSERT_TRUE(connection->Post("/x", "", Soon()));
    EXPECT_EQ(*connection->WholeBody(Soon()), "rest");
    EXPECT_FALSE(connection->reusable());
  }
}

TEST(Http, AnswersThatAreNone) {
  for (const std::string& answer : std::vector<std::string>{
           "SSH-2.0-OpenSSH\r\n\r\n",
           "HTTP/1.1 abc\r\n\r\n",
           "HTTP/1.1 -20 OK\r\n\r\n",
           "HTTP/1.1 2x0 OK\r\n\r\n",
           "HTTP/1.1 2000\r\n\r\n",
           "HTTP/1.1 200 OK\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\nab",
           "HTTP/1.1 200 OK\r\nno colon\r\n\r\n",
           "HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n",
           "HTTP/1.1 200 OK\r\nContent-Length: 99999999999999\r\n\r\n",
           "HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip\r\n\r\n",
           "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nxyz\r\n",
           "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nabXX0\r\n\r\n",
           "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nffffffffff\r\n",
           "HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhel",
           "HTTP/1.1 200",
           std::string(100'000, 'x'),
           "",
       }) {
    FakeServer server({answer}, 4096);
    const auto connection = server.Connect();
    const Result<int> code = connection->Post("/x", "", Soon());
    const Status status = code ? connection->WholeBody(Soon()).status() : code.error();
    EXPECT_EQ(status.code(), Code::kUnavailable) << answer.substr(0, 60);
    EXPECT_FALSE(connection->reusable());
    EXPECT_EQ(connection->answered(), !answer.empty());
  }
}

TEST(HttpAnswer, InterimOnesWithoutEndAreNone) {
  HttpAnswer answer;
  answer.Begin();
  for (int i = 0; i < HttpAnswer::kMostInterim; ++i) {
    answer.Append("HTTP/1.1 100 Continue\r\n\r\n");
    const auto head = answer.Head();
    ASSERT_TRUE(head) << head.error().message();
    EXPECT_EQ(*head, std::nullopt);
  }
  answer.Append("HTTP/1.1 100 Continue\r\n\r\n");
  EXPECT_EQ(answer.Head().status().code(), Code::kUnavailable);
}

// It may be the beginning of the answer to a question that is not asked yet.
TEST(HttpAnswer, WhatComesBehindItEndsTheConnection) {
  for (const std::string& behind : {std::string(), std::string("HTTP/1.1 200 OK\r\n")}) {
    HttpAnswer answer;
    answer.Begin();
    answer.Append(StrCat("HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok", behind));
    ASSERT_EQ(*answer.Head(), 200);
    std::string piece;
    ASSERT_EQ(*answer.Next(&piece), HttpAnswer::Step::kPiece);
    EXPECT_EQ(piece, "ok");
    EXPECT_EQ(*answer.Next(&piece), HttpAnswer::Step::kEnd);
    EXPECT_EQ(answer.reusable(), behind.empty());
  }
}

TEST(HttpAnswer, WhatIsNoneIsToldWithoutItsControlCharacters) {
  HttpAnswer answer;
  answer.Begin();
  answer.Append("\x1b[2J\x07not http\r\n\r\n");
  const Status status = answer.Head().status();
  EXPECT_EQ(status.message(), "not an HTTP/1.1 answer: ?[2J?not http");
}

// In so many chunks that they cannot be read in time, and none of them is waited for.
std::string AlwaysMore() {
  std::string lines = "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n";
  for (int i = 0; i < 2'000'000; ++i) lines += "3\r\n{}\n\r\n";
  return lines + "0\r\n\r\n";
}

TEST(Http, ABodyThatAlwaysHasMoreIsReadNoLongerThanTold) {
  const std::string answer = AlwaysMore();
  FakeServer server({answer}, answer.size());
  const auto connection = server.Connect();
  ASSERT_EQ(*connection->Post("/x", "", Soon()), 200);
  const auto body = connection->WholeBody(SteadyClock().Now() + 10 * kMilli);
  ASSERT_FALSE(body) << body->size();
  EXPECT_EQ(body.error().code(), Code::kDeadlineExceeded) << body.error().ToString();
}

// Lines without events.
TEST(Http, AWatchThatIsAlwaysToldNothingWaitsNoLongerThanTold) {
  const std::string lines = AlwaysMore();
  FakeServer server({lines}, lines.size());
  EtcdOptions options;
  options.endpoints = {server.endpoint().ToString()};
  options.deadline = 10 * kSecond;
  const auto store = EtcdStore::Make(options);
  ASSERT_TRUE(store);
  const auto watch = *(*store)->Watch("a", 1);
  const auto events = watch->Poll(20 * kMilli);
  ASSERT_TRUE(events) << "it waited for the end: " << events.error().ToString();
  EXPECT_TRUE(events->empty());
}

TEST(Http, WaitsNoLongerThanTold) {
  FakeServer server({"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n", "never"},
                    4096);
  const auto connection = server.Connect();
  ASSERT_EQ(*connection->Post("/x", "", Soon()), 200);
  EXPECT_EQ(**connection->NextPiece(Soon()), "abc");
  const Nanos begin = SteadyClock().Now();
  EXPECT_EQ(connection->NextPiece(begin + 50 * kMilli).error().code(), Code::kDeadlineExceeded);
  EXPECT_EQ(connection->NextPiece(0).error().code(), Code::kDeadlineExceeded);
  EXPECT_GE(SteadyClock().Now() - begin, 50 * kMilli);
}

TEST(Base64, ThereAndBack) {
  SplitMix64 rng(1);
  for (size_t size = 0; size < 100; ++size) {
    std::string bytes;
    for (size_t i = 0; i < size; ++i) bytes.push_back(static_cast<char>(rng.Below(256)));
    std::string text;
    AppendBase64(bytes, &text);
    EXPECT_EQ(text.size(), (size + 2) / 3 * 4);
    EXPECT_EQ(FromBase64(text), bytes);
  }
  std::string known;
  AppendBase64("forebay?", &known);
  EXPECT_EQ(known, "Zm9yZWJheT8=");
  for (const char* bad :
       {"a", "ab=", "====", "a===", "ab=c", "Zm9=", "Z===", "Zg=g", "Zg==Zg==", "Z\n=="}) {
    EXPECT_EQ(FromBase64(bad), std::nullopt) << bad;
  }
}

}  // namespace
}  // namespace forebay::control
