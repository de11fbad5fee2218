#include "core/named_homes.h"

#include <gtest/gtest.h>

#include <vector>

#include "base/rng.h"

namespace forebay::peer {
namespace {

constexpr uint32_t kNames = 20000;

Member MemberOf(uint32_t node) {
  Member member;
  member.node = node;
  return member;
}

View ViewOf(uint32_t nodes, const std::vector<uint32_t>& dead = {}) {
  View view;
  view.version = 1;
  view.nodes = nodes;
  for (uint32_t node = 0; node < nodes; ++node) view.members.push_back(MemberOf(node));
  for (const uint32_t node : dead) view.members[node].alive = false;
  return view;
}

NamedHomes HomesOf(const View& view, uint32_t self = 0) {
  NamedHomes homes(self);
  homes.OnView(view);
  return homes;
}

std::vector<uint64_t> Names() {
  SplitMix64 rng(3);
  std::vector<uint64_t> names(kNames);
  for (uint64_t& name : names) name = rng.Next();
  return names;
}

// Frozen: every node, build and release must agree, and cache folders outlive jobs.
TEST(NamedHomes, GoldenVectors) {
  const NamedHomes four = HomesOf(ViewOf(4));
  const NamedHomes less = HomesOf(ViewOf(4, {2}));
  std::vector<uint32_t> all, rest;
  for (uint64_t name = 0; name < 10; ++name) {
    all.push_back(four.HomeOf(name));
    rest.push_back(less.HomeOf(name));
  }
  EXPECT_EQ(all, (std::vector<uint32_t>{1, 3, 2, 0, 3, 3, 1, 2, 3, 2}));
  EXPECT_EQ(rest, (std::vector<uint32_t>{1, 3, 0, 0, 3, 3, 1, 1, 3, 3}));
}

TEST(NamedHomes, EveryNodeComputesTheSame) {
  const View view = ViewOf(7, {1, 6});
  const NamedHomes one = HomesOf(view, 0);
  NamedHomes other(4);
  other.OnView(ViewOf(7));
  other.OnView(ViewOf(7, {3}));
  EXPECT_TRUE(other.OnView(view));
  EXPECT_FALSE(other.OnView(view));
  for (const uint64_t name : Names()) ASSERT_EQ(one.HomeOf(name), other.HomeOf(name));
}

TEST(NamedHomes, ADeathMovesOnlyWhatLivedWithTheDeadToAllOthersAlike) {
  const NamedHomes before = HomesOf(ViewOf(5));
  const NamedHomes after = HomesOf(ViewOf(5, {3}));
  std::vector<uint32_t> lived(5), moved(5);
  for (const uint64_t name : Names()) {
    const uint32_t was = before.HomeOf(name);
    const uint32_t is = after.HomeOf(name);
    ASSERT_NE(is, 3u);
    ++lived[was];
    if (was == 3) {
      ++moved[is];
    } else {
      ASSERT_EQ(was, is);
    }
  }
  for (uint32_t node = 0; node < 5; ++node) {
    EXPECT_NEAR(lived[node], kNames / 5, kNames / 25);
    if (node != 3) {
      EXPECT_NEAR(moved[node], kNames / 20, kNames / 100);
    }
  }
}

TEST(NamedHomes, MoreNodesMoveOnlyToTheNewOnes) {
  const NamedHomes four = HomesOf(ViewOf(4));
  const NamedHomes five = HomesOf(ViewOf(5));
  uint32_t moved = 0;
  for (const uint64_t name : Names()) {
    if (four.HomeOf(name) == five.HomeOf(name)) continue;
    ASSERT_EQ(five.HomeOf(name), 4u);
    ++moved;
  }
  EXPECT_NEAR(moved, kNames / 5, kNames / 25);
}

TEST(NamedHomes, WhoNeverCameIsNoHomeAndThisNodeAlwaysIs) {
  View view;
  view.version = 1;
  view.nodes = 4096;
  NamedHomes alone(77);
  EXPECT_EQ(alone.HomeOf(5), kNoNode);
  EXPECT_TRUE(alone.OnView(view));
  for (uint64_t name = 0; name < 100; ++name) ASSERT_EQ(alone.HomeOf(name), 77u);
  view.members.push_back(MemberOf(4095));
  view.members.push_back(MemberOf(5000));  // does not exist
  EXPECT_TRUE(alone.OnView(view));
  uint32_t last = 0;
  for (const uint64_t name : Names()) {
    const uint32_t home = alone.HomeOf(name);
    ASSERT_TRUE(home == 77 || home == 4095);
    last += home == 4095 ? 1 : 0;
  }
  EXPECT_NEAR(last, kNames / 2, kNames / 20);
}

}  // namespace
}  // namespace forebay::peer
