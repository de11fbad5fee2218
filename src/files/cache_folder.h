// The folder that copies lie in:
//
//   CACHE/lock    held by the service for its life
//   CACHE/table   files/table.h
//   CACHE/boot    the kernel's boot id, when the copies were made
//   CACHE/copies  one file a copy
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <functional>
#include <string>

#include "base/owned.h"
#include "base/status.h"
#include "files/key.h"
#include "files/table.h"

namespace forebay::files {

class CacheFolder {
 public:
  // Takes the folder over: makes what is missing, closes and replaces the table of a service that
  // is gone, and removes what it had not finished.
  static Result<CacheFolder> Open(const std::string& path, uint64_t slots);
  CacheFolder(CacheFolder&&) = default;
  CacheFolder& operator=(CacheFolder&&) = delete;
  ~CacheFolder() = default;

  const std::string& path() const { return path_; }
  int copies() const { return copies_.get(); }
  FileTable& table() { return table_; }
  // Whether copies that are there may have lost bytes when the machine went down.
  bool rebooted() const { return rebooted_; }
  // Each copy that an earlier service left.
  void EachCopy(const std::function<void(const FileKey& key, uint64_t bytes)>& see) const;
  Result<uint64_t> FreeBytes() const;
  // Whether clients still find this folder by its path: somebody may have removed it, or what is in
  // it, and another may have its name.
  bool InPlace() const;

  // Closes the table; with `all` the whole folder goes, else only what the next one cannot use.
  void Leave(bool all);

 private:
  CacheFolder() = default;
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
  bool rebooted_ = false;
};

}  // namespace forebay::files
