// What goes wrong in a simulated run, and when.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "base/clock.h"
#include "base/status.h"

namespace forebay::sim {

enum class FaultKind : uint8_t {
  kCrash,         // the process of `node` ends; it is started again after `lasts`, or never (0)
  kPowerOff,      // the same of its machine: nobody is told
  kPause,         // it stands still
  kCut,           // nothing passes between `node` and `other`
  kIsolate,       // nor between `node` and anybody
  kSlowLink,      // what it sends and gets is `much` ms later
  kReset,         // the connections of the two end
  kCorrupt,       // bits flip in a third of the payloads that it sends
  kGarble,        // half of a message that it sends is lost
  kSourceStall,   // no read of it ends
  kSourceErrors,  // one read in `much` fails
  kSourceSlow,    // reads take `much` times as long
  kClockJump,     // its clock goes `much` ms forward
  kPressure,      // one part in `much` of its memory is lent
  kReopen,        // its consumer closes the data set, and opens it again at once
};
inline constexpr int kFaultKinds = 15;

struct Fault {
  FaultKind kind = FaultKind::kCrash;
  Nanos at = 0;  // since the start
  uint32_t node = 0;
  uint32_t other = 0;
  Nanos lasts = 0;
  uint64_t much = 0;
  bool operator==(const Fault&) const = default;
};

struct Schedule {
  std::vector<Fault> faults;  // by time
  // "crash:1200:1:0:800:0", comma-separated: kind, ms, node, other, ms, much.
  std::string ToString() const;
  static Result<Schedule> Parse(const std::string& text);
  static Schedule Draw(uint64_t seed, uint32_t nodes);
};

}  // namespace forebay::sim
