#include "tier/folder_core.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>

namespace forebay {
namespace {

// Puts that are worth a wake-up, however small: a quarter of what a tier has in flight.
constexpr size_t kManyPuts = 128;
// Blocks for the folder itself, its lock, the folders for what is being written and for second
// names, and a segment that is begun for each of the groups that are written to.
constexpr uint64_t kFixedBlocks = 16;

}  // namespace

FolderCore::FolderCore(const FolderTierOptions& options, OwnedFd folder, FolderLock lock,
                       Status health)
    : options_(options),
      folder_(std::move(folder)),
      lock_(std::move(lock)),
      index_(options.block_bytes == 0 ? BlockOf(folder_.get()) : options.block_bytes),
      writer_(health.ok()),
      writing_(health.ok()),
      health_(std::move(health)),
      capacity_bytes_(options.capacity_bytes) {}

// ---- threads

void FolderCore::RunReader() {
  {
    MutexLock lock(mutex_);
    ++readers_;
  }
  while (true) {
    Job job;
    {
      MutexLock lock(mutex_);
      while (!stopping_ && gets_.empty()) reads_.wait(lock.native());
      if (stopping_) break;
      job = std::move(gets_.front());
      gets_.pop_front();
      ++reading_;
      if (job.port == nullptr && !job.watches) ++lost_;  // nobody waits for a probe
      if (job.port != nullptr) ++job.port->running;
      job.given_up = given_up_;
    }
    TierDone done;
    if (job.port == nullptr) {
      Probe(job.op.key, job.watches);
    } else {
      done = Get(job.op);
    }
    MutexLock lock(mutex_);
    --reading_;
    if ((job.port == nullptr && !job.watches) || job.given_up != given_up_) --lost_;
    silent_since_ = SteadyClock().Now();
    if (job.port == nullptr) continue;
    if (!done.status.ok()) ++stats_.errors;
    Finish(*job.port, std::move(done));
    if (--job.port->running == 0) idle_.notify_all();
  }
  Leave();
}

void FolderCore::Finish(FolderPort& port, TierDone done) {
  port.done.push_back(std::move(done));
  // With the lock held: the eventfd is readable exactly while completions wait.
  if (port.done.size() > 1) return;
  const uint64_t one = 1;
  (void)!write(port.event_fd.get(), &one, sizeof one);
}

// ---- a disk that does not answer

Nanos FolderCore::SilentSince() const {
  MutexLock lock(mutex_);
  return Owed() == 0 ? 0 : silent_since_;
}

void FolderCore::PassBy(bool pass) {
  MutexLock lock(mutex_);
  passed_by_ = pass;
  if (!pass) return;
  calls_.notify_all();
  ++given_up_;
  lost_ = reading_;
  for (const Job& job : gets_) {
    if (job.port == nullptr) continue;
    TierDone done;
    done.tag = job.op.tag;
    done.passed = true;
    Finish(*job.port, std::move(done));
  }
  std::erase_if(gets_, [](const Job& job) { return job.port != nullptr || job.watches; });
}

bool FolderCore::QueueProbe() {
  MutexLock lock(mutex_);
  probe_took_.reset();
  Job job;
  job.op.key = probe_key_;
  gets_.push_front(std::move(job));
  reads_.notify_one();
  return reading_ >= readers_;
}

void FolderCore::Watch() {
  MutexLock lock(mutex_);
  if (passed_by_ || stopping_ || !scanned_ || Owed() > 0) return;
  silent_since_ = SteadyClock().Now();
  Job job;
  job.op.key = probe_key_;
  job.watches = true;
  gets_.push_back(std::move(job));
  reads_.notify_one();
}

std::optional<Nanos> FolderCore::TakeProbe() {
  MutexLock lock(mutex_);
  return std::exchange(probe_took_, std::nullopt);
}

// A failure is an answer, too: the reads that follow deal with it.
void FolderCore::Probe(const TierKey& asked, bool watches) {
  const Nanos start = SteadyClock().Now();
  TierKey key = asked;
  CopyEntry copy;
  {
    MutexLock lock(mutex_);
    if (const CopyEntry* entry = index_.Find(key); entry != nullptr) copy = *entry;
    if (copy.held()) key.group = index_.IdOf(copy);
  }
  if (copy.held()) TouchCopy(folder_.get(), key, copy);
  // Where there is none, and where its bytes are in memory, the folder itself is asked.
  struct statx found = {};
  (void)statx(folder_.get(), "", AT_EMPTY_PATH | AT_STATX_FORCE_SYNC, STATX_BASIC_STATS, &found);
  if (watches) return;
  MutexLock lock(mutex_);
  probe_took_ = SteadyClock().Now() - start;
}

void FolderCore::RunBackground() {
  const auto writer = [this] {
    MutexLock lock(mutex_);
    return writer_;
  };
  Load(writer());
  if (!writer()) Follow();
  if (writer()) Write();
  Leave();
}

void FolderCore::Started() {
  MutexLock lock(mutex_);
  ++alive_;
}

void FolderCore::Leave() {
  MutexLock lock(mutex_);
  --alive_;
  idle_.notify_all();
}

bool FolderCore::Stop(Nanos at_most) {
  MutexLock lock(mutex_);
  stopping_ = true;
  reads_.notify_all();
  writes_.notify_all();
  idle_.notify_all();
  return idle_.wait_for(lock.native(), std::chrono::nanoseconds(at_most),
                        [this]() NO_THREAD_SAFETY_ANALYSIS { return alive_ == 0; });
}

bool FolderCore::WaitScanned(Nanos at_most) {
  MutexLock lock(mutex_);
  return idle_.wait_for(lock.native(), std::chrono::nanoseconds(at_most),
                        [this]() NO_THREAD_SAFETY_ANALYSIS { return scanned_; });
}

// ---- tiers

size_t FolderCore::Submit(FolderPort& port, std::span<const TierOp> ops, size_t most) {
  MutexLock lock(mutex_);
  const size_t taken = std::min(ops.size(), most - port.in_flight);
  for (const TierOp& op : ops.first(taken)) {
    Job job{.op = op, .port = &port, .copy = {}};
    index_.At(op.key.group).used = true;
    if (op.kind == TierOp::Kind::kGet) (void)index_.Need(op.key);
    if (op.kind != TierOp::Kind::kGet) {
      Enqueue(std::move(job));
      continue;
    }
    if (passed_by_) {
      TierDone done;
      done.tag = op.tag;
      done.passed = true;
      Finish(port, std::move(done));
      continue;
    }
    if (Owed() == 0) silent_since_ = SteadyClock().Now();
    probe_key_ = op.key;
    gets_.push_back(std::move(job));
    reads_.notify_one();
  }
  port.in_flight += taken;
  return taken;
}

size_t FolderCore::Reap(FolderPort& port, std::span<TierDone> out) {
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

void FolderCore::Close(FolderPort& port) {
  MutexLock lock(mutex_);
  const auto ours = [&port](const Job& job) { return job.port == &port; };
  std::erase_if(gets_, ours);
  std::erase_if(others_, [&](const Job& job) NO_THREAD_SAFETY_ANALYSIS {
    if (ours(job)) queued_bytes_ -= job.op.bytes.size();
    return ours(job);
  });
  while (port.running > 0) idle_.wait(lock.native());
}

void FolderCore::Use(uint64_t group, const std::string& path) {
  MutexLock lock(mutex_);
  FolderIndex::Group& named = index_.At(group);
  named.used = true;
  named.sorted = false;
  ++named.users;
  // One that only reads notes it when it becomes the writer.
  const auto noted =
      std::find_if(uses_.begin(), uses_.end(), [&](const auto& use) { return use.first == group; });
  if (noted == uses_.end()) {
    uses_.emplace_back(group, path);
  } else if (!path.empty()) {
    noted->second = path;
  }
  if (writer_ && idle_writer_) writes_.notify_one();
}

void FolderCore::AskedForAll(uint64_t group) {
  MutexLock lock(mutex_);
  index_.At(group).sorted = true;
}

void FolderCore::Unuse(uint64_t group) {
  MutexLock lock(mutex_);
  FolderIndex::Group& named = index_.At(group);
  if (named.users > 0 && --named.users > 0) return;
  named.used = false;
  named.sorted = false;
  index_.ForgetNeeds();
}

bool FolderCore::Has(const TierKey& key) {
  MutexLock lock(mutex_);
  // Who has not named its group is only curious.
  if (index_.Uses(key.group)) return index_.Need(key);
  const CopyEntry* entry = index_.Find(key);
  return entry != nullptr && entry->held();
}

uint32_t FolderCore::StampOfCopy(const TierKey& key) const {
  MutexLock lock(mutex_);
  const CopyEntry* entry = index_.Find(key);
  return entry != nullptr && entry->held() ? entry->stamp : 0;
}

bool FolderCore::HasRoom(uint64_t bytes) const {
  MutexLock lock(mutex_);
  const uint64_t charge = index_.ChargeAtMost(bytes, Packed(bytes));
  if (!writing_ || !scanned_ || bytes > CopyEntry::kLongest || charge + Overhead() > Limit()) {
    return false;
  }
  uint64_t oldest = 0;
  return Fits(charge) || index_.Oldest(&oldest) || index_.HasSpare();
}

uint64_t FolderCore::used_bytes() const {
  MutexLock lock(mutex_);
  return Used();
}

uint64_t FolderCore::Overhead() const {
  const uint64_t bytes = aside_ + unlinking_bytes_;
  if (index_.Extra() == 0) return bytes;
  const uint64_t log = index_.RoundUp(log_bytes_);
  const uint64_t counted = index_.copies() * sizeof(LogRecord);
  return bytes + kFixedBlocks * index_.Extra() + (log > counted ? log - counted : 0);
}

uint64_t FolderCore::ChargeOf(const TierKey& key, uint64_t length, bool packed) {
  // The segment that a packed copy begins is among the fixed blocks.
  return packed && index_.At(key.group).copies > 0 ? index_.Charge(length, true)
                                                   : index_.ChargeAtMost(length, packed);
}

uint64_t FolderCore::BytesFor(uint64_t copies, uint64_t bytes, bool as_files) const {
  constexpr uint64_t kPages = 256;
  MutexLock lock(mutex_);
  const uint64_t block = index_.Extra();
  const uint64_t fixed = Overhead() + block + bytes + copies * sizeof(LogRecord);
  const bool packed = !as_files && copies > 0 && Packed(bytes / copies);
  if (packed) return fixed + (bytes / kSegmentBytes + 1) * block;
  return fixed + copies * (block + block / 2) + std::min(copies, kPages) * block;
}

void FolderCore::SetAside(uint64_t bytes) {
  MutexLock lock(mutex_);
  aside_ = bytes;
}

void FolderCore::SetQuota(uint64_t bytes) {
  MutexLock lock(mutex_);
  quota_ = bytes == 0 ? ~uint64_t{0} : bytes;
}

uint64_t FolderCore::capacity_bytes() const {
  MutexLock lock(mutex_);
  return capacity_bytes_;
}

TierStats FolderCore::stats() const {
  MutexLock lock(mutex_);
  return stats_;
}

Status FolderCore::health() const {
  MutexLock lock(mutex_);
  return health_;
}

std::string FolderCore::note() const {
  MutexLock lock(mutex_);
  return note_;
}

void FolderCore::Enqueue(Job job) {
  const bool before = Enough();
  queued_bytes_ += job.op.bytes.size();
  urgent_ = urgent_ || job.op.kind == TierOp::Kind::kDrop || job.call != nullptr;
  others_.push_back(std::move(job));
  // One wake-up a batch, however many puts it has.
  if (idle_writer_ || (Enough() && !before)) writes_.notify_one();
  idle_writer_ = false;
}

bool FolderCore::Enough() const {
  return urgent_ || queued_bytes_ >= options_.batch_bytes / 2 || others_.size() >= kManyPuts;
}

// ---- gets

TierDone FolderCore::Get(const TierOp& op) {
  TierDone done;
  done.tag = op.tag;
  while (true) {
    CopyEntry copy;
    TierKey key = op.key;
    {
      MutexLock lock(mutex_);
      if (const CopyEntry* entry = index_.Find(key); entry != nullptr) copy = *entry;
      if (!copy.held()) {
        ++stats_.misses;
        return done;
      }
      key.group = index_.IdOf(copy);
    }
    int error = 0;
    const CopyRead read = copy.length == op.bytes.size()
                              ? ReadCopy(folder_.get(), key, copy, op.bytes, &error)
                              : CopyRead::kDamaged;
    MutexLock lock(mutex_);
    CopyEntry* now = index_.Find(key);
    const bool same = now != nullptr && now->Same(copy);
    // Made a file, or put again, while it was being read.
    if (read != CopyRead::kGood && !same && now != nullptr && now->held()) continue;
    done.hit = read == CopyRead::kGood;
    done.crc = copy.crc;
    ++(done.hit ? stats_.hits : stats_.misses);
    if (done.hit && same) now->checked = 1;
    if (done.hit) return done;
    if (read == CopyRead::kFailed) {
      const CopyName name = NameOf(key, copy);
      done.status = ErrnoStatus(error, StrCat("read ", folder(), "/", name.data()));
    }
    // Removed while it was being read: not damaged, only gone.
    if (!same) return done;
    stats_.damaged += read == CopyRead::kDamaged ? 1 : 0;
    // A copy that cannot be read is no better than a damaged one; a lack of descriptors passes.
    const bool passes = error == EMFILE || error == ENFILE || error == ENOMEM;
    if (!(read == CopyRead::kFailed && passes)) DropLater(key);
    return done;
  }
}

void FolderCore::DropLater(const TierKey& key) {
  const CopyEntry copy = *index_.Find(key);
  ClearCopy(key, writer_ ? CopyEntry::kBusy : CopyEntry::kAbsent);
  if (!health_.ok()) capacity_bytes_ = Used();
  if (!writer_) return;
  Job job;
  job.op.kind = TierOp::Kind::kDrop;
  job.op.key = key;
  job.op.key.group = index_.IdOf(copy);
  job.taken = true;
  job.copy = copy;
  Enqueue(std::move(job));
}

void FolderCore::ClearCopy(const TierKey& key, uint32_t length) {
  const CopyEntry* entry = index_.Find(key);
  if (entry != nullptr && entry->held() && entry->linked) {
    WantUnlinked(key, index_.Charge(entry->length, false));
  }
  index_.Clear(key, length);
}

}  // namespace forebay
