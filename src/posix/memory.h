// Whether the program's memory can be read or written. libc leaves bad pointers to the kernel,
// which answers EFAULT; we look at paths and fill structures ourselves, before or instead of the
// kernel.
//
// The kernel is asked once a page: what it said is remembered in one word a page. So a call that is
// made again and again costs no system call, and a page that a program takes away after it has had
// a path in it is still believed in. Nothing here locks; any thread and signal handler may call it.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

namespace forebay::posix {

constexpr uintptr_t kPage = 4096;  // or a part of one
constexpr size_t kRemembered = 256;
// Twice a page's number, and 1 more when it can be written. A page stands at its own place, so that
// a word is all that is ever read or written.
extern std::atomic<uintptr_t> known_pages[kRemembered];

bool AskPage(uintptr_t at);
inline bool PageReadable(uintptr_t at) {
  const uintptr_t page = at / kPage;
  const uintptr_t word = known_pages[page % kRemembered].load(std::memory_order_relaxed);
  if (word / 2 == page && page != 0) [[likely]]
    return true;
  return AskPage(at);
}

// Whether the first `bytes` of a string can be read, or all of it where it ends before. A null
// pointer cannot.
bool LongStringReadable(const char* string, size_t bytes);
inline bool StringReadable(const char* string, size_t bytes) {
  const auto at = reinterpret_cast<uintptr_t>(string);
  if (bytes <= kPage - at % kPage) [[likely]]
    return string != nullptr && PageReadable(at);
  return LongStringReadable(string, bytes);
}
// The length of a string all of which can be read; kUnreadable where it cannot, or does not end
// within `most` bytes.
inline constexpr size_t kUnreadable = SIZE_MAX;
size_t StringLength(const char* string, size_t most);
// A longer path is refused by the kernel.
inline size_t PathLength(const char* path) { return StringLength(path, 4096); }
inline bool PathReadable(const char* path) { return PathLength(path) != kUnreadable; }

bool Readable(const void* from, size_t bytes);
// What is there may change: only for what is about to be written. At least 8 bytes.
bool Writable(void* to, size_t bytes);

// Whether a path is an empty string.
inline bool IsEmptyPath(const char* path) { return StringReadable(path, 1) && path[0] == 0; }

}  // namespace forebay::posix
