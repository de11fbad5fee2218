#include "files/copier.h"

#include <dirent.h>
#include <fcntl.h>
#include <sys/sysmacros.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <climits>
#include <cstdio>
#include <cstring>
#include <ctime>
#include <span>
#include <string_view>
#include <thread>
#include <utility>

#include "base/clock.h"
#include "base/crc32c.h"
#include "base/thread.h"
#include "catalog/paths.h"
#include "files/identity.h"

namespace forebay::files {
namespace {

using Outcome = CopyResult::Outcome;

constexpr const char* kWritten = ".tmp";
constexpr const char* kPart = ".part";
constexpr size_t kMostNames = 100'000;  // of a folder that is listed
constexpr size_t kShortPath = 1500;     // whose attribute every file system takes

bool SameTime(const timespec& a, const timespec& b) {
  return a.tv_sec == b.tv_sec && a.tv_nsec == b.tv_nsec;
}

bool SameFile(const struct stat& a, const struct stat& b) {
  return a.st_ino == b.st_ino && a.st_size == b.st_size && a.st_mode == b.st_mode &&
         SameTime(a.st_mtim, b.st_mtim) && SameTime(a.st_ctim, b.st_ctim);
}

struct FdPath {
  explicit FdPath(int fd) { std::snprintf(text, sizeof text, "/proc/self/fd/%d", fd); }
  char text[32];
};

// Where an open file lies, without links in it. Asks the kernel only.
std::string PathOf(int fd) {
  std::array<char, PATH_MAX> out;
  const ssize_t n = readlink(FdPath(fd).text, out.data(), out.size());
  if (n <= 0 || static_cast<size_t>(n) >= out.size() || out[0] != '/') return {};
  return std::string(out.data(), static_cast<size_t>(n));
}

void SetOutcome(CopyResult& result, Outcome outcome, int error = 0) {
  result.outcome = outcome;
  result.error = error;
}

// Of a call that the source answered.
void SourceFailed(CopyResult& result, int error) {
  const bool missing = error == ENOENT || error == ENOTDIR;
  SetOutcome(result, missing ? Outcome::kMissing : Outcome::kError, error);
}

// Of a call on the cache's disk.
void CacheFailed(CopyResult& result, int error) {
  const bool full = error == ENOSPC || error == EDQUOT || error == EFBIG;
  SetOutcome(result, full ? Outcome::kNoSpace : Outcome::kCacheBad, error);
}

// Of a read by the engine.
void SupplyFailed(CopyResult& result, const Status& status) {
  switch (status.code()) {
    case Code::kNotFound:
      return SetOutcome(result, Outcome::kMissing, ENOENT);
    case Code::kChanged:
      return SetOutcome(result, Outcome::kDiscarded);
    case Code::kCancelled:
      return SetOutcome(result, Outcome::kDropped);
    default:
      return SetOutcome(result, Outcome::kError, EIO);
  }
}

int WriteAll(int fd, const std::byte* from, uint64_t bytes, uint64_t offset) {
  while (bytes > 0) {
    const ssize_t n = pwrite(fd, from, bytes, static_cast<off_t>(offset));
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) return errno;
    if (n == 0) return ENOSPC;
    from += n;
    offset += static_cast<uint64_t>(n);
    bytes -= static_cast<uint64_t>(n);
  }
  return 0;
}

Identity IdentityOf(const SourceFile& source, std::string_view path, uint32_t crc) {
  Identity out;
  out.stat = source.stat;
  out.birth_seconds = source.birth_seconds;
  out.birth_nanoseconds = source.birth_nanoseconds;
  out.crc = crc;
  out.path_length = static_cast<uint32_t>(std::min(path.size(), sizeof out.path - 1));
  std::memcpy(out.path, path.data(), out.path_length);
  return out;
}

// ext4 says for some microseconds that a file has no blocks, while it gives it its first ones
// (9,514 of 13 million looks beside fdatasync). A copy would say so for good, and tar would take
// the file for one hole.
constexpr int kMostLooksForBlocks = 3;
constexpr auto kUntilBlocksAreCounted = std::chrono::microseconds(50);

// Attributes of an open file; without `sync` as they are known here: an open or a look-up has just
// brought them, and a storage that is far away is not asked again.
bool LookAt(int fd, bool sync, SourceFile* out) {
  struct statx st = {};
  const int flags = AT_EMPTY_PATH | (sync ? AT_STATX_FORCE_SYNC : AT_STATX_DONT_SYNC);
  for (int looks = 0; looks < kMostLooksForBlocks; ++looks) {
    if (looks > 0) std::this_thread::sleep_for(kUntilBlocksAreCounted);
    if (statx(fd, "", flags, STATX_BASIC_STATS | STATX_BTIME, &st) != 0) return false;
    if (st.stx_blocks > 0 || st.stx_size == 0) break;
  }
  const auto time = [](const struct statx_timestamp& from) {
    return timespec{.tv_sec = from.tv_sec, .tv_nsec = from.tv_nsec};
  };
  struct stat& to = out->stat;
  to.st_dev = makedev(st.stx_dev_major, st.stx_dev_minor);
  to.st_ino = st.stx_ino;
  to.st_mode = st.stx_mode;
  to.st_nlink = st.stx_nlink;
  to.st_uid = st.stx_uid;
  to.st_gid = st.stx_gid;
  to.st_rdev = makedev(st.stx_rdev_major, st.stx_rdev_minor);
  to.st_size = static_cast<off_t>(st.stx_size);
  to.st_blksize = st.stx_blksize;
  to.st_blocks = static_cast<blkcnt_t>(st.stx_blocks);
  to.st_atim = time(st.stx_atime);
  to.st_mtim = time(st.stx_mtime);
  to.st_ctim = time(st.stx_ctime);
  if ((st.stx_mask & STATX_BTIME) != 0) {
    out->birth_seconds = st.stx_btime.tv_sec;
    out->birth_nanoseconds = st.stx_btime.tv_nsec;
  }
  return true;
}

bool Unchanged(const SourceFile& source, bool sync) {
  SourceFile now;
  return LookAt(source.fd.get(), sync, &now) && SameFile(now.stat, source.stat);
}

// Whether a file may have changed a moment ago. A wrong "yes" is set right by a second look, and a
// wrong "no" needs a second change within one tick of the source's clock.
bool SeemsYoung(const struct stat& st, Nanos young) {
  const bool coarse = st.st_mtim.tv_nsec == 0 && st.st_ctim.tv_nsec == 0;
  return forebay::SeemsYoung(MtimeNs(st), coarse, young) ||
         forebay::SeemsYoung(CtimeNs(st), coarse, young);
}

}  // namespace

Copier::Copier(const CopierOptions& options, Room& room)
    : options_(options), room_(room), most_(options.threads), most_of_job_(options.threads) {}

Copier::~Copier() {
  (void)Stop(0);
  std::vector<std::jthread> threads;
  const MutexLock lock(mutex_);
  threads.swap(threads_);
}

bool Copier::Stop(Nanos wait) {
  stop_.request_stop();
  MutexLock lock(mutex_);
  urgent_.clear();
  rest_.clear();
  changed_.notify_all();
  return changed_.wait_for(lock.native(), std::chrono::nanoseconds(wait),
                           [&]() NO_THREAD_SAFETY_ANALYSIS { return busy_ == 0; });
}

std::string Copier::NameIn(const FileKey& key, const char* suffix) {
  char name[kNameLength + 1];
  NameOf(key, name);
  return StrCat(name, suffix);
}

void Copier::Submit(CopyJob job) {
  const MutexLock lock(mutex_);
  (job.urgent ? urgent_ : rest_).push_back(std::move(job));
  if (idle_ < urgent_.size() + rest_.size() && threads_.size() < most_) {
    // Where none can be had now, the next job tries again.
    auto started = StartThread("forebay-copy", [this, stop = stop_.get_token()] { Work(stop); });
    if (started) threads_.push_back(*std::move(started));
  }
  changed_.notify_one();
}

void Copier::SetThreads(size_t threads, size_t jobs) {
  const MutexLock lock(mutex_);
  most_ = threads;
  most_of_job_ = std::max<size_t>(1, threads / std::max<size_t>(1, jobs));
  changed_.notify_all();
}

// The first of those whose job has threads left.
bool Copier::Next(std::deque<CopyJob>** queue, size_t* place) {
  if (busy_ >= most_) return false;
  for (std::deque<CopyJob>* from : {&urgent_, &rest_}) {
    for (size_t i = 0; i < from->size(); ++i) {
      if (busy_of_[(*from)[i].job] >= most_of_job_) continue;
      *queue = from;
      *place = i;
      return true;
    }
  }
  return false;
}

void Copier::Work(const std::stop_token& stop) {
  while (true) {
    CopyResult result;
    {
      MutexLock lock(mutex_);
      ++idle_;
      std::deque<CopyJob>* from = nullptr;
      size_t place = 0;
      changed_.wait(lock.native(), stop,
                    [&]() NO_THREAD_SAFETY_ANALYSIS { return Next(&from, &place); });
      --idle_;
      if (stop.stop_requested()) return;
      result.job = std::move((*from)[place]);
      from->erase(from->begin() + static_cast<ptrdiff_t>(place));
      ++busy_;
      ++busy_of_[result.job.job];
    }
    const JobNumber job = result.job.job;
    Do(result);
    options_.done(std::move(result));
    const MutexLock lock(mutex_);
    --busy_;
    if (--busy_of_[job] == 0) busy_of_.erase(job);
    if (busy_ == 0 && stop.stop_requested()) changed_.notify_all();
  }
}

void Copier::Do(CopyResult& result) {
  switch (result.job.kind) {
    case CopyJob::Kind::kCopy:
      Copy(result);
      break;
    case CopyJob::Kind::kBlock:
      Block(result);
      break;
    case CopyJob::Kind::kFinish:
      Finish(result);
      break;
    case CopyJob::Kind::kLook:
      Examine(result);
      break;
    case CopyJob::Kind::kResolve:
      Resolve(result);
      break;
    case CopyJob::Kind::kList:
      List(result);
      break;
  }
}

bool Copier::Open(CopyResult& result) {
  CopyJob& job = result.job;
  // Not opened for reading before it is known what it is: a named pipe would notice.
  const OwnedFd found(open(job.path.c_str(), O_PATH | O_CLOEXEC));
  if (!found.valid()) {
    SourceFailed(result, errno);
    return false;
  }
  auto source = std::make_shared<SourceFile>();
  // Twice the same is said of the file only if the storage has been asked.
  if (!LookAt(found.get(), job.young != nullptr, source.get())) {
    SourceFailed(result, errno);
    return false;
  }
  const struct stat& st = source->stat;
  if (!S_ISREG(st.st_mode)) {
    SetOutcome(result, Outcome::kRefused);
    return false;
  }
  result.real = PathOf(found.get());
  if (result.real != job.path) {
    SetOutcome(result, result.real.empty() ? Outcome::kRefused : Outcome::kAlias);
    return false;
  }
  if (st.st_nlink > 1) {
    SetOutcome(result, Outcome::kRefused);
    return false;
  }
  if (options_.young > 0 && IsTooYoung(job, st)) {
    SetOutcome(result, Outcome::kYoung);
    return false;
  }
  if (!options_.supply->opens_files() && st.st_size > 0) {
    source->fd = OwnedFd(fcntl(found.get(), F_DUPFD_CLOEXEC, 0));
    if (!source->fd.valid()) {
      SourceFailed(result, errno);
      return false;
    }
  } else {
    // The same file, without another look-up.
    source->fd = OwnedFd(open(FdPath(found.get()).text, O_RDONLY | O_CLOEXEC | O_NONBLOCK));
    if (!OpenForReading(result, *source)) return false;
  }
  source->opened = SteadyClock().Now();
  job.source = std::move(source);
  return true;
}

bool Copier::IsTooYoung(CopyJob& job, const struct stat& st) const {
  if (!SeemsYoung(st, options_.young)) return false;
  const Nanos now = SteadyClock().Now();
  if (job.young == nullptr || !SameFile(job.young->stat, st)) {
    job.young = std::make_shared<YoungFile>(YoungFile{.stat = st, .seen = now});
    return true;
  }
  return now - job.young->seen < options_.young;
}

bool Copier::OpenForReading(CopyResult& result, SourceFile& source) {
  if (!source.fd.valid()) {
    SourceFailed(result, errno);
    return false;
  }
  options_.opens->Add(1);
  if (!LookAt(source.fd.get(), false, &source)) {  // an open brings newer ones
    SourceFailed(result, errno);
    return false;
  }
  // Some file systems say 0 of files that they make up when they are read.
  char first = 0;
  if (source.stat.st_size == 0 && pread(source.fd.get(), &first, 1, 0) != 0) {
    SetOutcome(result, Outcome::kRefused);
    return false;
  }
  return true;
}

// A file that does not fit is copied in part, unless that is next to nothing, or it may be staged.
bool Copier::MayGrow(CopyResult& result) const {
  CopyJob& job = result.job;
  const auto size = static_cast<uint64_t>(job.source->stat.st_size);
  if (job.may_stage || size <= options_.partial || room_.left() < size / 16) return false;
  job.grows = true;
  job.place = CopyPlace::kKept;
  job.reserved = 0;
  return true;
}

void Copier::Copy(CopyResult& result) {
  CopyJob& job = result.job;
  if (job.source == nullptr && !Open(result)) return;
  const auto size = static_cast<uint64_t>(job.source->stat.st_size);
  if (size > 0 && TakeStored(result)) return;
  if (job.place == CopyPlace::kNone) {
    job.reserved = OnDisk(size);
    job.place = room_.Reserve(job.reserved, job.may_stage, job.urgent);
    if (job.place == CopyPlace::kNone && !MayGrow(result)) {
      return SetOutcome(result, Outcome::kNoRoom);
    }
  }
  if (size > options_.parallel) return PrepareLarge(result);
  FileLoan loan;
  if (!Read(result, {.offset = 0, .bytes = size, .block = 0}, &loan)) return;
  const DiskTurns::Turn turn(disk_, job.urgent, job.owner, stop_.get_token());
  if (!turn.given()) return SetOutcome(result, Outcome::kDropped);
  const OwnedFd copy = MakeCopy(result, kWritten);
  if (!copy.valid()) return;
  if (const int error = WriteAll(copy.get(), loan.bytes().data(), size, 0); error != 0) {
    CacheFailed(result, error);
    unlinkat(options_.copies, NameIn(job.key, kWritten).c_str(), 0);
    return;
  }
  Publish(result, copy.get(), kWritten, Crc32c(loan.bytes()));
}

void Copier::PrepareLarge(CopyResult& result) {
  CopyJob& job = result.job;
  OwnedFd copy = MakeCopy(result, kPart);
  if (!copy.valid()) return;
  if (ftruncate(copy.get(), job.source->stat.st_size) != 0) {
    CacheFailed(result, errno);
    unlinkat(options_.copies, NameIn(job.key, kPart).c_str(), 0);
    return;
  }
  // Whose part it is, for those who read it meanwhile; the last word is Publish()'s.
  (void)WriteIdentity(copy.get(), IdentityOf(*job.source, job.path, 0));
  // Blocks are read by several threads: what the kernel reads ahead for one of them would be read
  // twice.
  (void)posix_fadvise(job.source->fd.get(), 0, 0, POSIX_FADV_RANDOM);
  job.part = std::make_shared<OwnedFd>(std::move(copy));
  SetOutcome(result, Outcome::kLarge);
}

// Never one that is there: it may be another name of a stored copy.
OwnedFd Copier::MakeCopy(CopyResult& result, const char* suffix) const {
  const std::string name = NameIn(result.job.key, suffix);
  const auto make = [&] {
    return OwnedFd(openat(options_.copies, name.c_str(),
                          O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC | O_NOFOLLOW, 0600));
  };
  OwnedFd copy = make();
  if (!copy.valid() && errno == EEXIST) {
    unlinkat(options_.copies, name.c_str(), 0);
    copy = make();
  }
  if (!copy.valid()) CacheFailed(result, errno);
  return copy;
}

bool Copier::Read(CopyResult& result, const FileSupply::Extent& extent, FileLoan* out) {
  const CopyJob& job = result.job;
  if (extent.bytes == 0) return true;
  Result<FileLoan> loan =
      options_.supply->Read(job.path, job.source, extent, {job.job, job.urgent}, stop_.get_token());
  if (!loan) {
    SupplyFailed(result, loan.error());
    return false;
  }
  result.cause = loan->cause();
  *out = *std::move(loan);
  return true;
}

bool Copier::TakeStored(CopyResult& result) {
  CopyJob& job = result.job;
  const std::string name = NameIn(job.key, kWritten);
  if (!options_.supply->LinkCopy(job.path, *job.source, options_.copies, name.c_str()).ok()) {
    return false;
  }
  const OwnedFd copy(openat(options_.copies, name.c_str(), O_RDONLY | O_CLOEXEC | O_NOFOLLOW));
  Identity identity;
  const int unknown = copy.valid() ? ReadIdentity(copy.get(), &identity) : errno;
  // One that an earlier run has left must be of the file as it is in every respect, and not only
  // in those that its name has. This once the storage is asked how it is.
  SourceFile now;
  const bool looked = LookAt(job.source->fd.get(), true, &now);
  const bool other =
      !looked || !SameFile(now.stat, job.source->stat) ||
      (unknown == 0 && (!SameFile(identity.stat, job.source->stat) ||
                        job.path != std::string_view(identity.path, identity.path_length)));
  if (other || (unknown != 0 && unknown != ENODATA)) {
    unlinkat(options_.copies, name.c_str(), 0);
    options_.supply->DropCopy(job.path, *job.source);
    return false;
  }
  if (unknown != 0 && (WriteIdentity(copy.get(), IdentityOf(*job.source, job.path, 0)) != 0 ||
                       fchmod(copy.get(), kCopyMode & 07777) != 0)) {
    unlinkat(options_.copies, name.c_str(), 0);
    return false;
  }
  if (job.place == CopyPlace::kNone) {
    job.reserved = OnDisk(static_cast<uint64_t>(job.source->stat.st_size));
    job.place = CopyPlace::kKept;
    room_.Found(job.reserved);
  }
  result.stored = true;
  GiveName(result, kWritten, Stored::kYes, identity.crc);
  return true;
}

void Copier::Block(CopyResult& result) {
  const CopyJob& job = result.job;
  if (job.ticket->dropped()) return SetOutcome(result, Outcome::kDropped);
  FileLoan loan;
  if (!Read(result,
            {.offset = job.offset,
             .bytes = job.bytes,
             .block = static_cast<uint32_t>(options_.block)},
            &loan)) {
    return;
  }
  result.crc = Crc32c(loan.bytes());
  const DiskTurns::Turn turn(disk_, job.urgent, job.owner, stop_.get_token());
  if (!turn.given()) return SetOutcome(result, Outcome::kDropped);
  const int error = WriteAll(job.part->get(), loan.bytes().data(), job.bytes, job.offset);
  if (error != 0) return CacheFailed(result, error);
  SetOutcome(result, Outcome::kDone);
}

void Copier::Finish(CopyResult& result) {
  // It took its time: this once the storage is asked.
  if (!Unchanged(*result.job.source, true)) return SetOutcome(result, Outcome::kDiscarded);
  Publish(result, result.job.part->get(), kPart, result.job.crc);
}

void Copier::Publish(CopyResult& result, int fd, const char* suffix, uint32_t crc) {
  const CopyJob& job = result.job;
  if (!Unchanged(*job.source, false)) {
    SetOutcome(result, Outcome::kDiscarded);
  } else if (int error = WriteIdentity(fd, IdentityOf(*job.source, job.path, crc)); error != 0) {
    CacheFailed(result, error);
    // File systems have room for so much, and some call it a full disk.
    if (job.path.size() > kShortPath) SetOutcome(result, Outcome::kRefused);
  } else if (fchmod(fd, kCopyMode & 07777) != 0) {
    CacheFailed(result, errno);
  } else {
    return GiveName(result, suffix, Stored::kNo, crc);
  }
  unlinkat(options_.copies, NameIn(job.key, suffix).c_str(), 0);
}

void Copier::GiveName(CopyResult& result, const char* suffix, Stored stored, uint32_t crc) {
  const CopyJob& job = result.job;
  const std::string from = NameIn(job.key, suffix);
  const std::string name = NameIn(job.key);
  if (!job.ticket->BeginPublishing()) {
    SetOutcome(result, Outcome::kDropped);
  } else {
    if (renameat(options_.copies, from.c_str(), options_.copies, name.c_str()) != 0) {
      CacheFailed(result, errno);
    } else {
      SetOutcome(result, Outcome::kDone);
      if (stored == Stored::kNo && job.place == CopyPlace::kKept && !job.ticket->dropped()) {
        const Status kept =
            options_.supply->KeepCopy(job.path, *job.source, options_.copies, name.c_str(), crc);
        if (!kept.ok()) options_.not_kept(kept);
      }
      if (job.ticket->dropped()) {
        unlinkat(options_.copies, name.c_str(), 0);
        options_.supply->DropCopy(job.path, *job.source);
        SetOutcome(result, Outcome::kDropped);
      }
    }
    job.ticket->EndPublishing();
  }
  if (result.outcome != Outcome::kDone) {
    unlinkat(options_.copies, from.c_str(), 0);
  } else if (job.place == CopyPlace::kKept) {
    // The source's pages are of no more use here.
    (void)posix_fadvise(job.source->fd.get(), 0, 0, POSIX_FADV_DONTNEED);
  }
}

void Copier::Examine(CopyResult& result) {
  const CopyJob& job = result.job;
  const OwnedFd found(open(job.path.c_str(), O_PATH | O_CLOEXEC));
  if (!found.valid()) return SourceFailed(result, errno);
  SourceFile now;
  if (!LookAt(found.get(), true, &now)) return SourceFailed(result, errno);
  const bool same = PathOf(found.get()) == job.path && SameFile(now.stat, job.source->stat);
  SetOutcome(result, same ? Outcome::kDone : Outcome::kDiscarded);
}

void Copier::Resolve(CopyResult& result) {
  const std::string& path = result.job.path;
  OwnedFd found;
  if (result.job.follow) found = OwnedFd(open(path.c_str(), O_PATH | O_CLOEXEC));
  if (found.valid()) {
    result.real = PathOf(found.get());
  } else if (const size_t slash = path.rfind('/'); slash != std::string::npos) {
    found = OwnedFd(open(path.substr(0, slash + 1).c_str(), O_PATH | O_CLOEXEC));
    const std::string folder = found.valid() ? PathOf(found.get()) : "";
    if (!folder.empty()) result.real = folder == "/" ? path : folder + path.substr(slash);
  }
  SetOutcome(result, Outcome::kDone);
}

void Copier::List(CopyResult& result) {
  const std::unique_ptr<DIR, int (*)(DIR*)> folder(opendir(result.job.path.c_str()), closedir);
  if (folder == nullptr) return SourceFailed(result, errno);
  while (const dirent* found = readdir(folder.get())) {
    if (found->d_type != DT_REG && found->d_type != DT_UNKNOWN && found->d_type != DT_LNK) continue;
    result.names.emplace_back(found->d_name);
    if (result.names.size() > kMostNames) return SetOutcome(result, Outcome::kRefused);
  }
  std::sort(result.names.begin(), result.names.end());
  SetOutcome(result, Outcome::kDone);
}

}  // namespace forebay::files
