// NodeTable: the files and folders that the kernel knows by number, and their paths.
//
// A node keeps a path, not a descriptor: a data set has more files than a process may hold open.
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <unordered_map>

#include "base/thread_annotations.h"

namespace forebay::mount {

using NodeId = uint64_t;

// Safe for concurrent use by multiple threads.
class NodeTable {
 public:
  static constexpr NodeId kRoot = 1;  // the kernel's number for the root; always present

  explicit NodeTable(std::string root) : root_(std::move(root)) {}

  // The node of the file that is at `path` now, which the kernel now knows once more. Another file
  // at the same path is another node, so that nothing the kernel holds of the old one is taken for
  // it. Numbers are never used again.
  NodeId Acquire(const std::string& path, dev_t device, ino_t inode);
  void Forget(NodeId node, uint64_t times);

  // Absolute path, or nothing if the node is unknown.
  std::optional<std::string> PathOf(NodeId node) const;
  // Nodes beside the root.
  size_t size() const;

 private:
  struct Node {
    std::string path;
    dev_t device;
    ino_t inode;
    uint64_t lookups;
  };

  const std::string root_;
  mutable Mutex mutex_;
  std::unordered_map<NodeId, Node> nodes_ GUARDED_BY(mutex_);
  std::unordered_map<std::string, NodeId> by_path_ GUARDED_BY(mutex_);
  NodeId next_ GUARDED_BY(mutex_) = kRoot + 1;
};

}  // namespace forebay::mount
