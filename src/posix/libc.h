// libc's own functions, behind ours.
//
// Found by the library's constructor, or by the first call where one comes earlier. While they are
// being looked for, and where libc has none of that name, plain system calls stand in.
#pragma once

#include <fcntl.h>
#include <spawn.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <sys/statfs.h>
#include <sys/statvfs.h>
#include <sys/time.h>
#include <sys/uio.h>
#include <sys/xattr.h>
#include <unistd.h>
#include <utime.h>

#include <atomic>

// Younger than some versions of libc.
extern "C" int close_range(unsigned first, unsigned last, int flags) noexcept;
extern "C" void closefrom(int first) noexcept;

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

}  // namespace forebay::posix
