// Whether the program's memory can be read or written. libc leaves bad pointers to the kernel,
// which answers EFAULT; we look at paths and fill structures ourselves, before or instead of the
// kernel.
//
// The kernel is asked once a page: what it said is remembered in one word a page. So a call that is
// made again and again costs no system call, and a page that a program takes away after it has had
// a path in it is still believed in. Nothing here locks; any thread and signal handler may call it.
#pragma once

#include <cstddef>
#include <cstdint>

namespace forebay::posix {

bool PageReadable(uintptr_t at);

// Whether the first `bytes` of a string can be read, or all of it where it ends before. A null
// pointer cannot.
bool StringReadable(const char* string, size_t bytes);
// Whether all of a string can be read, and it ends within `most` bytes.
bool StringEnds(const char* string, size_t most);
// A longer path is refused by the kernel.
inline bool PathReadable(const char* path) { return StringEnds(path, 4096); }

bool Readable(const void* from, size_t bytes);
// What is there may change: only for what is about to be written. At least 8 bytes.
bool Writable(void* to, size_t bytes);

// Whether a path is an empty string.
inline bool IsEmptyPath(const char* path) { return StringReadable(path, 1) && path[0] == 0; }

}  // namespace forebay::posix
