#include "posix/libc.h"

#include <dlfcn.h>

#include <cerrno>
#include <cstdarg>
#include <cstring>

#include "files/raw_call.h"

namespace forebay::posix {
namespace {

using files::RawArgument;
using files::RawCall;

// dlsym() may allocate, and an allocator may open files.
constinit thread_local bool looking = false;

int Done(long result) {
  if (result >= 0) return static_cast<int>(result);
  errno = static_cast<int>(-result);
  return -1;
}

int RawOpenAt(int folder, const char* path, int flags, ...) {
  va_list more;
  va_start(more, flags);
  const auto mode = va_arg(more, unsigned);
  va_end(more);
  return Done(RawCall(SYS_openat, folder, RawArgument(path), flags, mode));
}
int RawOpen(const char* path, int flags, ...) {
  va_list more;
  va_start(more, flags);
  const auto mode = va_arg(more, unsigned);
  va_end(more);
  return Done(RawCall(SYS_openat, AT_FDCWD, RawArgument(path), flags, mode));
}
int RawClose(int fd) { return Done(RawCall(SYS_close, fd)); }
ssize_t RawRead(int fd, void* out, size_t bytes) {
  return Done(RawCall(SYS_read, fd, RawArgument(out), static_cast<long>(bytes)));
}
ssize_t RawPread(int fd, void* out, size_t bytes, off_t offset) {
  return Done(RawCall(SYS_pread64, fd, RawArgument(out), static_cast<long>(bytes), offset));
}
int RawFstatat(int folder, const char* path, struct stat* out, int flags) {
  return Done(RawCall(SYS_newfstatat, folder, RawArgument(path), RawArgument(out), flags));
}
int RawStat(const char* path, struct stat* out) { return RawFstatat(AT_FDCWD, path, out, 0); }
int RawLstat(const char* path, struct stat* out) {
  return RawFstatat(AT_FDCWD, path, out, AT_SYMLINK_NOFOLLOW);
}
int RawFstat(int fd, struct stat* out) { return Done(RawCall(SYS_fstat, fd, RawArgument(out))); }
int RawAccess(const char* path, int mode) {
  return Done(RawCall(SYS_faccessat, AT_FDCWD, RawArgument(path), mode));
}
void* RawMmap(void* at, size_t bytes, int protection, int flags, int fd, off_t offset) {
  const long result =
      RawCall(SYS_mmap, RawArgument(at), static_cast<long>(bytes), protection, flags, fd, offset);
  if (result >= 0 || result < -4095) return reinterpret_cast<void*>(result);
  errno = static_cast<int>(-result);
  return MAP_FAILED;
}
int RawMunmap(void* at, size_t bytes) {
  return Done(RawCall(SYS_munmap, RawArgument(at), static_cast<long>(bytes)));
}
int RawMprotect(void* at, size_t bytes, int protection) {
  return Done(RawCall(SYS_mprotect, RawArgument(at), static_cast<long>(bytes), protection));
}
void* RawMremap(void* at, size_t bytes, size_t new_bytes, int flags, ...) {
  va_list more;
  va_start(more, flags);
  void* const new_at = va_arg(more, void*);
  va_end(more);
  const long result = RawCall(SYS_mremap, RawArgument(at), static_cast<long>(bytes),
                              static_cast<long>(new_bytes), flags, RawArgument(new_at));
  if (result >= 0 || result < -4095) return reinterpret_cast<void*>(result);
  errno = static_cast<int>(-result);
  return MAP_FAILED;
}
int RawMadvise(void* at, size_t bytes, int advice) {
  return Done(RawCall(SYS_madvise, RawArgument(at), static_cast<long>(bytes), advice));
}
int RawFcntl(int fd, int command, ...) {
  va_list more;
  va_start(more, command);
  const long argument = va_arg(more, long);
  va_end(more);
  return Done(RawCall(SYS_fcntl, fd, command, argument));
}

// What an allocator does when it starts; and stat(), which libc did not have before 2.33.
void* InsteadOf(const char* name) {
  struct Pair {
    const char* name;
    void* function;
  };
  const Pair kPairs[] = {
      {"open", reinterpret_cast<void*>(&RawOpen)},
      {"openat", reinterpret_cast<void*>(&RawOpenAt)},
      {"close", reinterpret_cast<void*>(&RawClose)},
      {"read", reinterpret_cast<void*>(&RawRead)},
      {"pread", reinterpret_cast<void*>(&RawPread)},
      {"fstatat", reinterpret_cast<void*>(&RawFstatat)},
      {"stat", reinterpret_cast<void*>(&RawStat)},
      {"lstat", reinterpret_cast<void*>(&RawLstat)},
      {"fstat", reinterpret_cast<void*>(&RawFstat)},
      {"access", reinterpret_cast<void*>(&RawAccess)},
      {"fcntl", reinterpret_cast<void*>(&RawFcntl)},
      {"mmap", reinterpret_cast<void*>(&RawMmap)},
      {"munmap", reinterpret_cast<void*>(&RawMunmap)},
      {"mprotect", reinterpret_cast<void*>(&RawMprotect)},
      {"mremap", reinterpret_cast<void*>(&RawMremap)},
      {"madvise", reinterpret_cast<void*>(&RawMadvise)},
  };
  for (const Pair& pair : kPairs) {
    if (std::strcmp(pair.name, name) == 0) return pair.function;
  }
  if (std::strcmp(name, "fopen") == 0 || std::strcmp(name, "fdopen") == 0 ||
      std::strcmp(name, "freopen") == 0) {
    return reinterpret_cast<void*>(+[]() -> void* { return nullptr; });
  }
  return reinterpret_cast<void*>(&Missing);
}

// Whether the function is glibc's own.
bool IsLibcs(AnyFunction& function) {
  Dl_info found, own;
  void* const known = dlsym(RTLD_NEXT, "gnu_get_libc_version");
  return known != nullptr && dladdr(function.Find(), &found) != 0 && dladdr(known, &own) != 0 &&
         found.dli_fbase == own.dli_fbase;
}

}  // namespace

constinit Libc libc;
constinit std::atomic<bool> libc_is_next = false;

int Missing() {
  errno = ENOSYS;
  return -1;
}

void* AnyFunction::Find() {
  void* found = found_.load(std::memory_order_acquire);
  if (found != nullptr) return found;
  if (looking) return InsteadOf(name_);
  const int kept = errno;
  looking = true;
  found = dlsym(RTLD_NEXT, name_);
  looking = false;
  errno = kept;
  if (found == nullptr) found = InsteadOf(name_);
  found_.store(found, std::memory_order_release);
  return found;
}

void Libc::FindAll() {
#define X(name) name.Find();
#include "posix/libc_functions.inc"
#undef X
  libc_is_next.store(&__libc_single_threaded != nullptr && sizeof(long) == 8 && IsLibcs(open) &&
                         IsLibcs(openat) && IsLibcs(read) && IsLibcs(close),
                     std::memory_order_relaxed);
}

}  // namespace forebay::posix
