// Copies as files of their own, with second names: what callers ask for and wait for.
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <memory>
#include <utility>

#include "base/trusted_files.h"
#include "tier/folder_core.h"

namespace forebay {

namespace {

// How long a caller waits for the disk: others may wait for the caller.
constexpr std::chrono::seconds kCallWait(10);

}  // namespace

// It is the two folders that cannot have one file, not the cache folder that fails.
bool FolderCore::MayNotLink(int error) {
  return error == EXDEV || error == EPERM || error == EMLINK || error == EOPNOTSUPP ||
         error == ENOENT;
}

// ---- callers

bool FolderCore::AwaitScan(MutexLock& lock, std::chrono::steady_clock::time_point until) {
  while (!scanned_ && !stopping_) {
    if (idle_.wait_until(lock.native(), until) == std::cv_status::timeout) break;
  }
  return scanned_ || stopping_;
}

Status FolderCore::Hangs() const {
  return Status(Code::kUnavailable, StrCat("the disk of the cache folder ", folder(),
                                           " does not answer; what it has is not used now"));
}

Status FolderCore::Ask(Job job, const std::shared_ptr<Call>& call) {
  const auto until = std::chrono::steady_clock::now() + kCallWait;
  MutexLock lock(mutex_);
  if (!AwaitScan(lock, until)) return Hangs();
  if (!writer_ || stopping_) {
    return Status(Code::kUnavailable,
                  StrCat("the cache folder ", folder(), " is only read by this process"));
  }
  if (passed_by_) return Hangs();
  job.call = call;
  Enqueue(std::move(job));
  while (!call->done && !passed_by_) {
    if (calls_.wait_until(lock.native(), until) == std::cv_status::timeout) break;
  }
  if (call->done) return call->status;
  call->abandoned = true;
  return Hangs();
}

Status FolderCore::LinkCopy(const TierKey& asked, uint64_t length, int dir, const char* name) {
  const Status none(Code::kNotFound, StrCat("no such copy in ", folder()));
  while (true) {
    TierKey key = asked;
    CopyEntry copy;
    bool had = false;
    {
      MutexLock lock(mutex_);
      if (!AwaitScan(lock, std::chrono::steady_clock::now() + kCallWait) || passed_by_) {
        return Hangs();
      }
      if (!writer_) {
        return Status(Code::kUnavailable,
                      StrCat("the cache folder ", folder(), " is only read by this process"));
      }
      index_.At(asked.group).used = true;
      if (!index_.Need(key)) return none;
      probe_key_ = asked;
      copy = *index_.Find(key);
      key.group = index_.IdOf(copy);
      if (copy.length != length) {
        ++stats_.damaged;
        DropLater(key);
        return none;
      }
      had = copy.linked;
      index_.SetLinked(key, true);  // it stays
    }
    if (copy.packed) {
      const auto call = std::make_shared<Call>();
      call->what = Call::What::kUnpack;
      Job job;
      job.op.key = key;
      const Status made = Ask(std::move(job), call);
      if (made.ok()) continue;
      MutexLock lock(mutex_);
      if (!had) index_.SetLinked(key, false);
      return made;
    }
    int error = 0;
    const CopyRead linked = LinkCopyOut(folder_.get(), key, copy, !copy.checked, dir, name, &error);
    MutexLock lock(mutex_);
    CopyEntry* now = index_.Find(key);
    const bool same = now != nullptr && now->Same(copy);
    if (linked == CopyRead::kGood) {
      if (same) now->checked = 1;
      return Status();
    }
    // Put again, in another place, meanwhile.
    if (linked != CopyRead::kFailed && !same && now != nullptr && now->held()) continue;
    return LinkFailed(key, copy, linked, error, had);
  }
}

Status FolderCore::LinkFailed(const TierKey& key, const CopyEntry& copy, CopyRead why, int error,
                              bool had) {
  const std::string what = StrCat("link ", folder(), "/", FileName(key).data());
  if (why == CopyRead::kFailed && error == EEXIST) {
    return Status(Code::kAlreadyExists, StrCat(what, ": the name is taken"));
  }
  if (!had) index_.SetLinked(key, false);
  if (why == CopyRead::kFailed) {
    const Status status = ErrnoStatus(error, what);
    return MayNotLink(error) ? Status(Code::kUnimplemented, status.message()) : status;
  }
  const CopyEntry* now = index_.Find(key);
  if (now != nullptr && now->Same(copy)) {
    stats_.damaged += why == CopyRead::kDamaged ? 1 : 0;
    DropLater(key);
  }
  return Status(Code::kNotFound, StrCat("no such copy in ", folder()));
}

void FolderCore::WantUnlinked(const TierKey& key, uint64_t bytes) {
  const auto [it, fresh] = unlinking_.try_emplace({key.name, key.check}, 0);
  if (fresh) unlinks_.push_back(key);
  it->second += bytes;
  unlinking_bytes_ += bytes;
}

void FolderCore::ReleaseCopy(const TierKey& key) {
  MutexLock lock(mutex_);
  index_.SetLinked(key, false);
  const auto it = unlinking_.find({key.name, key.check});
  if (it == unlinking_.end()) return;
  unlinking_bytes_ -= it->second;
  unlinking_.erase(it);
  std::erase(unlinks_, key);
}

std::vector<TierKey> FolderCore::TakeUnlinks() {
  MutexLock lock(mutex_);
  return std::exchange(unlinks_, {});
}

Status FolderCore::AdoptFile(const TierKey& key, const AdoptedFile& file, uint32_t crc,
                             bool reserved) {
  const Status status = [&] {
    const OwnedFd fd = OpenTrustedFile(file.dir, file.name, O_RDONLY);
    struct stat st {};
    if (!fd.valid() || fstat(fd.get(), &st) != 0) {
      return ErrnoStatus(errno, StrCat("adopt ", file.name));
    }
    if (static_cast<uint64_t>(st.st_size) == file.length && file.length <= CopyEntry::kLongest) {
      return Status();
    }
    return Status(Code::kInvalidArgument,
                  StrCat("adopt ", file.name, ": it has ", st.st_size, " bytes, not ", file.length,
                         ", or more than a copy can have"));
  }();
  const auto call = std::make_shared<Call>();
  call->what = Call::What::kAdopt;
  call->file = file;
  call->reserved = reserved;
  call->dir = OwnedFd(fcntl(file.dir, F_DUPFD_CLOEXEC, 0));
  call->name = file.name;
  call->file.dir = call->dir.get();
  call->file.name = call->name.c_str();
  Job job;
  job.op.kind = TierOp::Kind::kPut;
  job.op.key = key;
  job.op.crc = crc;
  job.op.stamp = file.stamp;
  const Status asked = status.ok() ? Ask(std::move(job), call) : status;
  MutexLock lock(mutex_);
  if (reserved && !call->done && !call->abandoned) {
    reserved_ -= std::min(reserved_, index_.ChargeAtMost(file.length, false));
  }
  return asked;
}

Status FolderCore::Reserve(uint64_t length) {
  const auto call = std::make_shared<Call>();
  call->what = Call::What::kReserve;
  call->file.length = length;
  return Ask(Job(), call);
}

void FolderCore::Unreserve(uint64_t length) {
  MutexLock lock(mutex_);
  reserved_ -= std::min(reserved_, index_.ChargeAtMost(length, false));
}

void FolderCore::DropNow(const TierKey& key) {
  {
    MutexLock lock(mutex_);
    (void)AwaitScan(lock, std::chrono::steady_clock::now() + kCallWait);
    if (!writer_) ClearCopy(key, CopyEntry::kAbsent);
    if (!writer_) return;
  }
  const auto call = std::make_shared<Call>();
  call->what = Call::What::kDrop;
  Job job;
  job.op.kind = TierOp::Kind::kDrop;
  job.op.key = key;
  if (Ask(std::move(job), call).ok()) return;
  // The disk hangs: here nobody finds the copy any more, and its bytes go when the disk answers.
  MutexLock lock(mutex_);
  const CopyEntry* entry = index_.Find(key);
  if (entry != nullptr && entry->held()) DropLater(key);
}

// ---- the background thread

// Adoption goes on as a put.
void FolderCore::RunCall(Job& job) {
  Call& call = *job.call;
  switch (call.what) {
    case Call::What::kAdopt:
      if (call.reserved) Unreserve(call.file.length);
      return;
    case Call::What::kUnpack:
      call.status = Unpack(job.op.key);
      return;
    case Call::What::kDrop:
      Drop(job);
      return;
    case Call::What::kReserve: {
      uint64_t charge = 0;
      {
        MutexLock lock(mutex_);
        charge = index_.ChargeAtMost(call.file.length, false);
      }
      if (!MakeRoom(charge)) call.status = NoRoom(call.file.length);
      return;
    }
  }
}

void FolderCore::EndCall(Job& job) {
  Call& call = *job.call;
  if (call.what == Call::What::kAdopt && !job.done.stored) {
    call.status = job.done.status.ok() ? NoRoom(call.file.length) : job.done.status;
    if (job.done.status.ok() && !health_.ok()) call.status = health_;
  }
  // Who asked knows nothing of what was done.
  if (call.abandoned && call.what == Call::What::kAdopt && job.done.stored) {
    index_.SetLinked(job.op.key, false);
  }
  if (call.abandoned && call.what == Call::What::kReserve && call.status.ok()) {
    reserved_ -= std::min(reserved_, index_.ChargeAtMost(call.file.length, false));
  }
  call.done = true;
  calls_.notify_all();
}

Status FolderCore::NoRoom(uint64_t length) const {
  return Status(Code::kResourceExhausted,
                StrCat("the cache folder ", folder(), " has no room for ", length, " bytes"));
}

Status FolderCore::Unpack(TierKey key) {
  const Status none(Code::kNotFound, StrCat("no such copy in ", folder()));
  CopyEntry copy;
  uint64_t charge = 0;
  {
    MutexLock lock(mutex_);
    const CopyEntry* entry = index_.Find(key);
    if (entry == nullptr || !entry->held()) return none;
    copy = *entry;
    if (!copy.packed) return Status();
    key.group = index_.IdOf(copy);
    charge = index_.ChargeAtMost(copy.length, false);
  }
  std::vector<std::byte> bytes(copy.length);
  int error = 0;
  const CopyRead read = ReadCopy(folder_.get(), key, copy, bytes, &error);
  if (read != CopyRead::kGood) {
    MutexLock lock(mutex_);
    return LinkFailed(key, copy, read, error, false);
  }
  if (!MakeRoom(charge)) return NoRoom(copy.length);
  CopyEntry file = copy;
  file.packed = 0;
  file.offset = 0;
  file.segment = 0;
  file.checked = 1;
  error = MakeFile(key, file, bytes);
  bool stays = false;
  {
    MutexLock lock(mutex_);
    reserved_ -= charge;
    if (error != 0) {
      if (!MayPassSoon(error) && writing_) {
        StopWriting(ErrnoStatus(error, StrCat("the cache folder ", folder(),
                                              " takes no more copies, it serves what it has")),
                    error);
      }
      return ErrnoStatus(error, StrCat("write ", folder(), "/", FileName(key).data()));
    }
    // A reader may have found it damaged meanwhile, and dropped it.
    const CopyEntry* entry = index_.Find(key);
    stays = entry != nullptr && entry->Same(copy) && index_.Set(key, file);
  }
  if (!stays) {
    (void)unlinkat(folder_.get(), FileName(key).data(), 0);
    return none;
  }
  RemoveCopy(folder_.get(), key, copy);
  RemoveEmpty(key, copy);
  return Status();
}

int FolderCore::MakeFile(const TierKey& key, const CopyEntry& file,
                         std::span<const std::byte> bytes) {
  int error = HoldLock();
  if (error == 0) error = WriteFile(folder_.get(), key, bytes, next_temporary_++);
  if (error != 0) return error;
  LogRecord record;
  {
    MutexLock lock(mutex_);
    record = index_.RecordOf(key, file);
  }
  error = AppendLog(std::span(&record, 1));
  if (error != 0 && HoldLock() == 0) (void)unlinkat(folder_.get(), FileName(key).data(), 0);
  return error;
}

}  // namespace forebay
