#include "peer/membership_message.h"

#include <algorithm>
#include <cstring>
#include <type_traits>
#include <utility>

namespace forebay::peer::frame {
namespace {

constexpr std::string_view kMagic = "forebay";

class Writer {
 public:
  explicit Writer(std::string* out) : out_(out) {}

  template <typename N>
  void Number(N value) {
    for (size_t i = 0; i < sizeof(N); ++i) {
      out_->push_back(static_cast<char>(static_cast<uint64_t>(value) >> (8 * i)));
    }
  }
  void Flag(bool value) { Number<uint8_t>(value ? 1 : 0); }
  void Bytes(const Digest& digest) {
    out_->append(reinterpret_cast<const char*>(digest.data()), digest.size());
  }
  void Text(std::string_view text) {
    text = text.substr(0, 255);
    Number(static_cast<uint8_t>(text.size()));
    out_->append(text);
  }
  void One(const Member& member) {
    Number(member.node);
    Number(member.incarnation);
    Number(member.memory);
    Number(member.folder);
    Flag(member.alive);
    Text(member.address);
  }
  void All(const std::vector<Member>& members) {
    Number(static_cast<uint32_t>(members.size()));
    for (const Member& member : members) One(member);
  }

 private:
  std::string* const out_;
};

class Reader {
 public:
  explicit Reader(std::string_view in) : in_(in) {}

  template <typename N>
  N Number() {
    const std::string_view bytes = Bytes(sizeof(N));
    uint64_t value = 0;
    for (size_t i = 0; i < bytes.size(); ++i) {
      value |= static_cast<uint64_t>(static_cast<uint8_t>(bytes[i])) << (8 * i);
    }
    return static_cast<N>(value);
  }
  bool Flag() {
    const uint8_t value = Number<uint8_t>();
    if (value > 1) ok_ = false;
    return value == 1;
  }
  Digest OneDigest() {
    Digest digest{};
    const std::string_view bytes = Bytes(digest.size());
    if (!bytes.empty()) std::memcpy(digest.data(), bytes.data(), bytes.size());
    return digest;
  }
  std::string Text() {
    const size_t size = Number<uint8_t>();
    return std::string(Bytes(size));
  }
  Member One() {
    Member member;
    member.node = Number<uint32_t>();
    member.incarnation = Number<uint64_t>();
    member.memory = Number<uint64_t>();
    member.folder = Number<uint64_t>();
    member.alive = Flag();
    member.address = Text();
    if (member.node >= kMostNodes) ok_ = false;
    return member;
  }
  // Each node once, in order.
  std::vector<Member> All() {
    constexpr size_t kSmallest = 4 + 8 + 8 + 8 + 1 + 1;
    const uint32_t count = Number<uint32_t>();
    std::vector<Member> members;
    if (count > kMostNodes || count > in_.size() / kSmallest) {
      ok_ = false;
      return members;
    }
    members.reserve(count);
    for (uint32_t i = 0; ok_ && i < count; ++i) {
      members.push_back(One());
      if (i > 0 && members[i].node <= members[i - 1].node) ok_ = false;
    }
    return members;
  }
  std::string_view Bytes(size_t size) {
    if (in_.size() < size) {
      ok_ = false;
      return {};
    }
    const std::string_view bytes = in_.substr(0, size);
    in_.remove_prefix(size);
    return bytes;
  }
  // All is read, and it was right.
  bool done() const { return ok_ && in_.empty(); }
  void Wrong() { ok_ = false; }

 private:
  std::string_view in_;
  bool ok_ = true;
};

Frame Read(Reader& in) {
  switch (in.Number<uint8_t>()) {
    case 0: {
      Hello hello;
      if (in.Bytes(kMagic.size()) != kMagic) in.Wrong();
      hello.protocol = in.Number<uint32_t>();
      hello.node = in.Number<uint32_t>();
      hello.incarnation = in.Number<uint64_t>();
      hello.nonce = in.OneDigest();
      return hello;
    }
    case 1: {
      Answer answer;
      answer.node = in.Number<uint32_t>();
      answer.incarnation = in.Number<uint64_t>();
      answer.version = in.Number<uint64_t>();
      answer.nonce = in.OneDigest();
      answer.proof = in.OneDigest();
      return answer;
    }
    case 2:
      return ProofOf{in.OneDigest()};
    case 3: {
      Register message;
      message.nodes = in.Number<uint32_t>();
      message.member = in.One();
      message.version = in.Number<uint64_t>();
      message.known = in.All();
      return message;
    }
    case 4: {
      Changes changes;
      changes.version = in.Number<uint64_t>();
      changes.members = in.All();
      return changes;
    }
    case 5:
      return Beat{in.Flag()};
    case 6: {
      Suspicion suspicion;
      suspicion.node = in.Number<uint32_t>();
      suspicion.incarnation = in.Number<uint64_t>();
      suspicion.why = in.Text();
      return suspicion;
    }
    case 7:
      return Leave{};
    case 8: {
      Refused refused;
      refused.final = in.Flag();
      refused.why = in.Text();
      return refused;
    }
    default:
      in.Wrong();
      return Leave{};
  }
}

}  // namespace

void Append(const Frame& frame, std::string* out) {
  const size_t begin = out->size();
  Writer to(out);
  to.Number<uint32_t>(0);
  to.Number(static_cast<uint8_t>(frame.index()));
  std::visit(
      [&](const auto& message) {
        using T = std::decay_t<decltype(message)>;
        if constexpr (std::is_same_v<T, Hello>) {
          out->append(kMagic);
          to.Number(message.protocol);
          to.Number(message.node);
          to.Number(message.incarnation);
          to.Bytes(message.nonce);
        } else if constexpr (std::is_same_v<T, Answer>) {
          to.Number(message.node);
          to.Number(message.incarnation);
          to.Number(message.version);
          to.Bytes(message.nonce);
          to.Bytes(message.proof);
        } else if constexpr (std::is_same_v<T, ProofOf>) {
          to.Bytes(message.proof);
        } else if constexpr (std::is_same_v<T, Register>) {
          to.Number(message.nodes);
          to.One(message.member);
          to.Number(message.version);
          to.All(message.known);
        } else if constexpr (std::is_same_v<T, Changes>) {
          to.Number(message.version);
          to.All(message.members);
        } else if constexpr (std::is_same_v<T, Beat>) {
          to.Flag(message.reply);
        } else if constexpr (std::is_same_v<T, Suspicion>) {
          to.Number(message.node);
          to.Number(message.incarnation);
          to.Text(message.why);
        } else if constexpr (std::is_same_v<T, Refused>) {
          to.Flag(message.final);
          to.Text(message.why);
        }
      },
      frame);
  const uint64_t size = out->size() - begin - 4;
  for (size_t i = 0; i < 4; ++i) (*out)[begin + i] = static_cast<char>(size >> (8 * i));
}

Result<std::optional<Frame>> Take(std::string_view* in, size_t longest) {
  if (in->size() < 4) return std::optional<Frame>();
  const size_t size = Reader(*in).Number<uint32_t>();
  if (size == 0 || size > longest) {
    return Status(Code::kInvalidArgument, StrCat("a frame of ", size, " bytes"));
  }
  if (in->size() - 4 < size) return std::optional<Frame>();
  Reader reader(in->substr(4, size));
  Frame frame = Read(reader);
  if (!reader.done()) return Status(Code::kInvalidArgument, "not a frame of this protocol");
  in->remove_prefix(4 + size);
  return std::optional<Frame>(std::move(frame));
}

}  // namespace forebay::peer::frame
