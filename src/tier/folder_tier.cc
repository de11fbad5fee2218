#include "tier/folder_tier.h"

#include <fcntl.h>
#include <sys/eventfd.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <utility>

#include "base/thread.h"
#include "base/trusted_files.h"
#include "tier/folder_core.h"

namespace forebay {

Status FolderTierOptions::Validate() const {
  if (folder.empty()) return Status(Code::kInvalidArgument, "the cache folder has no name");
  if (threads < 1 || threads > 256) {
    return Status(Code::kInvalidArgument, StrCat("threads is ", threads, "; it takes 1 to 256"));
  }
  if (batch_bytes == 0 || gather < 0 || follow_every < 0 || take_over_every < 0 ||
      retry_every < 0) {
    return Status(Code::kInvalidArgument, "batch_bytes is 0, or a time is negative");
  }
  return Status();
}

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
  uint32_t StampOfCopy(const TierKey& key) const override { return store_->StampOfCopy(key); }
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

FolderStore::FolderStore(std::shared_ptr<FolderCore> core) : core_(std::move(core)) {}

Result<std::shared_ptr<FolderStore>> FolderStore::Open(const FolderTierOptions& options) {
  FOREBAY_RETURN_IF_ERROR(options.Validate());
  Result<OwnedFd> opened = OpenPrivateFolder(options.folder, "cache folder", true, options.group);
  if (!opened) return opened.error();
  OwnedFd folder = *std::move(opened);
  if (HoldsOldFiles(folder.get()) &&
      faccessat(folder.get(), FolderLog::kName, F_OK, AT_SYMLINK_NOFOLLOW) != 0) {
    return Status(Code::kInvalidArgument, OldFilesRemedy(options.folder));
  }
  if (const std::string name = ForeignName(folder.get()); !name.empty()) {
    return Status(Code::kInvalidArgument,
                  StrCat("the cache folder ", options.folder, " has '", name,
                         "', which Forebay did not make and would have to replace; name a folder "
                         "of its own, such as ",
                         options.folder, "/forebay, or remove it"));
  }
  TightenFolder(folder.get());
  Status health;
  const std::string reads = StrCat("the cache folder ", options.folder, " is only read");
  FolderLock lock;
  const int error = lock.Take(folder.get());
  if (error == EWOULDBLOCK) {
    health = Status(Code::kUnavailable, StrCat(reads, ": another process writes to it"));
  } else if (error != 0) {
    health = FolderLock::Describe(error, options.folder, reads);
  } else {
    RemoveLeftovers(folder.get());  // whoever wrote these is dead: it would hold the lock
    (void)MakeTrustedFolder(folder.get(), "writing");
  }
  auto core = std::make_shared<FolderCore>(options, std::move(folder), std::move(lock), health);
  std::shared_ptr<FolderStore> store(new FolderStore(core));
  store->follows_ = error == EWOULDBLOCK;
  for (size_t i = 0; i <= options.threads; ++i) {
    core->Started();
    // Without signals SIGXFSZ becomes an error of the write.
    auto started = StartThread<std::thread>(
        "forebay-tier", [core, i] { i == 0 ? core->RunBackground() : core->RunReader(); });
    if (!started) {
      core->Leave();
      return started.error();
    }
    store->threads_.push_back(*std::move(started));
  }
  return store;
}

FolderStore::~FolderStore() {
  // Tiers hold the store, so nothing is queued. In a forked child the threads are the parent's.
  if (core_->creator() != getpid()) {
    (void)new std::vector<std::thread>(std::move(threads_));
    (void)new std::shared_ptr<FolderCore>(core_);
    return;
  }
  const bool stopped = core_->Stop(2 * kSecond);
  for (std::thread& thread : threads_) stopped ? thread.join() : thread.detach();
  // A thread that hangs in a write may yet finish it: then the folder stays ours.
  if (stopped) core_->Unlock();
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

void FolderStore::Use(uint64_t group, const std::string& path) { core_->Use(group, path); }
void FolderStore::AskedForAll(uint64_t group) { core_->AskedForAll(group); }
void FolderStore::Unuse(uint64_t group) { core_->Unuse(group); }
Nanos FolderStore::SilentSince() const { return core_->SilentSince(); }
void FolderStore::Watch() { core_->Watch(); }
bool FolderStore::passed_by() const { return core_->passed_by(); }
void FolderStore::PassBy(bool pass) { core_->PassBy(pass); }

void FolderStore::StartProbe() {
  // Threads that hang for good are replaced, once each at most.
  constexpr size_t kMostTimes = 2;
  if (!core_->QueueProbe() || threads_.size() > kMostTimes * core_->threads()) return;
  const std::shared_ptr<FolderCore> core = core_;
  core->Started();
  auto started = StartThread<std::thread>("forebay-tier", [core] { core->RunReader(); });
  if (started) {
    threads_.push_back(*std::move(started));
  } else {
    core->Leave();
  }
}

std::optional<Nanos> FolderStore::TakeProbe() { return core_->TakeProbe(); }
bool FolderStore::WaitScanned(Nanos at_most) const { return core_->WaitScanned(at_most); }
bool FolderStore::Has(const TierKey& key) const { return core_->Has(key); }
uint32_t FolderStore::StampOfCopy(const TierKey& key) const { return core_->StampOfCopy(key); }
Status FolderStore::LinkCopy(const TierKey& key, uint64_t length, int dir, const char* name) {
  return core_->LinkCopy(key, length, dir, name);
}
void FolderStore::ReleaseCopy(const TierKey& key) { core_->ReleaseCopy(key); }
std::vector<TierKey> FolderStore::TakeUnlinks() { return core_->TakeUnlinks(); }
Status FolderStore::AdoptFile(const TierKey& key, int dir, const char* name, uint64_t length,
                              uint32_t crc, bool reserved, uint32_t stamp) {
  return core_->AdoptFile(key, {dir, name, length, true, stamp}, crc, reserved);
}
bool FolderStore::Read(const TierKey& key, std::span<std::byte> bytes) {
  return core_->Get({.kind = TierOp::Kind::kGet, .key = key, .bytes = bytes}).hit;
}
Status FolderStore::Reserve(uint64_t length) { return core_->Reserve(length); }
void FolderStore::Unreserve(uint64_t length) { core_->Unreserve(length); }
void FolderStore::Drop(const TierKey& key) { core_->DropNow(key); }
void FolderStore::SetAside(uint64_t bytes) { core_->SetAside(bytes); }
uint64_t FolderStore::used_bytes() const { return core_->used_bytes(); }
uint64_t FolderStore::BytesFor(uint64_t copies, uint64_t bytes, bool as_files) const {
  return core_->BytesFor(copies, bytes, as_files);
}
void FolderStore::SetQuota(uint64_t bytes) { core_->SetQuota(bytes); }

uint64_t FolderStore::capacity_bytes() const { return core_->capacity_bytes(); }
TierStats FolderStore::stats() const { return core_->stats(); }
Status FolderStore::health() const { return core_->health(); }
std::string FolderStore::note() const { return core_->note(); }

}  // namespace forebay
