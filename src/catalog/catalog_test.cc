#include "catalog/catalog.h"

#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <iostream>
#include <iterator>
#include <utility>

#include "base/clock.h"
#include "base/rng.h"
#include "catalog/byte_reader.h"
#include "catalog/image.h"
#include "catalog/parallel.h"
#include "catalog/test_data.h"

namespace forebay {
namespace {

using testing::Bytes;
using testing::Reseal;
using testing::TarEnd;
using testing::TarMember;
using testing::TempFolder;
using testing::TfRecord;
using testing::Touch;

std::unique_ptr<Catalog> Build(const std::string& path) {
  auto catalog = BuildCatalog(path, {});
  EXPECT_TRUE(catalog) << catalog.status().ToString();
  return catalog ? std::move(*catalog) : nullptr;
}

std::vector<std::byte> Copy(const Catalog& catalog) {
  return {catalog.image().begin(), catalog.image().end()};
}

void SetTime(const std::string& path, time_t seconds) {
  const timespec times[2] = {{seconds, 0}, {seconds, 0}};
  ASSERT_EQ(::utimensat(AT_FDCWD, path.c_str(), times, 0), 0);
}

void ExpectStatus(const Status& status, Code code, std::string_view part) {
  EXPECT_EQ(status.code(), code) << status.ToString();
  EXPECT_NE(status.message().find(part), std::string::npos) << status.message();
}

// Small data sets of each kind.
std::vector<std::unique_ptr<Catalog>> Samples() {
  std::vector<std::unique_ptr<Catalog>> out;
  TempFolder t;
  t.Write("a/1.jpg", "11");
  t.Write("a/b/2.jpg", "2");
  t.Write("c/3.jpg", "");
  out.push_back(Build(t.path()));
  TempFolder tar;
  tar.Write("0.tar", TarMember("x.jpg", "X") + TarMember("x.cls", "1") + TarMember("y.txt", "Y"));
  tar.Write("1.tar", TarMember("z.cls", "2") + TarMember("z.jpg", "Z"));
  out.push_back(Build(tar.path()));
  TempFolder records;
  records.Write("0.tfrecord", TfRecord("abc") + TfRecord(""));
  out.push_back(Build(records.path()));
  TempFolder list;
  const std::vector<std::string> paths = {list.Write("d/1", "1"), list.Write("e/2", "22")};
  auto listed = BuildFileList(paths, {});
  EXPECT_TRUE(listed);
  if (listed) out.push_back(std::move(*listed));
  return out;
}

TEST(Catalog, SavesAndLoadsTheSame) {
  TempFolder out;
  for (const auto& catalog : Samples()) {
    ASSERT_NE(catalog, nullptr);
    const std::string file = out / "new/folder/x.catalog";
    ASSERT_TRUE(catalog->Save(file).ok());
    auto loaded = Catalog::Load(file);
    ASSERT_TRUE(loaded) << loaded.status().ToString();
    EXPECT_EQ(Copy(**loaded), Copy(*catalog));
    EXPECT_EQ(Touch(**loaded), Touch(*catalog));
    EXPECT_EQ((*loaded)->fingerprint(), catalog->fingerprint());
    EXPECT_EQ((*loaded)->root(), catalog->root());
    const std::filesystem::directory_iterator files(out / "new/folder");
    EXPECT_EQ(std::distance(begin(files), end(files)), 1) << "nothing is left beside it";
  }
}

TEST(Catalog, SaveWithoutRoomLeavesTheOldFile) {
  TempFolder out;
  const auto catalogs = Samples();
  const std::string file = out / "x.catalog";
  ASSERT_TRUE(catalogs[0]->Save(file).ok());
  // A limit on file sizes stands in for a full disk: both fail in the middle of a write.
  rlimit old;
  ASSERT_EQ(::getrlimit(RLIMIT_FSIZE, &old), 0);
  const auto old_handler = ::signal(SIGXFSZ, SIG_IGN);
  rlimit low = old;
  low.rlim_cur = 200;
  ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &low), 0);
  const Status status = catalogs[1]->Save(file);
  ::setrlimit(RLIMIT_FSIZE, &old);
  ::signal(SIGXFSZ, old_handler);
  EXPECT_FALSE(status.ok());
  EXPECT_NE(status.message().find(file), std::string::npos) << status.ToString();
  auto loaded = Catalog::Load(file);
  ASSERT_TRUE(loaded) << loaded.status().ToString();
  EXPECT_EQ((*loaded)->fingerprint(), catalogs[0]->fingerprint());
  const std::filesystem::directory_iterator files(out.path());
  EXPECT_EQ(std::distance(begin(files), end(files)), 1) << "nothing is left beside it";
}

TEST(Catalog, LoadErrorsNameTheFile) {
  TempFolder t;
  ExpectStatus(Catalog::Load(t / "none").status(), Code::kNotFound, t / "none");
  ExpectStatus(Catalog::Load(t.Write("empty", "")).status(), Code::kDataLoss, t / "empty");
  ExpectStatus(Catalog::Load(t.Write("short", "FBCATLOG")).status(), Code::kDataLoss, "cut off");
  ExpectStatus(Catalog::Load(t.Write("text", std::string(9999, 'x'))).status(), Code::kDataLoss,
               "not a Forebay catalog");
}

TEST(Catalog, OtherVersionAndByteOrderAreRefused) {
  auto catalog = std::move(Samples().front());
  std::vector<std::byte> image = Copy(*catalog);
  image[offsetof(ImageHeader, version)] = std::byte{9};
  Reseal(image);
  ExpectStatus(Catalog::FromImage(image).status(), Code::kUnimplemented, "version 9");
  image = Copy(*catalog);
  std::swap(image[8], image[11]);
  std::swap(image[9], image[10]);
  Reseal(image);
  ExpectStatus(Catalog::FromImage(image).status(), Code::kDataLoss, "byte order");
}

TEST(Catalog, EveryFlippedBitIsFound) {
  for (const auto& catalog : Samples()) {
    const std::vector<std::byte> good = Copy(*catalog);
    ImageView view = *ParseImage(good, "good");
    // Alignment gaps carry nothing.
    std::vector<bool> covered(good.size());
    std::fill_n(covered.begin(), sizeof(ImageHeader) + sizeof view.sections, true);
    for (const SectionRecord& s : view.sections) {
      std::fill_n(covered.begin() + static_cast<ptrdiff_t>(s.offset), s.bytes, true);
    }
    for (size_t i = 0; i < good.size(); ++i) {
      if (!covered[i]) continue;
      std::vector<std::byte> bad = good;
      bad[i] ^= std::byte{1} << (i % 8);
      ASSERT_FALSE(Catalog::FromImage(std::move(bad))) << "byte " << i;
    }
    for (size_t n = 0; n < good.size(); n += 7) {
      ASSERT_FALSE(Catalog::FromImage({good.begin(), good.begin() + static_cast<ptrdiff_t>(n)}));
    }
  }
}

TEST(Catalog, HostileImagesWithRightChecksumsEndInAnError) {
  SplitMix64 rng(1);
  size_t refused = 0;
  for (const auto& catalog : Samples()) {
    const std::vector<std::byte> good = Copy(*catalog);
    for (int round = 0; round < 3000; ++round) {
      std::vector<std::byte> bad = good;
      for (uint64_t edits = 1 + rng.Below(3); edits > 0; --edits) {
        const size_t at = rng.Below(bad.size());
        const uint64_t kind = rng.Below(3);
        bad[at] = kind == 0 ? std::byte{0xff} : static_cast<std::byte>(rng.Next());
        if (kind == 2) bad.resize(bad.size() - rng.Below(9));
      }
      Reseal(bad);
      auto result = Catalog::FromImage(std::move(bad));
      refused += !result;
      if (result) Touch(**result);
    }
  }
  EXPECT_GT(refused, 6000u);
}

// One wrong value at a time, each with right checksums.
TEST(Catalog, EachInvariantIsChecked) {
  auto all = Samples();
  const auto refuse = [](const Catalog& catalog, SectionId section, size_t at, uint32_t value,
                         std::string_view part) {
    std::vector<std::byte> image = Copy(catalog);
    const ImageView view = *ParseImage(image, "good");
    const SectionRecord& record = view.sections[static_cast<size_t>(section)];
    ASSERT_LE(at + 4, record.bytes);
    std::memcpy(image.data() + record.offset + at, &value, 4);
    ASSERT_TRUE(Reseal(image));
    const auto result = Catalog::FromImage(std::move(image));
    ASSERT_FALSE(result) << part;
    EXPECT_NE(result.error().message().find(part), std::string::npos) << result.error().message();
  };
  const Catalog& folder = *all[0];
  refuse(folder, SectionId::kRoot, 0, 0x41414141, "not absolute");
  refuse(folder, SectionId::kRoot, 1, 0, "NUL");
  refuse(folder, SectionId::kFolders, 0, 1, "root folder");
  refuse(folder, SectionId::kFolders, 4, 1, "before its parent");
  refuse(folder, SectionId::kFolders, 4, 0xffffffff, "before its parent");
  refuse(folder, SectionId::kClasses, 0, 99, "class has no folder");
  refuse(folder, SectionId::kObjects, 8, 99, "object has no folder");
  refuse(folder, SectionId::kSamples, 0, 1, "outside its object");
  refuse(folder, SectionId::kSamples, 8, 1, "not its whole file");
  refuse(folder, SectionId::kSamples, 12, 99, "has no object");
  refuse(folder, SectionId::kSamples, 16, 2, "has no class");
  refuse(folder, SectionId::kSamples, 20, 1, "not its whole file");
  refuse(folder, SectionId::kNameOffsets, 0, 1, "name table");
  refuse(folder, SectionId::kNameOffsets, 16, 0xffff, "not in order");
  refuse(folder, SectionId::kNameBytes, 0, 0, "NUL");
  const Catalog& tar = *all[1];
  refuse(tar, SectionId::kSchemas, 0, 1, "schema table");
  refuse(tar, SectionId::kSchemas, 4, 0, "schema");
  refuse(tar, SectionId::kSchemaNames, 0, 99, "no name");
  refuse(tar, SectionId::kFields, 0, 0xffffffff, "outside its span");
  refuse(tar, SectionId::kFields, 4, 0xffffffff, "outside its span");
  refuse(tar, SectionId::kSamples, 4, 0x00630000, "schema");
  refuse(tar, SectionId::kSamples, 8, 0xffffffff, "outside its object");
  refuse(tar, SectionId::kSamples, 20, 1, "fields out of bounds");
  const Catalog& records = *all[2];
  refuse(records, SectionId::kSamples, 4, 0x00010000, "schema");
  refuse(records, SectionId::kObjects, 0, 0, "outside its object");
}

TEST(Catalog, AtMost64BytesASampleAndItsNames) {
  const auto check = [](const Catalog& catalog) {
    const ImageView view = *ParseImage(catalog.image(), "built");
    const uint64_t names = view.sections[static_cast<size_t>(SectionId::kNameOffsets)].bytes +
                           view.sections[static_cast<size_t>(SectionId::kNameBytes)].bytes;
    EXPECT_LE(catalog.image().size() - names, 64 * catalog.size() + 1024)
        << static_cast<int>(catalog.format());
  };
  ShardIndex index;
  index.schemas = {{"jpg", "cls", "json", "txt"}};
  CatalogWriter tar(Format::kWebDataset, "/data", 0);
  for (uint64_t i = 0; i < 100; ++i) {
    index.samples.push_back({.offset = i * 4096,
                             .length = 4096,
                             .label = 1,
                             .crc = 0,
                             .first_field = static_cast<uint32_t>(4 * i),
                             .schema = 0});
    for (uint32_t f = 0; f < 4; ++f) index.fields.push_back({f * 1024, 1024});
    index.keys.append("k");
    index.key_ends.push_back(i + 1);
  }
  for (int s = 0; s < 100; ++s) tar.AddShard(StrCat(s, ".tar"), 4096 * 100, 0, index);
  check(**std::move(tar).Finish());

  CatalogWriter folder(Format::kFolder, "/data", 0);
  for (int c = 0; c < 100; ++c) {
    const uint32_t id = folder.AddFolder(0, StrCat("class", c), 0);
    folder.AddClass(id);
    for (int i = 0; i < 100; ++i) folder.AddFile(id, StrCat(i, ".jpg"), 1, 0, c);
  }
  check(**std::move(folder).Finish());
}

TEST(Catalog, FingerprintIsTheContents) {
  TempFolder a;
  TempFolder b;
  for (const TempFolder* t : {&a, &b}) {
    t->Write("x/1.jpg", "1");
    t->Write("x/2.jpg", "22");
  }
  SetTime(b / "x", 1000);
  const uint64_t print = Build(a.path())->fingerprint();
  EXPECT_EQ(print, Build(b.path())->fingerprint()) << "neither place nor time";
  b.Write("x/2.jpg", "333");
  EXPECT_NE(print, Build(b.path())->fingerprint()) << "sizes";
  std::filesystem::rename(a / "x/2.jpg", a / "x/3.jpg");
  EXPECT_NE(print, Build(a.path())->fingerprint()) << "names";
}

TEST(Catalog, FreshnessOfFolders) {
  TempFolder t;
  for (int i = 0; i < 100; ++i) t.Write(StrCat("c", 100 + i, "/1.jpg"), "1");
  t.Write("c150/deep/1.jpg", "1");
  for (const char* path : {"c150/deep", "c150", "c101", "."}) SetTime(t / path, 1000);
  const auto catalog = Build(t.path());
  ASSERT_NE(catalog, nullptr);
  EXPECT_TRUE(catalog->CheckFresh().ok());
  for (const char* path : {"c150/deep", "c150", "c101"}) {
    SetTime(t / path, 2000);
    ExpectStatus(catalog->CheckFresh(), Code::kChanged, t / path);
    SetTime(t / path, 1000);
  }
  SetTime(t / "c101", 2000);
  SetTime(t / "c150", 2000);
  ExpectStatus(catalog->CheckFresh(), Code::kChanged, t / "c101");
  SetTime(t / "c101", 1000);
  SetTime(t / "c150", 1000);
  EXPECT_TRUE(catalog->CheckFresh().ok());
  t.Write("c101/2.jpg", "2");
  ExpectStatus(catalog->CheckFresh(), Code::kChanged, t / "c101");
  SetTime(t / "c101", 1000);
  t.Folder("new-class");
  ExpectStatus(catalog->CheckFresh(), Code::kChanged, t.path());
  std::filesystem::remove_all(t.path());
  ExpectStatus(catalog->CheckFresh(), Code::kChanged, t.path());
}

TEST(Catalog, FreshnessOfShards) {
  TempFolder t;
  t.Write("a.tar", TarMember("a.x", "A"));
  t.Write("b.tar", TarMember("b.x", "B"));
  SetTime(t / "b.tar", 1000);
  SetTime(t.path(), 1000);
  const auto catalog = Build(t.path());
  const auto one = Build(t / "a.tar");
  ASSERT_NE(catalog, nullptr);
  EXPECT_TRUE(catalog->CheckFresh().ok());
  t.Write("notes.txt", "not a shard");
  EXPECT_TRUE(catalog->CheckFresh().ok());
  SetTime(t / "b.tar", 2000);
  ExpectStatus(catalog->CheckFresh(), Code::kChanged, t / "b.tar");
  t.Write("b.tar", TarMember("b.x", "B") + TarEnd());
  SetTime(t / "b.tar", 1000);
  ExpectStatus(catalog->CheckFresh(), Code::kChanged, t / "b.tar");
  t.Write("b.tar", TarMember("b.x", "B"));
  SetTime(t / "b.tar", 1000);
  EXPECT_TRUE(catalog->CheckFresh().ok());
  t.Write("aa.tar", TarMember("c.x", "C"));
  ExpectStatus(catalog->CheckFresh(), Code::kChanged, t / "aa.tar");
  std::filesystem::remove(t / "b.tar");
  ExpectStatus(catalog->CheckFresh(), Code::kChanged, t / "b.tar");
  EXPECT_TRUE(one->CheckFresh().ok()) << "other shards are not part of it";
}

TEST(Catalog, ALookTellsWhatWasJustWritten) {
  timespec real{};
  clock_gettime(CLOCK_REALTIME, &real);
  const int64_t now = (real.tv_sec * kSecond + real.tv_nsec) | 1;
  const int64_t long_ago = now - 60 * kSecond;
  EXPECT_EQ(StampOfLook(long_ago, now), StampOf(now));
  EXPECT_NE(StampOfLook(long_ago, now), StampOfLook(long_ago, now + 1));
  EXPECT_FALSE(MayDiffer(StampOf(now), StampOf(now)));
  EXPECT_FALSE(MayDiffer(0, StampOf(now)));
  // Now, and by a clock that is ahead of ours.
  for (const int64_t young : {now, now + 3600 * kSecond}) {
    const uint32_t stamp = StampOfLook(young, young);
    EXPECT_TRUE(WasYoung(stamp));
    EXPECT_TRUE(MayDiffer(stamp, stamp));
    EXPECT_TRUE(MayDiffer(stamp, StampOf(young)));
  }
  // Times in whole seconds may be of a clock that is minutes off.
  const int64_t coarse = (real.tv_sec - 60) * kSecond;
  EXPECT_TRUE(WasYoung(StampOfLook(coarse, coarse)));
  EXPECT_EQ(StampOfLook(coarse - 3600 * kSecond, coarse), StampOf(coarse));
}

TEST(Catalog, VerifyFolder) {
  TempFolder t;
  for (int i = 0; i < 10; ++i) t.Write(StrCat("a/", i, ".jpg"), "1");
  const auto catalog = Build(t.path());
  EXPECT_TRUE(catalog->Verify(nullptr).ok());
  t.Write("a/5.jpg", "55");
  ExpectStatus(catalog->Verify(nullptr), Code::kChanged, "5.jpg has 2 bytes, the catalog says 1");
  for (int i = 0; i < 10; ++i) std::filesystem::remove(t / StrCat("a/", i, ".jpg"));
  const Status status = catalog->Verify(nullptr);
  ExpectStatus(status, Code::kChanged, "10 problems");
  EXPECT_NE(status.message().find("0.jpg is gone"), std::string::npos);
  EXPECT_EQ(status.message().find("7.jpg"), std::string::npos);
  EXPECT_EQ(catalog->Verify([](uint64_t, uint64_t) { return false; }).code(), Code::kCancelled);
}

TEST(Catalog, VerifyTar) {
  TempFolder t;
  const std::string bytes = TarMember("a.x", "A") + TarMember("b.x", "B");
  t.Write("1.tar", bytes);
  t.Write("2.tar", bytes);
  const auto catalog = Build(t.path());
  EXPECT_TRUE(catalog->Verify(nullptr).ok());
  std::string bad = bytes;
  bad[1024 + 3] ^= 1;
  t.Write("2.tar", bad);
  ExpectStatus(catalog->Verify(nullptr), Code::kDataLoss, t / "2.tar: offset 1024");
  t.Write("2.tar", TarMember("a.x", "A") + TarMember("c.x", "B"));
  ExpectStatus(catalog->Verify(nullptr), Code::kChanged, "2.tar/b");
  t.Write("2.tar", TarMember("a.x", "A") + TarMember("b.y", "B"));
  ExpectStatus(catalog->Verify(nullptr), Code::kChanged, "2.tar/b");
  t.Write("2.tar", TarMember("a.x", "A") + TarMember("a.y", "B"));
  ExpectStatus(catalog->Verify(nullptr), Code::kChanged, "1 samples, the catalog says 2");
  t.Write("2.tar", bytes.substr(0, 1024));
  ExpectStatus(catalog->Verify(nullptr), Code::kChanged, "1024 bytes");
}

TEST(Catalog, VerifyTfRecordChecksTheData) {
  TempFolder t;
  const std::string bytes = TfRecord("hello") + TfRecord("") + TfRecord("world");
  t.Write("1.tfrecord", bytes);
  const auto catalog = Build(t.path());
  EXPECT_TRUE(catalog->Verify(nullptr).ok());
  std::string bad = bytes;
  bad[bytes.size() - 6] ^= 1;
  t.Write("1.tfrecord", bad);
  ExpectStatus(catalog->Verify(nullptr), Code::kDataLoss,
               StrCat("offset ", bytes.size() - 9, ": record of 5 bytes"));
}

class OpenCatalog : public ::testing::Test {
 protected:
  void SetUp() override { ::setenv("FOREBAY_CACHE_DIR", (cache_ / "c").c_str(), 1); }
  void TearDown() override { ::unsetenv("FOREBAY_CACHE_DIR"); }

  OpenedCatalog Open(const std::string& path, const BuildOptions& options = {}) {
    auto opened = OpenOrBuild(path, options);
    EXPECT_TRUE(opened) << opened.status().ToString();
    return opened ? std::move(*opened) : OpenedCatalog();
  }

  TempFolder cache_;
};

TEST_F(OpenCatalog, BuildsOnceAndAgainAfterAChange) {
  TempFolder t;
  t.Write("a/1.jpg", "1");
  SetTime(t / "a", 1000);
  OpenedCatalog first = Open(t.path());
  EXPECT_TRUE(first.rebuilt);
  EXPECT_EQ(first.note, "");
  OpenedCatalog second = Open(StrCat(t.path(), "/"));
  EXPECT_FALSE(second.rebuilt);
  EXPECT_EQ(second.catalog->fingerprint(), first.catalog->fingerprint());
  t.Write("a/2.jpg", "2");
  OpenedCatalog third = Open(t.path());
  EXPECT_TRUE(third.rebuilt);
  EXPECT_EQ(third.catalog->size(), 2u);
  EXPECT_NE(third.note.find("changed"), std::string::npos);
  EXPECT_FALSE(Open(t.path()).rebuilt);
  BuildOptions options;
  options.extensions = {".jpg"};
  EXPECT_TRUE(Open(t.path(), options).rebuilt) << "other options, other catalog";
}

TEST_F(OpenCatalog, SingleShardIsFoundAgain) {
  TempFolder t;
  const std::string file = t.Write("a.tar", TarMember("a.x", "1"));
  EXPECT_TRUE(Open(file).rebuilt);
  EXPECT_FALSE(Open(file).rebuilt);
}

TEST_F(OpenCatalog, AListIsFoundAgainUntilAFolderChanges) {
  TempFolder t;
  const std::vector<std::string> paths = {t.Write("b/2.jpg", "22"), t.Write("a/1.jpg", "1"),
                                          t.Write("b/3.jpg", "333")};
  SetTime(t / "a", 1000);
  SetTime(t / "b", 1000);
  const auto open = [](const std::vector<std::string>& list) {
    auto opened = OpenFileList(list, {});
    EXPECT_TRUE(opened) << opened.status().ToString();
    return *std::move(opened);
  };
  const OpenedCatalog first = open(paths);
  EXPECT_TRUE(first.rebuilt);
  EXPECT_EQ(first.note, "");
  EXPECT_EQ(std::filesystem::status(first.file).permissions(),
            std::filesystem::perms::owner_read | std::filesystem::perms::owner_write);
  const OpenedCatalog second = open(paths);
  EXPECT_FALSE(second.rebuilt);
  EXPECT_EQ(second.file, first.file);
  ASSERT_EQ(second.catalog->size(), 3u);
  EXPECT_EQ(second.catalog->image().size(), first.catalog->image().size());
  EXPECT_EQ(second.catalog->fingerprint(), first.catalog->fingerprint());
  for (SampleId s = 0; s < 3; ++s) {
    EXPECT_EQ(second.catalog->ObjectPath(second.catalog->object(s)), paths[s]);
  }
  // Another order, and a part, are other lists.
  EXPECT_TRUE(open({paths[1], paths[0], paths[2]}).rebuilt);
  EXPECT_TRUE(open({paths[0], paths[1]}).rebuilt);
  EXPECT_FALSE(open(paths).rebuilt);
  // A file is replaced by another one, as programs do that write safely.
  std::filesystem::rename(t.Write("new", "4444"), paths[2]);
  const OpenedCatalog third = open(paths);
  EXPECT_TRUE(third.rebuilt);
  EXPECT_EQ(third.catalog->length(2), 4u);
  EXPECT_NE(third.file, first.file);
  EXPECT_FALSE(std::filesystem::exists(first.file)) << "one file for each list";
  EXPECT_FALSE(open(paths).rebuilt);
  // One that is gone is named.
  std::filesystem::remove(paths[1]);
  ExpectStatus(OpenFileList(paths, {}).status(), Code::kNotFound, paths[1]);
  std::filesystem::remove_all(t / "a");
  ExpectStatus(OpenFileList(paths, {}).status(), Code::kNotFound, paths[1]);
  ExpectStatus(OpenFileList({}, {}).status(), Code::kInvalidArgument, "empty");
}

TEST_F(OpenCatalog, AListWhoseFileIsAnothersIsBuiltAgain) {
  TempFolder t;
  const std::vector<std::string> paths = {t.Write("a/1.jpg", "1")};
  const std::vector<std::string> others = {t.Write("a/2.jpg", "2")};
  SetTime(t / "a", 1000);
  const auto one = OpenFileList(paths, {});
  const auto other = OpenFileList(others, {});
  ASSERT_TRUE(one && other);
  // As if two lists had one name.
  std::filesystem::copy_file(other->file, one->file,
                             std::filesystem::copy_options::overwrite_existing);
  const auto again = OpenFileList(paths, {});
  ASSERT_TRUE(again);
  EXPECT_TRUE(again->rebuilt);
  EXPECT_EQ(again->catalog->ObjectPath(0), paths[0]);
  std::filesystem::resize_file(again->file, 100);
  const auto mended = OpenFileList(paths, {});
  ASSERT_TRUE(mended);
  EXPECT_TRUE(mended->rebuilt);
  EXPECT_NE(mended->note.find(again->file), std::string::npos);
}

TEST_F(OpenCatalog, DamagedFileIsBuiltAgain) {
  TempFolder t;
  t.Write("a/1.jpg", "1");
  Open(t.path());
  const std::string file = DefaultCatalogFile(t.path(), {});
  std::filesystem::resize_file(file, 300);
  OpenedCatalog again = Open(t.path());
  EXPECT_TRUE(again.rebuilt);
  EXPECT_NE(again.note.find(file), std::string::npos);
  EXPECT_FALSE(Open(t.path()).rebuilt);
}

TEST_F(OpenCatalog, FailingSaveIsANote) {
  TempFolder t;
  t.Write("a/1.jpg", "1");
  cache_.Write("c", "a file where the folder should be");
  OpenedCatalog opened = Open(t.path());
  ASSERT_NE(opened.catalog, nullptr);
  EXPECT_TRUE(opened.rebuilt);
  EXPECT_NE(opened.note.find("not saved"), std::string::npos);
  ::setenv("FOREBAY_CACHE_DIR", "/proc/forebay", 1);
  EXPECT_NE(Open(t.path()).note.find("not saved"), std::string::npos);
}

mode_t ModeOf(const std::string& path) {
  struct stat st = {};
  EXPECT_EQ(::lstat(path.c_str(), &st), 0) << path;
  return st.st_mode & 07777;
}

constexpr uid_t kStranger = 65534;

TEST_F(OpenCatalog, OthersCannotReadWhatIsSaved) {
  TempFolder t;
  t.Write("a/1.jpg", "1");
  SetTime(t / "a", 1000);
  const mode_t before = ::umask(0);
  const OpenedCatalog first = Open(t.path());
  const Status elsewhere = first.catalog->Save(cache_ / "of/her/own.catalog");
  ::umask(before);
  EXPECT_TRUE(first.rebuilt);
  EXPECT_EQ(first.note, "");
  EXPECT_EQ(ModeOf(cache_ / "c"), 0700u);
  const std::string file = DefaultCatalogFile(t.path(), {});
  EXPECT_EQ(ModeOf(file), 0600u);
  // A file that the user names has the mode that the user's umask gives it.
  ASSERT_TRUE(elsewhere.ok());
  EXPECT_EQ(ModeOf(cache_ / "of/her/own.catalog"), 0666u);
  // What an older version saved.
  ASSERT_EQ(::chmod(file.c_str(), 0644), 0);
  EXPECT_FALSE(Open(t.path()).rebuilt);
  EXPECT_EQ(ModeOf(file), 0600u);
}

TEST_F(OpenCatalog, ASavedCatalogOfSomebodyElseIsNotUsed) {
  TempFolder t;
  t.Write("a/1.jpg", "1");
  SetTime(t / "a", 1000);
  const std::string file = DefaultCatalogFile(t.path(), {});
  const std::string aside = cache_ / "aside";
  for (int kind = 0; kind < 5; ++kind) {
    Open(t.path());
    ASSERT_FALSE(Open(t.path()).rebuilt);
    if (kind == 0) {
      if (::geteuid() != 0) continue;  // only root can make files of another user
      ASSERT_EQ(::chown(file.c_str(), kStranger, kStranger), 0);
    } else if (kind == 1) {
      ASSERT_EQ(::chmod(file.c_str(), 0660), 0);
    } else if (kind == 2) {
      std::filesystem::rename(file, aside);
      std::filesystem::create_symlink(aside, file);
    } else if (kind == 3) {
      std::filesystem::remove(file);
      ASSERT_EQ(::mkfifo(file.c_str(), 0600), 0);
    } else {
      std::filesystem::remove(file);
      ASSERT_EQ(::mkfifo(aside.c_str(), 0600), 0);
      std::filesystem::create_symlink(aside, file);
    }
    const OpenedCatalog opened = Open(t.path());
    EXPECT_TRUE(opened.rebuilt) << kind;
    EXPECT_NE(opened.note.find(StrCat("the saved catalog ", file)), std::string::npos)
        << kind << ": " << opened.note;
    EXPECT_NE(opened.note.find("not a regular file of this user"), std::string::npos)
        << kind << ": " << opened.note;
    EXPECT_FALSE(Open(t.path()).rebuilt) << kind << ": a new one lies in its place";
    std::filesystem::remove(aside);
  }
}

TEST_F(OpenCatalog, AFolderThatOthersMayWriteToIsNotUsed) {
  TempFolder t;
  t.Write("a/1.jpg", "1");
  SetTime(t / "a", 1000);
  Open(t.path());
  const std::string folder = cache_ / "c";
  ASSERT_EQ(::chmod(folder.c_str(), 0775), 0);
  OpenedCatalog opened = Open(t.path());
  EXPECT_TRUE(opened.rebuilt);
  EXPECT_NE(opened.note.find(StrCat("others may write to ", folder)), std::string::npos)
      << opened.note;
  EXPECT_NE(opened.note.find("mode 0775"), std::string::npos) << opened.note;
  ASSERT_EQ(::chmod(folder.c_str(), 01777), 0);
  EXPECT_FALSE(Open(t.path()).rebuilt) << "sticky, as /tmp: the owner of the file tells";
  ASSERT_EQ(::chmod(folder.c_str(), 0755), 0);
  if (::geteuid() != 0) GTEST_SKIP() << "NOT TESTED: only root can make folders of another user";
  ASSERT_EQ(::chown(folder.c_str(), kStranger, kStranger), 0);
  opened = Open(t.path());
  EXPECT_TRUE(opened.rebuilt);
  EXPECT_NE(opened.note.find("user 65534"), std::string::npos) << opened.note;
}

// The folder of Forebay's own name, as older versions made it where the umask is 002.
TEST_F(OpenCatalog, TheDefaultFolderIsClosedToOthers) {
  TempFolder t;
  t.Write("a/1.jpg", "1");
  SetTime(t / "a", 1000);
  ::unsetenv("FOREBAY_CACHE_DIR");
  ::setenv("XDG_CACHE_HOME", cache_.path().c_str(), 1);
  cache_.Folder("forebay");
  ASSERT_EQ(::chmod((cache_ / "forebay").c_str(), 0775), 0);
  const OpenedCatalog first = Open(t.path());
  const OpenedCatalog second = Open(t.path());
  ::unsetenv("XDG_CACHE_HOME");
  EXPECT_EQ(first.note, "");
  EXPECT_FALSE(second.rebuilt);
  EXPECT_EQ(ModeOf(cache_ / "forebay"), 0700u);
}

TEST(Catalog, AFifoIsNotWaitedFor) {
  TempFolder t;
  const std::string fifo = t / "fifo";
  ASSERT_EQ(::mkfifo(fifo.c_str(), 0600), 0);
  ExpectStatus(Catalog::Load(fifo).status(), Code::kDataLoss, fifo);
  ExpectStatus(FileReader::Open(fifo).status(), Code::kInvalidArgument, fifo);
}

TEST_F(OpenCatalog, MissingDataSetIsAnError) {
  ExpectStatus(OpenOrBuild("/nowhere/at/all", {}).status(), Code::kNotFound, "/nowhere/at/all");
}

TEST_F(OpenCatalog, WhereCatalogsAreKept) {
  const auto with = [](const char* cache, const char* xdg, const char* home) {
    const std::string old_home = std::getenv("HOME") ? std::getenv("HOME") : "";
    for (auto [name, value] :
         {std::pair("FOREBAY_CACHE_DIR", cache), {"XDG_CACHE_HOME", xdg}, {"HOME", home}}) {
      value == nullptr ? ::unsetenv(name) : ::setenv(name, value, 1);
    }
    const std::string file = DefaultCatalogFile("/data/train set", {});
    ::unsetenv("XDG_CACHE_HOME");
    ::setenv("HOME", old_home.c_str(), 1);
    return file;
  };
  const std::string a = with("/c", "/x", "/h");
  EXPECT_EQ(a.substr(0, 13), "/c/train_set-");
  EXPECT_EQ(a.size(), std::string("/c/train_set-0123456789abcdef.catalog").size());
  const std::string base = a.substr(3);
  EXPECT_EQ(with(nullptr, "/x", "/h"), "/x/forebay/" + base);
  EXPECT_EQ(with(nullptr, "relative", "/h"), "/h/.cache/forebay/" + base);
  EXPECT_EQ(with(nullptr, nullptr, "/h"), "/h/.cache/forebay/" + base);
  EXPECT_EQ(with(nullptr, nullptr, nullptr), "");
}

TEST(WorkStack, FirstErrorDropsTheRest) {
  WorkStack work(1);
  std::atomic<int> ran = 0;
  for (int i = 0; i < 100; ++i) {
    work.Push([&]() -> Status {
      ++ran;
      return Status(Code::kDataLoss, "bad");
    });
  }
  EXPECT_EQ(work.Drain(nullptr).code(), Code::kDataLoss);
  EXPECT_EQ(ran, 1);
  EXPECT_TRUE(work.stopping());
}

TEST(WorkStack, TasksMayPushTasks) {
  std::atomic<int> ran = 0;
  WorkStack work(8);
  std::function<Status(int)> task = [&](int depth) -> Status {
    ++ran;
    for (int i = 0; depth > 0 && i < 2; ++i) work.Push([&, depth] { return task(depth - 1); });
    return Status();
  };
  work.Push([&] { return task(9); });
  EXPECT_TRUE(work.Drain(nullptr).ok());
  EXPECT_EQ(ran, 1023);
}

// Prints how long reopening takes; only the outcome is asserted.
TEST(Catalog, ReopensAMillionFiles) {
  TempFolder t;
  TempFolder out;
  CatalogWriter writer(Format::kFolder, t.path(), 0);
  for (int c = 0; c < 1000; ++c) t.Folder(StrCat("n", 10000000 + c));
  SetTime(t.path(), 0);
  for (int c = 0; c < 1000; ++c) {
    const std::string name = StrCat("n", 10000000 + c);
    SetTime(t / name, 1000);
    const uint32_t folder = writer.AddFolder(0, name, 1000 * kSecond);
    writer.AddClass(folder);
    for (int i = 0; i < 1000; ++i) {
      writer.AddFile(folder, StrCat(name, "_", i, ".JPEG"), static_cast<uint32_t>(100000 + i), 0,
                     c);
    }
  }
  auto built = std::move(writer).Finish();
  ASSERT_TRUE(built) << built.status().ToString();
  ASSERT_TRUE((*built)->Save(out / "x.catalog").ok());
  Nanos best_load = 0;
  Nanos best_check = 0;
  for (int round = 0; round < 5; ++round) {
    const Nanos start = SteadyClock().Now();
    auto loaded = Catalog::Load(out / "x.catalog");
    const Nanos mid = SteadyClock().Now();
    ASSERT_TRUE(loaded) << loaded.status().ToString();
    const Status fresh = (*loaded)->CheckFresh();
    const Nanos end = SteadyClock().Now();
    ASSERT_TRUE(fresh.ok()) << fresh.ToString();
    if (round == 0 || end - start < best_load + best_check) {
      best_load = mid - start;
      best_check = end - mid;
    }
  }
  std::cout << "1,000,000 files in 1,000 folders, " << (*built)->image().size() << " bytes: load "
            << best_load / kMicro << " us, check " << best_check / kMicro << " us\n";
}

}  // namespace
}  // namespace forebay
