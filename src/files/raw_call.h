// A system call without libc around it: errno stays as it is, and no thread is cancelled within.
//
// The preloaded library stands in libc's place, so what it needs itself must not come back to it.
#pragma once

#include <sys/syscall.h>

#include <cerrno>
#include <cstdint>
#if !defined(__x86_64__) && !defined(__aarch64__)
#include <unistd.h>
#endif

namespace forebay::files {

// The result, or the negative errno.
inline long RawCall(long number, long a = 0, long b = 0, long c = 0, long d = 0, long e = 0,
                    long f = 0) {
#if defined(__x86_64__)
  register long r10 __asm__("r10") = d;
  register long r8 __asm__("r8") = e;
  register long r9 __asm__("r9") = f;
  long result = number;
  __asm__ volatile("syscall"
                   : "+a"(result)
                   : "D"(a), "S"(b), "d"(c), "r"(r10), "r"(r8), "r"(r9)
                   : "rcx", "r11", "memory");
  return result;
#elif defined(__aarch64__)
  register long x8 __asm__("x8") = number;
  register long x0 __asm__("x0") = a;
  register long x1 __asm__("x1") = b;
  register long x2 __asm__("x2") = c;
  register long x3 __asm__("x3") = d;
  register long x4 __asm__("x4") = e;
  register long x5 __asm__("x5") = f;
  __asm__ volatile("svc 0"
                   : "+r"(x0)
                   : "r"(x8), "r"(x1), "r"(x2), "r"(x3), "r"(x4), "r"(x5)
                   : "memory");
  return x0;
#else
  const int kept = errno;
  long result = syscall(number, a, b, c, d, e, f);
  if (result == -1) result = -errno;
  errno = kept;
  return result;
#endif
}

inline long RawArgument(const void* pointer) { return reinterpret_cast<long>(pointer); }

}  // namespace forebay::files
