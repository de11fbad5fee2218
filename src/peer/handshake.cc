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
  if (const auto* hello = std::get_if<HelloMessage>(&message)) {
    if (hello->protocol != kProtocol) {
      return Status(Code::kInvalidArgument,
                    StrCat("node ", hello->node, " speaks protocol ", hello->protocol,
                           ", this one ", kProtocol, ": run the same version on all nodes"));
    }
    const Result<Digest> proof = OnHello({hello->node, hello->incarnation}, hello->nonce);
    if (!proof) return proof.error();
    return Step{.reply = AnswerMessage{.node = self_.node,
                                       .incarnation = self_.incarnation,
                                       .nonce = nonce_,
                                       .proof = *proof},
                .proven = false};
  }
  if (const auto* answer = std::get_if<AnswerMessage>(&message)) {
    const Result<Digest> proof =
        OnAnswer({answer->node, answer->incarnation}, answer->nonce, answer->proof);
    if (!proof) return proof.error();
    return Step{.reply = ProofMessage{*proof}, .proven = true};
  }
  if (const auto* proof = std::get_if<ProofMessage>(&message)) {
    FOREBAY_RETURN_IF_ERROR(OnProof(proof->proof));
    return Step{.reply = std::nullopt, .proven = true};
  }
  return OutOfPlace();
}

Result<Digest> Handshake::OnHello(const Identity& other, const Digest& nonce) {
  if (initiator_ || greeted_) return OutOfPlace();
  if (other.node >= nodes_ || other.node == self_.node) {
    return Status(Code::kInvalidArgument,
                  StrCat("a peer calls itself node ", other.node, " of ", nodes_));
  }
  greeted_ = true;
  other_ = other;
  challenge_ = {.initiator = nonce,
                .acceptor = nonce_,
                .initiator_node = other.node,
                .acceptor_node = self_.node};
  return Proof(secret_, challenge_, false);
}

Result<Digest> Handshake::OnAnswer(const Identity& other, const Digest& nonce,
                                   const Digest& proof) {
  if (!initiator_ || proven_) return OutOfPlace();
  if (other.node != other_.node) {
    return Status(Code::kInvalidArgument,
                  StrCat("node ", other.node, " answers in the place of node ", other_.node));
  }
  other_.incarnation = other.incarnation;
  challenge_ = {.initiator = nonce_,
                .acceptor = nonce,
                .initiator_node = self_.node,
                .acceptor_node = other.node};
  if (!SameDigest(proof, Proof(secret_, challenge_, false))) {
    return Status(Code::kPermissionDenied,
                  StrCat("node ", other.node, " does not know the job's secret"));
  }
  proven_ = true;
  return Proof(secret_, challenge_, true);
}

Status Handshake::OnProof(const Digest& proof) {
  if (initiator_ || !greeted_ || proven_) return OutOfPlace();
  if (!SameDigest(proof, Proof(secret_, challenge_, true))) {
    return Status(Code::kPermissionDenied,
                  StrCat("node ", other_.node, " does not know the job's secret"));
  }
  proven_ = true;
  return Status();
}

}  // namespace forebay::peer
