#include "transport/tcp_frames.h"

#include <algorithm>
#include <cassert>
#include <cstring>

#include "transport/transport.h"

namespace forebay::tcp {
namespace {

constexpr std::string_view kMagic = "FBYTCP1\n";
static_assert(kMagic.size() == 8);

// Requests and small replies come many at once.
constexpr size_t kProvenBuffer = 16 << 10;
static_assert(kProvenBuffer >= kPrefixBytes + Transport::kMaxHeader);
// Taken behind a payload: the next header, and as little as possible of the payload behind it,
// which is copied once more.
constexpr size_t kBehind = 512;

struct Prefix {
  uint32_t header_bytes = 0;
  uint32_t zero = 0;
  uint64_t payload_bytes = 0;
};
static_assert(sizeof(Prefix) == kPrefixBytes);

Status Bad(std::string what) { return Status(Code::kInvalidArgument, std::move(what)); }

}  // namespace

std::array<std::byte, kHelloBytes> Hello(Role role) {
  std::array<std::byte, kHelloBytes> hello{};
  const auto number = static_cast<uint32_t>(role);
  std::memcpy(hello.data(), kMagic.data(), kMagic.size());
  std::memcpy(hello.data() + kMagic.size(), &number, sizeof number);
  return hello;
}

FrameReader::Space FrameReader::Where() {
  if (proven_ && buffer_.size() < kProvenBuffer) buffer_.resize(kProvenBuffer);
  if (begin_ == end_) {
    begin_ = end_ = 0;
  } else if (begin_ > 0) {
    std::memmove(buffer_.data(), buffer_.data() + begin_, end_ - begin_);
    end_ -= begin_;
    begin_ = 0;
  }
  const std::span<std::byte> room = std::span(buffer_).subspan(end_);
  if (!filling()) {
    assert(!room.empty());  // a whole prefix and header fit, and what is skipped is gone
    return {iovec{room.data(), room.size()}, iovec{nullptr, 0}};
  }
  assert(end_ == 0);
  const std::span<std::byte> rest = place_.last(left_);
  return {iovec{rest.data(), rest.size()}, iovec{room.data(), std::min(room.size(), kBehind)}};
}

void FrameReader::Took(size_t bytes) {
  if (filling()) {
    const size_t direct = std::min<uint64_t>(bytes, left_);
    left_ -= direct;
    bytes -= direct;
  }
  end_ += bytes;
  assert(end_ <= buffer_.size());
}

Result<FrameReader::Step> FrameReader::Next() {
  switch (at_) {
    case At::kHello:
      return NextHello();
    case At::kMessage:
      return NextMessage();
    case At::kPayload: {
      const bool skipped = place_.empty();
      const Step step = NextPayload();
      if (skipped && at_ == At::kMessage) return NextMessage();
      return step;
    }
  }
  return Bad("no such state");
}

Result<FrameReader::Step> FrameReader::NextHello() {
  const std::span<const std::byte> there = buffered();
  const std::array<std::byte, kHelloBytes> expected = Hello(other_);
  // Whoever begins with something else is not waited for.
  const size_t known = std::min(there.size(), expected.size());
  if (known > 0 && std::memcmp(there.data(), expected.data(), known) != 0) {
    return Bad(
        "what is there does not speak Forebay's tcp, or not this version: set "
        "FOREBAY_PEER_TRANSPORT alike on all nodes and run the same version on them");
  }
  if (known < expected.size()) return Step();
  begin_ += expected.size();
  at_ = At::kMessage;
  return Step{.kind = Step::Kind::kHello, .bytes = {}, .payload_bytes = 0};
}

Result<FrameReader::Step> FrameReader::NextMessage() {
  const std::span<const std::byte> there = buffered();
  if (there.size() < kPrefixBytes) return Step();
  Prefix prefix;
  std::memcpy(&prefix, there.data(), sizeof prefix);
  const size_t most = proven_ ? Transport::kMaxHeader : kMostUnproven;
  const uint64_t most_payload = proven_ ? Transport::kMaxPayload : 0;
  if (prefix.zero != 0 || prefix.header_bytes > most || prefix.payload_bytes > most_payload) {
    return Bad(proven_ ? "what came is no message"
                       : "it sent what has no place before the secret is proven");
  }
  if (there.size() < kPrefixBytes + prefix.header_bytes) return Step();
  begin_ += kPrefixBytes + prefix.header_bytes;
  if (prefix.payload_bytes > 0) {
    at_ = At::kPayload;
    left_ = prefix.payload_bytes;
    place_ = {};
  }
  return Step{.kind = Step::Kind::kMessage,
              .bytes = there.subspan(kPrefixBytes, prefix.header_bytes),
              .payload_bytes = prefix.payload_bytes};
}

FrameReader::Step FrameReader::NextPayload() {
  const std::span<const std::byte> there = buffered();
  const auto usable = static_cast<size_t>(std::min<uint64_t>(there.size(), left_));
  if (!place_.empty() && usable == place_.size()) {  // all of it is in the buffer
    begin_ += usable;
    left_ = 0;
    at_ = At::kMessage;
    return {.kind = Step::Kind::kPayload, .bytes = there.first(usable), .payload_bytes = 0};
  }
  if (!place_.empty() && usable > 0) {
    std::memcpy(place_.last(left_).data(), there.data(), usable);
  }
  begin_ += usable;
  left_ -= usable;
  if (left_ > 0) return {};
  at_ = At::kMessage;
  return {.kind = place_.empty() ? Step::Kind::kNothing : Step::Kind::kPayload,
          .bytes = {},
          .payload_bytes = 0};
}

void FrameReader::SetPlace(std::span<std::byte> place) {
  assert(at_ == At::kPayload && (place.empty() || place.size() == left_));
  place_ = place;
}

void FrameReader::SetProven() { proven_ = true; }

size_t FrameReader::wanted() const { return filling() ? static_cast<size_t>(left_) : 1; }

void FrameWriter::AddHello(Role role) {
  const std::array<std::byte, kHelloBytes> hello = Hello(role);
  Message& message = queue_.emplace_back();
  message.head.assign(hello.begin(), hello.end());
  message.hello = true;
}

void FrameWriter::Add(std::span<const std::byte> header, std::span<const std::byte> payload,
                      uint64_t tag) {
  const Prefix prefix{.header_bytes = static_cast<uint32_t>(header.size()),
                      .zero = 0,
                      .payload_bytes = payload.size()};
  Message& message = queue_.emplace_back();
  message.head.resize(sizeof prefix + header.size());
  std::memcpy(message.head.data(), &prefix, sizeof prefix);
  if (!header.empty()) {
    std::memcpy(message.head.data() + sizeof prefix, header.data(), header.size());
  }
  message.payload = payload;
  message.tag = tag;
}

size_t FrameWriter::Fill(std::span<iovec> out) const {
  size_t used = 0;
  size_t skip = done_;
  const auto put = [&](std::span<const std::byte> bytes) {
    const size_t skipped = std::min(skip, bytes.size());
    skip -= skipped;
    bytes = bytes.subspan(skipped);
    if (!bytes.empty()) out[used++] = {const_cast<std::byte*>(bytes.data()), bytes.size()};
  };
  for (const Message& message : queue_) {
    if (used + 2 > out.size()) break;
    put(message.head);
    put(message.payload);
  }
  return used;
}

void FrameWriter::Wrote(size_t bytes, std::vector<uint64_t>* sent) {
  done_ += bytes;
  while (!queue_.empty()) {
    const Message& first = queue_.front();
    const size_t whole = first.head.size() + first.payload.size();
    if (done_ < whole) return;
    done_ -= whole;
    if (!first.hello) sent->push_back(first.tag);
    queue_.pop_front();
  }
  assert(done_ == 0);
}

void FrameWriter::Abandon(std::vector<uint64_t>* unsent) {
  for (const Message& message : queue_) {
    if (!message.hello) unsent->push_back(message.tag);
  }
  queue_.clear();
  done_ = 0;
}

}  // namespace forebay::tcp
