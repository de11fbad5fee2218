// What a cache folder holds, in memory: an entry of 16 bytes a sample, in pages of 1024. Filled
// from the log; touches no file. Not safe for concurrent use.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "tier/folder_log.h"
#include "tier/tier.h"

namespace forebay {

struct CopyEntry {
  static constexpr uint32_t kAbsent = ~uint32_t{0};
  // Somebody writes or removes the copy, and alone may touch it.
  static constexpr uint32_t kBusy = kAbsent - 1;
  static constexpr uint32_t kLongest = kBusy - 1;

  uint32_t length = kAbsent;
  uint32_t crc = 0;
  uint32_t offset = 0;   // packed: where in the segment
  uint16_t segment = 0;  // packed: which one of the data set
  bool packed = false;
  bool held() const { return length <= kLongest; }
  bool operator==(const CopyEntry&) const = default;
};
static_assert(sizeof(CopyEntry) == 16);

class FolderIndex {
 public:
  static constexpr uint32_t kPageSamples = 1024;
  // 16 Mi samples: the entries never take more than 256 MiB.
  static constexpr size_t kMostPages = 16 << 10;

  using Page = std::array<CopyEntry, kPageSamples>;
  struct Dataset {
    bool used = false;     // somebody of this process named it: it stays
    bool leaving = false;  // its files are being removed: nothing is put
    int64_t last_used_s = 0;
    std::string path;
    uint64_t samples = 0;
    uint64_t bytes = 0;    // of the samples
    uint64_t charged = 0;  // what they count against the limit
    uint32_t next_segment = 0;
    std::vector<uint32_t> packed;  // samples held in each segment
    std::unordered_map<uint32_t, std::unique_ptr<Page>> pages;
  };

  // What a copy counts against the limit: its bytes and its record.
  static uint64_t Charge(uint64_t length) { return length + sizeof(LogRecord); }

  const CopyEntry* Find(const TierKey& key) const;
  CopyEntry* Find(const TierKey& key);
  // Adds an absent one; null when there is no room for more pages.
  CopyEntry* Make(const TierKey& key);
  // What the entry says now counts; false when it was dropped for want of pages.
  bool Set(const TierKey& key, const CopyEntry& copy);
  // The copy counts no more; `length` is what the entry has from now on.
  void Clear(const TierKey& key, uint32_t length = CopyEntry::kAbsent);
  void Forget(uint64_t dataset);
  void Apply(const LogRecord& record);
  // The records that make this index again.
  void Write(const FolderLog::Emit& emit) const;
  static LogRecord RecordOf(const TierKey& key, const CopyEntry& copy);

  Dataset& At(uint64_t dataset) { return datasets_[dataset]; }
  const std::map<uint64_t, Dataset>& datasets() const { return datasets_; }
  // The data set that was named longest ago, of those that hold something and nobody here uses.
  // False: there is none.
  bool Oldest(uint64_t* dataset) const;
  // Which samples of a data set are held, in order.
  std::vector<uint32_t> Samples(uint64_t dataset) const;

  uint64_t used() const { return used_; }
  uint64_t samples() const { return samples_; }
  // The last writer's; 0: not known.
  uint64_t limit() const { return limit_; }
  void set_limit(uint64_t bytes) { limit_ = bytes; }

 private:
  void Uncount(Dataset& dataset, const CopyEntry& copy);

  std::map<uint64_t, Dataset> datasets_;
  size_t pages_ = 0;
  uint64_t used_ = 0;
  uint64_t samples_ = 0;
  uint64_t limit_ = 0;
};

}  // namespace forebay
