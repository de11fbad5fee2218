// Frames: a fixed header and a payload of at most 16 MiB together, little-endian.
//
//   0 magic u16   2 version u16   4 type u16   6 status u16   8 payload length u32   12 zero u32
//   16 request u64   24 payload
//
// Decoding trusts nothing: bytes that are no message end in kDataLoss, never in undefined
// behaviour, and a length is believed only as far as bytes have arrived.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "base/bytes.h"
#include "base/status.h"
#include "wire/message.h"

namespace forebay::wire {

inline constexpr size_t kHeaderBytes = 24;
inline constexpr size_t kMaxFrameBytes = size_t{16} << 20;

struct Header {
  Type type = Type::kHello;
  Code status = Code::kOk;
  uint32_t length = 0;  // of the payload
  uint64_t request = 0;
};

struct Frame {
  Header header;
  std::span<const std::byte> payload;
};

// kUnimplemented when the other side speaks another version.
Result<Header> DecodeHeader(std::span<const std::byte, kHeaderBytes> bytes);

namespace internal {

// A header without the payload's length, which SealFrame fills in; an error restores `out`.
void StartFrame(Type type, Code status, uint64_t request, std::vector<std::byte>* out);
Status SealFrame(size_t begin, std::vector<std::byte>* out);
Status Malformed(Type type);
Status WrongType(Type wanted, Type got);

}  // namespace internal

// Appends one frame. kResourceExhausted, with `out` as it was, when it would exceed kMaxFrameBytes.
template <typename Message>
Status Encode(const Message& message, uint64_t request, std::vector<std::byte>* out,
              Code status = Code::kOk) {
  const size_t begin = out->size();
  internal::StartFrame(Message::kType, status, request, out);
  FieldWriter writer(out);
  writer(message);
  return internal::SealFrame(begin, out);
}

template <typename Message>
Status Decode(const Frame& frame, Message* out) {
  if (frame.header.type != Message::kType) {
    return internal::WrongType(Message::kType, frame.header.type);
  }
  FieldReader reader(frame.payload);
  reader(*out);
  return reader.done() ? Status() : internal::Malformed(Message::kType);
}

// A status as a reply, its message cut to what a frame surely holds.
void EncodeStatus(const Status& status, uint64_t request, std::vector<std::byte>* out);
// The other way: `*out` is what the peer reported; the returned status is about the frame.
Status DecodeStatus(const Frame& frame, Status* out);

// Cuts a stream of bytes into frames.
class FrameReader {
 public:
  // Where the next bytes go; at least `bytes` long. Ends the life of earlier frames' payloads.
  std::span<std::byte> Room(size_t bytes);
  void Filled(size_t bytes) { end_ += bytes; }
  // The next whole frame, or false when more bytes are needed. After an error the stream is lost.
  Result<bool> Next(Frame* out);

 private:
  std::vector<std::byte> buffer_;
  size_t begin_ = 0;
  size_t end_ = 0;
};

}  // namespace forebay::wire
