// Tree: a data folder shown read-only through FUSE; its files' bytes come from their copies.
//
// The source is asked for by absolute path and no descriptor of its folders is kept: whoever
// unmounts it is not held up, and what is asked after that gets the error that the path gives.
// Attributes of a file with a copy are the source's as they were when it was copied; everything
// else is asked of the source each time that the kernel asks.
#pragma once

#define FUSE_USE_VERSION FUSE_MAKE_VERSION(3, 12)
#include <fuse_lowlevel.h>
#include <sys/stat.h>

#include <string>

#include "base/owned.h"
#include "files/client.h"
#include "mount/node_table.h"

namespace forebay::mount {

// An extended attribute of the root: the process id of who serves the mount.
constexpr const char* kServedBy = "user.forebay.mount";

// Safe for concurrent use by multiple threads.
class Tree {
 public:
  struct Options {
    std::string source;   // a real path
    double keep_s = 30;   // how long the kernel may keep names and attributes
    double absent_s = 1;  // and that there is no such name
  };

  // `client` must outlive the tree; while it is off, all comes from the source.
  Tree(Options options, const files::Client& client);

  // The session's operations; its user data must be the Tree.
  static const fuse_lowlevel_ops& Operations();

 private:
  struct Operation;
  struct OpenFile;

  // As lstat(); of the copy's identity where there is a copy.
  int Attributes(const std::string& path, struct stat* out) const;
  // Bytes of a file that is being copied, as many as there are. Returns an errno.
  int ReadAll(const OpenFile& file, char* out, size_t size, off_t offset, size_t* got) const;

  // The file that an open copy was made of, as it was then; otherwise none.
  OwnedFd OpenSourceOf(const OpenFile& file) const;

  const Options options_;
  const files::Client& client_;
  NodeTable nodes_;
};

}  // namespace forebay::mount
