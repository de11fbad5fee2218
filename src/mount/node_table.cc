#include "mount/node_table.h"

namespace forebay::mount {

NodeId NodeTable::Acquire(const std::string& path, dev_t device, ino_t inode) {
  MutexLock lock(mutex_);
  NodeId& id = by_path_[path];
  if (id != 0) {
    Node& node = nodes_.at(id);
    if (node.device == device && node.inode == inode) {
      ++node.lookups;
      return id;
    }
  }
  id = next_++;
  nodes_.emplace(id, Node{path, device, inode, 1});
  return id;
}

void NodeTable::Forget(NodeId id, uint64_t times) {
  MutexLock lock(mutex_);
  const auto node = nodes_.find(id);
  if (node == nodes_.end()) return;
  if (node->second.lookups > times) {
    node->second.lookups -= times;
    return;
  }
  const auto named = by_path_.find(node->second.path);
  if (named != by_path_.end() && named->second == id) by_path_.erase(named);
  nodes_.erase(node);
}

std::optional<std::string> NodeTable::PathOf(NodeId id) const {
  if (id == kRoot) return root_;
  MutexLock lock(mutex_);
  const auto node = nodes_.find(id);
  if (node == nodes_.end()) return std::nullopt;
  return node->second.path;
}

size_t NodeTable::size() const {
  MutexLock lock(mutex_);
  return nodes_.size();
}

}  // namespace forebay::mount
