#include <sys/mman.h>

#include <cerrno>

#include "files/raw_call.h"
#include "posix/calls.h"
#include "posix/libc.h"
#include "posix/mapping.h"
#include "posix/partial.h"
#include "posix/place.h"

namespace forebay::posix {
namespace {

// With these, and PROT_READ alone, a mapping of the copy is as good.
constexpr int kMovable = MAP_SHARED | MAP_PRIVATE | MAP_NORESERVE | MAP_POPULATE;

// The copy, if it is complete; else the source, and nobody copies it meanwhile.
[[gnu::noinline]] void* MapPartial(void* at, size_t bytes, int protection, int flags, int fd,
                                   long offset) {
  PartialFile file;
  if (!PartialOf(fd, &file)) return libc.mmap(at, bytes, protection, flags, fd, offset);
  const int kept = errno;
  const uint64_t copies = TheClient().large_copies();
  const int copy = TheClient().ReadsDirectly(file.view()) ? OpenCopyOf(file) : -1;
  if (copy >= 0) {
    void* const result = libc.mmap(at, bytes, protection, flags, copy, offset);
    const int error = errno;
    files::RawCall(SYS_close, copy);
    errno = error;
    return result;
  }
  errno = kept;
  void* const result = libc.mmap(at, bytes, protection, flags, fd, offset);
  if (result != MAP_FAILED && protection == PROT_READ && (flags & ~kMovable) == 0) {
    TrackMapping(result, bytes, flags & ~MAP_POPULATE, offset, file, copies);
  }
  return result;
}

bool Lasts(int advice) {
  return advice == MADV_NORMAL || advice == MADV_RANDOM || advice == MADV_SEQUENTIAL;
}

bool Passes(int advice) {
  return advice == MADV_WILLNEED || advice == MADV_DONTNEED || advice == MADV_FREE;
}

}  // namespace

void* Map(void* at, size_t bytes, int protection, int flags, int fd, long offset) {
  MoveMappings();
  if ((flags & MAP_FIXED) != 0) ForgetMappings(at, bytes);
  if (fd >= 0 && MayBePartial(fd)) [[unlikely]]
    return MapPartial(at, bytes, protection, flags, fd, offset);
  return libc.mmap(at, bytes, protection, flags, fd, offset);
}

int Unmap(void* at, size_t bytes) {
  ForgetMappings(at, bytes);
  return libc.munmap(at, bytes);
}

int Protect(void* at, size_t bytes, int protection) {
  ForgetMappings(at, bytes);
  return libc.mprotect(at, bytes, protection);
}

int ProtectByKey(void* at, size_t bytes, int protection, int key) {
  ForgetMappings(at, bytes);
  return libc.pkey_mprotect(at, bytes, protection, key);
}

void* Remap(void* at, size_t bytes, size_t new_bytes, int flags, void* new_at) {
  // One of no bytes is made again, elsewhere.
  ForgetMappings(at, bytes == 0 ? 1 : bytes);
  if ((flags & MREMAP_FIXED) != 0) ForgetMappings(new_at, new_bytes);
  return libc.mremap(at, bytes, new_bytes, flags, new_at);
}

int Advise(void* at, size_t bytes, int advice, bool posix) {
  if (Lasts(advice)) {
    AdviseMapping(at, bytes, advice);
  } else if (!Passes(advice)) {
    ForgetMappings(at, bytes);
  }
  return posix ? libc.posix_madvise(at, bytes, advice) : libc.madvise(at, bytes, advice);
}

int LockMemory(const void* at, size_t bytes, unsigned flags, bool with_flags) {
  ForgetMappings(at, bytes);
  return with_flags ? libc.mlock2(at, bytes, flags) : libc.mlock(at, bytes);
}

void MapsDirectly(long number, const long (&a)[6]) {
  const auto* const at = reinterpret_cast<const void*>(a[0]);
  const auto bytes = static_cast<size_t>(a[1]);
  switch (number) {
    case SYS_mmap:
      if ((a[3] & MAP_FIXED) != 0) ForgetMappings(at, bytes);
      break;
    case SYS_mremap:
      ForgetMappings(at, bytes == 0 ? 1 : bytes);
      if ((a[3] & MREMAP_FIXED) != 0) {
        ForgetMappings(reinterpret_cast<const void*>(a[4]), static_cast<size_t>(a[2]));
      }
      break;
    case SYS_munmap:
    case SYS_mprotect:
    case SYS_pkey_mprotect:
    case SYS_madvise:
    case SYS_mlock:
    case SYS_mlock2:
    case SYS_remap_file_pages:
      ForgetMappings(at, bytes);
      break;
    default:
      break;
  }
}

}  // namespace forebay::posix
