// What the engine's loop (PeerSource) and the peer thread (Node) hand to each other.
//
// A PeerDataset knows where the samples of one data set are, and has the answers for its source.
// Those of a fixed data set are planned by number (Directory), those of a growing one by name
// (NamedHomes). The Exchange has the asks of all sources, and lives on when the peer thread is
// gone: then every ask fails at once and the sources read for themselves.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "base/clock.h"
#include "base/owned.h"
#include "base/status.h"
#include "base/thread_annotations.h"
#include "catalog/catalog.h"
#include "core/directory.h"
#include "core/named_homes.h"
#include "core/route.h"
#include "core/scheduler.h"
#include "metrics/registry.h"

namespace forebay::peer {

// kArrived: with the bytes that its sender had. kMoved: refused by who has another plan of homes.
enum class Outcome : uint8_t { kArrived, kTimeout, kRefused, kLost, kCorrupt, kMoved };

struct Answer {
  uint32_t slot = 0;  // of the source
  Outcome outcome = Outcome::kLost;
  uint32_t crc = 0;  // of the sample; kArrived
};

// Safe for concurrent use by multiple threads.
class PeerDataset {
 public:
  static Result<std::shared_ptr<PeerDataset>> Make(DatasetId id,
                                                   std::shared_ptr<const Catalog> catalog,
                                                   uint32_t self, Nanos added);

  // Constant.
  const DatasetId id;
  const std::shared_ptr<const Catalog> catalog;
  const bool growing;
  const uint64_t name;  // TierDataset, or GrowingName
  const uint32_t self;
  const Nanos added;

  // ---- for the source ----
  // Where each of `samples` goes; `may_wait` as for Choose. Before the first plan: kWait, or
  // kSource where waiting is over.
  void Choose(std::span<const SampleId> samples, bool may_wait, std::vector<Choice>* out) const
      EXCLUDES(mutex_);
  Choice ChooseOne(SampleId sample, bool may_wait) const EXCLUDES(mutex_);
  // Appends; resets the descriptor.
  void TakeAnswers(std::vector<Answer>* out) EXCLUDES(answers_mutex_);
  // Readable when there are answers, or when what Choose says may have changed.
  int event_fd() const { return event_.get(); }
  // Counts changes of plan and reach.
  uint64_t version() const { return version_.load(std::memory_order_acquire); }

  // ---- for the peer thread ----
  void Deliver(std::span<const Answer> answers) EXCLUDES(answers_mutex_);
  void SetPlan(Directory directory) EXCLUDES(mutex_);
  void SetHomes(NamedHomes homes) EXCLUDES(mutex_);
  std::optional<Directory> Plan() const EXCLUDES(mutex_);
  bool planned() const EXCLUDES(mutex_);
  // Digest of the plan by which homes are chosen; 0: by hash, or not at all yet.
  uint64_t plan_digest() const { return plan_digest_.load(std::memory_order_acquire); }
  void SetReach(uint32_t node, Reach reach) EXCLUDES(mutex_);
  Found Locate(SampleId sample) const EXCLUDES(mutex_);
  // Growing ones, by HomeName.
  uint32_t HomeOf(uint64_t name) const EXCLUDES(mutex_);
  // What the node's tiers may keep, by sample that there is now.
  std::vector<uint8_t> GrowingShares() const EXCLUDES(mutex_);
  // Applies `change` to the plan, where there is one.
  void Correct(const std::function<void(Directory&)>& change) EXCLUDES(mutex_);
  // There are no peers any more: everything is read from the source.
  void Abandon() EXCLUDES(mutex_);
  // Nobody on this node reads it any more: other nodes are to leave it.
  void Leave() { leaving_.store(true, std::memory_order_release); }
  bool leaving() const { return leaving_.load(std::memory_order_acquire); }
  // The source is gone.
  void Retire() { retired_.store(true, std::memory_order_release); }
  bool retired() const { return retired_.load(std::memory_order_acquire); }

 private:
  PeerDataset(DatasetId id, std::shared_ptr<const Catalog> catalog, uint32_t self, Nanos added,
              OwnedFd event);
  bool PlannedLocked() const REQUIRES(mutex_) { return directory_ || homes_; }
  Found LocateLocked(SampleId sample) const REQUIRES(mutex_);
  Choice ChooseLocked(SampleId sample, bool may_wait) const REQUIRES(mutex_);
  void Changed();
  void Signal();

  const OwnedFd event_;
  mutable Mutex mutex_;
  std::optional<Directory> directory_ GUARDED_BY(mutex_);
  std::optional<NamedHomes> homes_ GUARDED_BY(mutex_);
  // Growing: HomeName by sample, as far as somebody has asked; kUnnamed: others cannot be asked.
  mutable std::vector<uint64_t> names_ GUARDED_BY(mutex_);
  std::vector<Reach> reach_ GUARDED_BY(mutex_);
  bool abandoned_ GUARDED_BY(mutex_) = false;
  std::atomic<uint64_t> version_{1};
  std::atomic<uint64_t> plan_digest_{0};  // of directory_, for who need not lock
  std::atomic<bool> leaving_{false};
  std::atomic<bool> retired_{false};
  Mutex answers_mutex_;
  std::vector<Answer> answers_ GUARDED_BY(answers_mutex_);
  std::atomic<bool> has_answers_{false};  // a hint, so that looking for none takes no lock
};

struct Ask {
  std::shared_ptr<PeerDataset> dataset;  // shared: the source may go while the ask is under way
  uint32_t slot = 0;
  uint32_t node = 0;
  SampleId sample = 0;
  bool held_only = false;
  bool urgent = false;
  std::span<std::byte> dest;
  Nanos start = 0;
  uint64_t plan = 0;  // PeerDataset::plan_digest when the node was chosen
};

// Safe for concurrent use by multiple threads.
class Exchange {
 public:
  Exchange(Nanos join, Nanos request, bool coordinated, Metric& avoided_total)
      : join_wait(join), request_wait(request), coordinate(coordinated), avoided(avoided_total) {}
  const Nanos join_wait;
  const Nanos request_wait;
  const bool coordinate;
  Metric& avoided;  // reads that went to the source because the peer was slow

  // False: the peer thread is gone, nothing was taken.
  bool Push(std::vector<Ask>* asks) EXCLUDES(mutex_);
  void Add(std::shared_ptr<PeerDataset> dataset) EXCLUDES(mutex_);

  // ---- for the peer thread ----
  // `wake` is called by any thread, when the peer thread sleeps and there is work.
  void Open(std::function<void()> wake) EXCLUDES(mutex_);
  // Returns what was asked and not taken.
  std::vector<Ask> Close() EXCLUDES(mutex_);
  void Take(std::vector<Ask>* asks, std::vector<std::shared_ptr<PeerDataset>>* datasets)
      EXCLUDES(mutex_);
  // True: nothing is there; from now on work wakes the peer thread.
  bool MaySleep() EXCLUDES(mutex_);

 private:
  void WakeIfAsleep(bool* wake) REQUIRES(mutex_);

  Mutex mutex_;
  std::vector<Ask> asks_ GUARDED_BY(mutex_);
  std::vector<std::shared_ptr<PeerDataset>> datasets_ GUARDED_BY(mutex_);
  std::function<void()> wake_ GUARDED_BY(mutex_);
  bool open_ GUARDED_BY(mutex_) = false;
  bool asleep_ GUARDED_BY(mutex_) = false;
};

}  // namespace forebay::peer
