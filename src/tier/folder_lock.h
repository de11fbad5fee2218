// The lock that makes one process the writer of a cache folder.
#pragma once

#include <string>

#include "base/owned.h"
#include "base/status.h"

namespace forebay {

class FolderLock {
 public:
  static constexpr const char* kName = "forebay.lock";

  FolderLock() = default;
  // 0: held, until Unlock or the end of the process. EWOULDBLOCK: somebody else has it. EPERM: what
  // has the lock's name is not a file of this user; it is left alone. A new lock is synced, with
  // its name: it says that the folder is a cache, whatever else a power loss takes.
  int Take(int folder);
  // Of one that was taken: whether somebody has called NoteSwept since the machine was started. If
  // not, what was not synced may have been lost.
  bool same_boot() const { return same_boot_; }
  // The folder was searched for what a power loss left.
  void NoteSwept();
  void Unlock();
  // False: somebody removed or replaced the lock's file, so that others may have made theirs, or
  // the file system has given the lock to somebody else.
  bool Held(int folder) const;

  // Why Take failed, in words.
  static Status Describe(int error, const std::string& folder, const std::string& what);
  // "process 123 on host" of a writer that is alive, else empty.
  static std::string Holder(int folder);

 private:
  void Write(bool swept);

  OwnedFd fd_;
  bool same_boot_ = false;
};

}  // namespace forebay
