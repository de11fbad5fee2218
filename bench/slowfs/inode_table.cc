#include "slowfs/inode_table.h"

#include <utility>

#include "base/rng.h"
#include "base/status.h"

namespace forebay::slowfs {

size_t InodeTable::FileKeyHash::operator()(const FileKey& key) const {
  return SplitMix64(key.inode ^ (static_cast<uint64_t>(key.device) << 40)).Next();
}

NodeId InodeTable::Acquire(dev_t device, ino_t inode, std::string path) {
  const FileKey key{device, inode};
  MutexLock lock(mutex_);
  const auto [entry, inserted] = by_file_.try_emplace(key, next_);
  if (inserted) {
    nodes_.emplace(next_++, Node{key, std::move(path), 1});
  } else {
    Node& node = nodes_.at(entry->second);
    ++node.lookups;
    if (node.path != path) node.path = std::move(path);
  }
  return entry->second;
}

void InodeTable::Move(dev_t device, ino_t inode, std::string path) {
  MutexLock lock(mutex_);
  const auto known = by_file_.find(FileKey{device, inode});
  if (known != by_file_.end()) nodes_.at(known->second).path = std::move(path);
}

void InodeTable::Forget(NodeId id, uint64_t times) {
  MutexLock lock(mutex_);
  const auto node = nodes_.find(id);
  if (node == nodes_.end()) return;
  if (node->second.lookups > times) {
    node->second.lookups -= times;
    return;
  }
  by_file_.erase(node->second.key);
  nodes_.erase(node);
}

std::optional<std::string> InodeTable::PathOf(NodeId id) const {
  if (id == kRoot) return ".";
  MutexLock lock(mutex_);
  const auto node = nodes_.find(id);
  if (node == nodes_.end()) return std::nullopt;
  return node->second.path;
}

size_t InodeTable::size() const {
  MutexLock lock(mutex_);
  return nodes_.size();
}

std::string JoinPath(std::string_view folder, std::string_view name) {
  return folder == "." ? std::string(name) : StrCat(folder, '/', name);
}

}  // namespace forebay::slowfs
