#include "daemon/web_server.h"

#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include "base/rng.h"
#include "daemon/web_request.h"

namespace forebay {
namespace {

int StatusOf(std::string_view head) { return ParseWebRequest(head).status; }

TEST(WebRequest, OnlyThisMachinesNameIsAnswered) {
  const auto host = [](const std::string& name) {
    return StatusOf(StrCat("GET / HTTP/1.1\r\nHost: ", name, "\r\n"));
  };
  EXPECT_EQ(host("127.0.0.1:9095"), 200);
  EXPECT_EQ(host("localhost:80"), 200);
  EXPECT_EQ(host("LOCALHOST"), 200);
  EXPECT_EQ(host(" 127.0.0.1 "), 200);
  EXPECT_EQ(host("evil.example:9095"), 403);
  EXPECT_EQ(host("127.0.0.1.evil.example"), 403);
  EXPECT_EQ(host("localhost.evil.example:80"), 403);
  EXPECT_EQ(host("127.0.0.1:80@evil.example"), 403);
  EXPECT_EQ(host(""), 403);
  EXPECT_EQ(StatusOf("GET / HTTP/1.1\r\nhOsT:localhost\r\n"), 200);
  EXPECT_EQ(StatusOf("GET / HTTP/1.1\r\nHost: localhost\r\nHost: evil.example\r\n"), 400);
  EXPECT_EQ(StatusOf("GET / HTTP/1.1\r\nX: localhost\r\n"), 400);
  EXPECT_EQ(StatusOf("GET / HTTP/1.0\r\n"), 200);
  EXPECT_EQ(StatusOf("GET / HTTP/1.0\r\nHost: evil.example\r\n"), 403);
}

TEST(WebRequest, WhatIsNoRequestIsRefused) {
  for (const char* head :
       {"", "\r\n", "GET\r\n", "GET /\r\n", "GET / HTTP/2\r\n", "GET  HTTP/1.0\r\n",
        "GET metrics HTTP/1.0\r\n", "GET / x HTTP/1.0\r\n", "GET / HTTP/1.0\r\nno colon\r\n",
        "GET / HTTP/1.0\r\n: empty\r\n", "GET http://localhost/ HTTP/1.0\r\n",
        "GET / HTTP/1.0\r\nHost : evil.example\r\n", "GET / HTTP/1.0\r\n Host: evil.example\r\n",
        "GET / HTTP/1.0\r\nX: y\nHost: evil.example\r\n", "GET / HTTP/1.0\r\nX: y\rHost: z\r\n",
        "GET /\x1b[2J HTTP/1.0\r\n"}) {
    EXPECT_EQ(StatusOf(head), 400) << head;
  }
  EXPECT_EQ(StatusOf("POST / HTTP/1.0\r\n"), 405);
  EXPECT_EQ(StatusOf("get / HTTP/1.0\r\n"), 405);
  EXPECT_EQ(ParseWebRequest("GET /metrics?x=/y HTTP/1.0\r\n").path, "/metrics");
  // Any bytes have an answer.
  SplitMix64 rng(1);
  constexpr std::string_view kBytes = "GET /\r\nHost: 1.\0\xff\t";
  for (int i = 0; i < 20000; ++i) {
    std::string head = rng.Below(2) == 0 ? "GET / HTTP/1.1\r\n" : "";
    for (uint64_t n = rng.Below(40); n > 0; --n) head += kBytes[rng.Below(kBytes.size())];
    (void)StatusOf(head);
  }
}

class WebServerTest : public ::testing::Test {
 protected:
  void SetUp() override {
    auto made = WebServer::Listen(0);
    ASSERT_TRUE(made) << made.status().ToString();
    web_ = *std::move(made);
    const Status serves =
        web_->Serve({{"/text", "text/plain", [] { return std::string(300000, 'x'); }},
                     {"/late", "text/plain", []() -> Result<std::string> {
                        return Status(Code::kUnavailable, "not now");
                      }}});
    ASSERT_TRUE(serves.ok()) << serves.ToString();
  }

  OwnedFd Connect() const {
    OwnedFd fd(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
    sockaddr_in address = {};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    address.sin_port = htons(web_->port());
    EXPECT_EQ(connect(fd.get(), reinterpret_cast<sockaddr*>(&address), sizeof address), 0);
    return fd;
  }
  static std::string Ask(const OwnedFd& fd, const std::string& request) {
    (void)!send(fd.get(), request.data(), request.size(), MSG_NOSIGNAL);
    std::string out;
    char room[4096];
    for (ssize_t n = 0; (n = read(fd.get(), room, sizeof room)) > 0;) {
      out.append(room, static_cast<size_t>(n));
    }
    return out;
  }
  std::string Ask(const std::string& request) const { return Ask(Connect(), request); }

  WebServerPtr web_;
};

TEST_F(WebServerTest, ServesItsPages) {
  const std::string got = Ask("GET /text HTTP/1.1\r\nHost: localhost\r\n\r\n");
  EXPECT_TRUE(got.starts_with("HTTP/1.1 200 OK\r\n")) << got.substr(0, 200);
  EXPECT_TRUE(got.ends_with(std::string(300000, 'x')));
  EXPECT_NE(got.find("\r\nContent-Length: 300000\r\n"), std::string::npos);
  EXPECT_NE(got.find("\r\nContent-Security-Policy: default-src 'none';"), std::string::npos);
  EXPECT_EQ(got.find("Access-Control"), std::string::npos);
  EXPECT_TRUE(Ask("HEAD /text HTTP/1.0\r\n\r\n").ends_with("\r\n\r\n"));
  EXPECT_TRUE(Ask("GET /other HTTP/1.0\r\n\r\n").starts_with("HTTP/1.1 404"));
  EXPECT_TRUE(Ask("GET /late HTTP/1.0\r\n\r\n").starts_with("HTTP/1.1 503"));
  EXPECT_TRUE(Ask("GET /text HTTP/1.1\r\nHost: evil\r\n\r\n").starts_with("HTTP/1.1 403"));
  EXPECT_TRUE(
      Ask("POST /text HTTP/1.0\r\nContent-Length: 9\r\n\r\n123456789").starts_with("HTTP/1.1 405"));
}

TEST_F(WebServerTest, NonsenseAndSilenceHarmNobodyElse) {
  EXPECT_TRUE(Ask(std::string(20000, 'x')).starts_with("HTTP/1.1 431"));
  EXPECT_TRUE(Ask("\r\n\r\n").starts_with("HTTP/1.1 400"));
  const OwnedFd silent = Connect();
  const OwnedFd half = Connect();
  (void)!send(half.get(), "GET /te", 7, MSG_NOSIGNAL);
  { const OwnedFd gone = Connect(); }
  EXPECT_TRUE(Ask("GET /text HTTP/1.0\r\n\r\n").starts_with("HTTP/1.1 200"));
  // In pieces, and its reader takes its time.
  EXPECT_TRUE(Ask(half, "xt HTTP/1.0\r\n\r\n").starts_with("HTTP/1.1 200"));
}

TEST_F(WebServerTest, APortThatIsTakenIsAnError) {
  const auto other = WebServer::Listen(web_->port());
  ASSERT_FALSE(other);
  EXPECT_NE(other.error().message().find(StrCat("127.0.0.1:", web_->port())), std::string::npos);
}

}  // namespace
}  // namespace forebay
