#include "control/base64.h"

#include <array>
#include <cstddef>
#include <cstdint>

namespace forebay::control {
namespace {

constexpr std::string_view kDigits =
    "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";

constexpr std::array<int8_t, 256> MakeValues() {
  std::array<int8_t, 256> values{};
  for (int8_t& value : values) value = -1;
  for (size_t i = 0; i < kDigits.size(); ++i) {
    values[static_cast<unsigned char>(kDigits[i])] = static_cast<int8_t>(i);
  }
  return values;
}
constexpr std::array<int8_t, 256> kValues = MakeValues();

}  // namespace

void AppendBase64(std::string_view bytes, std::string* out) {
  size_t i = 0;
  const auto at = [&](size_t k) -> uint32_t { return static_cast<unsigned char>(bytes[k]); };
  for (; i + 3 <= bytes.size(); i += 3) {
    const uint32_t v = at(i) << 16 | at(i + 1) << 8 | at(i + 2);
    const char four[] = {kDigits[v >> 18], kDigits[v >> 12 & 63], kDigits[v >> 6 & 63],
                         kDigits[v & 63]};
    out->append(four, 4);
  }
  if (i + 1 == bytes.size()) {
    const uint32_t v = at(i) << 16;
    const char four[] = {kDigits[v >> 18], kDigits[v >> 12 & 63], '=', '='};
    out->append(four, 4);
  } else if (i + 2 == bytes.size()) {
    const uint32_t v = at(i) << 16 | at(i + 1) << 8;
    const char four[] = {kDigits[v >> 18], kDigits[v >> 12 & 63], kDigits[v >> 6 & 63], '='};
    out->append(four, 4);
  }
}

std::optional<std::string> FromBase64(std::string_view text) {
  if (text.size() % 4 != 0) return std::nullopt;
  std::string out;
  out.reserve(text.size() / 4 * 3);
  for (size_t i = 0; i < text.size(); i += 4) {
    size_t pad = 0;
    if (i + 4 == text.size()) pad = text[i + 3] != '=' ? 0 : text[i + 2] != '=' ? 1 : 2;
    uint32_t v = 0;
    for (size_t k = 0; k < 4; ++k) {
      const int8_t value = k < 4 - pad ? kValues[static_cast<unsigned char>(text[i + k])] : 0;
      if (value < 0) return std::nullopt;
      v = v << 6 | static_cast<uint32_t>(value);
    }
    const char three[] = {static_cast<char>(v >> 16), static_cast<char>(v >> 8),
                          static_cast<char>(v)};
    if ((pad == 1 && three[2] != 0) || (pad == 2 && three[1] != 0)) return std::nullopt;
    out.append(three, 3 - pad);
  }
  return out;
}

}  // namespace forebay::control
