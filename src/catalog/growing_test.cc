#include "catalog/growing.h"

#include <gtest/gtest.h>

#include <atomic>
#include <string>
#include <thread>
#include <vector>

#include "base/rng.h"

namespace forebay {
namespace {

TEST(StableArray, StaysWhereItIs) {
  StableArray<uint32_t> array;
  std::vector<const uint32_t*> places;
  for (uint32_t i = 0; i < 10'000; ++i) {
    array.Append(i * 3);
    places.push_back(&array[i]);
  }
  for (uint32_t i = 0; i < 10'000; ++i) {
    ASSERT_EQ(array[i], i * 3);
    ASSERT_EQ(&array[i], places[i]);
  }
}

TEST(GrowingCatalog, KnowsEachFileOnceItIsThere) {
  const auto catalog = Catalog::Growing("/data");
  EXPECT_EQ(catalog->format(), Format::kGrowing);
  EXPECT_EQ(catalog->size(), 0u);
  EXPECT_EQ(catalog->object_count(), 0u);
  EXPECT_TRUE(catalog->complete());
  EXPECT_TRUE(catalog->knows_times());
  EXPECT_TRUE(catalog->has_object_times());
  EXPECT_TRUE(catalog->CheckFresh().ok());
  const auto one = catalog->Append({"/data/a/b/one.jpg", 1000, 42, 0});
  ASSERT_TRUE(one) << one.status().ToString();
  EXPECT_EQ(one->first, 0u);
  EXPECT_EQ(one->count, 1u);
  const auto two = catalog->Append({"/data/two", 0, -1, 0});
  ASSERT_TRUE(two);
  ASSERT_TRUE(catalog->Append({"/data/a/b/three", 7, 8, 0}));
  EXPECT_EQ(catalog->size(), 3u);
  EXPECT_EQ(catalog->object_count(), 3u);
  EXPECT_EQ(catalog->total_bytes(), 1007u);
  EXPECT_EQ(catalog->max_length(), 1000u);
  const Extent extent = catalog->extent(0);
  EXPECT_TRUE(extent.whole_object);
  EXPECT_FALSE(extent.has_crc);
  EXPECT_EQ(extent.offset, 0u);
  EXPECT_EQ(extent.length, 1000u);
  EXPECT_EQ(catalog->length(1), 0u);
  EXPECT_EQ(catalog->ObjectPath(0), "/data/a/b/one.jpg");
  EXPECT_EQ(catalog->ObjectPath(1), "/data/two");
  EXPECT_EQ(catalog->ObjectName(0), "one.jpg");
  EXPECT_EQ(catalog->ObjectSize(0), 1000u);
  EXPECT_EQ(catalog->ObjectTime(0), 42);
  EXPECT_EQ(catalog->ObjectTime(1), -1);
  EXPECT_EQ(catalog->folder(0), catalog->folder(2));
  EXPECT_NE(catalog->folder(0), catalog->folder(1));
  EXPECT_EQ(catalog->folder_count(), 2u);
  EXPECT_EQ(catalog->FolderBelow(catalog->folder(0)), "a/b");
  EXPECT_EQ(catalog->FolderBelow(catalog->folder(1)), "");
  EXPECT_EQ(catalog->SampleName(0), "a/b/one.jpg");
  EXPECT_EQ(catalog->label(0), -1);
  ASSERT_EQ(catalog->Fields(0).size(), 1u);
  EXPECT_EQ(catalog->Fields(0)[0].length, 1000u);
  EXPECT_TRUE(catalog->Classes().empty());
}

TEST(GrowingCatalog, LargeFilesAreCutIntoBlocks) {
  const auto catalog = Catalog::Growing("/");
  ASSERT_TRUE(catalog->Append({"/first", 10, 1, 0}));
  const uint64_t size = (uint64_t{5} << 30) + 3;
  const auto large = catalog->Append({"/big/file", size, 1, 1 << 30});
  ASSERT_TRUE(large);
  EXPECT_EQ(large->first, 1u);
  EXPECT_EQ(large->count, 6u);
  EXPECT_EQ(catalog->ObjectPath(1), "/big/file");
  for (uint32_t i = 0; i < 6; ++i) {
    const Extent extent = catalog->extent(1 + i);
    EXPECT_EQ(extent.object, 1u);
    EXPECT_FALSE(extent.whole_object);
    EXPECT_EQ(extent.offset, uint64_t{i} << 30);
    EXPECT_EQ(extent.length, i < 5 ? 1u << 30 : 3u);
  }
  EXPECT_EQ(catalog->SampleName(2), "big/file@1073741824");
  EXPECT_EQ(catalog->Append({"/exact", 8192, 1, 4096})->count, 2u);
  EXPECT_EQ(catalog->length(8), 4096u);
  EXPECT_EQ(catalog->Append({"/small", 5, 1, 4096})->count, 1u);
  EXPECT_EQ(catalog->length(9), 5u);
  EXPECT_EQ(catalog->Append({"/empty", 0, 1, 4096})->count, 1u);
  EXPECT_EQ(catalog->length(10), 0u);
  EXPECT_TRUE(catalog->extent(10).whole_object);
}

TEST(GrowingCatalog, RefusesWhatItCannotName) {
  const auto catalog = Catalog::Growing("/data");
  for (const std::string_view path :
       {"", "/", "/data", "/data/", "/database/x", "/other/x", "data/x", "/data//x", "/data/./x",
        "/data/../x", "/data/x/", "/data/.."}) {
    const auto appended = catalog->Append({path, 1, 1, 0});
    ASSERT_FALSE(appended) << path;
    EXPECT_EQ(appended.error().code(), Code::kInvalidArgument);
  }
  EXPECT_FALSE(catalog->Append({std::string_view("/data/x\0y", 9), 1, 1, 0}));
  EXPECT_FALSE(catalog->Append({"/data/x", uint64_t{4} << 30, 1, 0})) << "it needs blocks";
  const auto many = catalog->Append({"/data/x", uint64_t{1} << 40, 1, 1});
  ASSERT_FALSE(many);
  EXPECT_EQ(many.error().code(), Code::kResourceExhausted);
  EXPECT_EQ(catalog->size(), 0u);
  EXPECT_TRUE(catalog->Append({"/data/..x", 1, 1, 0}));
}

TEST(GrowingCatalog, NothingOfItIsSaved) {
  const auto catalog = Catalog::Growing("/data");
  EXPECT_EQ(catalog->Save("/none/file").code(), Code::kUnimplemented);
  EXPECT_EQ(catalog->Verify(nullptr).code(), Code::kUnimplemented);
  EXPECT_TRUE(catalog->image().empty());
  const uint64_t before = catalog->fingerprint();
  ASSERT_TRUE(catalog->Append({"/data/x", 1, 1, 0}));
  EXPECT_EQ(catalog->fingerprint(), before);
  EXPECT_NE(Catalog::Growing("/other")->fingerprint(), before);
}

TEST(GrowingCatalog, FindsTheLastOfEqualFiles) {
  const auto catalog = Catalog::Growing("/data", "mine");
  EXPECT_EQ(catalog->given_name(), "mine");
  EXPECT_EQ(Catalog::Growing("/data")->given_name(), "");
  const NewFile file{"/data/a/b", 5000, 7, 1000};
  EXPECT_FALSE(catalog->Find(file));
  ASSERT_TRUE(catalog->Append({"/data/ab", 1, 7, 0}));
  ASSERT_TRUE(catalog->Append(file));
  ASSERT_TRUE(catalog->Find(file));
  EXPECT_EQ(catalog->Find(file)->first, 1u);
  EXPECT_EQ(catalog->Find(file)->count, 5u);
  EXPECT_EQ(catalog->ObjectBlock(catalog->object(1)), 1000u);
  for (const NewFile& other :
       {NewFile{"/data/a", 5000, 7, 1000}, NewFile{"/data/a/b", 5001, 7, 1000},
        NewFile{"/data/a/b", 5000, 8, 1000}, NewFile{"/data/a/b", 5000, 7, 0},
        NewFile{"/other/a/b", 5000, 7, 1000}, NewFile{"/data/../a/b", 5000, 7, 1000}}) {
    EXPECT_FALSE(catalog->Find(other)) << other.path;
  }
  ASSERT_TRUE(catalog->Append({"/data/a/b", 5000, 8, 1000}));
  EXPECT_EQ(catalog->Find(file)->first, 1u) << "an older version stays";
  ASSERT_TRUE(catalog->Append(file));
  EXPECT_EQ(catalog->Find(file)->first, 11u);
  EXPECT_FALSE(catalog->IsRepeated(catalog->object(1)));
  EXPECT_FALSE(catalog->IsRepeated(catalog->object(6)));
  EXPECT_TRUE(catalog->IsRepeated(catalog->object(11)));
}

TEST(GrowingCatalog, ReadersSeeWholeFilesWhileOthersAppend) {
  const auto catalog = Catalog::Growing("/data");
  constexpr uint64_t kFiles = 20'000;
  std::atomic<bool> over{false};
  std::vector<std::thread> readers;
  for (uint64_t r = 0; r < 2; ++r) {
    readers.emplace_back([&, r] {
      SplitMix64 rng(r);
      while (!over.load()) {
        const size_t size = catalog->size();
        if (size == 0) continue;
        const auto s = static_cast<SampleId>(rng.Below(size));
        const ObjectId object = catalog->object(s);
        // Each file is named by its size, and its folder by its last digit.
        const std::string name = std::to_string(catalog->ObjectSize(object));
        ASSERT_EQ(catalog->ObjectName(object), name);
        ASSERT_EQ(catalog->FolderBelow(catalog->folder(object)), name.substr(name.size() - 1));
        ASSERT_EQ(catalog->ObjectTime(object), -1 * std::stoll(name));
        ASSERT_LE(catalog->length(s), 1000u);
      }
    });
  }
  std::vector<std::thread> writers;
  for (uint64_t w = 0; w < 2; ++w) {
    writers.emplace_back([&, w] {
      for (uint64_t i = w; i < kFiles; i += 2) {
        const std::string name = std::to_string(i);
        const std::string path = "/data/" + name.substr(name.size() - 1) + "/" + name;
        ASSERT_TRUE(catalog->Append({path, i, -1 * static_cast<int64_t>(i), 1000}));
      }
    });
  }
  for (std::thread& writer : writers) writer.join();
  over.store(true);
  for (std::thread& reader : readers) reader.join();
  EXPECT_EQ(catalog->object_count(), kFiles);
  EXPECT_EQ(catalog->folder_count(), 11u);
  EXPECT_EQ(catalog->total_bytes(), kFiles * (kFiles - 1) / 2);
}

}  // namespace
}  // namespace forebay
