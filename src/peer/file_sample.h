// A sample of a growing data set as other nodes know it: by what it is a copy of.
//
// Each node numbers the files of such a data set in the order in which they were opened there, so
// numbers mean nothing to others. The folder itself is named once, when the data set is announced;
// samples are named by the path below it, so that the same data may be mounted at other paths.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace forebay::peer {

struct FileSample {
  // What a message's header has room for. Longer ones are read from the source.
  static constexpr size_t kMostPath = 3072;
  // A node that learns of a file from another one takes memory for all of its samples.
  static constexpr uint64_t kMostBlocks = uint64_t{1} << 20;

  std::string path;    // of the file, below the data folder
  uint64_t bytes = 0;  // of the file
  int64_t modified_ns = 0;
  uint32_t block = 0;   // what the file is read by; 0: it is one sample
  uint64_t offset = 0;  // of the sample
  template <typename Self, typename Io>
  static void Fields(Self& m, Io& io) {
    io(m.path, m.bytes, m.modified_ns, m.block, m.offset);
  }
  // The path leads below the folder, and the file has such a sample.
  bool Valid() const;
  uint32_t length() const;
  bool operator==(const FileSample&) const = default;
};

}  // namespace forebay::peer
