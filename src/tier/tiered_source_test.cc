// What every Source must do (as source_test.cc), and what a tier under it adds.
#include "tier/tiered_source.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <deque>
#include <filesystem>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/crc32c.h"
#include "base/owned.h"
#include "base/rng.h"
#include "catalog/image.h"
#include "source/fault_source.h"
#include "source/null_source.h"
#include "tier/folder_tier.h"
#include "tier/memory_tier.h"

namespace forebay {
namespace {

namespace fs = std::filesystem;
using Bytes = std::vector<std::byte>;

// Names for as many samples as the tests have; `stamps` of their files, or null.
CopyNames Names(std::shared_ptr<std::vector<uint32_t>> stamps = nullptr) {
  CatalogWriter writer(Format::kFileList, "/data", 1);
  for (int i = 0; i < 20'000; ++i) {
    writer.AddFile(CatalogWriter::kRootFolder, std::to_string(i), 1, i, -1);
  }
  std::unique_ptr<Catalog> catalog = *std::move(writer).Finish();
  catalog->SetLookedAt(std::move(stamps));
  return CopyNames(std::move(catalog));
}
constexpr size_t kSamples = 100;

// Lengths of a null source's samples.
size_t LengthOf(SampleId sample) {
  if (sample % 10 == 0) return 0;
  return SplitMix64(sample).Below(30'000) + (sample % 10 == 3 ? 64 << 10 : 0);
}

Bytes Truth(SampleId sample) {
  Bytes bytes(LengthOf(sample));
  FillNullSample(sample, bytes);
  return bytes;
}

bool WaitReadable(const Source& source) {
  pollfd waiting{source.event_fd(), POLLIN, 0};
  return poll(&waiting, 1, 60'000) == 1;
}

// A null source that notes which samples nobody but the source is to be asked for.
class SkipNotes final : public Source {
 public:
  explicit SkipNotes(std::vector<SampleId>* skipped)
      : inner_(*MakeNullSource(16)), skipped_(skipped) {}
  size_t Submit(std::span<const SourceRead> reads) override {
    const size_t taken = inner_->Submit(reads);
    for (const SourceRead& read : reads.first(taken)) {
      if (read.skip_tier) skipped_->push_back(read.sample);
    }
    return taken;
  }
  size_t Reap(std::span<SourceDone> out) override { return inner_->Reap(out); }
  int event_fd() const override { return inner_->event_fd(); }
  size_t capacity() const override { return inner_->capacity(); }
  std::string Describe() const override { return "notes"; }

 private:
  const std::unique_ptr<Source> inner_;
  std::vector<SampleId>* const skipped_;
};

TEST(WriteBufferTest, ManySmallCopiesFillItToo) {
  WriteBuffer buffer(WriteBuffer::kMostCopies * 4096);
  size_t copies = 0;
  while (buffer.Take(1)) ++copies;
  EXPECT_EQ(copies, WriteBuffer::kMostCopies) << "else copies are skipped while it looks empty";
  EXPECT_EQ(buffer.Free(), 0);
  for (; copies > 0; --copies) buffer.Give(1);
  EXPECT_EQ(buffer.Free(), 1);
  EXPECT_TRUE(buffer.Take(WriteBuffer::kMostCopies * 4096));
}

class TieredSourceTest : public testing::TestWithParam<bool> {
 protected:
  TieredSourceTest() {
    std::string pattern = testing::TempDir() + "forebay_tiered_XXXXXX";
    EXPECT_NE(mkdtemp(pattern.data()), nullptr);
    folder_ = pattern;
  }
  ~TieredSourceTest() override {
    std::error_code ignored;
    fs::remove_all(folder_, ignored);
  }
  std::unique_ptr<Tier> MakeTier(size_t max_in_flight, uint64_t bytes = 64 << 20) {
    if (!GetParam()) return *MakeMemoryTier(bytes, max_in_flight);
    auto store =
        *FolderStore::Open({.folder = folder_, .capacity_bytes = bytes, .file_bytes = 64 << 10});
    EXPECT_TRUE(store->WaitScanned(60 * kSecond));
    return *FolderStore::MakeTier(std::move(store), max_in_flight);
  }
  std::unique_ptr<TieredSource> Make(std::unique_ptr<Source> inner, uint64_t bytes = 64 << 20) {
    auto tier = MakeTier(inner->capacity() + TieredSource::kMostWrites, bytes);
    auto made = TieredSource::Make(std::move(inner), std::move(tier), Names(), buffer_, metrics_);
    EXPECT_TRUE(made.has_value()) << made.status().ToString();
    return *std::move(made);
  }
  std::unique_ptr<TieredSource> Make(size_t max_in_flight) {
    return Make(*MakeNullSource(max_in_flight));
  }

  // Reads `samples` in random batches; those that fail for good are counted in `failed_`.
  void Read(TieredSource& source, const std::vector<SampleId>& samples, uint64_t seed = 1) {
    SplitMix64 rng(seed);
    std::deque<Bytes> dests;
    std::vector<bool> seen(samples.size());
    std::vector<SourceRead> batch;
    std::vector<SourceDone> out(6);
    size_t submitted = 0;
    size_t finished = 0;
    while (finished < samples.size()) {
      while (batch.size() < 1 + rng.Below(12) && dests.size() < samples.size()) {
        const SampleId sample = samples[dests.size()];
        dests.emplace_back(LengthOf(sample));
        batch.push_back({.tag = dests.size() - 1, .sample = sample, .dest = dests.back()});
      }
      const size_t taken = source.Submit(batch);
      submitted += taken;
      ASSERT_LE(submitted - finished, source.capacity());
      batch.erase(batch.begin(), batch.begin() + static_cast<ptrdiff_t>(taken));
      if (submitted > finished) {
        ASSERT_TRUE(WaitReadable(source));
      }
      const size_t n = source.Reap(out);
      for (size_t i = 0; i < n; ++i, ++finished) {
        const uint64_t tag = out[i].tag;
        ASSERT_LT(tag, submitted);
        ASSERT_FALSE(seen[tag]) << "twice: " << tag;
        seen[tag] = true;
        from_tier_ += source.FromTier(i) ? 1 : 0;
        if (!out[i].status.ok()) {
          ++failed_;
          continue;
        }
        const Bytes truth = Truth(samples[tag]);
        ASSERT_EQ(out[i].crc, Crc32c(truth));
        ASSERT_GE(out[i].latency_ns, 0);
        if (dests[tag] != truth) ++wrong_;
        if (!source.FromTier(i)) Store(source, samples[tag], dests[tag], out[i].crc);
      }
    }
    EXPECT_EQ(source.Reap(out), 0u);
  }
  void Store(TieredSource& source, SampleId sample, const Bytes& bytes, uint32_t crc) {
    const std::optional<uint32_t> room = source.ReserveCopy(bytes.size());
    if (!room) {
      ++no_room_;
    } else {
      source.Store(*room, sample, bytes, crc);
    }
  }
  // The writes behind it are over.
  void Settle(TieredSource& source) {
    for (int i = 0; i < 6000 && source.writes_in_flight() > 0; ++i) {
      std::vector<SourceDone> out(4);
      EXPECT_EQ(source.Reap(out), 0u);
      pollfd waiting{source.event_fd(), POLLIN, 0};
      poll(&waiting, 1, 10);
    }
    EXPECT_EQ(source.writes_in_flight(), 0u);
  }

  static std::vector<SampleId> All() {
    std::vector<SampleId> all;
    for (SampleId s = 0; s < kSamples; ++s) all.push_back(s);
    return all;
  }
  std::vector<fs::path> Files(const std::string& extension) const {
    std::vector<fs::path> found;
    for (const auto& entry : fs::recursive_directory_iterator(folder_)) {
      if (entry.path().extension() == extension) found.push_back(entry.path());
    }
    return found;
  }

  static constexpr uint64_t kBuffer = 4 << 20;
  std::string folder_;
  Registry registry_;
  TierMetrics metrics_{registry_};
  WriteBuffer buffer_{kBuffer};
  size_t from_tier_ = 0;
  size_t failed_ = 0;
  size_t wrong_ = 0;
  size_t no_room_ = 0;  // copies that the write buffer had no room for
};

INSTANTIATE_TEST_SUITE_P(All, TieredSourceTest, testing::Bool(),
                         [](const testing::TestParamInfo<bool>& folder) {
                           return std::string(folder.param ? "folder" : "memory");
                         });

TEST_P(TieredSourceTest, ManyReadsFromASeed) {
  auto source = Make(8);
  SplitMix64 rng(3);
  std::vector<SampleId> samples(2000);
  for (SampleId& s : samples) s = static_cast<SampleId>(rng.Below(kSamples));
  Read(*source, samples);
  Settle(*source);
  Read(*source, samples, 2);
  EXPECT_EQ(failed_ + wrong_, 0u);
  EXPECT_GE(from_tier_, samples.size() - no_room_);
  EXPECT_EQ(metrics_.hits.value(), from_tier_);
}

TEST_P(TieredSourceTest, TheSecondPassComesFromTheTier) {
  auto source = Make(16);
  Read(*source, All());
  Settle(*source);
  EXPECT_EQ(from_tier_, 0u);
  EXPECT_EQ(metrics_.writes.value(), kSamples);
  EXPECT_EQ(metrics_.skipped.value(), 0u);
  std::vector<TieredSource::Ended> ended = source->TakeEnded();
  EXPECT_EQ(ended.size(), kSamples);
  for (const TieredSource::Ended& copy : ended) EXPECT_TRUE(copy.stored);
  EXPECT_TRUE(source->TakeEnded().empty()) << "each is told once";
  EXPECT_EQ(metrics_.used.value(), source->tier().used_bytes());
  Read(*source, All(), 2);
  EXPECT_EQ(from_tier_, kSamples);
  EXPECT_EQ(metrics_.hits.value(), kSamples);
  EXPECT_EQ(failed_ + wrong_, 0u);
  EXPECT_FALSE(source->Describe().empty());
}

TEST_P(TieredSourceTest, WhatIsDroppedIsReadFromTheSourceAgain) {
  auto source = Make(16);
  Read(*source, All());
  Settle(*source);
  (void)source->TakeEnded();
  const std::vector<SampleId> some = {0, 3, kSamples - 1};
  for (const SampleId s : some) ASSERT_TRUE(source->Drop(s));
  std::vector<SampleId> dropped;
  while (dropped.size() < some.size()) {
    ASSERT_TRUE(WaitReadable(*source));
    std::vector<SourceDone> out(4);
    ASSERT_EQ(source->Reap(out), 0u);
    for (const SampleId s : source->TakeDropped()) dropped.push_back(s);
  }
  std::sort(dropped.begin(), dropped.end());
  EXPECT_EQ(dropped, some);
  EXPECT_TRUE(source->TakeDropped().empty()) << "each is told once";
  for (const SampleId s : some) EXPECT_FALSE(source->Holds(s));
  EXPECT_TRUE(source->TakeEnded().empty());
  Read(*source, All(), 2);
  EXPECT_EQ(from_tier_, kSamples - some.size());
  EXPECT_EQ(failed_ + wrong_, 0u);
}

// Nor by way of a peer, whose copy may be as old.
TEST_P(TieredSourceTest, WhatHasAnotherChangeTimeIsReadFromTheSource) {
  const auto stamps = std::make_shared<std::vector<uint32_t>>(20'000, 1);
  std::vector<SampleId> skipped;
  auto made = TieredSource::Make(std::make_unique<SkipNotes>(&skipped),
                                 MakeTier(16 + TieredSource::kMostWrites), Names(stamps), buffer_,
                                 metrics_);
  ASSERT_TRUE(made) << made.status().ToString();
  Read(**made, All());
  Settle(**made);
  EXPECT_TRUE(skipped.empty());
  (*stamps)[7] = 2;
  Read(**made, All(), 2);
  Settle(**made);
  EXPECT_EQ(from_tier_, kSamples - 1);
  EXPECT_EQ(skipped, std::vector<SampleId>{7});
  Read(**made, All(), 3);  // it was compared
  EXPECT_EQ(from_tier_, 2 * kSamples - 1);
  EXPECT_EQ(failed_ + wrong_, 0u);
}

TEST_P(TieredSourceTest, SubmitTakesAPrefixAndReapNeverBlocks) {
  auto source = Make(3);
  EXPECT_EQ(source->capacity(), 3u);
  std::vector<SourceDone> out(8);
  EXPECT_EQ(source->Reap(out), 0u);
  for (int round = 0; round < 2; ++round) {  // from the source, then from the tier
    std::vector<Bytes> dests;
    std::vector<SourceRead> reads;
    for (SampleId i = 0; i < 5; ++i) dests.emplace_back(LengthOf(i + 1));
    for (SampleId i = 0; i < 5; ++i) reads.push_back({.tag = i, .sample = i + 1, .dest = dests[i]});
    EXPECT_EQ(source->Submit(reads), 3u);
    EXPECT_EQ(source->Submit(std::span(reads).subspan(3)), 0u);
    size_t finished = 0;
    while (finished < 3) {
      ASSERT_TRUE(WaitReadable(*source));
      finished += source->Reap(std::span(out).first(1));
    }
    EXPECT_EQ(finished, 3u);
    EXPECT_EQ(source->Submit(std::span(reads).subspan(3)), 2u);
    while (finished < 5) {
      ASSERT_TRUE(WaitReadable(*source));
      finished += source->Reap(out);
    }
    EXPECT_EQ(finished, 5u);
    Settle(*source);
  }
}

TEST_P(TieredSourceTest, CopiesAsFiles) {
  auto inner = *MakeNullSource(8);
  auto tier = MakeTier(inner->capacity() + TieredSource::kMostWrites);
  auto source = *TieredSource::Make(std::move(inner), std::move(tier), Names(), buffer_, metrics_,
                                    /*as_files=*/true);
  Read(*source, All());
  Settle(*source);
  EXPECT_EQ(metrics_.writes.value(), kSamples);
  if (!GetParam()) return;
  size_t files = 0;
  for (const auto& entry : fs::recursive_directory_iterator(folder_)) {
    EXPECT_NE(entry.path().extension(), ".seg");
    files += entry.path().extension() == ".bin" ? 1 : 0;
  }
  EXPECT_EQ(files, kSamples);
}

TEST_P(TieredSourceTest, DestructionWithReadsInFlight) {
  for (int round = 0; round < 2; ++round) {
    auto source = Make(30);
    Read(*source, All());  // leaves writes in flight, or gets for the next round
    std::vector<Bytes> dests;
    std::vector<SourceRead> reads;
    for (SampleId i = 0; i < 30; ++i) dests.emplace_back(LengthOf(i));
    for (SampleId i = 0; i < 30; ++i) reads.push_back({.tag = i, .sample = i, .dest = dests[i]});
    EXPECT_EQ(source->Submit(reads), 30u);
    source.reset();
    dests.clear();
    EXPECT_TRUE(buffer_.Take(kBuffer)) << "all copies have landed";
    buffer_.Give(kBuffer);
  }
}

TEST_P(TieredSourceTest, ForkedChildDestroysWithoutWaiting) {
  auto source = Make(4);
  Read(*source, All());
  const pid_t child = fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    alarm(30);
    source.reset();
    _exit(0);
  }
  int status = -1;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << status;
  Read(*source, All(), 2);
  EXPECT_EQ(failed_ + wrong_, 0u);
}

TEST_P(TieredSourceTest, AFullTierServesWhatItHas) {
  auto source = Make(*MakeNullSource(8), 400'000);
  Read(*source, All());
  Settle(*source);
  const uint64_t held = metrics_.writes.value();
  EXPECT_GT(held, 10u);
  EXPECT_LT(held, kSamples);
  for (int round = 0; round < 3; ++round) {
    from_tier_ = 0;
    Read(*source, All(), 2);
    Settle(*source);
    EXPECT_GE(from_tier_, held) << "nothing that is held goes";
  }
  EXPECT_EQ(failed_ + wrong_, 0u);
}

TEST_P(TieredSourceTest, AFullWriteBufferHasNoRoomUntilCopiesEnd) {
  ASSERT_TRUE(buffer_.Take(kBuffer - 10'000));
  auto source = Make(8);
  Read(*source, All());
  EXPECT_GT(no_room_, 0u);
  EXPECT_EQ(failed_ + wrong_, 0u);
  Settle(*source);
  EXPECT_EQ(no_room_ + metrics_.writes.value(), kSamples);
  const std::optional<uint32_t> room = source->ReserveCopy(10'000);
  ASSERT_TRUE(room) << "what ended has given its room back";
  EXPECT_FALSE(source->ReserveCopy(10'000));
  const SampleId held = source->TakeEnded().front().sample;
  EXPECT_FALSE(source->Store(*room, held, Bytes(10'000), 0)) << "it is there";
  source.reset();
  EXPECT_TRUE(buffer_.Take(10'000)) << "all of it is given back";
}

TEST_P(TieredSourceTest, FailedReadsAreNotStored) {
  auto source = Make(*FaultSource::Make(*MakeNullSource(8), {.error = 0.3, .short_read = 0.2}));
  Read(*source, All());
  Settle(*source);
  EXPECT_GT(failed_, 20u);
  EXPECT_EQ(metrics_.writes.value(), kSamples - failed_);
  // What failed is asked for again, what did not is there.
  const size_t failed_before = std::exchange(failed_, 0);
  from_tier_ = 0;
  Read(*source, All(), 2);
  EXPECT_EQ(from_tier_, kSamples - failed_before);
  EXPECT_EQ(wrong_, 0u);
}

TEST_P(TieredSourceTest, BytesThatDoNotMatchTheirChecksumAreNotServedAgain) {
  auto source = Make(*FaultSource::Make(*MakeNullSource(8), {.seed = 4, .flip = 0.3}));
  Read(*source, All());
  Settle(*source);
  const size_t flipped = std::exchange(wrong_, 0);
  EXPECT_GT(flipped, 10u);
  Read(*source, All(), 2);
  EXPECT_EQ(from_tier_, kSamples - flipped);
  EXPECT_EQ(metrics_.misses.value(), flipped);
  EXPECT_EQ(source->tier().stats().damaged, flipped);
}

class FolderTieredSourceTest : public TieredSourceTest {};
INSTANTIATE_TEST_SUITE_P(All, FolderTieredSourceTest, testing::Values(true));

TEST_P(FolderTieredSourceTest, DamagedCopiesAreFetchedAgain) {
  { Read(*Make(8), All()); }
  size_t damaged = 0;
  for (const fs::path& copy : Files(".bin")) {
    const auto size = static_cast<off_t>(fs::file_size(copy));
    ASSERT_EQ(truncate(copy.c_str(), ++damaged % 2 ? size / 2 : size + 1), 0);
  }
  EXPECT_EQ(damaged, kSamples / 10);
  for (const fs::path& segment : Files(".seg")) {
    const auto size = static_cast<off_t>(fs::file_size(segment));
    ASSERT_EQ(truncate(segment.c_str(), size / 2), 0);
  }
  auto source = Make(8);
  Read(*source, All(), 2);
  EXPECT_EQ(failed_ + wrong_, 0u);
  EXPECT_LE(from_tier_, kSamples - damaged - 10);
  EXPECT_GE(from_tier_, kSamples / 3);
  Settle(*source);
  from_tier_ = 0;
  Read(*source, All(), 3);
  EXPECT_EQ(from_tier_, kSamples) << "repaired";
}

TEST_P(FolderTieredSourceTest, AFolderThatVanishesFailsNothing) {
  auto source = Make(8);
  Read(*source, All());
  Settle(*source);
  fs::remove_all(folder_);
  for (int round = 0; round < 3; ++round) {
    Read(*source, All(), 2);
    Settle(*source);
  }
  EXPECT_EQ(failed_ + wrong_, 0u);
  EXPECT_EQ(from_tier_, 0u);
  EXPECT_FALSE(source->tier().health().ok());
}

TEST(TierDataset, TellsDataSetsApart) {
  std::string pattern = testing::TempDir() + "forebay_tiered_XXXXXX";
  ASSERT_NE(mkdtemp(pattern.data()), nullptr);
  const auto write_file = [](const std::string& path) {
    fs::create_directories(fs::path(path).parent_path());
    const OwnedFd fd(open(path.c_str(), O_WRONLY | O_CREAT, 0600));
    ASSERT_EQ(write(fd.get(), "text", 4), 4);
  };
  write_file(pattern + "/a/x/1.bin");
  write_file(pattern + "/b/x/1.bin");
  const auto built = [](const std::string& path) { return *BuildCatalog(path, {}); };
  const auto a = built(pattern + "/a");
  const auto b = built(pattern + "/b");
  EXPECT_TRUE(MayOutliveTheJob(*a));
  EXPECT_EQ(a->fingerprint(), b->fingerprint());
  EXPECT_NE(TierDataset(*a), TierDataset(*b)) << "same names and sizes, elsewhere";
  EXPECT_EQ(TierDataset(*a), TierDataset(*built(pattern + "/a")));
  // Written anew under the same name: the folder's time says so.
  fs::remove(pattern + "/a/x/1.bin");
  usleep(20'000);  // the kernel's clock of file times ticks at 4 to 10 ms
  write_file(pattern + "/a/x/1.bin");
  EXPECT_NE(TierDataset(*a), TierDataset(*built(pattern + "/a")));
  const std::string paths[] = {pattern + "/a/x/1.bin"};
  const auto listed = *BuildFileList(paths, {});
  EXPECT_TRUE(MayOutliveTheJob(*listed));
  EXPECT_EQ(TierDataset(*listed), TierDataset(**BuildFileList(paths, {})));
  // A listed file that is rewritten in place shows, as would another node's.
  fs::last_write_time(paths[0], fs::last_write_time(paths[0]) + std::chrono::seconds(1));
  const auto rewritten = *BuildFileList(paths, {});
  EXPECT_EQ(listed->fingerprint(), rewritten->fingerprint());
  EXPECT_NE(TierDataset(*listed), TierDataset(*rewritten));
  fs::remove_all(pattern);
}

}  // namespace
}  // namespace forebay
