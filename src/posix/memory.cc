#include "posix/memory.h"

#include <signal.h>

#include <atomic>
#include <cerrno>
#include <cstring>
#include <initializer_list>

#include "files/raw_call.h"

namespace forebay::posix {
namespace {

using files::RawCall;

constexpr uintptr_t kPage = 4096;  // or a part of one
constexpr size_t kWord = 8;        // of a set of signals
constexpr size_t kRemembered = 256;

// Twice a page's number, and 1 more when it can be written. A page stands at its own place, so that
// a word is all that is ever read or written.
constinit std::atomic<uintptr_t> known[kRemembered] = {};

std::atomic<uintptr_t>& PlaceOf(uintptr_t page) { return known[page % kRemembered]; }

// sigprocmask() looks at the set before it refuses to do what it does not know.
bool AskReadable(uintptr_t at) {
  return RawCall(SYS_rt_sigprocmask, -1, static_cast<long>(at & ~(kWord - 1)), 0, kWord) != -EFAULT;
}

// And it tells what is blocked now, where that can be written.
bool AskWritable(uintptr_t at) {
  return RawCall(SYS_rt_sigprocmask, SIG_BLOCK, 0, static_cast<long>(at), kWord) != -EFAULT;
}

bool KnownWritable(uintptr_t at) {
  const uintptr_t page = at / kPage;
  return PlaceOf(page).load(std::memory_order_relaxed) == page * 2 + 1;
}

}  // namespace

bool PageReadable(uintptr_t at) {
  const uintptr_t page = at / kPage;
  std::atomic<uintptr_t>& place = PlaceOf(page);
  const uintptr_t word = place.load(std::memory_order_relaxed);
  if (page != 0 && word / 2 == page) [[likely]]
    return true;
  if (!AskReadable(at)) return false;
  place.store(page * 2, std::memory_order_relaxed);
  return true;
}

bool StringReadable(const char* string, size_t bytes) {
  if (string == nullptr) return false;
  for (size_t seen = 0; seen < bytes;) {
    const auto at = reinterpret_cast<uintptr_t>(string) + seen;
    if (!PageReadable(at)) return false;
    const size_t here = kPage - at % kPage;
    if (bytes - seen <= here || std::memchr(string + seen, 0, here) != nullptr) return true;
    seen += here;
  }
  return true;
}

bool StringEnds(const char* string, size_t most) {
  if (string == nullptr) return false;
  for (size_t seen = 0; seen < most;) {
    const auto at = reinterpret_cast<uintptr_t>(string) + seen;
    if (!PageReadable(at)) return false;
    const size_t rest = kPage - at % kPage;
    const size_t here = rest < most - seen ? rest : most - seen;
    if (std::memchr(string + seen, 0, here) != nullptr) return true;
    seen += here;
  }
  return false;
}

bool Readable(const void* from, size_t bytes) {
  if (bytes == 0) return true;
  const auto first = reinterpret_cast<uintptr_t>(from);
  if (first > UINTPTR_MAX - bytes) return false;
  for (uintptr_t page = first / kPage; page <= (first + bytes - 1) / kPage; ++page) {
    if (!PageReadable(page == first / kPage ? first : page * kPage)) return false;
  }
  return true;
}

bool Writable(void* to, size_t bytes) {
  const auto first = reinterpret_cast<uintptr_t>(to);
  if (first > UINTPTR_MAX - bytes) return false;
  const uintptr_t last = first + bytes - kWord;
  if (KnownWritable(first) && KnownWritable(first + bytes - 1)) [[likely]]
    return true;
  if (!AskWritable(first) || !AskWritable(last)) return false;
  for (const uintptr_t at : {first, first + bytes - 1}) {
    PlaceOf(at / kPage).store(at / kPage * 2 + 1, std::memory_order_relaxed);
  }
  return true;
}

}  // namespace forebay::posix
