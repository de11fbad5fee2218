#include "daemon/web_request.h"

#include <algorithm>
#include <cctype>

namespace forebay {
namespace {

std::string Lower(std::string_view text) {
  std::string out(text);
  for (char& c : out) c = static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
  return out;
}

std::string_view Trimmed(std::string_view text) {
  const size_t first = text.find_first_not_of(" \t");
  if (first == std::string_view::npos) return {};
  return text.substr(first, text.find_last_not_of(" \t") - first + 1);
}

// Any port: the one here may be the far end of a tunnel.
bool IsThisMachine(std::string_view host) {
  const std::string name = Lower(host.substr(0, host.rfind(':')));
  const size_t colon = host.rfind(':');
  const bool port = colon == std::string_view::npos ||
                    std::all_of(host.begin() + static_cast<int64_t>(colon) + 1, host.end(),
                                [](unsigned char c) { return std::isdigit(c) != 0; });
  return port && (name == "127.0.0.1" || name == "localhost");
}

// No control character but tabs and the pair that ends a line.
bool IsText(std::string_view head) {
  for (size_t i = 0; i < head.size(); ++i) {
    const auto c = static_cast<unsigned char>(head[i]);
    if (c == '\r' && i + 1 < head.size() && head[i + 1] == '\n') {
      ++i;
    } else if ((c < ' ' && c != '\t') || c == 0x7f) {
      return false;
    }
  }
  return true;
}

}  // namespace

WebRequest ParseWebRequest(std::string_view head) {
  WebRequest request;
  const auto refuse = [&](int status) {
    request.status = status;
    return request;
  };
  // Nothing but text: what another program between here and there may read as the end of a line, or
  // of a name, is no part of a request.
  if (!IsText(head)) return refuse(400);
  // METHOD SP path SP HTTP/1.x
  size_t end = head.find("\r\n");
  const std::string_view line = head.substr(0, end);
  const size_t first = line.find(' ');
  const size_t last = line.rfind(' ');
  if (first == std::string_view::npos || first == last) return refuse(400);
  const std::string_view method = line.substr(0, first);
  const std::string_view target = line.substr(first + 1, last - first - 1);
  const std::string_view version = line.substr(last + 1);
  if (version != "HTTP/1.1" && version != "HTTP/1.0") return refuse(400);
  if (target.empty() || target.front() != '/' ||
      target.find_first_of(" \t") != std::string_view::npos) {
    return refuse(400);
  }
  request.head = method == "HEAD";
  if (method != "GET" && method != "HEAD") return refuse(405);
  int hosts = 0;
  bool ours = true;
  while (end != std::string_view::npos) {
    head.remove_prefix(end + 2);
    end = head.find("\r\n");
    const std::string_view field = head.substr(0, end);
    if (field.empty()) break;
    const size_t colon = field.find(':');
    if (colon == std::string_view::npos || colon == 0) return refuse(400);
    if (field.substr(0, colon).find_first_of(" \t") != std::string_view::npos) return refuse(400);
    if (Lower(field.substr(0, colon)) != "host") continue;
    ++hosts;
    ours = ours && IsThisMachine(Trimmed(field.substr(colon + 1)));
  }
  if (hosts > 1 || (hosts == 0 && version == "HTTP/1.1")) return refuse(400);
  if (!ours) return refuse(403);
  request.path = target.substr(0, target.find('?'));
  return request;
}

}  // namespace forebay
