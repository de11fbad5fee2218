#include "control/http_answer.h"

#include <algorithm>
#include <charconv>

namespace forebay::control {
namespace {

std::string Lower(std::string_view text) {
  std::string out(text);
  for (char& c : out) {
    if (c >= 'A' && c <= 'Z') c = static_cast<char>(c - 'A' + 'a');
  }
  return out;
}

std::string_view Trim(std::string_view text) {
  while (!text.empty() && (text.front() == ' ' || text.front() == '\t')) text.remove_prefix(1);
  while (!text.empty() && (text.back() == ' ' || text.back() == '\t')) text.remove_suffix(1);
  return text;
}

// Words of a stranger go into messages: without what would change a terminal or a log.
Status Malformed(std::string_view what) {
  std::string printable(what.substr(0, 80));
  for (char& c : printable) {
    if (c < ' ' || c > '~') c = '?';
  }
  return Status(Code::kUnavailable, StrCat("not an HTTP/1.1 answer: ", printable));
}

// "HTTP/1.1 200 OK"
bool ParseStatusLine(std::string_view line, int* code, bool* keep) {
  if (line.size() < 12 || !line.starts_with("HTTP/1.") || line[8] != ' ' ||
      (line.size() > 12 && line[12] != ' ')) {
    return false;
  }
  *code = 0;
  for (const char c : line.substr(9, 3)) {
    if (c < '0' || c > '9') return false;
    *code = *code * 10 + (c - '0');
  }
  *keep = line[7] == '1';
  return *code >= 100;
}

}  // namespace

void HttpAnswer::Begin() {
  in_.clear();
  at_ = 0;
  interim_ = 0;
  keep_ = false;
  ended_ = false;
}

void HttpAnswer::Append(std::string_view bytes) {
  if (at_ > 0) {
    in_.erase(0, at_);
    at_ = 0;
  }
  in_.append(bytes);
}

Result<std::optional<int>> HttpAnswer::Head() {
  while (true) {
    const std::string_view have = std::string_view(in_).substr(at_);
    const size_t end = have.find("\r\n\r\n");
    if (std::min(end, have.size()) > kMaxHead) return Malformed("its head is too long");
    if (end == std::string_view::npos) return std::optional<int>();
    int code = 0;
    FOREBAY_RETURN_IF_ERROR(ParseHead(have.substr(0, end), &code));
    at_ += end + 4;
    if (code >= 200) return std::optional<int>(code);
    // An interim answer: the real one follows.
    if (++interim_ > kMostInterim) return Malformed("only interim ones come");
    keep_ = false;
    ended_ = false;
  }
}

Status HttpAnswer::ParseHead(std::string_view head, int* code) {
  const size_t line = std::min(head.find("\r\n"), head.size());
  if (!ParseStatusLine(head.substr(0, line), code, &keep_)) return Malformed(head.substr(0, line));
  chunked_ = false;
  in_chunk_ = false;
  left_ = SIZE_MAX;
  size_t at = line;
  while (at < head.size()) {
    at += 2;
    const size_t end = std::min(head.find("\r\n", at), head.size());
    const std::string_view field = head.substr(at, end - at);
    at = end;
    const size_t colon = field.find(':');
    if (colon == std::string_view::npos) return Malformed(field);
    const std::string name = Lower(field.substr(0, colon));
    const std::string_view value = Trim(field.substr(colon + 1));
    if (name == "content-length") {
      size_t length = 0;
      const auto [stop, error] = std::from_chars(value.data(), value.data() + value.size(), length);
      if (error != std::errc() || stop != value.data() + value.size() || length > kMaxBody ||
          (left_ != SIZE_MAX && left_ != length)) {
        return Malformed(field);
      }
      left_ = length;
    } else if (name == "transfer-encoding") {
      if (Lower(value) != "chunked") return Malformed(field);
      chunked_ = true;
    } else if (name == "connection" && Lower(value) == "close") {
      keep_ = false;
    }
  }
  if (chunked_) left_ = 0;
  ended_ = !chunked_ && left_ == 0;
  return Status();
}

Result<bool> HttpAnswer::ParseChunkLine() {
  const std::string_view have = std::string_view(in_).substr(at_);
  // The line break after a chunk, then the next one's length, then perhaps trailers.
  const size_t skip = in_chunk_ ? 2 : 0;
  const size_t end = have.find("\r\n", skip);
  if (std::min(end, have.size()) > kMaxHead) return Malformed("a chunk's length");
  if (end == std::string_view::npos) return false;
  const std::string_view line = have.substr(skip, end - skip);
  size_t length = 0;
  const auto [stop, error] = std::from_chars(line.data(), line.data() + line.size(), length, 16);
  if ((in_chunk_ && !have.starts_with("\r\n")) || error != std::errc() ||
      (stop != line.data() + line.size() && *stop != ';') || length > kMaxBody) {
    return Malformed("a chunk's length");
  }
  if (length > 0) {
    at_ += end + 2;
    left_ = length;
    in_chunk_ = true;
    return true;
  }
  const size_t last = have.find("\r\n\r\n", end);
  if (std::min(last, have.size()) > kMaxHead) return Malformed("its trailers are too long");
  if (last == std::string_view::npos) return false;
  at_ += last + 4;
  ended_ = true;
  return true;
}

Result<HttpAnswer::Step> HttpAnswer::Next(std::string* piece) {
  while (!ended_) {
    if (chunked_ && left_ == 0) {
      const Result<bool> parsed = ParseChunkLine();
      if (!parsed) return parsed.error();
      if (!*parsed) return Step::kMore;
      continue;
    }
    const std::string_view have = std::string_view(in_).substr(at_);
    if (have.empty()) return Step::kMore;
    const size_t take = std::min(left_, have.size());
    piece->assign(have.substr(0, take));
    at_ += take;
    if (left_ != SIZE_MAX) left_ -= take;
    if (!chunked_ && left_ == 0) ended_ = true;
    return Step::kPiece;
  }
  return Step::kEnd;
}

Status HttpAnswer::OnClose() {
  keep_ = false;
  if (!ended_ && (chunked_ || left_ != SIZE_MAX)) {
    return Status(Code::kUnavailable, "the connection was closed in the middle of an answer");
  }
  ended_ = true;
  return Status();
}

}  // namespace forebay::control
