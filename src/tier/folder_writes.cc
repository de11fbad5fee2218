// What the background thread of a folder store does: read the log, then write, remove, evict.
#include <fcntl.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <ctime>
#include <map>
#include <set>
#include <utility>

#include "base/trusted_files.h"
#include "tier/folder_core.h"

namespace forebay {
namespace {

constexpr size_t kMostAtOnce = 256;       // jobs of one batch
constexpr int64_t kUseEvery = 60;         // seconds between notes that a group is used
constexpr size_t kMostSpare = 64;         // copies that leave at once
constexpr uint64_t kSlackRecords = 4096;  // of a log, beside three for each copy

// What may be mended while the program runs.
bool MayPassLater(int error) {
  switch (error) {
    case ENOSPC:
    case EDQUOT:
    case EROFS:
    case EIO:
    case EACCES:
    case EPERM:    // something of another user is in the way,
    case ENOTDIR:  // or a file where a folder should be,
    case EISDIR:   // or a folder where a file should be
    case EEXIST:
    case ENOTEMPTY:
      return true;
    default:
      return false;
  }
}

}  // namespace

// ---- reading the log

void FolderCore::Load(bool writer) {
  Result<FolderLog> log = FolderLog::Open(folder_.get(), writer);
  int error = 0;
  if (log) {
    error = log->ReadNew([this](std::span<const LogRecord> records) {
      MutexLock lock(mutex_);
      for (const LogRecord& record : records) index_.Apply(record);
    });
  }
  if (writer) {
    LoadAsWriter(std::move(log), error);
  } else if (log) {
    log_ = *std::move(log);
  }
  LoadDone();
}

void FolderCore::LoadDone() {
  struct statvfs disk {};
  const bool known = fstatvfs(folder_.get(), &disk) == 0;
  std::optional<LogRecord> limit;
  {
    MutexLock lock(mutex_);
    if (log_) log_bytes_ = log_->bytes();
    if (capacity_bytes_ == 0) {
      const uint64_t room = known ? uint64_t{disk.f_bavail} * disk.f_frsize : 0;
      capacity_bytes_ = (Used() + room) / 5 * 4;
    }
    chosen_bytes_ = capacity_bytes_;
    if (!health_.ok()) capacity_bytes_ = Used();
    if (writing_ && index_.limit() != capacity_bytes_) {
      index_.set_limit(capacity_bytes_);
      limit = LimitRecord(capacity_bytes_);
    }
  }
  if (limit) (void)AppendLog(std::span(&*limit, 1));
  MutexLock lock(mutex_);
  scanned_ = true;
  idle_.notify_all();
}

void FolderCore::LoadAsWriter(Result<FolderLog> log, int error) {
  const Code code = log.status().code();
  if (error != 0 || (code != Code::kOk && code != Code::kNotFound && code != Code::kDataLoss)) {
    MutexLock lock(mutex_);
    StopWriting(error != 0 ? ErrnoStatus(error, StrCat("read ", folder(), "/", FolderLog::kName))
                           : log.error());
    return;
  }
  const bool old_files = HoldsOldFiles(folder_.get());
  // Folders that no record speaks of: an older format, or what a dead writer had begun to remove.
  size_t removed = 0;
  std::vector<uint64_t> folders = GroupFolders(folder_.get());
  std::sort(folders.begin(), folders.end());
  for (const uint64_t group : folders) {
    {
      MutexLock lock(mutex_);
      if (index_.Holds(group)) continue;
    }
    RemoveGroup(folder_.get(), group);
    ++removed;
  }
  if (log) error = log->Cut();
  bool tidy = false;
  {
    MutexLock lock(mutex_);
    bool forgot = false;
    for (const FolderIndex::Group& group : index_.groups()) {
      if (group.copies > 0 && !std::binary_search(folders.begin(), folders.end(), group.id)) {
        index_.Forget(group.id);
        forgot = true;
      }
    }
    if (log) {
      // Records of what was forgotten would count again once the group has a folder.
      tidy = error == 0 && log->damaged() == 0 && !forgot &&
             log->records() <= 3 * index_.copies() + kSlackRecords;
      if (log->damaged() > 0) {
        note_ = StrCat(log->damaged(), " records of the cache folder ", folder(),
                       " were damaged: the samples are fetched again");
      }
    } else if (removed > 0) {
      note_ = StrCat("the cache folder ", folder(), " was of another format: its ", removed,
                     removed == 1 ? " data set was" : " data sets were", " cleared");
    }
    if (old_files) {
      note_ = StrCat(note_, note_.empty() ? "" : "; ", OldFilesRemedy(folder()));
    }
  }
  if (!tidy) log = NewLog();
  if (log) {
    log_ = *std::move(log);
    return;
  }
  MutexLock lock(mutex_);
  StopWriting(Status(log.error().code(), StrCat("the cache folder ", folder(),
                                                " takes no copies: ", log.error().message())),
              EIO);
}

// A log of what the index has. While the file is written the lock is not held: meanwhile others
// look copies up, mark some as dropped, for which the queue gets a job, and name groups. Only this
// thread adds entries.
Result<FolderLog> FolderCore::NewLog() {
  constexpr size_t kGroup = 4096;
  const auto fill = [this](const FolderLog::Emit& emit) NO_THREAD_SAFETY_ANALYSIS {
    std::vector<LogRecord> group;
    const auto flush = [&]() NO_THREAD_SAFETY_ANALYSIS {
      mutex_.Unlock();
      for (const LogRecord& record : group) emit(record);
      group.clear();
      mutex_.Lock();
    };
    mutex_.Lock();
    index_.Write([&](const LogRecord& record) {
      group.push_back(record);
      if (group.size() == kGroup) flush();
    });
    flush();
    mutex_.Unlock();
  };
  return FolderLog::Create(folder_.get(), fill);
}

void FolderCore::SweepAfterPowerLoss() {
  // More than the blocks that copies share; a disk may also keep some room behind a file's end.
  constexpr uint64_t kSegmentSlack = 64 << 10;
  // Files between two looks at what others wait for.
  constexpr size_t kFilesAtOnce = 32;
  if (lock_.same_boot() || !MayTouch()) return;
  std::vector<Job> drops;
  const auto drop = [&](const TierKey& key) {
    Job& job = drops.emplace_back();
    job.op.kind = TierOp::Kind::kDrop;
    job.op.key = key;
  };
  const std::vector<uint64_t> groups = GroupFolders(folder_.get());
  // Segments first: nothing is written meanwhile, so those that are not known are nobody's.
  std::map<std::pair<uint64_t, uint16_t>, uint64_t> segments;
  {
    MutexLock lock(mutex_);
    segments = index_.SegmentBytes();
  }
  std::set<std::pair<uint64_t, uint16_t>> torn;
  for (const uint64_t group : groups) {
    SweepSegments(folder_.get(), group, [&](const FoundFile& file) {
      const std::pair<uint64_t, uint16_t> number(group, static_cast<uint16_t>(file.segment));
      const auto found = segments.find(number);
      if (found == segments.end() || file.segment > UINT16_MAX) return Sweep::kRemove;
      // It has bytes that no record speaks of.
      if (file.disk_bytes > found->second + kSegmentSlack) torn.insert(number);
      return Sweep::kKeep;
    });
  }
  {
    MutexLock lock(mutex_);
    for (const TierKey& key : index_.KeysIf([&](const CopyEntry& copy) NO_THREAD_SAFETY_ANALYSIS {
           return copy.packed && torn.contains({index_.IdOf(copy), copy.segment});
         })) {
      drop(key);
    }
  }
  // Copies that were dropped, but for the log. Blocks that they share with others stay taken.
  do {
    for (Job& job : drops) Drop(job);
    drops.clear();
    MutexLock lock(mutex_);
    uint64_t excess = Used() > Limit() ? Used() - Limit() : 0;
    for (const TierKey& key : index_.KeysIf([&](const CopyEntry& copy) NO_THREAD_SAFETY_ANALYSIS {
           if (excess == 0 || copy.linked) return false;
           excess -= std::min(excess, index_.Charge(copy.length, copy.packed));
           return true;
         })) {
      drop(key);
    }
  } while (!drops.empty());
  // There may be a million files, and each takes a look at the disk: others do not wait for all of
  // them.
  size_t seen = 0;
  bool stopped = false;
  for (const uint64_t group : groups) {
    SweepFiles(folder_.get(), group, [&](const FoundFile& file) {
      if (++seen % kFilesAtOnce == 0) stopped = !WriteBatch(false) || stopping();
      if (stopped) return Sweep::kStop;
      MutexLock lock(mutex_);
      const CopyEntry* copy = std::as_const(index_).Find(*file.key);
      const bool known =
          copy != nullptr && copy->held() && !copy->packed && index_.IdOf(*copy) == group;
      return known ? Sweep::kKeep : Sweep::kRemove;
    });
    if (stopped) return;
  }
  if (MayTouch()) lock_.NoteSwept();
}

// ---- following another writer

void FolderCore::Follow() {
  Nanos next_try = SteadyClock().Now() + options_.take_over_every;
  while (true) {
    {
      MutexLock lock(mutex_);
      if (!stopping_ && others_.empty()) {
        idle_writer_ = true;
        writes_.wait_for(lock.native(), std::chrono::nanoseconds(options_.follow_every));
      }
      if (stopping_) return;
      if (!others_.empty()) {
        AnswerAsReader();
        continue;
      }
    }
    if (SteadyClock().Now() >= next_try) {
      if (TakeOver()) return;
      next_try = SteadyClock().Now() + options_.take_over_every;
    }
    ReadOthersLog();
    MutexLock lock(mutex_);
    if (log_) log_bytes_ = log_->bytes();
    capacity_bytes_ = Used();
  }
}

// Puts and drops of a store that only reads.
void FolderCore::AnswerAsReader() {
  for (Job& job : others_) {
    const CopyEntry* entry = index_.Find(job.op.key);
    job.done.tag = job.op.tag;
    job.done.stored = job.op.kind == TierOp::Kind::kPut && entry != nullptr && entry->held();
    if (job.op.kind == TierOp::Kind::kDrop) index_.Clear(job.op.key);
    job.port->done.push_back(std::move(job.done));
    const uint64_t one = 1;
    (void)!write(job.port->event_fd.get(), &one, sizeof one);
  }
  others_.clear();
  queued_bytes_ = 0;
  urgent_ = false;
  capacity_bytes_ = Used();
}

void FolderCore::ReadOthersLog() {
  if (log_ && !log_->Replaced(folder_.get())) {
    (void)log_->ReadNew([this](std::span<const LogRecord> records) {
      MutexLock lock(mutex_);
      for (const LogRecord& record : records) index_.Apply(record);
    });
    return;
  }
  Result<FolderLog> log = FolderLog::Open(folder_.get(), false);
  if (!log) return;  // not made yet, or the folder is gone: what is known stays
  FolderIndex fresh(Block());
  const int error = log->ReadNew([&fresh](std::span<const LogRecord> records) {
    for (const LogRecord& record : records) fresh.Apply(record);
  });
  if (error != 0) return;
  log_ = *std::move(log);
  MutexLock lock(mutex_);
  ReplaceIndex(std::move(fresh));
}

void FolderCore::ReplaceIndex(FolderIndex fresh) {
  fresh.TakeOverUses(index_);
  index_ = std::move(fresh);
}

// Becomes the writer, if there is none. The log is read anew: what the last writer added at its
// end counts, and so do copies that this reader could not read and has taken out of its index.
bool FolderCore::TakeOver() {
  FolderLock taken;
  if (taken.Take(folder_.get()) != 0) return false;
  Result<FolderLog> log = FolderLog::Open(folder_.get(), true);
  FolderIndex fresh(Block());
  if (log) {
    const int error = log->ReadNew([&fresh](std::span<const LogRecord> records) {
      for (const LogRecord& record : records) fresh.Apply(record);
    });
    if (error != 0) return false;
  } else if (log.error().code() != Code::kNotFound && log.error().code() != Code::kDataLoss) {
    return false;
  }
  lock_ = std::move(taken);
  RemoveLeftovers(folder_.get());
  (void)MakeTrustedFolder(folder_.get(), "writing");
  {
    MutexLock lock(mutex_);
    ReplaceIndex(std::move(fresh));
    writer_ = true;
    writing_ = true;
    health_ = Status();
    scanned_ = false;  // nothing is put until the rest is done
    capacity_bytes_ = options_.capacity_bytes;
  }
  LoadAsWriter(std::move(log), 0);
  LoadDone();
  return true;
}

// ---- writing

void FolderCore::Write() {
  SweepAfterPowerLoss();
  while (WriteBatch(true)) {
  }
}

bool FolderCore::stopping() const {
  MutexLock lock(mutex_);
  return stopping_;
}

bool FolderCore::WriteBatch(bool wait) {
  std::vector<Job> batch;
  std::vector<std::pair<uint64_t, std::string>> uses;
  bool retry = false;
  {
    MutexLock lock(mutex_);
    if (wait) AwaitBatch(lock);
    if (others_.empty() && uses_.empty() && (stopping_ || !wait)) return !stopping_;
    retry = MayRetry() && SteadyClock().Now() >= retry_at_;
    uses.swap(uses_);
    uint64_t bytes = 0;
    while (!others_.empty() && batch.size() < kMostAtOnce && bytes < options_.batch_bytes) {
      // A call comes after all that was asked before it, and before all that is asked later.
      if (others_.front().call != nullptr && !batch.empty()) break;
      batch.push_back(std::move(others_.front()));
      others_.pop_front();
      bytes += batch.back().op.bytes.size();
      if (batch.back().port != nullptr) ++batch.back().port->running;
      if (batch.back().call != nullptr) break;
    }
    queued_bytes_ -= bytes;
    urgent_ = urgent_ && !others_.empty();
  }
  if (retry) Retry();
  if (!uses.empty()) NoteUses(std::move(uses));
  RunBatch(batch);
  TidyLog();
  MutexLock lock(mutex_);
  for (Job& job : batch) {
    if (!job.done.status.ok()) ++stats_.errors;
    if (job.call != nullptr) EndCall(job);
    if (job.port == nullptr) continue;
    job.done.tag = job.op.tag;
    job.port->done.push_back(std::move(job.done));
    if (job.port->done.size() == 1) {
      const uint64_t one = 1;
      (void)!write(job.port->event_fd.get(), &one, sizeof one);
    }
    if (--job.port->running == 0) idle_.notify_all();
  }
  return true;
}

// In a stream of puts the thread sleeps until enough of them wait, or for a moment; a batch then
// costs one wake-up of this thread and one of whoever reaps. Only when nothing came meanwhile does
// the next job wake it.
void FolderCore::AwaitBatch(MutexLock& lock) {
  Gather(lock);
  if (stopping_ || !others_.empty() || !uses_.empty()) return;
  idle_writer_ = true;
  while (!stopping_ && others_.empty() && uses_.empty()) {
    if (!MayRetry()) {
      writes_.wait(lock.native());
      continue;
    }
    const Nanos left = retry_at_ - SteadyClock().Now();
    if (left <= 0) break;
    writes_.wait_for(lock.native(), std::chrono::nanoseconds(left));
  }
  idle_writer_ = false;
  Gather(lock);
}

void FolderCore::Gather(MutexLock& lock) {
  writes_.wait_for(lock.native(), std::chrono::nanoseconds(options_.gather),
                   [this]() NO_THREAD_SAFETY_ANALYSIS { return stopping_ || Enough(); });
}

void FolderCore::NoteUses(std::vector<std::pair<uint64_t, std::string>> uses) {
  std::vector<LogRecord> records;
  {
    MutexLock lock(mutex_);
    if (!writing_) return;
    for (const auto& [id, path] : uses) {
      FolderIndex::Group& group = index_.At(id);
      const auto now = static_cast<int64_t>(std::time(nullptr));
      if (now - group.last_used_s >= kUseEvery) {
        group.last_used_s = now;
        records.push_back(UseRecord(group.id, now));
      }
      if (path.empty() || path == group.path) continue;
      group.path = path;
      for (const LogRecord& piece : PathRecords(group.id, path)) records.push_back(piece);
    }
  }
  // Without it the group is only listed without a path, and evicted early.
  if (!records.empty()) (void)AppendLog(records);
}

void FolderCore::RunBatch(std::span<Job> jobs) {
  std::vector<Pending> admitted;
  (void)MayTouch();
  if (!jobs.empty() && jobs.front().call != nullptr) {
    RunCall(jobs.front());
    if (jobs.front().call->what != Call::What::kAdopt) return;
  }
  while (!jobs.empty()) {
    if (jobs.front().op.kind == TierOp::Kind::kDrop) {
      Drop(jobs.front());
      jobs = jobs.subspan(1);
      continue;
    }
    Leaving leaving;
    jobs = jobs.subspan(AdmitPuts(jobs, &admitted, &leaving));
    Remove(leaving);
  }
  std::vector<Pending> files;
  std::vector<Pending> packed;
  for (Pending& put : admitted) {
    const TierOp& op = put.job->op;
    if (put.copy.packed) {
      packed.push_back(put);
      continue;
    }
    int error = HoldLock();
    if (error == 0 && put.job->call != nullptr) {
      const AdoptedFile& file = put.job->call->file;
      error = LinkFileIn(folder_.get(), op.key, file.dir, file.name);
    } else if (error == 0) {
      error = WriteFile(folder_.get(), op.key, op.bytes, next_temporary_++);
    }
    error == 0 ? files.push_back(put) : Fail(put, error);
  }
  Publish(files);
  while (!packed.empty()) {
    const uint64_t group = packed.front().job->op.key.group;
    const auto rest = std::stable_partition(packed.begin(), packed.end(), [&](const Pending& put) {
      return put.job->op.key.group == group;
    });
    WritePacked(std::span(packed.begin(), rest));
    packed.erase(packed.begin(), rest);
  }
}

// Reserves room for puts, up to the first drop, or to the first that needs others to leave: a group
// that nobody here uses, or else copies that nobody here needs. Returns how many it dealt with.
size_t FolderCore::AdmitPuts(std::span<Job> jobs, std::vector<Pending>* admitted,
                             Leaving* leaving) {
  MutexLock lock(mutex_);
  for (size_t i = 0; i < jobs.size(); ++i) {
    Job& job = jobs[i];
    if (job.op.kind == TierOp::Kind::kDrop) return i;
    if (const CopyEntry* entry = index_.Find(job.op.key);
        entry != nullptr && entry->length != CopyEntry::kAbsent) {
      if (entry->held() && writing_ && job.op.stamp != 0 && job.op.stamp != entry->stamp) {
        if (entry->crc != job.op.crc || entry->length != job.length()) {
          // Its file has other bytes under the same name: it makes room for them.
          Job& old = leaving->copies.emplace_back();
          old.op.kind = TierOp::Kind::kDrop;
          old.op.key = job.op.key;
          return i;
        }
        CopyEntry* same = index_.Find(job.op.key);
        same->stamp = job.op.stamp;
        leaving->stamped.push_back(index_.StampRecordOf(job.op.key, *same));
      }
      job.done.stored = entry->held();
      continue;
    }
    if (!writing_ || job.length() > CopyEntry::kLongest) continue;
    const bool packed = Packed(job);
    const uint64_t charge = ChargeOf(job.op.key, job.length(), packed);
    if (!Fits(charge)) {
      if (ChooseLeaving(charge, leaving)) return i;
      ++stats_.full;
      continue;
    }
    CopyEntry* entry = index_.Make(job.op.key);
    if (entry == nullptr) {
      ++stats_.full;
      continue;
    }
    entry->length = CopyEntry::kBusy;
    reserved_ += charge;
    Pending& put = admitted->emplace_back();
    put.job = &job;
    put.charge = charge;
    put.copy.needed = 1;
    put.copy.group = index_.NumberOf(job.op.key.group) & (FolderIndex::kMostGroups - 1);
    job.op.key.group = index_.IdOf(put.copy);
    put.copy.packed = packed;
    put.copy.length = static_cast<uint32_t>(job.length());
    put.copy.crc = job.op.crc;
    put.copy.stamp = job.op.stamp;
    put.copy.checked = 1;
    put.copy.linked = job.call != nullptr && job.call->file.linked;
  }
  return jobs.size();
}

// Whole groups first, then copies; at last those that have a second name, for which somebody else
// has to act.
bool FolderCore::ChooseLeaving(uint64_t charge, Leaving* leaving) {
  if (charge + Overhead() > Limit()) return false;
  uint64_t oldest = 0;
  if (index_.Oldest(&oldest)) {
    index_.At(oldest).leaving = true;
    leaving->group = oldest;
    return true;
  }
  leaving->copies = TakeSpare(charge);
  if (!leaving->copies.empty()) return true;
  if (unlinking_.empty()) {
    for (const TierKey& key : index_.LinkedSpare(charge)) WantUnlinked(key, 0);
  }
  return false;
}

void FolderCore::Remove(Leaving& leaving) {
  // Without it the copy is compared once more.
  if (!leaving.stamped.empty() && MayTouch()) (void)AppendLog(leaving.stamped);
  if (leaving.group) Evict(*leaving.group);
  for (Job& job : leaving.copies) Drop(job);
}

bool FolderCore::MakeRoom(uint64_t charge) {
  while (true) {
    Leaving leaving;
    {
      MutexLock lock(mutex_);
      if (!writing_) return false;
      if (Fits(charge)) {
        reserved_ += charge;
        return true;
      }
      if (!ChooseLeaving(charge, &leaving)) {
        ++stats_.full;
        return false;
      }
    }
    Remove(leaving);
  }
}

std::vector<FolderCore::Job> FolderCore::TakeSpare(uint64_t bytes) {
  std::vector<Job> out;
  uint64_t freed = 0;
  TierKey key;
  while (freed < bytes && out.size() < kMostSpare && index_.Spare(&key)) {
    Job& job = out.emplace_back();
    job.op.kind = TierOp::Kind::kDrop;
    job.op.key = key;
    job.taken = true;
    job.copy = *index_.Find(key);
    freed += index_.Charge(job.copy.length, job.copy.packed);
    index_.Clear(key, CopyEntry::kBusy);
  }
  return out;
}

// The group is marked as leaving.
void FolderCore::Evict(uint64_t group) {
  LogRecord forget;
  forget.group = group;
  forget.kind = LogRecord::Kind::kForget;
  if (MayTouch()) {
    if (AppendLog(std::span(&forget, 1)) != 0) log_behind_ = true;
    segments_.Seal(group);
    RemoveGroup(folder_.get(), group);
  }
  MutexLock lock(mutex_);
  index_.Forget(group);
  index_.At(group).leaving = false;
}

// All are small, and of one group.
void FolderCore::WritePacked(std::span<Pending> puts) {
  int error = WriteTogether(puts);
  if (error == 0) {
    Publish(puts);
    return;
  }
  for (Pending& put : puts) {
    const std::span<Pending> one(&put, 1);
    // Too long for the segment under a limit on the size of files: perhaps not for a new one.
    if (error == EFBIG) {
      segments_.Seal(put.job->op.key.group);
      error = WriteTogether(one);
      if (error == 0) {
        Publish(one);
        error = EFBIG;
        continue;
      }
    } else if (error == EMLINK) {
      put.copy.packed = false;
      int failed = HoldLock();
      if (failed == 0) {
        failed = WriteFile(folder_.get(), put.job->op.key, put.job->op.bytes, next_temporary_++);
      }
      failed == 0 ? Publish(one) : Fail(put, failed);
      continue;
    }
    Fail(put, error);
  }
}

int FolderCore::WriteTogether(std::span<Pending> puts) {
  if (const int error = HoldLock(); error != 0) return error;
  const uint64_t group = puts.front().job->op.key.group;
  std::vector<iovec> parts;
  uint64_t bytes = 0;
  for (const Pending& put : puts) {
    const std::span<std::byte> part = put.job->op.bytes;
    parts.push_back({part.data(), part.size()});
    bytes += part.size();
  }
  uint32_t next = 0;
  {
    MutexLock lock(mutex_);
    next = index_.At(group).next_segment;
  }
  uint16_t segment = 0;
  uint32_t offset = 0;
  const int error = segments_.Append(folder_.get(), group, parts, bytes, &next, &segment, &offset);
  MutexLock lock(mutex_);
  index_.At(group).next_segment = next;
  if (error != 0) return error;
  for (Pending& put : puts) {
    put.copy.segment = segment;
    put.copy.offset = offset;
    offset += put.copy.length;
  }
  return 0;
}

void FolderCore::Publish(std::span<Pending> puts) {
  if (puts.empty()) return;
  std::vector<LogRecord> records;
  {
    MutexLock lock(mutex_);
    for (const Pending& put : puts) {
      records.push_back(index_.RecordOf(put.job->op.key, put.copy));
      if (put.copy.stamp != 0) {
        records.push_back(index_.StampRecordOf(put.job->op.key, put.copy));
      }
    }
  }
  if (const int error = AppendLog(records); error != 0) {
    for (Pending& put : puts) {
      if (HoldLock() == 0) RemoveCopy(folder_.get(), put.job->op.key, put.copy);
      Fail(put, error);
    }
    return;
  }
  MutexLock lock(mutex_);
  for (const Pending& put : puts) {
    reserved_ -= put.charge;
    put.job->done.stored = index_.Set(put.job->op.key, put.copy);
    ++stats_.writes;
  }
}

void FolderCore::Fail(Pending& put, int error) {
  const TierOp& op = put.job->op;
  MutexLock lock(mutex_);
  index_.Clear(op.key);
  reserved_ -= put.charge;
  if (MayPassSoon(error) || (put.job->call != nullptr && MayNotLink(error))) {
    const CopyName name = NameOf(op.key, put.copy);
    put.job->done.status = ErrnoStatus(error, StrCat("write ", folder(), "/", name.data()));
  } else if (writing_) {
    StopWriting(ErrnoStatus(error, StrCat("the cache folder ", folder(),
                                          " takes no more copies, it serves what it has")),
                error);
    put.job->done.status = health_;
  }
}

bool FolderCore::MayPassSoon(int error) {
  return error == EMFILE || error == ENFILE || error == ENOMEM || error == EFBIG;
}

void FolderCore::StopWriting(Status why, int error) {
  writing_ = false;
  health_ = std::move(why);
  capacity_bytes_ = Used();
  retry_at_ = MayPassLater(error) ? SteadyClock().Now() + options_.retry_every : 0;
}

void FolderCore::Retry() {
  static constexpr std::array<std::byte, 64 << 10> kTried = {};
  const CopyName name = TemporaryName(next_temporary_++);
  int error = HoldLock();
  if (error == 0) {
    const OwnedFd file = MakeTemporary(folder_.get(), name);
    error = file.valid() ? WriteBytes(file.get(), kTried, 0) : errno;
    if (file.valid()) (void)unlinkat(folder_.get(), name.data(), 0);
  }
  if (error == 0 && !log_) {
    Result<FolderLog> log = NewLog();
    log ? void(log_ = *std::move(log)) : void(error = EIO);
  }
  MutexLock lock(mutex_);
  retry_at_ = error == 0 ? 0 : SteadyClock().Now() + options_.retry_every;
  if (error != 0) return;
  writing_ = true;
  health_ = Status();
  capacity_bytes_ = chosen_bytes_;
}

void FolderCore::Drop(Job& job) {
  TierKey& key = job.op.key;
  {
    MutexLock lock(mutex_);
    if (!job.taken) {
      const CopyEntry* entry = index_.Find(key);
      if (entry == nullptr || !entry->held()) return;
      job.copy = *entry;
      key.group = index_.IdOf(job.copy);
      ClearCopy(key, CopyEntry::kBusy);
    }
  }
  const bool touch = MayTouch();
  if (touch) {
    // First the record: what the log names is there.
    LogRecord drop;
    drop.name = key.name;
    drop.name_check = key.check;
    drop.group = key.group;
    drop.kind = LogRecord::Kind::kDrop;
    if (AppendLog(std::span(&drop, 1)) != 0) log_behind_ = true;
    RemoveCopy(folder_.get(), key, job.copy);
  }
  {
    MutexLock lock(mutex_);
    index_.Clear(key);
    if (!health_.ok()) capacity_bytes_ = Used();
  }
  if (touch) RemoveEmpty(key, job.copy);
}

void FolderCore::RemoveEmpty(const TierKey& key, const CopyEntry& copy) {
  {
    MutexLock lock(mutex_);
    FolderIndex::Group& group = index_.At(key.group);
    if (copy.packed ? group.segments[copy.segment].copies > 0 : group.pages[key.name >> 56] > 0) {
      return;
    }
  }
  if (!copy.packed) {
    CopyName page = FileName(key);
    page[16 + 1 + 2] = '\0';
    (void)unlinkat(folder_.get(), page.data(), AT_REMOVEDIR);
  } else if (segments_.IsOpen(key.group, copy.segment)) {
    segments_.Rewind(key.group);
  } else {
    (void)unlinkat(folder_.get(), SegmentName(key.group, copy.segment).data(), 0);
  }
}

void FolderCore::TidyLog() {
  {
    MutexLock lock(mutex_);
    if (!writing_ || !log_ || log_->records() <= 3 * index_.copies() + kSlackRecords) return;
  }
  if (HoldLock() != 0) return;
  Result<FolderLog> log = NewLog();
  if (!log) return;
  log_ = *std::move(log);
  MutexLock lock(mutex_);
  log_bytes_ = log_->bytes();
}

int FolderCore::HoldLock() {
  if (lock_.Held(folder_.get())) return 0;
  // Somebody emptied the folder; perhaps another process writes to it by now.
  FolderLock lock;
  if (const int error = lock.Take(folder_.get()); error != 0) return error;
  lock_ = std::move(lock);
  log_behind_ = true;
  return 0;
}

bool FolderCore::MayTouch() {
  const int error = HoldLock();
  if (error == 0) return true;
  MutexLock lock(mutex_);
  if (!writing_) return false;
  StopWriting(ErrnoStatus(error, StrCat("the cache folder ", folder(),
                                        " takes no more copies, as its lock is not ours any more; "
                                        "it serves what it has")));
  return false;
}

int FolderCore::AppendLog(std::span<LogRecord> records) {
  if (!log_) return EIO;
  if (const int error = HoldLock(); error != 0) return error;
  if (log_behind_ || !log_->Linked()) {
    Result<FolderLog> log = NewLog();
    if (!log) return EIO;  // it is tried again
    log_ = *std::move(log);
    log_behind_ = false;
  }
  const int error = log_->Append(records);
  MutexLock lock(mutex_);
  log_bytes_ = log_->bytes();
  return error;
}

}  // namespace forebay
