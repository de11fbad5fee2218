#include "peer/message.h"

#include <bit>
#include <concepts>
#include <cstring>
#include <type_traits>
#include <utility>

namespace forebay::peer {
namespace {

static_assert(std::endian::native == std::endian::little);

// A message is its number and its fields in their order; a list has its length, 32 bits, before it.
class Writer {
 public:
  template <typename... Fields>
  void operator()(const Fields&... fields) {
    (Put(fields), ...);
  }
  std::vector<std::byte> Take() { return std::move(out_); }

 private:
  void PutBytes(const void* from, size_t size) {
    const size_t at = out_.size();
    out_.resize(at + size);
    if (size != 0) std::memcpy(out_.data() + at, from, size);
  }
  template <std::integral T>
  void Put(T value) {
    PutBytes(&value, sizeof value);
  }
  void Put(Refusal why) { Put(static_cast<uint8_t>(why)); }
  void Put(const Digest& digest) { PutBytes(digest.data(), digest.size()); }
  void Put(const Wanted& wanted) { (*this)(wanted.request, wanted.sample); }
  void Put(const Given& given) { (*this)(given.request, given.sample, given.length, given.crc); }
  void Put(std::byte byte) { Put(std::to_integer<uint8_t>(byte)); }
  template <typename T>
  void Put(const std::vector<T>& list) {
    Put(static_cast<uint32_t>(list.size()));
    for (const T& one : list) Put(one);
  }

  std::vector<std::byte> out_;
};

class Reader {
 public:
  explicit Reader(std::span<const std::byte> in) : in_(in) {}

  template <typename... Fields>
  void operator()(Fields&... fields) {
    (Get(fields), ...);
  }
  // Nothing was missing and nothing is left.
  bool done() const { return ok_ && in_.empty(); }
  void Require(bool good) { ok_ = ok_ && good; }

 private:
  void GetBytes(void* to, size_t size) {
    Require(size <= in_.size());
    if (!ok_) return;
    std::memcpy(to, in_.data(), size);
    in_ = in_.subspan(size);
  }
  template <std::integral T>
  void Get(T& value) {
    GetBytes(&value, sizeof value);
  }
  void Get(Refusal& why) {
    uint8_t number = 0;
    Get(number);
    Require(number <= static_cast<uint8_t>(Refusal::kReadFailed));
    if (ok_) why = static_cast<Refusal>(number);
  }
  void Get(Digest& digest) { GetBytes(digest.data(), digest.size()); }
  void Get(Wanted& wanted) { (*this)(wanted.request, wanted.sample); }
  void Get(Given& given) { (*this)(given.request, given.sample, given.length, given.crc); }
  void Get(std::byte& byte) { GetBytes(&byte, 1); }
  template <typename T>
  void Get(std::vector<T>& list) {
    uint32_t count = 0;
    Get(count);
    // Each element has a byte or more, so a count beyond what is left is wrong.
    Require(count <= in_.size());
    if (!ok_) return;
    list.resize(count);
    for (T& one : list) Get(one);
  }

  std::span<const std::byte> in_;
  bool ok_ = true;
};

// The fields of each message, once for both directions.
template <typename Io, typename M>
void Fields(Io& io, M& m) {
  using T = std::remove_const_t<M>;
  if constexpr (std::is_same_v<T, HelloMessage>) {
    io(m.protocol, m.node, m.incarnation, m.nonce);
  } else if constexpr (std::is_same_v<T, AnswerMessage>) {
    io(m.node, m.incarnation, m.nonce, m.proof);
  } else if constexpr (std::is_same_v<T, ProofMessage>) {
    io(m.proof);
  } else if constexpr (std::is_same_v<T, DatasetMessage>) {
    io(m.number, m.name, m.samples);
  } else if constexpr (std::is_same_v<T, GetMessage>) {
    io(m.dataset, m.held_only, m.urgent, m.wanted);
  } else if constexpr (std::is_same_v<T, DataMessage>) {
    io(m.given);
  } else if constexpr (std::is_same_v<T, RefusedMessage>) {
    io(m.request, m.why);
  } else if constexpr (std::is_same_v<T, CancelMessage>) {
    io(m.request);
  } else if constexpr (std::is_same_v<T, HaveMessage>) {
    io(m.dataset, m.first, m.bits);
  } else if constexpr (std::is_same_v<T, ChangesMessage>) {
    io(m.dataset, m.got, m.lost);
  } else {
    static_assert(std::is_same_v<T, PingMessage>);
    io(m.stamp, m.reply);
  }
}

// What the fields' types do not say.
template <typename M>
bool WithinBounds(const M& m) {
  if constexpr (std::is_same_v<M, GetMessage>) {
    return m.held_only <= 1 && m.urgent <= 1 && !m.wanted.empty() && m.wanted.size() <= kMostWanted;
  } else if constexpr (std::is_same_v<M, DataMessage>) {
    return !m.given.empty() && m.given.size() <= kMostWanted;
  } else if constexpr (std::is_same_v<M, HaveMessage>) {
    return m.bits.size() <= kHaveBytes;
  } else if constexpr (std::is_same_v<M, ChangesMessage>) {
    return m.got.size() + m.lost.size() <= kMostChanges;
  } else if constexpr (std::is_same_v<M, PingMessage>) {
    return m.reply <= 1;
  } else {
    return true;
  }
}

template <size_t kNumber = 0>
Result<Message> DecodeAs(size_t number, std::span<const std::byte> fields) {
  if constexpr (kNumber == std::variant_size_v<Message>) {
    return Status(Code::kInvalidArgument, StrCat("a peer's message of unknown kind ", number));
  } else {
    if (number != kNumber) return DecodeAs<kNumber + 1>(number, fields);
    std::variant_alternative_t<kNumber, Message> message;
    Reader reader(fields);
    Fields(reader, message);
    if (reader.done() && WithinBounds(message)) return Message(std::move(message));
    return Status(Code::kInvalidArgument, StrCat("a peer's message of kind ", number, " and ",
                                                 fields.size(), " bytes is malformed"));
  }
}

}  // namespace

std::vector<std::byte> Encode(const Message& message) {
  Writer writer;
  writer(static_cast<uint8_t>(message.index()));
  std::visit([&](const auto& m) { Fields(writer, m); }, message);
  return writer.Take();
}

Result<Message> Decode(std::span<const std::byte> bytes) {
  if (bytes.empty() || bytes.size() > Transport::kMaxHeader) {
    return Status(Code::kInvalidArgument, StrCat("a peer's message of ", bytes.size(), " bytes"));
  }
  return DecodeAs(std::to_integer<size_t>(bytes[0]), bytes.subspan(1));
}

}  // namespace forebay::peer
