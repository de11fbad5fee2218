// What a walk over one shard finds.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"
#include "catalog/byte_reader.h"

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

// A WebDataset shard. Reads headers and small label members only, or everything in large pieces
// where members are small.
Result<ShardIndex> ScanTar(ByteReader& reader, const OnSample& on_sample);

// A TFRecord file. Checks the checksums of lengths; those of the data are taken as stored.
Result<ShardIndex> ScanTfRecord(ByteReader& reader, const OnSample& on_sample);

// A tar member's sample key and field name by WebDataset's rule: the base name is cut at its first
// dot, and the field is in lower case. False for members that WebDataset skips.
bool SplitTarName(std::string_view path, std::string_view& key, std::string& field);

bool IsTarName(std::string_view name);
bool IsTfRecordName(std::string_view name);

// A message for a sample that does not fit an Extent.
Status SampleTooLarge(std::string_view what, uint64_t bytes);

}  // namespace forebay
