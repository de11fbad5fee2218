#define FUSE_USE_VERSION 314

#include "powerloss/power_loss_disk.h"

#include <fcntl.h>
#include <fuse_lowlevel.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <set>

#include "base/owned.h"
#include "base/rng.h"

namespace forebay::powerloss {
namespace {

constexpr Node kRoot = 1;
constexpr size_t kMostVersions = 6;

}  // namespace

// ---- DiskImage

DiskImage::DiskImage() {
  Inode root;
  root.folder = true;
  root.mode = 0755;
  root.user = geteuid();
  root.group = getegid();
  root.links = 1;
  inodes_[kRoot] = root;
}

Inode* DiskImage::Find(Node node) {
  const auto found = inodes_.find(node);
  return found == inodes_.end() ? nullptr : &found->second;
}

Node DiskImage::Lookup(Node folder, const std::string& name) {
  const Inode* at = Find(folder);
  if (at == nullptr) return 0;
  const auto found = at->entries.find(name);
  return found == at->entries.end() ? 0 : found->second;
}

void DiskImage::SetEntry(Node folder, const std::string& name, Node node) {
  std::map<std::string, Node>& entries = inodes_[folder].entries;
  if (const Node before = Lookup(folder, name); before != 0) --inodes_[before].links;
  if (node == 0) {
    entries.erase(name);
  } else {
    entries[name] = node;
    ++inodes_[node].links;
  }
  changes_.push_back({next_number_, folder, name, node});
}

int DiskImage::Make(Node folder, const std::string& name, const Inode& inode, Node* made) {
  if (Lookup(folder, name) != 0) return EEXIST;
  *made = next_++;
  inodes_[*made] = inode;
  inodes_[*made].sizes = {0};
  ++next_number_;
  SetEntry(folder, name, *made);
  return 0;
}

int DiskImage::Link(Node node, Node folder, const std::string& name) {
  if (Lookup(folder, name) != 0) return EEXIST;
  ++next_number_;
  SetEntry(folder, name, node);
  return 0;
}

int DiskImage::Remove(Node folder, const std::string& name, bool is_folder) {
  const Node node = Lookup(folder, name);
  if (node == 0) return ENOENT;
  const Inode& found = inodes_[node];
  if (found.folder != is_folder) return is_folder ? ENOTDIR : EISDIR;
  if (!found.entries.empty()) return ENOTEMPTY;
  ++next_number_;
  SetEntry(folder, name, 0);
  return 0;
}

int DiskImage::Rename(Node from, const std::string& name, Node to, const std::string& to_name) {
  const Node node = Lookup(from, name);
  if (node == 0) return ENOENT;
  if (inodes_[node].folder) return EINVAL;
  if (Lookup(to, to_name) == node) return 0;
  ++next_number_;
  SetEntry(to, to_name, node);
  SetEntry(from, name, 0);
  return 0;
}

std::string DiskImage::Read(Node node, uint64_t offset, uint64_t size) {
  const Inode& file = inodes_[node];
  if (offset >= file.size) return "";
  std::string out(std::min(size, file.size - offset), '\0');
  for (uint64_t at = 0; at < out.size();) {
    const uint64_t block = (offset + at) / kBlock;
    const uint64_t within = (offset + at) % kBlock;
    const uint64_t here = std::min(kBlock - within, out.size() - at);
    if (const auto found = file.blocks.find(block); found != file.blocks.end()) {
      out.replace(at, here, found->second, within, here);
    }
    at += here;
  }
  return out;
}

void DiskImage::SetBlock(Inode& file, uint64_t block, std::string bytes) {
  const auto now = file.blocks.find(block);
  std::vector<std::string>& versions = file.versions[block];
  if (versions.empty()) versions.push_back(now == file.blocks.end() ? "" : now->second);
  if (versions.size() >= kMostVersions) versions.erase(versions.begin() + 1);
  versions.push_back(bytes);
  if (bytes.empty()) {
    file.blocks.erase(block);
  } else {
    file.blocks[block] = std::move(bytes);
  }
}

void DiskImage::Write(Node node, uint64_t offset, std::string_view bytes) {
  Inode& file = inodes_[node];
  while (!bytes.empty()) {
    const uint64_t block = offset / kBlock;
    const uint64_t within = offset % kBlock;
    const uint64_t here = std::min<uint64_t>(kBlock - within, bytes.size());
    const auto found = file.blocks.find(block);
    std::string now = found == file.blocks.end() ? std::string(kBlock, '\0') : found->second;
    now.replace(within, here, bytes.substr(0, here));
    SetBlock(file, block, std::move(now));
    offset += here;
    bytes.remove_prefix(here);
  }
  if (offset > file.size) {
    file.size = offset;
    file.sizes.push_back(offset);
  }
}

void DiskImage::Punch(Node node, uint64_t offset, uint64_t length) {
  Inode& file = inodes_[node];
  const uint64_t end = std::min(offset + length, (file.size + kBlock - 1) / kBlock * kBlock);
  while (offset < end) {
    const uint64_t block = offset / kBlock;
    const uint64_t within = offset % kBlock;
    const uint64_t here = std::min(kBlock - within, end - offset);
    if (const auto found = file.blocks.find(block); found != file.blocks.end()) {
      std::string now = found->second;
      now.replace(within, here, std::string(here, '\0'));
      SetBlock(file, block, here == kBlock ? "" : std::move(now));
    }
    offset += here;
  }
}

void DiskImage::Resize(Node node, uint64_t size) {
  Inode& file = inodes_[node];
  if (size < file.size) {
    Punch(node, size, file.size - size + kBlock);
    file.sizes.push_back(size);
  } else if (size > file.size) {
    file.sizes.push_back(size);
  }
  file.size = size;
}

void DiskImage::Sync(Node node) {
  Inode& inode = inodes_[node];
  inode.synced = inode.entries;
  inode.sizes = {inode.size};
  inode.versions.clear();
  if (inode.folder) std::erase_if(changes_, [&](const Change& c) { return c.folder == node; });
}

bool DiskImage::HasName(Node node, const std::string& name) const {
  return std::ranges::any_of(inodes_, [&](const auto& each) {
    const auto found = each.second.entries.find(name);
    return found != each.second.entries.end() && found->second == node;
  });
}

DiskImage DiskImage::AfterPowerLoss(uint64_t seed) const {
  SplitMix64 rng(seed);
  DiskImage left;
  left.next_ = next_;
  // The names.
  const bool reorders = rng.Below(3) == 0;
  const uint64_t until = rng.Below(3) == 0 ? next_number_ : rng.Below(next_number_ + 1);
  std::map<Node, std::map<std::string, Node>> names;
  for (const auto& [node, inode] : inodes_) {
    if (inode.folder) names[node] = inode.synced;
  }
  const auto apply = [&](const Change& change) {
    std::map<std::string, Node>& entries = names[change.folder];
    if (change.after == 0) {
      entries.erase(change.name);
    } else {
      entries[change.name] = change.after;
    }
  };
  for (const Change& change : changes_) {
    if (reorders ? rng.Below(4) != 0 : change.number <= until) apply(change);
  }
  // The bytes of what can be reached.
  const uint64_t lost = std::vector<uint64_t>{0, 1, 4, 12, 16}[rng.Below(5)];  // of 16
  const auto some = [&] { return rng.Below(16) < lost; };
  std::vector<Node> open = {kRoot};
  std::set<Node> seen = {kRoot};
  while (!open.empty()) {
    const Node node = open.back();
    open.pop_back();
    const Inode& was = inodes_.at(node);
    Inode now = was;
    now.links = node == kRoot ? 1 : 0;
    if (was.folder) {
      now.entries = now.synced = names[node];
      for (const auto& [name, below] : now.entries) {
        if (seen.insert(below).second) open.push_back(below);
      }
      left.inodes_[node] = now;
      continue;
    }
    if (some()) now.size = was.sizes[rng.Below(was.sizes.size())];
    for (const auto& [block, versions] : was.versions) {
      if (!some()) continue;
      std::string found = versions[rng.Below(versions.size())];
      const uint64_t draw = rng.Below(8);
      if (draw == 0) found = std::string(kBlock, '\0');
      if (draw == 1) {
        found.resize(kBlock);
        for (char& c : found) c = static_cast<char>(rng.Next());
      }
      if (found.empty()) {
        now.blocks.erase(block);
      } else {
        now.blocks[block] = found;
      }
    }
    now.blocks.erase(now.blocks.lower_bound((now.size + kBlock - 1) / kBlock), now.blocks.end());
    now.sizes = {now.size};
    now.versions.clear();
    left.inodes_[node] = std::move(now);
  }
  for (const Node node : seen) {
    for (const auto& [name, below] : left.inodes_[node].entries) ++left.inodes_[below].links;
  }
  return left;
}

// ---- PowerLossDisk

struct PowerLossDisk::Operation {
  static PowerLossDisk& Of(fuse_req_t request) {
    return *static_cast<PowerLossDisk*>(fuse_req_userdata(request));
  }

  static struct stat Attributes(Node node, const Inode& inode) {
    struct stat st {};
    st.st_ino = node;
    st.st_mode = (inode.folder ? S_IFDIR : S_IFREG) | inode.mode;
    st.st_nlink = inode.folder ? 2 : inode.links;
    st.st_uid = inode.user;
    st.st_gid = inode.group;
    st.st_size = static_cast<off_t>(inode.folder ? kBlock : inode.size);
    st.st_blksize = kBlock;
    st.st_blocks = static_cast<blkcnt_t>((inode.folder ? 1 : inode.blocks.size()) * kBlock / 512);
    return st;
  }

  // The kernel keeps no names and no attributes.
  static fuse_entry_param Entry(Node node, const Inode& inode) {
    fuse_entry_param entry{};
    entry.ino = node;
    entry.attr = Attributes(node, inode);
    return entry;
  }

  static void Lookup(fuse_req_t request, fuse_ino_t folder, const char* name) {
    PowerLossDisk& disk = Of(request);
    MutexLock lock(disk.mutex_);
    const Node node = disk.disk_.Lookup(folder, name);
    if (node == 0) {
      fuse_reply_err(request, ENOENT);
      return;
    }
    const fuse_entry_param entry = Entry(node, *disk.disk_.Find(node));
    fuse_reply_entry(request, &entry);
  }

  static void Getattr(fuse_req_t request, fuse_ino_t node, fuse_file_info*) {
    PowerLossDisk& disk = Of(request);
    MutexLock lock(disk.mutex_);
    const struct stat st = Attributes(node, *disk.disk_.Find(node));
    fuse_reply_attr(request, &st, 0);
  }

  static void Setattr(fuse_req_t request, fuse_ino_t node, struct stat* to, int set,
                      fuse_file_info*) {
    PowerLossDisk& disk = Of(request);
    MutexLock lock(disk.mutex_);
    if (const int error = disk.BeforeChange(node); error != 0) {
      fuse_reply_err(request, error);
      return;
    }
    Inode& inode = *disk.disk_.Find(node);
    if ((set & FUSE_SET_ATTR_MODE) != 0) inode.mode = to->st_mode & 07777;
    if ((set & FUSE_SET_ATTR_UID) != 0) inode.user = to->st_uid;
    if ((set & FUSE_SET_ATTR_GID) != 0) inode.group = to->st_gid;
    if ((set & FUSE_SET_ATTR_SIZE) != 0) {
      disk.disk_.Resize(node, static_cast<uint64_t>(to->st_size));
    }
    const struct stat st = Attributes(node, inode);
    fuse_reply_attr(request, &st, 0);
  }

  static Inode NewInode(fuse_req_t request, bool folder, mode_t mode) {
    Inode inode;
    inode.folder = folder;
    inode.mode = mode & 07777;
    inode.user = fuse_req_ctx(request)->uid;
    inode.group = fuse_req_ctx(request)->gid;
    return inode;
  }

  static void Mkdir(fuse_req_t request, fuse_ino_t folder, const char* name, mode_t mode) {
    PowerLossDisk& disk = Of(request);
    MutexLock lock(disk.mutex_);
    if (const int error = disk.BeforeChange(folder); error != 0) {
      fuse_reply_err(request, error);
      return;
    }
    Node made = 0;
    if (const int error = disk.disk_.Make(folder, name, NewInode(request, true, mode), &made);
        error != 0) {
      fuse_reply_err(request, error);
      return;
    }
    const fuse_entry_param entry = Entry(made, *disk.disk_.Find(made));
    fuse_reply_entry(request, &entry);
  }

  static void Create(fuse_req_t request, fuse_ino_t folder, const char* name, mode_t mode,
                     fuse_file_info* info) {
    PowerLossDisk& disk = Of(request);
    MutexLock lock(disk.mutex_);
    if (const int error = disk.BeforeChange(folder); error != 0) {
      fuse_reply_err(request, error);
      return;
    }
    Node made = disk.disk_.Lookup(folder, name);
    int error = made != 0 && (info->flags & O_EXCL) != 0 ? EEXIST : 0;
    if (made == 0) error = disk.disk_.Make(folder, name, NewInode(request, false, mode), &made);
    if (error != 0) {
      fuse_reply_err(request, error);
      return;
    }
    const fuse_entry_param entry = Entry(made, *disk.disk_.Find(made));
    info->direct_io = 1;
    fuse_reply_create(request, &entry, info);
  }

  static void Open(fuse_req_t request, fuse_ino_t node, fuse_file_info* info) {
    PowerLossDisk& disk = Of(request);
    if ((info->flags & O_TRUNC) != 0) {
      MutexLock lock(disk.mutex_);
      if (const int error = disk.BeforeChange(node); error != 0) {
        fuse_reply_err(request, error);
        return;
      }
      disk.disk_.Resize(node, 0);
    }
    info->direct_io = 1;
    fuse_reply_open(request, info);
  }

  static void Read(fuse_req_t request, fuse_ino_t node, size_t size, off_t offset,
                   fuse_file_info*) {
    PowerLossDisk& disk = Of(request);
    MutexLock lock(disk.mutex_);
    const std::string bytes = disk.disk_.Read(node, static_cast<uint64_t>(offset), size);
    fuse_reply_buf(request, bytes.data(), bytes.size());
  }

  static void Write(fuse_req_t request, fuse_ino_t node, const char* bytes, size_t size,
                    off_t offset, fuse_file_info*) {
    PowerLossDisk& disk = Of(request);
    MutexLock lock(disk.mutex_);
    if (const int error = disk.BeforeChange(node); error != 0) {
      fuse_reply_err(request, error);
      return;
    }
    disk.disk_.Write(node, static_cast<uint64_t>(offset), {bytes, size});
    fuse_reply_write(request, size);
  }

  static void Fallocate(fuse_req_t request, fuse_ino_t node, int mode, off_t offset, off_t length,
                        fuse_file_info*) {
    PowerLossDisk& disk = Of(request);
    if ((mode & FALLOC_FL_PUNCH_HOLE) == 0) {
      fuse_reply_err(request, EOPNOTSUPP);
      return;
    }
    MutexLock lock(disk.mutex_);
    if (const int error = disk.BeforeChange(node); error != 0) {
      fuse_reply_err(request, error);
      return;
    }
    disk.disk_.Punch(node, static_cast<uint64_t>(offset), static_cast<uint64_t>(length));
    fuse_reply_err(request, 0);
  }

  static void Unlink(fuse_req_t request, fuse_ino_t folder, const char* name) {
    PowerLossDisk& disk = Of(request);
    MutexLock lock(disk.mutex_);
    if (const int error = disk.BeforeChange(folder); error != 0) {
      fuse_reply_err(request, error);
      return;
    }
    fuse_reply_err(request, disk.disk_.Remove(folder, name, false));
  }

  static void Rmdir(fuse_req_t request, fuse_ino_t folder, const char* name) {
    PowerLossDisk& disk = Of(request);
    MutexLock lock(disk.mutex_);
    if (const int error = disk.BeforeChange(folder); error != 0) {
      fuse_reply_err(request, error);
      return;
    }
    fuse_reply_err(request, disk.disk_.Remove(folder, name, true));
  }

  static void Rename(fuse_req_t request, fuse_ino_t from, const char* name, fuse_ino_t to,
                     const char* to_name, unsigned flags) {
    PowerLossDisk& disk = Of(request);
    MutexLock lock(disk.mutex_);
    if (const int error = disk.BeforeChange(from); error != 0) {
      fuse_reply_err(request, error);
      return;
    }
    fuse_reply_err(request, flags != 0 ? EINVAL : disk.disk_.Rename(from, name, to, to_name));
  }

  static void Link(fuse_req_t request, fuse_ino_t node, fuse_ino_t folder, const char* name) {
    PowerLossDisk& disk = Of(request);
    MutexLock lock(disk.mutex_);
    if (const int error = disk.BeforeChange(folder); error != 0) {
      fuse_reply_err(request, error);
      return;
    }
    if (const int error = disk.disk_.Link(node, folder, name); error != 0) {
      fuse_reply_err(request, error);
      return;
    }
    const fuse_entry_param entry = Entry(node, *disk.disk_.Find(node));
    fuse_reply_entry(request, &entry);
  }

  static void Fsync(fuse_req_t request, fuse_ino_t node, int, fuse_file_info*) {
    PowerLossDisk& disk = Of(request);
    MutexLock lock(disk.mutex_);
    if (const int error = disk.BeforeChange(node); error != 0) {
      fuse_reply_err(request, error);
      return;
    }
    disk.disk_.Sync(node);
    fuse_reply_err(request, 0);
  }

  // The listing as it was when the folder was opened.
  static void Opendir(fuse_req_t request, fuse_ino_t node, fuse_file_info* info) {
    PowerLossDisk& disk = Of(request);
    {
      MutexLock lock(disk.mutex_);
      info->fh = ++disk.last_listing_;
      Listing& names = disk.listings_[info->fh];
      for (const auto& entry : disk.disk_.Find(node)->entries) names.push_back(entry);
    }
    fuse_reply_open(request, info);
  }

  static void Readdir(fuse_req_t request, fuse_ino_t, size_t size, off_t offset,
                      fuse_file_info* info) {
    PowerLossDisk& disk = Of(request);
    std::string out(size, '\0');
    size_t used = 0;
    MutexLock lock(disk.mutex_);
    const Listing& names = disk.listings_[info->fh];
    for (auto at = static_cast<size_t>(offset); at < names.size(); ++at) {
      const struct stat st = Attributes(names[at].second, *disk.disk_.Find(names[at].second));
      const size_t needed =
          fuse_add_direntry(request, out.data() + used, size - used, names[at].first.c_str(), &st,
                            static_cast<off_t>(at + 1));
      if (needed > size - used) break;
      used += needed;
    }
    fuse_reply_buf(request, out.data(), used);
  }

  static void Releasedir(fuse_req_t request, fuse_ino_t, fuse_file_info* info) {
    PowerLossDisk& disk = Of(request);
    {
      MutexLock lock(disk.mutex_);
      disk.listings_.erase(info->fh);
    }
    fuse_reply_err(request, 0);
  }

  static void Statfs(fuse_req_t request, fuse_ino_t) {
    struct statvfs info {};
    info.f_bsize = info.f_frsize = kBlock;
    info.f_blocks = info.f_bfree = info.f_bavail = 1 << 20;
    info.f_namemax = 255;
    fuse_reply_statfs(request, &info);
  }

  static fuse_lowlevel_ops All() {
    fuse_lowlevel_ops ops{};
    ops.lookup = Lookup;
    ops.getattr = Getattr;
    ops.setattr = Setattr;
    ops.mkdir = Mkdir;
    ops.create = Create;
    ops.open = Open;
    ops.read = Read;
    ops.write = Write;
    ops.fallocate = Fallocate;
    ops.unlink = Unlink;
    ops.rmdir = Rmdir;
    ops.rename = Rename;
    ops.link = Link;
    ops.fsync = Fsync;
    ops.opendir = Opendir;
    ops.readdir = Readdir;
    ops.releasedir = Releasedir;
    ops.fsyncdir = Fsync;
    ops.statfs = Statfs;
    return ops;
  }
};

int PowerLossDisk::BeforeChange(Node node) {
  if (changes_left_ > 0 && --changes_left_ == 0) left_ = disk_.AfterPowerLoss(seed_);
  return error_ != 0 && (failing_.empty() || disk_.HasName(node, failing_)) ? error_ : 0;
}

void PowerLossDisk::FailChanges(int error, const std::string& name) {
  MutexLock lock(mutex_);
  error_ = error;
  failing_ = name;
}

void PowerLossDisk::LosePowerAfter(uint64_t changes, uint64_t seed) {
  MutexLock lock(mutex_);
  changes_left_ = changes;
  seed_ = seed;
}

Status PowerLossDisk::Start() {
  static const fuse_lowlevel_ops operations = Operation::All();
  std::string words[] = {"powerloss", "-o", "fsname=powerloss,subtype=powerloss,allow_other"};
  std::vector<char*> argv;
  for (std::string& word : words) argv.push_back(word.data());
  fuse_args args = FUSE_ARGS_INIT(static_cast<int>(argv.size()), argv.data());
  session_ = fuse_session_new(&args, &operations, sizeof operations, this);
  fuse_opt_free_args(&args);
  if (session_ == nullptr) return Status(Code::kUnavailable, "libfuse makes no session");
  if (fuse_session_mount(session_, mountpoint_.c_str()) != 0) {
    fuse_session_destroy(session_);
    session_ = nullptr;
    return Status(Code::kUnavailable, StrCat("cannot mount at ", mountpoint_));
  }
  server_ = std::jthread([session = session_] { (void)fuse_session_loop(session); });
  return Status();
}

void PowerLossDisk::Stop() {
  if (session_ == nullptr) return;
  // The loop ends with the connection; only then its descriptor is closed.
  fuse_session_exit(session_);
  (void)umount2(mountpoint_.c_str(), MNT_FORCE | MNT_DETACH);
  server_.join();
  fuse_session_unmount(session_);
  fuse_session_destroy(session_);
  session_ = nullptr;
  MutexLock lock(mutex_);
  listings_.clear();  // those whose end was not told any more
}

Result<std::unique_ptr<PowerLossDisk>> PowerLossDisk::Mount(const std::string& mountpoint) {
  const OwnedFd device(open("/dev/fuse", O_RDWR | O_CLOEXEC));
  if (!device.valid()) return Status(Code::kUnavailable, "there is no /dev/fuse");
  std::unique_ptr<PowerLossDisk> disk(new PowerLossDisk(mountpoint));
  FOREBAY_RETURN_IF_ERROR(disk->Start());
  return disk;
}

PowerLossDisk::~PowerLossDisk() { Stop(); }

Status PowerLossDisk::Restart(uint64_t seed) {
  Stop();
  {
    MutexLock lock(mutex_);
    disk_ = left_ ? *std::move(left_) : disk_.AfterPowerLoss(seed);
    left_.reset();
    changes_left_ = 0;
  }
  return Start();
}

}  // namespace forebay::powerloss
