#include "tier/copy_names.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/stat.h>

#include <filesystem>
#include <set>
#include <string>
#include <vector>

#include "catalog/image.h"
#include "catalog/paths.h"
#include "catalog/test_data.h"

namespace forebay {
namespace {

using testing::TempFolder;

void SetTime(const std::string& path, int64_t seconds) {
  const timespec times[2] = {{1, 0}, {seconds, 0}};
  ASSERT_EQ(::utimensat(AT_FDCWD, path.c_str(), times, 0), 0);
}

std::shared_ptr<const Catalog> Folder(const std::string& path) {
  auto catalog = BuildCatalog(path, {});
  EXPECT_TRUE(catalog) << catalog.status().ToString();
  return *std::move(catalog);
}

std::shared_ptr<const Catalog> List(const std::vector<std::string>& paths) {
  auto catalog = BuildFileList(paths, {});
  EXPECT_TRUE(catalog) << catalog.status().ToString();
  return *std::move(catalog);
}

// Names lie on disks: they must not change.
TEST(CopyNames, GoldenVectors) {
  NameHash hash;
  EXPECT_EQ(hash.Finish(), (std::array<uint64_t, 2>{0, 0}));
  hash.Add("abc");
  const std::array<uint64_t, 2> abc = hash.Finish();
  NameHash same;
  same.Add("abc");
  EXPECT_EQ(same.Finish(), abc);
  CatalogWriter writer(Format::kFileList, "/none/data", 1);
  const uint32_t below = writer.AddFolder(CatalogWriter::kRootFolder, "below", 0);
  writer.AddFile(below, "one.jpg", 1000, 1'234'567'890, -1);
  auto catalog = std::move(writer).Finish();
  ASSERT_TRUE(catalog) << catalog.status().ToString();
  const CopyNames names(std::shared_ptr<const Catalog>(*std::move(catalog)));
  const TierKey key = names.Of(0);
  EXPECT_EQ(abc, (std::array<uint64_t, 2>{0x33f14dbcd0c59cb1, 0xccf2263f6c55c467}));
  EXPECT_EQ(names.group(), uint64_t{0xfa978795c6e1905d});
  EXPECT_EQ(key.name, uint64_t{0x5086a466ad4f2f5c});
  EXPECT_EQ(key.check, uint32_t{0x285daf46});
}

TEST(CopyNames, TextsAreToldApart) {
  std::set<std::array<uint64_t, 2>> seen;
  for (const std::vector<std::string_view>& texts :
       std::vector<std::vector<std::string_view>>{{"ab", "c"},
                                                  {"a", "bc"},
                                                  {"abc"},
                                                  {"abc", ""},
                                                  {"", "abc"},
                                                  {std::string_view("abc\0", 4)}}) {
    NameHash hash;
    for (const std::string_view text : texts) hash.Add(text);
    EXPECT_TRUE(seen.insert(hash.Finish()).second) << texts.size();
  }
  std::set<uint64_t> firsts, seconds;
  for (uint64_t i = 0; i < 200'000; ++i) {
    NameHash hash;
    hash.Add(i);
    firsts.insert(hash.Finish()[0]);
    seconds.insert(hash.Finish()[1]);
  }
  EXPECT_EQ(firsts.size(), 200'000u);
  EXPECT_EQ(seconds.size(), 200'000u);
}

TEST(CopyNames, AFileHasOneNameInEveryDataSet) {
  TempFolder t;
  const std::string one = t.Write("train/a/1.jpg", "1");
  const std::string two = t.Write("train/b/2.jpg", "22");
  const CopyNames folder(Folder(t / "train"));
  const CopyNames above(List({two, one, t.Write("other", "x")}));
  const CopyNames list(List({two, one}));
  EXPECT_EQ(folder.Of(0), list.Of(1));
  EXPECT_EQ(folder.Of(1), list.Of(0));
  EXPECT_EQ(folder.Of(0), above.Of(1));
  EXPECT_EQ(folder.group(), list.group());
  EXPECT_NE(folder.group(), above.group()) << "its common folder is another";
  EXPECT_FALSE(folder.Of(0) == folder.Of(1));
  // Through a link, and after a file was added.
  std::filesystem::create_symlink(t / "train", t / "link");
  t.Write("train/a/0.jpg", "0");
  const CopyNames link(Folder(t / "link"));
  EXPECT_EQ(link.group(), folder.group());
  EXPECT_EQ(link.Of(1), folder.Of(0));
  EXPECT_EQ(link.Of(2), folder.Of(1));
}

int64_t TimeOf(const std::string& path) {
  struct stat st {};
  EXPECT_EQ(::stat(path.c_str(), &st), 0);
  return MtimeNs(st);
}

TEST(CopyNames, AFileThatIsMetLaterHasTheSameNameAsInADataSet) {
  TempFolder t;
  const std::string one = t.Write("train/a/1.jpg", "1");
  const std::string two = t.Write("train/b/2.jpg", "22");
  const std::string none = t.Write("train/a/none", "");
  const std::shared_ptr<const Catalog> listed = Folder(t / "train");
  const CopyNames folder(listed);
  const auto in_folder = [&](std::string_view name) {
    SampleId s = 0;
    while (s + 1 < listed->size() && listed->SampleName(s) != name) ++s;
    return folder.Of(s);
  };
  const CopyNames list(List({none, two, one}));
  for (const std::string& root :
       {t / "train", std::filesystem::path(t.path()).parent_path().string(), std::string("/")}) {
    SCOPED_TRACE(root);
    const std::shared_ptr<Catalog> met = Catalog::Growing(root);
    const CopyNames names(met);
    ASSERT_TRUE(met->Append({two, 2, TimeOf(two), 0}));
    EXPECT_EQ(names.Of(0), in_folder("b/2.jpg"));
    EXPECT_EQ(names.Of(0), list.Of(1));
    ASSERT_TRUE(met->Append({one, 1, TimeOf(one), 0}));
    ASSERT_TRUE(met->Append({none, 0, TimeOf(none), 0}));
    EXPECT_EQ(names.Of(1), in_folder("a/1.jpg"));
    EXPECT_EQ(names.Of(1), list.Of(2));
    EXPECT_EQ(names.Of(2), in_folder("a/none"));
    EXPECT_EQ(names.Of(2), list.Of(0));
    // In blocks: a file of one block is the whole file.
    ASSERT_TRUE(met->Append({two, 2, TimeOf(two), 1}));
    ASSERT_TRUE(met->Append({two, 2, TimeOf(two), 4096}));
    EXPECT_FALSE(names.Of(3) == names.Of(0));
    EXPECT_FALSE(names.Of(3) == names.Of(4));
    EXPECT_EQ(names.Of(5), names.Of(0));
    // Changed.
    ASSERT_TRUE(met->Append({two, 2, TimeOf(two) + 1, 0}));
    EXPECT_FALSE(names.Of(6) == names.Of(0));
  }
  EXPECT_EQ(CopyNames(std::shared_ptr<const Catalog>(Catalog::Growing(t / "train"))).group(),
            folder.group());
}

TEST(CopyNames, AFileThatChangedHasAnother) {
  TempFolder t;
  const std::string one = t.Write("1.jpg", "1");
  SetTime(one, 1000);
  const TierKey before = CopyNames(Folder(t.path())).Of(0);
  EXPECT_EQ(CopyNames(Folder(t.path())).Of(0), before);
  SetTime(one, 1001);
  EXPECT_FALSE(CopyNames(Folder(t.path())).Of(0) == before);
  SetTime(one, 1000);
  EXPECT_EQ(CopyNames(Folder(t.path())).Of(0), before);
  t.Write("1.jpg", "12");
  SetTime(one, 1000);
  EXPECT_FALSE(CopyNames(Folder(t.path())).Of(0) == before);
}

}  // namespace
}  // namespace forebay
