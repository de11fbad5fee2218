// What holds for every shard that a scan accepts.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "catalog/image.h"
#include "catalog/shard.h"
#include "catalog/test_data.h"
#include "expect.h"

namespace forebay::testing {

// Takes every sample, whose bytes must be the shard's.
class FuzzSink final : public EarlySink {
 public:
  uint64_t Room() const override { return uint64_t{1} << 30; }
  bool Land(uint32_t, uint32_t index, std::span<const std::byte> bytes) override {
    landed.emplace_back(index, std::vector<std::byte>(bytes.begin(), bytes.end()));
    return true;
  }
  void Number(std::span<const SampleId>) override {}
  std::vector<std::pair<uint32_t, std::vector<std::byte>>> landed;
};

// The shard in the ways that a build chooses among: the same samples, or an error as well.
template <typename Scan>
void TryPlanned(std::span<const std::byte> bytes, const Scan& scan,
                const Result<ShardIndex>& expected) {
  for (const Nanos hop : {Nanos{1}, kSecond}) {
    FuzzSink sink;
    ScanPlan plan(4, &sink);
    plan.OnHop(hop);
    ScanContext context;
    context.plan = &plan;
    if (hop == 1) context.hints = {16, 512, 1024, 1536, 2048, 4096};
    MemoryReader reader("fuzz", bytes);
    const Result<ShardIndex> index = scan(reader, OnSample(), context);
    FUZZ_EXPECT(index.has_value() == expected.has_value());
    if (!index) continue;
    FUZZ_EXPECT(index->samples.size() == expected->samples.size());
    for (size_t i = 0; i < index->samples.size(); ++i) {
      FUZZ_EXPECT(index->samples[i].offset == expected->samples[i].offset);
      FUZZ_EXPECT(index->samples[i].length == expected->samples[i].length);
    }
    for (const auto& [i, landed] : sink.landed) {
      FUZZ_EXPECT(i < index->samples.size() && landed.size() == index->samples[i].length);
      FUZZ_EXPECT(std::equal(landed.begin(), landed.end(),
                             bytes.begin() + static_cast<int64_t>(index->samples[i].offset)));
    }
  }
}

template <typename Scan>
void TryShard(Format format, std::span<const std::byte> bytes, const Scan& scan) {
  MemoryReader reader("fuzz", bytes);
  Result<ShardIndex> index = scan(reader, OnSample(), ScanContext());
  TryPlanned(bytes, scan, index);
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
