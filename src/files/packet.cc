#include "files/packet.h"

#include <climits>

#include "base/bytes.h"

namespace forebay::files {
namespace {

Status Bad(std::string_view what) {
  return Status(Code::kDataLoss, StrCat("a packet to the file service: ", what));
}

std::vector<std::byte> Start(const Header& header) {
  std::vector<std::byte> out;
  out.reserve(sizeof header + header.bytes);
  FieldWriter writer(&out);
  writer(header);
  return out;
}

// Leaves the body.
Result<Header> ParseHeader(FieldReader& reader) {
  Header header;
  if (reader.left() < sizeof header || reader.left() > kMostPacket) return Bad("its length");
  reader(header);
  if (header.magic != Header::kMagic) return Bad("no magic number");
  if (header.bytes != reader.left()) return Bad("the length of its body");
  return header;
}

}  // namespace

Result<Question> ParseQuestion(std::span<const std::byte> packet) {
  FieldReader reader(packet);
  const Result<Header> header = ParseHeader(reader);
  if (!header) return header.error();
  Question out;
  out.header = *header;
  if (header->kind == Kind::kOrder) {
    reader.Elements(out.numbers, header->count);
    if (!reader.done()) return Bad("how many numbers");
    return out;
  }
  for (uint32_t i = 0; i < header->count; ++i) {
    uint16_t length = 0;
    reader(length);
    if (!reader.ok()) return Bad("fewer paths than it says");
    const std::string_view path = reader.View(length);
    if (length == 0 || length >= PATH_MAX || !reader.ok()) return Bad("a path's length");
    if (path.find('\0') != std::string_view::npos) return Bad("a 0 in a path");
    out.paths.push_back(path);
  }
  if (!reader.done()) return Bad("more than its paths");
  return out;
}

std::vector<std::byte> PathsPacket(Kind kind, std::span<const std::string_view> paths, uint64_t a,
                                   uint64_t b, JobNumber job) {
  Header header;
  header.kind = kind;
  header.count = static_cast<uint16_t>(paths.size());
  header.job = job;
  header.a = a;
  header.b = b;
  for (const std::string_view path : paths) {
    header.bytes += static_cast<uint32_t>(sizeof(uint16_t) + path.size());
  }
  std::vector<std::byte> out = Start(header);
  FieldWriter writer(&out);
  for (const std::string_view path : paths) {
    writer(static_cast<uint16_t>(path.size()));
    writer.Elements(path.data(), path.size());
  }
  return out;
}

std::vector<std::byte> OrderPacket(uint64_t position, std::span<const uint32_t> numbers) {
  Header header;
  header.kind = Kind::kOrder;
  header.count = static_cast<uint16_t>(numbers.size());
  header.bytes = static_cast<uint32_t>(numbers.size_bytes());
  header.a = position;
  std::vector<std::byte> out = Start(header);
  FieldWriter(&out).Elements(numbers.data(), numbers.size());
  return out;
}

std::vector<std::byte> AnswerPacket(Kind kind, Answer answer, uint64_t a, std::string_view text) {
  text = text.substr(0, kMostPacket - sizeof(Header));
  Header header;
  header.kind = kind;
  header.answer = answer;
  header.bytes = static_cast<uint32_t>(text.size());
  header.a = a;
  std::vector<std::byte> out = Start(header);
  FieldWriter(&out).Elements(text.data(), text.size());
  return out;
}

Result<std::string_view> ParseAnswer(std::span<const std::byte> packet, Header* header) {
  FieldReader reader(packet);
  const Result<Header> parsed = ParseHeader(reader);
  if (!parsed) return parsed.error();
  *header = *parsed;
  return reader.View(reader.left());
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
