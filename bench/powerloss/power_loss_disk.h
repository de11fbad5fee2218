// PowerLossDisk: a file system in memory, mounted by FUSE, whose power can be lost.
//
// What was written and not synced is then there, or not, or in part: of each block of 4 KiB any
// version since the last fsync of its file, zeros, or bytes of something else; of a file's length
// any that it has had; of the names in a folder, since the last fsync of that folder, those up to
// some moment, or, with `reorders`, any version of each. So a renamed file may come without its
// bytes, as on ext4 and XFS, and later changes without earlier ones, as on no file system that one
// should use. All choices come from a seed.
//
// Modes and owners of files stay. Folders cannot be renamed; there are no symbolic links.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "base/status.h"
#include "base/thread_annotations.h"

struct fuse_session;

namespace forebay::powerloss {

inline constexpr uint64_t kBlock = 4096;

using Node = uint64_t;  // 0: none; 1: the root

struct Inode {
  bool folder = false;
  uint32_t mode = 0;
  uint32_t user = 0;
  uint32_t group = 0;
  uint32_t links = 0;
  // ---- a file: blocks that are not there are zeros
  uint64_t size = 0;
  std::map<uint64_t, std::string> blocks;
  std::vector<uint64_t> sizes;  // that it has had since it was synced, and then
  // Of blocks that changed since: what they have been, the synced one first; empty: not there.
  std::map<uint64_t, std::vector<std::string>> versions;
  // ---- a folder
  std::map<std::string, Node> entries;
  std::map<std::string, Node> synced;
};

// What a disk holds. Not safe for concurrent use. Errors are errno values.
class DiskImage {
 public:
  DiskImage();

  Inode* Find(Node node);
  Node Lookup(Node folder, const std::string& name);
  int Make(Node folder, const std::string& name, const Inode& inode, Node* made);
  int Link(Node node, Node folder, const std::string& name);
  int Remove(Node folder, const std::string& name, bool is_folder);
  int Rename(Node from, const std::string& name, Node to, const std::string& to_name);
  std::string Read(Node node, uint64_t offset, uint64_t size);
  void Write(Node node, uint64_t offset, std::string_view bytes);
  void Punch(Node node, uint64_t offset, uint64_t length);
  void Resize(Node node, uint64_t size);
  void Sync(Node node);
  bool HasName(Node node, const std::string& name) const;

  // What is there after the power was lost now.
  DiskImage AfterPowerLoss(uint64_t seed) const;

 private:
  struct Change {  // of a name; those with one number happen together
    uint64_t number = 0;
    Node folder = 0;
    std::string name;
    Node after = 0;
  };

  void SetEntry(Node folder, const std::string& name, Node node);
  void SetBlock(Inode& file, uint64_t block, std::string bytes);

  std::map<Node, Inode> inodes_;
  std::vector<Change> changes_;
  uint64_t next_number_ = 0;
  Node next_ = 2;
};

// Safe for concurrent use by multiple threads.
class PowerLossDisk {
 public:
  // At an empty folder. kUnavailable: there is no FUSE here.
  static Result<std::unique_ptr<PowerLossDisk>> Mount(const std::string& mountpoint);
  // Nothing in it is open any more.
  ~PowerLossDisk();

  // The power is lost after so many more changes. Whoever uses the disk does not notice: what it
  // does later has never happened.
  void LosePowerAfter(uint64_t changes, uint64_t seed);
  // From now on changes fail with `error`, those to files of this name or, without one, all; 0:
  // they go well again.
  void FailChanges(int error, const std::string& name = "");
  // Mounts what is left; the power is lost now, unless it was before. Nothing is open.
  Status Restart(uint64_t seed);

 private:
  struct Operation;  // the functions that FUSE calls

  explicit PowerLossDisk(std::string mountpoint) : mountpoint_(std::move(mountpoint)) {}
  Status Start();
  void Stop();
  // Before each change, to `node`. 0, or why it fails.
  int BeforeChange(Node node) REQUIRES(mutex_);

  const std::string mountpoint_;
  fuse_session* session_ = nullptr;
  std::jthread server_;

  using Listing = std::vector<std::pair<std::string, Node>>;

  Mutex mutex_;
  DiskImage disk_ GUARDED_BY(mutex_);
  std::map<uint64_t, Listing> listings_ GUARDED_BY(mutex_);  // of folders that are open
  uint64_t last_listing_ GUARDED_BY(mutex_) = 0;
  std::optional<DiskImage> left_ GUARDED_BY(mutex_);  // when the power was lost
  uint64_t changes_left_ GUARDED_BY(mutex_) = 0;      // 0: for ever
  uint64_t seed_ GUARDED_BY(mutex_) = 0;
  int error_ GUARDED_BY(mutex_) = 0;  // of changes
  std::string failing_ GUARDED_BY(mutex_);
};

}  // namespace forebay::powerloss
