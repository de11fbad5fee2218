// What one process found when it looked at a data set's files, for others of its job on the node.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "base/status.h"

namespace forebay {

// As it lies in the memory that one process hands to another.
struct SeenFile {
  int64_t mtime_ns = 0;
  uint32_t length = 0;
  uint32_t change_stamp = 0;  // see Catalog::ChangeStamp
};
static_assert(sizeof(SeenFile) == 16);

// All files of a catalog, by sample.
struct SeenFiles {
  uint64_t list = 0;  // Catalog::ListHash, of which files they are
  std::vector<SeenFile> files;
};

// One opening's way to the others. Each opening asks once; who has to look by itself says what came
// of it, or ends without a word, which says that nothing did. For one thread.
class LookSharing {
 public:
  virtual ~LookSharing() = default;

  // Before anything of the data set called `name` is looked at. What another process has found,
  // after a wait that has a bound; nothing: look. `tick` is called while it waits, at least ten
  // times a second: false ends the wait with kCancelled, and no other error is returned.
  virtual Result<std::optional<SeenFiles>> Ask(const std::string& name,
                                               const std::function<bool()>& tick) = 0;
  // While it looks: any number that grows.
  virtual void Progress(uint64_t done) = 0;
  virtual void HandIn(const SeenFiles& seen) = 0;
};

}  // namespace forebay
