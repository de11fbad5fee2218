// Reading folders: names and types in few calls, sizes with many stats in flight, or later.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "base/owned.h"
#include "base/status.h"
#include "catalog/catalog.h"
#include "catalog/parallel.h"

namespace forebay {

// What a build reports while it runs. The counters are advanced by any thread.
class BuildWatch {
 public:
  explicit BuildWatch(const BuildOptions& options) : options_(options) {}

  std::atomic<uint64_t> objects_done = 0;
  std::atomic<uint64_t> objects_total = 0;
  std::atomic<uint64_t> samples = 0;

  // For WorkStack::Drain, from the building thread.
  std::function<bool()> Tick();

 private:
  const BuildOptions& options_;
  Pace pace_;
};

// Identifies a folder however it was reached.
struct FolderIdentity {
  uint64_t device = 0;
  uint64_t inode = 0;
  int64_t mtime_ns = 0;
};

// The entries of one folder, links followed, each list in byte order.
struct FolderListing {
  FolderIdentity identity;
  std::vector<std::string> folders;
  std::vector<std::string> files;  // regular files, and links that lead nowhere
  std::vector<bool> plain;         // of each: its entry says that it is a regular file
};
Result<FolderListing> ListFolder(const std::string& path, size_t threads,
                                 const std::function<bool()>& tick);

// A folder met by a walk, with its matching files in byte order.
struct ListedFolder {
  const ListedFolder* parent = nullptr;  // null for the root
  int32_t label = -1;
  std::string path;  // relative to the root, empty for the root itself
  FolderIdentity identity;
  std::string names;
  std::vector<uint64_t> name_ends;
  std::vector<uint32_t> sizes;   // with sizes_later all 0
  std::vector<int64_t> times;    // of modification, in ns; likewise
  std::vector<uint32_t> stamps;  // Catalog::ChangeStamp; likewise
  OwnedFd fd;  // with sizes_later, of the first few: spares the lookup of the folder's name
};

// Walks the data set's class folders (or, where there are none, takes the root's files), following
// links but not into a folder that is its own ancestor. The order of the result is that of
// torchvision's ImageFolder, the root first.
Result<std::vector<std::unique_ptr<ListedFolder>>> WalkFolders(const std::string& root,
                                                               FolderListing top,
                                                               const BuildOptions& options,
                                                               BuildWatch& watch);

// Whether `name` ends in one of the suffixes, in any case; every name does when there are none.
bool HasExtension(std::string_view name, const std::vector<std::string>& extensions);

}  // namespace forebay
