// Shares of a whole cluster in virtual time: controllers, agents, buckets, and a source that serves
// reads in the order in which they came.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <deque>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "base/rng.h"
#include "control/controller.h"
#include "control/memory_store.h"
#include "core/rate_limit.h"

namespace forebay::control {
namespace {

constexpr Nanos kStep = 5 * kMilli;
constexpr Nanos kRound = 100 * kMilli;
constexpr Nanos kSharesLease = 2 * kSecond;
constexpr double kRead = 131'072;
constexpr size_t kReadsInFlight = 64;
constexpr double kSourceRate = 60e6;
struct SharesTest : ::testing::Test {
  // A daemon: its agent, its candidate, and one job that takes what it gets.
  struct Node {
    Node(const MemoryStoreState& state, size_t number, std::string its_job, Nanos its_delay)
        : store(state),
          agent(store, AgentOf(number)),
          controller(store, ControllerOf(number)),
          job(std::move(its_job)),
          delay(its_delay) {}
    static AgentOptions AgentOf(size_t number) {
      AgentOptions options;
      options.node = "n" + std::to_string(number);
      options.lease = kSharesLease;
      return options;
    }
    static ControllerOptions ControllerOf(size_t number) {
      ControllerOptions options;
      options.name = "n" + std::to_string(number);
      options.lease = kSharesLease;
      options.capacity = CapacityOptions::OfSeveralNodes();
      return options;
    }

    MemoryStore store;
    StageAgent agent;
    Controller controller;
    const std::string job;
    const Nanos delay;  // to the store, and back
    RateLimiter limiter;
    bool wants = true;
    bool alive = true;
    bool leads = false;
    size_t in_flight = 0;
    double read = 0;  // bytes
    double before = 0;
    Nanos looked = 0;
    Nanos round_at = 0;
    std::deque<std::pair<Nanos, StageSummary>> told;   // on their way to the store
    std::deque<std::pair<Nanos, RateLimits>> decided;  // on their way from there
  };

  void AddNodes(const std::string& jobs, Nanos delay) {
    for (size_t i = 0; i < jobs.size(); ++i) {
      nodes_.push_back(std::make_unique<Node>(state_, i, std::string(1, jobs[i]), delay));
      nodes_.back()->round_at = static_cast<Nanos>(random_.Next() % kRound);
    }
  }
  void SetShares(std::map<std::string, double> shares) {
    shares_ = std::move(shares);
    Policy policy;
    for (const auto& [job, share] : shares_) {
      JobRule& rule = policy.jobs.emplace_back();
      rule.match = job;
      rule.share = share;
    }
    MemoryStore store(state_);
    ASSERT_TRUE(StorePolicy(store, "/forebay/", policy).ok());
  }

  StageSummary Look(Node& node, Nanos now) {
    StageSummary summary;
    summary.job = node.job;
    const double seconds = static_cast<double>(now - std::exchange(node.looked, now)) / kSecond;
    const double rate = (node.read - std::exchange(node.before, node.read)) / seconds;
    summary.delivered = {rate, rate / kRead};
    const bool held = static_cast<bool>(node.limiter.TakeHeldBack());
    summary.demand = {EstimateDemand(rate, held || node.wants),
                      EstimateDemand(rate / kRead, false)};
    summary.read_bytes = static_cast<uint64_t>(node.read);
    return summary;
  }

  void Step() {
    clock_.Advance(kStep);
    const Nanos now = clock_.Now();
    for (const auto& each : nodes_) {
      Node& node = *each;
      if (!node.alive) continue;
      if (now >= node.round_at) {
        // Never quite a round: nodes are not in step.
        node.round_at = now + kRound + static_cast<Nanos>(random_.Next() % (20 * kMilli));
        node.told.emplace_back(now + node.delay, Look(node, now));
      }
      while (!node.told.empty() && node.told.front().first <= now) {
        const StageSummary summary = std::move(node.told.front().second);
        node.told.pop_front();
        (void)node.agent.Step({&summary, 1}, now);
        const auto round = node.controller.Round(now);
        node.leads = round && round->leads;
        if (node.leads) (void)node.agent.Step({&summary, 1}, now);
        node.decided.emplace_back(now + node.delay, node.agent.LimitsFor(node.job));
      }
      while (!node.decided.empty() && node.decided.front().first <= now) {
        RateLimits limits = node.decided.front().second;
        const auto too_much = too_much_.find(node.job);
        if (too_much != too_much_.end()) limits.bytes_per_s *= too_much->second;
        node.limiter.SetLimits(limits, now);
        node.decided.pop_front();
      }
    }
    // Who asks first in a step is chance.
    const size_t first = random_.Next() % nodes_.size();
    for (bool more = true; std::exchange(more, false);) {
      for (size_t i = 0; i < nodes_.size(); ++i) {
        Node& node = *nodes_[(first + i) % nodes_.size()];
        if (!node.alive || !node.wants || node.in_flight == kReadsInFlight) continue;
        if (node.limiter.Admit(static_cast<uint64_t>(kRead), now) > now) continue;
        ++node.in_flight;
        queue_.push_back(&node);
        more = true;
      }
    }
    served_ += source_rate_ * static_cast<double>(kStep) / kSecond;
    while (served_ >= kRead && !queue_.empty()) {
      served_ -= kRead;
      queue_.front()->read += kRead;
      --queue_.front()->in_flight;
      queue_.pop_front();
    }
    if (queue_.empty()) served_ = std::min(served_, kRead);
  }

  std::map<std::string, double> Read() const {
    std::map<std::string, double> read;
    for (const auto& node : nodes_) read[node->job] += node->read;
    return read;
  }
  // Runs for a second; by how much the job that is farthest from its share is off.
  double Second() {
    const auto before = Read();
    for (Nanos passed = 0; passed < kSecond; passed += kStep) Step();
    const auto after = Read();
    double total = 0;
    double weights = 0;
    for (const auto& [job, share] : shares_) {
      total += after.at(job) - before.at(job);
      weights += share;
    }
    total_ = total;
    double worst = 0;
    for (const auto& [job, share] : shares_) {
      const double fair = total * share / weights;
      worst = std::max(worst, std::abs(after.at(job) - before.at(job) - fair) / fair);
    }
    return worst;
  }
  void Expect(int seconds, const char* when) {
    for (int i = 0; i < seconds; ++i) {
      // Of a tenth of the source a second is 46 reads: one more or less is 2 % of it.
      EXPECT_LE(Second(), 0.06) << when << ", second " << i;
      EXPECT_GE(total_, 0.93 * source_rate_) << when << ", second " << i;
    }
  }
  void Pass(Nanos time) {
    for (Nanos passed = 0; passed < time; passed += kStep) Step();
  }

  ManualClock clock_;
  MemoryStoreState state_{clock_};
  SplitMix64 random_{1};
  std::vector<std::unique_ptr<Node>> nodes_;
  std::map<std::string, double> shares_;
  std::deque<Node*> queue_;
  std::map<std::string, double> too_much_;  // by job: its limits are off by this factor
  double served_ = 0;
  double source_rate_ = kSourceRate;
  double total_ = 0;
};

TEST_F(SharesTest, TwoNodesKeepTheirShares) {
  AddNodes("ab", 5 * kMilli);
  SetShares({{"a", 3}, {"b", 1}});
  Pass(3 * kSecond);
  Expect(20, "both want more");
}

TEST_F(SharesTest, FourNodesKeepTheirShares) {
  AddNodes("aabb", 5 * kMilli);
  SetShares({{"a", 3}, {"b", 1}});
  Pass(3 * kSecond);
  Expect(20, "all want more");
}

TEST_F(SharesTest, FourJobsKeepTheirShares) {
  AddNodes("abcd", 5 * kMilli);
  SetShares({{"a", 4}, {"b", 3}, {"c", 2}, {"d", 1}});
  Pass(3 * kSecond);
  Expect(20, "all want more");
}

TEST_F(SharesTest, AlsoWhereTheStoreIsFar) {
  AddNodes("aabb", 40 * kMilli);
  SetShares({{"a", 3}, {"b", 1}});
  Pass(3 * kSecond);
  Expect(20, "all want more");
}

TEST_F(SharesTest, WhenANodesDemandFallsAndReturns) {
  for (const size_t which : {0, 2}) {
    SCOPED_TRACE(which);
    nodes_.clear();
    queue_.clear();
    AddNodes("aabb", 5 * kMilli);
    SetShares({{"a", 3}, {"b", 1}});
    Pass(8 * kSecond);
    // The source's queue gets shorter, and longer again: it is the second that comes after the
    // change in which that shows.
    nodes_[which]->wants = false;
    Pass(kSecond);
    EXPECT_LE(Second(), 0.1);
    Expect(5, "one wants nothing");
    nodes_[which]->wants = true;
    Pass(kSecond);
    EXPECT_LE(Second(), 0.1);
    Expect(5, "it wants more again");
  }
}

TEST_F(SharesTest, WhatAJobLeavesTheOtherHasWithinASecond) {
  AddNodes("ab", 5 * kMilli);
  SetShares({{"a", 3}, {"b", 1}});
  Pass(8 * kSecond);
  nodes_[0]->wants = false;
  Pass(kSecond);
  for (int i = 0; i < 5; ++i) {
    const double before = nodes_[1]->read;
    Pass(kSecond);
    EXPECT_GE(nodes_[1]->read - before, 0.93 * source_rate_) << "second " << i;
  }
  nodes_[0]->wants = true;
  Pass(2 * kSecond);
  Expect(5, "it wants more again");
}

TEST_F(SharesTest, TheLeadersNodeDies) {
  AddNodes("aabb", 5 * kMilli);
  SetShares({{"a", 3}, {"b", 1}});
  Pass(8 * kSecond);
  const auto leader =
      std::find_if(nodes_.begin(), nodes_.end(), [](const auto& node) { return node->leads; });
  ASSERT_NE(leader, nodes_.end());
  (*leader)->alive = false;
  Pass(kSharesLease + kSecond);
  Expect(6, "another one leads");
}

// A limit that lets through more than it says, as an estimate that is too high does.
TEST_F(SharesTest, AnErrorThatStaysIsPaidBack) {
  AddNodes("ab", 5 * kMilli);
  SetShares({{"a", 3}, {"b", 1}});
  too_much_["b"] = 1.05;
  Pass(5 * kSecond);
  double sum = 0;
  for (int i = 0; i < 10; ++i) sum += Second();
  EXPECT_LE(sum / 10, 0.03);  // without it: 0.05
}

// What is owed is paid by those who got too much, and no more than a little of it is kept.
TEST(ShareLedger, OwesWhatAJobGotTooLittle) {
  ShareLedger ledger;
  const auto pass = [&](double a, double b, double b_wants) {
    const std::array<ShareLedger::Entry, 2> entries = {
        ShareLedger::Entry{"a", a, {.demand = kUnlimited, .weight = 3}},
        ShareLedger::Entry{"b", b, {.demand = b_wants, .weight = 1}}};
    ledger.Observe(entries, 100 * kMilli);
  };
  pass(75, 25, kUnlimited);
  EXPECT_NEAR(ledger.Correction("a"), 0, 1e-9);
  pass(76, 24, kUnlimited);
  EXPECT_NEAR(ledger.Correction("a"), -1 / 1.5, 1e-6);
  EXPECT_NEAR(ledger.Correction("b"), 1 / 1.5, 1e-6);
  EXPECT_EQ(ledger.Correction("c"), 0);
  for (int i = 0; i < 100; ++i) pass(100, 0, kUnlimited);
  EXPECT_NEAR(ledger.Correction("b"), 0.06 * 250 / 1.5, 1e-6);
  pass(100, 0, 0);  // and now it wants nothing
  EXPECT_EQ(ledger.Correction("b"), 0);
  for (int i = 0; i < 800; ++i) pass(75, 25, kUnlimited);
  EXPECT_NEAR(ledger.Correction("a"), 0, 1e-3);
}

}  // namespace
}  // namespace forebay::control
