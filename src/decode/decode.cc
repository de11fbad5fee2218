#include "decode/decode.h"

#include <cstring>

namespace forebay {

uint64_t DecodedBytes(DecodeKind, uint64_t stored) { return stored; }

Status Decode(DecodeKind, std::span<const std::byte> in, std::span<std::byte> out) {
  if (in.size() != out.size()) {
    return Status(Code::kInternal, StrCat("a copy of ", in.size(), " bytes into ", out.size()));
  }
  if (!in.empty()) std::memcpy(out.data(), in.data(), in.size());
  return Status();
}

}  // namespace forebay
