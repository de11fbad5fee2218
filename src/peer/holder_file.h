// A file beside the job's secret that tells nodes that come late who holds the list of members
// while node 0 does not. A hint: who answers there proves the secret as everywhere.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>

#include "base/status.h"

namespace forebay::peer {

struct HolderHint {
  uint32_t node = 0;
  std::string at;  // "host:port"
  bool operator==(const HolderHint&) const = default;
};

// One line, with a proof by the secret.
std::string HolderText(std::string_view secret, const HolderHint& hint);
// None: it is not of this job, or not whole.
std::optional<HolderHint> ParseHolderText(std::string_view secret, std::string_view text);

// Reads and writes on threads of its own, one at a time, which the destructor does not wait for:
// the folder may be on a file server that hangs. Safe for concurrent use by multiple threads.
class HolderNote {
 public:
  // An empty path: does nothing.
  HolderNote(std::string path, std::string secret);
  void Write(const HolderHint& hint);
  // Reads it, unless it is being read.
  void Ask();
  // What was read last, once. None: nothing new, or it is not there.
  std::optional<HolderHint> Take();
  // Why the last write failed.
  Status error() const;

 private:
  struct State;
  void Run();
  std::shared_ptr<State> state_;  // a thread may outlive this
};

}  // namespace forebay::peer
