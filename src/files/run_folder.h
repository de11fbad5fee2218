// The folder in which programs find copies, which goes with the service:
//
//   RUN/lock    held by the service for its life
//   RUN/copies  one name a copy; those that stay have another one in the store
//
// Programs have the table of them (files/table.h) from the service, and use no copy without it.
#pragma once

#include <string>

#include "base/owned.h"
#include "base/status.h"

namespace forebay::files {

class RunFolder {
 public:
  // Takes the folder over: makes what is missing, and removes the copies of a service that is gone.
  static Result<RunFolder> Open(const std::string& path);
  RunFolder(RunFolder&&) = default;
  RunFolder& operator=(RunFolder&&) = delete;
  ~RunFolder() = default;

  const std::string& path() const { return path_; }
  int copies() const { return copies_.get(); }
  // Whether clients still find this folder by its path: somebody may have removed it, or what is in
  // it, and another may have its name.
  bool InPlace() const;

  // The folder goes.
  void Leave();

 private:
  RunFolder() = default;
  Status CheckAttributes() const;
  void Sweep() const;

  std::string path_;
  OwnedFd folder_;
  OwnedFd copies_;
  OwnedFd lock_;
};

}  // namespace forebay::files
