#include "peer/file_sample.h"

#include <algorithm>
#include <limits>

#include "catalog/paths.h"

namespace forebay::peer {

bool FileSample::Valid() const {
  if (path.size() > kMostPath || !IsPathBelow(path)) return false;
  if (block == 0) return offset == 0 && bytes <= std::numeric_limits<uint32_t>::max();
  return bytes / block < kMostBlocks && offset % block == 0 && (offset < bytes || offset == 0);
}

uint32_t FileSample::length() const {
  const uint64_t left = bytes - offset;
  return static_cast<uint32_t>(block == 0 ? left : std::min<uint64_t>(left, block));
}

}  // namespace forebay::peer
