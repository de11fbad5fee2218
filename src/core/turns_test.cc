#include "core/turns.h"

#include <gtest/gtest.h>

namespace forebay::peer {
namespace {

Turn Wants(uint32_t node, uint32_t request, uint64_t bytes = 100) {
  return {.node = node,
          .dataset = 0,
          .request = request,
          .sample = request,
          .bytes = bytes,
          .held_only = false};
}

TEST(TurnsTest, PeersTakeTurnsHoweverMuchOneAsks) {
  Turns turns(3);
  for (uint32_t i = 0; i < 100; ++i) ASSERT_TRUE(turns.Add(Wants(0, i)));
  ASSERT_TRUE(turns.Add(Wants(1, 1000)));
  ASSERT_TRUE(turns.Add(Wants(2, 2000)));
  std::vector<uint32_t> nodes;
  for (int i = 0; i < 5; ++i) nodes.push_back(turns.Next(1000, 0)->node);
  EXPECT_EQ(nodes, (std::vector<uint32_t>{0, 1, 2, 0, 0}));
  EXPECT_EQ(turns.waiting(), 97u);
}

TEST(TurnsTest, QueuesAreBounded) {
  Turns turns(2);
  for (uint32_t i = 0; i < Turns::kMostWaiting; ++i) ASSERT_TRUE(turns.Add(Wants(0, i)));
  EXPECT_FALSE(turns.Add(Wants(0, 9999)));
  EXPECT_TRUE(turns.Add(Wants(1, 0)));
}

TEST(TurnsTest, ALargeSampleComesToItsTurn) {
  Turns turns(2);
  ASSERT_TRUE(turns.Add(Wants(0, 1, 5000)));
  ASSERT_TRUE(turns.Add(Wants(1, 2, 10)));
  EXPECT_FALSE(turns.Next(4000, 0));
  EXPECT_EQ(turns.Next(5000, 0)->request, 1u);
  EXPECT_EQ(turns.Next(4000, 0)->request, 2u);
}

TEST(TurnsTest, RatesHoldBack) {
  Turns turns(2);
  turns.SetRates(0, 1000, 0);  // one link: 1000 bytes a second
  for (uint32_t i = 0; i < 10; ++i) ASSERT_TRUE(turns.Add(Wants(0, i)));
  for (uint32_t i = 0; i < 10; ++i) ASSERT_TRUE(turns.Add(Wants(1, i)));
  size_t taken[2] = {0, 0};
  for (Nanos now = 0; now <= kSecond; now += 10 * kMilli) {
    while (auto turn = turns.Next(1000, now)) ++taken[turn->node];
    if (turns.waiting() > 0) {
      EXPECT_GT(turns.ready_at(), now);
    }
  }
  EXPECT_GE(taken[0], 9u);
  EXPECT_EQ(taken[0], taken[1]);
  Turns both(2);
  both.SetRates(1000, 0, 0);
  for (uint32_t i = 0; i < 40; ++i) ASSERT_TRUE(both.Add(Wants(i % 2, i)));
  size_t all = 0;
  for (Nanos now = 0; now <= kSecond; now += 10 * kMilli) {
    while (both.Next(1000, now)) ++all;
  }
  EXPECT_GE(all, 9u);
  EXPECT_LE(all, 12u);
}

TEST(TurnsTest, WhatIsCancelledOrDroppedIsNotServed) {
  Turns turns(2);
  ASSERT_TRUE(turns.Add(Wants(0, 1)));
  ASSERT_TRUE(turns.Add(Wants(0, 2)));
  ASSERT_TRUE(turns.Add(Wants(1, 3)));
  turns.Cancel(0, 1);
  turns.Cancel(1, 3);
  EXPECT_EQ(turns.Next(1000, 0)->request, 2u);
  EXPECT_FALSE(turns.Next(1000, 0));
  ASSERT_TRUE(turns.Add(Wants(1, 4)));
  turns.Drop(1);
  turns.Drop(0);
  EXPECT_EQ(turns.waiting(), 0u);
  EXPECT_FALSE(turns.Next(1000, 0));
}

}  // namespace
}  // namespace forebay::peer
