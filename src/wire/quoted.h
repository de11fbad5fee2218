// Text inside of JSON.
#pragma once

#include <string>
#include <string_view>

namespace forebay::wire {

// As a JSON string. Bytes that are no ASCII come as \u00XX, one for each byte: names of files may
// be in no encoding at all.
std::string Quoted(std::string_view text);

}  // namespace forebay::wire
