#include "files/shard_parts.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/crc32c.h"
#include "catalog/paths.h"
#include "catalog/test_data.h"

namespace forebay::files {
namespace {

using testing::TarEnd;
using testing::TarMember;
using testing::TempFolder;
using testing::TfRecord;
using Content = std::vector<std::byte>;

std::string Sample(int number, size_t bytes) {
  std::string out(bytes, static_cast<char>('a' + number));
  for (size_t i = 0; i < bytes; i += 100) out[i] = static_cast<char>(i / 100);
  return out;
}

class ShardPartsTest : public ::testing::Test {
 protected:
  void SetUp() override {
    ::setenv("FOREBAY_CACHE_DIR", (folder_ / "catalogs").c_str(), 1);
    Result<std::shared_ptr<FolderStore>> store =
        FolderStore::Open({.folder = folder_ / "store", .capacity_bytes = 64 << 20});
    ASSERT_TRUE(store) << store.error().ToString();
    store_ = *std::move(store);
    ASSERT_TRUE(store_->WaitScanned(20 * kSecond));
    tier_ = *FolderStore::MakeTier(store_, 8);
    parts_.emplace(*store_);
  }
  void TearDown() override { ::unsetenv("FOREBAY_CACHE_DIR"); }

  // Lists `data` and puts what it has into the store.
  void Warm(const std::string& data, SampleId but = ~SampleId{0}) {
    Result<OpenedCatalog> opened = OpenOrBuild(data, {});
    ASSERT_TRUE(opened) << opened.error().ToString();
    const std::shared_ptr<const Catalog> catalog = std::move(opened->catalog);
    const CopyNames names(catalog);
    for (SampleId sample = 0; sample < catalog->size(); ++sample) {
      if (sample == but) continue;
      const Extent extent = catalog->extent(sample);
      const Content whole = Read(catalog->ObjectPath(extent.object));
      const auto begin = whole.begin() + static_cast<ptrdiff_t>(extent.offset);
      Content bytes(begin, begin + static_cast<ptrdiff_t>(extent.length));
      Put(names.Of(sample), bytes);
    }
  }
  void Put(const TierKey& key, Content& bytes) {
    const TierOp put = {
        .kind = TierOp::Kind::kPut, .key = key, .bytes = bytes, .crc = Crc32c(bytes)};
    ASSERT_EQ(tier_->Submit(std::span(&put, 1)), 1u);
    TierDone done;
    pollfd ready = {.fd = tier_->event_fd(), .events = POLLIN, .revents = 0};
    while (tier_->Reap(std::span(&done, 1)) == 0) ASSERT_EQ(poll(&ready, 1, 20'000), 1);
    ASSERT_TRUE(done.stored);
  }
  static Content Read(const std::string& path) {
    Content out(std::filesystem::file_size(path));
    const OwnedFd fd(open(path.c_str(), O_RDONLY | O_CLOEXEC));
    EXPECT_EQ(pread(fd.get(), out.data(), out.size(), 0), static_cast<ssize_t>(out.size()));
    return out;
  }
  // What parts make of the extent of `path`, where the source has `instead`; empty: nothing.
  Content Take(const std::string& path, uint64_t offset, uint64_t bytes,
               const std::string& instead) {
    struct stat st = {};
    EXPECT_EQ(stat(path.c_str(), &st), 0);
    const OwnedFd fd(open(instead.c_str(), O_PATH | O_CLOEXEC));
    Content out;
    const bool read = parts_->Read({path, static_cast<uint64_t>(st.st_size), MtimeNs(st)}, fd.get(),
                                   offset, bytes, &out);
    return read ? out : Content();
  }
  // The file with other bytes in the place of samples: what is read of those is found out.
  std::string WithoutSamples(const std::string& path, const Catalog& catalog) {
    const Content whole = Read(path);
    std::string text(reinterpret_cast<const char*>(whole.data()), whole.size());
    for (SampleId sample = 0; sample < catalog.size(); ++sample) {
      const Extent extent = catalog.extent(sample);
      if (catalog.ObjectPath(extent.object) != path) continue;
      text.replace(extent.offset, extent.length, std::string(extent.length, '!'));
    }
    return folder_.Write("instead", text);
  }

  TempFolder folder_;
  std::shared_ptr<FolderStore> store_;
  std::unique_ptr<Tier> tier_;
  std::optional<ShardParts> parts_;
};

std::string Tar(int samples, size_t bytes) {
  std::string out;
  for (int i = 0; i < samples; ++i) {
    out += TarMember(StrCat(i, ".jpg"), Sample(i, bytes + static_cast<size_t>(i) * 77));
    out += TarMember(StrCat(i, ".cls"), "7");
  }
  return out + TarEnd();
}

TEST_F(ShardPartsTest, ATarIsItsSamplesAndWhatLiesBetween) {
  const std::string path = folder_.Write("data/a.tar", Tar(10, 50'000));
  folder_.Write("data/b.tar", Tar(12, 40'000));
  Warm(folder_ / "data");
  const std::string instead = WithoutSamples(path, *LoadSaved(folder_ / "data", {}));
  const Content whole = Read(path);
  EXPECT_TRUE(Take(path, 0, whole.size(), instead) == whole);
  // A part that begins and ends within samples.
  const Content middle(whole.begin() + 70'000, whole.begin() + 270'000);
  EXPECT_TRUE(Take(path, 70'000, 200'000, instead) == middle);
}

TEST_F(ShardPartsTest, TfRecords) {
  std::string records;
  for (int i = 0; i < 8; ++i) records += TfRecord(Sample(i, 30'000));
  const std::string path = folder_.Write("data/a.tfrecord", records);
  Warm(path);
  const std::string instead = WithoutSamples(path, *LoadSaved(path, {}));
  EXPECT_TRUE(Take(path, 0, records.size(), instead) == Read(path));
}

TEST_F(ShardPartsTest, ASampleThatIsNotHeldComesFromTheSource) {
  const std::string path = folder_.Write("data/a.tar", Tar(10, 50'000));
  Warm(folder_ / "data", 3);
  const Content whole = Read(path);
  EXPECT_TRUE(Take(path, 0, whole.size(), path) == whole);
  const std::string instead = WithoutSamples(path, *LoadSaved(folder_ / "data", {}));
  EXPECT_FALSE(Take(path, 0, whole.size(), instead) == whole);
}

TEST_F(ShardPartsTest, NothingWhereItIsNotWorthIt) {
  const std::string small = folder_.Write("small/a.tar", Tar(20, 10));
  Warm(folder_ / "small");
  EXPECT_TRUE(Take(small, 0, Read(small).size(), small).empty()) << "a page for each header";
  const std::string other = folder_.Write("other/a.tar", Tar(10, 50'000));
  EXPECT_TRUE(Take(other, 0, Read(other).size(), other).empty()) << "nobody has listed it";
}

TEST_F(ShardPartsTest, NothingOfAFileThatChanged) {
  const std::string path = folder_.Write("data/a.tar", Tar(10, 50'000));
  Warm(folder_ / "data");
  const uint64_t size = Read(path).size();
  EXPECT_FALSE(Take(path, 0, size, path).empty());
  const timespec times[2] = {{1'000'000'000, 0}, {1'000'000'000, 0}};
  struct stat st = {};
  ASSERT_EQ(stat(path.c_str(), &st), 0);
  ASSERT_EQ(utimensat(AT_FDCWD, path.c_str(), times, 0), 0);
  EXPECT_TRUE(Take(path, 0, size, path).empty());
  const timespec before[2] = {st.st_mtim, st.st_mtim};
  ASSERT_EQ(utimensat(AT_FDCWD, path.c_str(), before, 0), 0);
  EXPECT_FALSE(Take(path, 0, size, path).empty());
  parts_->Forget(path);
  EXPECT_TRUE(Take(path, 0, size, path).empty()) << "somebody is about to write it";
}

TEST_F(ShardPartsTest, ADamagedCopyIsNotUsed) {
  const std::string path = folder_.Write("data/a.tar", Tar(4, 300'000));
  Warm(folder_ / "data");
  for (const auto& entry : std::filesystem::recursive_directory_iterator(folder_ / "store")) {
    if (!entry.is_regular_file() || entry.file_size() < 300'000) continue;
    const OwnedFd fd(open(entry.path().c_str(), O_WRONLY | O_CLOEXEC));
    ASSERT_EQ(pwrite(fd.get(), "damage", 6, 1000), 6);
  }
  EXPECT_TRUE(Take(path, 0, Read(path).size(), path).empty());
}

}  // namespace
}  // namespace forebay::files
