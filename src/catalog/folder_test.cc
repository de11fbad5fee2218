#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/stat.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdlib>
#include <cstring>

#include "base/crc32c.h"
#include "catalog/catalog.h"
#include "catalog/image.h"
#include "catalog/lister.h"
#include "catalog/paths.h"
#include "catalog/test_data.h"

namespace forebay {
namespace {

using testing::TempFolder;

std::vector<std::string> Names(const Catalog& catalog) {
  std::vector<std::string> out;
  for (SampleId s = 0; s < catalog.size(); ++s) {
    out.push_back(StrCat(catalog.SampleName(s), " ", catalog.label(s)));
  }
  return out;
}

std::unique_ptr<Catalog> Build(const std::string& path, const BuildOptions& options = {}) {
  auto catalog = BuildCatalog(path, options);
  EXPECT_TRUE(catalog) << catalog.status().ToString();
  return catalog ? std::move(*catalog) : nullptr;
}

// The status of a build that must fail; its message must hold each of `parts`.
Status Failure(const std::string& path, const BuildOptions& options,
               std::initializer_list<std::string_view> parts) {
  auto catalog = BuildCatalog(path, options);
  EXPECT_FALSE(catalog);
  if (catalog) return Status();
  for (std::string_view part : parts) {
    EXPECT_NE(catalog.error().message().find(part), std::string::npos)
        << catalog.error().message() << "\nlacks " << part;
  }
  return catalog.error();
}

// Runs as a user without rights where the tests run as root, who may read everything.
class AsNobody {
 public:
  AsNobody() : root_(::geteuid() == 0) {
    if (root_) active_ = ::seteuid(65534) == 0;
  }
  ~AsNobody() {
    if (active_) (void)!::seteuid(0);
  }
  bool works() const { return !root_ || active_; }

 private:
  const bool root_;
  bool active_ = false;
};

TEST(FolderCatalog, OrderIsThatOfImageFolder) {
  TempFolder t;
  t.Write("b/2.jpg", "22");
  t.Write("b/10.jpg", "1010");
  t.Write("b/1.jpg", "");
  t.Write("a/x/1.jpg", "ax1");
  t.Write("a/x-longer/1.jpg", "axy1");  // '-' sorts before '/'
  t.Write("a/x/deep/0.jpg", "d");
  t.Write("a/z.jpg", "z");
  t.Write("a/.hidden.jpg", "h");
  t.Write("a-b/1.jpg", "ab");
  t.Write("B/1.jpg", "B");
  t.Folder("empty");
  t.Write("top.jpg", "ignored");
  t.Write(".dot/1.jpg", "dot");
  const auto catalog = Build(t.path());
  ASSERT_NE(catalog, nullptr);
  EXPECT_EQ(catalog->Classes(), (std::vector<std::string>{".dot", "B", "a", "a-b", "b", "empty"}));
  EXPECT_EQ(Names(*catalog),
            (std::vector<std::string>{".dot/1.jpg 0", "B/1.jpg 1", "a/.hidden.jpg 2", "a/z.jpg 2",
                                      "a/x/1.jpg 2", "a/x-longer/1.jpg 2", "a/x/deep/0.jpg 2",
                                      "a-b/1.jpg 3", "b/1.jpg 4", "b/10.jpg 4", "b/2.jpg 4"}));
  EXPECT_EQ(catalog->format(), Format::kFolder);
  EXPECT_EQ(catalog->root(), t.path());
  EXPECT_EQ(catalog->size(), 11u);
  EXPECT_EQ(catalog->object_count(), 11u);
  EXPECT_EQ(catalog->length(8), 0u) << "a file of no bytes is a sample";
  EXPECT_EQ(catalog->length(9), 4u);
  EXPECT_EQ(catalog->max_length(), 4u);
  EXPECT_EQ(catalog->total_bytes(), 3u + 1 + 1 + 3 + 4 + 1 + 2 + 1 + 0 + 4 + 2);
  EXPECT_EQ(catalog->ObjectPath(4), t / "a/x/1.jpg");
  const Extent extent = catalog->extent(9);
  EXPECT_TRUE(extent.whole_object);
  EXPECT_FALSE(extent.has_crc);
  EXPECT_EQ(extent.offset, 0u);
  const std::vector<FieldView> fields = catalog->Fields(9);
  ASSERT_EQ(fields.size(), 1u);
  EXPECT_EQ(fields[0].name, "data");
  EXPECT_EQ(fields[0].length, 4u);
}

TEST(FolderCatalog, ExtensionsInAnyCase) {
  TempFolder t;
  t.Write("a/1.JPG", "1");
  t.Write("a/2.jpeg", "2");
  t.Write("a/3.txt", "3");
  t.Write("a/jpg", "4");
  t.Folder("b");
  BuildOptions options;
  options.extensions = {".jpg", ".jpeg"};
  const auto catalog = Build(t.path(), options);
  ASSERT_NE(catalog, nullptr);
  EXPECT_EQ(Names(*catalog), (std::vector<std::string>{"a/1.JPG 0", "a/2.jpeg 0"}));
  EXPECT_EQ(catalog->Classes(), (std::vector<std::string>{"a", "b"}));
}

TEST(FolderCatalog, FlatFolderHasNoLabels) {
  TempFolder t;
  t.Write("b.bin", "b");
  t.Write("a.bin", "aa");
  const auto catalog = Build(StrCat(t.path(), "//./"));
  ASSERT_NE(catalog, nullptr);
  EXPECT_EQ(Names(*catalog), (std::vector<std::string>{"a.bin -1", "b.bin -1"}));
  EXPECT_TRUE(catalog->Classes().empty());
  EXPECT_EQ(catalog->root(), t.path());
}

TEST(FolderCatalog, FollowsLinksAndSurvivesLoops) {
  TempFolder elsewhere;
  elsewhere.Write("sub/1.jpg", "1");
  elsewhere.Write("big.jpg", "big");
  TempFolder t;
  t.Write("a/1.jpg", "1");
  t.Link(elsewhere / "big.jpg", "a/link.jpg");
  t.Link(elsewhere.path(), "linked");
  t.Link("..", "a/up");  // the root: its classes would repeat for ever
  t.Link(".", "a/self");
  t.Link(".", "rootlink");
  t.Link("nowhere", "dangling-at-top");
  const auto catalog = Build(t.path());
  ASSERT_NE(catalog, nullptr);
  EXPECT_EQ(catalog->Classes(), (std::vector<std::string>{"a", "linked", "rootlink"}));
  EXPECT_EQ(Names(*catalog), (std::vector<std::string>{"a/1.jpg 0", "a/link.jpg 0",
                                                       "linked/big.jpg 1", "linked/sub/1.jpg 1"}));
  EXPECT_EQ(catalog->length(1), 3u);
}

TEST(FolderCatalog, ManyFilesAndThreads) {
  TempFolder t;
  std::vector<std::string> expected;
  for (int c = 0; c < 5; ++c) {
    for (int i = 0; i < 500; ++i) {
      const std::string name = StrCat("c", c, "/", 10000 + i, ".bin");
      t.Write(name, std::string(static_cast<size_t>(i % 7), 'x'));
      expected.push_back(StrCat(name, " ", c));
    }
  }
  for (size_t threads : {1, 3, 64}) {
    BuildOptions options;
    options.threads = threads;
    const auto catalog = Build(t.path(), options);
    ASSERT_NE(catalog, nullptr);
    ASSERT_EQ(Names(*catalog), expected) << threads;
    for (SampleId s = 0; s < catalog->size(); ++s) ASSERT_EQ(catalog->length(s), s % 500 % 7);
  }
}

TEST(FolderCatalog, DanglingLinkIsNamed) {
  TempFolder t;
  t.Write("a/1.jpg", "1");
  t.Link("nowhere", "a/bad.jpg");
  EXPECT_EQ(Failure(t.path(), {}, {t / "a/bad.jpg"}).code(), Code::kNotFound);
  BuildOptions options;
  options.extensions = {".png"};
  t.Write("a/1.png", "1");
  EXPECT_NE(Build(t.path(), options), nullptr) << "its name makes it no sample";
}

TEST(FolderCatalog, UnreadableFolderAndFileAreNamed) {
  TempFolder t;
  t.Write("a/1.jpg", "1");
  t.Write("b/1.jpg", "1");
  std::filesystem::permissions(t.path(), std::filesystem::perms(0755));
  std::filesystem::permissions(t / "b", std::filesystem::perms(0));
  {
    AsNobody nobody;
    if (!nobody.works()) GTEST_SKIP() << "cannot give up root";
    EXPECT_EQ(Failure(t.path(), {}, {t / "b"}).code(), Code::kPermissionDenied);
  }
  std::filesystem::permissions(t / "b", std::filesystem::perms(0755));
  std::filesystem::permissions(t / "b/1.jpg", std::filesystem::perms(0));
  {
    AsNobody nobody;
    EXPECT_EQ(Failure(t.path(), {}, {t / "b/1.jpg"}).code(), Code::kPermissionDenied);
  }
}

TEST(FolderCatalog, LinkedClassThatCannotBeReachedIsNamed) {
  TempFolder elsewhere;
  elsewhere.Write("class/1.jpg", "1");
  TempFolder t;
  t.Write("a/1.jpg", "1");
  t.Link(elsewhere / "class", "b");
  t.Link(elsewhere / "class", "a/sub");
  std::filesystem::permissions(t.path(), std::filesystem::perms(0755));
  AsNobody nobody;
  if (!nobody.works()) GTEST_SKIP() << "cannot give up root";
  if (::access(elsewhere.path().c_str(), X_OK) == 0 && ::getuid() != 0) {
    GTEST_SKIP() << "the folder is this user's own";
  }
  EXPECT_EQ(Failure(t.path(), {}, {t / "b"}).code(), Code::kPermissionDenied);
  BuildOptions options;
  options.extensions = {".jpg"};
  EXPECT_EQ(Failure(t / "a", options, {t / "a/sub"}).code(), Code::kPermissionDenied);
}

TEST(FolderCatalog, EmptyDataSetSaysWhatWasLookedFor) {
  TempFolder t;
  EXPECT_EQ(Failure(t.path(), {}, {t.path(), "any file"}).code(), Code::kNotFound);
  t.Write("a/1.txt", "1");
  t.Write("top.jpg", "1");
  BuildOptions options;
  options.extensions = {".jpg", ".png"};
  EXPECT_EQ(Failure(t.path(), options, {t.path(), ".jpg, .png", "1 sub-folders", "1 files beside"})
                .code(),
            Code::kNotFound);
}

TEST(FolderCatalog, MissingPathNamesPathAndRemedy) {
  EXPECT_EQ(Failure("/nowhere/at/all", {}, {"/nowhere/at/all", "mounted"}).code(), Code::kNotFound);
  EXPECT_EQ(Failure("", {}, {"empty"}).code(), Code::kInvalidArgument);
}

TEST(FolderCatalog, SampleOf4GiBIsAnError) {
  TempFolder t;
  const std::string file = t.Write("a/large.bin", "");
  ASSERT_EQ(::truncate(file.c_str(), off_t{1} << 32), 0);
  EXPECT_EQ(Failure(t.path(), {}, {file, "4294967296", "4 GiB"}).code(), Code::kInvalidArgument);
  ASSERT_EQ(::truncate(file.c_str(), (off_t{1} << 32) - 1), 0);
  const auto catalog = Build(t.path());
  ASSERT_NE(catalog, nullptr);
  EXPECT_EQ(catalog->length(0), 0xffffffffu);
}

TEST(FolderCatalog, OptionsAreChecked) {
  TempFolder t;
  t.Write("1.bin", "1");
  BuildOptions options;
  options.format = "zarr";
  EXPECT_EQ(Failure(t.path(), options, {"zarr", "webdataset"}).code(), Code::kInvalidArgument);
  options = {};
  options.threads = 0;
  EXPECT_EQ(Failure(t.path(), options, {"threads"}).code(), Code::kInvalidArgument);
  options = {};
  options.extensions = {""};
  EXPECT_EQ(Failure(t.path(), options, {"extension"}).code(), Code::kInvalidArgument);
}

TEST(FolderCatalog, ProgressCanCancel) {
  TempFolder t;
  t.Write("a/1.bin", "1");
  BuildOptions options;
  options.progress = [](uint64_t, uint64_t, uint64_t) { return false; };
  EXPECT_EQ(Failure(t.path(), options, {"cancelled"}).code(), Code::kCancelled);
  int calls = 0;
  options.progress = [&](uint64_t, uint64_t, uint64_t) { return ++calls > 0; };
  EXPECT_NE(Build(t.path(), options), nullptr);
  EXPECT_GT(calls, 0);
}

TEST(FolderCatalog, FormatIsDecidedFromWhatLiesThere) {
  TempFolder t;
  t.Write("view-of-town.jpg", "picture");
  EXPECT_EQ(Build(t.path())->format(), Format::kFolder);
  t.Write("x.tar", testing::TarMember("a.jpg", "A"));
  EXPECT_EQ(Build(t.path())->format(), Format::kWebDataset);
  t.Folder(".cache");
  EXPECT_EQ(Build(t.path())->format(), Format::kWebDataset);
  t.Write("class/1.jpg", "1");
  EXPECT_EQ(Failure(t.path(), {}, {t.path(), ".tar", "sub-folders", "'folder'"}).code(),
            Code::kInvalidArgument);
  BuildOptions options;
  options.format = "folder";
  EXPECT_EQ(Build(t.path(), options)->Classes(), (std::vector<std::string>{".cache", "class"}));
  const std::string file = t.Write("notes.txt", "n");
  EXPECT_EQ(Failure(file, {}, {file, "webdataset"}).code(), Code::kInvalidArgument);
  EXPECT_EQ(Failure(file, options, {file, "folder"}).code(), Code::kInvalidArgument);
  options.format = "tfrecord";
  EXPECT_EQ(Failure(t.path(), options, {t.path(), "*.tfrecord"}).code(), Code::kNotFound);
}

TEST(FileList, KeepsTheOrderGiven) {
  TempFolder t;
  const std::vector<std::string> paths = {t.Write("d/2.bin", "22"), t.Write("1.bin", "1"),
                                          t.Write("d/e/3.bin", ""), t / "1.bin"};
  auto catalog = BuildFileList(paths, {});
  ASSERT_TRUE(catalog) << catalog.status().ToString();
  EXPECT_EQ((*catalog)->format(), Format::kFileList);
  EXPECT_EQ((*catalog)->root(), t.path());
  EXPECT_EQ(Names(**catalog),
            (std::vector<std::string>{"d/2.bin -1", "1.bin -1", "d/e/3.bin -1", "1.bin -1"}));
  for (SampleId s = 0; s < 4; ++s) {
    EXPECT_EQ((*catalog)->ObjectPath((*catalog)->extent(s).object), paths[s]);
  }
  EXPECT_EQ((*catalog)->length(0), 2u);
  EXPECT_TRUE((*catalog)->extent(0).whole_object);
  EXPECT_TRUE((*catalog)->CheckFresh().ok());
}

// The image as version 1 had it: no times of single files.
std::vector<std::byte> OldImage(const Catalog& catalog) {
  const std::span<const std::byte> from = catalog.image();
  const ImageView view = *ParseImage(from, "new");
  ImageHeader header = *view.header;
  header.version = 1;
  std::vector<std::byte> out(sizeof(ImageHeader) + kSectionCount * sizeof(SectionRecord));
  std::array<SectionRecord, kSectionCount> sections = view.sections;
  for (SectionRecord& section : sections) {
    std::span<const std::byte> bytes = from.subspan(section.offset, section.bytes);
    if (section.id == static_cast<uint32_t>(SectionId::kTimes)) {
      bytes = bytes.first(view.folders.size() * sizeof(int64_t));
    }
    out.resize((out.size() + 7) & ~size_t{7});
    section.offset = out.size();
    section.bytes = bytes.size();
    section.crc = Crc32c(bytes);
    out.insert(out.end(), bytes.begin(), bytes.end());
  }
  header.image_bytes = out.size();
  header.crc = 0;
  header.crc = Crc32c(std::as_bytes(std::span(sections)),
                      Crc32c(std::as_bytes(std::span<const ImageHeader>(&header, 1))));
  std::memcpy(out.data(), &header, sizeof header);
  std::memcpy(out.data() + sizeof header, sections.data(), sizeof sections);
  return out;
}

TEST(FolderCatalog, KnowsTheTimesOfItsFiles) {
  TempFolder t;
  const std::string file = t.Write("a/1.jpg", "1");
  t.Write("a/2.jpg", "22");
  const timespec times[2] = {{1, 0}, {1234, 567}};
  ASSERT_EQ(::utimensat(AT_FDCWD, file.c_str(), times, 0), 0);
  for (const bool later : {false, true}) {
    BuildOptions options;
    options.sizes_later = later;
    auto built = BuildCatalog(t.path(), options);
    ASSERT_TRUE(built) << built.status().ToString();
    ASSERT_TRUE((*built)->WaitComplete().ok());
    EXPECT_EQ((*built)->ObjectTime(0), 1'234'000'000'567);
    EXPECT_NE((*built)->ObjectTime(1), 0);
    // Also once it is saved and loaded: its checksums cover them.
    const std::span<const std::byte> image = (*built)->image();
    auto loaded = Catalog::FromImage({image.begin(), image.end()});
    ASSERT_TRUE(loaded) << loaded.status().ToString();
    EXPECT_TRUE((*loaded)->has_object_times());
    EXPECT_EQ((*loaded)->ObjectTime(0), 1'234'000'000'567);
    EXPECT_EQ((*loaded)->ObjectTime(1), (*built)->ObjectTime(1));
  }
}

TEST(FolderCatalog, AnOlderVersionHasItsFoldersTimes) {
  TempFolder t;
  t.Write("a/1.jpg", "1");
  auto built = BuildCatalog(t.path(), {});
  ASSERT_TRUE(built) << built.status().ToString();
  auto old = Catalog::FromImage(OldImage(**built));
  ASSERT_TRUE(old) << old.status().ToString();
  EXPECT_FALSE((*old)->has_object_times());
  EXPECT_TRUE((*old)->knows_times());
  struct stat st {};
  ASSERT_EQ(::stat((t / "a").c_str(), &st), 0);
  EXPECT_EQ((*old)->ObjectTime(0), MtimeNs(st));
  EXPECT_EQ((*old)->SampleName(0), "a/1.jpg");
  EXPECT_EQ((*old)->fingerprint(), (*built)->fingerprint());
  // A saved one is not used: copies and peers go by the times of files.
  TempFolder cache;
  ::setenv("FOREBAY_CACHE_DIR", (cache / "c").c_str(), 1);
  ASSERT_TRUE((*old)->Save(DefaultCatalogFile(t.path(), {}), Catalog::Access::kOwner).ok());
  auto opened = OpenOrBuild(t.path(), {});
  auto again = OpenOrBuild(t.path(), {});
  ::unsetenv("FOREBAY_CACHE_DIR");
  ASSERT_TRUE(opened && again);
  EXPECT_TRUE(opened->rebuilt);
  EXPECT_NE(opened->note.find("older version"), std::string::npos) << opened->note;
  EXPECT_FALSE(again->rebuilt);
  EXPECT_TRUE(again->catalog->has_object_times());
}

TEST(FileList, CoversTheTimesOfItsFiles) {
  TempFolder t;
  const std::vector<std::string> paths = {t.Write("1.bin", "1"), t.Write("2.bin", "2")};
  const auto image = [&] {
    auto catalog = BuildFileList(paths, {});
    EXPECT_TRUE(catalog) << catalog.status().ToString();
    EXPECT_TRUE((*catalog)->knows_times());
    const std::span<const std::byte> bytes = (*catalog)->image();
    return std::vector<std::byte>(bytes.begin(), bytes.end());
  };
  const std::vector<std::byte> before = image();
  EXPECT_EQ(image(), before);
  const timespec times[2] = {{1, 0}, {1, 5}};
  ASSERT_EQ(::utimensat(AT_FDCWD, paths[1].c_str(), times, 0), 0);
  EXPECT_NE(image(), before);
  // As older builds wrote them.
  CatalogWriter old(Format::kFileList, t.path(), 0);
  old.AddFile(CatalogWriter::kRootFolder, "1.bin", 1, 0, -1);
  auto catalog = std::move(old).Finish();
  ASSERT_TRUE(catalog) << catalog.status().ToString();
  EXPECT_FALSE((*catalog)->knows_times());
}

TEST(FileList, RootMayBeTheRootFolder) {
  TempFolder t;
  const std::vector<std::string> paths = {t.Write("1.bin", "1"), "/etc/passwd"};
  auto catalog = BuildFileList(paths, {});
  ASSERT_TRUE(catalog) << catalog.status().ToString();
  EXPECT_EQ((*catalog)->root(), "/");
  EXPECT_EQ((*catalog)->ObjectPath(0), paths[0]);
  EXPECT_EQ((*catalog)->ObjectPath(1), paths[1]);
  EXPECT_EQ((*catalog)->SampleName(1), "etc/passwd");
}

TEST(FileList, Errors) {
  TempFolder t;
  const std::string good = t.Write("1.bin", "1");
  const auto message = [](std::vector<std::string> paths) {
    auto catalog = BuildFileList(paths, {});
    return catalog ? "" : catalog.error().ToString();
  };
  EXPECT_NE(message({good, t / "missing.bin"}).find(t / "missing.bin"), std::string::npos);
  EXPECT_NE(message({good, t.path()}).find("not a regular file"), std::string::npos);
  EXPECT_NE(message({}).find("empty"), std::string::npos);
  ASSERT_EQ(::truncate(good.c_str(), off_t{5} << 30), 0);
  EXPECT_NE(message({good}).find("4 GiB"), std::string::npos);
}

}  // namespace
}  // namespace forebay
