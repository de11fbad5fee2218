// In a file of its own: the fault simulator has another one (sim/faults/substitutes.cc).
#include <sys/random.h>

#include "peer/secret.h"

namespace forebay::peer {

Digest RandomDigest() {
  Digest digest{};
  size_t filled = 0;
  while (filled < digest.size()) {
    const ssize_t got = ::getrandom(digest.data() + filled, digest.size() - filled, 0);
    if (got > 0) filled += static_cast<size_t>(got);
  }
  return digest;
}

}  // namespace forebay::peer
