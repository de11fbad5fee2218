// libc's own functions, behind ours.
//
// Found by the library's constructor, or by the first call where one comes earlier. While they are
// being looked for, and where libc has none of that name, plain system calls stand in.
#pragma once

#include <fcntl.h>
#include <spawn.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/statfs.h>
#include <sys/statvfs.h>
#include <sys/time.h>
#include <sys/uio.h>
#include <sys/xattr.h>
#include <unistd.h>
#include <utime.h>

#include <atomic>
#include <cerrno>

#include "files/raw_call.h"

// Younger than some versions of libc.
extern "C" int close_range(unsigned first, unsigned last, int flags) noexcept;
extern "C" void closefrom(int first) noexcept;
// glibc 2.32 and later: 0 from the first thread on.
extern "C" char __libc_single_threaded __attribute__((weak));

namespace forebay::posix {

class AnyFunction {
 public:
  constexpr explicit AnyFunction(const char* name) : name_(name) {}
  void* Find();

 protected:
  std::atomic<void*> found_ = nullptr;
  const char* name_;
};

int Missing();  // -1 with ENOSYS

template <typename Function>
class LibcFunction : public AnyFunction {
 public:
  constexpr explicit LibcFunction(const char* name) : AnyFunction(name) {}

  template <typename... Arguments>
  auto operator()(Arguments... arguments) {
    void* function = found_.load(std::memory_order_relaxed);
    if (function == nullptr) [[unlikely]]
      function = Find();
    return reinterpret_cast<Function*>(function)(arguments...);
  }
};

struct Libc {
#define X(name) LibcFunction<decltype(::name)> name{#name};
#include "posix/libc_functions.inc"
#undef X
  void FindAll();
};

extern Libc libc;

// open(), openat(), read() and close() behind ours are libc's own.
extern std::atomic<bool> libc_is_next;

// Whether those do nothing but their system call: without a second thread nobody is cancelled. One
// jump less is worth it: the processor does not foresee jumps after a system call.
inline bool CallsAlone() {
  return libc_is_next.load(std::memory_order_relaxed) && __libc_single_threaded != 0;
}

inline long DirectCall(long number, long a, long b = 0, long c = 0, long d = 0) {
  const long result = files::RawCall(number, a, b, c, d);
  if (result >= 0) [[likely]]
    return result;
  errno = static_cast<int>(-result);
  return -1;
}

}  // namespace forebay::posix
