#include "peer/handshake.h"

#include <utility>

namespace forebay::peer {
namespace {

Status OutOfPlace() {
  return Status(Code::kInvalidArgument, "a message came before the secret was proven");
}

}  // namespace

Handshake::Handshake(std::string secret, Identity self, uint32_t nodes, bool initiator,
                     const Digest& nonce)
    : secret_(std::move(secret)),
      self_(self),
      nodes_(nodes),
      initiator_(initiator),
      nonce_(nonce) {}

Handshake Handshake::Initiate(std::string secret, Identity self, uint32_t expected,
                              const Digest& nonce) {
  Handshake made(std::move(secret), self, 0, true, nonce);
  made.other_.node = expected;
  return made;
}

Handshake Handshake::Accept(std::string secret, Identity self, uint32_t nodes,
                            const Digest& nonce) {
  return Handshake(std::move(secret), self, nodes, false, nonce);
}

HelloMessage Handshake::Hello() const {
  return {
      .protocol = kProtocol, .node = self_.node, .incarnation = self_.incarnation, .nonce = nonce_};
}

Result<Handshake::Step> Handshake::OnMessage(const Message& message) {
  if (proven_) return OutOfPlace();
  if (const auto* hello = std::get_if<HelloMessage>(&message)) return OnHello(*hello);
  if (const auto* answer = std::get_if<AnswerMessage>(&message)) return OnAnswer(*answer);
  if (const auto* proof = std::get_if<ProofMessage>(&message)) return OnProof(*proof);
  return OutOfPlace();
}

Result<Handshake::Step> Handshake::OnHello(const HelloMessage& hello) {
  if (initiator_ || greeted_) return OutOfPlace();
  if (hello.protocol != kProtocol) {
    return Status(Code::kInvalidArgument,
                  StrCat("node ", hello.node, " speaks protocol ", hello.protocol, ", this one ",
                         kProtocol, ": run the same version on all nodes"));
  }
  if (hello.node >= nodes_ || hello.node == self_.node) {
    return Status(Code::kInvalidArgument,
                  StrCat("a peer calls itself node ", hello.node, " of ", nodes_));
  }
  greeted_ = true;
  other_ = {hello.node, hello.incarnation};
  challenge_ = {.initiator = hello.nonce,
                .acceptor = nonce_,
                .initiator_node = hello.node,
                .acceptor_node = self_.node};
  return Step{.reply = AnswerMessage{.node = self_.node,
                                     .incarnation = self_.incarnation,
                                     .nonce = nonce_,
                                     .proof = Proof(secret_, challenge_, false)},
              .proven = false};
}

Result<Handshake::Step> Handshake::OnAnswer(const AnswerMessage& answer) {
  if (!initiator_) return OutOfPlace();
  if (answer.node != other_.node) {
    return Status(Code::kInvalidArgument,
                  StrCat("node ", answer.node, " answers in the place of node ", other_.node));
  }
  other_.incarnation = answer.incarnation;
  challenge_ = {.initiator = nonce_,
                .acceptor = answer.nonce,
                .initiator_node = self_.node,
                .acceptor_node = answer.node};
  if (!SameDigest(answer.proof, Proof(secret_, challenge_, false))) {
    return Status(Code::kPermissionDenied,
                  StrCat("node ", answer.node, " does not know the job's secret"));
  }
  proven_ = true;
  return Step{.reply = ProofMessage{Proof(secret_, challenge_, true)}, .proven = true};
}

Result<Handshake::Step> Handshake::OnProof(const ProofMessage& proof) {
  if (initiator_ || !greeted_) return OutOfPlace();
  if (!SameDigest(proof.proof, Proof(secret_, challenge_, true))) {
    return Status(Code::kPermissionDenied,
                  StrCat("node ", other_.node, " does not know the job's secret"));
  }
  proven_ = true;
  return Step{.reply = std::nullopt, .proven = true};
}

}  // namespace forebay::peer
