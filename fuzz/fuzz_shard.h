// What holds for every shard that a scan accepts.
#pragma once

#include <cstdint>
#include <string>
#include <utility>

#include "catalog/image.h"
#include "catalog/shard.h"
#include "catalog/test_data.h"
#include "expect.h"

namespace forebay::testing {

template <typename Scan>
void TryShard(Format format, std::span<const std::byte> bytes, const Scan& scan) {
  MemoryReader reader("fuzz", bytes);
  Result<ShardIndex> index = scan(reader, OnSample());
  if (!index) {
    FUZZ_EXPECT(index.error().message().find("fuzz") != std::string::npos);
    return;
  }
  uint64_t end = 0;
  for (const ShardIndex::Sample& sample : index->samples) {
    FUZZ_EXPECT(sample.offset >= end);
    end = sample.offset + sample.length;
    FUZZ_EXPECT(end <= bytes.size());
  }
  if (index->samples.empty()) return;
  CatalogWriter writer(format, "/fuzz", 0);
  writer.AddShard("fuzz", bytes.size(), 0, *index);
  auto catalog = std::move(writer).Finish();
  FUZZ_EXPECT(catalog.has_value());
  Touch(**catalog);
}

}  // namespace forebay::testing
