#include "core/route.h"

#include <gtest/gtest.h>

namespace forebay::peer {
namespace {

TEST(RouteTest, TheHomeIsAskedThenAHolderThenTheSource) {
  using To = Choice::To;
  const std::vector<Reach> all = {Reach::kReady, Reach::kReady, Reach::kReady};
  Choice choice = Choose({.home = 1, .holder = 2}, 0, all, false);
  EXPECT_EQ(choice.to, To::kPeer);
  EXPECT_EQ(choice.node, 1u);
  EXPECT_FALSE(choice.held_only);
  // Its own, and another has a copy.
  choice = Choose({.home = 0, .holder = 2}, 0, all, false);
  EXPECT_EQ(choice.to, To::kPeer);
  EXPECT_EQ(choice.node, 2u);
  EXPECT_TRUE(choice.held_only);
  EXPECT_EQ(Choose({.home = 0, .holder = kNoNode}, 0, all, true).to, To::kSource);
  EXPECT_EQ(Choose({}, 0, all, true).to, To::kSource);

  // Its own, and somebody has yet to say what it holds.
  for (const Reach reach : {Reach::kExpected, Reach::kUnannounced}) {
    const std::vector<Reach> soon = {Reach::kNone, Reach::kReady, reach};
    EXPECT_EQ(Choose({.home = 0, .holder = kNoNode}, 0, soon, true).to, To::kWait);
    EXPECT_EQ(Choose({.home = 0, .holder = kNoNode}, 0, soon, false).to, To::kSource);
    EXPECT_EQ(Choose({.home = 0, .holder = 1}, 0, soon, true).to, To::kPeer);
  }
  const std::vector<Reach> unannounced = {Reach::kNone, Reach::kUnannounced, Reach::kReady};
  EXPECT_EQ(Choose({.home = 1, .holder = kNoNode}, 0, unannounced, true).to, To::kPeer);

  const std::vector<Reach> some = {Reach::kNone, Reach::kExpected, Reach::kReady};
  EXPECT_EQ(Choose({.home = 1, .holder = kNoNode}, 0, some, true).to, To::kWait);
  EXPECT_EQ(Choose({.home = 1, .holder = kNoNode}, 0, some, false).to, To::kSource);
  choice = Choose({.home = 1, .holder = 2}, 0, some, false);
  EXPECT_EQ(choice.node, 2u);
  EXPECT_TRUE(choice.held_only);
  EXPECT_EQ(Choose({.home = 7, .holder = 7}, 0, some, true).to, To::kSource);
}

TEST(RouteTest, OnlyAPeerThatBecameSlowIsAvoided) {
  OriginModel source;
  for (int i = 0; i < 100; ++i) source.OnRead(100000, 1, 5 * kMilli);
  PeerCost peer(400 * kMilli);
  Nanos now = kSecond;
  const auto answer = [&](Nanos latency) {
    peer.OnAsk(now);
    now += latency;
    peer.OnAnswer(100000, 1, latency, now);
  };
  for (int i = 0; i < 100; ++i) answer(kMilli);
  EXPECT_FALSE(peer.Avoid(100000, source, 0, now));
  // Slower than the source, and healthy.
  for (int i = 0; i < 100; ++i) answer(50 * kMilli);
  EXPECT_FALSE(peer.Avoid(100000, source, 0, now));
  for (int i = 0; i < 100; ++i) answer(900 * kMilli);
  EXPECT_FALSE(peer.Avoid(100000, source, 0, now));  // one to see whether it is well again
  EXPECT_TRUE(peer.Avoid(100000, source, 0, now));
  EXPECT_TRUE(peer.Avoid(100000, source, 0, now + PeerCost::kProbeEvery / 2));
  EXPECT_FALSE(peer.Avoid(100000, source, 0, now + PeerCost::kProbeEvery));
}

TEST(RouteTest, OneThatRefusesEverythingIsOnlyProbed) {
  const OriginModel source;
  PeerCost peer(400 * kMilli);
  Nanos now = kSecond;
  for (int i = 0; i < PeerCost::kMostRefused; ++i) {
    EXPECT_FALSE(peer.Avoid(1000, source, 0, now)) << i;
    peer.OnAsk(now);
    peer.OnRefused(now);
  }
  EXPECT_FALSE(peer.Avoid(1000, source, 0, now));  // the probe
  EXPECT_TRUE(peer.Avoid(1000, source, 0, now));
  now += PeerCost::kProbeEvery;
  EXPECT_FALSE(peer.Avoid(1000, source, 0, now));
  peer.OnAsk(now);
  peer.OnAnswer(1000, 1, kMilli, now);
  EXPECT_FALSE(peer.Avoid(1000, source, 0, now));
}

TEST(RouteTest, SilenceTellsBeforeAnswersDo) {
  OriginModel source;
  for (int i = 0; i < 100; ++i) source.OnRead(1000, 1, kMilli);
  PeerCost peer(400 * kMilli);
  peer.OnAsk(kSecond);
  EXPECT_FALSE(peer.Avoid(1000, source, 0, kSecond + 50 * kMilli));
  EXPECT_FALSE(peer.Avoid(1000, source, 0, kSecond + 500 * kMilli));  // the probe
  EXPECT_TRUE(peer.Avoid(1000, source, 0, kSecond + 501 * kMilli));
  EXPECT_FALSE(PeerCost(400 * kMilli).Avoid(1000, source, 0, kSecond));
  EXPECT_FALSE(peer.Avoid(1000, OriginModel(), 0, kSecond + 501 * kMilli));
}

}  // namespace
}  // namespace forebay::peer
