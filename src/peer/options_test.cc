#include "peer/options.h"

#include <gtest/gtest.h>

#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace forebay::peer {
namespace {

using Variables = std::map<std::string, std::string, std::less<>>;

Result<PeerOptions> Of(Variables variables) {
  return PeerOptionsFromEnvironment([&](std::string_view name) -> std::optional<std::string> {
    const auto at = variables.find(name);
    if (at == variables.end()) return std::nullopt;
    return at->second;
  });
}

TEST(PeerOptionsTest, WithoutVariablesTheDefaultsStay) {
  const auto options = Of({});
  ASSERT_TRUE(options) << options.error().message();
  const PeerOptions plain;
  EXPECT_EQ(options->lease, plain.lease);
  EXPECT_EQ(options->request_wait, plain.request_wait);
  EXPECT_EQ(options->join_wait, plain.join_wait);
  EXPECT_TRUE(options->coordinate);
  EXPECT_EQ(options->cluster.method, ClusterSpec::Method::kNone);
}

TEST(PeerOptionsTest, EveryVariableChangesItsField) {
  const auto options = Of({{"FOREBAY_PEERS", "10.0.0.1:7,10.0.0.2:7"},
                           {"FOREBAY_NODE", "1"},
                           {"FOREBAY_NODES", "2"},
                           {"FOREBAY_PEER_COORDINATE", "0"},
                           {"FOREBAY_PEER_TRANSPORT", "ucx"},
                           {"FOREBAY_PEER_LEASE", "1.5"},
                           {"FOREBAY_PEER_WAIT", "0.25"},
                           {"FOREBAY_PEER_JOIN_WAIT", "0"}});
  ASSERT_TRUE(options) << options.error().message();
  EXPECT_EQ(options->cluster.method, ClusterSpec::Method::kStatic);
  EXPECT_EQ(options->cluster.node, 1u);
  EXPECT_FALSE(options->coordinate);
  EXPECT_EQ(options->transport, TransportKind::kUcx);
  EXPECT_EQ(options->lease, 1500 * kMilli);
  EXPECT_EQ(options->request_wait, 250 * kMilli);
  EXPECT_EQ(options->join_wait, 0);
}

TEST(PeerOptionsTest, WhatMakesNoSenseIsNamed) {
  const std::vector<std::pair<std::string, std::string>> wrong = {
      {"FOREBAY_PEER_LEASE", "0.05"},    {"FOREBAY_PEER_WAIT", "soon"},
      {"FOREBAY_PEER_JOIN_WAIT", "-1"},  {"FOREBAY_PEER_COORDINATE", "yes"},
      {"FOREBAY_PEER_LEASE", "nan"},     {"FOREBAY_PEER_WAIT", "1e9"},
      {"FOREBAY_PEER_JOIN_WAIT", "1 s"}, {"FOREBAY_PEER_TRANSPORT", "rdma"}};
  for (const auto& [name, value] : wrong) {
    const auto options = Of({{name, value}});
    ASSERT_FALSE(options) << name << "=" << value;
    EXPECT_NE(options.error().message().find(name + "=" + value), std::string::npos);
  }
}

}  // namespace
}  // namespace forebay::peer
