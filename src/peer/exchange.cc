#include "peer/exchange.h"

#include <sys/eventfd.h>
#include <unistd.h>

#include <cerrno>

#include "base/planted_bug.h"
#include "peer/sample_names.h"
#include "tier/tiered_source.h"

namespace forebay::peer {
namespace {

constexpr uint64_t kUnnamed = 0;

}  // namespace

Result<std::shared_ptr<PeerDataset>> PeerDataset::Make(DatasetId id,
                                                       std::shared_ptr<const Catalog> catalog,
                                                       uint32_t self, Nanos added) {
  OwnedFd event(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (!event.valid()) return ErrnoStatus(errno, "eventfd");
  return std::shared_ptr<PeerDataset>(
      new PeerDataset(id, std::move(catalog), self, added, std::move(event)));
}

PeerDataset::PeerDataset(DatasetId dataset, std::shared_ptr<const Catalog> of, uint32_t node,
                         Nanos now, OwnedFd event)
    : id(dataset),
      catalog(std::move(of)),
      growing(catalog->format() == Format::kGrowing),
      name(growing ? GrowingName(catalog) : TierDataset(*catalog)),
      self(node),
      added(now),
      event_(std::move(event)) {}

Found PeerDataset::LocateLocked(SampleId sample) const {
  if (directory_) return directory_->Locate(sample);
  if (!homes_) return {};
  while (names_.size() <= sample) {
    const auto next = static_cast<SampleId>(names_.size());
    const FileSample named = FileSampleOf(*catalog, next);
    // Of a file that was invalidated and has its size and time again others may have old bytes.
    const bool shared = named.Valid() && !catalog->IsRepeated(catalog->object(next));
    names_.push_back(shared ? HomeName(named) : kUnnamed);
  }
  Found found;
  if (names_[sample] != kUnnamed) found.home = homes_->HomeOf(names_[sample]);
  return found;
}

Choice PeerDataset::ChooseLocked(SampleId sample, bool may_wait) const {
  if (abandoned_) return {};
  if (!PlannedLocked()) {
    return {.to = may_wait ? Choice::To::kWait : Choice::To::kSource,
            .node = kNoNode,
            .held_only = false};
  }
  const Found found = LocateLocked(sample);
  // Nobody tells what it holds of a growing data set: who is home reads at once.
  return peer::Choose(found, self, reach_, may_wait && !(growing && found.home == self));
}

void PeerDataset::Choose(std::span<const SampleId> samples, bool may_wait,
                         std::vector<Choice>* out) const {
  out->clear();
  MutexLock lock(mutex_);
  for (const SampleId sample : samples) out->push_back(ChooseLocked(sample, may_wait));
}

Choice PeerDataset::ChooseOne(SampleId sample, bool may_wait) const {
  MutexLock lock(mutex_);
  return ChooseLocked(sample, may_wait);
}

void PeerDataset::TakeAnswers(std::vector<Answer>* out) {
  if (!has_answers_.load(std::memory_order_acquire)) return;
  MutexLock lock(answers_mutex_);
  has_answers_.store(false, std::memory_order_relaxed);
  uint64_t count;
  (void)!read(event_.get(), &count, sizeof count);
  if (out->empty()) {
    out->swap(answers_);
  } else {
    out->insert(out->end(), answers_.begin(), answers_.end());
    answers_.clear();
  }
}

void PeerDataset::Signal() {
  const uint64_t one = 1;
  (void)!write(event_.get(), &one, sizeof one);
}

void PeerDataset::Deliver(std::span<const Answer> answers) {
  if (answers.empty()) return;
  MutexLock lock(answers_mutex_);
  const bool first = answers_.empty();
  answers_.insert(answers_.end(), answers.begin(), answers.end());
  has_answers_.store(true, std::memory_order_release);
  const bool missed = FOREBAY_PLANTED(kMissedWakeUp) && answers[0].outcome != Outcome::kArrived;
  if (first && !missed) Signal();
}

void PeerDataset::Changed() {
  version_.fetch_add(1, std::memory_order_release);
  MutexLock lock(answers_mutex_);
  has_answers_.store(true, std::memory_order_release);
  Signal();
}

void PeerDataset::SetPlan(Directory directory) {
  {
    MutexLock lock(mutex_);
    plan_digest_.store(directory.plan_digest(), std::memory_order_release);
    directory_.emplace(std::move(directory));
  }
  Changed();
}

void PeerDataset::SetHomes(NamedHomes homes) {
  {
    MutexLock lock(mutex_);
    homes_.emplace(std::move(homes));
  }
  Changed();
}

void PeerDataset::Abandon() {
  {
    MutexLock lock(mutex_);
    abandoned_ = true;
  }
  Changed();
}

std::optional<Directory> PeerDataset::Plan() const {
  MutexLock lock(mutex_);
  return directory_;
}

bool PeerDataset::planned() const {
  MutexLock lock(mutex_);
  return PlannedLocked();
}

void PeerDataset::SetReach(uint32_t node, Reach reach) {
  {
    MutexLock lock(mutex_);
    if (reach_.size() <= node) reach_.resize(node + 1, Reach::kNone);
    if (reach_[node] == reach) return;
    reach_[node] = reach;
  }
  Changed();
}

Found PeerDataset::Locate(SampleId sample) const {
  MutexLock lock(mutex_);
  return LocateLocked(sample);
}

uint32_t PeerDataset::HomeOf(uint64_t home_name) const {
  MutexLock lock(mutex_);
  return homes_ ? homes_->HomeOf(home_name) : kNoNode;
}

std::vector<uint8_t> PeerDataset::GrowingShares() const {
  constexpr SampleId kAtOnce = 4096;  // others wait for the lock, with locks of their own held
  std::vector<uint8_t> shares(catalog->size());
  for (SampleId at = 0; at < shares.size(); at += kAtOnce) {
    MutexLock lock(mutex_);
    for (SampleId s = at; s < shares.size() && s - at < kAtOnce; ++s) {
      const uint32_t home = LocateLocked(s).home;
      const bool here = home == self || home == kNoNode;
      shares[s] = static_cast<uint8_t>(here ? KeepShare::kHome : KeepShare::kReplica);
    }
  }
  return shares;
}

void PeerDataset::Correct(const std::function<void(Directory&)>& change) {
  MutexLock lock(mutex_);
  if (directory_) change(*directory_);
}

void Exchange::WakeIfAsleep(bool* wake) {
  *wake = open_ && asleep_;
  asleep_ = false;
}

bool Exchange::Push(std::vector<Ask>* asks) {
  MutexLock lock(mutex_);
  if (!open_) return false;
  for (Ask& ask : *asks) asks_.push_back(std::move(ask));
  asks->clear();
  bool wake = false;
  WakeIfAsleep(&wake);
  // Under the lock: what it wakes goes only after Close.
  if (wake) wake_();
  return true;
}

void Exchange::Add(std::shared_ptr<PeerDataset> dataset) {
  MutexLock lock(mutex_);
  datasets_.push_back(std::move(dataset));
  bool wake = false;
  WakeIfAsleep(&wake);
  if (wake) wake_();
}

void Exchange::Open(std::function<void()> wake) {
  MutexLock lock(mutex_);
  wake_ = std::move(wake);
  open_ = true;
}

std::vector<Ask> Exchange::Close() {
  MutexLock lock(mutex_);
  open_ = false;
  wake_ = nullptr;
  for (const std::shared_ptr<PeerDataset>& dataset : datasets_) dataset->Abandon();
  return std::exchange(asks_, {});
}

void Exchange::Take(std::vector<Ask>* asks, std::vector<std::shared_ptr<PeerDataset>>* datasets) {
  asks->clear();
  datasets->clear();
  MutexLock lock(mutex_);
  asleep_ = false;
  asks->swap(asks_);
  datasets->swap(datasets_);
}

bool Exchange::MaySleep() {
  MutexLock lock(mutex_);
  asleep_ = asks_.empty() && datasets_.empty();
  return asleep_;
}

}  // namespace forebay::peer
