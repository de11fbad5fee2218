#include "control/memory_store.h"

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <deque>
#include <map>
#include <set>
#include <utility>

#include "base/thread_annotations.h"

namespace forebay::control {

namespace {
constexpr size_t kKeptEvents = 100'000;
}  // namespace

std::string PrefixEnd(std::string_view prefix) {
  std::string end(prefix);
  while (!end.empty() && end.back() == '\xff') end.pop_back();
  if (!end.empty()) end.back() = static_cast<char>(static_cast<unsigned char>(end.back()) + 1);
  return end;
}

struct MemoryStoreState::Rep {
  explicit Rep(Clock& c) : clock(c) {}

  struct Lease {
    Nanos ttl;
    Nanos ends;
    std::set<std::string> keys;
  };
  struct Value {
    std::string value;
    int64_t revision;
    LeaseId lease;
  };

  Clock& clock;
  Mutex mutex;
  std::condition_variable changed;
  bool down GUARDED_BY(mutex) = false;
  bool shared GUARDED_BY(mutex) = false;
  int64_t revision GUARDED_BY(mutex) = 1;
  LeaseId last_lease GUARDED_BY(mutex) = 0;
  std::map<std::string, Value, std::less<>> values GUARDED_BY(mutex);
  std::map<LeaseId, Lease> leases GUARDED_BY(mutex);
  std::deque<StoreEvent> events GUARDED_BY(mutex);  // in the order of revisions
  int64_t forgotten GUARDED_BY(mutex) = 0;          // the last revision with a lost event

  void Remember(StoreEvent event) REQUIRES(mutex) {
    events.push_back(std::move(event));
    if (events.size() <= kKeptEvents) return;
    forgotten = events.front().revision;
    events.pop_front();
  }
  void Erase(const std::string& key) REQUIRES(mutex) {
    const auto at = values.find(key);
    if (at == values.end()) return;
    if (const auto lease = leases.find(at->second.lease); lease != leases.end()) {
      lease->second.keys.erase(key);
    }
    values.erase(at);
    Remember({key, std::nullopt, revision});
  }
  void End(LeaseId id) REQUIRES(mutex) {
    const auto at = leases.find(id);
    const std::set<std::string> keys = std::move(at->second.keys);
    leases.erase(at);
    if (keys.empty()) return;
    ++revision;
    for (const std::string& key : keys) Erase(key);
    changed.notify_all();
  }
  // What every call begins with.
  Status Enter() REQUIRES(mutex) {
    const Nanos now = clock.Now();
    std::vector<LeaseId> ended;
    for (const auto& [id, lease] : leases) {
      if (lease.ends <= now) ended.push_back(id);
    }
    for (const LeaseId id : ended) End(id);
    if (down) return Status(Code::kUnavailable, "the in-memory store is down");
    return Status();
  }
  Status CheckLease(LeaseId lease) REQUIRES(mutex) {
    if (lease == 0 || leases.count(lease) > 0) return Status();
    return Status(Code::kNotFound, StrCat("lease ", lease, " has ended"));
  }
  void Write(const StoreWrite& write) REQUIRES(mutex) {
    const auto at = values.find(write.key);
    if (at != values.end() && at->second.lease != write.lease) {
      if (const auto old = leases.find(at->second.lease); old != leases.end()) {
        old->second.keys.erase(write.key);
      }
    }
    values[write.key] = {write.value, revision, write.lease};
    if (write.lease != 0) leases.at(write.lease).keys.insert(write.key);
    Remember({write.key, write.value, revision});
  }
};

MemoryStoreState::MemoryStoreState(Clock& clock) : rep_(std::make_shared<Rep>(clock)) {}
MemoryStoreState::~MemoryStoreState() = default;

void MemoryStoreState::SetDown(bool down) {
  MutexLock lock(rep_->mutex);
  rep_->down = down;
}

void MemoryStoreState::SetShared(bool shared) {
  MutexLock lock(rep_->mutex);
  rep_->shared = shared;
}

bool MemoryStore::shared() const {
  MutexLock lock(rep_->mutex);
  return rep_->shared;
}

Status MemoryStore::PutMany(std::span<const StoreWrite> writes, const Fence* fence) {
  MutexLock lock(rep_->mutex);
  FOREBAY_RETURN_IF_ERROR(rep_->Enter());
  if (fence) {
    const auto at = rep_->values.find(fence->election);
    if (at == rep_->values.end() || at->second.lease != fence->lease) {
      return Status(Code::kCancelled, StrCat(fence->election, " is led by another"));
    }
  }
  if (writes.empty()) return Status();
  for (const StoreWrite& write : writes) FOREBAY_RETURN_IF_ERROR(rep_->CheckLease(write.lease));
  ++rep_->revision;
  for (const StoreWrite& write : writes) rep_->Write(write);
  rep_->changed.notify_all();
  return Status();
}

Result<StoreSnapshot> MemoryStore::Range(std::string_view prefix) {
  MutexLock lock(rep_->mutex);
  FOREBAY_RETURN_IF_ERROR(rep_->Enter());
  StoreSnapshot snapshot;
  snapshot.revision = rep_->revision;
  for (auto at = rep_->values.lower_bound(prefix);
       at != rep_->values.end() && at->first.starts_with(prefix); ++at) {
    snapshot.entries.push_back(
        {at->first, at->second.value, at->second.revision, at->second.lease});
  }
  return snapshot;
}

Status MemoryStore::Delete(std::string_view key) {
  MutexLock lock(rep_->mutex);
  FOREBAY_RETURN_IF_ERROR(rep_->Enter());
  if (rep_->values.find(key) == rep_->values.end()) return Status();
  ++rep_->revision;
  rep_->Erase(std::string(key));
  rep_->changed.notify_all();
  return Status();
}

Result<LeaseId> MemoryStore::GrantLease(Nanos ttl) {
  MutexLock lock(rep_->mutex);
  FOREBAY_RETURN_IF_ERROR(rep_->Enter());
  const LeaseId id = ++rep_->last_lease;
  rep_->leases[id] = {ttl, rep_->clock.Now() + ttl, {}};
  return id;
}

Status MemoryStore::KeepAlive(LeaseId lease) {
  MutexLock lock(rep_->mutex);
  FOREBAY_RETURN_IF_ERROR(rep_->Enter());
  const auto at = rep_->leases.find(lease);
  if (at == rep_->leases.end()) {
    return Status(Code::kNotFound, StrCat("lease ", lease, " has ended"));
  }
  at->second.ends = rep_->clock.Now() + at->second.ttl;
  return Status();
}

Status MemoryStore::Revoke(LeaseId lease) {
  MutexLock lock(rep_->mutex);
  FOREBAY_RETURN_IF_ERROR(rep_->Enter());
  if (rep_->leases.count(lease) > 0) rep_->End(lease);
  return Status();
}

class MemoryWatch final : public StoreWatch {
 public:
  MemoryWatch(std::shared_ptr<MemoryStoreState::Rep> rep, std::string_view prefix, int64_t next)
      : rep_(std::move(rep)), prefix_(prefix), next_(next) {}

  Result<std::vector<StoreEvent>> Poll(Nanos wait) override {
    const auto until = std::chrono::steady_clock::now() + std::chrono::nanoseconds(wait);
    MutexLock lock(rep_->mutex);
    while (true) {
      FOREBAY_RETURN_IF_ERROR(rep_->Enter());
      if (rep_->forgotten >= next_) {
        return Status(Code::kChanged,
                      StrCat("events from revision ", next_, " on are no longer known"));
      }
      std::vector<StoreEvent> found;
      auto at = std::lower_bound(
          rep_->events.begin(), rep_->events.end(), next_,
          [](const StoreEvent& event, int64_t revision) { return event.revision < revision; });
      for (; at != rep_->events.end(); ++at) {
        if (at->key.starts_with(prefix_)) found.push_back(*at);
      }
      next_ = std::max(next_, rep_->revision + 1);
      if (!found.empty()) return found;
      if (std::chrono::steady_clock::now() >= until) return found;
      // Leases end by the clock, without a notice: look from time to time.
      const auto look = std::chrono::steady_clock::now() + std::chrono::milliseconds(20);
      rep_->changed.wait_until(lock.native(), std::min(until, look));
    }
  }

 private:
  const std::shared_ptr<MemoryStoreState::Rep> rep_;  // the store may go before the watch
  const std::string prefix_;
  int64_t next_;
};

Result<std::unique_ptr<StoreWatch>> MemoryStore::Watch(std::string_view prefix, int64_t revision) {
  MutexLock lock(rep_->mutex);
  FOREBAY_RETURN_IF_ERROR(rep_->Enter());
  return std::unique_ptr<StoreWatch>(std::make_unique<MemoryWatch>(rep_, prefix, revision));
}

Result<Leadership> MemoryStore::Campaign(std::string_view election, std::string_view name,
                                         LeaseId lease) {
  MutexLock lock(rep_->mutex);
  FOREBAY_RETURN_IF_ERROR(rep_->Enter());
  const auto at = rep_->values.find(election);
  if (at != rep_->values.end()) return Leadership{at->second.value, at->second.lease};
  if (lease == 0) return Status(Code::kInvalidArgument, "a campaign needs a lease");
  FOREBAY_RETURN_IF_ERROR(rep_->CheckLease(lease));
  ++rep_->revision;
  rep_->Write({std::string(election), std::string(name), lease});
  rep_->changed.notify_all();
  return Leadership{std::string(name), lease};
}

Result<std::optional<Leadership>> MemoryStore::Leader(std::string_view election) {
  MutexLock lock(rep_->mutex);
  FOREBAY_RETURN_IF_ERROR(rep_->Enter());
  const auto at = rep_->values.find(election);
  if (at == rep_->values.end()) return std::optional<Leadership>();
  return std::optional<Leadership>({at->second.value, at->second.lease});
}

Status MemoryStore::Compact(int64_t revision) {
  MutexLock lock(rep_->mutex);
  FOREBAY_RETURN_IF_ERROR(rep_->Enter());
  const int64_t last = std::min(revision, rep_->revision) - 1;
  rep_->forgotten = std::max(rep_->forgotten, last);
  while (!rep_->events.empty() && rep_->events.front().revision <= last) rep_->events.pop_front();
  return Status();
}

}  // namespace forebay::control
