// Tells the service of a change of a path, before and after it is made. Both the path as the
// program names it and where it really leads: copies are found by either.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

#include "posix/place.h"

namespace forebay::posix {

class Change {
 public:
  enum class What : uint8_t {
    kFile,        // the file that the path leads to
    kAttributes,  // its times, owner, mode or extended attributes; a folder's change no file
    kName,        // the name itself, which may be a link and is no folder
    kTree,        // the name, and all below if it is a folder
    kNewLink,     // a link that is made; what it leads to stays as it is
  };
  Change(int folder, const char* path, What what);
  // Of what a descriptor stands for.
  Change(int fd, What what);
  ~Change() { Tell(); }
  Change(const Change&) = delete;
  Change& operator=(const Change&) = delete;

 private:
  void Tell() const;

  What what_;
  std::string_view named_;
  std::string_view real_;
  char named_room_[kMostPath];
  char real_room_[kMostPath];
};

// An open for writing: before it the path, and afterwards what was opened.
// Not inlined: a signal handler's stack may have no room for two paths at once.
[[gnu::noinline]] void OpensToWrite(int folder, const char* path);
[[gnu::noinline]] void OpenedToWrite(int fd);

}  // namespace forebay::posix
