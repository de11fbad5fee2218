#include "files/packet.h"

#include <climits>
#include <cstring>

namespace forebay::files {
namespace {

Status Bad(std::string_view what) {
  return Status(Code::kDataLoss, StrCat("a packet to the file service: ", what));
}

std::vector<std::byte> Start(const Header& header, size_t body) {
  std::vector<std::byte> out;
  out.reserve(sizeof header + body);
  out.resize(sizeof header);
  std::memcpy(out.data(), &header, sizeof header);
  return out;
}

template <typename T>
void Append(std::vector<std::byte>& out, const T* data, size_t count) {
  const auto* bytes = reinterpret_cast<const std::byte*>(data);
  out.insert(out.end(), bytes, bytes + count * sizeof(T));
}

Result<Header> ParseHeader(std::span<const std::byte> packet) {
  Header header;
  if (packet.size() < sizeof header || packet.size() > kMostPacket) return Bad("its length");
  std::memcpy(&header, packet.data(), sizeof header);
  if (header.magic != Header::kMagic) return Bad("no magic number");
  if (header.bytes != packet.size() - sizeof header) return Bad("the length of its body");
  return header;
}

}  // namespace

Result<Question> ParseQuestion(std::span<const std::byte> packet) {
  const Result<Header> header = ParseHeader(packet);
  if (!header) return header.error();
  Question out;
  out.header = *header;
  std::span<const std::byte> body = packet.subspan(sizeof(Header));
  if (header->kind == Kind::kOrder) {
    if (body.size() != size_t{header->count} * sizeof(uint32_t)) return Bad("how many numbers");
    out.numbers.resize(header->count);
    if (!body.empty()) std::memcpy(out.numbers.data(), body.data(), body.size());
    return out;
  }
  for (uint32_t i = 0; i < header->count; ++i) {
    uint16_t length = 0;
    if (body.size() < sizeof length) return Bad("fewer paths than it says");
    std::memcpy(&length, body.data(), sizeof length);
    body = body.subspan(sizeof length);
    if (length == 0 || length >= PATH_MAX || length > body.size()) return Bad("a path's length");
    const std::string_view path(reinterpret_cast<const char*>(body.data()), length);
    if (path.find('\0') != std::string_view::npos) return Bad("a 0 in a path");
    out.paths.push_back(path);
    body = body.subspan(length);
  }
  if (!body.empty()) return Bad("more than its paths");
  return out;
}

std::vector<std::byte> PathsPacket(Kind kind, std::span<const std::string_view> paths, uint64_t a,
                                   uint64_t b) {
  Header header;
  header.kind = kind;
  header.count = static_cast<uint32_t>(paths.size());
  header.a = a;
  header.b = b;
  for (const std::string_view path : paths) {
    header.bytes += static_cast<uint32_t>(sizeof(uint16_t) + path.size());
  }
  std::vector<std::byte> out = Start(header, header.bytes);
  for (const std::string_view path : paths) {
    const auto length = static_cast<uint16_t>(path.size());
    Append(out, &length, 1);
    Append(out, path.data(), path.size());
  }
  return out;
}

std::vector<std::byte> OrderPacket(uint64_t position, std::span<const uint32_t> numbers) {
  Header header;
  header.kind = Kind::kOrder;
  header.count = static_cast<uint32_t>(numbers.size());
  header.bytes = static_cast<uint32_t>(numbers.size_bytes());
  header.a = position;
  std::vector<std::byte> out = Start(header, header.bytes);
  Append(out, numbers.data(), numbers.size());
  return out;
}

std::vector<std::byte> AnswerPacket(Kind kind, Answer answer, uint64_t a, std::string_view text) {
  text = text.substr(0, kMostPacket - sizeof(Header));
  Header header;
  header.kind = kind;
  header.answer = answer;
  header.bytes = static_cast<uint32_t>(text.size());
  header.a = a;
  std::vector<std::byte> out = Start(header, text.size());
  Append(out, text.data(), text.size());
  return out;
}

Result<std::string_view> ParseAnswer(std::span<const std::byte> packet, Header* header) {
  const Result<Header> parsed = ParseHeader(packet);
  if (!parsed) return parsed.error();
  *header = *parsed;
  return std::string_view(reinterpret_cast<const char*>(packet.data()) + sizeof(Header),
                          packet.size() - sizeof(Header));
}

size_t PathsThatFit(std::span<const std::string_view> paths) {
  size_t bytes = sizeof(Header);
  size_t count = 0;
  while (count < paths.size()) {
    bytes += sizeof(uint16_t) + paths[count].size();
    if (bytes > kMostPacket) break;
    ++count;
  }
  return count;
}

}  // namespace forebay::files
