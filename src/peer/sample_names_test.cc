#include "peer/sample_names.h"

#include <gtest/gtest.h>

namespace forebay::peer {
namespace {

// Frozen: every node, build and release must agree, and cache folders outlive jobs.
TEST(SampleNames, GoldenVectors) {
  EXPECT_EQ(HomeName({"class/7.jpg", 110'000, 1'700'000'000'000'000'005, 0, 0}),
            1955890568686754910u);
  EXPECT_EQ(HomeName({"large.bin", 3 << 20, -5, 1 << 20, 2 << 20}), 14430503236029834942u);
  const auto name = [](const std::string& root, const std::string& given) {
    return GrowingName(std::shared_ptr<const Catalog>(Catalog::Growing(root, given)));
  };
  EXPECT_EQ(name("/no/such/folder", ""), 2368045275401580656u);
  EXPECT_EQ(name("/no/such/folder", "imagenet"), 11128270223273597151u);
  EXPECT_EQ(name("/another", "imagenet"), name("/no/such/folder", "imagenet"));
  EXPECT_NE(name("/another", ""), name("/no/such/folder", ""));
}

TEST(SampleNames, EverythingThatTellsSamplesApartCounts) {
  const FileSample one{"a", 3000, 7, 1000, 1000};
  for (const FileSample& other :
       {FileSample{"b", 3000, 7, 1000, 1000}, FileSample{"a", 3001, 7, 1000, 1000},
        FileSample{"a", 3000, 8, 1000, 1000}, FileSample{"a", 3000, 7, 500, 1000},
        FileSample{"a", 3000, 7, 1000, 2000}}) {
    EXPECT_NE(HomeName(one), HomeName(other));
  }
}

TEST(SampleNames, AreThoseOfTheCatalogsFiles) {
  const auto catalog = Catalog::Growing("/data");
  ASSERT_TRUE(catalog->Append({"/data/a/b/one", 500, 7, 0}));
  ASSERT_TRUE(catalog->Append({"/data/large", 2500, 8, 1000}));
  ASSERT_TRUE(catalog->Append({"/data/small", 900, 9, 1000}));
  EXPECT_EQ(FileSampleOf(*catalog, 0), (FileSample{"a/b/one", 500, 7, 0, 0}));
  EXPECT_EQ(FileSampleOf(*catalog, 3), (FileSample{"large", 2500, 8, 1000, 2000}));
  EXPECT_EQ(FileSampleOf(*catalog, 4), (FileSample{"small", 900, 9, 1000, 0}));
  for (SampleId s = 0; s < 5; ++s) {
    EXPECT_TRUE(FileSampleOf(*catalog, s).Valid());
    EXPECT_EQ(FileSampleOf(*catalog, s).length(), catalog->length(s));
  }
}

}  // namespace
}  // namespace forebay::peer
