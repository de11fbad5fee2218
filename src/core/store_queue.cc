#include "core/store_queue.h"

#include <algorithm>
#include <cassert>

namespace forebay {

void StoreQueue::OnReadBegun(ReadAction* read) {
  const Residency::Dataset& dataset = residency_.datasets()[read->dataset];
  read->store =
      (!dataset.passing || read->serving) && MayStore(read->dataset, read->sample, read->job);
  read->store_spare = read->store && dataset.ShareOf(read->sample) != KeepShare::kHome;
  if (read->store_spare) reading_spare_ += read->length;
}

void StoreQueue::OnReadEnded(const ReadAction& read) {
  if (read.store_spare) reading_spare_ -= read.length;
}

bool StoreQueue::MayStore(DatasetId d, SampleId s, JobId job) const {
  const Residency::Entry& e = entry(d, s);
  const TierShape& tier = residency_.datasets()[d].tier;
  const JobStats& stats = common_.jobs.stats(job);
  return tier.present && common_.admit_tier && !hangs() && e.length <= tier.largest &&
         (tier.holds_all || !(e.flags & Residency::kKept)) &&
         stats.folder_bytes + e.length <= stats.limits.folder_bytes && FolderMayTake(d, s);
}

// Copies in excess of the node's share leave enough for what lives here.
bool StoreQueue::FolderMayTake(DatasetId d, SampleId s) const {
  const Residency::Dataset& dataset = residency_.datasets()[d];
  if (dataset.share.empty()) return true;
  switch (dataset.ShareOf(s)) {
    case KeepShare::kNone:
      return false;
    case KeepShare::kHome:
      return true;
    case KeepShare::kReplica:
      break;
  }
  const uint64_t left = residency_.bytes().reserved + dataset.tier.left_by_copies;
  return reading_spare_ + due_spare_ + left + entry(d, s).length <= folder_room_;
}

void StoreQueue::Add(const ReadAction& read) {
  const DatasetId d = read.dataset;
  const SampleId s = read.sample;
  const Residency::Entry& e = entry(d, s);
  // Whatever changed since the read began.
  if (hangs() || (e.flags & Residency::kInTier) || e.store == Store::kDue || Writing(d, s)) return;
  if ((e.flags & Residency::kKept) && !residency_.datasets()[d].tier.holds_all) return;
  if (under_way() == 0) moved_ = common_.now;
  residency_.SetStore(d, s, Store::kDue);
  due_.push_back({d, s, read.job, read.store_spare});
  if (read.store_spare) due_spare_ += e.length;
  common_.jobs.stats(read.job).folder_bytes += e.length;
}

void StoreQueue::Cancel(const Due& due) {
  const uint32_t length = entry(due.dataset, due.sample).length;
  residency_.SetStore(due.dataset, due.sample, Store::kNone);
  if (due.spare) due_spare_ -= length;
  common_.jobs.stats(due.job).folder_bytes -= length;
}

void StoreQueue::Drop(DatasetId d, SampleId s) {
  if (entry(d, s).store == Store::kDue) {
    const auto it = std::find_if(due_.begin(), due_.end(), [&](const Due& due) {
      return due.dataset == d && due.sample == s;
    });
    assert(it != due_.end());
    Cancel(*it);
    due_.erase(it);
  } else if (entry(d, s).store == Store::kWriting) {
    residency_.SetStore(d, s, Store::kNone);
  }
}

void StoreQueue::GiveUp(const Due& due) {
  Cancel(due);
  ++common_.counters.copies_given_up;
  residency_.MaybeFree(due.dataset, due.sample);
}

void StoreQueue::GiveUpAll() {
  for (; !due_.empty(); due_.pop_front()) GiveUp(due_.front());
  for (const auto& [key, job] : writing_) {
    const auto d = static_cast<DatasetId>(key >> 32);
    const auto s = static_cast<SampleId>(key);
    if (entry(d, s).store != Store::kWriting) continue;
    residency_.SetStore(d, s, Store::kNone);
    residency_.MaybeFree(d, s);
  }
}

bool StoreQueue::GiveUpOneDue() {
  for (auto it = due_.begin(); it != due_.end(); ++it) {
    const Residency::Entry& e = entry(it->dataset, it->sample);
    if (e.pins != 0 || e.ahead != 0 || (e.flags & Residency::kKept)) continue;
    const Due due = *it;
    due_.erase(it);
    GiveUp(due);
    return true;
  }
  return false;
}

// What is in the writer's hands already is here only to be found by whoever uses it soon.
bool StoreQueue::FreeOneWriting() {
  for (const auto& [key, job] : writing_) {
    const auto d = static_cast<DatasetId>(key >> 32);
    const auto s = static_cast<SampleId>(key);
    const Residency::Entry& e = entry(d, s);
    if (e.store != Store::kWriting || e.pins != 0 || e.ahead != 0) continue;
    if (e.flags & Residency::kKept) continue;
    residency_.FreeBlock(d, s);
    return true;
  }
  return false;
}

bool StoreQueue::First(StoreAction* out) const {
  if (due_.empty()) return false;
  const Due& due = due_.front();
  const Residency::Entry& e = entry(due.dataset, due.sample);
  if (e.pins == Residency::kMaxRefs) return false;
  const uint32_t crc = residency_.datasets()[due.dataset].crcs[due.sample];
  *out = {due.dataset, due.sample, e.offset, e.length, crc};
  return true;
}

bool StoreQueue::AnyOf(DatasetId d) const {
  return std::any_of(due_.begin(), due_.end(), [&](const Due& due) { return due.dataset == d; }) ||
         std::any_of(writing_.begin(), writing_.end(),
                     [&](const auto& writing) { return writing.first >> 32 == d; });
}

void StoreQueue::Begin(const StoreAction& store) {
  const Due due = due_.front();
  assert(due.dataset == store.dataset && due.sample == store.sample);
  due_.pop_front();
  const uint64_t key = Key(store.dataset, store.sample);
  writing_.emplace(key, due.job);
  taking_.insert(key);
  residency_.Pin(residency_.dataset(store.dataset).entries[store.sample]);
  residency_.SetStore(store.dataset, store.sample, Store::kWriting);
  if (due.spare) due_spare_ -= entry(due.dataset, due.sample).length;
}

void StoreQueue::OnTaken(const StoreAction& store) {
  if (taking_.erase(Key(store.dataset, store.sample)) == 0) return;
  residency_.Unpin(store.dataset, store.sample);
}

bool StoreQueue::OnEnded(DatasetId d, SampleId s, bool stored) {
  const auto it = writing_.find(Key(d, s));
  if (it == writing_.end()) return false;
  if (!stored || entry(d, s).dead) {
    common_.jobs.stats(it->second).folder_bytes -= entry(d, s).length;
  }
  writing_.erase(it);
  moved_ = common_.now;
  hangs_ = false;
  const bool stayed = entry(d, s).store == Store::kWriting;
  if (stayed) residency_.SetStore(d, s, Store::kNone);
  if (stored) residency_.SetInTier(d, s, true);
  if (stayed) residency_.MaybeFree(d, s);
  return true;
}

bool StoreQueue::Advance(Nanos step) {
  // Drivers call at least every so often; while the process stood still, so did the second tier.
  constexpr Nanos kLongestStep = kSecond;
  if (step > kLongestStep) moved_ += step - kLongestStep;
  if (under_way() == 0) hangs_ = false;
  if (!Moving() || common_.now - moved_ <= patience_) return false;
  hangs_ = true;
  GiveUpAll();
  return true;
}

}  // namespace forebay
