#include "mount/tree.h"

#include <dirent.h>
#include <fcntl.h>
#include <limits.h>
#include <sys/statvfs.h>
#include <sys/xattr.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <memory>
#include <optional>
#include <string_view>
#include <utility>
#include <vector>

#include "base/owned.h"
#include "base/page_buffer.h"
#include "base/status.h"
#include "files/current.h"
#include "files/identity.h"

namespace forebay::mount {
namespace {

// Requests that the kernel sends without a waiting process (read-ahead).
constexpr unsigned kMaxBackground = 512;

struct OpenFolder {
  struct CloseDir {
    void operator()(DIR* open) const { closedir(open); }
  };
  std::unique_ptr<DIR, CloseDir> dir;

  Mutex mutex;
  off_t position GUARDED_BY(mutex) = 0;  // where the stream stands, after `pending` if there is one
  dirent* pending GUARDED_BY(mutex) = nullptr;  // read from the stream, not yet given out
};

template <typename Handle>
Handle& HandleOf(const fuse_file_info* info) {
  return *reinterpret_cast<Handle*>(info->fh);
}

std::string Join(const std::string& folder, const char* name) {
  return folder == "/" ? StrCat(folder, name) : StrCat(folder, '/', name);
}

}  // namespace

struct Tree::OpenFile {
  OwnedFd fd;             // of the copy, or of the source
  bool partial = false;   // of the source, while its copy is being made
  std::string path = {};  // of the source; when partial, or of a copy
  bool copy = false;
  struct stat copied = {};  // of a copy: the source when it was made
  mutable files::Client::Seen seen = {};
};

Tree::Tree(Options options, const files::Client& client)
    : options_(std::move(options)), client_(client), nodes_(options_.source) {}

int Tree::Attributes(const std::string& path, struct stat* out) const {
  if (lstat(path.c_str(), out) != 0) return errno;
  // Nobody tells of changes from outside; the kernel asks for attributes when it is time to look.
  char copy[files::Client::kMostCopyPath];
  files::Identity identity;
  if (client_.on() && client_.Covers(path) && client_.CopyPath(path, copy, sizeof copy) &&
      files::ReadIdentityAt(copy, &identity) == 0 &&
      std::string_view(identity.path, identity.path_length) == path &&
      !files::SameFile(identity.stat, *out)) {
    client_.FileChanged(path);
  }
  return 0;
}

int Tree::ReadAll(const OpenFile& file, char* out, size_t size, off_t offset, size_t* got) const {
  // Less than was asked for means the file's end to the kernel.
  while (*got < size) {
    const off_t at = offset + static_cast<off_t>(*got);
    ssize_t part =
        client_.ReadPart(file.path, out + *got, size - *got, static_cast<uint64_t>(at), &file.seen);
    if (part < 0) part = pread(file.fd.get(), out + *got, size - *got, at);
    if (part < 0 && errno == EINTR) continue;
    if (part < 0) return *got > 0 ? 0 : errno;
    if (part == 0) break;
    *got += static_cast<size_t>(part);
  }
  return 0;
}

OwnedFd Tree::OpenSourceOf(const OpenFile& file) const {
  OwnedFd source(open(file.path.c_str(), O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK));
  struct stat now = {};
  if (!source.valid() || fstat(source.get(), &now) != 0 || !files::SameFile(now, file.copied)) {
    return OwnedFd();
  }
  return source;
}

struct Tree::Operation {
  static Tree& Of(fuse_req_t request) { return *static_cast<Tree*>(fuse_req_userdata(request)); }

  static void Init(void*, fuse_conn_info* connection) {
    connection->max_background = kMaxBackground;
    connection->congestion_threshold = kMaxBackground;
    // Requests are small (nobody writes); a pipe only adds work.
    connection->want &= ~static_cast<unsigned>(FUSE_CAP_SPLICE_READ);
    if ((connection->capable & FUSE_CAP_SPLICE_WRITE) != 0) {
      connection->want |= FUSE_CAP_SPLICE_WRITE;
    }
  }

  static void Lookup(fuse_req_t request, fuse_ino_t parent, const char* name) {
    Tree& tree = Of(request);
    const std::optional<std::string> folder = tree.nodes_.PathOf(parent);
    if (!folder) {
      fuse_reply_err(request, ESTALE);
      return;
    }
    const std::string path = Join(*folder, name);
    fuse_entry_param entry{};
    const int error = tree.Attributes(path, &entry.attr);
    if (error == ENOENT) {
      entry.entry_timeout = tree.options_.absent_s;
      fuse_reply_entry(request, &entry);
      return;
    }
    if (error != 0) {
      fuse_reply_err(request, error);
      return;
    }
    entry.entry_timeout = entry.attr_timeout = tree.options_.keep_s;
    entry.ino = tree.nodes_.Acquire(path, entry.attr.st_dev, entry.attr.st_ino);
    if (fuse_reply_entry(request, &entry) != 0) tree.nodes_.Forget(entry.ino, 1);
  }

  static void Forget(fuse_req_t request, fuse_ino_t node, uint64_t times) {
    Of(request).nodes_.Forget(node, times);
    fuse_reply_none(request);
  }

  static void ForgetMulti(fuse_req_t request, size_t count, fuse_forget_data* forgets) {
    for (size_t i = 0; i < count; ++i) {
      Of(request).nodes_.Forget(forgets[i].ino, forgets[i].nlookup);
    }
    fuse_reply_none(request);
  }

  static void Getattr(fuse_req_t request, fuse_ino_t node, fuse_file_info*) {
    Tree& tree = Of(request);
    struct stat attributes = {};
    const std::optional<std::string> path = tree.nodes_.PathOf(node);
    const int error = path ? tree.Attributes(*path, &attributes) : ESTALE;
    if (error != 0) {
      fuse_reply_err(request, error);
    } else {
      fuse_reply_attr(request, &attributes, tree.options_.keep_s);
    }
  }

  static void Access(fuse_req_t request, fuse_ino_t node, int mask) {
    const std::optional<std::string> path = Of(request).nodes_.PathOf(node);
    int error = ESTALE;
    if (path) error = faccessat(AT_FDCWD, path->c_str(), mask, AT_EACCESS) == 0 ? 0 : errno;
    fuse_reply_err(request, error);
  }

  static void Readlink(fuse_req_t request, fuse_ino_t node) {
    const std::optional<std::string> path = Of(request).nodes_.PathOf(node);
    char target[PATH_MAX + 1];
    errno = ESTALE;
    const ssize_t size = path ? readlink(path->c_str(), target, PATH_MAX) : -1;
    if (size < 0) {
      fuse_reply_err(request, errno);
      return;
    }
    target[size] = 0;
    fuse_reply_readlink(request, target);
  }

  static void Statfs(fuse_req_t request, fuse_ino_t) {
    struct statvfs room = {};
    if (statvfs(Of(request).options_.source.c_str(), &room) == 0) {
      fuse_reply_statfs(request, &room);
    } else {
      fuse_reply_err(request, errno);
    }
  }

  static void Open(fuse_req_t request, fuse_ino_t node, fuse_file_info* info) {
    Tree& tree = Of(request);
    if ((info->flags & O_ACCMODE) != O_RDONLY || (info->flags & O_TRUNC) != 0) {
      fuse_reply_err(request, EROFS);
      return;
    }
    const std::optional<std::string> path = tree.nodes_.PathOf(node);
    if (!path) {
      fuse_reply_err(request, ESTALE);
      return;
    }
    constexpr int kFlags = O_RDONLY | O_CLOEXEC | O_NOFOLLOW;
    auto file = std::make_unique<OpenFile>();
    auto found = files::Client::Found::kSource;
    if (tree.client_.on() && tree.client_.Covers(*path)) {
      file->fd = OwnedFd(tree.client_.OpenCopy(*path, kFlags, &found));
    }
    if (!file->fd.valid()) {
      file->fd = OwnedFd(open(path->c_str(), kFlags));
      if (!file->fd.valid()) {
        fuse_reply_err(request, errno);
        return;
      }
      file->partial = found == files::Client::Found::kPartial &&
                      files::IsCurrentPart(tree.client_, path->c_str(), file->fd.get());
      if (file->partial) file->path = *path;
    } else if (files::Identity identity; files::ReadIdentity(file->fd.get(), &identity) == 0) {
      file->copy = true;
      file->copied = identity.stat;
      file->path = *path;
    }
    // The kernel drops what it holds when the attributes change.
    info->keep_cache = 1;
    info->noflush = 1;
    info->fh = reinterpret_cast<uint64_t>(file.get());
    if (fuse_reply_open(request, info) == 0) file.release();  // Release() owns it
  }

  static void Read(fuse_req_t request, fuse_ino_t, size_t size, off_t offset,
                   fuse_file_info* info) {
    const OpenFile& file = HandleOf<OpenFile>(info);
    if (file.partial) {
      const PageBuffer buffer = MakePageBuffer(size);
      auto* const bytes = reinterpret_cast<char*>(buffer.get());
      size_t got = 0;
      const int error = Of(request).ReadAll(file, bytes, size, offset, &got);
      if (error != 0) {
        fuse_reply_err(request, error);
      } else {
        fuse_reply_buf(request, bytes, got);
      }
      return;
    }
    const Tree& tree = Of(request);
    OwnedFd source;  // where the copy's disk hangs, and its file is what it was
    if (file.copy && !tree.client_.uses_copies()) source = tree.OpenSourceOf(file);
    fuse_bufvec data{};  // what FUSE_BUFVEC_INIT makes, which is C
    data.count = 1;
    data.buf[0].size = size;
    data.buf[0].flags =
        static_cast<fuse_buf_flags>(FUSE_BUF_IS_FD | FUSE_BUF_FD_SEEK | FUSE_BUF_FD_RETRY);
    data.buf[0].fd = source.valid() ? source.get() : file.fd.get();
    data.buf[0].pos = offset;
    fuse_reply_data(request, &data, static_cast<fuse_buf_copy_flags>(0));
  }

  static void Release(fuse_req_t request, fuse_ino_t, fuse_file_info* info) {
    delete &HandleOf<OpenFile>(info);
    fuse_reply_err(request, 0);
  }

  static void Opendir(fuse_req_t request, fuse_ino_t node, fuse_file_info* info) {
    const std::optional<std::string> path = Of(request).nodes_.PathOf(node);
    auto folder = std::make_unique<OpenFolder>();
    errno = ESTALE;
    if (path) folder->dir.reset(opendir(path->c_str()));
    if (folder->dir == nullptr) {
      fuse_reply_err(request, errno);
      return;
    }
    info->fh = reinterpret_cast<uint64_t>(folder.get());
    if (fuse_reply_open(request, info) == 0) folder.release();  // Releasedir() owns it
  }

  static void Readdir(fuse_req_t request, fuse_ino_t, size_t size, off_t offset,
                      fuse_file_info* info) {
    OpenFolder& folder = HandleOf<OpenFolder>(info);
    const auto lines = std::make_unique_for_overwrite<char[]>(size);
    size_t used = 0;
    int error = 0;
    {
      MutexLock lock(folder.mutex);
      if (offset != folder.position) {
        seekdir(folder.dir.get(), offset);
        folder.pending = nullptr;
        folder.position = offset;
      }
      while (true) {
        if (folder.pending == nullptr) {
          errno = 0;
          folder.pending = readdir(folder.dir.get());
          if (folder.pending == nullptr) {
            error = errno;
            break;
          }
        }
        const dirent& entry = *folder.pending;
        struct stat kind = {};
        kind.st_ino = entry.d_ino;
        kind.st_mode = static_cast<mode_t>(DTTOIF(entry.d_type));
        const size_t added = fuse_add_direntry(request, lines.get() + used, size - used,
                                               entry.d_name, &kind, entry.d_off);
        if (added > size - used) break;
        used += added;
        folder.position = entry.d_off;
        folder.pending = nullptr;
      }
    }
    if (error != 0 && used == 0) {
      fuse_reply_err(request, error);
    } else {
      fuse_reply_buf(request, lines.get(), used);
    }
  }

  static void Releasedir(fuse_req_t request, fuse_ino_t, fuse_file_info* info) {
    delete &HandleOf<OpenFolder>(info);
    fuse_reply_err(request, 0);
  }

  // Both kinds of question about extended attributes: how much, or the bytes.
  template <typename Ask>
  static void ReplyAttribute(fuse_req_t request, size_t size, Ask ask) {
    std::vector<char> bytes(size);
    const ssize_t got = ask(bytes.data(), size);
    if (got < 0) {
      fuse_reply_err(request, errno);
    } else if (size == 0) {
      fuse_reply_xattr(request, static_cast<size_t>(got));
    } else {
      fuse_reply_buf(request, bytes.data(), static_cast<size_t>(got));
    }
  }

  static void Getxattr(fuse_req_t request, fuse_ino_t node, const char* name, size_t size) {
    if (node == NodeTable::kRoot && std::strcmp(name, kServedBy) == 0) {
      const std::string pid = std::to_string(getpid());
      return ReplyAttribute(request, size, [&](char* out, size_t room) -> ssize_t {
        if (room != 0 && room < pid.size()) {
          errno = ERANGE;
          return -1;
        }
        std::copy_n(pid.data(), std::min(room, pid.size()), out);
        return static_cast<ssize_t>(pid.size());
      });
    }
    const std::optional<std::string> path = Of(request).nodes_.PathOf(node);
    if (!path) {
      fuse_reply_err(request, ESTALE);
      return;
    }
    ReplyAttribute(request, size, [&](char* out, size_t room) {
      return lgetxattr(path->c_str(), name, out, room);
    });
  }

  static void Listxattr(fuse_req_t request, fuse_ino_t node, size_t size) {
    const std::optional<std::string> path = Of(request).nodes_.PathOf(node);
    if (!path) {
      fuse_reply_err(request, ESTALE);
      return;
    }
    ReplyAttribute(request, size,
                   [&](char* out, size_t room) { return llistxattr(path->c_str(), out, room); });
  }
};

// The mount itself is read-only: the kernel refuses what would write.
const fuse_lowlevel_ops& Tree::Operations() {
  static const fuse_lowlevel_ops operations = [] {
    fuse_lowlevel_ops ops{};
    ops.init = Operation::Init;
    ops.lookup = Operation::Lookup;
    ops.forget = Operation::Forget;
    ops.forget_multi = Operation::ForgetMulti;
    ops.getattr = Operation::Getattr;
    ops.access = Operation::Access;
    ops.readlink = Operation::Readlink;
    ops.statfs = Operation::Statfs;
    ops.open = Operation::Open;
    ops.read = Operation::Read;
    ops.release = Operation::Release;
    ops.opendir = Operation::Opendir;
    ops.readdir = Operation::Readdir;
    ops.releasedir = Operation::Releasedir;
    ops.getxattr = Operation::Getxattr;
    ops.listxattr = Operation::Listxattr;
    return ops;
  }();
  return operations;
}

}  // namespace forebay::mount
