// What members and the registrar say to each other: frames of a length and a body, little-endian.
//
// The one who connects says Hello; the other answers with its nonce and its proof; then the first
// one proves itself and registers. Before a proof no frame is longer than kLongestUnproven and
// nothing but these three is taken.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "base/status.h"
#include "peer/membership.h"
#include "peer/secret.h"

namespace forebay::peer::frame {

inline constexpr uint32_t kProtocol = 2;
inline constexpr size_t kLongestUnproven = 256;
inline constexpr size_t kLongest = 2 << 20;  // all members, with the longest addresses
inline constexpr size_t kLongestAddress = 255;
inline constexpr size_t kLongestText = 255;

// Each node once.
bool InOrder(const std::vector<Member>& members);

struct Hello {
  uint32_t protocol = kProtocol;
  uint32_t node = 0;
  uint64_t incarnation = 0;
  Digest nonce{};
  template <typename Self, typename Io>
  static void Fields(Self& m, Io& io) {
    io.Literal("forebay");
    io(m.protocol, m.node, m.incarnation, m.nonce);
  }
  bool operator==(const Hello&) const = default;
};
struct Answer {
  uint32_t node = 0;
  uint64_t incarnation = 0;
  uint64_t version = 0;  // of its view
  Digest nonce{};
  Digest proof{};
  template <typename Self, typename Io>
  static void Fields(Self& m, Io& io) {
    io(m.node, m.incarnation, m.version, m.nonce, m.proof);
  }
  bool operator==(const Answer&) const = default;
};
struct ProofOf {
  Digest proof{};
  template <typename Self, typename Io>
  static void Fields(Self& m, Io& io) {
    io(m.proof);
  }
  bool operator==(const ProofOf&) const = default;
};
struct Register {
  uint32_t nodes = 0;
  Member member;
  uint64_t version = 0;       // the last that the sender knows
  std::vector<Member> known;  // its view, where the registrar's is older: that one was started anew
  bool holds = false;         // it keeps a list itself, and has found another that does
  template <typename Self, typename Io>
  static void Fields(Self& m, Io& io) {
    io(m.nodes, m.member, m.version, m.known, m.holds);
  }
  bool Valid() const { return InOrder(known); }
  bool operator==(const Register&) const = default;
};
struct Changes {
  uint64_t version = 0;
  std::vector<Member> members;  // since the last message; the first one has them all
  template <typename Self, typename Io>
  static void Fields(Self& m, Io& io) {
    io(m.version, m.members);
  }
  bool Valid() const { return InOrder(members); }
  bool operator==(const Changes&) const = default;
};
struct Beat {
  bool reply = false;  // others are answered with one
  template <typename Self, typename Io>
  static void Fields(Self& m, Io& io) {
    io(m.reply);
  }
  bool operator==(const Beat&) const = default;
};
struct Suspicion {
  uint32_t node = 0;
  uint64_t incarnation = 0;
  std::string why;
  template <typename Self, typename Io>
  static void Fields(Self& m, Io& io) {
    io(m.node, m.incarnation);
    io.ShortText(m.why);
  }
  bool operator==(const Suspicion&) const = default;
};
struct Leave {
  template <typename Self, typename Io>
  static void Fields(Self&, Io&) {}
  bool operator==(const Leave&) const = default;
};
struct Refused {
  bool final = false;  // asking again is of no use
  std::string why;
  template <typename Self, typename Io>
  static void Fields(Self& m, Io& io) {
    io(m.final);
    io.ShortText(m.why);
  }
  bool operator==(const Refused&) const = default;
};

// The answer to Register, or the last word to members, of a node that does not hold the list.
struct Redirect {
  uint32_t holder = 0;  // kNobody: it looks for one itself
  std::string at;       // empty: the launcher's master host
  template <typename Self, typename Io>
  static void Fields(Self& m, Io& io) {
    io(m.holder);
    io.ShortText(m.at);
  }
  bool operator==(const Redirect&) const = default;
};
inline constexpr uint32_t kNobody = UINT32_MAX;

using Frame = std::variant<Hello, Answer, ProofOf, Register, Changes, Beat, Suspicion, Leave,
                           Refused, Redirect>;

// With its length before it. Texts are cut to their bounds.
void Append(const Frame& frame, std::string* out);

// Takes the first whole frame off `in`. None: more bytes are needed. kInvalidArgument: it is longer
// than `longest`, or nothing that Append makes.
Result<std::optional<Frame>> Take(std::string_view* in, size_t longest);

}  // namespace forebay::peer::frame
