// What peers say to each other: the headers of transport messages, in little-endian order.
//
// Every field is checked as it is read; a message that does not parse closes the connection. Before
// a connection has proven the job's secret only kHello, kAnswer and kProof are taken.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <variant>
#include <vector>

#include "base/status.h"
#include "catalog/catalog.h"
#include "peer/file_sample.h"
#include "peer/secret.h"
#include "transport/transport.h"

namespace forebay::peer {

inline constexpr uint32_t kProtocol = 3;
// Samples of one kGet, and of one reply: small ones travel together.
inline constexpr size_t kMostWanted = 64;
// A reply gathers samples up to so many bytes; larger ones travel alone, without a copy.
inline constexpr uint64_t kGatherBytes = 64 << 10;
inline constexpr size_t kHaveBytes = 2048;    // of a bitmap, in one message
inline constexpr size_t kMostChanges = 1000;  // of both kinds together, in one message

struct HelloMessage {  // initiator to acceptor
  uint32_t protocol = kProtocol;
  uint32_t node = 0;
  uint64_t incarnation = 0;
  Digest nonce{};
  template <typename Self, typename Io>
  static void Fields(Self& m, Io& io) {
    io(m.protocol, m.node, m.incarnation, m.nonce);
  }
};
struct AnswerMessage {  // acceptor to initiator: its nonce, and its proof
  uint32_t node = 0;
  uint64_t incarnation = 0;
  Digest nonce{};
  Digest proof{};
  template <typename Self, typename Io>
  static void Fields(Self& m, Io& io) {
    io(m.node, m.incarnation, m.nonce, m.proof);
  }
};
struct ProofMessage {  // initiator to acceptor
  Digest proof{};
  template <typename Self, typename Io>
  static void Fields(Self& m, Io& io) {
    io(m.proof);
  }
};
struct DatasetMessage {  // I have this data set, under this number on this connection; or no more
  uint32_t number = 0;
  uint64_t name = 0;     // fixed: which bytes the sample numbers stand for; growing: which folder
  uint32_t samples = 0;  // growing: 0
  uint8_t growing = 0;   // 1: sample numbers differ from node to node
  template <typename Self, typename Io>
  static void Fields(Self& m, Io& io) {
    io(m.number, m.name, m.samples, m.growing);
  }
  bool Valid() const { return growing <= 1 && (growing == 0 || samples == 0); }
  bool over() const { return growing == 0 && samples == 0; }  // was closed
};
struct Wanted {
  uint32_t request = 0;  // the asker's; comes back
  SampleId sample = 0;
  template <typename Self, typename Io>
  static void Fields(Self& m, Io& io) {
    io(m.request, m.sample);
  }
};
struct GetMessage {
  uint32_t dataset = 0;        // the receiver's number
  uint8_t held_only = 0;       // 1: refuse what would have to be read from the source
  uint8_t urgent = 0;          // a consumer waits for it
  std::vector<Wanted> wanted;  // 1 to kMostWanted
  uint64_t plan = 0;           // digest of the one by which the receiver was chosen; 0: by hash
  template <typename Self, typename Io>
  static void Fields(Self& m, Io& io) {
    io(m.dataset, m.held_only, m.urgent, m.wanted, m.plan);
  }
  bool Valid() const {
    return held_only <= 1 && urgent <= 1 && !wanted.empty() && wanted.size() <= kMostWanted;
  }
};
struct NamedWanted {
  uint32_t request = 0;  // the asker's; comes back
  FileSample sample;
  template <typename Self, typename Io>
  static void Fields(Self& m, Io& io) {
    io(m.request, m.sample);
  }
};
struct GetNamedMessage {            // of growing data sets
  uint32_t dataset = 0;             // the receiver's number
  uint8_t urgent = 0;               // a consumer waits for it
  std::vector<NamedWanted> wanted;  // 1 to kMostWanted, as many as a header has room for
  template <typename Self, typename Io>
  static void Fields(Self& m, Io& io) {
    io(m.dataset, m.urgent, m.wanted);
  }
  bool Valid() const { return urgent <= 1 && !wanted.empty() && wanted.size() <= kMostWanted; }
};
struct Given {
  uint32_t request = 0;
  SampleId sample = 0;  // the receiver's number; of growing data sets the sender's
  uint32_t length = 0;
  uint32_t crc = 0;  // CRC-32C of the sample's bytes, as the source's reader computed it
  template <typename Self, typename Io>
  static void Fields(Self& m, Io& io) {
    io(m.request, m.sample, m.length, m.crc);
  }
};
struct DataMessage {         // the payload: the samples' bytes, one after the other
  std::vector<Given> given;  // 1 to kMostWanted
  template <typename Self, typename Io>
  static void Fields(Self& m, Io& io) {
    io(m.given);
  }
  bool Valid() const { return !given.empty() && given.size() <= kMostWanted; }
};
enum class Refusal : uint8_t {
  kNotHeld = 0,
  kBusy = 1,
  kNoSuchSample = 2,
  kReadFailed = 3,
  kMoved = 4,  // as kNotHeld, and the sender has another plan than the asker
};
struct RefusedMessage {
  uint32_t request = 0;
  Refusal why = Refusal::kNotHeld;
  uint64_t plan = 0;  // the sender's, in use; 0: it places by hash
  template <typename Self, typename Io>
  static void Fields(Self& m, Io& io) {
    io(m.request);
    io.Enum(m.why, Refusal::kMoved);
    io(m.plan);
  }
};
struct CancelMessage {  // the asker no longer wants it
  uint32_t request = 0;
  template <typename Self, typename Io>
  static void Fields(Self& m, Io& io) {
    io(m.request);
  }
};
struct HaveMessage {     // what the sender's tiers hold
  uint32_t dataset = 0;  // the sender's number
  SampleId first = 0;
  std::vector<std::byte> bits;  // at most kHaveBytes
  template <typename Self, typename Io>
  static void Fields(Self& m, Io& io) {
    io(m.dataset, m.first, m.bits);
  }
  bool Valid() const { return bits.size() <= kHaveBytes; }
};
struct ChangesMessage {  // at most kMostChanges
  uint32_t dataset = 0;  // the sender's number
  std::vector<SampleId> got;
  std::vector<SampleId> lost;
  template <typename Self, typename Io>
  static void Fields(Self& m, Io& io) {
    io(m.dataset, m.got, m.lost);
  }
  bool Valid() const { return got.size() + lost.size() <= kMostChanges; }
};
struct PlanMessage {     // the sender has computed this plan of homes by use
  uint32_t dataset = 0;  // the sender's number
  uint64_t plan = 0;     // HomePlan::digest
  uint8_t in_use = 0;    // 1: and places by it; all that it has told before is of that plan
  template <typename Self, typename Io>
  static void Fields(Self& m, Io& io) {
    io(m.dataset, m.plan, m.in_use);
  }
};
struct PingMessage {
  uint64_t stamp = 0;
  uint8_t reply = 0;
  template <typename Self, typename Io>
  static void Fields(Self& m, Io& io) {
    io(m.stamp, m.reply);
  }
  bool Valid() const { return reply <= 1; }
};

using Message = std::variant<HelloMessage, AnswerMessage, ProofMessage, DatasetMessage, GetMessage,
                             DataMessage, RefusedMessage, CancelMessage, HaveMessage,
                             ChangesMessage, PingMessage, GetNamedMessage, PlanMessage>;

// At most Transport::kMaxHeader bytes for messages within the bounds above.
std::vector<std::byte> Encode(const Message& message);
// kInvalidArgument for anything that Encode does not make; bounds are checked before memory is
// taken.
Result<Message> Decode(std::span<const std::byte> bytes);

}  // namespace forebay::peer
