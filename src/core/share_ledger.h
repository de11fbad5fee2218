// What jobs got of a shared source beside what was theirs, and how to make it good. Pure, and
// confined to one thread.
#pragma once

#include <map>
#include <span>
#include <string>
#include <string_view>

#include "base/nanos.h"
#include "core/fair_share.h"

namespace forebay::control {

// Limits alone leave errors that stay: an estimate of the source's capacity that is a little high,
// reads that were let through and stand in the source's queue, a queue that grows. All of them show
// in the bytes that were read. So what a job got too little is kept in a ledger and paid back over
// about two seconds, by those that got too much.
//
// Little is kept, and it fades: what was lost while demand changed is not to make the next seconds
// wrong; and a job that waits for something else than the source takes no more from others than
// that.
class ShareLedger {
 public:
  struct Entry {
    std::string_view job;
    double bytes = 0;  // read since the call before; may be a little below 0
    Claim claim;       // in bytes a second; a demand of kUnlimited: it wants more than it got
  };
  // All jobs; one that is not among them is forgotten.
  void Observe(std::span<const Entry> jobs, Nanos passed);
  // To be added to the job's part, in bytes a second.
  double Correction(std::string_view job) const;

 private:
  std::map<std::string, double, std::less<>> owed_;  // bytes; below 0: it got too much
};

}  // namespace forebay::control
