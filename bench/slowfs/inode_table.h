// InodeTable: the inodes that the kernel knows, and where each lies in the source folder.
//
// A node keeps the path it was last looked up by, not a descriptor: a data set has more files than
// a process may hold open.
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>

#include "base/thread_annotations.h"

namespace forebay::slowfs {

using NodeId = uint64_t;

// Safe for concurrent use by multiple threads.
class InodeTable {
 public:
  static constexpr NodeId kRoot = 1;        // the kernel's number for the root; always present
  static constexpr NodeId kFirstNode = 16;  // numbers between are free for nodes without a file

  // The node of the file (device, inode), which the kernel now knows once more. Files keep their
  // node until the kernel has forgotten it as often as it was acquired; numbers are never reused.
  NodeId Acquire(dev_t device, ino_t inode, std::string path);
  void Forget(NodeId node, uint64_t times);
  // The file (device, inode), if it has a node, lies at `path` now.
  void Move(dev_t device, ino_t inode, std::string path);

  // Path relative to the source folder ("." for the root), or nothing if the node is unknown.
  std::optional<std::string> PathOf(NodeId node) const;
  // Nodes beside the root.
  size_t size() const;

 private:
  struct FileKey {
    dev_t device;
    ino_t inode;
    bool operator==(const FileKey&) const = default;
  };
  struct FileKeyHash {
    size_t operator()(const FileKey& key) const;
  };
  struct Node {
    FileKey key;
    std::string path;
    uint64_t lookups;
  };

  mutable Mutex mutex_;
  std::unordered_map<NodeId, Node> nodes_ GUARDED_BY(mutex_);
  std::unordered_map<FileKey, NodeId, FileKeyHash> by_file_ GUARDED_BY(mutex_);
  NodeId next_ GUARDED_BY(mutex_) = kFirstNode;
};

// Path of the entry `name` of the folder `folder`, both relative to the source folder.
std::string JoinPath(std::string_view folder, std::string_view name);

}  // namespace forebay::slowfs
