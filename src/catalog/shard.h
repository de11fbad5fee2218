// What a walk over one shard finds.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"
#include "catalog/byte_reader.h"
#include "catalog/shard_reader.h"

namespace forebay {

struct FieldRecord {
  uint32_t offset;  // relative to the sample's span
  uint32_t length;
  bool operator==(const FieldRecord&) const = default;
};
static_assert(sizeof(FieldRecord) == 8);

struct ShardIndex {
  struct Sample {
    uint64_t offset = 0;
    uint32_t length = 0;
    int32_t label = -1;
    uint32_t crc = 0;          // TFRecord: CRC-32C of the data, as stored
    uint32_t first_field = 0;  // tar: into `fields`
    uint32_t schema = 0;       // tar: into `schemas`
  };
  std::vector<Sample> samples;
  std::vector<FieldRecord> fields;
  std::vector<std::vector<std::string>> schemas;
  std::string keys;                // tar: the samples' keys, one after the other
  std::vector<uint64_t> key_ends;  // and where each ends

  std::string_view Key(size_t sample) const {
    const uint64_t begin = sample == 0 ? 0 : key_ends[sample - 1];
    return std::string_view(keys).substr(begin, key_ends[sample] - begin);
  }
};

// Called once for each sample found; false ends the walk with kCancelled. May be empty.
using OnSample = std::function<bool()>;

// How one shard of several is scanned. Without a plan payloads above 128 KiB are stepped over.
struct ScanContext {
  ScanPlan* plan = nullptr;
  uint32_t shard = 0;
  std::vector<uint64_t> hints = {};  // ShardReader::SetHints
  size_t hint_threads = 1;

  // What was read whole goes to the plan's sink, if there is one.
  void Land(size_t index, std::span<const std::byte> bytes) const {
    if (plan == nullptr || plan->sink() == nullptr || bytes.empty()) return;
    (void)plan->sink()->Land(shard, static_cast<uint32_t>(index), bytes);
  }
};

// A WebDataset shard. Reads headers and small label members only, or everything in large pieces
// where members are small.
Result<ShardIndex> ScanTar(ByteReader& reader, const OnSample& on_sample,
                           const ScanContext& context = {});

// A TFRecord file. Checks the checksums of lengths; those of the data are taken as stored.
Result<ShardIndex> ScanTfRecord(ByteReader& reader, const OnSample& on_sample,
                                const ScanContext& context = {});

// A tar member's sample key and field name by WebDataset's rule: the base name is cut at its first
// dot, and the field is in lower case. False for members that WebDataset skips.
bool SplitTarName(std::string_view path, std::string_view& key, std::string& field);

bool IsTarName(std::string_view name);
bool IsTfRecordName(std::string_view name);

// A message for a sample that does not fit an Extent.
Status SampleTooLarge(std::string_view what, uint64_t bytes);

}  // namespace forebay
