// Opens files of data folders by their copies, and asks the service for what is missing. Used by
// the preloaded library, the mount, the C interface and Python.
//
// Safe for concurrent use by threads, across fork and in signal handlers: it holds a mapping of the
// table and three strings, all constant after Start(), and neither locks nor allocates. On any
// trouble the source itself is opened.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

#include "files/key.h"
#include "files/message.h"
#include "files/table.h"

namespace forebay::files {

class Client {
 public:
  // What a system call is made with: the preloaded library gives libc's own.
  struct Calls {
    int (*open)(const char* path, int flags, unsigned mode);
    int (*close)(int fd);
  };
  static const Calls kLibc;

  // From the three variables; false when one is missing or wrong, and the client stays off. Nothing
  // is held open. A cache whose table is gone leaves it off.
  bool Start(const char* cache, const char* socket, const char* sources, const Calls& calls);
  bool on() const { return table_.valid() && !table_.closed(); }

  // Whether a normal path lies in a data folder, and not in the cache.
  bool Covers(std::string_view path) const;

  enum class Found : uint8_t { kCopy, kSource, kPartial };
  // The copy of a normal path, opened with O_RDONLY and those of `flags` that an open of a copy can
  // honour (O_CLOEXEC, O_NOFOLLOW, O_NONBLOCK, O_NOCTTY, O_LARGEFILE); asks and waits for one that
  // is not there. -1 with kSource or kPartial: open the source.
  int OpenCopy(std::string_view path, int flags, Found* found) const;
  // The copy's name when there is one right now; asks nobody.
  bool CopyPath(std::string_view path, char* out, size_t size) const;
  // Before and after a change of a path, or of all below it. Closes the table when the service does
  // not answer.
  void Changed(std::string_view path) const;
  // Bytes of a file that is being copied: as pread(), or -1 with EAGAIN when the source is to be
  // asked.
  int64_t ReadPart(std::string_view path, void* out, size_t bytes, uint64_t offset) const;

 private:
  // One question and its answer; kBad when there is none in time.
  Answer Ask(Kind kind, std::string_view path, uint64_t a, uint64_t b) const;

  FileTable table_;
  const Calls* calls_ = nullptr;
  char cache_[1024] = {};
  char socket_[108] = {};
  char sources_[4096] = {};  // each ends with a 0, the last with two
};

}  // namespace forebay::files
