#include "core/home_plan.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <vector>

#include "core/directory.h"

namespace forebay {
namespace {

constexpr uint32_t kSamples = 2000;

DatasetUse UseBy(uint32_t rank, uint32_t world, uint64_t epochs) {
  DatasetUse use;
  use.sampler.size = kSamples;
  use.sampler.seed = 7;
  use.sampler.rank = rank;
  use.sampler.world = world;
  use.epochs = epochs;
  return use;
}

std::vector<NodeTiers> Rooms(uint32_t nodes, uint64_t each) {
  return std::vector<NodeTiers>(nodes, {each, 0});
}

peer::View ViewOf(uint32_t nodes, uint64_t room) {
  peer::View view{.version = 1, .nodes = nodes, .members = {}};
  for (uint32_t n = 0; n < nodes; ++n) {
    peer::Member member;
    member.node = n;
    member.memory = room;
    view.members.push_back(member);
  }
  return view;
}

class StopAfter final : public PlanInterrupt {
 public:
  explicit StopAfter(int asks) : left_(asks) {}
  bool Stopped() const override { return left_ == 0 || --left_ == 0; }

 private:
  mutable int left_;
};

TEST(HomePlan, EveryNodeComputesTheSame) {
  const std::vector<uint32_t> lengths(kSamples, 100);
  std::vector<std::shared_ptr<const HomePlan>> plans;
  for (uint32_t node = 0; node < 4; ++node) {
    // Two ranks a node: any of them tells the same.
    DatasetUse use = UseBy(2 * node + node % 2, 8, 8);
    use.sampler.ranks_per_node = 2;
    const auto spec = HomePlanSpec::For(use, node, Rooms(4, kSamples * 30));
    ASSERT_TRUE(spec);
    plans.push_back(*PlanHomes(*spec, lengths, node));
    EXPECT_EQ(plans.back()->digest, plans.front()->digest);
    EXPECT_EQ(plans.back()->homes, plans.front()->homes);
    EXPECT_EQ(std::ranges::count(plans.back()->homes, HomePlan::kNowhere), 0);
    EXPECT_LE(HomePlanBytes(*spec), uint64_t{192} * kSamples);
  }
  // Copies are each node's own matter, and take what is left beside its homes.
  EXPECT_NE(plans[0]->replicas, plans[1]->replicas);
  EXPECT_EQ(std::ranges::count(plans[0]->replicas, true),
            kSamples * 30 / 100 - std::ranges::count(plans[0]->homes, uint16_t{0}));
}

TEST(HomePlan, AnotherOrderRoomOrEndIsAnotherPlan) {
  const std::vector<uint32_t> lengths(kSamples, 100);
  const auto digest = [&](DatasetUse use, uint64_t room) {
    return (*PlanHomes(*HomePlanSpec::For(use, 0, Rooms(4, room)), lengths, 0))->digest;
  };
  const DatasetUse use = UseBy(0, 4, 8);
  DatasetUse other = use;
  other.sampler.seed = 8;
  EXPECT_NE(digest(other, 60000), digest(use, 60000));
  EXPECT_NE(digest(UseBy(0, 4, 9), 60000), digest(use, 60000));
  EXPECT_NE(digest(use, 70000), digest(use, 60000));
  // Where in the horizon it is does not matter: who comes back has the plan of before.
  other = use;
  other.epoch = 5;
  EXPECT_EQ(digest(other, 60000), digest(use, 60000));
}

TEST(HomePlan, ThereIsNoneWhereTheUseSaysTooLittle) {
  EXPECT_TRUE(HomePlanSpec::For(UseBy(1, 4, 8), 1, Rooms(4, 1)));
  EXPECT_FALSE(HomePlanSpec::For(UseBy(1, 4, 0), 1, Rooms(4, 1)));  // no end
  EXPECT_FALSE(HomePlanSpec::For(UseBy(1, 4, 8), 0, Rooms(4, 1)));  // another node's rank
  EXPECT_FALSE(HomePlanSpec::For(UseBy(1, 4, 8), 1, Rooms(3, 1)));
  EXPECT_FALSE(HomePlanSpec::For(UseBy(0, 1, 8), 0, Rooms(1, 1)));
  DatasetUse use = UseBy(1, 4, 8);
  use.sampler.exchange = 32;
  EXPECT_FALSE(HomePlanSpec::For(use, 1, Rooms(4, 1)));
}

TEST(HomePlan, IsGivenUpWhenItIsNotWanted) {
  const std::vector<uint32_t> lengths(kSamples, 100);
  const auto spec = HomePlanSpec::For(UseBy(0, 4, 8), 0, Rooms(4, 60000));
  for (const int asks : {1, 4, 12}) {
    const StopAfter stop(asks);
    const auto plan = PlanHomes(*spec, lengths, 0, &stop);
    ASSERT_FALSE(plan) << asks;
    EXPECT_EQ(plan.error().code(), Code::kCancelled);
  }
}

TEST(HomePlan, ADirectoryTakesItOverAndADeathMovesOnlyTheDeads) {
  const std::vector<uint32_t> lengths(kSamples, 100);
  peer::View view = ViewOf(4, kSamples * 40);
  const auto spec = HomePlanSpec::For(UseBy(0, 4, 8), 0, peer::Directory::Rooms(view));
  const std::shared_ptr<const HomePlan> plan = *PlanHomes(*spec, lengths, 0);
  peer::Directory directory(0, lengths);
  directory.OnView(view);
  EXPECT_EQ(directory.plan_digest(), 0u);
  directory.Adopt(plan, {});
  EXPECT_TRUE(directory.OnView(view));
  EXPECT_EQ(directory.plan_digest(), plan->digest);
  for (SampleId s = 0; s < kSamples; ++s) ASSERT_EQ(directory.Locate(s).home, plan->homes[s]);
  view.members[2].alive = false;
  directory.OnView(view);
  for (SampleId s = 0; s < kSamples; ++s) {
    if (plan->homes[s] != 2) {
      ASSERT_EQ(directory.Locate(s).home, plan->homes[s]);
    } else {
      ASSERT_NE(directory.Locate(s).home, 2u);
    }
  }
}

TEST(HomePlan, WhatIsHereStaysUntilItsNewHomeHasIt) {
  const std::vector<uint32_t> lengths(kSamples, 100);
  const peer::View view = ViewOf(4, kSamples * 26);
  const auto spec = HomePlanSpec::For(UseBy(0, 4, 8), 0, peer::Directory::Rooms(view));
  const std::shared_ptr<const HomePlan> plan = *PlanHomes(*spec, lengths, 0);
  peer::Directory directory(0, lengths);
  directory.OnView(view);
  SampleId moving = 0;
  while (directory.Locate(moving).home != 0 || plan->homes[moving] == 0 || plan->replicas[moving]) {
    ++moving;
  }
  std::vector<std::byte> here((kSamples + 7) / 8);
  here[moving / 8] |= std::byte{1} << (moving % 8);
  directory.Adopt(plan, here);
  directory.OnView(view);
  EXPECT_EQ(directory.ShareOf(moving), KeepShare::kHome);
  EXPECT_TRUE(directory.TakeLeft().empty());
  // As long as that node places by hash it has but a copy, which it may give up.
  directory.OnGot(plan->homes[moving], moving);
  EXPECT_EQ(directory.ShareOf(moving), KeepShare::kHome);
  directory.OnPlanUsed(plan->homes[moving]);
  EXPECT_EQ(directory.ShareOf(moving), KeepShare::kHome);
  directory.OnGot(plan->homes[moving], moving);
  EXPECT_EQ(directory.TakeLeft(), std::vector<SampleId>{moving});
  EXPECT_EQ(directory.ShareOf(moving), KeepShare::kNone);
  EXPECT_TRUE(directory.TakeLeft().empty());
}

TEST(HomePlan, CopiesBesideTheHomesTakeNoRoomFromWhatMoves) {
  const std::vector<uint32_t> lengths(kSamples, 100);
  const peer::View view = ViewOf(4, kSamples * 26);
  const auto spec = HomePlanSpec::For(UseBy(0, 4, 8), 0, peer::Directory::Rooms(view));
  const std::shared_ptr<const HomePlan> plan = *PlanHomes(*spec, lengths, 0);
  peer::Directory directory(0, lengths);
  directory.OnView(view);
  std::vector<uint32_t> before;
  for (SampleId s = 0; s < kSamples; ++s) before.push_back(directory.Locate(s).home);
  directory.Adopt(plan, std::vector<std::byte>((kSamples + 7) / 8, std::byte{0xff}));
  directory.OnView(view);
  for (SampleId s = 0; s < kSamples; ++s) {
    const bool lives = before[s] == 0 || plan->homes[s] == 0;
    ASSERT_EQ(directory.ShareOf(s) == KeepShare::kHome, lives) << s;
  }
}

}  // namespace
}  // namespace forebay
