// What goes over a TCP connection: a hello each way, then messages. Pure: no socket is in it.
//
//   hello    "FBYTCP1\n", 8 bytes; role, 4 bytes (1: connected, 2: accepted); 4 bytes, 0
//   message  header bytes, 4; 0, 4; payload bytes, 8; the header; the payload
//
// Numbers are little-endian. Until the handler has said that the other side is proven
// (FrameReader::SetProven), a header has kMostUnproven bytes at most and there is no payload, so
// that a stranger is given no memory beyond a buffer of kUnprovenBuffer bytes.
#pragma once

#include <sys/uio.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <span>
#include <string>
#include <vector>

#include "base/status.h"

namespace forebay::tcp {

enum class Role : uint32_t { kConnected = 1, kAccepted = 2 };

inline constexpr size_t kHelloBytes = 16;
inline constexpr size_t kPrefixBytes = 16;
inline constexpr size_t kMostUnproven = 256;
inline constexpr size_t kUnprovenBuffer = kPrefixBytes + kMostUnproven;

std::array<std::byte, kHelloBytes> Hello(Role role);

// Takes a stream apart. Bytes go where Where says: straight to a payload's place where there is
// one, and behind it a little into a buffer, so that the next header comes with the same call.
class FrameReader {
 public:
  // `other`: the role that the other side's hello must have.
  explicit FrameReader(Role other) : other_(other), buffer_(kUnprovenBuffer) {}

  // Never empty. Valid until the next call of anything.
  using Space = std::array<iovec, 2>;
  Space Where();
  // So many bytes have come there.
  void Took(size_t bytes);

  struct Step {
    enum class Kind : uint8_t {
      kNothing,  // more bytes must come
      kHello,
      kMessage,  // SetPlace must follow where payload_bytes is not 0
      kPayload,  // is in its place; or, where `bytes` is not empty, is to be copied there from it
    } kind = Kind::kNothing;
    std::span<const std::byte> bytes;  // kMessage: the header. Valid until Where.
    uint64_t payload_bytes = 0;
  };
  // After an error the stream is of no use.
  Result<Step> Next();
  // Empty: the payload is skipped, without kPayload.
  void SetPlace(std::span<std::byte> place);
  void SetProven();

  // A payload's place is known, and not all of it is there.
  bool filling() const { return at_ == At::kPayload && !place_.empty(); }
  std::span<std::byte> place() const { return place_; }
  // What must come before the next step, as far as known.
  size_t wanted() const;

 private:
  enum class At : uint8_t { kHello, kMessage, kPayload };
  Result<Step> NextHello();
  Result<Step> NextMessage();
  Step NextPayload();
  std::span<const std::byte> buffered() const {
    return std::span(buffer_).subspan(begin_, end_ - begin_);
  }

  const Role other_;
  At at_ = At::kHello;
  bool proven_ = false;
  std::vector<std::byte> buffer_;
  size_t begin_ = 0, end_ = 0;  // what is in it
  std::span<std::byte> place_;  // kPayload; empty: it is skipped
  uint64_t left_ = 0;           // kPayload: bytes that are not there yet
};

// Messages on their way out, in their order.
class FrameWriter {
 public:
  void AddHello(Role role);
  // The header is copied, the payload is borrowed until its tag comes out of Wrote or Abandon.
  void Add(std::span<const std::byte> header, std::span<const std::byte> payload, uint64_t tag);
  bool empty() const { return queue_.empty(); }
  size_t size() const { return queue_.size(); }
  // Fills `out` with what goes next, as far as it suffices; returns how many.
  size_t Fill(std::span<iovec> out) const;
  // So many bytes have gone; appends the tags of the messages that went whole.
  void Wrote(size_t bytes, std::vector<uint64_t>* sent);
  // Forgets everything; appends the tags of the messages that did not go whole.
  void Abandon(std::vector<uint64_t>* unsent);

 private:
  struct Message {
    std::vector<std::byte> head;  // prefix and header
    std::span<const std::byte> payload;
    uint64_t tag = 0;
    bool hello = false;
  };
  std::deque<Message> queue_;
  size_t done_ = 0;  // bytes of the first one
};

}  // namespace forebay::tcp
