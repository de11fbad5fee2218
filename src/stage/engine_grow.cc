// Data sets of the engine that grow, and files that change.
#include <algorithm>
#include <chrono>

#include "stage/engine.h"

namespace forebay {
namespace {

constexpr Nanos kSlice = 100 * kMilli;  // longest single sleep
// For a folder to end the copies that it has begun, and to drop them.
constexpr Nanos kDropWait = 10 * kSecond;

}  // namespace

Result<DatasetId> Engine::AddGrowing(std::shared_ptr<Catalog> catalog,
                                     std::unique_ptr<Source> source) {
  if (catalog->format() != Format::kGrowing) {
    return Status(Code::kInvalidArgument, StrCat("the data set of ", catalog->root(),
                                                 " does not grow: AddDataset takes it"));
  }
  return Add(catalog, catalog, std::move(source), nullptr, {});
}

Result<Engine::DatasetState*> Engine::FindGrowing(DatasetId dataset) {
  if (!IsOpen(dataset) || datasets_[dataset].growing == nullptr) {
    return Status(Code::kInvalidArgument,
                  StrCat("data set ", dataset, " does not exist, or does not grow"));
  }
  return &datasets_[dataset];
}

Status Engine::AppendSamples(DatasetId id, std::span<const NewFile> files,
                             std::vector<Appended>* out) {
  FOREBAY_RETURN_IF_ERROR(Alive());
  MutexLock lock(mutex_);
  const Result<DatasetState*> found = FindGrowing(id);
  if (!found) return found.error();
  DatasetState& dataset = **found;
  ++dataset.calls;
  const Status paid = PayForSamples(id, dataset, files, lock);
  --dataset.calls;
  FOREBAY_RETURN_IF_ERROR(paid);
  const auto before = static_cast<SampleId>(dataset.growing->size());
  Status status;
  for (const NewFile& file : files) {
    if (const std::optional<Appended> known = FindSamples(id, dataset, file)) {
      out->push_back(*known);
      continue;
    }
    Result<Appended> appended = dataset.growing->Append(file);
    if (!appended) {
      status = appended.error();
      break;
    }
    out->push_back(*appended);
  }
  TakeOverSamples(id, dataset, before);
  return status;
}

std::optional<Appended> Engine::FindSamples(DatasetId id, const DatasetState& dataset,
                                            const NewFile& file) const {
  const std::optional<Appended> found = dataset.growing->Find(file);
  // Those of this call are in the catalog only.
  if (!found || found->first >= scheduler_.residency().dataset(id).entries.size()) return found;
  for (uint32_t i = 0; i < found->count; ++i) {
    if (scheduler_.residency().dataset(id).Dead(found->first + i)) return std::nullopt;
  }
  return found;
}

uint8_t Engine::ShareOfNew(const DatasetState& dataset, SampleId sample) {
  const bool elsewhere = dataset.source->Elsewhere(sample) >= 0;
  return static_cast<uint8_t>(elsewhere ? KeepShare::kReplica : KeepShare::kHome);
}

Status Engine::PayForSamples(DatasetId id, DatasetState& dataset, std::span<const NewFile> files,
                             MutexLock& lock) {
  uint64_t more = 0;
  for (const NewFile& file : files) more += FindSamples(id, dataset, file) ? 0 : file.samples();
  const uint64_t each = TableBytes(true, dataset.tiered != nullptr, dataset.shared);
  // The wait for room lets others in, who append, too.
  while (dataset.growing->size() + more > dataset.paid_samples) {
    const uint64_t missing = dataset.growing->size() + more - dataset.paid_samples;
    const uint64_t step = GrowthStep(missing);
    std::vector<ArenaAllocator::Block> blocks;
    FOREBAY_RETURN_IF_ERROR(SetTablesAside(step, step * each, nullptr, &blocks, lock));
    dataset.tables.insert(dataset.tables.end(), blocks.begin(), blocks.end());
    dataset.paid_samples += step;
  }
  return Status();
}

void Engine::TakeOverSamples(DatasetId id, DatasetState& dataset, SampleId before) {
  const Catalog& catalog = *dataset.catalog;
  const auto end = static_cast<SampleId>(catalog.size());
  if (end == before) return;
  std::vector<uint32_t> lengths;
  lengths.reserve(end - before);
  for (SampleId s = before; s < end; ++s) lengths.push_back(catalog.length(s));
  std::vector<uint8_t> shares;
  for (SampleId s = before; s < end && dataset.shared; ++s) {
    shares.push_back(ShareOfNew(dataset, s));
  }
  (void)scheduler_.AppendSamples(id, lengths, 0, shares);  // their tables are paid for
  dataset.mean_bytes = catalog.total_bytes() / end;
  if (dataset.tiered == nullptr) return;
  scheduler_.residency().dataset(id).tier =
      ShapeOf(*dataset.tiered, catalog.total_bytes(), end, true);
  for (SampleId s = before; s < end; ++s) {
    if (dataset.tiered->Holds(s)) scheduler_.residency().SetInTier(id, s, true);
  }
}

Status Engine::Invalidate(DatasetId id, SampleId first, uint32_t count) {
  FOREBAY_RETURN_IF_ERROR(Alive());
  MutexLock lock(mutex_);
  const Result<DatasetState*> found = FindGrowing(id);
  if (!found) return found.error();
  DatasetState& dataset = **found;
  const size_t size = dataset.catalog->size();
  if (first > size || count > size - first) {
    return Status(Code::kInvalidArgument, StrCat("samples ", first, " to ", uint64_t{first} + count,
                                                 " are not all in the data set of ", size));
  }
  const SampleId end = first + count;
  if (InvalidateRange(id, dataset, first, end)) WakeLoop();
  Collect();
  SignalProgress();
  NotifyDue();
  const auto gone = [&]() NO_THREAD_SAFETY_ANALYSIS {
    const auto next = dataset.dropping.lower_bound(first);
    return next == dataset.dropping.end() || *next >= end;
  };
  const Nanos until = SteadyClock().Now() + kDropWait;
  ++dataset.calls;
  // A folder that is left answers some time: who waits here may hold up others.
  while (!gone() && !scheduler_.tier_left() && SteadyClock().Now() < until) {
    dropped_.wait_for(lock.native(), std::chrono::nanoseconds(kSlice), gone);
  }
  --dataset.calls;
  if (gone()) return Status();
  return Status(Code::kUnavailable,
                StrCat("the cache folder ", options_.cache_folder, " has not dropped its copy of ",
                       dataset.catalog->ObjectPath(dataset.catalog->object(first)),
                       ": its disk does not answer"));
}

// True: there are copies to drop.
bool Engine::InvalidateRange(DatasetId id, DatasetState& dataset, SampleId first, SampleId end) {
  bool drops = false;
  for (SampleId s = first; s < end; ++s) {
    if (scheduler_.residency().dataset(id).Dead(s)) continue;
    scheduler_.Invalidate(id, s);
    failures_.erase({id, s});
    if (dataset.tiered == nullptr) continue;
    if (!scheduler_.stores().Writing(id, s) && !dataset.tiered->Holds(s)) continue;
    dataset.to_drop.push_back(s);
    dataset.dropping.insert(s);
    drops = true;
  }
  return drops;
}

// A copy that is being written is dropped once that has ended: the folder does one after the other
// only then.
void Engine::DropCopies() {
  for (DatasetId id = 0; id < datasets_.size(); ++id) {
    DatasetState& dataset = datasets_[id];
    if (dataset.to_drop.empty()) continue;
    std::vector<SampleId> later;
    for (const SampleId s : dataset.to_drop) {
      if (scheduler_.stores().Writing(id, s) || !dataset.tiered->Drop(s)) later.push_back(s);
    }
    dataset.to_drop = std::move(later);
  }
}

}  // namespace forebay
