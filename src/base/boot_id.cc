#include "base/boot_id.h"

#include <fcntl.h>
#include <unistd.h>

#include <array>

#include "base/owned.h"

namespace forebay {

BootId ReadBootId() {
  const OwnedFd fd(open(BootId::kPath, O_RDONLY | O_CLOEXEC));
  std::array<char, 64> text = {};
  const ssize_t n = fd.valid() ? read(fd.get(), text.data(), text.size()) : 0;
  return ParseBootId({text.data(), n > 0 ? static_cast<size_t>(n) : 0});
}

}  // namespace forebay
