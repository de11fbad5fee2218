// An HTTP/1.1 answer as its bytes come, in whatever pieces: of known length, in chunks, or as a
// stream that ends with its connection. Knows no socket; fuzz_http shows it any bytes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "base/status.h"

namespace forebay::control {

// Confined to one thread. What is no answer is kUnavailable, whatever the cuts between Appends;
// after an error there is only Begin.
class HttpAnswer {
 public:
  static constexpr size_t kMaxHead = 64 << 10;
  static constexpr size_t kMaxBody = 256 << 20;  // of an answer, or of one of its chunks
  static constexpr int kMostInterim = 8;         // answers of the kind "100 Continue"

  enum class Step : uint8_t { kPiece, kMore, kEnd };

  // The next answer; what is left of the one before is forgotten.
  void Begin();
  // What the connection brought.
  void Append(std::string_view bytes);

  // The status code; none: more bytes are needed.
  Result<std::optional<int>> Head();
  // After the head. kPiece: of the body, in `piece`. kMore: more bytes are needed.
  Result<Step> Next(std::string* piece);
  // The connection has ended: an error, unless that ends the answer.
  Status OnClose();

  bool ended() const { return ended_; }
  // It was read to its end, nothing came behind it, and the server keeps the connection.
  bool reusable() const { return ended_ && keep_ && at_ == in_.size(); }

 private:
  Status ParseHead(std::string_view head, int* code);
  // The line before a chunk; false: more bytes are needed.
  Result<bool> ParseChunkLine();

  std::string in_;  // received, not yet given out
  size_t at_ = 0;   // of in_ is given out
  int interim_ = 0;
  bool keep_ = true;
  bool ended_ = true;
  bool chunked_ = false;
  size_t left_ = 0;  // of the body, or of the chunk; SIZE_MAX: until the connection ends
  bool in_chunk_ = false;
};

}  // namespace forebay::control
