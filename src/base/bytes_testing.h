// Bytes as text, for tests that hold a layout still.
#pragma once

#include <cstddef>
#include <span>
#include <string>
#include <string_view>

namespace forebay {

inline std::string HexOf(std::span<const std::byte> bytes) {
  constexpr std::string_view kDigits = "0123456789abcdef";
  std::string out;
  for (const std::byte byte : bytes) {
    out += kDigits[std::to_integer<size_t>(byte >> 4)];
    out += kDigits[std::to_integer<size_t>(byte & std::byte{15})];
  }
  return out;
}
inline std::string HexOf(std::string_view text) { return HexOf(std::as_bytes(std::span(text))); }

}  // namespace forebay
