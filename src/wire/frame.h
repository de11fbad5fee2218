// Frames: a fixed header and a payload of at most 16 MiB together, little-endian.
//
//   0 magic u16   2 version u16   4 type u16   6 status u16   8 payload length u32   12 zero u32
//   16 request u64   24 payload
//
// Decoding trusts nothing: bytes that are no message end in kDataLoss, never in undefined
// behaviour, and a length is believed only as far as bytes have arrived.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <string>
#include <type_traits>
#include <vector>

#include "base/status.h"
#include "wire/message.h"

namespace forebay::wire {

static_assert(std::endian::native == std::endian::little);

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

void PutHeader(const Header& header, std::byte* at);
// Writes the header before the payload that was appended behind room for it; an error restores
// `out`.
Status SealFrame(Type type, Code status, uint64_t request, size_t begin,
                 std::vector<std::byte>* out);
Status Malformed(Type type);
Status WrongType(Type wanted, Type got);

class Writer {
 public:
  explicit Writer(std::vector<std::byte>* out) : out_(out) {}

  template <typename... Fields>
  void operator()(const Fields&... fields) {
    (Put(fields), ...);
  }
  template <typename First, typename... Rest>
  void Columns(const std::vector<First>& first, const std::vector<Rest>&... rest) {
    Put(static_cast<uint32_t>(first.size()));
    PutArray(first.data(), first.size());
    (PutArray(rest.data(), first.size()), ...);
  }

 private:
  template <typename T>
  void PutArray(const T* values, size_t count) {
    const auto bytes = std::as_bytes(std::span<const T>(values, count));
    const size_t size = out_->size();
    out_->resize(size + bytes.size());
    if (!bytes.empty()) std::memcpy(out_->data() + size, bytes.data(), bytes.size());
  }
  template <typename T>
  requires std::is_arithmetic_v<T>
  void Put(T value) { PutArray(&value, 1); }
  template <typename T>
  void Put(const std::vector<T>& values) {
    Columns(values);
  }
  void Put(const std::vector<std::string>& texts) {
    Put(static_cast<uint32_t>(texts.size()));
    for (const std::string& text : texts) Put(text);
  }
  void Put(const std::string& text) {
    Put(static_cast<uint32_t>(text.size()));
    PutArray(text.data(), text.size());
  }

  std::vector<std::byte>* const out_;
};

class Reader {
 public:
  explicit Reader(std::span<const std::byte> in) : in_(in) {}

  template <typename... Fields>
  void operator()(Fields&... fields) {
    (Get(fields), ...);
  }
  template <typename... Ts>
  void Columns(std::vector<Ts>&... columns) {
    uint32_t count = 0;
    Get(count);
    (GetArray(columns, count), ...);
  }
  // Nothing was missing and nothing is left.
  bool done() const { return ok_ && in_.empty(); }

 private:
  bool Take(void* to, size_t bytes) {
    ok_ = ok_ && bytes <= in_.size();
    if (!ok_) return false;
    if (bytes != 0) std::memcpy(to, in_.data(), bytes);
    in_ = in_.subspan(bytes);
    return true;
  }
  template <typename T>
  requires std::is_arithmetic_v<T>
  void Get(T& value) { Take(&value, sizeof value); }
  void Get(bool& value) {
    uint8_t byte = 0;
    Get(byte);
    ok_ = ok_ && byte <= 1;
    value = byte == 1;
  }
  template <typename Container>
  void GetArray(Container& values, uint32_t count) {
    const size_t bytes = size_t{count} * sizeof(typename Container::value_type);
    ok_ = ok_ && bytes <= in_.size();
    values.resize(ok_ ? count : 0);
    Take(values.data(), ok_ ? bytes : 0);
  }
  template <typename T>
  void Get(std::vector<T>& values) {
    Columns(values);
  }
  void Get(std::vector<std::string>& texts) {
    uint32_t count = 0;
    Get(count);
    // Each has four bytes at least.
    ok_ = ok_ && count <= in_.size() / sizeof(uint32_t);
    texts.clear();
    for (uint32_t i = 0; ok_ && i < count; ++i) Get(texts.emplace_back());
  }
  void Get(std::string& text) {
    uint32_t count = 0;
    Get(count);
    GetArray(text, count);
  }

  std::span<const std::byte> in_;
  bool ok_ = true;
};

}  // namespace internal

// Appends one frame. kResourceExhausted, with `out` as it was, when it would exceed kMaxFrameBytes.
template <typename Message>
Status Encode(const Message& message, uint64_t request, std::vector<std::byte>* out,
              Code status = Code::kOk) {
  const size_t begin = out->size();
  out->resize(begin + kHeaderBytes);
  internal::Writer writer(out);
  Message::Fields(message, writer);
  return internal::SealFrame(Message::kType, status, request, begin, out);
}

template <typename Message>
Status Decode(const Frame& frame, Message* out) {
  if (frame.header.type != Message::kType) {
    return internal::WrongType(Message::kType, frame.header.type);
  }
  internal::Reader reader(frame.payload);
  Message::Fields(*out, reader);
  bool valid = reader.done();
  if constexpr (requires { out->Valid(); }) valid = valid && out->Valid();
  return valid ? Status() : internal::Malformed(Message::kType);
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
