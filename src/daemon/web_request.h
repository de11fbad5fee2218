// What a browser, Prometheus, or whoever reaches the port asks of the WebServer. Knows no socket;
// fuzz_http shows it any bytes.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>

namespace forebay {

inline constexpr size_t kLongestWebHead = size_t{8} << 10;

// A status to refuse a request with, or 200 and the path.
struct WebRequest {
  int status = 200;
  bool head = false;  // HEAD: no body
  std::string path;
};

// `head`: the first lines of a request, each with its "\r\n". Requests that name another host than
// this machine are refused: a web site that has its own name lead here would otherwise read along.
WebRequest ParseWebRequest(std::string_view head);

}  // namespace forebay
