// The first messages of a connection: each side proves the job's secret to the other.
//
// initiator: Hello (nonce)  ->  acceptor
//            Answer (nonce, proof)  <-
//            Proof  ->
//
// The initiator sends nothing else before the acceptor's proof was right, the acceptor nothing
// before the initiator's was: no data set's name, no payload, no memory key.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "base/status.h"
#include "peer/message.h"
#include "peer/secret.h"

namespace forebay::peer {

struct Identity {
  uint32_t node = 0;
  uint64_t incarnation = 0;
};

// Pure. One for each connection.
class Handshake {
 public:
  static Handshake Initiate(std::string secret, Identity self, uint32_t expected,
                            const Digest& nonce);
  static Handshake Accept(std::string secret, Identity self, uint32_t nodes, const Digest& nonce);

  // The initiator's first message.
  HelloMessage Hello() const;
  struct Step {
    std::optional<Message> reply;
    bool proven = false;  // once the reply is sent
  };
  // An error ends the connection: kPermissionDenied for a proof that is wrong, kInvalidArgument for
  // what has no place here.
  Result<Step> OnMessage(const Message& message);

  bool proven() const { return proven_; }
  // Who is on the other side; as it says, until it has proven it.
  const Identity& other() const { return other_; }

 private:
  Handshake(std::string secret, Identity self, uint32_t nodes, bool initiator, const Digest& nonce);
  Result<Step> OnHello(const HelloMessage& hello);
  Result<Step> OnAnswer(const AnswerMessage& answer);
  Result<Step> OnProof(const ProofMessage& proof);

  std::string secret_;
  Identity self_;
  uint32_t nodes_;
  bool initiator_;
  Digest nonce_;
  Identity other_;
  Challenge challenge_{};
  bool greeted_ = false;
  bool proven_ = false;
};

}  // namespace forebay::peer
