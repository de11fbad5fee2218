// The page that a browser shows: page.html, in one piece, with nothing to load from elsewhere.
#pragma once

#include <string_view>

namespace forebay {

std::string_view StatusPage();

}  // namespace forebay
