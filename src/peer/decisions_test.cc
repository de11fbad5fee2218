// What the peer thread decides, without a thread or a clock.
#include <gtest/gtest.h>

#include "peer/handshake.h"
#include "peer/requests.h"
#include "peer/route.h"
#include "peer/turns.h"

namespace forebay::peer {
namespace {

Digest Nonce(int value) {
  Digest out{};
  out[0] = std::byte{static_cast<unsigned char>(value)};
  return out;
}

struct Pair {
  Handshake initiator;
  Handshake acceptor;
};

Pair MakePair(const std::string& one, const std::string& other) {
  return {Handshake::Initiate(one, {.node = 1, .incarnation = 11}, 2, Nonce(1)),
          Handshake::Accept(other, {.node = 2, .incarnation = 22}, 4, Nonce(2))};
}

TEST(HandshakeTest, BothProveTheSecret) {
  Pair pair = MakePair("secret", "secret");
  auto answer = pair.acceptor.OnMessage(pair.initiator.Hello());
  ASSERT_TRUE(answer);
  EXPECT_FALSE(answer->proven);
  EXPECT_FALSE(pair.acceptor.proven());
  auto proof = pair.initiator.OnMessage(*answer->reply);
  ASSERT_TRUE(proof) << proof.status().ToString();
  EXPECT_TRUE(proof->proven);
  auto end = pair.acceptor.OnMessage(*proof->reply);
  ASSERT_TRUE(end) << end.status().ToString();
  EXPECT_TRUE(end->proven);
  EXPECT_FALSE(end->reply);
  EXPECT_EQ(pair.acceptor.other().node, 1u);
  EXPECT_EQ(pair.acceptor.other().incarnation, 11u);
  EXPECT_EQ(pair.initiator.other().incarnation, 22u);
}

TEST(HandshakeTest, AWrongSecretIsRefusedByWhoeverSeesItFirst) {
  Pair pair = MakePair("secret", "other");
  auto answer = pair.acceptor.OnMessage(pair.initiator.Hello());
  ASSERT_TRUE(answer);
  auto proof = pair.initiator.OnMessage(*answer->reply);
  ASSERT_FALSE(proof);
  EXPECT_EQ(proof.error().code(), Code::kPermissionDenied);
  EXPECT_FALSE(pair.initiator.proven());
  // An initiator that goes on all the same proves nothing.
  auto end = pair.acceptor.OnMessage(ProofMessage{Nonce(9)});
  ASSERT_FALSE(end);
  EXPECT_EQ(end.error().code(), Code::kPermissionDenied);
}

TEST(HandshakeTest, AProofCannotBeSentBack) {
  Pair pair = MakePair("secret", "secret");
  auto answer = pair.acceptor.OnMessage(pair.initiator.Hello());
  ASSERT_TRUE(answer);
  const Digest theirs = std::get<AnswerMessage>(*answer->reply).proof;
  EXPECT_FALSE(pair.acceptor.OnMessage(ProofMessage{theirs}));
}

TEST(HandshakeTest, NothingElseIsTakenBeforeTheProof) {
  Pair pair = MakePair("secret", "secret");
  EXPECT_FALSE(pair.acceptor.OnMessage(DatasetMessage{}));
  EXPECT_FALSE(pair.acceptor.OnMessage(ProofMessage{}));  // before the greeting
  EXPECT_FALSE(pair.initiator.OnMessage(GetMessage{}));
  EXPECT_FALSE(pair.acceptor.OnMessage(HelloMessage{.node = 4}));  // there are four
  EXPECT_FALSE(pair.acceptor.OnMessage(HelloMessage{.node = 2}));  // it itself
  EXPECT_FALSE(pair.acceptor.OnMessage(HelloMessage{.protocol = kProtocol + 1, .node = 1}));
  EXPECT_FALSE(pair.initiator.OnMessage(AnswerMessage{.node = 3}));
}

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
  for (const Reach reach : {Reach::kExpected, Reach::kUntold}) {
    const std::vector<Reach> soon = {Reach::kNone, Reach::kReady, reach};
    EXPECT_EQ(Choose({.home = 0, .holder = kNoNode}, 0, soon, true).to, To::kWait);
    EXPECT_EQ(Choose({.home = 0, .holder = kNoNode}, 0, soon, false).to, To::kSource);
    EXPECT_EQ(Choose({.home = 0, .holder = 1}, 0, soon, true).to, To::kPeer);
  }
  const std::vector<Reach> untold = {Reach::kNone, Reach::kUntold, Reach::kReady};
  EXPECT_EQ(Choose({.home = 1, .holder = kNoNode}, 0, untold, true).to, To::kPeer);

  const std::vector<Reach> some = {Reach::kNone, Reach::kExpected, Reach::kReady};
  EXPECT_EQ(Choose({.home = 1, .holder = kNoNode}, 0, some, true).to, To::kWait);
  EXPECT_EQ(Choose({.home = 1, .holder = kNoNode}, 0, some, false).to, To::kSource);
  choice = Choose({.home = 1, .holder = 2}, 0, some, false);
  EXPECT_EQ(choice.node, 2u);
  EXPECT_TRUE(choice.held_only);
  EXPECT_EQ(Choose({.home = 7, .holder = 7}, 0, some, true).to, To::kSource);
}

TEST(RouteTest, OnlyAPeerThatBecameSlowIsAvoided) {
  PlaceModel source;
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

TEST(RouteTest, SilenceTellsBeforeAnswersDo) {
  PlaceModel source;
  for (int i = 0; i < 100; ++i) source.OnRead(1000, 1, kMilli);
  PeerCost peer(400 * kMilli);
  peer.OnAsk(kSecond);
  EXPECT_FALSE(peer.Avoid(1000, source, 0, kSecond + 50 * kMilli));
  EXPECT_FALSE(peer.Avoid(1000, source, 0, kSecond + 500 * kMilli));  // the probe
  EXPECT_TRUE(peer.Avoid(1000, source, 0, kSecond + 501 * kMilli));
  EXPECT_FALSE(PeerCost(400 * kMilli).Avoid(1000, source, 0, kSecond));
  EXPECT_FALSE(peer.Avoid(1000, PlaceModel(), 0, kSecond + 501 * kMilli));
}

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

TEST(RequestsTest, ALateAnswerIsNotTakenForAnotherOnes) {
  Requests requests;
  const uint32_t first = requests.Add({}, 0);
  ASSERT_NE(requests.Find(first), nullptr);
  requests.Remove(first);
  EXPECT_EQ(requests.Find(first), nullptr);
  const uint32_t second = requests.Add({}, 0);
  EXPECT_NE(first, second);
  EXPECT_EQ(requests.Find(first), nullptr);
  EXPECT_NE(requests.Find(second), nullptr);
  EXPECT_EQ(requests.Find(12345), nullptr);
  EXPECT_EQ(requests.size(), 1u);
}

}  // namespace
}  // namespace forebay::peer
