// What etcd answers and what a browser asks. An answer, in whatever pieces it comes, ends in the
// same error or the same body as in one piece, and is bounded; a request that is served names this
// machine, in every field that another program would take for the host.
#include <algorithm>
#include <cctype>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include "control/http_answer.h"
#include "daemon/web_request.h"
#include "expect.h"

namespace {

using namespace forebay;
using control::HttpAnswer;

struct Outcome {
  int code = 0;
  std::string body;
  enum class End : uint8_t { kError, kWaits, kWhole } end = End::kError;
  bool operator==(const Outcome&) const = default;
};

// The bytes in pieces whose lengths `cuts` gives in turn, and then, perhaps, the connection's end.
Outcome ReadAnswer(std::string_view bytes, std::span<const uint8_t> cuts, bool closes) {
  HttpAnswer answer;
  answer.Begin();
  Outcome out;
  size_t turn = 0;
  bool closed = false;
  std::string piece;
  while (true) {
    bool more = true;
    if (out.code == 0) {
      const Result<std::optional<int>> head = answer.Head();
      if (!head) return out;
      if (*head) {
        out.code = **head;
        FUZZ_EXPECT(out.code >= 200 && out.code <= 999);
        more = false;
      }
    } else {
      const Result<HttpAnswer::Step> step = answer.Next(&piece);
      if (!step) return out;
      if (*step == HttpAnswer::Step::kEnd) {
        FUZZ_EXPECT(answer.ended());
        out.end = Outcome::End::kWhole;
        return out;
      }
      more = *step == HttpAnswer::Step::kMore;
      if (!more) {
        FUZZ_EXPECT(!piece.empty());
        out.body += piece;
      }
    }
    if (!more) continue;
    FUZZ_EXPECT(!closed || out.code == 0);
    if (bytes.empty()) {
      FUZZ_EXPECT(!answer.reusable());
      if (closed || !closes || out.code == 0) {
        out.end = Outcome::End::kWaits;
        return out;
      }
      closed = true;
      if (!answer.OnClose().ok()) return out;
      continue;
    }
    const size_t wanted = cuts.empty() ? bytes.size() : 1 + cuts[turn++ % cuts.size()];
    answer.Append(bytes.substr(0, wanted));
    bytes.remove_prefix(std::min(wanted, bytes.size()));
  }
}

std::string LowerText(std::string_view text) {
  std::string out;
  for (const char c : text) {
    out += static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
  }
  return out;
}

// Read by another who takes any break for the end of a line, and any blank for nothing.
void CheckHosts(std::string_view head) {
  while (!head.empty()) {
    const size_t end = std::min(head.find_first_of("\r\n"), head.size());
    std::string line = LowerText(head.substr(0, end));
    head.remove_prefix(std::min(end + 1, head.size()));
    std::erase_if(line, [](unsigned char c) { return c <= ' ' || c == 0x7f; });
    if (!line.starts_with("host:")) continue;
    const std::string host = line.substr(5);
    FUZZ_EXPECT(host.starts_with("localhost") || host.starts_with("127.0.0.1"));
    FUZZ_EXPECT(host.find('@') == std::string::npos);
  }
}

void ReadRequest(std::string_view bytes) {
  // As the server cuts it.
  const size_t end = bytes.find("\r\n\r\n");
  const std::string_view head =
      bytes.substr(0, end == std::string_view::npos ? bytes.size() : end + 2);
  const WebRequest request = ParseWebRequest(head);
  FUZZ_EXPECT(request.status == 200 || request.status == 400 || request.status == 403 ||
              request.status == 405);
  if (request.status != 200) {
    FUZZ_EXPECT(request.path.empty());
    return;
  }
  FUZZ_EXPECT(head.starts_with(request.head ? "HEAD /" : "GET /"));
  FUZZ_EXPECT(request.path.starts_with('/') && request.path.size() < head.size());
  for (const char c : request.path) {
    FUZZ_EXPECT(static_cast<unsigned char>(c) > ' ' && c != '?' && c != 0x7f);
  }
  CheckHosts(head.substr(std::min(head.find("\r\n"), head.size())));
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  // 0x80: a request. Otherwise: how many cuts, and whether the connection ends; the cuts; an
  // answer.
  if (size < 1) return 0;
  const std::string_view rest(reinterpret_cast<const char*>(data) + 1, size - 1);
  if ((data[0] & 0x80) != 0) {
    ReadRequest(rest);
    return 0;
  }
  const bool closes = (data[0] & 0x40) != 0;
  const size_t cuts = std::min<size_t>(data[0] & 15, rest.size());
  const std::string_view bytes = rest.substr(cuts);
  FUZZ_EXPECT(ReadAnswer(bytes, {data + 1, cuts}, closes) == ReadAnswer(bytes, {}, closes));
  return 0;
}
