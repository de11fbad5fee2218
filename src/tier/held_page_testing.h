// A disk that hangs, as far as tests are concerned: memory that a read or a write of it waits for.
#pragma once

#include <fcntl.h>
#include <linux/userfaultfd.h>
#include <poll.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstddef>
#include <cstdint>
#include <span>

#include "base/owned.h"

namespace forebay::tier_testing {

// A page that nobody has filled yet: whoever reads it waits for Fill.
class HeldPage {
 public:
  HeldPage() {
    const int fd = static_cast<int>(syscall(SYS_userfaultfd, O_CLOEXEC | O_NONBLOCK));
    if (fd < 0) return;
    fd_ = OwnedFd(fd);
    uffdio_api api{};
    api.api = UFFD_API;
    page_ = mmap(nullptr, kBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    uffdio_register range{};
    range.range = {reinterpret_cast<uint64_t>(page_), kBytes};
    range.mode = UFFDIO_REGISTER_MODE_MISSING;
    ready_ = page_ != MAP_FAILED && ioctl(fd, UFFDIO_API, &api) == 0 &&
             ioctl(fd, UFFDIO_REGISTER, &range) == 0;
  }
  ~HeldPage() {
    if (page_ != MAP_FAILED) munmap(page_, kBytes);
  }
  HeldPage(const HeldPage&) = delete;
  HeldPage& operator=(const HeldPage&) = delete;

  bool ready() const { return ready_; }
  std::span<std::byte> bytes() { return {static_cast<std::byte*>(page_), kBytes}; }
  bool SomebodyWaits() {
    pollfd waiting{fd_.get(), POLLIN, 0};
    return poll(&waiting, 1, 60'000) == 1;
  }
  bool Fill() {
    uffdio_zeropage zero{};
    zero.range = {reinterpret_cast<uint64_t>(page_), kBytes};
    return ioctl(fd_.get(), UFFDIO_ZEROPAGE, &zero) == 0;
  }

 private:
  static constexpr size_t kBytes = 4096;
  OwnedFd fd_;
  void* page_ = MAP_FAILED;
  bool ready_ = false;
};

}  // namespace forebay::tier_testing
