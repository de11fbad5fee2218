// The index log: whatever is cut off or flipped, what is read was written.
#include "tier/folder_log.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <deque>
#include <fstream>
#include <iterator>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "base/owned.h"
#include "base/rng.h"
#include "tier/folder_index.h"
#include "tier/tier_testing.h"

namespace forebay {
namespace {

using namespace tier_testing;
using RecordKind = LogRecord::Kind;

bool Same(const LogRecord& a, const LogRecord& b) {
  return std::memcmp(&a, &b, offsetof(LogRecord, check)) == 0;
}

class FolderLogTest : public testing::Test {
 protected:
  FolderLogTest() : fd_(open(folder_.path().c_str(), O_RDONLY | O_DIRECTORY)) {}

  FolderLog Make(std::vector<LogRecord> records = {}) {
    auto log = FolderLog::Create(fd_.get(), [&](const FolderLog::Emit& emit) {
      for (const LogRecord& record : records) emit(record);
    });
    EXPECT_TRUE(log.has_value()) << log.status().ToString();
    return *std::move(log);
  }
  static std::vector<LogRecord> ReadAll(FolderLog& log) {
    std::vector<LogRecord> all;
    EXPECT_EQ(log.ReadNew([&](std::span<const LogRecord> records) {
      all.insert(all.end(), records.begin(), records.end());
    }),
              0);
    return all;
  }
  static std::vector<LogRecord> Some(size_t count, uint64_t seed = 1) {
    SplitMix64 rng(seed);
    std::vector<LogRecord> records(count);
    for (LogRecord& record : records) {
      record.group = rng.Below(3);
      record.name = rng.Below(5000);
      const uint64_t draw = rng.Below(40);
      record.kind = draw == 0   ? RecordKind::kForget
                    : draw < 5  ? RecordKind::kDrop
                    : draw < 25 ? RecordKind::kPacked
                                : RecordKind::kFile;
      if (record.kind == RecordKind::kDrop || record.kind == RecordKind::kForget) continue;
      record.length = static_cast<uint32_t>(rng.Below(100'000));
      record.crc = static_cast<uint32_t>(rng.Next());
      if (record.kind != RecordKind::kPacked) continue;
      record.offset = static_cast<uint32_t>(rng.Below(1 << 25));
      record.segment = static_cast<uint16_t>(rng.Below(7));
    }
    return records;
  }
  std::string Path() const { return folder_.path() + "/" + FolderLog::kName; }
  std::string Content() const {
    std::ifstream file(Path(), std::ios::binary);
    return {std::istreambuf_iterator<char>(file), {}};
  }
  void SetContent(const std::string& bytes) const {
    std::ofstream(Path(), std::ios::binary | std::ios::trunc) << bytes;
  }

  TempFolder folder_;
  OwnedFd fd_;
};

TEST_F(FolderLogTest, WhatWasAppendedIsRead) {
  std::vector<LogRecord> first = Some(20'000);
  FolderLog writer = Make(first);
  auto reader = FolderLog::Open(fd_.get(), false);
  ASSERT_TRUE(reader.has_value());
  std::vector<LogRecord> read = ReadAll(*reader);
  ASSERT_EQ(read.size(), first.size());
  for (size_t i = 0; i < read.size(); ++i) ASSERT_TRUE(Same(read[i], first[i])) << i;
  EXPECT_TRUE(ReadAll(*reader).empty());
  // The reader sees what came since, and only that.
  std::vector<LogRecord> more = Some(5, 2);
  ASSERT_EQ(writer.Append(more), 0);
  read = ReadAll(*reader);
  ASSERT_EQ(read.size(), 5u);
  EXPECT_TRUE(Same(read[4], more[4]));
  EXPECT_EQ(reader->records(), 20'005u);
  EXPECT_EQ(reader->damaged(), 0u);
}

TEST_F(FolderLogTest, PathsAndTimes) {
  for (const std::string& path :
       {std::string(), std::string("/a"), std::string("/data/train"), std::string("/data/train2"),
        std::string("/data/train22"), "/" + std::string(300, 'x'), std::string(5000, 'y')}) {
    FolderIndex index;
    index.At(7).path = "old";
    for (const LogRecord& piece : PathRecords(7, path)) index.Apply(piece);
    EXPECT_EQ(index.At(7).path, path.substr(0, 4096));
  }
  for (const int64_t seconds : {int64_t{0}, int64_t{1'700'000'000}, int64_t{1} << 40}) {
    EXPECT_EQ(ValueOf(UseRecord(1, seconds)), static_cast<uint64_t>(seconds));
  }
}

// Truncated anywhere: a prefix of whole records, and the next writer goes on behind it.
TEST_F(FolderLogTest, CutAnywhere) {
  const std::vector<LogRecord> records = Some(12);
  (void)Make(records);
  const std::string whole = Content();
  ASSERT_EQ(whole.size(), 13 * sizeof(LogRecord));
  for (size_t size = 0; size <= whole.size(); ++size) {
    SetContent(whole.substr(0, size));
    auto log = FolderLog::Open(fd_.get(), true);
    if (size < sizeof(LogRecord)) {
      ASSERT_EQ(log.status().code(), Code::kDataLoss) << size;
      continue;
    }
    ASSERT_TRUE(log.has_value()) << size;
    ASSERT_EQ(ReadAll(*log).size(), size / sizeof(LogRecord) - 1);
    ASSERT_EQ(log->Cut(), 0);
    std::vector<LogRecord> more = Some(1, size);
    ASSERT_EQ(log->Append(more), 0);
    auto again = FolderLog::Open(fd_.get(), false);
    const std::vector<LogRecord> read = ReadAll(*again);
    ASSERT_EQ(read.size(), size / sizeof(LogRecord));
    for (size_t i = 0; i + 1 < read.size(); ++i) ASSERT_TRUE(Same(read[i], records[i]));
    ASSERT_TRUE(Same(read.back(), more[0]));
    ASSERT_EQ(again->damaged(), 0u);
  }
}

// Each bit: one record less, the others as they were.
TEST_F(FolderLogTest, FlippedAnywhere) {
  const std::vector<LogRecord> records = Some(6);
  (void)Make(records);
  const std::string whole = Content();
  for (size_t bit = 0; bit < whole.size() * 8; ++bit) {
    std::string flipped = whole;
    flipped[bit / 8] = static_cast<char>(flipped[bit / 8] ^ (1 << bit % 8));
    SetContent(flipped);
    auto log = FolderLog::Open(fd_.get(), false);
    const size_t hit = bit / 8 / sizeof(LogRecord);
    if (hit == 0) {
      ASSERT_FALSE(log.has_value()) << bit;
      continue;
    }
    const std::vector<LogRecord> read = ReadAll(*log);
    ASSERT_EQ(read.size(), records.size() - 1) << bit;
    for (size_t i = 0; i < read.size(); ++i) {
      ASSERT_TRUE(Same(read[i], records[i < hit - 1 ? i : i + 1])) << bit;
    }
    ASSERT_EQ(log->damaged(), hit == records.size() ? 0u : 1u) << "the last one may yet come";
  }
}

TEST_F(FolderLogTest, GarbageFromASeed) {
  SplitMix64 rng(5);
  (void)Make(Some(200));
  const std::string whole = Content();
  for (int round = 0; round < 300; ++round) {
    std::string bytes = whole.substr(0, 1 + rng.Below(whole.size()));
    for (uint64_t i = rng.Below(20); i > 0; --i) bytes[rng.Below(bytes.size())] ^= 0x55;
    SetContent(bytes);
    auto log = FolderLog::Open(fd_.get(), false);
    if (!log) continue;
    FolderIndex index;
    for (const LogRecord& record : ReadAll(*log)) index.Apply(record);
    EXPECT_LE(index.copies(), 200u);
  }
}

TEST_F(FolderLogTest, AnotherLogInItsPlaceIsNoticed) {
  FolderLog log = Make(Some(3));
  EXPECT_TRUE(log.Linked());
  EXPECT_FALSE(log.Replaced(fd_.get()));
  FolderLog next = Make(Some(2));
  EXPECT_TRUE(log.Replaced(fd_.get()));
  EXPECT_FALSE(log.Linked());
  EXPECT_FALSE(next.Replaced(fd_.get()));
  fs::remove(Path());
  EXPECT_TRUE(next.Replaced(fd_.get()));
  EXPECT_EQ(FolderLog::Open(fd_.get(), false).status().code(), Code::kNotFound);
}

TEST(FolderIndexTest, WhatIsNeededStaysAndTheRestIsSpare) {
  FolderIndex index;
  const auto copy = [&](uint64_t group, uint32_t length) {
    CopyEntry entry;
    entry.length = length;
    entry.group = index.NumberOf(group) & (FolderIndex::kMostGroups - 1);
    return entry;
  };
  for (uint64_t i = 0; i < 10; ++i) ASSERT_TRUE(index.Set({7, i, 1}, copy(7, 100)));
  for (uint64_t i = 0; i < 10; ++i) ASSERT_TRUE(index.Set({8, i, 2}, copy(8, 100)));
  TierKey key;
  EXPECT_FALSE(index.HasSpare()) << "nobody uses a group";
  EXPECT_FALSE(index.Spare(&key));
  index.At(7).used = true;
  EXPECT_FALSE(index.Spare(&key)) << "nobody has said what is needed";
  // A copy is found by its name, whichever group it was put for.
  for (uint64_t i = 0; i < 4; ++i) EXPECT_TRUE(index.Need({99, i, 1}));
  EXPECT_FALSE(index.Need({7, 4, 9}));
  index.At(7).sorted = true;
  std::vector<uint64_t> spare;
  while (index.Spare(&key)) {
    EXPECT_EQ(key.group, 7u);
    spare.push_back(key.name);
    index.Clear(key);
  }
  std::sort(spare.begin(), spare.end());
  EXPECT_EQ(spare, (std::vector<uint64_t>{4, 5, 6, 7, 8, 9}));
  EXPECT_EQ(index.copies(), 14u);
  // Of another index, read from the log meanwhile.
  FolderIndex fresh;
  index.Write([&](const LogRecord& record) { fresh.Apply(record); });
  fresh.TakeOverUses(index);
  EXPECT_TRUE(fresh.At(7).used && !fresh.At(8).used);
  EXPECT_FALSE(fresh.HasSpare());
  EXPECT_EQ(fresh.At(7).needed, 4u);
}

// Names that come and go for ever do not make the table grow.
// One record of 40 bytes claims no more than a few times as much, whatever it names.
TEST(FolderIndexTest, ARecordOfAHighSegmentClaimsLittleMemory) {
  const uint64_t before = ResidentBytes();
  FolderIndex index;
  for (uint64_t i = 0; i < 2000; ++i) {
    LogRecord record;
    record.kind = LogRecord::Kind::kPacked;
    record.group = i;
    record.name = i;
    record.segment = 65535;
    index.Apply(record);
  }
  EXPECT_EQ(index.copies(), 2000u);
  EXPECT_LT(ResidentBytes(), before + (256 << 20)) << "1 MiB each would be 2 GiB";
}

// A log that names one place again and again: the room is that of a segment at most, also when it
// is written anew.
TEST(FolderIndexTest, ASegmentLosesNoMoreThanItCanHave) {
  FolderIndex index(4096);
  const auto put = [&index](uint64_t name) {
    LogRecord record;
    record.kind = LogRecord::Kind::kPacked;
    record.group = 1;
    record.name = name;
    record.offset = 1;
    record.length = 4000;
    index.Apply(record);
  };
  put(1);
  for (int i = 0; i < 1'200'000; ++i) put(2);  // 4.8 GB
  FolderIndex again(4096);
  index.Write([&again](const LogRecord& record) { again.Apply(record); });
  EXPECT_EQ(again.used(), index.used());
  EXPECT_LE(index.used(), (uint64_t{1} << 32) + 20'000);
}

TEST_F(FolderLogTest, WhatIsLongerThanAnyLogIsNotReadToItsEnd) {
  (void)Make();
  // Sparse, 4 TiB: it would be read for half an hour.
  ASSERT_EQ(truncate(Path().c_str(), off_t{4} << 40), 0);
  auto log = FolderLog::Open(fd_.get(), true);
  ASSERT_TRUE(log.has_value());
  EXPECT_EQ(log->ReadNew([](std::span<const LogRecord>) { FAIL(); }), 0);
  EXPECT_EQ(log->Cut(), 0);
  EXPECT_EQ(fs::file_size(Path()), sizeof(LogRecord));
}

TEST(FolderIndexTest, AbsentNamesAreForgotten) {
  FolderIndex index;
  CopyEntry entry;
  entry.length = 1;
  entry.group = index.NumberOf(1) & (FolderIndex::kMostGroups - 1);
  SplitMix64 rng(3);
  std::deque<TierKey> held;
  for (int i = 0; i < 200'000; ++i) {
    held.push_back({1, rng.Next(), static_cast<uint32_t>(rng.Next())});
    ASSERT_TRUE(index.Set(held.back(), entry));
    if (held.size() <= 500) continue;
    index.Clear(held.front());
    held.pop_front();
  }
  EXPECT_EQ(index.copies(), held.size());
  for (const TierKey& key : held) ASSERT_NE(index.Find(key), nullptr);
  EXPECT_EQ(index.Keys(1).size(), held.size());
  EXPECT_LE(index.slots(), 4096u);
}

// The index agrees with a plain map, and writes records that make it again.
TEST(FolderIndexTest, FollowsTheRecords) {
  SplitMix64 rng(9);
  FolderIndex index;
  std::map<std::pair<uint64_t, uint64_t>, LogRecord> truth;
  for (int i = 0; i < 20'000; ++i) {
    LogRecord record;
    record.group = rng.Below(3);
    record.name = rng.Below(3000);
    record.name_check = static_cast<uint32_t>(record.group);
    const uint64_t draw = rng.Below(2000);
    if (draw == 0) {
      record.kind = RecordKind::kForget;
      std::erase_if(truth, [&](const auto& each) { return each.first.first == record.group; });
    } else if (draw < 500) {
      record.kind = RecordKind::kDrop;
      truth.erase({record.group, record.name});
    } else {
      record.kind = draw % 2 ? RecordKind::kFile : RecordKind::kPacked;
      record.length = static_cast<uint32_t>(rng.Below(1000));
      record.segment = record.kind == RecordKind::kPacked ? 3 : 0;
      truth[{record.group, record.name}] = record;
    }
    index.Apply(record);
  }
  FolderIndex again;
  again.At(0).used = true;
  index.Write([&](const LogRecord& record) { again.Apply(record); });
  for (const FolderIndex* each : {&std::as_const(index), &std::as_const(again)}) {
    uint64_t used = 0;
    for (const auto& [key, record] : truth) {
      const CopyEntry* entry =
          each->Find({key.first, key.second, static_cast<uint32_t>(key.first)});
      ASSERT_TRUE(entry != nullptr && entry->held());
      EXPECT_EQ(entry->length, record.length);
      EXPECT_EQ(entry->packed, record.kind == RecordKind::kPacked);
      used += each->Charge(record.length, entry->packed);
    }
    EXPECT_EQ(each->copies(), truth.size());
    EXPECT_EQ(each->used(), used);
    size_t listed = 0;
    for (uint64_t d = 0; d < 3; ++d) listed += each->Keys(d).size();
    EXPECT_EQ(listed, truth.size());
  }
}

}  // namespace
}  // namespace forebay
