#include "posix/memory.h"

#include <signal.h>
#ifdef __SSE2__
#include <emmintrin.h>
#endif

#include <atomic>
#include <bit>
#include <cerrno>
#include <cstring>
#include <initializer_list>

#include "files/raw_call.h"

namespace forebay::posix {
namespace {

using files::RawCall;

constexpr size_t kWord = 8;  // of a set of signals

std::atomic<uintptr_t>& PlaceOf(uintptr_t page) { return known_pages[page % kRemembered]; }

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

constinit std::atomic<uintptr_t> known_pages[kRemembered] = {};

bool AskPage(uintptr_t at) {
  if (!AskReadable(at)) return false;
  const uintptr_t page = at / kPage;
  PlaceOf(page).store(page * 2, std::memory_order_relaxed);
  return true;
}

bool LongStringReadable(const char* string, size_t bytes) {
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

namespace {

// As memchr(..., 0, ...). libc's is reached by a jump that the processor does not foresee after a
// system call, and lies in code that the call has pushed out of the cache.
#ifdef __SSE2__
// Aligned blocks never lie in two pages.
const char* FindEnd(const char* from, size_t bytes) {
  const auto ends = [](const char* block) {
    const __m128i here = _mm_load_si128(reinterpret_cast<const __m128i*>(block));
    return static_cast<unsigned>(_mm_movemask_epi8(_mm_cmpeq_epi8(here, _mm_setzero_si128())));
  };
  const char* const end = from + bytes;
  const size_t skipped = reinterpret_cast<uintptr_t>(from) % sizeof(__m128i);
  const char* block = from - skipped;
  unsigned found = ends(block) >> skipped << skipped;
  while (found == 0) {
    block += sizeof(__m128i);
    if (block >= end) return nullptr;
    found = ends(block);
  }
  const char* at = block + std::countr_zero(found);
  return at < end ? at : nullptr;
}
#else
const char* FindEnd(const char* from, size_t bytes) {
  return static_cast<const char*>(std::memchr(from, 0, bytes));
}
#endif

}  // namespace

size_t StringLength(const char* string, size_t most) {
  if (string == nullptr) return kUnreadable;
  for (size_t seen = 0; seen < most;) {
    const auto at = reinterpret_cast<uintptr_t>(string) + seen;
    if (!PageReadable(at)) return kUnreadable;
    const size_t rest = kPage - at % kPage;
    const size_t here = rest < most - seen ? rest : most - seen;
    if (const char* end = FindEnd(string + seen, here); end != nullptr) {
      return static_cast<size_t>(end - string);
    }
    seen += here;
  }
  return kUnreadable;
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
