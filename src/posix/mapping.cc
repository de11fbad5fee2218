#include "posix/mapping.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/mman.h>

#include <cerrno>
#include <cstring>
#include <ctime>

#include "files/client.h"
#include "files/raw_call.h"
#include "posix/libc.h"
#include "posix/place.h"

namespace forebay::posix {

constinit std::atomic<bool> any_mapping = false;

namespace {

using files::RawArgument;
using files::RawCall;

constexpr size_t kMappings = 32;
constexpr int kNoAdvice = MADV_NORMAL;
constexpr uint64_t kMapPage = 4096;

// The state in the lowest bits, above it a number that is another one after each change.
enum : uint64_t { kFree = 0, kSet = 1, kClaimed = 2, kStates = 3, kNext = 4 };

struct Mapping {
  std::atomic<uint64_t> state = kFree;
  std::atomic<int> claimer = 0;  // a process: a forked child finds claims that nobody gives back
  std::atomic<uintptr_t> start = 0;
  std::atomic<uintptr_t> end = 0;
  int flags = 0;
  int advice = kNoAdvice;
  long offset = 0;
  uint64_t device = 0;  // as /proc/self/maps has it, which is not always what stat() says
  uint64_t inode = 0;
  PartialFile file;
};

constinit Mapping mappings[kMappings] = {};
constinit std::atomic<uint64_t> seen_copies = 0;

int Process() { return static_cast<int>(RawCall(SYS_getpid)); }

bool Claim(Mapping& mapping, uint64_t state) {
  const uint64_t claimed = (state & ~uint64_t{kStates}) + kNext + kClaimed;
  if (!mapping.state.compare_exchange_strong(state, claimed, std::memory_order_acq_rel)) {
    return false;
  }
  mapping.claimer.store(Process(), std::memory_order_relaxed);
  return true;
}

void Release(Mapping& mapping, uint64_t state) {
  const uint64_t now = mapping.state.load(std::memory_order_relaxed);
  mapping.state.store((now & ~uint64_t{kStates}) + kNext + state, std::memory_order_release);
}

// One that somebody has claimed, until it is given back; false when nobody will.
bool AwaitRelease(const Mapping& mapping) {
  constexpr int kMost = 100'000;  // some seconds: unmapping takes its time
  for (int i = 0; i < kMost; ++i) {
    if ((mapping.state.load(std::memory_order_acquire) & kStates) != kClaimed) return true;
    if (mapping.claimer.load(std::memory_order_relaxed) != Process()) return false;
    const timespec pause{.tv_sec = 0, .tv_nsec = 50'000};
    RawCall(SYS_nanosleep, RawArgument(&pause), 0);
  }
  return false;
}

bool Overlaps(const Mapping& mapping, uintptr_t start, uintptr_t end) {
  return mapping.start.load(std::memory_order_relaxed) < end &&
         start < mapping.end.load(std::memory_order_relaxed);
}

// Claims each one that overlaps and calls `change`, which says what becomes of it.
template <typename Change>
void EachOver(const void* at, size_t bytes, Change change) {
  if (!any_mapping.load(std::memory_order_acquire) || bytes == 0) return;
  const auto start = reinterpret_cast<uintptr_t>(at) & ~(kMapPage - 1);
  const uintptr_t end = reinterpret_cast<uintptr_t>(at) + bytes;
  for (Mapping& mapping : mappings) {
    for (;;) {
      const uint64_t state = mapping.state.load(std::memory_order_acquire);
      const bool over = Overlaps(mapping, start, end);
      std::atomic_thread_fence(std::memory_order_acquire);
      if (mapping.state.load(std::memory_order_relaxed) != state) continue;
      if ((state & kStates) == kFree || !over) break;
      if ((state & kStates) == kClaimed) {
        if (!AwaitRelease(mapping)) break;
      } else if (Claim(mapping, state)) {
        Release(mapping, change(mapping));
        break;
      }
    }
  }
}

// A line of /proc/self/maps.
struct Line {
  uint64_t start = 0;
  uint64_t end = 0;
  uint64_t offset = 0;
  uint64_t device = 0;
  uint64_t inode = 0;
  char rights[4] = {};
};

// Takes the text as it comes, in pieces.
class Lines {
 public:
  // Whether a line has ended with this byte.
  bool Take(char byte) {
    if (byte == '\n') {
      field_ = 0;
      return true;
    }
    if (field_ == 0) line_ = {}, field_ = 1;
    switch (field_) {
      case 1:  // start
        return Number(byte, '-', 16, &line_.start);
      case 2:  // end
        return Number(byte, ' ', 16, &line_.end);
      case 3:
        if (byte == ' ') {
          ++field_;
          right_ = 0;
        } else if (right_ < sizeof(line_.rights)) {
          line_.rights[right_++] = byte;
        }
        return false;
      case 4:
        return Number(byte, ' ', 16, &line_.offset);
      case 5: {  // device, "08:01"
        uint64_t low = line_.device & UINT32_MAX;
        if (byte == ':') {
          line_.device = low << 32;
        } else if (!Number(byte, ' ', 16, &low)) {
          line_.device = (line_.device & ~uint64_t{UINT32_MAX}) | low;
        }
        return false;
      }
      case 6:
        return Number(byte, ' ', 10, &line_.inode);
      default:
        return false;
    }
  }
  const Line& line() const { return line_; }

 private:
  bool Number(char byte, char last, uint64_t base, uint64_t* out) {
    if (byte == last) {
      ++field_;
      right_ = 0;
    } else {
      const int digit = byte >= 'a' ? byte - 'a' + 10 : byte - '0';
      *out = *out * base + static_cast<uint64_t>(digit);
    }
    return false;
  }

  Line line_;
  int field_ = 0;
  size_t right_ = 0;
};

// The mapping that begins there; false: none does.
bool FindLine(uintptr_t start, Line* out) {
  const long fd =
      RawCall(SYS_openat, AT_FDCWD, RawArgument("/proc/self/maps"), O_RDONLY | O_CLOEXEC, 0);
  if (fd < 0) return false;
  Lines lines;
  bool found = false;
  bool past = false;
  char buffer[1024];
  while (!found && !past) {
    const long got = RawCall(SYS_read, fd, RawArgument(buffer), sizeof(buffer));
    if (got == -EINTR) continue;
    if (got <= 0) break;
    for (long i = 0; i < got && !found && !past; ++i) {
      if (!lines.Take(buffer[i])) continue;
      *out = lines.line();
      found = out->start == start;
      past = out->start > start;
    }
  }
  RawCall(SYS_close, fd);
  return found;
}

// Whether it is there as it was mapped.
bool IsThere(const Mapping& mapping, Line* line) {
  return FindLine(mapping.start, line) && line->end == mapping.end &&
         line->offset == static_cast<uint64_t>(mapping.offset) &&
         std::memcmp(line->rights, "r--", 3) == 0 &&
         line->rights[3] == ((mapping.flags & MAP_PRIVATE) != 0 ? 'p' : 's');
}

bool MapAt(const Mapping& mapping, int fd) {
  const auto start = static_cast<long>(mapping.start.load(std::memory_order_relaxed));
  const auto bytes = static_cast<long>(mapping.end.load(std::memory_order_relaxed)) - start;
  const long result =
      RawCall(SYS_mmap, start, bytes, PROT_READ, mapping.flags | MAP_FIXED, fd, mapping.offset);
  return result == start;
}

// The copy can be mapped at all, with these flags: a mapping that fails leaves a gap on some
// kernels.
bool CanBeMapped(const Mapping& mapping, int fd) {
  const auto bytes = static_cast<long>(mapping.end - mapping.start);
  const long at = RawCall(SYS_mmap, 0, bytes, PROT_READ, mapping.flags, fd, mapping.offset);
  if (at < 0 && at > -4096) return false;
  RawCall(SYS_munmap, at, bytes);
  return true;
}

// Signals wait: a handler that unmaps it would wait for what it has interrupted.
class NoSignals {
 public:
  NoSignals() {
    const uint64_t all = ~uint64_t{0};
    RawCall(SYS_rt_sigprocmask, SIG_SETMASK, RawArgument(&all), RawArgument(&kept_), sizeof(kept_));
  }
  ~NoSignals() { RawCall(SYS_rt_sigprocmask, SIG_SETMASK, RawArgument(&kept_), 0, sizeof(kept_)); }
  NoSignals(const NoSignals&) = delete;
  NoSignals& operator=(const NoSignals&) = delete;

 private:
  uint64_t kept_ = 0;
};

// False: it has changed since it was looked at.
bool Move(Mapping& mapping, uint64_t state, int fd) {
  const NoSignals quiet;
  if (!Claim(mapping, state)) return false;
  if (MapAt(mapping, fd)) {
    if (mapping.advice != kNoAdvice) {
      RawCall(SYS_madvise, static_cast<long>(mapping.start),
              static_cast<long>(mapping.end - mapping.start), mapping.advice);
    }
  } else {
    // Whatever came of it, what was there is there again.
    const long source =
        RawCall(SYS_openat, AT_FDCWD, RawArgument(mapping.file.path), O_RDONLY | O_CLOEXEC, 0);
    if (source >= 0) {
      (void)MapAt(mapping, static_cast<int>(source));
      RawCall(SYS_close, source);
    }
  }
  Release(mapping, kFree);
  return true;
}

// A look at one that is not claimed; the move that follows makes sure that it has not changed.
void TryMove(Mapping& mapping) {
  const uint64_t state = mapping.state.load(std::memory_order_acquire);
  if ((state & kStates) != kSet) return;
  const int fd = OpenCopyOf(mapping.file);
  if (fd < 0) return;
  Line line;
  if (IsThere(mapping, &line) && line.device == mapping.device && line.inode == mapping.inode &&
      CanBeMapped(mapping, fd)) {
    // Advice changes it, too: then the next call moves it.
    if (!Move(mapping, state, fd)) seen_copies.store(0, std::memory_order_relaxed);
  } else if (Claim(mapping, state)) {
    Release(mapping, kFree);
  }
  RawCall(SYS_close, fd);
}

}  // namespace

void TrackMapping(void* at, size_t bytes, int flags, long offset, const PartialFile& file,
                  uint64_t copies) {
  for (Mapping& mapping : mappings) {
    const uint64_t state = mapping.state.load(std::memory_order_acquire);
    const bool left = (state & kStates) == kClaimed &&
                      mapping.claimer.load(std::memory_order_relaxed) != Process();
    if (((state & kStates) != kFree && !left) || !Claim(mapping, state)) continue;
    mapping.start = reinterpret_cast<uintptr_t>(at);
    mapping.end = mapping.start + ((bytes + kMapPage - 1) & ~(kMapPage - 1));
    mapping.flags = flags;
    mapping.advice = kNoAdvice;
    mapping.offset = offset;
    mapping.file.device = file.device;
    mapping.file.inode = file.inode;
    mapping.file.size = file.size;
    mapping.file.length = file.length;
    std::memcpy(mapping.file.path, file.path, file.length + 1);
    Line line;
    const bool there = IsThere(mapping, &line);
    mapping.device = line.device;
    mapping.inode = line.inode;
    Release(mapping, there ? kSet : kFree);
    seen_copies.store(copies, std::memory_order_relaxed);
    if (there) any_mapping.store(true, std::memory_order_release);
    return;
  }
}

void ForgetMappings(const void* at, size_t bytes) {
  EachOver(at, bytes, [](const Mapping&) -> uint64_t { return kFree; });
}

void AdviseMapping(const void* at, size_t bytes, int advice) {
  EachOver(at, bytes, [&](Mapping& mapping) -> uint64_t {
    const auto start = reinterpret_cast<uintptr_t>(at);
    if (start > mapping.start || start + bytes < mapping.end) return kFree;  // of a part
    mapping.advice = advice;
    return kSet;
  });
}

[[gnu::noinline]] void MoveMappingsNow() {
  const uint64_t copies = TheClient().large_copies();
  uint64_t seen = seen_copies.load(std::memory_order_relaxed);
  if (copies == seen ||
      !seen_copies.compare_exchange_strong(seen, copies, std::memory_order_relaxed)) {
    return;
  }
  for (Mapping& mapping : mappings) TryMove(mapping);
}

}  // namespace forebay::posix
