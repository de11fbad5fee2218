#include "catalog/lister.h"

#include <dirent.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <limits>
#include <utility>

#include "base/owned.h"
#include "catalog/paths.h"
#include "catalog/shard.h"

namespace forebay {
namespace {

// One call brings some 5,000 names where the file system fills it; glibc's readdir asks for 32 KiB.
constexpr size_t kDirentBuffer = size_t{256} << 10;
// Stats done by one task: small enough that one folder keeps every thread busy.
constexpr size_t kStatChunk = 64;
// Folders that stay open for those who look up sizes later.
constexpr size_t kKeptOpen = 64;

struct Entry {
  std::string name;
  unsigned char type;  // DT_*
};

// What stat says of a link that leads nowhere. Other errors may hide a folder of samples.
bool LeadsNowhere(int error) { return error == ENOENT || error == ENOTDIR || error == ELOOP; }

bool NeedsStat(const Entry& entry) { return entry.type == DT_LNK || entry.type == DT_UNKNOWN; }

struct OpenFolder {
  OwnedFd fd;
  FolderIdentity identity;
};

Result<OpenFolder> Open(const std::string& path) {
  OpenFolder out;
  out.fd = OwnedFd(::open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (!out.fd.valid()) return ErrnoStatus(errno, StrCat("open folder ", path));
  struct stat st;
  // Before the entries are read: what changes while they are read shows as a newer time later.
  if (::fstat(out.fd.get(), &st) != 0) return ErrnoStatus(errno, StrCat("stat folder ", path));
  out.identity = {.device = st.st_dev, .inode = st.st_ino, .mtime_ns = MtimeNs(st)};
  return out;
}

Result<std::vector<Entry>> ReadEntries(int fd, const std::string& path) {
  struct Dirent {  // getdents64(2)
    uint64_t inode;
    int64_t next;
    uint16_t bytes;
    uint8_t type;
  };
  constexpr size_t kName = 19;
  std::vector<Entry> out;
  const auto buffer = std::make_unique<std::byte[]>(kDirentBuffer);
  while (true) {
    const long n = ::syscall(SYS_getdents64, fd, buffer.get(), kDirentBuffer);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) return ErrnoStatus(errno, StrCat("list folder ", path));
    if (n == 0) break;
    for (long at = 0; at < n;) {
      Dirent head;
      std::memcpy(&head, buffer.get() + at, kName);
      const char* name = reinterpret_cast<const char*>(buffer.get() + at + kName);
      at += head.bytes;
      if (std::strcmp(name, ".") == 0 || std::strcmp(name, "..") == 0) continue;
      out.push_back({name, head.type});
    }
  }
  std::sort(out.begin(), out.end(), [](const Entry& a, const Entry& b) { return a.name < b.name; });
  return out;
}

// Asks the server only where the mode leaves doubt, so that a normal data set pays nothing.
bool Readable(int folder, const char* name, const struct stat& st) {
  const uid_t user = ::geteuid();
  if (user == 0) return true;
  const bool group_and_others = (st.st_mode & S_IRGRP) != 0 && (st.st_mode & S_IROTH) != 0;
  if (st.st_uid == user ? (st.st_mode & S_IRUSR) != 0 : group_and_others) return true;
  return ::faccessat(folder, name, R_OK, AT_EACCESS) == 0 || errno != EACCES;
}

class FolderWalk {
 public:
  FolderWalk(const std::string& root, const BuildOptions& options, BuildWatch& watch)
      : root_(root), options_(options), watch_(watch), work_(options.threads) {}

  Result<std::vector<std::unique_ptr<ListedFolder>>> Walk(FolderListing top) {
    auto first = std::make_unique<Visit>();
    first->out = std::make_unique<ListedFolder>();
    first->out->identity = top.identity;
    Visit* const base = first.get();
    {
      MutexLock lock(mutex_);
      visits_.push_back(std::move(first));
    }
    if (top.folders.empty()) {
      for (size_t i = 0; i < top.files.size(); ++i) {
        if (!HasExtension(top.files[i], options_.extensions)) continue;
        const bool plain = top.plain[i];
        base->entries.push_back(
            {std::move(top.files[i]), plain ? uint8_t{DT_REG} : uint8_t{DT_UNKNOWN}});
      }
      Result<OpenFolder> open = Open(root_);
      if (!open) return open.error();
      base->fd = std::move(open->fd);
      PushStats(base);
    }
    // Backwards: the last one pushed runs first.
    for (size_t i = top.folders.size(); i-- > 0;) {
      work_.Push([this, base, i, name = top.folders[i]] {
        return List(base->out.get(), name, static_cast<int32_t>(i));
      });
    }
    FOREBAY_RETURN_IF_ERROR(work_.Drain(watch_.Tick()));

    std::vector<std::unique_ptr<ListedFolder>> out;
    MutexLock lock(mutex_);
    for (std::unique_ptr<Visit>& visit : visits_) out.push_back(std::move(visit->out));
    std::sort(out.begin(), out.end(), [](const auto& a, const auto& b) {
      return std::pair(a->label, std::string_view(a->path)) <
             std::pair(b->label, std::string_view(b->path));
    });
    return out;
  }

 private:
  static constexpr int64_t kNotAFile = -1;

  // A folder while its entries are being looked at.
  struct Visit {
    std::unique_ptr<ListedFolder> out;
    OwnedFd fd;
    std::vector<Entry> entries;
    std::vector<int64_t> sizes;  // one for each entry
    std::vector<int64_t> times;
    std::vector<uint32_t> stamps;
    std::vector<size_t> to_stat;  // entries
    std::atomic<size_t> chunks_left = 0;
  };

  Status List(const ListedFolder* parent, const std::string& name, int32_t label) {
    const std::string path = JoinPath(parent->path, name);
    const std::string full = JoinPath(root_, path);
    Result<OpenFolder> open = Open(full);
    if (!open) return open.error();
    for (const ListedFolder* f = parent; f != nullptr; f = f->parent) {
      if (f->identity.device != open->identity.device ||
          f->identity.inode != open->identity.inode) {
        continue;
      }
      // A class stays one, without files, even where it is a link back to the root.
      if (parent->parent == nullptr) AddVisit(parent, path, label, open->identity);
      return Status();
    }
    Result<std::vector<Entry>> entries = ReadEntries(open->fd.get(), full);
    if (!entries) return entries.error();
    Visit* const visit = AddVisit(parent, path, label, open->identity);
    visit->fd = std::move(open->fd);
    for (Entry& entry : *entries) {
      if (entry.type == DT_DIR) {
        PushFolder(visit, entry.name);
      } else if (NeedsStat(entry) ||
                 (entry.type == DT_REG && HasExtension(entry.name, options_.extensions))) {
        visit->entries.push_back(std::move(entry));
      }
    }
    PushStats(visit);
    return Status();
  }

  Visit* AddVisit(const ListedFolder* parent, const std::string& path, int32_t label,
                  const FolderIdentity& identity) {
    auto visit = std::make_unique<Visit>();
    visit->out = std::make_unique<ListedFolder>();
    visit->out->parent = parent;
    visit->out->label = label;
    visit->out->path = path;
    visit->out->identity = identity;
    MutexLock lock(mutex_);
    visits_.push_back(std::move(visit));
    return visits_.back().get();
  }

  void PushFolder(const Visit* parent, const std::string& name) {
    work_.Push([this, out = parent->out.get(), name] { return List(out, name, out->label); });
  }

  void PushStats(Visit* visit) {
    const size_t n = visit->entries.size();
    watch_.objects_total += n;
    if (n == 0) {
      visit->fd.Reset();
      return;
    }
    visit->sizes.assign(n, kNotAFile);
    visit->times.assign(n, 0);
    visit->stamps.assign(n, 0);
    for (size_t i = 0; i < n; ++i) {
      if (options_.sizes_later && !NeedsStat(visit->entries[i])) {
        visit->sizes[i] = 0;
      } else {
        visit->to_stat.push_back(i);
      }
    }
    const size_t stats = visit->to_stat.size();
    watch_.objects_done += n - stats;
    if (stats == 0) {
      Gather(visit);
      return;
    }
    visit->chunks_left = (stats + kStatChunk - 1) / kStatChunk;
    for (size_t begin = 0; begin < stats; begin += kStatChunk) {
      work_.Push([this, visit, begin, end = std::min(stats, begin + kStatChunk)] {
        return StatChunk(visit, begin, end);
      });
    }
  }

  Status StatChunk(Visit* visit, size_t begin, size_t end) {
    for (size_t i = begin; i < end && !work_.stopping(); ++i) {
      FOREBAY_RETURN_IF_ERROR(StatEntry(visit, visit->to_stat[i]));
      ++watch_.objects_done;
    }
    // acq_rel: the last one sees what the others wrote to sizes and times.
    if (visit->chunks_left.fetch_sub(1, std::memory_order_acq_rel) == 1) Gather(visit);
    return Status();
  }

  Status StatEntry(Visit* visit, size_t i) {
    const Entry& entry = visit->entries[i];
    const auto path = [&] { return JoinPath(JoinPath(root_, visit->out->path), entry.name); };
    struct stat st;
    if (::fstatat(visit->fd.get(), entry.name.c_str(), &st, 0) != 0) {
      const int error = errno;
      // A link that leads nowhere matters only where its name makes it a sample.
      if (LeadsNowhere(error) && !HasExtension(entry.name, options_.extensions)) return Status();
      return ErrnoStatus(error, StrCat("stat ", path()));
    }
    if (S_ISDIR(st.st_mode)) {
      // The root's own folders are classes and have been pushed already.
      if (visit->out->parent != nullptr) PushFolder(visit, entry.name);
      return Status();
    }
    if (!S_ISREG(st.st_mode) || !HasExtension(entry.name, options_.extensions)) return Status();
    const auto size = static_cast<uint64_t>(st.st_size);
    if (size > std::numeric_limits<uint32_t>::max()) return SampleTooLarge(path(), size);
    if (!Readable(visit->fd.get(), entry.name.c_str(), st)) {
      return ErrnoStatus(EACCES, StrCat("read ", path()));
    }
    visit->sizes[i] = st.st_size;
    visit->times[i] = MtimeNs(st);
    visit->stamps[i] = StampOfLook(MtimeNs(st), CtimeNs(st));
    return Status();
  }

  void Gather(Visit* visit) {
    ListedFolder& out = *visit->out;
    for (size_t i = 0; i < visit->entries.size(); ++i) {
      if (visit->sizes[i] == kNotAFile) continue;
      out.names.append(visit->entries[i].name);
      out.name_ends.push_back(out.names.size());
      out.sizes.push_back(options_.sizes_later ? 0 : static_cast<uint32_t>(visit->sizes[i]));
      out.times.push_back(options_.sizes_later ? 0 : visit->times[i]);
      out.stamps.push_back(options_.sizes_later ? 0 : visit->stamps[i]);
    }
    watch_.samples += out.sizes.size();
    std::vector<Entry>().swap(visit->entries);
    std::vector<int64_t>().swap(visit->sizes);
    std::vector<int64_t>().swap(visit->times);
    std::vector<uint32_t>().swap(visit->stamps);
    std::vector<size_t>().swap(visit->to_stat);
    if (options_.sizes_later && !out.sizes.empty() && kept_open_.fetch_add(1) < kKeptOpen) {
      out.fd = std::move(visit->fd);
    }
    visit->fd.Reset();
  }

  const std::string& root_;
  const BuildOptions& options_;
  BuildWatch& watch_;
  std::atomic<size_t> kept_open_ = 0;
  Mutex mutex_;
  // The pointees are used without the lock, each by the tasks of its folder only.
  std::vector<std::unique_ptr<Visit>> visits_ GUARDED_BY(mutex_);
  WorkStack work_;  // last: its threads end before what they use
};

}  // namespace

std::function<bool()> BuildWatch::Tick() {
  return [this] {
    if (!options_.progress || !pace_.Due()) return true;
    return options_.progress(objects_done, objects_total, samples);
  };
}

Result<FolderListing> ListFolder(const std::string& path, size_t threads,
                                 const std::function<bool()>& tick) {
  Result<OpenFolder> open = Open(path);
  if (!open) return open.error();
  Result<std::vector<Entry>> entries = ReadEntries(open->fd.get(), path);
  if (!entries) return entries.error();
  std::vector<Entry*> unknown;
  for (Entry& entry : *entries) {
    if (NeedsStat(entry)) unknown.push_back(&entry);
  }
  const auto resolve = [&](size_t i) -> Status {
    struct stat st;
    Entry& entry = *unknown[i];
    if (::fstatat(open->fd.get(), entry.name.c_str(), &st, 0) != 0) {
      if (!LeadsNowhere(errno))
        return ErrnoStatus(errno, StrCat("stat ", JoinPath(path, entry.name)));
      entry.type = DT_REG;
    } else {
      entry.type = S_ISDIR(st.st_mode) ? DT_DIR : S_ISREG(st.st_mode) ? DT_REG : DT_FIFO;
    }
    return Status();
  };
  FOREBAY_RETURN_IF_ERROR(ParallelFor(unknown.size(), threads, resolve, tick));
  FolderListing out;
  out.identity = open->identity;
  size_t looked_at = 0;
  for (Entry& entry : *entries) {
    const bool plain = looked_at == unknown.size() || unknown[looked_at] != &entry;
    if (!plain) ++looked_at;
    if (entry.type == DT_DIR) out.folders.push_back(std::move(entry.name));
    if (entry.type != DT_REG) continue;
    out.plain.push_back(plain);
    out.files.push_back(std::move(entry.name));
  }
  return out;
}

Result<std::vector<std::unique_ptr<ListedFolder>>> WalkFolders(const std::string& root,
                                                               FolderListing top,
                                                               const BuildOptions& options,
                                                               BuildWatch& watch) {
  return FolderWalk(root, options, watch).Walk(std::move(top));
}

bool HasExtension(std::string_view name, const std::vector<std::string>& extensions) {
  const auto lower = [](char c) { return c >= 'A' && c <= 'Z' ? static_cast<char>(c + 32) : c; };
  const auto ends_with = [&](const std::string& suffix) {
    return suffix.size() <= name.size() &&
           std::equal(suffix.rbegin(), suffix.rend(), name.rbegin(),
                      [&](char a, char b) { return lower(a) == lower(b); });
  };
  return extensions.empty() || std::any_of(extensions.begin(), extensions.end(), ends_with);
}

}  // namespace forebay
