// One mutex guards the index, the queues and the completions; files are touched without it. The
// index holds 4 bytes a sample, in pages of 1024 samples that mirror the folders. An entry is
// absent, a length, or busy: who made it busy alone may touch the file, so a put and a drop of one
// key never meet. Readers open files by name and believe only what the checksum confirms.
#include "tier/folder_tier.h"

#include <dirent.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <sys/eventfd.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <charconv>
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <cstring>
#include <deque>
#include <filesystem>
#include <map>
#include <optional>
#include <string_view>
#include <system_error>
#include <utility>

#include "base/crc32c.h"
#include "base/owned.h"
#include "base/thread_annotations.h"

namespace forebay {
namespace {

constexpr std::array<char, 8> kMagic = {'F', 'B', 'T', 'I', 'E', 'R', '1', '\n'};
constexpr uint32_t kSamplesAFolder = 1024;
// 64 Mi samples: the index of a folder never takes more than 256 MiB.
constexpr size_t kMostPages = 64 << 10;
constexpr uint64_t kBlock = 4096;
constexpr uint32_t kAbsent = ~uint32_t{0};
constexpr uint32_t kBusy = kAbsent - 1;
constexpr uint32_t kLongest = kBusy - 1;
constexpr const char* kWriting = "writing";

struct Header {
  std::array<char, 8> magic;
  uint64_t dataset;
  uint32_t sample;
  uint32_t length;
  uint32_t crc;         // of the sample's bytes
  uint32_t header_crc;  // of the fields above
};
static_assert(sizeof(Header) == 32);

Header MakeHeader(const TierKey& key, uint32_t length, uint32_t crc) {
  Header header{kMagic, key.dataset, key.sample, length, crc, 0};
  header.header_crc =
      Crc32c(std::as_bytes(std::span(&header, 1)).first(offsetof(Header, header_crc)));
  return header;
}

uint64_t Charge(uint64_t length) {
  return (length + sizeof(Header) + kBlock - 1) / kBlock * kBlock;
}

using Name = std::array<char, 64>;

Name CopyName(const TierKey& key) {
  Name name;
  std::snprintf(name.data(), name.size(), "%016llx/%08x/%08x.fb",
                static_cast<unsigned long long>(key.dataset), key.sample / kSamplesAFolder,
                key.sample);
  return name;
}

// Exactly `digits` lower-case hex digits.
template <typename T>
std::optional<T> ParseHex(std::string_view text, size_t digits) {
  if (text.size() != digits || text.find_first_of("ABCDEF+-") != text.npos) return std::nullopt;
  T value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + digits, value, 16);
  if (error != std::errc() || end != text.data() + digits) return std::nullopt;
  return value;
}

// The names in a folder; empty when it cannot be read.
class Listing {
 public:
  explicit Listing(int at, const char* name) {
    OwnedFd fd(openat(at, name, O_RDONLY | O_DIRECTORY | O_CLOEXEC | O_NOFOLLOW));
    if (fd.valid()) dir_ = fdopendir(fd.get());
    if (dir_ != nullptr) (void)fd.Release();
  }
  ~Listing() {
    if (dir_ != nullptr) closedir(dir_);
  }
  Listing(const Listing&) = delete;
  Listing& operator=(const Listing&) = delete;

  int fd() const { return dir_ == nullptr ? -1 : dirfd(dir_); }
  const char* Next() {
    const dirent* entry = dir_ == nullptr ? nullptr : readdir(dir_);
    return entry == nullptr ? nullptr : entry->d_name;
  }

 private:
  DIR* dir_ = nullptr;
};

// Other errors mean that the next write would fare no better.
bool MayPass(int error) {
  return error == EMFILE || error == ENFILE || error == ENOMEM || error == EFBIG;
}

int WriteAll(int fd, Header header, std::span<const std::byte> bytes) {
  std::array<iovec, 2> parts = {
      iovec{&header, sizeof header},
      iovec{const_cast<std::byte*>(bytes.data()), bytes.size()}};  // writev's iovec lacks a const
  size_t first = 0;
  while (first < parts.size()) {
    if (parts[first].iov_len == 0) {
      ++first;
      continue;
    }
    const ssize_t n = writev(fd, parts.data() + first, static_cast<int>(parts.size() - first));
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) return n < 0 ? errno : EIO;
    auto left = static_cast<size_t>(n);
    for (; first < parts.size(); ++first) {
      const size_t here = std::min(left, parts[first].iov_len);
      parts[first].iov_base = static_cast<std::byte*>(parts[first].iov_base) + here;
      parts[first].iov_len -= here;
      left -= here;
      if (parts[first].iov_len > 0) break;
    }
  }
  return 0;
}

enum class Read { kGood, kDamaged, kGone, kFailed };

// One request fetches header, bytes and, if the file is too long, one byte more.
Read ReadCopy(int folder, const TierOp& op, uint32_t* crc, int* error) {
  const Name name = CopyName(op.key);
  const OwnedFd fd(openat(folder, name.data(), O_RDONLY | O_CLOEXEC | O_NOFOLLOW));
  if (!fd.valid()) {
    *error = errno;
    return *error == ENOENT || *error == ENOTDIR ? Read::kGone : Read::kFailed;
  }
  Header header{};
  std::byte beyond{};
  const size_t whole = sizeof header + op.bytes.size();
  size_t have = 0;
  while (have < whole) {
    std::array<iovec, 3> parts = {iovec{&header, sizeof header},
                                  iovec{op.bytes.data(), op.bytes.size()}, iovec{&beyond, 1}};
    size_t skip = have;
    for (iovec& part : std::span(parts).first(2)) {
      const size_t here = std::min(skip, part.iov_len);
      part.iov_base = static_cast<std::byte*>(part.iov_base) + here;
      part.iov_len -= here;
      skip -= here;
    }
    const ssize_t n = preadv(fd.get(), parts.data(), 3, static_cast<off_t>(have));
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) {
      *error = errno;
      return Read::kFailed;
    }
    if (n == 0) return Read::kDamaged;
    have += static_cast<size_t>(n);
  }
  *crc = Crc32c(op.bytes);
  const Header expected = MakeHeader(op.key, static_cast<uint32_t>(op.bytes.size()), *crc);
  const bool good = have == whole && std::memcmp(&header, &expected, sizeof header) == 0;
  return good ? Read::kGood : Read::kDamaged;
}

}  // namespace

Status FolderTierOptions::Validate() const {
  if (folder.empty()) return Status(Code::kInvalidArgument, "the cache folder has no name");
  if (threads < 1 || threads > 256) {
    return Status(Code::kInvalidArgument, StrCat("threads is ", threads, "; it takes 1 to 256"));
  }
  return Status();
}

// What a tier waits for; guarded by the core's mutex.
struct FolderPort {
  explicit FolderPort(OwnedFd fd) : event_fd(std::move(fd)) {}
  const OwnedFd event_fd;
  std::deque<TierDone> done;
  size_t in_flight = 0;  // accepted and not reaped
  size_t running = 0;    // in a thread
};

class FolderStore::Core {
 public:
  Core(const FolderTierOptions& options, OwnedFd folder, OwnedFd lock, Status health)
      : options_(options),
        folder_(std::move(folder)),
        lock_(std::move(lock)),
        writer_(health.ok()),
        writing_(health.ok()),
        health_(std::move(health)),
        capacity_bytes_(options.capacity_bytes) {}

  pid_t creator() const { return creator_; }
  void Unlock() {
    if (writer_) flock(lock_.get(), LOCK_UN);
  }

  // ---- threads

  void Run() EXCLUDES(mutex_) {
    while (true) {
      Job job;
      {
        MutexLock lock(mutex_);
        while (!stopping_ && !CanTake()) work_.wait(lock.native());
        if (stopping_) break;
        std::deque<Job>& queue = gets_.empty() ? others_ : gets_;
        job = queue.front();
        queue.pop_front();
        busy_writers_ += job.op.kind == TierOp::Kind::kGet ? 0 : 1;
        ++job.port->running;
      }
      TierDone done = Execute(job.op);
      MutexLock lock(mutex_);
      if (!done.status.ok()) ++stats_.errors;
      if (job.op.kind != TierOp::Kind::kGet && busy_writers_-- == MostWriters()) work_.notify_one();
      job.port->done.push_back(std::move(done));
      // With the lock held: the eventfd is readable exactly while completions wait.
      if (job.port->done.size() == 1) {
        const uint64_t one = 1;
        (void)!write(job.port->event_fd.get(), &one, sizeof one);
      }
      if (--job.port->running == 0) idle_.notify_all();
    }
    Leave();
  }

  void RunScan() EXCLUDES(mutex_) {
    Scan();
    struct statvfs disk {};
    const bool known = fstatvfs(folder_.get(), &disk) == 0;
    {
      MutexLock lock(mutex_);
      scanned_ = true;
      if (capacity_bytes_ == 0) {
        const uint64_t room = known ? uint64_t{disk.f_bavail} * disk.f_frsize : 0;
        capacity_bytes_ = (used_ + room) / 5 * 4;
      }
      if (!health_.ok()) capacity_bytes_ = used_;
    }
    Leave();
  }

  void Started() {
    MutexLock lock(mutex_);
    ++alive_;
  }
  void Leave() EXCLUDES(mutex_) {
    MutexLock lock(mutex_);
    --alive_;
    idle_.notify_all();
  }
  // True: all threads are about to end.
  bool Stop(Nanos at_most) {
    MutexLock lock(mutex_);
    stopping_ = true;
    work_.notify_all();
    return idle_.wait_for(lock.native(), std::chrono::nanoseconds(at_most),
                          [this]() NO_THREAD_SAFETY_ANALYSIS { return alive_ == 0; });
  }
  bool WaitScanned(Nanos at_most) {
    MutexLock lock(mutex_);
    return idle_.wait_for(lock.native(), std::chrono::nanoseconds(at_most),
                          [this]() NO_THREAD_SAFETY_ANALYSIS { return scanned_; });
  }

  // ---- tiers

  size_t Submit(FolderPort& port, std::span<const TierOp> ops, size_t most) EXCLUDES(mutex_) {
    MutexLock lock(mutex_);
    const size_t taken = std::min(ops.size(), most - port.in_flight);
    for (const TierOp& op : ops.first(taken)) {
      (op.kind == TierOp::Kind::kGet ? gets_ : others_).push_back({op, &port});
      datasets_[op.key.dataset].used = true;
      work_.notify_one();
    }
    port.in_flight += taken;
    return taken;
  }

  size_t Reap(FolderPort& port, std::span<TierDone> out) EXCLUDES(mutex_) {
    MutexLock lock(mutex_);
    const size_t taken = std::min(out.size(), port.done.size());
    for (size_t i = 0; i < taken; ++i) {
      out[i] = std::move(port.done.front());
      port.done.pop_front();
    }
    port.in_flight -= taken;
    if (taken > 0 && port.done.empty()) {
      uint64_t count;
      (void)!read(port.event_fd.get(), &count, sizeof count);
    }
    return taken;
  }

  void Close(FolderPort& port) EXCLUDES(mutex_) {
    MutexLock lock(mutex_);
    const auto ours = [&port](const Job& job) { return job.port == &port; };
    std::erase_if(gets_, ours);
    std::erase_if(others_, ours);
    while (port.running > 0) idle_.wait(lock.native());
  }

  void Use(uint64_t dataset) EXCLUDES(mutex_) {
    {
      MutexLock lock(mutex_);
      datasets_[dataset].used = true;
    }
    // The folder's time says when a data set was last used.
    Name name = CopyName({dataset, 0});
    name[16] = '\0';
    if (writer_) (void)utimensat(folder_.get(), name.data(), nullptr, AT_SYMLINK_NOFOLLOW);
  }
  bool Has(const TierKey& key) const EXCLUDES(mutex_) {
    MutexLock lock(mutex_);
    const uint32_t* entry = Find(key);
    return entry != nullptr && *entry <= kLongest;
  }
  bool HasRoom(uint64_t bytes) const EXCLUDES(mutex_) {
    MutexLock lock(mutex_);
    if (!writing_ || !scanned_ || bytes > kLongest || Charge(bytes) > capacity_bytes_) return false;
    if (used_ + Charge(bytes) <= capacity_bytes_) return true;
    return std::any_of(datasets_.begin(), datasets_.end(),
                       [](const auto& d) { return !d.second.used && !d.second.pages.empty(); });
  }
  uint64_t used_bytes() const EXCLUDES(mutex_) {
    MutexLock lock(mutex_);
    return used_;
  }
  uint64_t capacity_bytes() const EXCLUDES(mutex_) {
    MutexLock lock(mutex_);
    return capacity_bytes_;
  }
  TierStats stats() const EXCLUDES(mutex_) {
    MutexLock lock(mutex_);
    return stats_;
  }
  Status health() const EXCLUDES(mutex_) {
    MutexLock lock(mutex_);
    return health_;
  }
  const std::string& folder() const { return options_.folder; }

 private:
  struct Job {
    TierOp op;
    FolderPort* port = nullptr;
  };
  using Page = std::array<uint32_t, kSamplesAFolder>;
  struct Dataset {
    bool used = false;
    int64_t last_used_s = 0;
    std::map<uint32_t, std::unique_ptr<Page>> pages;
  };

  size_t MostWriters() const { return std::max<size_t>(1, options_.threads / 2); }
  bool CanTake() const REQUIRES(mutex_) {
    return !gets_.empty() || (!others_.empty() && busy_writers_ < MostWriters());
  }

  // Null: nothing of its page is held.
  uint32_t* Find(const TierKey& key) const REQUIRES(mutex_) {
    const auto dataset = datasets_.find(key.dataset);
    if (dataset == datasets_.end()) return nullptr;
    const auto page = dataset->second.pages.find(key.sample / kSamplesAFolder);
    if (page == dataset->second.pages.end()) return nullptr;
    return &(*page->second)[key.sample % kSamplesAFolder];
  }
  // Null when the index has no room.
  uint32_t* Make(const TierKey& key) REQUIRES(mutex_) {
    if (uint32_t* entry = Find(key); entry != nullptr) return entry;
    if (pages_ == kMostPages) return nullptr;
    ++pages_;
    auto page = std::make_unique<Page>();
    page->fill(kAbsent);
    uint32_t* entry = &(*page)[key.sample % kSamplesAFolder];
    datasets_[key.dataset].pages.emplace(key.sample / kSamplesAFolder, std::move(page));
    return entry;
  }

  TierDone Execute(const TierOp& op) EXCLUDES(mutex_) {
    switch (op.kind) {
      case TierOp::Kind::kGet:
        return Get(op);
      case TierOp::Kind::kPut:
        return Put(op);
      case TierOp::Kind::kDrop:
        Drop(op.key);
        break;
    }
    return {.tag = op.tag};
  }

  TierDone Get(const TierOp& op) EXCLUDES(mutex_) {
    TierDone done{.tag = op.tag};
    uint32_t length = kAbsent;
    {
      MutexLock lock(mutex_);
      if (const uint32_t* entry = Find(op.key); entry != nullptr) length = *entry;
      if (length > kLongest) {
        ++stats_.misses;
        return done;
      }
    }
    int error = 0;
    const Read read =
        length == op.bytes.size() ? ReadCopy(folder_.get(), op, &done.crc, &error) : Read::kDamaged;
    if (read == Read::kFailed) {
      done.status = ErrnoStatus(error, StrCat("read ", folder(), "/", CopyName(op.key).data()));
    }
    // A copy that cannot be read is no better than a damaged one; a lack of descriptors passes.
    if (read != Read::kGood && !(read == Read::kFailed && MayPass(error))) Drop(op.key);
    MutexLock lock(mutex_);
    done.hit = read == Read::kGood;
    ++(done.hit ? stats_.hits : stats_.misses);
    stats_.damaged += read == Read::kDamaged ? 1 : 0;
    return done;
  }

  void Drop(const TierKey& key) EXCLUDES(mutex_) {
    uint32_t length = 0;
    {
      MutexLock lock(mutex_);
      uint32_t* entry = Find(key);
      if (entry == nullptr || *entry > kLongest) return;
      length = std::exchange(*entry, kBusy);
    }
    if (writer_) (void)unlinkat(folder_.get(), CopyName(key).data(), 0);
    MutexLock lock(mutex_);
    *Find(key) = kAbsent;
    used_ -= Charge(length);
    if (!health_.ok()) capacity_bytes_ = used_;
  }

  TierDone Put(const TierOp& op) EXCLUDES(mutex_) {
    TierDone done{.tag = op.tag};
    const uint64_t charge = Charge(op.bytes.size());
    {
      MutexLock lock(mutex_);
      if (const uint32_t* entry = Find(op.key); entry != nullptr && *entry != kAbsent) {
        done.stored = *entry <= kLongest;
        return done;
      }
      if (!writing_ || !scanned_ || op.bytes.size() > kLongest) return done;
    }
    if (!MakeRoom(charge)) return done;
    {
      MutexLock lock(mutex_);
      uint32_t* entry = Make(op.key);
      if (entry == nullptr || *entry != kAbsent || used_ + charge > capacity_bytes_) {
        stats_.full += entry == nullptr || *entry == kAbsent ? 1 : 0;
        return done;
      }
      *entry = kBusy;
      used_ += charge;
    }
    const int error = WriteCopy(op);
    MutexLock lock(mutex_);
    *Find(op.key) = error == 0 ? static_cast<uint32_t>(op.bytes.size()) : kAbsent;
    if (error == 0) {
      done.stored = true;
      ++stats_.writes;
      return done;
    }
    used_ -= charge;
    if (MayPass(error)) {
      done.status = ErrnoStatus(error, StrCat("write ", folder(), "/", CopyName(op.key).data()));
    } else if (writing_) {
      writing_ = false;
      health_ = ErrnoStatus(error, StrCat("the cache folder ", folder(),
                                          " takes no more copies, it serves what it has"));
      done.status = health_;
    }
    if (!health_.ok()) capacity_bytes_ = used_;
    return done;
  }

  // Drops folders of data sets that nobody here uses, until `charge` bytes fit. False: they do not.
  bool MakeRoom(uint64_t charge) EXCLUDES(mutex_) {
    while (true) {
      uint64_t dataset = 0;
      uint32_t number = 0;
      std::unique_ptr<Page> page;
      {
        MutexLock lock(mutex_);
        if (used_ + charge <= capacity_bytes_) return true;
        auto oldest = datasets_.end();
        for (auto it = datasets_.begin(); it != datasets_.end(); ++it) {
          if (it->second.used || it->second.pages.empty()) continue;
          if (oldest == datasets_.end() || it->second.last_used_s < oldest->second.last_used_s) {
            oldest = it;
          }
        }
        if (oldest == datasets_.end() || charge > capacity_bytes_) {
          ++stats_.full;
          return false;
        }
        dataset = oldest->first;
        auto node = oldest->second.pages.extract(oldest->second.pages.begin());
        number = node.key();
        page = std::move(node.mapped());
        --pages_;
      }
      uint64_t freed = 0;
      TierKey key{dataset, number * kSamplesAFolder};
      for (const uint32_t length : *page) {
        if (length <= kLongest) {
          (void)unlinkat(folder_.get(), CopyName(key).data(), 0);
          freed += Charge(length);
        }
        ++key.sample;
      }
      Name name = CopyName({dataset, number * kSamplesAFolder});
      name[16 + 1 + 8] = '\0';
      (void)unlinkat(folder_.get(), name.data(), AT_REMOVEDIR);
      name[16] = '\0';
      (void)unlinkat(folder_.get(), name.data(), AT_REMOVEDIR);  // when that was its last
      MutexLock lock(mutex_);
      used_ -= freed;
    }
  }

  // 0 or an errno value.
  int WriteCopy(const TierOp& op) {
    Name temporary;
    std::snprintf(temporary.data(), temporary.size(), "%s/%d-%llu.tmp", kWriting,
                  static_cast<int>(getpid()),
                  static_cast<unsigned long long>(next_.fetch_add(1, std::memory_order_relaxed)));
    const Name name = CopyName(op.key);
    constexpr int kFlags = O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC | O_NOFOLLOW;
    int fd = openat(folder_.get(), temporary.data(), kFlags, 0644);
    if (fd < 0 && errno == ENOENT) {
      // Another thread may be making it too.
      if (mkdirat(folder_.get(), kWriting, 0755) != 0 && errno != EEXIST) return errno;
      fd = openat(folder_.get(), temporary.data(), kFlags, 0644);
    }
    if (fd < 0) return errno;
    int error =
        WriteAll(fd, MakeHeader(op.key, static_cast<uint32_t>(op.bytes.size()), op.crc), op.bytes);
    // Some file systems tell only now that there was no room.
    if (close(fd) != 0 && error == 0) error = errno;
    if (error == 0) error = Publish(temporary.data(), name);
    if (error != 0) (void)unlinkat(folder_.get(), temporary.data(), 0);
    return error;
  }

  int Publish(const char* temporary, const Name& name) {
    if (renameat(folder_.get(), temporary, folder_.get(), name.data()) == 0) return 0;
    if (errno != ENOENT) return errno;
    Name folder = name;
    folder[16] = '\0';
    if (mkdirat(folder_.get(), folder.data(), 0755) != 0 && errno != EEXIST) return errno;
    folder[16] = '/';
    folder[16 + 1 + 8] = '\0';
    if (mkdirat(folder_.get(), folder.data(), 0755) != 0 && errno != EEXIST) return errno;
    return renameat(folder_.get(), temporary, folder_.get(), name.data()) == 0 ? 0 : errno;
  }

  bool stopping() const EXCLUDES(mutex_) {
    MutexLock lock(mutex_);
    return stopping_;
  }

  void Scan() EXCLUDES(mutex_) {
    Listing datasets(folder_.get(), ".");
    while (const char* name = datasets.Next()) {
      const std::optional<uint64_t> dataset = ParseHex<uint64_t>(name, 16);
      if (!dataset) continue;
      Listing pages(datasets.fd(), name);
      struct stat st {};
      if (pages.fd() < 0 || fstat(pages.fd(), &st) != 0) continue;
      while (const char* page_name = pages.Next()) {
        const std::optional<uint32_t> page = ParseHex<uint32_t>(page_name, 8);
        if (!page || *page > ~uint32_t{0} / kSamplesAFolder) continue;
        if (stopping()) return;
        ScanPage(*dataset, st.st_mtim.tv_sec, *page, pages.fd(), page_name);
      }
    }
  }

  void ScanPage(uint64_t dataset, int64_t last_used_s, uint32_t page, int at, const char* name)
      EXCLUDES(mutex_) {
    std::vector<std::pair<uint32_t, uint32_t>> found;
    Listing files(at, name);
    while (const char* file = files.Next()) {
      const std::string_view text = file;
      if (!text.ends_with(".fb")) continue;
      const std::optional<uint32_t> sample = ParseHex<uint32_t>(text.substr(0, text.size() - 3), 8);
      struct stat st {};
      if (!sample || *sample / kSamplesAFolder != page ||
          fstatat(files.fd(), file, &st, AT_SYMLINK_NOFOLLOW) != 0 || !S_ISREG(st.st_mode)) {
        continue;
      }
      const auto bytes = static_cast<uint64_t>(st.st_size);
      if (bytes < sizeof(Header) || bytes - sizeof(Header) > kLongest) {
        if (writer_) (void)unlinkat(files.fd(), file, 0);
        continue;
      }
      found.emplace_back(*sample, static_cast<uint32_t>(bytes - sizeof(Header)));
    }
    if (found.empty()) return;
    MutexLock lock(mutex_);
    datasets_[dataset].last_used_s = last_used_s;
    for (const auto& [sample, length] : found) {
      uint32_t* entry = Make({dataset, sample});
      if (entry == nullptr) return;
      *entry = length;
      used_ += Charge(length);
    }
  }

  const FolderTierOptions options_;
  const OwnedFd folder_;
  const OwnedFd lock_;
  const bool writer_;  // holds the flock
  const pid_t creator_ = getpid();
  std::atomic<uint64_t> next_{0};  // only has to be unique

  mutable Mutex mutex_;
  std::condition_variable work_;
  std::condition_variable idle_;  // scan done, a thread left, or a port has nothing running
  std::map<uint64_t, Dataset> datasets_ GUARDED_BY(mutex_);
  size_t pages_ GUARDED_BY(mutex_) = 0;
  std::deque<Job> gets_ GUARDED_BY(mutex_);    // bounded by the ports
  std::deque<Job> others_ GUARDED_BY(mutex_);  // bounded by the ports
  size_t busy_writers_ GUARDED_BY(mutex_) = 0;
  size_t alive_ GUARDED_BY(mutex_) = 0;
  bool scanned_ GUARDED_BY(mutex_) = false;
  bool stopping_ GUARDED_BY(mutex_) = false;
  bool writing_ GUARDED_BY(mutex_);
  Status health_ GUARDED_BY(mutex_);
  uint64_t used_ GUARDED_BY(mutex_) = 0;
  uint64_t capacity_bytes_ GUARDED_BY(mutex_);  // 0 until the scan is done, when it is to be chosen
  TierStats stats_ GUARDED_BY(mutex_);
};

class FolderTier final : public Tier {
 public:
  FolderTier(std::shared_ptr<FolderStore> store, size_t max_in_flight, OwnedFd event_fd)
      : max_in_flight_(max_in_flight), port_(std::move(event_fd)), store_(std::move(store)) {}
  ~FolderTier() override {
    if (getpid() == creator_) store_->core_->Close(port_);
  }

  size_t Submit(std::span<const TierOp> ops) override {
    return store_->core_->Submit(port_, ops, max_in_flight_);
  }
  size_t Reap(std::span<TierDone> out) override { return store_->core_->Reap(port_, out); }
  int event_fd() const override { return port_.event_fd.get(); }
  size_t capacity() const override { return max_in_flight_; }
  bool Has(const TierKey& key) const override { return store_->Has(key); }
  bool HasRoom(uint64_t bytes) const override { return store_->core_->HasRoom(bytes); }
  uint64_t capacity_bytes() const override { return store_->capacity_bytes(); }
  uint64_t used_bytes() const override { return store_->used_bytes(); }
  TierStats stats() const override { return store_->stats(); }
  Status health() const override { return store_->health(); }
  std::string Describe() const override { return StrCat("folder ", store_->core_->folder()); }

 private:
  const size_t max_in_flight_;
  const pid_t creator_ = getpid();
  FolderPort port_;
  std::shared_ptr<FolderStore> store_;
};

FolderStore::FolderStore(std::shared_ptr<Core> core) : core_(std::move(core)) {}

Result<std::shared_ptr<FolderStore>> FolderStore::Open(const FolderTierOptions& options) {
  FOREBAY_RETURN_IF_ERROR(options.Validate());
  std::error_code made;
  std::filesystem::create_directories(options.folder, made);
  OwnedFd folder(open(options.folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (!folder.valid()) {
    const int error = errno == ENOENT && made ? made.value() : errno;
    return ErrnoStatus(error, StrCat("open the cache folder ", options.folder));
  }
  Status health;
  const std::string reads = StrCat("the cache folder ", options.folder, " is only read");
  OwnedFd lock(openat(folder.get(), "forebay.lock", O_RDWR | O_CREAT | O_CLOEXEC, 0644));
  if (!lock.valid()) {
    health = ErrnoStatus(errno, reads);
  } else if (flock(lock.get(), LOCK_EX | LOCK_NB) != 0) {
    health = errno == EWOULDBLOCK
                 ? Status(Code::kUnavailable, StrCat(reads, ": another process writes to it"))
                 : ErrnoStatus(errno, reads);
  } else {
    // Whoever wrote these is dead: it would hold the lock.
    Listing left(folder.get(), kWriting);
    while (const char* name = left.Next()) {
      if (std::string_view(name).ends_with(".tmp")) (void)unlinkat(left.fd(), name, 0);
    }
  }
  auto core = std::make_shared<Core>(options, std::move(folder), std::move(lock), health);
  std::shared_ptr<FolderStore> store(new FolderStore(core));
  // Signals belong to the program that embeds us; SIGXFSZ must become an error of the write.
  sigset_t all;
  sigset_t before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  Status started;
  try {
    for (size_t i = 0; i <= options.threads; ++i) {
      core->Started();
      store->threads_.emplace_back([core, i] { i == 0 ? core->RunScan() : core->Run(); });
      pthread_setname_np(store->threads_.back().native_handle(), "forebay-tier");
    }
  } catch (const std::system_error& error) {
    core->Leave();
    started = ErrnoStatus(error.code().value(), "start a thread of the cache folder");
  }
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  if (!started.ok()) return started;
  return store;
}

FolderStore::~FolderStore() {
  // Tiers hold the store, so nothing is queued. In a forked child the threads are the parent's.
  if (core_->creator() != getpid()) {
    (void)new std::vector<std::thread>(std::move(threads_));
    (void)new std::shared_ptr<Core>(core_);
    return;
  }
  const bool stopped = core_->Stop(2 * kSecond);
  for (std::thread& thread : threads_) stopped ? thread.join() : thread.detach();
  core_->Unlock();
}

Result<std::unique_ptr<Tier>> FolderStore::MakeTier(std::shared_ptr<FolderStore> store,
                                                    size_t max_in_flight) {
  if (max_in_flight == 0) {
    return Status(Code::kInvalidArgument, "max_in_flight is 0; it must be at least 1");
  }
  OwnedFd event_fd(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (!event_fd.valid()) return ErrnoStatus(errno, "eventfd");
  return std::unique_ptr<Tier>(
      std::make_unique<FolderTier>(std::move(store), max_in_flight, std::move(event_fd)));
}

void FolderStore::Use(uint64_t dataset) { core_->Use(dataset); }
bool FolderStore::WaitScanned(Nanos at_most) const { return core_->WaitScanned(at_most); }
bool FolderStore::Has(const TierKey& key) const { return core_->Has(key); }
uint64_t FolderStore::used_bytes() const { return core_->used_bytes(); }
uint64_t FolderStore::capacity_bytes() const { return core_->capacity_bytes(); }
TierStats FolderStore::stats() const { return core_->stats(); }
Status FolderStore::health() const { return core_->health(); }

}  // namespace forebay
