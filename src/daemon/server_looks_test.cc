// Looks at files that ranks share by way of a server.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <utility>

#include "daemon/server.h"
#include "daemon/test_files.h"
#include "port/rank_looks.h"
#include "port/socket_port.h"

namespace forebay {
namespace {

using testing::MakeEngine;
using testing::TestFiles;

bool GoOn() { return true; }

class ServerLooks : public ::testing::Test {
 protected:
  void SetUp() override {
    engine_ = MakeEngine(uint64_t{32} << 20);
    ServerOptions options;
    options.socket_path = files_.root() + "/socket";
    auto server = Server::Start(*engine_, options);
    ASSERT_TRUE(server) << server.status().ToString();
    server_ = *std::move(server);
    // Openings are counted by process: each test has data sets of its own.
    name_ = files_.root() + "/data";
  }

  std::shared_ptr<SocketPort> Attach() {
    auto client = SocketPort::Attach(files_.root() + "/socket", 10 * kSecond);
    EXPECT_TRUE(client) << client.status().ToString();
    return client ? *std::move(client) : nullptr;
  }

  wire::AskLook Question(uint32_t rank, uint64_t ticket = 0) const {
    wire::AskLook ask;
    ask.job = "job";
    ask.name = name_;
    ask.rank = rank;
    ask.ranks = 3;
    ask.opening = 1;
    ask.ticket = ticket;
    return ask;
  }

  wire::AskLookReply Ask(SocketPort& client, const wire::AskLook& ask, OwnedFd* memory = nullptr) {
    OwnedFd own;
    auto reply = client.AskLook(ask, memory == nullptr ? &own : memory);
    EXPECT_TRUE(reply) << reply.status().ToString();
    return reply ? *reply : wire::AskLookReply();
  }

  uint64_t Metric(const std::string& name) {
    for (const Registry::Sample& sample : engine_->registry().Snapshot()) {
      if (sample.name == name) return sample.value;
    }
    ADD_FAILURE() << "no " << name;
    return 0;
  }

  // Memory with so many files, sealed or not.
  static OwnedFd MemoryOf(uint64_t files, bool sealed) {
    OwnedFd memory(memfd_create("look", MFD_CLOEXEC | MFD_ALLOW_SEALING));
    EXPECT_EQ(ftruncate(memory.get(), static_cast<off_t>(files * sizeof(SeenFile))), 0);
    if (sealed) {
      EXPECT_EQ(fcntl(memory.get(), F_ADD_SEALS, F_SEAL_WRITE | F_SEAL_SHRINK | F_SEAL_GROW), 0);
    }
    return memory;
  }

  TestFiles files_;
  EnginePtr engine_;
  ServerPtr server_;
  std::string name_;
};

TEST_F(ServerLooks, WhatOneHasSeenTheOthersGet) {
  const auto looker_client = Attach();
  const auto other_client = Attach();
  SeenFiles seen{.list = 77, .files = {}};
  for (uint32_t i = 0; i < 1000; ++i) {
    seen.files.push_back({.mtime_ns = int64_t{i} << 40, .length = i, .change_stamp = ~i});
  }
  const wire::AskLookReply mine = Ask(*looker_client, Question(0));
  ASSERT_EQ(mine.turn, wire::AskLookReply::kLook);
  // Waits, in a thread of its own.
  std::atomic<int> ticks = 0;
  std::optional<SeenFiles> got;
  std::thread other([&] {
    RankLooks looks(other_client, {.job = "job", .rank = 1, .ranks = 3, .wrote_at = -1});
    auto answer = looks.Ask(name_, [&] { return ++ticks > 0; });
    ASSERT_TRUE(answer) << answer.status().ToString();
    got = *std::move(answer);
  });
  while (ticks == 0) std::this_thread::yield();
  OwnedFd memory(memfd_create("look", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  const auto bytes = static_cast<ssize_t>(seen.files.size() * sizeof(SeenFile));
  ASSERT_EQ(write(memory.get(), seen.files.data(), static_cast<size_t>(bytes)), bytes);
  ASSERT_EQ(fcntl(memory.get(), F_ADD_SEALS, F_SEAL_WRITE | F_SEAL_SHRINK | F_SEAL_GROW), 0);
  wire::HandInLook hand_in;
  hand_in.ticket = mine.ticket;
  hand_in.list = seen.list;
  hand_in.files = seen.files.size();
  const Status taken = looker_client->HandInLook(hand_in, memory);
  EXPECT_TRUE(taken.ok()) << taken.ToString();
  other.join();
  ASSERT_TRUE(got);
  EXPECT_EQ(got->list, 77u);
  ASSERT_EQ(got->files.size(), seen.files.size());
  for (size_t i = 0; i < seen.files.size(); ++i) {
    EXPECT_EQ(got->files[i].mtime_ns, seen.files[i].mtime_ns);
    EXPECT_EQ(got->files[i].length, seen.files[i].length);
    EXPECT_EQ(got->files[i].change_stamp, seen.files[i].change_stamp);
  }
  EXPECT_EQ(Metric("forebay_daemon_looks_handed_in_total"), 1u);
  EXPECT_EQ(Metric("forebay_daemon_looks_taken_total"), 1u);
  // The third one has it, too, and nothing is kept then.
  EXPECT_EQ(Ask(*Attach(), Question(2)).turn, wire::AskLookReply::kTake);
  EXPECT_EQ(Metric("forebay_daemon_looks_taken_total"), 2u);
  (void)Ask(*looker_client, Question(0));  // the server's thread has come round
  EXPECT_EQ(Metric("forebay_daemon_look_bytes"), 0u);
}

TEST_F(ServerLooks, RankLooksHandInAndTake) {
  const auto client = Attach();
  {
    RankLooks looks(client, {.job = "own", .rank = 0, .ranks = 2, .wrote_at = -1});
    const auto answer = looks.Ask(name_, GoOn);
    ASSERT_TRUE(answer && !*answer);
    looks.Progress(1);
    looks.HandIn({.list = 5, .files = {{.mtime_ns = 1, .length = 2, .change_stamp = 3}}});
  }
  // The process has opened it once: to the board this is its second opening.
  OwnedFd memory;
  wire::AskLook ask = Question(1);
  ask.job = "own";
  const wire::AskLookReply reply = Ask(*Attach(), ask, &memory);
  EXPECT_EQ(reply.turn, wire::AskLookReply::kTake);
  EXPECT_EQ(reply.list, 5u);
  EXPECT_EQ(reply.files, 1u);
  EXPECT_TRUE(memory.valid());
  // One that comes to nothing holds nobody.
  {
    RankLooks looks(client, {.job = "own", .rank = 0, .ranks = 2, .wrote_at = -1});
    ASSERT_TRUE(looks.Ask(name_, GoOn));
    ask.opening = 2;
    const wire::AskLookReply wait = Ask(*Attach(), ask);
    EXPECT_EQ(wait.turn, wire::AskLookReply::kWait);
    ask.ticket = wait.ticket;
  }
  ASSERT_TRUE(client->Query(wire::Query::kPolicy));  // behind what the looks have said
  EXPECT_EQ(Ask(*Attach(), ask).turn, wire::AskLookReply::kAlone);
}

TEST_F(ServerLooks, AWaitCanBeCancelled) {
  const auto looker = Attach();
  ASSERT_EQ(Ask(*looker, Question(0)).turn, wire::AskLookReply::kLook);
  RankLooks looks(Attach(), {.job = "job", .rank = 1, .ranks = 3, .wrote_at = -1});
  const auto answer = looks.Ask(name_, [] { return false; });
  EXPECT_EQ(answer.status().code(), Code::kCancelled);
}

TEST_F(ServerLooks, AClientThatGoesIsReplacedAtOnce) {
  auto looker = Attach();
  const auto other = Attach();
  ASSERT_EQ(Ask(*looker, Question(0)).turn, wire::AskLookReply::kLook);
  const wire::AskLookReply wait = Ask(*other, Question(1));
  ASSERT_EQ(wait.turn, wire::AskLookReply::kWait);
  looker.reset();
  RankLooks third(Attach(), {.job = "job", .rank = 2, .ranks = 3, .wrote_at = -1});
  const auto answer = third.Ask(name_, GoOn);  // not told to wait for who has gone
  ASSERT_TRUE(answer && !*answer);
  EXPECT_EQ(Ask(*other, Question(1, wait.ticket)).turn, wire::AskLookReply::kWait);
}

TEST_F(ServerLooks, AProgramThatFollowsAnotherGetsNothingOfIt) {
  for (int program = 0; program < 20; ++program) {
    const auto client = Attach();
    const auto rank = static_cast<uint32_t>(program);
    const wire::AskLookReply reply = Ask(*client, Question(rank));
    ASSERT_EQ(reply.turn, wire::AskLookReply::kLook) << program;
    wire::HandInLook hand_in;
    hand_in.ticket = reply.ticket;
    hand_in.files = 10;
    ASSERT_TRUE(client->HandInLook(hand_in, MemoryOf(10, true)).ok());
  }
}

TEST_F(ServerLooks, WhatIsNoLookIsRefused) {
  const auto looker = Attach();
  const auto other = Attach();
  for (const bool sealed : {false, true}) {
    SCOPED_TRACE(sealed);
    name_ += "+";
    const wire::AskLookReply reply = Ask(*looker, Question(0));
    ASSERT_EQ(reply.turn, wire::AskLookReply::kLook);
    wire::HandInLook hand_in;
    hand_in.ticket = reply.ticket;
    hand_in.files = sealed ? 11 : 10;  // either may change, or is not there
    EXPECT_EQ(looker->HandInLook(hand_in, MemoryOf(10, sealed)).code(), Code::kInvalidArgument);
    EXPECT_EQ(Ask(*other, Question(1)).turn, wire::AskLookReply::kAlone);
  }
  // One that leaves less than half of the budget to samples.
  name_ += "+";
  const wire::AskLookReply reply = Ask(*looker, Question(0));
  wire::HandInLook hand_in;
  hand_in.ticket = reply.ticket;
  hand_in.files = engine_->budget() / 2 / sizeof(SeenFile) + 4096;
  EXPECT_EQ(looker->HandInLook(hand_in, MemoryOf(hand_in.files, true)).code(),
            Code::kResourceExhausted);
  EXPECT_EQ(Ask(*other, Question(1)).turn, wire::AskLookReply::kAlone);
  EXPECT_EQ(Metric("forebay_daemon_look_bytes"), 0u);
}

}  // namespace
}  // namespace forebay
