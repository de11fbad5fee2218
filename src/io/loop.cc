#include "io/loop.h"

namespace forebay {

Status LoopOptions::Validate() const {
  if (max_in_flight == 0 || max_in_flight > 4096) {
    return Status(Code::kInvalidArgument,
                  StrCat("max_in_flight is ", max_in_flight, "; it must be 1 to 4096"));
  }
  return Status();
}

Status ReaderPoolOptions::Validate() const {
  if (threads == 0 || threads > 4096) {
    return Status(Code::kInvalidArgument, StrCat("threads is ", threads, "; it must be 1 to 4096"));
  }
  return Status();
}

}  // namespace forebay
