// What the peer thread decides, without a thread or a clock.
#include <gtest/gtest.h>

#include "peer/handshake.h"
#include "peer/requests.h"

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

// As members use it, with messages of their own.
TEST(HandshakeTest, TheProofsAlone) {
  Pair pair = MakePair("secret", "secret");
  EXPECT_FALSE(pair.acceptor.OnProof(Nonce(3)).ok());  // before the greeting
  EXPECT_FALSE(pair.acceptor.OnAnswer({1, 11}, Nonce(1), Nonce(3)));
  EXPECT_FALSE(pair.initiator.OnHello({2, 22}, Nonce(2)));
  EXPECT_FALSE(pair.acceptor.OnHello({4, 11}, Nonce(1)));  // there are four
  const Result<Digest> theirs = pair.acceptor.OnHello({1, 11}, pair.initiator.nonce());
  ASSERT_TRUE(theirs) << theirs.error().ToString();
  EXPECT_FALSE(pair.acceptor.OnHello({1, 11}, pair.initiator.nonce()));            // twice
  EXPECT_FALSE(pair.initiator.OnAnswer({3, 22}, pair.acceptor.nonce(), *theirs));  // another node
  EXPECT_FALSE(pair.initiator.OnAnswer({2, 22}, Nonce(9), *theirs));  // of another challenge
  EXPECT_FALSE(pair.initiator.proven());
  const Result<Digest> ours = pair.initiator.OnAnswer({2, 22}, pair.acceptor.nonce(), *theirs);
  ASSERT_TRUE(ours) << ours.error().ToString();
  EXPECT_TRUE(pair.initiator.proven());
  EXPECT_EQ(pair.acceptor.OnProof(*theirs).code(), Code::kPermissionDenied);  // sent back
  EXPECT_TRUE(pair.acceptor.OnProof(*ours).ok());
  EXPECT_TRUE(pair.acceptor.proven());
  EXPECT_FALSE(pair.acceptor.OnProof(*ours).ok());  // again
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
