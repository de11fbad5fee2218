// Base64 with padding, as etcd's JSON carries bytes (RFC 4648, section 4).
#pragma once

#include <optional>
#include <string>
#include <string_view>

namespace forebay::control {

void AppendBase64(std::string_view bytes, std::string* out);
// None for anything that AppendBase64 would not have written.
std::optional<std::string> FromBase64(std::string_view text);

}  // namespace forebay::control
