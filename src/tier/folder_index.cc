#include "tier/folder_index.h"

#include <algorithm>

namespace forebay {

const CopyEntry* FolderIndex::Find(const TierKey& key) const {
  const auto dataset = datasets_.find(key.dataset);
  if (dataset == datasets_.end()) return nullptr;
  const auto page = dataset->second.pages.find(key.sample / kPageSamples);
  if (page == dataset->second.pages.end()) return nullptr;
  return &(*page->second)[key.sample % kPageSamples];
}

CopyEntry* FolderIndex::Find(const TierKey& key) {
  return const_cast<CopyEntry*>(std::as_const(*this).Find(key));
}

CopyEntry* FolderIndex::Make(const TierKey& key) {
  if (CopyEntry* entry = Find(key); entry != nullptr) return entry;
  if (pages_ == kMostPages) return nullptr;
  auto& page = datasets_[key.dataset].pages[key.sample / kPageSamples];
  page = std::make_unique<Page>();
  ++pages_;
  return &(*page)[key.sample % kPageSamples];
}

bool FolderIndex::Set(const TierKey& key, const CopyEntry& copy) {
  CopyEntry* entry = Make(key);
  if (entry == nullptr) return false;
  Dataset& dataset = datasets_[key.dataset];
  if (entry->held()) Uncount(dataset, *entry);
  *entry = copy;
  const uint64_t charge = Charge(copy.length);
  used_ += charge;
  dataset.charged += charge;
  dataset.bytes += copy.length;
  ++dataset.samples;
  ++samples_;
  if (copy.packed) {
    if (dataset.packed.size() <= copy.segment) dataset.packed.resize(copy.segment + size_t{1});
    ++dataset.packed[copy.segment];
    dataset.next_segment = std::max(dataset.next_segment, copy.segment + uint32_t{1});
  }
  return true;
}

void FolderIndex::Uncount(Dataset& dataset, const CopyEntry& copy) {
  const uint64_t charge = Charge(copy.length);
  used_ -= charge;
  dataset.charged -= charge;
  dataset.bytes -= copy.length;
  --dataset.samples;
  --samples_;
  if (copy.packed) --dataset.packed[copy.segment];
}

void FolderIndex::Clear(const TierKey& key, uint32_t length) {
  CopyEntry* entry = Find(key);
  if (entry == nullptr) return;
  if (entry->held()) Uncount(datasets_[key.dataset], *entry);
  *entry = CopyEntry{};
  entry->length = length;
}

void FolderIndex::Forget(uint64_t dataset) {
  const auto it = datasets_.find(dataset);
  if (it == datasets_.end()) return;
  used_ -= it->second.charged;
  samples_ -= it->second.samples;
  pages_ -= it->second.pages.size();
  // That somebody uses it, and under which path, stays known.
  Dataset kept;
  kept.used = it->second.used;
  kept.leaving = it->second.leaving;
  kept.path = std::move(it->second.path);
  kept.last_used_s = it->second.last_used_s;
  kept.next_segment = it->second.next_segment;
  it->second = std::move(kept);
}

void FolderIndex::Apply(const LogRecord& record) {
  const TierKey key{record.dataset, record.sample};
  switch (record.kind) {
    case LogRecord::Kind::kFile:
    case LogRecord::Kind::kPacked: {
      if (record.length > CopyEntry::kLongest) return;
      CopyEntry copy;
      copy.length = record.length;
      copy.crc = record.crc;
      copy.packed = record.kind == LogRecord::Kind::kPacked;
      if (copy.packed) {
        copy.offset = record.offset;
        copy.segment = record.segment;
      }
      (void)Set(key, copy);
      return;
    }
    case LogRecord::Kind::kDrop:
      Clear(key);
      return;
    case LogRecord::Kind::kForget:
      Forget(record.dataset);
      return;
    case LogRecord::Kind::kUse: {
      Dataset& dataset = datasets_[record.dataset];
      dataset.last_used_s = std::max(dataset.last_used_s, static_cast<int64_t>(NumberOf(record)));
      return;
    }
    case LogRecord::Kind::kPath: {
      std::string& path = datasets_[record.dataset].path;
      if (record.sample == 0) path.clear();
      path.append(PathPiece(record));
      return;
    }
    case LogRecord::Kind::kLimit:
      limit_ = NumberOf(record);
      return;
  }
}

LogRecord FolderIndex::RecordOf(const TierKey& key, const CopyEntry& copy) {
  LogRecord record;
  record.dataset = key.dataset;
  record.sample = key.sample;
  record.length = copy.length;
  record.crc = copy.crc;
  record.offset = copy.offset;
  record.segment = copy.segment;
  record.kind = copy.packed ? LogRecord::Kind::kPacked : LogRecord::Kind::kFile;
  return record;
}

void FolderIndex::Write(const FolderLog::Emit& emit) const {
  if (limit_ != 0) emit(LimitRecord(limit_));
  for (const auto& [number, dataset] : datasets_) {
    if (dataset.samples == 0 && !dataset.used) continue;
    if (!dataset.path.empty()) {
      for (const LogRecord& piece : PathRecords(number, dataset.path)) emit(piece);
    }
    if (dataset.last_used_s != 0) emit(UseRecord(number, dataset.last_used_s));
    for (const auto& [page_number, page] : dataset.pages) {
      TierKey key{number, page_number * kPageSamples};
      for (const CopyEntry& copy : *page) {
        if (copy.held()) emit(RecordOf(key, copy));
        ++key.sample;
      }
    }
  }
}

bool FolderIndex::Oldest(uint64_t* dataset) const {
  const Dataset* oldest = nullptr;
  for (const auto& [number, each] : datasets_) {
    if (each.used || each.leaving || each.samples == 0) continue;
    if (oldest != nullptr && each.last_used_s >= oldest->last_used_s) continue;
    oldest = &each;
    *dataset = number;
  }
  return oldest != nullptr;
}

std::vector<uint32_t> FolderIndex::Samples(uint64_t dataset) const {
  std::vector<uint32_t> found;
  const auto it = datasets_.find(dataset);
  if (it == datasets_.end()) return found;
  found.reserve(it->second.samples);
  for (const auto& [page_number, page] : it->second.pages) {
    for (uint32_t i = 0; i < kPageSamples; ++i) {
      if ((*page)[i].held()) found.push_back(page_number * kPageSamples + i);
    }
  }
  std::sort(found.begin(), found.end());
  return found;
}

}  // namespace forebay
