#include "wire/frame.h"

#include <algorithm>

namespace forebay::wire {
namespace {

constexpr uint16_t kMagic = 0x4246;  // "FB"
constexpr uint16_t kVersion = 2;
constexpr auto kLastCode = static_cast<uint16_t>(Code::kInternal);
constexpr size_t kMaxMessageBytes = size_t{64} << 10;
// A buffer that one large frame has grown is given back.
constexpr size_t kBufferKept = size_t{1} << 20;

template <typename T>
T Load(const std::byte* at) {
  T value;
  std::memcpy(&value, at, sizeof value);
  return value;
}

template <typename T>
void Store(std::byte* at, T value) {
  std::memcpy(at, &value, sizeof value);
}

}  // namespace

Result<Header> DecodeHeader(std::span<const std::byte, kHeaderBytes> bytes) {
  const auto magic = Load<uint16_t>(bytes.data());
  const auto version = Load<uint16_t>(bytes.data() + 2);
  const auto type = Load<uint16_t>(bytes.data() + 4);
  const auto status = Load<uint16_t>(bytes.data() + 6);
  Header header;
  header.length = Load<uint32_t>(bytes.data() + 8);
  header.request = Load<uint64_t>(bytes.data() + 16);
  if (magic != kMagic) return Status(Code::kDataLoss, "not a Forebay message");
  if (version != kVersion) {
    return Status(Code::kUnimplemented, StrCat("the other process sends frames of version ",
                                               version, ", this one reads version ", kVersion));
  }
  if (type == 0 || type > static_cast<uint16_t>(kLastType)) {
    return Status(Code::kDataLoss, StrCat("a message of unknown type ", type));
  }
  if (status > kLastCode || Load<uint32_t>(bytes.data() + 12) != 0) {
    return Status(Code::kDataLoss, "a damaged message header");
  }
  if (header.length > kMaxFrameBytes - kHeaderBytes) {
    return Status(Code::kDataLoss,
                  StrCat("a message announces ", header.length, " bytes, more than a frame holds"));
  }
  header.type = static_cast<Type>(type);
  header.status = static_cast<Code>(status);
  return header;
}

namespace internal {

void PutHeader(const Header& header, std::byte* at) {
  Store(at, kMagic);
  Store(at + 2, kVersion);
  Store(at + 4, static_cast<uint16_t>(header.type));
  Store(at + 6, static_cast<uint16_t>(header.status));
  Store(at + 8, header.length);
  Store(at + 12, uint32_t{0});
  Store(at + 16, header.request);
}

Status SealFrame(Type type, Code status, uint64_t request, size_t begin,
                 std::vector<std::byte>* out) {
  const size_t bytes = out->size() - begin;
  if (bytes > kMaxFrameBytes) {
    out->resize(begin);
    return Status(Code::kResourceExhausted,
                  StrCat("a message of ", bytes, " bytes exceeds the limit of ", kMaxFrameBytes,
                         "; use smaller batches"));
  }
  PutHeader({type, status, static_cast<uint32_t>(bytes - kHeaderBytes), request},
            out->data() + begin);
  return Status();
}

Status Malformed(Type type) {
  return Status(Code::kDataLoss, StrCat("a malformed message of type ", static_cast<int>(type)));
}

Status WrongType(Type wanted, Type got) {
  return Status(Code::kDataLoss, StrCat("a message of type ", static_cast<int>(got), " where type ",
                                        static_cast<int>(wanted), " belongs"));
}

}  // namespace internal

void EncodeStatus(const Status& status, uint64_t request, std::vector<std::byte>* out) {
  StatusReply reply;
  reply.message = status.message().substr(0, kMaxMessageBytes);
  (void)Encode(reply, request, out, status.code());
}

Status DecodeStatus(const Frame& frame, Status* out) {
  StatusReply reply;
  FOREBAY_RETURN_IF_ERROR(Decode(frame, &reply));
  *out = frame.header.status == Code::kOk ? Status()
                                          : Status(frame.header.status, std::move(reply.message));
  return Status();
}

std::span<std::byte> FrameReader::Room(size_t bytes) {
  if (begin_ == end_) {
    begin_ = end_ = 0;
    if (buffer_.size() > kBufferKept) {
      buffer_.clear();
      buffer_.shrink_to_fit();
    }
  } else if (begin_ > 0 && buffer_.size() - end_ < bytes) {
    std::memmove(buffer_.data(), buffer_.data() + begin_, end_ - begin_);
    end_ -= begin_;
    begin_ = 0;
  }
  if (buffer_.size() - end_ < bytes) buffer_.resize(std::max(end_ + bytes, 2 * buffer_.size()));
  return std::span(buffer_).subspan(end_);
}

Result<bool> FrameReader::Next(Frame* out) {
  const auto have = std::span<const std::byte>(buffer_).subspan(begin_, end_ - begin_);
  if (have.size() < kHeaderBytes) return false;
  const Result<Header> header = DecodeHeader(have.first<kHeaderBytes>());
  if (!header) return header.error();
  if (have.size() - kHeaderBytes < header->length) return false;
  *out = {*header, have.subspan(kHeaderBytes, header->length)};
  begin_ += kHeaderBytes + header->length;
  return true;
}

}  // namespace forebay::wire
