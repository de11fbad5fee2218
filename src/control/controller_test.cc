#include "control/controller.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdlib>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "base/rng.h"
#include "control/etcd_process.h"
#include "control/etcd_store.h"
#include "control/memory_store.h"

namespace forebay::control {
namespace {

constexpr Nanos kTick = 250 * kMilli;
constexpr Nanos kLease = 5 * kSecond;

// A node that reads as much as it wants, may, and gets.
struct Node {
  Node(const MemoryStoreState& state, const std::string& name, std::string its_job)
      : store(state), agent(store, Options(name)), job(std::move(its_job)) {}
  static AgentOptions Options(const std::string& name) {
    AgentOptions options;
    options.node = name;
    options.lease = kLease;
    return options;
  }

  MemoryStore store;
  StageAgent agent;
  std::string job;
  double wants = kUnlimited;
  double got = 0;
  bool alive = true;
};

struct Brain {
  Brain(const MemoryStoreState& state, const std::string& name)
      : store(state), controller(store, Options(name)) {}
  static ControllerOptions Options(const std::string& name) {
    ControllerOptions options;
    options.name = name;
    options.lease = kLease;
    return options;
  }

  MemoryStore store;
  Controller controller;
  bool alive = true;
  bool leads = false;
};

// Nodes, candidates and a source of `capacity`, in virtual time.
class ControlTest : public ::testing::Test {
 protected:
  Node& AddNode(const std::string& name, const std::string& job) {
    return *nodes_.emplace_back(std::make_unique<Node>(state_, name, job));
  }
  Brain& AddBrain(const std::string& name) {
    return *brains_.emplace_back(std::make_unique<Brain>(state_, name));
  }
  void SetShares(double a, double b) {
    Policy policy;
    for (const auto& [name, share] : {std::pair<std::string, double>("a", a), {"b", b}}) {
      JobRule& rule = policy.jobs.emplace_back();
      rule.match = name;
      rule.share = share;
    }
    MemoryStore store(state_);
    ASSERT_TRUE(StorePolicy(store, "/forebay/", policy).ok());
  }

  void Tick() {
    clock_.Advance(kTick);
    const Nanos now = clock_.Now();
    // The source serves what the limits let through, all alike when that is too much.
    double asked = 0;
    for (const auto& node : nodes_) {
      if (!node->alive) continue;
      node->got = std::min(node->wants, node->agent.LimitsFor(node->job).bytes_per_s);
      node->got = std::min(node->got, capacity_ * 2);
      asked += node->got;
    }
    const double cut = std::min(1.0, capacity_ / std::max(asked, 1.0));
    for (const auto& node : nodes_) {
      if (!node->alive) continue;
      node->got *= cut;
      StageSummary summary;
      summary.job = node->job;
      summary.delivered = {node->got, node->got / 1000};
      const double demand = EstimateDemand(node->got, node->got < node->wants);
      summary.demand = {demand, demand / 1000};
      last_ = node->agent.Step({&summary, 1}, now);
    }
    for (const auto& brain : brains_) {
      if (!brain->alive) continue;
      const Result<RoundReport> report = brain->controller.Round(now);
      brain->leads = report && report->leads;
      if (report) report_ = *report;
    }
  }
  void Run(Nanos time) {
    for (Nanos passed = 0; passed < time; passed += kTick) Tick();
  }
  // Ticks until `done`; how long it took, kNeverReady after a minute.
  template <typename Done>
  Nanos Until(Done done) {
    for (Nanos passed = 0; passed < 60 * kSecond; passed += kTick) {
      if (done()) return passed;
      Tick();
    }
    return kNeverReady;
  }

  ManualClock clock_;
  MemoryStoreState state_{clock_};
  std::vector<std::unique_ptr<Node>> nodes_;
  std::vector<std::unique_ptr<Brain>> brains_;
  double capacity_ = 1e9;
  RoundReport report_;
  Status last_;
};

TEST_F(ControlTest, AJobThatIsAloneHasNoLimitButItsMaximum) {
  AddBrain("one");
  Node& first = AddNode("n1", "a");
  Node& second = AddNode("n2", "a");
  Run(5 * kSecond);
  EXPECT_EQ(first.agent.LimitsFor("a"), RateLimits());
  Policy policy;
  policy.jobs.emplace_back().max_bandwidth = 1e8;
  MemoryStore store(state_);
  ASSERT_TRUE(StorePolicy(store, "/forebay/", policy).ok());
  Run(kSecond);
  const double sum =
      first.agent.LimitsFor("a").bytes_per_s + second.agent.LimitsFor("a").bytes_per_s;
  EXPECT_NEAR(sum, 1e8, 1e6);
}

TEST_F(ControlTest, APolicysMaximumIsNotTheSourcesCapacity) {
  AddBrain("one");
  Node& held = AddNode("n1", "a");
  Node& other = AddNode("n2", "b");
  other.wants = 2e8;
  Policy policy;
  JobRule& rule = policy.jobs.emplace_back();
  rule.match = "a";
  rule.max_bandwidth = 1e8;
  MemoryStore store(state_);
  ASSERT_TRUE(StorePolicy(store, "/forebay/", policy).ok());
  Run(20 * kSecond);
  EXPECT_NEAR(held.got, 1e8, 1e6);
  EXPECT_NEAR(other.got, 2e8, 1);
  other.wants = 8e8;
  Run(5 * kSecond);
  EXPECT_NEAR(other.got, 8e8, 1e7);
}

TEST_F(ControlTest, TwoStagesGetTheirShares) {
  SetShares(3, 1);
  AddBrain("one");
  Node& a = AddNode("n1", "a");
  Node& b = AddNode("n2", "b");
  Run(10 * kSecond);
  EXPECT_NEAR(a.got / 0.75e9, 1, 0.05);
  EXPECT_NEAR(b.got / 0.25e9, 1, 0.05);
  EXPECT_EQ(a.agent.health().state, AgentState::kFollowing) << a.agent.health().text;
  ASSERT_TRUE(a.agent.policy());
  EXPECT_EQ(a.agent.policy()->RuleFor("a").share, 3);
  EXPECT_EQ(report_.stages, 2u);
  SetShares(1, 1);
  Run(2 * kSecond);
  EXPECT_NEAR(a.got / 0.5e9, 1, 0.05);
  EXPECT_EQ(a.agent.policy()->RuleFor("a").share, 1);
}

TEST_F(ControlTest, AnIdleJobsShareIsTakenUpAndGivenBack) {
  SetShares(3, 1);
  AddBrain("one");
  Node& a = AddNode("n1", "a");
  Node& b = AddNode("n2", "b");
  Run(10 * kSecond);
  a.wants = 0;
  EXPECT_LE(Until([&] { return b.got > 0.9e9; }), kSecond);
  a.wants = kUnlimited;
  EXPECT_LE(Until([&] { return a.got > 0.7e9; }), kSecond);
}

TEST_F(ControlTest, ADeadStagesShareGoesToTheOthers) {
  SetShares(3, 1);
  AddBrain("one");
  Node& a = AddNode("n1", "a");
  Node& b = AddNode("n2", "b");
  Run(10 * kSecond);
  a.alive = false;
  const Nanos took = Until([&] { return b.got > 0.9e9; });
  EXPECT_GT(took, kSecond);  // not before its lease ended
  EXPECT_LE(took, kLease + 2 * kSecond);
  EXPECT_EQ(report_.stages, 1u);
}

TEST_F(ControlTest, AStageThatLeavesGivesItsShareAtOnce) {
  SetShares(3, 1);
  AddBrain("one");
  Node& a = AddNode("n1", "a");
  Node& b = AddNode("n2", "b");
  Run(10 * kSecond);
  a.alive = false;
  EXPECT_TRUE(a.agent.Leave().ok());
  EXPECT_LE(Until([&] { return b.got > 0.9e9; }), kSecond);
}

TEST_F(ControlTest, AnotherControllerTakesOver) {
  SetShares(3, 1);
  Brain& one = AddBrain("one");
  Brain& two = AddBrain("two");
  Node& a = AddNode("n1", "a");
  Node& b = AddNode("n2", "b");
  Run(10 * kSecond);
  EXPECT_TRUE(one.leads);
  EXPECT_FALSE(two.leads);
  const double before = a.got;
  one.alive = false;
  const Nanos gone =
      Until([&] { return a.agent.health().state == AgentState::kNoController || two.leads; });
  EXPECT_LE(gone, kLease + kTick);
  EXPECT_LE(Until([&] { return two.leads; }), kLease + kSecond);
  for (int i = 0; i < 8; ++i) {
    Tick();
    EXPECT_NEAR(a.got, before, 0.1 * before);  // the estimate was taken over: no jump
  }
  b.wants = 0;
  EXPECT_LE(Until([&] { return a.got > 0.95e9; }), kSecond);
  // The first one comes back and follows; its old lead is worth nothing.
  one.alive = true;
  Run(kSecond);
  EXPECT_FALSE(one.leads);
  EXPECT_TRUE(two.leads);
  EXPECT_TRUE(two.controller.Resign().ok());
  two.alive = false;
  Run(2 * kTick);
  EXPECT_TRUE(one.leads);
}

TEST_F(ControlTest, WithoutAControllerTheLastDecisionHolds) {
  SetShares(3, 1);
  Brain& one = AddBrain("one");
  Node& a = AddNode("n1", "a");
  AddNode("n2", "b");
  Run(10 * kSecond);
  one.alive = false;
  Tick();  // what it decided last
  const RateLimits before = a.agent.LimitsFor("a");
  ASSERT_LT(before.bytes_per_s, kUnlimited);
  Run(20 * kSecond);
  EXPECT_EQ(a.agent.LimitsFor("a"), before);
  EXPECT_EQ(a.agent.health().state, AgentState::kNoController);
  EXPECT_NE(a.agent.health().text.find("last decision"), std::string::npos);
  EXPECT_TRUE(last_.ok());
}

TEST_F(ControlTest, WithoutTheStoreTheLastDecisionHoldsAndItComesBack) {
  SetShares(3, 1);
  Brain& one = AddBrain("one");
  Node& a = AddNode("n1", "a");
  Node& b = AddNode("n2", "b");
  Run(10 * kSecond);
  const RateLimits before = a.agent.LimitsFor("a");
  state_.SetDown(true);
  Run(30 * kSecond);  // leases end meanwhile
  EXPECT_EQ(a.agent.LimitsFor("a"), before);
  EXPECT_EQ(a.agent.health().state, AgentState::kNoStore);
  EXPECT_NE(a.agent.health().text.find("is down"), std::string::npos) << a.agent.health().text;
  EXPECT_LE(a.agent.health().since, 11 * kSecond);
  EXPECT_FALSE(last_.ok());
  EXPECT_FALSE(one.leads);
  state_.SetDown(false);
  EXPECT_LE(Until([&] { return a.agent.health().state == AgentState::kFollowing && one.leads; }),
            3 * kSecond);
  Run(10 * kSecond);
  EXPECT_NEAR(a.got / 0.75e9, 1, 0.05);
  EXPECT_NEAR(b.got / 0.25e9, 1, 0.05);
}

TEST_F(ControlTest, TheSourceIsMeasuredAndReopens) {
  SetShares(3, 1);
  AddBrain("one");
  Node& a = AddNode("n1", "a");
  Node& b = AddNode("n2", "b");
  Run(10 * kSecond);
  capacity_ = 1e8;
  Run(8 * kSecond);
  EXPECT_NEAR(a.got / 0.75e8, 1, 0.1);
  capacity_ = 2e9;
  Run(12 * kSecond);
  EXPECT_NEAR((a.got + b.got) / 2e9, 1, 0.06);
  EXPECT_NEAR(a.got / b.got, 3, 0.3);
}

TEST_F(ControlTest, NothingIsWrittenWhenNothingChanged) {
  Brain& one = AddBrain("one");
  AddNode("n1", "a").wants = 1000;
  AddNode("n2", "a").wants = 1000;
  Run(5 * kSecond);
  ASSERT_TRUE(one.leads);
  EXPECT_EQ(report_.written, 0u);
}

TEST_F(ControlTest, TheLeaderMakesTheStoreForget) {
  AddBrain("one");
  AddNode("n1", "a");
  MemoryStore store(state_);
  Run(30 * kSecond);
  EXPECT_TRUE((*store.Watch("/forebay/", 2))->Poll(0));
  Run(70 * kSecond);
  EXPECT_EQ((*store.Watch("/forebay/", 2))->Poll(0).error().code(), Code::kChanged);
  const int64_t before = store.Range("")->revision;
  Run(50 * kSecond);
  const auto watch = store.Watch("/forebay/", before);
  EXPECT_TRUE((*watch)->Poll(0)) << "a minute is kept";
}

// etcd forgets for all its users at once.
TEST_F(ControlTest, TheHistoryOfASharedStoreIsLeftAlone) {
  state_.SetShared(true);
  AddBrain("one");
  AddNode("n1", "a");
  MemoryStore store(state_);
  Run(150 * kSecond);
  EXPECT_TRUE((*store.Watch("/forebay/", 2))->Poll(0));
}

TEST_F(ControlTest, ASummaryThatStaysIsNotWrittenAgain) {
  AddBrain("one");
  Node& a = AddNode("n1", "a");
  a.wants = 1000;
  Run(5 * kSecond);
  MemoryStore store(state_);
  const int64_t before = store.Range("")->revision;
  Run(20 * kSecond);  // several leases
  EXPECT_EQ(store.Range("")->revision, before);
  a.wants = 2000;
  Run(kSecond);
  EXPECT_GT(store.Range("")->revision, before);
}

TEST_F(ControlTest, AStageThatWasStoppedComesBack) {
  AddBrain("one");
  Node& a = AddNode("n1", "a");
  a.wants = 1000;  // nothing changes but the lease
  Run(5 * kSecond);
  a.alive = false;
  Run(8 * kSecond);
  EXPECT_EQ(report_.stages, 0u);
  a.alive = true;
  Run(kSecond);
  EXPECT_EQ(report_.stages, 1u);
}

TEST_F(ControlTest, ABadPolicyLeavesTheOneBeforeInForce) {
  SetShares(3, 1);
  AddBrain("one");
  Node& a = AddNode("n1", "a");
  Node& b = AddNode("n2", "b");
  Run(10 * kSecond);
  EXPECT_TRUE(report_.policy.ok());
  MemoryStore store(state_);
  ASSERT_TRUE(store.Put("/forebay/live/policy", "{\"version\":1,\"jobs\":3}").ok());
  ASSERT_TRUE(store.Put("/forebay/live/stages/n3/c", "nonsense").ok());
  // In the mean: while the capacity is probed, the larger one has what is tried beyond it.
  double got_a = 0;
  double got_b = 0;
  for (Nanos passed = 0; passed < 5 * kSecond; passed += kTick) {
    Tick();
    got_a += a.got;
    got_b += b.got;
  }
  EXPECT_NE(report_.policy.message().find("jobs"), std::string::npos);
  EXPECT_EQ(report_.unreadable, 1u);
  EXPECT_NEAR(got_a / got_b, 3, 0.2);
  ASSERT_TRUE(store.Delete("/forebay/live/policy").ok());
  Run(5 * kSecond);
  EXPECT_TRUE(report_.policy.ok());
  EXPECT_NEAR(a.got / b.got, 1, 0.1);
}

TEST_F(ControlTest, AJobThatEndedIsForgotten) {
  AddBrain("one");
  Node& a = AddNode("n1", "a");
  Run(5 * kSecond);
  a.job = "next";
  Run(kSecond);
  EXPECT_EQ(report_.stages, 1u);
  MemoryStore store(state_);
  EXPECT_EQ(store.Range("/forebay/live/stages/")->entries[0].key, "/forebay/live/stages/n1/next");
}

TEST(ControlLayout, KeysAndBack) {
  const ControlLayout layout("/p/");
  const std::string key = layout.Stage("no/de%", std::string("j\0b\xff", 4));
  EXPECT_EQ(key, "/p/live/stages/no%2fde%25/j%00b%ff");
  const auto names = layout.StageOf(key);
  ASSERT_TRUE(names);
  EXPECT_EQ(names->first, "no/de%");
  EXPECT_EQ(names->second, std::string("j\0b\xff", 4));
  for (const char* bad : {"/p/live/stages/a", "/p/live/policy", "/p/live/stages/a/b/c",
                          "/p/live/stages/a/%2", "/p/live/stages/a/%zz"}) {
    EXPECT_FALSE(layout.StageOf(bad)) << bad;
  }
  // Frozen: nodes of different builds must agree.
  EXPECT_EQ(layout.Page(ControlLayout::PageOf("node-17")), "/p/decisions/01");
}

TEST(ControlLayout, SummariesAndPages) {
  StageSummary summary;
  summary.node = "n";
  summary.job = "j";
  summary.demand = {kUnlimited, 12.5};
  summary.delivered = {1e9, 3};
  summary.stall_share = 0.25;
  summary.capacity = 7;
  EXPECT_EQ(WriteSummary(summary),
            R"({"capacity":7,"demand":[null,12.5],"got":[1000000000,3],"stall":0.25})");
  const auto again = ParseSummary("n", "j", WriteSummary(summary));
  ASSERT_TRUE(again);
  EXPECT_EQ(again->demand, summary.demand);
  EXPECT_EQ(again->delivered, summary.delivered);
  EXPECT_EQ(again->stall_share, 0.25);
  EXPECT_EQ(again->capacity, 7);
  summary.stall_share = 1.0 / 3;
  summary.capacity = 123456789.123;
  EXPECT_EQ(WriteSummary(summary),
            R"({"capacity":123460000,"demand":[null,12.5],"got":[1000000000,3],"stall":0.33333})");
  for (const char* bad : {"", "{}", "[]", R"({"demand":[1],"got":[1,2],"stall":0,"capacity":0})",
                          R"({"demand":[1,-1],"got":[1,2],"stall":0,"capacity":0})"}) {
    EXPECT_EQ(ParseSummary("n", "j", bad).error().code(), Code::kDataLoss) << bad;
  }
  DecisionPage page;
  page.policy = 12;
  page.limits["n\xff"]["j"] = {1, kUnlimited};
  page.limits["m"]["j/k"] = {2, 3};
  const auto same = ParsePage(WritePage(page));
  ASSERT_TRUE(same) << same.error().message();
  EXPECT_EQ(*same, page);
  EXPECT_FALSE(ParsePage(R"({"policy":1,"limits":{"n":[1]}})"));
}

// A real etcd that is killed and restarted at random moments, under a controller, a candidate and
// two agents on threads of their own: no call lasts longer than its deadline and the machine's
// hiccups, decisions are kept, and all is well in the end.
class EtcdKillTest : public ::testing::TestWithParam<uint64_t> {};

TEST_P(EtcdKillTest, EveryoneGoesOn) {
  using testing::EtcdProcess;
  if (!EtcdProcess::Installed()) GTEST_SKIP() << "etcd is not installed: apt install etcd-server";
  const auto etcd = EtcdProcess::Start();
  ASSERT_NE(etcd, nullptr) << "etcd does not start";
  constexpr Nanos kDeadline = kSecond;
  constexpr Nanos kSlack = 4 * kSecond;  // five calls a step; sanitizers and a busy machine
  const auto store = [&] {
    EtcdOptions options;
    options.endpoints = {etcd->endpoint()};
    options.deadline = kDeadline;
    return *EtcdStore::Make(options);
  };
  const auto sleep = [](Nanos time) {
    std::this_thread::sleep_for(std::chrono::nanoseconds(time));
  };
  struct Seen {
    Nanos longest = 0;  // of one Step or Round
    int good = 0;
    int bad = 0;
    int lost = 0;                   // decisions that were forgotten
    std::atomic<bool> fine{false};  // read while the threads run
  };
  std::vector<Seen> seen(4);
  {
    std::vector<std::jthread> threads;  // joined before what they use goes
    for (size_t i = 0; i < 2; ++i) {
      threads.emplace_back([&, i](std::stop_token stop) {
        const auto own = store();
        AgentOptions options;
        options.node = StrCat("n", i);
        options.lease = 3 * kSecond;
        StageAgent agent(*own, options);
        StageSummary summary;
        summary.job = StrCat("job-", i);  // one that is alone has no limit
        summary.demand = {kUnlimited, kUnlimited};
        summary.delivered = {1e8, 1e3};
        summary.capacity = 1e8;
        bool decided = false;
        while (!stop.stop_requested()) {
          const Nanos begin = SteadyClock().Now();
          const Status status = agent.Step({&summary, 1}, begin);
          seen[i].longest = std::max(seen[i].longest, SteadyClock().Now() - begin);
          ++(status.ok() ? seen[i].good : seen[i].bad);
          const bool limited = agent.LimitsFor(summary.job).bytes_per_s < kUnlimited;
          if (decided && !limited) ++seen[i].lost;
          decided = decided || limited;
          seen[i].fine = decided && agent.health().state == AgentState::kFollowing;
          sleep(20 * kMilli);
        }
      });
    }
    for (size_t i = 2; i < 4; ++i) {
      threads.emplace_back([&, i](std::stop_token stop) {
        const auto own = store();
        ControllerOptions options;
        options.name = StrCat("c", i);
        options.lease = 3 * kSecond;
        Controller controller(*own, options);
        while (!stop.stop_requested()) {
          const Nanos begin = SteadyClock().Now();
          const Result<RoundReport> report = controller.Round(begin);
          seen[i].longest = std::max(seen[i].longest, SteadyClock().Now() - begin);
          ++(report ? seen[i].good : seen[i].bad);
          seen[i].fine = report && report->leads && report->stages == 2;
          sleep(20 * kMilli);
        }
      });
    }
    SplitMix64 rng(GetParam());
    sleep(static_cast<Nanos>(rng.Below(400)) * kMilli);
    for (int i = 0; i < 4; ++i) {
      etcd->Kill();
      sleep(static_cast<Nanos>(rng.Below(300)) * kMilli);
      etcd->Launch();
      sleep(static_cast<Nanos>(rng.Below(600)) * kMilli);
    }
    ASSERT_TRUE(etcd->AwaitReady());
    const auto all_well = [&] {
      return seen[0].fine && seen[1].fine && seen[2].fine != seen[3].fine;
    };
    // Leases of before the last kill end, retries come round.
    for (int i = 0; i < 300 && !all_well(); ++i) sleep(100 * kMilli);
    EXPECT_TRUE(all_well()) << "agents and one of two controllers";
  }
  for (size_t i = 0; i < seen.size(); ++i) {
    EXPECT_LE(seen[i].longest, kDeadline + kSlack) << i;
    EXPECT_GT(seen[i].good, 0) << i;
    EXPECT_GT(seen[i].bad, 0) << i << ": the kills went unnoticed";
    EXPECT_EQ(seen[i].lost, 0) << i;
  }
}

INSTANTIATE_TEST_SUITE_P(Seeds, EtcdKillTest, ::testing::Range(uint64_t{1}, uint64_t{6}));

}  // namespace
}  // namespace forebay::control
