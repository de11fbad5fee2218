// The folder in which programs find copies, which goes with the service:
//
//   RUN/lock    held by the service for its life
//   RUN/table   files/table.h
//   RUN/copies  one name a copy; those that stay have another one in the store
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <string>

#include "base/owned.h"
#include "base/status.h"
#include "files/table.h"

namespace forebay::files {

class RunFolder {
 public:
  // Takes the folder over: makes what is missing, closes and replaces the table of a service that
  // is gone, and removes its copies.
  static Result<RunFolder> Open(const std::string& path, uint64_t slots);
  RunFolder(RunFolder&&) = default;
  RunFolder& operator=(RunFolder&&) = delete;
  ~RunFolder() = default;

  const std::string& path() const { return path_; }
  int copies() const { return copies_.get(); }
  FileTable& table() { return table_; }
  // Whether clients still find this folder by its path: somebody may have removed it, or what is in
  // it, and another may have its name.
  bool InPlace() const;

  // Closes the table; the folder goes.
  void Leave();

 private:
  RunFolder() = default;
  Status CheckAttributes() const;
  Status MakeTable(uint64_t slots);
  void Sweep() const;

  std::string path_;
  OwnedFd folder_;
  OwnedFd copies_;
  OwnedFd lock_;
  Mapping mapping_;
  FileTable table_;
  dev_t table_device_ = 0;
  ino_t table_inode_ = 0;
};

}  // namespace forebay::files
