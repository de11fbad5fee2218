#include "peer/start.h"

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <string>

namespace forebay::peer {
namespace {

class StartPeersTest : public ::testing::Test {
 protected:
  void SetUp() override {
    for (const char* name : kNames) unsetenv(name);
    EngineOptions options;
    options.memory = 16 << 20;
    auto engine = Engine::Create(options);
    ASSERT_TRUE(engine) << engine.status().ToString();
    engine_ = *std::move(engine);
  }
  void TearDown() override {
    for (const char* name : kNames) unsetenv(name);
  }
  static constexpr const char* kNames[] = {"FOREBAY_PEERS",
                                           "FOREBAY_NODE",
                                           "FOREBAY_NODES",
                                           "WORLD_SIZE",
                                           "RANK",
                                           "MASTER_ADDR",
                                           "LOCAL_WORLD_SIZE",
                                           "GROUP_RANK",
                                           "GROUP_WORLD_SIZE",
                                           "FOREBAY_PEER_SECRET",
                                           "FOREBAY_UCX_LIBRARY"};
  EnginePtr engine_;
};

TEST_F(StartPeersTest, OneNodeHasNoneAndSaysNothing) {
  for (const char* wanted : {"", "auto", "off"}) {
    auto started = StartPeers(*engine_, wanted);
    ASSERT_TRUE(started) << wanted;
    EXPECT_EQ(started->peers, nullptr);
    EXPECT_EQ(started->note, "");
    EXPECT_EQ(engine_->Cluster().health, "");
    EXPECT_FALSE(WantsPeers(wanted));
  }
}

TEST_F(StartPeersTest, WhatMakesNoSenseIsAnErrorWhereItWasAskedFor) {
  EXPECT_FALSE(StartPeers(*engine_, "not a list"));
  setenv("FOREBAY_PEERS", "not a list", 1);
  EXPECT_FALSE(StartPeers(*engine_, ""));
  auto off = StartPeers(*engine_, "off");
  ASSERT_TRUE(off) << "the user's word goes before the environment's";
  EXPECT_EQ(off->note, "");
}

TEST_F(StartPeersTest, WhatALauncherLeavesOpenIsSaid) {
  setenv("FOREBAY_NODE", "0", 1);
  setenv("FOREBAY_NODES", "2", 1);
  auto started = StartPeers(*engine_, "");
  ASSERT_TRUE(started) << started.status().ToString();
  EXPECT_EQ(started->peers, nullptr);
  EXPECT_TRUE(started->failed);
  EXPECT_NE(started->note.find("MASTER_ADDR"), std::string::npos) << started->note;
  EXPECT_EQ(engine_->Cluster().nodes, 0u);
  EXPECT_EQ(engine_->Cluster().health, started->note);
}

TEST_F(StartPeersTest, WhereTheyCannotBeHadTheEngineDoesWithout) {
  setenv("FOREBAY_NODE", "0", 1);
  setenv("FOREBAY_PEER_SECRET", "/nonexistent/folder/secret", 1);
  for (int i = 0; i < 2; ++i) {
    auto started = StartPeers(*engine_, "127.0.0.1:1,127.0.0.1:2");
    ASSERT_TRUE(started) << started.status().ToString();
    EXPECT_EQ(started->peers, nullptr);
    EXPECT_TRUE(started->failed);
    EXPECT_NE(started->note.find("no peers: "), std::string::npos) << started->note;
    EXPECT_EQ(engine_->Cluster().health, started->note);
    EXPECT_TRUE(WantsPeers("127.0.0.1:1,127.0.0.1:2"));
  }
}

TEST_F(StartPeersTest, APasswordInPlainTextIsAWarning) {
  setenv("FOREBAY_NODE", "0", 1);
  setenv("FOREBAY_NODES", "2", 1);
  setenv("FOREBAY_ETCD_USER", "me", 1);
  setenv("FOREBAY_ETCD_PASSWORD", "hidden", 1);
  const auto plain = StartPeers(*engine_, "etcd://no-such-host.invalid:2379");
  const auto here = StartPeers(*engine_, "etcd://127.0.0.1:1");
  unsetenv("FOREBAY_ETCD_PASSWORD");
  const auto half = StartPeers(*engine_, "etcd://127.0.0.1:1");
  unsetenv("FOREBAY_ETCD_USER");
  ASSERT_TRUE(plain) << plain.status().ToString();
  EXPECT_NE(plain->warning.find("http://no-such-host.invalid:2379"), std::string::npos)
      << plain->warning;
  EXPECT_EQ(StrCat(plain->warning, plain->note).find("hidden"), std::string::npos);
  ASSERT_TRUE(here) << here.status().ToString();
  EXPECT_EQ(here->warning, "");
  ASSERT_FALSE(half);
  EXPECT_NE(half.error().message().find("FOREBAY_ETCD_PASSWORD_FILE"), std::string::npos);
}

TEST_F(StartPeersTest, PeersGoBeforeTheirEngineAndNotInAChild) {
  static int order = 0;
  static int gone_at = 0;
  struct Fake final : Peers {
    ~Fake() override { gone_at = ++order; }
    std::vector<PeerStatus> Seen() const override { return {}; }
    std::string Describe() const override { return ""; }
  };
  std::shared_ptr<Engine> shared = WithPeers(std::move(engine_), std::make_unique<Fake>());
  const pid_t child = fork();
  if (child == 0) {
    shared.reset();
    _exit(order == 0 ? 0 : 1);
  }
  int status = -1;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
  EXPECT_EQ(gone_at, 0);
  shared.reset();
  EXPECT_EQ(gone_at, 1);
}

}  // namespace
}  // namespace forebay::peer
