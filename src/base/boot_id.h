// Which start of the machine this is. What was not synced before another one may be lost or torn.
#pragma once

#include <cstdint>
#include <string_view>

namespace forebay {

struct BootId {
  static constexpr const char* kPath = "/proc/sys/kernel/random/boot_id";

  uint64_t high = 0;
  uint64_t low = 0;
  bool known() const { return (high | low) != 0; }
  friend bool operator==(const BootId&, const BootId&) = default;
};

// Of the file's text, 32 hex digits with dashes; not known when it is something else. Calls
// nothing.
constexpr BootId ParseBootId(std::string_view text) {
  BootId id;
  int digits = 0;
  for (const char c : text) {
    if (c == '-' || c == '\n') continue;
    const int digit = c >= '0' && c <= '9' ? c - '0' : c >= 'a' && c <= 'f' ? c - 'a' + 10 : -1;
    if (digit < 0 || ++digits > 32) return BootId();
    id.high = id.high << 4 | id.low >> 60;
    id.low = id.low << 4 | static_cast<uint64_t>(digit);
  }
  return digits == 32 ? id : BootId();
}

// Not known where the machine does not tell.
BootId ReadBootId();

}  // namespace forebay
