// Looks at files that a catalog knows: whether they are still those that it was made of.
//
// A file that is rewritten in place changes no folder's time, so a saved catalog may name sizes and
// times that are over, and copies are named by them. One statx a file tells.
#pragma once

#include <atomic>
#include <cstddef>
#include <span>
#include <string>
#include <vector>

#include "base/owned.h"
#include "base/status.h"
#include "catalog/catalog.h"
#include "catalog/image.h"

namespace forebay {

// Looks at one file of an image after the other. Its storage is asked, not a cache of attributes.
// Safe for concurrent use by multiple threads; those that hang may outlive the catalog.
class FileLooks {
 public:
  // `folders` are descriptors by the folder's number; where there is none the path is used.
  FileLooks(const ImageView& view, std::vector<OwnedFd> folders)
      : view_(view), folders_(std::move(folders)) {}
  // Opens the first few folders as they are needed: with their descriptors a look asks the storage
  // for the file alone, not for each folder of its path as well. A folder that is replaced after
  // that is looked at as it was.
  explicit FileLooks(const ImageView& view);
  ~FileLooks();
  FileLooks(const FileLooks&) = delete;
  FileLooks& operator=(const FileLooks&) = delete;

  Result<FileSize> LookAt(SampleId sample) const;
  // The same by way of an open folder, which is that of the file.
  Result<FileSize> LookAt(SampleId sample, int folder) const;
  std::string Path(ObjectId object) const;
  std::string FolderPath(uint32_t folder) const;

 private:
  const ImageView view_;
  // -1: there is none.
  int Folder(uint32_t folder) const;

  const std::vector<OwnedFd> folders_;
  // Of the first folders, -1 until one was opened; the first thread that has opened it stores it.
  mutable std::vector<std::atomic<int>> opened_;
};

// Stands for the times of all files of a list, in the place of its root's; never 0.
int64_t TimeOfAll(std::span<const int64_t> times);

}  // namespace forebay
