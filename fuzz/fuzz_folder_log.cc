// The log of a cache folder, beside segments and files that it may or may not speak of: what the
// index makes of it is compared with a plain replay, and no copy is good whose bytes are not those
// that its record's checksum was made of.
//
// The first byte says how the rest is taken: as the bytes of the file, or as records that get the
// right checksums, some of them damaged again.
#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <tuple>
#include <vector>

#include "base/crc32c.h"
#include "catalog/test_data.h"
#include "expect.h"
#include "tier/folder_admin.h"
#include "tier/folder_files.h"
#include "tier/folder_index.h"
#include "tier/folder_log.h"
#include "tier/folder_tier.h"

namespace {

using namespace forebay;
using Kind = LogRecord::Kind;

constexpr size_t kSegment = 4096;  // bytes of the one segment that each group has
constexpr uint64_t kGroups = 3;    // that have a folder
constexpr uint64_t kNames = 64;    // of copies; each kEvery-th has a file of its own
constexpr uint64_t kEvery = 13;
constexpr size_t kMostReads = 64;    // copies that are read through the store
constexpr uint8_t kBytes = 1;        // flags of the first byte: the bytes of the file as they are,
constexpr uint8_t kStore = 2;        // open the store, too,
constexpr uint8_t kWholeBlocks = 4;  // count in blocks
constexpr uint8_t kRightCrc = 8;     // copies have the checksum of what lies in their place

std::byte ContentAt(uint64_t group, size_t at) { return static_cast<std::byte>(group * 31 + at); }

std::vector<std::byte> Content(uint64_t group, size_t from, size_t length) {
  std::vector<std::byte> bytes(length);
  for (size_t i = 0; i < length; ++i) bytes[i] = ContentAt(group, from + i);
  return bytes;
}

// So that few bytes of input name what others name, too.
void Narrow(LogRecord& record, uint8_t flags) {
  record.kind = static_cast<Kind>(static_cast<uint8_t>(record.kind) % 10);
  record.group %= kGroups + 1;
  if (record.kind != Kind::kPath) record.name %= kNames;
  if (record.name % 2 == 0) record.name_check = 0;
  const bool copy = record.kind == Kind::kFile || record.kind == Kind::kPacked;
  if (!copy || (flags & kRightCrc) == 0) return;
  record.segment %= 2;
  record.offset = record.kind == Kind::kPacked ? record.offset % kSegment : 0;
  record.length %= kSegment;
  record.crc = Crc32c(Content(record.group, record.offset, record.length));
}

std::string LogBytes(std::span<const uint8_t> input, uint8_t flags, const std::string& head) {
  if ((flags & kBytes) != 0) {
    return std::string(reinterpret_cast<const char*>(input.data()), input.size());
  }
  std::string out = head;
  constexpr size_t kTaken = offsetof(LogRecord, check);
  for (size_t at = 0; at + kTaken < input.size(); at += kTaken + 1) {
    LogRecord record;
    std::memcpy(&record, input.data() + at, kTaken);
    Narrow(record, flags);
    record.check = Crc32c(std::as_bytes(std::span(&record, 1)).first(kTaken));
    if (input[at + kTaken] == 0xff) record.check ^= 1;
    out.append(reinterpret_cast<const char*>(&record), sizeof record);
  }
  return out;
}

// What the log says, replayed by a map.
class Replay {
 public:
  using Key = std::tuple<uint64_t, uint32_t>;

  void Apply(const LogRecord& record) {
    const Key key{record.name, record.name_check};
    switch (record.kind) {
      case Kind::kFile:
      case Kind::kPacked:
        if (record.length <= CopyEntry::kLongest) copies_[key] = record;
        return;
      case Kind::kDrop:
        copies_.erase(key);
        return;
      case Kind::kForget:
        std::erase_if(copies_, [&](const auto& each) { return each.second.group == record.group; });
        return;
      default:
        return;
    }
  }
  const std::map<Key, LogRecord>& copies() const { return copies_; }

 private:
  std::map<Key, LogRecord> copies_;
};

TierKey KeyOf(const LogRecord& record) {
  return {.group = record.group, .name = record.name, .check = record.name_check};
}

void ExpectSame(const FolderIndex& index, const Replay& replay) {
  FUZZ_EXPECT(index.copies() == replay.copies().size());
  for (const auto& [key, record] : replay.copies()) {
    const CopyEntry* copy = index.Find(KeyOf(record));
    FUZZ_EXPECT(copy != nullptr && copy->held());
    FUZZ_EXPECT(index.IdOf(*copy) == record.group && copy->length == record.length &&
                copy->crc == record.crc && copy->packed == (record.kind == Kind::kPacked));
    FUZZ_EXPECT(!copy->packed ||
                (copy->offset == record.offset && copy->segment == record.segment));
  }
}

// The records that an index writes make it again, and nothing is left when all copies are gone.
void CheckIndex(FolderIndex index, const Replay& replay, uint64_t block) {
  ExpectSame(index, replay);
  FolderIndex again(block);
  index.Write([&again](const LogRecord& record) { again.Apply(record); });
  ExpectSame(again, replay);
  FUZZ_EXPECT(again.used() == index.used());
  for (const auto& [key, record] : replay.copies()) index.Clear(KeyOf(record));
  FUZZ_EXPECT(index.used() == 0 && index.copies() == 0);
}

// Whether the copy's place holds what its record says, as far as this fuzzer made it.
bool LiesThere(const LogRecord& record) {
  if (record.group >= kGroups) return false;
  const bool packed = record.kind == Kind::kPacked;
  const uint64_t start = packed ? record.offset : 0;
  if (packed ? record.segment != 0 || start + record.length > kSegment
             : record.name >= kNames || record.name % kEvery != 0 || record.name_check != 0 ||
                   record.group != record.name % kGroups || record.length != record.name * 8) {
    return false;
  }
  return Crc32c(Content(record.group, start, record.length)) == record.crc;
}

void MakeFiles(int folder) {
  for (uint64_t group = 0; group < kGroups; ++group) {
    (void)mkdirat(folder, GroupName(group).data(), 0700);
    const OwnedFd segment(
        openat(folder, SegmentName(group, 0).data(), O_WRONLY | O_CREAT | O_CLOEXEC, 0600));
    FUZZ_EXPECT(WriteBytes(segment.get(), Content(group, 0, kSegment), 0) == 0);
  }
  for (uint64_t name = 0; name < kNames; name += kEvery) {
    const TierKey key{.group = name % kGroups, .name = name};
    FUZZ_EXPECT(WriteFile(folder, key, Content(key.group, 0, name * 8), name) == 0);
  }
}

void CheckStore(const std::string& path, const Replay& replay) {
  FolderTierOptions options;
  options.folder = path;
  options.capacity_bytes = 1 << 30;
  options.threads = 1;
  options.gather = 0;
  auto store = FolderStore::Open(options);
  FUZZ_EXPECT(store.has_value());
  FUZZ_EXPECT((*store)->WaitScanned(10 * kSecond));
  size_t reads = 0;
  for (const auto& [key, record] : replay.copies()) {
    if (record.length > kSegment || ++reads > kMostReads) continue;
    std::vector<std::byte> bytes(record.length);
    const bool hit = (*store)->Read(KeyOf(record), bytes);
    FUZZ_EXPECT(!hit || Crc32c(bytes) == record.crc);
    // No bytes are right wherever they lie.
    FUZZ_EXPECT(!hit || record.length == 0 || LiesThere(record));
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size < 2) return 0;
  const uint8_t flags = data[0];
  const testing::TempFolder temp;
  const OwnedFd folder(open(temp.path().c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  FUZZ_EXPECT(folder.valid());
  MakeFiles(folder.get());
  temp.Write(FolderLock::kName, "");
  // The header that every log has.
  FUZZ_EXPECT(FolderLog::Create(folder.get(), [](const FolderLog::Emit&) {}).has_value());
  const std::string log_path = temp / FolderLog::kName;
  {
    std::ifstream made(log_path, std::ios::binary);
    const std::string head{std::istreambuf_iterator<char>(made), {}};
    made.close();
    std::ofstream(log_path, std::ios::binary) << LogBytes({data + 1, size - 1}, flags, head);
  }

  const uint64_t block = (flags & kWholeBlocks) != 0 ? 4096 : 1;
  FolderIndex index(block);
  Replay replay;
  if (Result<FolderLog> log = FolderLog::Open(folder.get(), false); log) {
    FUZZ_EXPECT(log->ReadNew([&](std::span<const LogRecord> records) {
      for (const LogRecord& record : records) {
        index.Apply(record);
        replay.Apply(record);
      }
    }) == 0);
    FUZZ_EXPECT(log->bytes() <= size * 2 + sizeof(LogRecord));
  }
  CheckIndex(index, replay, block);

  {
    Result<FolderAdmin> admin = FolderAdmin::Open(temp.path(), false);
    FUZZ_EXPECT(admin.has_value());
    for (const auto& [key, record] : replay.copies()) {
      uint64_t bytes = 0;
      const Result<bool> good = admin->Check(KeyOf(record), &bytes);
      FUZZ_EXPECT(!good || *good == LiesThere(record));
    }
  }
  if ((flags & kStore) != 0) CheckStore(temp.path(), replay);
  return 0;
}
