#include "slowfs/file_system.h"

#include <dirent.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <sys/xattr.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <string_view>
#include <thread>
#include <utility>

namespace forebay::slowfs {
namespace {

constexpr const char* kControlFolder = ".slowfs";
constexpr double kCacheSeconds = 3600;
// Requests that the kernel sends without a waiting process (readahead, asynchronous reads).
constexpr unsigned kMaxBackground = 1024;

enum ControlNode : NodeId { kFolderNode = 2, kStatsNode, kSettingsNode, kResetNode };
static_assert(kResetNode < InodeTable::kFirstNode);

struct ControlFile {
  NodeId node;
  const char* name;
  mode_t mode;
};
constexpr ControlFile kControlFiles[] = {
    {kStatsNode, "stats", 0444},
    {kSettingsNode, "settings", 0644},
    {kResetNode, "reset", 0200},
};

bool IsControl(NodeId node) { return node >= kFolderNode && node <= kResetNode; }

struct stat ControlAttr(NodeId node) {
  struct stat attr {};
  attr.st_ino = node;
  attr.st_uid = getuid();
  attr.st_gid = getgid();
  attr.st_nlink = 1;
  attr.st_mode = S_IFDIR | 0555;
  for (const ControlFile& file : kControlFiles) {
    if (file.node == node) attr.st_mode = S_IFREG | file.mode;
  }
  return attr;
}

// An open control file: what reading it gives was fixed when it was opened.
struct ControlHandle {
  std::string text;
};

struct DirHandle {
  struct CloseDir {
    void operator()(DIR* opened) const { closedir(opened); }
  };
  std::unique_ptr<DIR, CloseDir> dir;
  std::string path;
  bool is_root = false;

  Mutex mutex;
  off_t position GUARDED_BY(mutex) = 0;  // where the stream stands, after `pending` if there is one
  dirent* pending GUARDED_BY(mutex) = nullptr;  // read from the stream, not yet given out
};

template <typename Handle>
Handle* HandleOf(const fuse_file_info* info) {
  return reinterpret_cast<Handle*>(info->fh);
}

bool IsDots(const char* name) {
  return std::strcmp(name, ".") == 0 || std::strcmp(name, "..") == 0;
}

}  // namespace

struct FileSystem::Operation {
  static FileSystem& Of(fuse_req_t request) {
    return *static_cast<FileSystem*>(fuse_req_userdata(request));
  }

  static void Init(void* file_system, fuse_conn_info* connection) {
    connection->max_background = kMaxBackground;
    connection->congestion_threshold = kMaxBackground;
    // Most requests are small here; a pipe only adds work.
    connection->want &= ~static_cast<unsigned>(FUSE_CAP_SPLICE_READ);
    // Attributes sent along with a listing are of use only to a kernel that may keep them.
    if (!static_cast<FileSystem*>(file_system)->cache_) {
      connection->want &= ~static_cast<unsigned>(FUSE_CAP_READDIRPLUS);
    }
  }

  static void Lookup(fuse_req_t request, fuse_ino_t parent, const char* name) {
    FileSystem& fs = Of(request);
    if (parent == InodeTable::kRoot && std::strcmp(name, kControlFolder) == 0) {
      return ReplyControlEntry(request, kFolderNode);
    }
    if (parent == kFolderNode) {
      for (const ControlFile& file : kControlFiles) {
        if (std::strcmp(name, file.name) == 0) return ReplyControlEntry(request, file.node);
      }
      fuse_reply_err(request, ENOENT);
      return;
    }
    const Nanos arrived = SteadyClock().Now();
    fs.counters_.Count(Request::kLookup);
    Reply reply{request, ErrorReply{ENOENT}};
    if (const auto folder = fs.inodes_.PathOf(parent)) {
      EntryReply entry{};
      const int error = fs.FillEntry(JoinPath(*folder, name), entry.entry);
      if (error == 0 || (error == ENOENT && fs.cache_)) {
        reply.body = entry;
      } else {
        reply.body = ErrorReply{error};
      }
    }
    fs.Answer(OpKind::kStat, 0, arrived, std::move(reply));
  }

  static void ReplyControlEntry(fuse_req_t request, NodeId node) {
    fuse_entry_param entry{};
    entry.ino = node;
    entry.attr = ControlAttr(node);
    fuse_reply_entry(request, &entry);
  }

  static void Forget(fuse_req_t request, fuse_ino_t node, uint64_t times) {
    Of(request).inodes_.Forget(node, times);
    fuse_reply_none(request);
  }

  static void ForgetMulti(fuse_req_t request, size_t count, fuse_forget_data* forgets) {
    for (size_t i = 0; i < count; ++i) {
      Of(request).inodes_.Forget(forgets[i].ino, forgets[i].nlookup);
    }
    fuse_reply_none(request);
  }

  static void Getattr(fuse_req_t request, fuse_ino_t node, fuse_file_info*) {
    FileSystem& fs = Of(request);
    if (IsControl(node)) {
      const struct stat attr = ControlAttr(node);
      fuse_reply_attr(request, &attr, 0);
      return;
    }
    const Nanos arrived = SteadyClock().Now();
    fs.counters_.Count(Request::kGetattr);
    Reply reply{request, ErrorReply{ESTALE}};
    if (const auto path = fs.inodes_.PathOf(node)) {
      AttrReply attr{.attr = {}, .timeout_s = fs.timeout_s_};
      if (fstatat(fs.source_.get(), path->c_str(), &attr.attr, AT_SYMLINK_NOFOLLOW) == 0) {
        reply.body = attr;
      } else {
        reply.body = ErrorReply{errno};
      }
    }
    fs.Answer(OpKind::kStat, 0, arrived, std::move(reply));
  }

  static void Setattr(fuse_req_t request, fuse_ino_t node, struct stat* wanted, int which,
                      fuse_file_info*) {
    if (IsControl(node)) {
      // A shell truncates before it writes.
      const struct stat attr = ControlAttr(node);
      fuse_reply_attr(request, &attr, 0);
      return;
    }
    FileSystem& fs = Of(request);
    const auto path = fs.inodes_.PathOf(node);
    if (!fs.writable_ || !path) {
      fuse_reply_err(request, fs.writable_ ? ESTALE : EROFS);
      return;
    }
    int error = 0;
    if ((which & FUSE_SET_ATTR_MODE) != 0 &&
        fchmodat(fs.source_.get(), path->c_str(), wanted->st_mode & 07777, 0) != 0) {
      error = errno;
    }
    if (error == 0 && (which & FUSE_SET_ATTR_SIZE) != 0) {
      const OwnedFd fd(openat(fs.source_.get(), path->c_str(), O_WRONLY | O_CLOEXEC | O_NOFOLLOW));
      if (!fd.valid() || ftruncate(fd.get(), wanted->st_size) != 0) error = errno;
    }
    struct stat attr {};
    if (error == 0 && fstatat(fs.source_.get(), path->c_str(), &attr, AT_SYMLINK_NOFOLLOW) != 0) {
      error = errno;
    }
    Reply reply{request, AttrReply{.attr = attr, .timeout_s = fs.timeout_s_}};
    if (error != 0) reply.body = ErrorReply{error};
    fs.AnswerChange(0, std::move(reply));
  }

  static void Access(fuse_req_t request, fuse_ino_t node, int mask) {
    FileSystem& fs = Of(request);
    if (IsControl(node)) {
      fuse_reply_err(request, 0);
      return;
    }
    const Nanos arrived = SteadyClock().Now();
    fs.counters_.Count(Request::kAccess);
    int error = ESTALE;
    if ((mask & W_OK) != 0 && !fs.writable_) {
      error = EROFS;
    } else if (const auto path = fs.inodes_.PathOf(node)) {
      error = faccessat(fs.source_.get(), path->c_str(), mask, 0) == 0 ? 0 : errno;
    }
    fs.Answer(OpKind::kStat, 0, arrived, {request, ErrorReply{error}});
  }

  static void Readlink(fuse_req_t request, fuse_ino_t node) {
    FileSystem& fs = Of(request);
    const Nanos arrived = SteadyClock().Now();
    fs.counters_.Count(Request::kReadlink);
    Reply reply{request, ErrorReply{ESTALE}};
    if (const auto path = fs.inodes_.PathOf(node)) {
      char target[PATH_MAX];
      const ssize_t size = readlinkat(fs.source_.get(), path->c_str(), target, sizeof target);
      if (size >= 0) {
        reply.body = LinkReply{std::string(target, static_cast<size_t>(size))};
      } else {
        reply.body = ErrorReply{errno};
      }
    }
    fs.Answer(OpKind::kStat, 0, arrived, std::move(reply));
  }

  static void Statfs(fuse_req_t request, fuse_ino_t) {
    FileSystem& fs = Of(request);
    const Nanos arrived = SteadyClock().Now();
    fs.counters_.Count(Request::kStatfs);
    StatfsReply info{};
    Reply reply{request, ErrorReply{0}};
    if (fstatvfs(fs.source_.get(), &info.info) == 0) {
      reply.body = info;
    } else {
      reply.body = ErrorReply{errno};
    }
    fs.Answer(OpKind::kStat, 0, arrived, std::move(reply));
  }

  static void Open(fuse_req_t request, fuse_ino_t node, fuse_file_info* info) {
    FileSystem& fs = Of(request);
    if (IsControl(node)) return OpenControl(request, node, info);
    const bool changes = (info->flags & O_ACCMODE) != O_RDONLY || (info->flags & O_TRUNC) != 0;
    if (changes && !fs.writable_) {
      fuse_reply_err(request, EROFS);
      return;
    }
    const Nanos arrived = SteadyClock().Now();
    fs.counters_.Count(Request::kOpen);
    Reply reply{request, ErrorReply{ESTALE}};
    if (const auto path = fs.inodes_.PathOf(node)) {
      const int access = info->flags & (O_ACCMODE | O_TRUNC);
      OwnedFd fd(openat(fs.source_.get(), path->c_str(), access | O_CLOEXEC | O_NOFOLLOW));
      if (fd.valid()) {
        OpenReply open{*info, std::move(fd)};
        open.info.direct_io = !fs.cache_;
        open.info.keep_cache = fs.cache_;
        open.info.noflush = 1;
        reply.body = std::move(open);
      } else {
        reply.body = ErrorReply{errno};
      }
    }
    fs.Answer(OpKind::kOpen, 0, arrived, std::move(reply));
  }

  static void OpenControl(fuse_req_t request, fuse_ino_t node, fuse_file_info* info) {
    FileSystem& fs = Of(request);
    auto handle = std::make_unique<ControlHandle>();
    if (node == kStatsNode) handle->text = fs.counters_.ToJson();
    if (node == kSettingsNode) handle->text = fs.SettingsText();
    info->fh = reinterpret_cast<uint64_t>(handle.get());
    info->direct_io = 1;
    if (fuse_reply_open(request, info) == 0) handle.release();
  }

  static void Read(fuse_req_t request, fuse_ino_t node, size_t size, off_t offset,
                   fuse_file_info* info) {
    FileSystem& fs = Of(request);
    if (IsControl(node)) {
      const std::string_view text = HandleOf<ControlHandle>(info)->text;
      const std::string_view part = text.substr(std::min<size_t>(text.size(), offset), size);
      fuse_reply_buf(request, part.data(), part.size());
      return;
    }
    const Nanos arrived = SteadyClock().Now();
    fs.counters_.Count(Request::kRead);
    const int fd = static_cast<int>(info->fh);
    ServeLoop& loop = *ServeLoop::Current();
    DataReply data{std::make_unique_for_overwrite<char[]>(size), 0};
    const iovec into{data.data.get(), size};
    const ssize_t got = preadv2(fd, &into, 1, offset, RWF_NOWAIT);
    if (got > 0) data.size = static_cast<size_t>(got);
    // A file system that cannot tell what is in memory (tmpfs: always) is read here and now.
    if (data.size == size || got == 0 || (got < 0 && errno == EOPNOTSUPP)) {
      fs.ReadRest(request, fd, size, offset, arrived, std::move(data), loop);
      return;
    }
    // The handle outlives the read: the kernel releases it after the answer.
    auto shared = std::make_shared<DataReply>(std::move(data));  // std::function must be copyable
    fs.cold_reads_.Run([&fs, &loop, request, fd, size, offset, arrived, shared] {
      fs.ReadRest(request, fd, size, offset, arrived, std::move(*shared), loop);
    });
  }

  static void Write(fuse_req_t request, fuse_ino_t node, const char* data, size_t size,
                    off_t offset, fuse_file_info* info) {
    FileSystem& fs = Of(request);
    if (node == kSettingsNode) {
      if (!fs.ChangeSettings({data, size}).ok()) {
        fuse_reply_err(request, EINVAL);
        return;
      }
    } else if (node == kResetNode) {
      fs.counters_.Reset();
    } else if (!fs.writable_) {
      fuse_reply_err(request, EROFS);
      return;
    } else {
      const ssize_t done = pwrite(static_cast<int>(info->fh), data, size, offset);
      if (done < 0) {
        fuse_reply_err(request, errno);
        return;
      }
      const auto written = static_cast<size_t>(done);
      return fs.AnswerChange(written, {request, WriteReply{written}});
    }
    fuse_reply_write(request, size);
  }

  static void Fallocate(fuse_req_t request, fuse_ino_t node, int mode, off_t offset, off_t length,
                        fuse_file_info* info) {
    if (IsControl(node) || !Of(request).writable_) {
      fuse_reply_err(request, EROFS);
      return;
    }
    const int done = fallocate(static_cast<int>(info->fh), mode, offset, length);
    fuse_reply_err(request, done == 0 ? 0 : errno);
  }

  static void Release(fuse_req_t request, fuse_ino_t node, fuse_file_info* info) {
    FileSystem& fs = Of(request);
    if (IsControl(node)) {
      delete HandleOf<ControlHandle>(info);
    } else {
      fs.counters_.Count(Request::kRelease);
      OwnedFd closes(static_cast<int>(info->fh));
    }
    fuse_reply_err(request, 0);
  }

  static void Opendir(fuse_req_t request, fuse_ino_t node, fuse_file_info* info) {
    FileSystem& fs = Of(request);
    auto handle = std::make_unique<DirHandle>();
    if (node != kFolderNode) {
      fs.counters_.Count(Request::kOpendir);
      const auto path = fs.inodes_.PathOf(node);
      if (!path) {
        fuse_reply_err(request, ESTALE);
        return;
      }
      OwnedFd fd(openat(fs.source_.get(), path->c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
      handle->dir.reset(fd.valid() ? fdopendir(fd.get()) : nullptr);
      if (handle->dir == nullptr) {
        fuse_reply_err(request, errno);
        return;
      }
      fd.Release();
      handle->path = *path;
      handle->is_root = node == InodeTable::kRoot;
      info->cache_readdir = fs.cache_;
      info->keep_cache = fs.cache_;
    }
    info->fh = reinterpret_cast<uint64_t>(handle.get());
    if (fuse_reply_open(request, info) == 0) handle.release();
  }

  static void Readdir(fuse_req_t request, fuse_ino_t, size_t size, off_t offset,
                      fuse_file_info* info) {
    List(request, size, offset, *HandleOf<DirHandle>(info), false);
  }

  static void ReaddirPlus(fuse_req_t request, fuse_ino_t, size_t size, off_t offset,
                          fuse_file_info* info) {
    List(request, size, offset, *HandleOf<DirHandle>(info), true);
  }

  static void List(fuse_req_t request, size_t size, off_t offset, DirHandle& handle, bool plus) {
    FileSystem& fs = Of(request);
    if (handle.dir == nullptr) {
      fuse_reply_buf(request, nullptr, 0);
      return;
    }
    const Nanos arrived = SteadyClock().Now();
    fs.counters_.Count(Request::kReaddir);
    DataReply data{std::make_unique_for_overwrite<char[]>(size), 0};
    int error = 0;
    {
      MutexLock lock(handle.mutex);
      if (offset != handle.position) {
        seekdir(handle.dir.get(), offset);
        handle.pending = nullptr;
        handle.position = offset;
      }
      while (true) {
        if (handle.pending == nullptr) {
          errno = 0;
          handle.pending = readdir(handle.dir.get());
          if (handle.pending == nullptr) {
            error = errno;
            break;
          }
        }
        const dirent& entry = *handle.pending;
        if (!(handle.is_root && std::strcmp(entry.d_name, kControlFolder) == 0)) {
          const size_t added = fs.AddEntry(request, handle.path, entry, plus,
                                           data.data.get() + data.size, size - data.size);
          if (added > size - data.size) break;
          data.size += added;
        }
        handle.position = entry.d_off;
        handle.pending = nullptr;
      }
    }
    Reply reply{request, ErrorReply{error}};
    if (error == 0 || data.size > 0) reply.body = std::move(data);
    fs.Answer(OpKind::kReaddir, 0, arrived, std::move(reply));
  }

  static void Releasedir(fuse_req_t request, fuse_ino_t, fuse_file_info* info) {
    delete HandleOf<DirHandle>(info);
    fuse_reply_err(request, 0);
  }

  static void Mknod(fuse_req_t request, fuse_ino_t, const char*, mode_t, dev_t) {
    fuse_reply_err(request, EROFS);
  }
  static void Mkdir(fuse_req_t request, fuse_ino_t parent, const char* name, mode_t mode) {
    FileSystem& fs = Of(request);
    auto path = fs.PathToChange(request, parent, name);
    if (!path) return;
    EntryReply made{};
    int error = mkdirat(fs.source_.get(), path->c_str(), mode) == 0 ? 0 : errno;
    if (error == 0) error = fs.FillEntry(*std::move(path), made.entry);
    Reply reply{request, made};
    if (error != 0) reply.body = ErrorReply{error};
    fs.AnswerChange(0, std::move(reply));
  }
  static void Create(fuse_req_t request, fuse_ino_t parent, const char* name, mode_t mode,
                     fuse_file_info* info) {
    FileSystem& fs = Of(request);
    auto path = fs.PathToChange(request, parent, name);
    if (!path) return;
    const int flags = info->flags & (O_ACCMODE | O_EXCL | O_TRUNC);
    OwnedFd fd(
        openat(fs.source_.get(), path->c_str(), flags | O_CREAT | O_CLOEXEC | O_NOFOLLOW, mode));
    CreateReply made{};
    const int error = fd.valid() ? fs.FillEntry(*std::move(path), made.entry) : errno;
    made.open = {*info, std::move(fd)};
    made.open.info.direct_io = !fs.cache_;
    made.open.info.noflush = 1;
    Reply reply{request, std::move(made)};
    if (error != 0) reply.body = ErrorReply{error};
    fs.AnswerChange(0, std::move(reply));
  }
  static void Unlink(fuse_req_t request, fuse_ino_t parent, const char* name) {
    Remove(request, parent, name, 0);
  }
  static void Rmdir(fuse_req_t request, fuse_ino_t parent, const char* name) {
    Remove(request, parent, name, AT_REMOVEDIR);
  }
  static void Remove(fuse_req_t request, fuse_ino_t parent, const char* name, int flags) {
    FileSystem& fs = Of(request);
    const auto path = fs.PathToChange(request, parent, name);
    if (!path) return;
    const int error = unlinkat(fs.source_.get(), path->c_str(), flags) == 0 ? 0 : errno;
    fs.AnswerChange(0, {request, ErrorReply{error}});
  }
  static void Symlink(fuse_req_t request, const char*, fuse_ino_t, const char*) {
    fuse_reply_err(request, EROFS);
  }
  static void Rename(fuse_req_t request, fuse_ino_t parent, const char* name, fuse_ino_t to_parent,
                     const char* to_name, unsigned flags) {
    FileSystem& fs = Of(request);
    const auto from = fs.PathToChange(request, parent, name);
    if (!from) return;
    const auto to = fs.PathToChange(request, to_parent, to_name);
    if (!to) return;
    const int source = fs.source_.get();
    // Paths of what lies in a folder would change with it.
    struct stat attr {};
    int error = fstatat(source, from->c_str(), &attr, AT_SYMLINK_NOFOLLOW) == 0 ? 0 : errno;
    if (error == 0 && (flags != 0 || S_ISDIR(attr.st_mode))) error = EINVAL;
    if (error == 0 && renameat(source, from->c_str(), source, to->c_str()) != 0) error = errno;
    if (error == 0) fs.inodes_.Move(attr.st_dev, attr.st_ino, *to);
    fs.AnswerChange(0, {request, ErrorReply{error}});
  }
  static void Link(fuse_req_t request, fuse_ino_t node, fuse_ino_t parent, const char* name) {
    FileSystem& fs = Of(request);
    auto path = fs.PathToChange(request, parent, name);
    if (!path) return;
    const auto of = fs.inodes_.PathOf(node);
    const int source = fs.source_.get();
    EntryReply made{};
    int error = ESTALE;
    if (of) error = linkat(source, of->c_str(), source, path->c_str(), 0) == 0 ? 0 : errno;
    if (error == 0) error = fs.FillEntry(*std::move(path), made.entry);
    Reply reply{request, made};
    if (error != 0) reply.body = ErrorReply{error};
    fs.AnswerChange(0, std::move(reply));
  }

  // Extended attributes: of a disk that can be written to; the kernel does not ask again otherwise.
  template <typename Ask>
  static void ReplyAttribute(fuse_req_t request, fuse_ino_t node, size_t size, Ask ask) {
    FileSystem& fs = Of(request);
    if (!fs.writable_ || IsControl(node)) {
      fuse_reply_err(request, fs.writable_ ? ENODATA : ENOSYS);
      return;
    }
    const Nanos arrived = SteadyClock().Now();
    Reply reply{request, ErrorReply{ESTALE}};
    if (const auto path = fs.PathForAttributes(node)) {
      DataReply data{std::make_unique_for_overwrite<char[]>(size), 0};
      const ssize_t got = ask(path->c_str(), data.data.get());
      if (got < 0) {
        reply.body = ErrorReply{errno};
      } else if (size == 0) {
        reply.body = AttributeSizeReply{static_cast<size_t>(got)};
      } else {
        data.size = static_cast<size_t>(got);
        reply.body = std::move(data);
      }
    }
    fs.Answer(OpKind::kStat, 0, arrived, std::move(reply));
  }
  static void Getxattr(fuse_req_t request, fuse_ino_t node, const char* name, size_t size) {
    ReplyAttribute(request, node, size,
                   [&](const char* path, char* out) { return lgetxattr(path, name, out, size); });
  }
  static void Listxattr(fuse_req_t request, fuse_ino_t node, size_t size) {
    ReplyAttribute(request, node, size,
                   [&](const char* path, char* out) { return llistxattr(path, out, size); });
  }
  template <typename Change>
  static void ChangeAttribute(fuse_req_t request, fuse_ino_t node, Change change) {
    FileSystem& fs = Of(request);
    const auto path = fs.PathForAttributes(node);
    if (!fs.writable_ || IsControl(node) || !path) {
      fuse_reply_err(request, fs.writable_ && !IsControl(node) ? ESTALE : EROFS);
      return;
    }
    fs.AnswerChange(0, {request, ErrorReply{change(path->c_str()) == 0 ? 0 : errno}});
  }
  static void Setxattr(fuse_req_t request, fuse_ino_t node, const char* name, const char* value,
                       size_t size, int flags) {
    ChangeAttribute(request, node,
                    [&](const char* path) { return lsetxattr(path, name, value, size, flags); });
  }
  static void Removexattr(fuse_req_t request, fuse_ino_t node, const char* name) {
    ChangeAttribute(request, node, [&](const char* path) { return lremovexattr(path, name); });
  }
};

const fuse_lowlevel_ops& FileSystem::Operations() {
  static const fuse_lowlevel_ops operations = [] {
    fuse_lowlevel_ops ops{};
    ops.init = Operation::Init;
    ops.lookup = Operation::Lookup;
    ops.forget = Operation::Forget;
    ops.forget_multi = Operation::ForgetMulti;
    ops.getattr = Operation::Getattr;
    ops.setattr = Operation::Setattr;
    ops.access = Operation::Access;
    ops.readlink = Operation::Readlink;
    ops.statfs = Operation::Statfs;
    ops.open = Operation::Open;
    ops.read = Operation::Read;
    ops.write = Operation::Write;
    ops.release = Operation::Release;
    ops.opendir = Operation::Opendir;
    ops.readdir = Operation::Readdir;
    ops.readdirplus = Operation::ReaddirPlus;
    ops.releasedir = Operation::Releasedir;
    ops.mknod = Operation::Mknod;
    ops.mkdir = Operation::Mkdir;
    ops.create = Operation::Create;
    ops.unlink = Operation::Unlink;
    ops.rmdir = Operation::Rmdir;
    ops.fallocate = Operation::Fallocate;
    ops.symlink = Operation::Symlink;
    ops.rename = Operation::Rename;
    ops.link = Operation::Link;
    ops.getxattr = Operation::Getxattr;
    ops.listxattr = Operation::Listxattr;
    ops.setxattr = Operation::Setxattr;
    ops.removexattr = Operation::Removexattr;
    return ops;
  }();
  return operations;
}

Result<std::unique_ptr<FileSystem>> FileSystem::Open(const Options& options) {
  FOREBAY_RETURN_IF_ERROR(options.settings.Validate());
  OwnedFd source(open(options.source.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (!source.valid()) return ErrnoStatus(errno, StrCat("open source folder ", options.source));
  return std::unique_ptr<FileSystem>(new FileSystem(std::move(source), options));
}

FileSystem::FileSystem(OwnedFd source, const Options& options)
    : source_(std::move(source)),
      cache_(options.cache),
      writable_(options.writable),
      timeout_s_(options.cache ? kCacheSeconds : 0),
      model_(options.settings, SteadyClock().Now()),
      writes_({.bytes_per_s = options.write_bytes_per_s, .stall = options.settings.stall},
              SteadyClock().Now()) {}

std::optional<std::string> FileSystem::PathToChange(fuse_req_t request, NodeId parent,
                                                    const char* name) {
  const bool control = parent == kFolderNode ||
                       (parent == InodeTable::kRoot && std::strcmp(name, kControlFolder) == 0);
  const auto folder = inodes_.PathOf(parent);
  if (!writable_ || control || !folder) {
    fuse_reply_err(request, !writable_ || control ? EROFS : ESTALE);
    return std::nullopt;
  }
  return JoinPath(*folder, name);
}

int FileSystem::FillEntry(std::string path, fuse_entry_param& entry) {
  entry.attr_timeout = timeout_s_;
  entry.entry_timeout = timeout_s_;
  if (fstatat(source_.get(), path.c_str(), &entry.attr, AT_SYMLINK_NOFOLLOW) != 0) return errno;
  entry.ino = inodes_.Acquire(entry.attr.st_dev, entry.attr.st_ino, std::move(path));
  return 0;
}

std::optional<std::string> FileSystem::PathForAttributes(NodeId node) const {
  const auto path = inodes_.PathOf(node);
  if (!path) return std::nullopt;
  return StrCat("/proc/self/fd/", source_.get(), "/", *path);
}

size_t FileSystem::AddEntry(fuse_req_t request, const std::string& folder, const dirent& entry,
                            bool plus, char* out, size_t space) {
  struct stat attr {};
  attr.st_ino = entry.d_ino;
  attr.st_mode = DTTOIF(entry.d_type);
  if (!plus) return fuse_add_direntry(request, out, space, entry.d_name, &attr, entry.d_off);

  fuse_entry_param param{};
  param.attr = attr;
  // Asked for the size first: an entry that does not fit must not count as a lookup.
  const size_t needed = fuse_add_direntry_plus(request, nullptr, 0, entry.d_name, &param, 0);
  if (needed > space) return needed;
  // The kernel takes . and .. without a lookup. A file that vanished is listed without attributes.
  if (!IsDots(entry.d_name) && FillEntry(JoinPath(folder, entry.d_name), param) != 0) {
    param.ino = 0;
    param.attr = attr;
  }
  return fuse_add_direntry_plus(request, out, space, entry.d_name, &param, entry.d_off);
}

void FileSystem::ReadRest(fuse_req_t request, int fd, size_t size, off_t offset, Nanos arrived,
                          DataReply data, ServeLoop& loop) {
  while (data.size < size) {
    const ssize_t got = pread(fd, data.data.get() + data.size, size - data.size,
                              offset + static_cast<off_t>(data.size));
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) return Answer(OpKind::kRead, 0, arrived, {request, ErrorReply{errno}}, loop);
    if (got == 0) break;
    data.size += static_cast<size_t>(got);
  }
  const uint64_t bytes = data.size;
  Answer(OpKind::kRead, bytes, arrived, {request, std::move(data)}, loop);
}

void FileSystem::Answer(OpKind kind, uint64_t bytes, Nanos arrived, Reply reply, ServeLoop& loop) {
  counters_.Begin();
  StorageModel::Decision decision;
  {
    MutexLock lock(mutex_);
    decision = model_.Admit(kind, bytes, arrived);
    if (decision.finish_at == StorageModel::kNever) {
      parked_.push_back({kind, bytes, std::make_unique<Reply>(std::move(reply))});
      return;
    }
  }
  Deliver(decision, bytes, std::move(reply), loop);
}

void FileSystem::AnswerChange(uint64_t bytes, Reply reply) {
  const Nanos arrived = SteadyClock().Now();
  counters_.Begin();
  StorageModel::Decision decision;
  {
    MutexLock lock(mutex_);
    decision = writes_.Admit(OpKind::kRead, bytes, arrived);
    if (decision.finish_at == StorageModel::kNever) {
      parked_.push_back({OpKind::kRead, 0, std::make_unique<Reply>(std::move(reply))});
      return;
    }
  }
  Deliver(decision, 0, std::move(reply), *ServeLoop::Current());
}

void FileSystem::Deliver(StorageModel::Decision decision, uint64_t bytes, Reply reply,
                         ServeLoop& loop) {
  if (decision.error != 0) {
    counters_.CountEio();
    reply.body = ErrorReply{decision.error};
  } else {
    counters_.CountBytes(bytes);
  }
  const Nanos late = SteadyClock().Now() - decision.finish_at;
  if (late < 0) {
    loop.Push(decision.finish_at, std::make_unique<Reply>(std::move(reply)));
    return;
  }
  counters_.End(late);
  Send(reply, inodes_);
}

int FileSystem::Serve(fuse_session* session, unsigned threads) {
  // Processor time counts from 0 in a child process.
  counters_.Reset();
  const int fd = fuse_session_fd(session);
  if (fcntl(fd, F_SETFL, fcntl(fd, F_GETFL) | O_NONBLOCK) != 0) return errno;
  std::vector<std::unique_ptr<ServeLoop>> loops;
  for (unsigned i = 0; i < threads; ++i) {
    Result<std::unique_ptr<ServeLoop>> loop = ServeLoop::Make(inodes_, counters_);
    if (!loop) return EMFILE;
    loops.push_back(std::move(*loop));
  }
  int error = 0;
  {
    std::vector<std::jthread> others;
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    for (size_t i = 1; i < loops.size(); ++i) {
      others.emplace_back([&loops, i, session] { loops[i]->Run(session); });
    }
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    error = loops[0]->Run(session);
    for (const auto& loop : loops) loop->Wake();
  }
  cold_reads_.Close();
  ReleaseParked();
  for (const auto& loop : loops) loop->SendAll();
  return error;
}

void FileSystem::ReleaseParked() {
  std::vector<Parked> parked;
  {
    MutexLock lock(mutex_);
    parked.swap(parked_);
  }
  const Nanos now = SteadyClock().Now();
  for (Parked& waiting : parked) {
    Deliver({now, 0}, waiting.bytes, std::move(*waiting.reply), *ServeLoop::Current());
  }
}

Status FileSystem::ChangeSettings(std::string_view text) {
  std::vector<Parked> parked;
  std::vector<StorageModel::Decision> decisions;
  {
    MutexLock lock(mutex_);
    const Nanos now = SteadyClock().Now();
    const Result<StorageSettings> settings = model_.settings(now).With(text);
    if (!settings) {
      rejected_ = settings.error().message();
      return settings.error();
    }
    rejected_.clear();
    model_.Apply(*settings, now);
    StorageSettings writes = writes_.settings(now);
    writes.stall = settings->stall;
    writes_.Apply(writes, now);
    if (settings->stall != StorageSettings::kForever) parked.swap(parked_);
    for (const Parked& waiting : parked) {
      decisions.push_back(model_.Admit(waiting.kind, waiting.bytes, now));
    }
  }
  for (size_t i = 0; i < parked.size(); ++i) {
    Deliver(decisions[i], parked[i].bytes, std::move(*parked[i].reply), *ServeLoop::Current());
  }
  return {};
}

std::string FileSystem::SettingsText() {
  MutexLock lock(mutex_);
  std::string text = model_.settings(SteadyClock().Now()).ToText();
  if (!rejected_.empty()) text += StrCat("# last change refused: ", rejected_, "\n");
  return text;
}

}  // namespace forebay::slowfs
