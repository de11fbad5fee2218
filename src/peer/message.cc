#include "peer/message.h"

#include "base/bytes.h"

namespace forebay::peer {

std::vector<std::byte> Encode(const Message& message) {
  std::vector<std::byte> out;
  FieldWriter writer(&out);
  writer(message);
  return out;
}

Result<Message> Decode(std::span<const std::byte> bytes) {
  if (bytes.empty() || bytes.size() > Transport::kMaxHeader) {
    return Status(Code::kInvalidArgument, StrCat("a peer's message of ", bytes.size(), " bytes"));
  }
  const auto kind = std::to_integer<size_t>(bytes[0]);
  if (kind >= std::variant_size_v<Message>) {
    return Status(Code::kInvalidArgument, StrCat("a peer's message of unknown kind ", kind));
  }
  Message message;
  FieldReader reader(bytes);
  reader(message);
  if (reader.done()) return message;
  return Status(Code::kInvalidArgument, StrCat("a peer's message of kind ", kind, " and ",
                                               bytes.size() - 1, " bytes is malformed"));
}

}  // namespace forebay::peer
