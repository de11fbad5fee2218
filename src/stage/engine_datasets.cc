// Data sets of the engine that come and go.
#include <algorithm>
#include <chrono>
#include <utility>

#include "stage/engine.h"

namespace forebay {
namespace {

constexpr Nanos kAddSlice = 100 * kMilli;  // longest single sleep
// Closed data sets whose samples stay in memory: so many, of so many samples, for so long. Their
// tables stay, too, and giving them up takes the lock for a moment.
constexpr size_t kMostParked = 8;
constexpr size_t kMostParkedSamples = 1'000'000;
constexpr Nanos kParkedFor = 300 * kSecond;
// Entries that are looked at under the lock at a time.
constexpr size_t kGiveBackAtOnce = 1 << 16;
// Other threads may still ask for a shared data set by its number for so long.
constexpr Nanos kNumberRests = 10 * kSecond;
// For a data set that is being closed to be closed, before another one takes its place.
constexpr Nanos kCloseWait = 200 * kMilli;

}  // namespace

std::optional<DatasetId> Engine::UseOrReserve(const std::string& key, const Catalog& catalog,
                                              Adding* adding) {
  using Use = DatasetState::Use;
  const uint64_t hash = adding->stamps_hash;
  const Nanos closed_by = SteadyClock().Now() + kCloseWait;
  MutexLock lock(mutex_);
  while (!key.empty()) {
    auto same = datasets_.end();
    bool closing = false;
    for (auto it = datasets_.begin(); it != datasets_.end(); ++it) {
      // Other nodes are leaving one that is shared and closing: it is made anew.
      if (it->key != key || it->use == Use::kFree || it->use == Use::kGivingBack || it->retiring) {
        continue;
      }
      const bool others = it->use != Use::kAdding && IsOfOthers(*it, catalog, hash);
      if (others && it->use != Use::kParked) {
        const auto id = static_cast<DatasetId>(it - datasets_.begin());
        closing = closing || (it->use == Use::kClosing && !HasStreams(id));
        continue;
      }
      same = it;
      if (!others) break;
    }
    if (same == datasets_.end() && closing && SteadyClock().Now() < closed_by) {
      added_.wait_for(lock.native(), std::chrono::nanoseconds(kAddSlice));
      continue;
    }
    if (same == datasets_.end()) break;
    const auto id = static_cast<DatasetId>(same - datasets_.begin());
    if (same->use == Use::kAdding) {
      added_.wait_for(lock.native(), std::chrono::nanoseconds(kAddSlice));
      continue;
    }
    if (same->use == Use::kParked) {
      if (same->catalog->size() != catalog.size() ||
          same->catalog->object_count() != catalog.object_count()) {
        break;
      }
      same->use = Use::kAdding;
      adding->number = id;
      adding->revived = true;
      return std::nullopt;
    }
    same->use = Use::kOpen;
    ++same->users;
    TakeStamps(*same, catalog, hash);
    return id;
  }
  const Nanos now = SteadyClock().Now();
  const auto free = std::find_if(datasets_.begin(), datasets_.end(), [&](const DatasetState& d) {
    return d.use == Use::kFree && d.free_at <= now;
  });
  adding->number = static_cast<DatasetId>(free - datasets_.begin());
  if (free == datasets_.end()) datasets_.emplace_back();
  DatasetState& state = datasets_[adding->number];
  state.use = Use::kAdding;
  state.key = key;
  return std::nullopt;
}

void Engine::Unreserve(const Adding& adding) {
  MutexLock lock(mutex_);
  DatasetState& state = datasets_[adding.number];
  early_shares_.erase(adding.number);
  state.key.clear();
  scheduler_.ReturnAside(std::exchange(state.source_tables, {}));
  if (adding.revived) {
    state.use = DatasetState::Use::kGivingBack;
    state.give_up_at = 0;
    WakeLoop();
  } else {
    scheduler_.ReturnAside(std::exchange(state.tables, {}));
    state.use = DatasetState::Use::kFree;
    state.free_at = SteadyClock().Now() + (has_peers_.load() ? kNumberRests : 0);
  }
  added_.notify_all();
}

Status Engine::CloseDataset(DatasetId id) {
  FOREBAY_RETURN_IF_ERROR(Alive());
  MutexLock lock(mutex_);
  if (id >= datasets_.size() || datasets_[id].use != DatasetState::Use::kOpen) {
    return Status(Code::kInvalidArgument,
                  StrCat("data set ", id, " does not exist, or was closed"));
  }
  DatasetState& dataset = datasets_[id];
  if (--dataset.users > 0) return Status();
  dataset.use = DatasetState::Use::kClosing;
  WakeLoop();
  return Status();
}

bool Engine::IsOfOthers(const DatasetState& dataset, const Catalog& catalog, uint64_t stamps_hash) {
  const auto& then = dataset.stamps;
  const auto& now = catalog.stamps();
  if (then == nullptr || now == nullptr || then == now) return false;
  if (stamps_hash != 0 && dataset.stamps_hash == stamps_hash) return false;
  if (then->size() != now->size()) return true;
  // Nor would it look before it reads a copy.
  if (dataset.use != DatasetState::Use::kParked && dataset.catalog->LacksStamps() &&
      dataset.tiered != nullptr) {
    return true;
  }
  for (size_t o = 0; o < now->size(); ++o) {
    if ((*then)[o] != 0 && (*now)[o] != 0 && (*then)[o] != (*now)[o]) return true;
  }
  return false;
}

void Engine::TakeStamps(DatasetState& dataset, const Catalog& catalog, uint64_t stamps_hash) {
  if (catalog.stamps() == nullptr || !dataset.catalog->LacksStamps()) return;
  for (size_t o = 0; o < dataset.stamps->size(); ++o) {
    if ((*dataset.stamps)[o] == 0) (*dataset.stamps)[o] = (*catalog.stamps())[o];
  }
  dataset.stamps_hash = stamps_hash;
}

bool Engine::IsOlder(DatasetState& dataset, SampleId sample, uint32_t stamp) {
  if (dataset.stamps == nullptr || !dataset.catalog->LacksStamps()) return false;
  uint32_t& known = (*dataset.stamps)[dataset.catalog->object(sample)];
  // It was begun before a look that found another one, or the file has changed since that: reading
  // it once more is right in both cases.
  if (known == stamp || (WasYoung(known) && (known | 1) == stamp)) return false;
  dataset.stamps_hash = 0;
  return std::exchange(known, known == 0 ? stamp : 0) != 0;
}

bool Engine::HasStreams(DatasetId dataset) const {
  return std::any_of(streams_.begin(), streams_.end(), [&](const StreamState& stream) {
    return stream.open && !stream.options.shape.serving && stream.options.shape.dataset == dataset;
  });
}

void Engine::ForgetOthers(DatasetId id, const DatasetState& dataset, const Catalog& catalog) {
  const auto& then = dataset.stamps;
  const auto& now = catalog.stamps();
  if (then == nullptr || now == nullptr) return;
  for (SampleId s = 0; s < catalog.size(); ++s) {
    const ObjectId o = catalog.object(s);
    if (MayDiffer((*then)[o], (*now)[o])) scheduler_.residency().ForgetParked(id, s);
  }
}

std::optional<DatasetId> Engine::UseDataset(const std::string& key, uint64_t stamps) {
  if (!Alive().ok()) return std::nullopt;
  MutexLock lock(mutex_);
  for (DatasetId id = 0; id < datasets_.size(); ++id) {
    DatasetState& dataset = datasets_[id];
    if (!IsOpen(id) || dataset.retiring || dataset.key != key) continue;
    if (stamps != 0 && dataset.stamps_hash != stamps) continue;
    dataset.use = DatasetState::Use::kOpen;
    ++dataset.users;
    return id;
  }
  return std::nullopt;
}

bool Engine::KnowsDataset(const std::string& key, bool parked) const {
  using Use = DatasetState::Use;
  if (!Alive().ok()) return false;
  MutexLock lock(mutex_);
  return std::any_of(datasets_.begin(), datasets_.end(), [&](const DatasetState& d) {
    const bool open = d.use == Use::kOpen || d.use == Use::kClosing || d.use == Use::kAdding;
    return d.key == key && !d.retiring && (open || (parked && d.use == Use::kParked));
  });
}

void Engine::RenameDataset(const std::string& key, const std::string& to) {
  if (!Alive().ok() || KnowsDataset(to, true)) return;
  MutexLock lock(mutex_);
  for (DatasetId id = 0; id < datasets_.size(); ++id) {
    const bool there = IsOpen(id) || datasets_[id].use == DatasetState::Use::kParked;
    if (there && datasets_[id].key == key) datasets_[id].key = to;
  }
}

size_t Engine::open_datasets() const {
  MutexLock lock(mutex_);
  return static_cast<size_t>(
      std::count_if(datasets_.begin(), datasets_.end(), [](const DatasetState& dataset) {
        return dataset.use != DatasetState::Use::kFree && dataset.use != DatasetState::Use::kParked;
      }));
}

bool Engine::MayRetire(DatasetId id, const DatasetState& dataset) const {
  if (dataset.use != DatasetState::Use::kClosing || dataset.calls != 0 || dataset.flying != 0) {
    return false;
  }
  if (!dataset.to_drop.empty() || !dataset.dropping.empty() || scheduler_.stores().AnyOf(id)) {
    return false;
  }
  // Whoever asked may have gone before there was a request to spare for it.
  if (scheduler_.reads().AskedOf(id)) return false;
  const auto reads_it = [&](const ReadAction& read) { return read.dataset == id; };
  if (std::any_of(outbox_.begin(), outbox_.end(), reads_it)) return false;
  for (const StreamState& stream : streams_) {
    if (stream.open && stream.options.shape.dataset == id) return false;
  }
  const auto& leases = scheduler_.leases().leases();
  return std::none_of(leases.begin(), leases.end(),
                      [&](const auto& lease) { return lease.second.dataset == id; });
}

void Engine::RetireUnused(Nanos now) {
  using Use = DatasetState::Use;
  std::vector<Retired> gone;  // destroyed after the lock
  std::vector<DatasetId> leaving;
  {
    MutexLock lock(mutex_);
    size_t parked = 0;
    for (const DatasetState& dataset : datasets_) parked += dataset.use == Use::kParked ? 1 : 0;
    for (DatasetId id = 0; id < datasets_.size(); ++id) {
      DatasetState& dataset = datasets_[id];
      if (dataset.use == Use::kClosing && dataset.shared && !dataset.retiring && !HasStreams(id)) {
        dataset.retiring = true;
        dataset.source->Retire();  // other nodes' streams over it end soon
      }
      if (MayRetire(id, dataset)) {
        Retire(id, dataset, now, &gone);
        added_.notify_all();
        parked += dataset.use == Use::kParked ? 1 : 0;
      }
      if (dataset.use == Use::kGivingBack) leaving.push_back(id);
    }
    // Too many, too old, or nothing left of them.
    for (DatasetId id = 0; id < datasets_.size(); ++id) {
      DatasetState& dataset = datasets_[id];
      if (dataset.use != Use::kParked) continue;
      const bool oldest = std::none_of(datasets_.begin(), datasets_.end(), [&](const auto& other) {
        return other.use == Use::kParked && other.parked_at < dataset.parked_at;
      });
      if ((parked > kMostParked && oldest) || now - dataset.parked_at > kParkedFor ||
          scheduler_.residency().dataset(id).kept_bytes == 0) {
        dataset.use = Use::kGivingBack;
        leaving.push_back(id);
        --parked;
      }
    }
  }
  for (const DatasetId id : leaving) {
    bool done = false;
    while (!done) {
      MutexLock lock(mutex_);
      // Whoever needed its room may have been here in between.
      done = datasets_[id].use != Use::kGivingBack ||
             GiveBack(id, datasets_[id], kGiveBackAtOnce, now, &gone);
    }
  }
}

void Engine::Retire(DatasetId id, DatasetState& dataset, Nanos now, std::vector<Retired>* gone) {
  Residency& residency = scheduler_.residency();
  remote_.Set(id, nullptr);
  if (dataset.sizer != nullptr) dataset.sizer->Detach();
  const bool sized = residency.dataset(id).unsized == 0;
  Retired& out = gone->emplace_back();
  out.source = std::move(dataset.source);
  dataset.tiered = nullptr;
  dataset.sizer = nullptr;
  dataset.retiring = false;
  scheduler_.ReturnAside(std::exchange(dataset.source_tables, {}));
  dataset.dropping.clear();
  const auto first = failures_.lower_bound({id, 0});
  failures_.erase(first, failures_.lower_bound({id + 1, 0}));
  residency.Park(id);
  dataset.give_up_at = 0;
  const bool stays = !dataset.key.empty() && dataset.growing == nullptr && sized &&
                     dataset.catalog->size() <= kMostParkedSamples &&
                     // What memory has of changed files is not of the version that the key names.
                     dataset.changed.empty() && residency.dataset(id).kept_bytes > 0;
  dataset.use = stays ? DatasetState::Use::kParked : DatasetState::Use::kGivingBack;
  dataset.parked_at = now;
  out.catalog = dataset.catalog;
}

bool Engine::GiveBack(DatasetId id, DatasetState& dataset, size_t most, Nanos now,
                      std::vector<Retired>* gone) {
  Residency& residency = scheduler_.residency();
  if (!residency.GiveUpParked(id, &dataset.give_up_at, most)) return false;
  Retired& out = gone->emplace_back();
  out.tables = residency.Remove(id);
  out.catalog = std::move(dataset.catalog);
  out.growing = std::move(dataset.growing);
  scheduler_.ReturnAside(dataset.tables);
  const bool shared = dataset.shared;
  dataset = DatasetState();
  dataset.free_at = now + (shared ? kNumberRests : 0);
  Collect();
  return true;
}

bool Engine::GiveBackParked(std::vector<Retired>* gone) {
  for (DatasetId id = 0; id < datasets_.size(); ++id) {
    DatasetState& dataset = datasets_[id];
    if (dataset.use != DatasetState::Use::kParked) continue;
    return GiveBack(id, dataset, dataset.catalog->size(), SteadyClock().Now(), gone);
  }
  return false;
}

}  // namespace forebay
