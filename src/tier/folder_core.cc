#include "tier/folder_core.h"

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>

namespace forebay {
namespace {

// Puts that are worth a wake-up, however small: a quarter of what a tier has in flight.
constexpr size_t kManyPuts = 128;

}  // namespace

FolderCore::FolderCore(const FolderTierOptions& options, OwnedFd folder, FolderLock lock,
                       Status health)
    : options_(options),
      folder_(std::move(folder)),
      lock_(std::move(lock)),
      writer_(health.ok()),
      writing_(health.ok()),
      health_(std::move(health)),
      capacity_bytes_(options.capacity_bytes) {}

// ---- threads

void FolderCore::RunReader() {
  while (true) {
    Job job;
    {
      MutexLock lock(mutex_);
      while (!stopping_ && gets_.empty()) reads_.wait(lock.native());
      if (stopping_) break;
      job = std::move(gets_.front());
      gets_.pop_front();
      ++job.port->running;
    }
    TierDone done = Get(job.op);
    MutexLock lock(mutex_);
    if (!done.status.ok()) ++stats_.errors;
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

bool FolderCore::Has(const TierKey& key) {
  MutexLock lock(mutex_);
  return index_.Need(key);
}

bool FolderCore::HasRoom(uint64_t bytes) const {
  MutexLock lock(mutex_);
  const uint64_t charge = FolderIndex::Charge(bytes);
  if (!writing_ || !scanned_ || bytes > CopyEntry::kLongest || charge > Limit()) {
    return false;
  }
  uint64_t oldest = 0;
  return index_.used() + reserved_ + charge <= Limit() || index_.Oldest(&oldest) ||
         index_.HasSpare();
}

uint64_t FolderCore::used_bytes() const {
  MutexLock lock(mutex_);
  return index_.used();
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
  urgent_ = urgent_ || job.op.kind == TierOp::Kind::kDrop;
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
  if (read == CopyRead::kFailed) {
    const CopyName name = NameOf(key, copy);
    done.status = ErrnoStatus(error, StrCat("read ", folder(), "/", name.data()));
  }
  MutexLock lock(mutex_);
  done.hit = read == CopyRead::kGood;
  done.crc = copy.crc;
  ++(done.hit ? stats_.hits : stats_.misses);
  if (done.hit) return done;
  // Removed, or put elsewhere, while it was being read: not damaged, only gone.
  const CopyEntry* now = index_.Find(key);
  if (now == nullptr || !now->Same(copy)) return done;
  stats_.damaged += read == CopyRead::kDamaged ? 1 : 0;
  // A copy that cannot be read is no better than a damaged one; a lack of descriptors passes.
  const bool passes = error == EMFILE || error == ENFILE || error == ENOMEM;
  if (!(read == CopyRead::kFailed && passes)) DropLater(key);
  return done;
}

void FolderCore::DropLater(const TierKey& key) {
  const CopyEntry copy = *index_.Find(key);
  index_.Clear(key, writer_ ? CopyEntry::kBusy : CopyEntry::kAbsent);
  if (!health_.ok()) capacity_bytes_ = index_.used();
  if (!writer_) return;
  Job job;
  job.op.kind = TierOp::Kind::kDrop;
  job.op.key = key;
  job.op.key.group = index_.IdOf(copy);
  job.copy = copy;
  Enqueue(std::move(job));
}

}  // namespace forebay
