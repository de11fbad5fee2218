#include "base/host_port.h"

#include <gtest/gtest.h>

#include <string>

namespace forebay {
namespace {

TEST(HostPort, ReadsWhatItWrites) {
  for (const char* good : {"a:7", "10.0.0.1:65535", "[::1]:7", "node-1.cluster_x:1"}) {
    const Result<HostPort> at = ParseHostPort(good);
    ASSERT_TRUE(at) << good;
    EXPECT_EQ(at->ToString(), good);
  }
  EXPECT_EQ(ParseHostPort("[::1]:7")->host, "::1");
  EXPECT_EQ(ParseHostPort("a:7")->host, "a");
  EXPECT_EQ(ParseHostPort("a:7")->port, 7);
}

TEST(HostPort, AnythingElseIsRefused) {
  for (const char* wrong :
       {"", ":", ":7", "a", "a:", "a:0", "a:65536", "a:7x", "a:-1", "a: 7", "::1:7", "a b:7",
        "[]:7", "[:7", "[::1]", "a,b:7", "http://a:7", "u@a:7", "a:7/"}) {
    EXPECT_FALSE(ParseHostPort(wrong)) << wrong;
  }
  EXPECT_FALSE(ParseHostPort(std::string(256, 'a') + ":7"));
}

TEST(HostPort, AnyPortMayBeAskedFor) {
  EXPECT_FALSE(ParseHostPort("a:0"));
  EXPECT_EQ(ParseHostPort("a:0", 0)->port, 0);
}

TEST(HostPort, SaysWhatIsWrong) {
  EXPECT_EQ(ParseHostPort("a").error().message(), "the port is missing");
  EXPECT_EQ(ParseHostPort(":7").error().message(), "there is no host in it");
  EXPECT_EQ(ParseHostPort("a:0").error().message(), "the port is no number from 1 to 65535");
}

}  // namespace
}  // namespace forebay
