// The first messages of a connection, of engines (message.h) and of members
// (membership_message.h) alike: each side proves the job's secret to the other.
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

  // This side's, for its Hello or its Answer.
  const Digest& nonce() const { return nonce_; }
  // What the other side has said. The results are this side's proofs, to be sent. An error ends the
  // connection: kPermissionDenied for a proof that is wrong, kInvalidArgument for what has no place
  // here.
  Result<Digest> OnHello(const Identity& other, const Digest& nonce);
  Result<Digest> OnAnswer(const Identity& other, const Digest& nonce, const Digest& proof);
  Status OnProof(const Digest& proof);

  // The same in the messages of engines.
  HelloMessage Hello() const;
  struct Step {
    std::optional<Message> reply;
    bool proven = false;  // once the reply is sent
  };
  Result<Step> OnMessage(const Message& message);

  bool proven() const { return proven_; }
  // Who is on the other side; as it says, until it has proven it.
  const Identity& other() const { return other_; }

 private:
  Handshake(std::string secret, Identity self, uint32_t nodes, bool initiator, const Digest& nonce);

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
