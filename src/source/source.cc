#include "source/source.h"

namespace forebay {

Status PosixSourceOptions::Validate() const {
  if (max_in_flight == 0 || max_in_flight > 4096) {
    return Status(Code::kInvalidArgument,
                  StrCat("max_in_flight is ", max_in_flight, "; it must be 1 to 4096"));
  }
  if (max_open_shards == 0 || max_open_shards > 65536) {
    return Status(Code::kInvalidArgument,
                  StrCat("max_open_shards is ", max_open_shards, "; it must be 1 to 65536"));
  }
  return Status();
}

}  // namespace forebay
