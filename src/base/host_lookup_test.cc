#include "base/host_lookup.h"

#include <gtest/gtest.h>

#include <string>

namespace forebay {
namespace {

TEST(HostLookup, NumbersAreThereAtOnce) {
  const HostLookup four(HostPort{"127.0.0.1", 7});
  const auto found = four.Poll();
  ASSERT_TRUE(found && *found);
  ASSERT_EQ((*found)->size(), 1u);
  EXPECT_TRUE((*found)->front().loopback());
  EXPECT_EQ((*found)->front().host(), "127.0.0.1");
  EXPECT_EQ((*found)->front().family(), AF_INET);
  const HostLookup six(HostPort{"::1", 7});
  EXPECT_EQ(six.Wait(0)->front().host(), "::1");
  EXPECT_TRUE(IsNumericHost("10.0.0.1"));
  EXPECT_TRUE(IsNumericHost("fe80::1"));
  EXPECT_FALSE(IsNumericHost("localhost"));
}

TEST(HostLookup, NamesComeLater) {
  const HostLookup one(HostPort{"localhost", 7});
  const HostLookup other(HostPort{"localhost", 7});
  const auto found = one.Wait(60 * kSecond);
  ASSERT_TRUE(found) << found.error().ToString();
  EXPECT_TRUE(found->front().loopback());
  EXPECT_TRUE(other.Wait(60 * kSecond));
  // The next one looks anew.
  EXPECT_TRUE(HostLookup(HostPort{"localhost", 7}).Wait(60 * kSecond));
}

TEST(HostLookup, WhatIsNoNameIsAnErrorThatNamesIt) {
  const std::string name(300, 'a');  // so long that no server is asked
  const auto found = HostLookup(HostPort{name, 7}).Wait(60 * kSecond);
  ASSERT_FALSE(found);
  EXPECT_NE(found.error().message().find(name), std::string::npos);
}

}  // namespace
}  // namespace forebay
