// However a shard is walked (hops, payloads, streams, hints, right or wrong), it has the same
// index, and what goes to the sink are the samples' bytes.
#include "catalog/shard_reader.h"

#include <gtest/gtest.h>

#include <map>
#include <string>

#include "base/rng.h"
#include "catalog/index_file.h"
#include "catalog/shard.h"
#include "catalog/test_data.h"

namespace forebay {
namespace {

using testing::Bytes;
using testing::TarEnd;
using testing::TarMember;
using testing::TempFolder;
using testing::TfRecord;

// Counts what is asked of it; takes as long as it is told to, in no time.
class CountingReader final : public ByteReader {
 public:
  explicit CountingReader(const std::string& shard) : inner_("shard", Bytes(shard)) {}
  const std::string& name() const override { return inner_.name(); }
  uint64_t size() const override { return inner_.size(); }
  Result<size_t> ReadAt(uint64_t offset, std::span<std::byte> dest) override {
    ++reads;
    bytes += dest.size();
    return inner_.ReadAt(offset, dest);
  }
  std::atomic<uint64_t> reads = 0;
  std::atomic<uint64_t> bytes = 0;

 private:
  MemoryReader inner_;
};

class Sink final : public EarlySink {
 public:
  explicit Sink(uint64_t room) : room_(room) {}
  uint64_t Room() const override { return room_; }
  bool Land(uint32_t, uint32_t index, std::span<const std::byte> bytes) override {
    if (bytes.size() > room_) return false;
    room_ -= bytes.size();
    EXPECT_TRUE(
        landed
            .emplace(index, std::string(reinterpret_cast<const char*>(bytes.data()), bytes.size()))
            .second)
        << "sample " << index << " twice";
    return true;
  }
  void Number(std::span<const SampleId>) override {}
  std::map<uint32_t, std::string> landed;

 private:
  uint64_t room_;
};

struct Made {
  Format format = Format::kWebDataset;
  std::string bytes;
  std::string index;  // as DALI's tools write it
};

std::string Noise(SplitMix64& rng, uint64_t most) {
  std::string out(rng.Below(most + 1), '\0');
  for (char& c : out) c = static_cast<char>(rng.Next());
  return out;
}

Made MakeTar(uint64_t seed, uint64_t most) {
  SplitMix64 rng(seed);
  Made made;
  made.index = "v1.2 40\n";
  for (int i = 0; i < 40; ++i) {
    std::string line;
    for (const char* field : {"jpg", "cls", "seg.png"}) {
      if (field[0] == 's' && rng.Below(2) == 0) continue;
      const std::string data = field[0] == 'c' ? std::to_string(i) : Noise(rng, most);
      line += StrCat(line.empty() ? "" : " ", field, " ", made.bytes.size() + 512, " ", data.size(),
                     " ", i, ".", field);
      made.bytes += TarMember(StrCat(i, ".", field), data);
    }
    made.index += line + "\n";
  }
  made.bytes += TarEnd();
  return made;
}

Made MakeRecords(uint64_t seed, uint64_t most) {
  SplitMix64 rng(seed);
  Made made{.format = Format::kTfRecord, .bytes = "", .index = ""};
  for (int i = 0; i < 40; ++i) {
    const std::string record = TfRecord(Noise(rng, most));
    made.index += StrCat(made.bytes.size(), " ", record.size(), "\n");
    made.bytes += record;
  }
  return made;
}

ShardIndex Scan(const Made& made, ByteReader& reader, const ScanContext& context) {
  auto index = made.format == Format::kWebDataset ? ScanTar(reader, nullptr, context)
                                                  : ScanTfRecord(reader, nullptr, context);
  EXPECT_TRUE(index) << index.status().ToString();
  return index ? *std::move(index) : ShardIndex();
}

void ExpectSame(const ShardIndex& a, const ShardIndex& b) {
  ASSERT_EQ(a.samples.size(), b.samples.size());
  for (size_t i = 0; i < a.samples.size(); ++i) {
    ASSERT_EQ(a.samples[i].offset, b.samples[i].offset) << i;
    ASSERT_EQ(a.samples[i].length, b.samples[i].length) << i;
    ASSERT_EQ(a.samples[i].label, b.samples[i].label) << i;
    ASSERT_EQ(a.samples[i].crc, b.samples[i].crc) << i;
    ASSERT_EQ(a.samples[i].schema, b.samples[i].schema) << i;
  }
  EXPECT_EQ(a.fields, b.fields);
  EXPECT_EQ(a.keys, b.keys);
}

void ExpectRight(const Sink& sink, const ShardIndex& index, const std::string& bytes) {
  for (const auto& [i, landed] : sink.landed) {
    ASSERT_LT(i, index.samples.size());
    const ShardIndex::Sample& sample = index.samples[i];
    EXPECT_EQ(landed, bytes.substr(sample.offset, sample.length)) << "sample " << i;
  }
}

TEST(ShardReader, EveryWayGivesTheSameIndexAndBytes) {
  for (uint64_t seed = 0; seed < 40; ++seed) {
    for (const uint64_t most : {uint64_t{100}, uint64_t{5000}, uint64_t{200'000}}) {
      const Made made = seed % 2 == 0 ? MakeTar(seed, most) : MakeRecords(seed, most);
      CountingReader plain(made.bytes);
      const ShardIndex expected = Scan(made, plain, {});
      for (const uint64_t room : {uint64_t{0}, uint64_t{300'000}, uint64_t{1} << 30}) {
        // Small reads that cost nothing, a little, and so much that streaming pays.
        for (const Nanos hop : {Nanos{0}, 10 * kMicro, kSecond}) {
          for (const bool hints : {false, true}) {
            SCOPED_TRACE(StrCat("seed ", seed, " most ", most, " room ", room, " hop ", hop,
                                " hints ", hints));
            Sink sink(room);
            ScanPlan plan(24, &sink);
            if (hop > 0) plan.OnHop(hop);
            ScanContext context = {.plan = &plan};
            if (hints) context.hints = ParseIndex(made.index, made.format);
            CountingReader reader(made.bytes);
            const ShardIndex index = Scan(made, reader, context);
            ExpectSame(expected, index);
            ExpectRight(sink, expected, made.bytes);
          }
        }
      }
    }
  }
}

TEST(ShardReader, AStreamReadsEveryByteOnceAndLandsEverything) {
  for (const bool tar : {true, false}) {
    const Made made = tar ? MakeTar(1, 200'000) : MakeRecords(1, 200'000);
    Sink sink(uint64_t{1} << 30);
    ScanPlan plan(24, &sink);
    plan.OnHop(kSecond);
    CountingReader reader(made.bytes);
    const ShardIndex index = Scan(made, reader, {.plan = &plan});
    EXPECT_EQ(sink.landed.size(), index.samples.size());
    EXPECT_LE(reader.bytes, made.bytes.size() + 4096);
    EXPECT_LE(reader.reads, made.bytes.size() / (size_t{512} << 10) + 3);
  }
}

TEST(ShardReader, AStreamStepsOverLargeMembersThatAreNoSamples) {
  Made made;
  for (int i = 0; i < 40; ++i) made.bytes += TarMember(StrCat(i, ".txt"), std::string(2000, 'x'));
  made.bytes += TarMember("no sample", std::string(size_t{30} << 20, 'y'));
  made.bytes += TarMember("40.txt", "z") + TarEnd();
  Sink sink(uint64_t{1} << 30);
  ScanPlan plan(24, &sink);
  plan.OnHop(kSecond);
  CountingReader reader(made.bytes);
  EXPECT_EQ(Scan(made, reader, {.plan = &plan}).samples.size(), 41u);
  EXPECT_LE(reader.bytes, uint64_t{4} << 20);
}

TEST(ShardReader, HopsReadHeadersAlone) {
  const Made made = MakeTar(3, 200'000);
  ScanPlan plan(24, nullptr);
  plan.OnHop(1);
  CountingReader reader(made.bytes);
  (void)Scan(made, reader, {.plan = &plan});
  // Two payloads a sample at most, each followed by what was needed after an earlier one.
  EXPECT_LE(reader.bytes, 80 * 2048 + 4096);
}

TEST(ShardReader, WrongHintsCostReadsAlone) {
  for (const bool tar : {true, false}) {
    const Made made = tar ? MakeTar(5, 50'000) : MakeRecords(5, 50'000);
    CountingReader plain(made.bytes);
    const ShardIndex expected = Scan(made, plain, {});
    SplitMix64 rng(7);
    std::vector<uint64_t> wrong;
    for (int i = 0; i < 100; ++i) wrong.push_back(rng.Below(2 * made.bytes.size()));
    std::sort(wrong.begin(), wrong.end());
    ScanPlan plan(1, nullptr);
    plan.OnHop(1);
    CountingReader reader(made.bytes);
    const ShardIndex index =
        Scan(made, reader, {.plan = &plan, .shard = 0, .hints = wrong, .hint_threads = 4});
    ExpectSame(expected, index);
  }
}

TEST(IndexFile, IsUnderstoodOrIgnored) {
  EXPECT_EQ(ParseIndex("0 116\n116 50\n", Format::kTfRecord), (std::vector<uint64_t>{112, 162}));
  EXPECT_EQ(ParseIndex("v1.2 1\njpg 512 100 a.jpg cls 1536 1 a.cls\n", Format::kWebDataset),
            (std::vector<uint64_t>{1024, 2048}));
  for (const char* bad : {"", "x", "0\n", "0 1\n", "0 116 7\n", "18446744073709551615 16\n"}) {
    EXPECT_TRUE(ParseIndex(bad, Format::kTfRecord).empty()) << bad;
  }
  EXPECT_FALSE(IsTfRecordName("data.tfrecord-00000-of-00010.idx"));
  for (const char* bad : {"v1.1 1\njpg 512 100\n", "jpg 512 100 a.jpg\n", "v1.2 1\njpg 512\n"}) {
    EXPECT_TRUE(ParseIndex(bad, Format::kWebDataset).empty()) << bad;
  }
}

TEST(IndexFile, LiesBesideItsShard) {
  TempFolder t;
  const Made made = MakeTar(9, 30'000);
  t.Write("a.tar", made.bytes);
  auto without = BuildCatalog(t.path(), {});
  ASSERT_TRUE(without);
  t.Write("a.idx", made.index);
  EXPECT_FALSE(IndexedPayloadEnds(t / "a.tar", Format::kWebDataset).empty());
  auto with = BuildCatalog(t.path(), {});
  ASSERT_TRUE(with) << with.status().ToString();
  EXPECT_EQ((*with)->fingerprint(), (*without)->fingerprint());
  t.Write("a.tar.idx", "v1.2 1\njpg 5 5 x.jpg\n");
  auto wrong = BuildCatalog(t.path(), {});
  ASSERT_TRUE(wrong) << wrong.status().ToString();
  EXPECT_EQ((*wrong)->fingerprint(), (*without)->fingerprint());
}

}  // namespace
}  // namespace forebay
