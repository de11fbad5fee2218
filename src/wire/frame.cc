#include "wire/frame.h"

#include <algorithm>
#include <cstring>
#include <utility>

namespace forebay::wire {
namespace {

constexpr uint16_t kMagic = 0x4246;  // "FB"
constexpr uint16_t kVersion = 2;
constexpr auto kLastCode = static_cast<uint16_t>(Code::kInternal);
constexpr size_t kLengthAt = 8;
constexpr size_t kMaxMessageBytes = size_t{64} << 10;
// A buffer that one large frame has grown is given back.
constexpr size_t kBufferKept = size_t{1} << 20;

}  // namespace

Result<Header> DecodeHeader(std::span<const std::byte, kHeaderBytes> bytes) {
  uint16_t magic = 0;
  uint16_t version = 0;
  uint16_t type = 0;
  uint16_t status = 0;
  uint32_t zero = 0;
  Header header;
  FieldReader reader(bytes);
  reader(magic, version, type, status, header.length, zero, header.request);
  if (magic != kMagic) return Status(Code::kDataLoss, "not a Forebay message");
  if (version != kVersion) {
    return Status(Code::kUnimplemented, StrCat("the other process sends frames of version ",
                                               version, ", this one reads version ", kVersion));
  }
  if (type == 0 || type > static_cast<uint16_t>(kLastType)) {
    return Status(Code::kDataLoss, StrCat("a message of unknown type ", type));
  }
  if (status > kLastCode || zero != 0) {
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

void StartFrame(Type type, Code status, uint64_t request, std::vector<std::byte>* out) {
  FieldWriter writer(out);
  writer(kMagic, kVersion, static_cast<uint16_t>(type), static_cast<uint16_t>(status), uint32_t{0},
         uint32_t{0}, request);
}

Status SealFrame(size_t begin, std::vector<std::byte>* out) {
  const size_t bytes = out->size() - begin;
  if (bytes > kMaxFrameBytes) {
    out->resize(begin);
    return Status(Code::kResourceExhausted,
                  StrCat("a message of ", bytes, " bytes exceeds the limit of ", kMaxFrameBytes,
                         "; use smaller batches"));
  }
  FieldWriter(out).PutAt(begin + kLengthAt, static_cast<uint32_t>(bytes - kHeaderBytes));
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
