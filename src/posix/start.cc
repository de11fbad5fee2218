// Runs when the library is loaded, before the program and after libc.
#include <cerrno>

#include "posix/libc.h"
#include "posix/place.h"

namespace forebay::posix {
namespace {

[[gnu::constructor]] void Start() {
  const int kept = errno;
  libc.FindAll();
  StartPlace();
  errno = kept;
}

}  // namespace
}  // namespace forebay::posix
