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
  // has the lock's name is not a file of this user; it is left alone.
  int Take(int folder);
  void Unlock();
  // False: somebody removed or replaced the lock's file, so that others may have made theirs, or
  // the file system has given the lock to somebody else.
  bool Held(int folder) const;

  // Why Take failed, in words.
  static Status Describe(int error, const std::string& folder, const std::string& what);
  // "process 123 on host" of a writer that is alive, else empty.
  static std::string Holder(int folder);

 private:
  OwnedFd fd_;
};

}  // namespace forebay
