// Catalogs that are opened by what another process has seen.
#include "catalog/look_sharing.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "base/files_testing.h"
#include "catalog/catalog.h"
#include "catalog/test_data.h"

namespace forebay {
namespace {

using testing::TempFolder;

class FakeSharing final : public LookSharing {
 public:
  explicit FakeSharing(std::optional<SeenFiles> theirs = std::nullopt)
      : theirs_(std::move(theirs)) {}

  Result<std::optional<SeenFiles>> Ask(const std::string& name,
                                       const std::function<bool()>& tick) override {
    asked.push_back(name);
    if (cancel || !tick()) return Status(Code::kCancelled, "cancelled");
    return theirs_;
  }
  void Progress(uint64_t done) override { most = std::max(most, done); }
  void HandIn(const SeenFiles& seen) override { handed_in = seen; }

  bool cancel = false;
  std::vector<std::string> asked;
  uint64_t most = 0;
  std::optional<SeenFiles> handed_in;

 private:
  const std::optional<SeenFiles> theirs_;
};

class LookSharingTest : public ::testing::Test {
 protected:
  void SetUp() override {
    ::setenv("FOREBAY_CACHE_DIR", (cache_ / "c").c_str(), 1);
    for (int i = 0; i < 100; ++i) {
      Put(StrCat("data/", i % 3, "/", i), std::string(static_cast<size_t>(i), 'x'));
    }
  }
  void TearDown() override { ::unsetenv("FOREBAY_CACHE_DIR"); }

  void Put(const std::string& name, const std::string& content) {
    const std::string file = data_.Write(name, content);
    WrittenLongAgo(file);
    if (files_.empty() || files_.back() != file) files_.push_back(file);
  }

  Result<OpenedCatalog> Open(LookSharing* looks, bool list) {
    BuildOptions options;
    options.looks = looks;
    const std::span<const std::string> files(files_.data(), 100);
    return list ? OpenFileList(files, options) : OpenOrBuild(data_ / "data", options);
  }

  static std::string Bytes(const Catalog& catalog) {
    const std::span<const std::byte> image = catalog.image();
    return std::string(reinterpret_cast<const char*>(image.data()), image.size());
  }

  // As of the one that has looked.
  static void ExpectSame(const Catalog& a, const Catalog& b) {
    EXPECT_EQ(Bytes(a), Bytes(b));
    EXPECT_EQ(a.StampsHash(), b.StampsHash());
    EXPECT_NE(a.StampsHash(), 0u);
    EXPECT_TRUE(a.looked_at() && b.looked_at());
  }

  TempFolder cache_;
  TempFolder data_;
  std::vector<std::string> files_;
};

TEST_F(LookSharingTest, WhatOneSawTheOthersTake) {
  for (const bool list : {false, true}) {
    SCOPED_TRACE(list);
    // It is not saved yet; it is, and nothing has changed; a file has.
    for (int step = 0; step < 3; ++step) {
      SCOPED_TRACE(step);
      if (step == 2) Put("data/1/40", list ? "now" : "later");
      FakeSharing looker;
      const auto own = Open(&looker, list);
      ASSERT_TRUE(own) << own.status().ToString();
      EXPECT_EQ(own->rebuilt, step == 0);
      ASSERT_EQ(looker.asked.size(), 1u);
      ASSERT_TRUE(looker.handed_in);
      EXPECT_EQ(looker.handed_in->files.size(), 100u);
      // Written since: the other one takes it as it was.
      Put("data/2/50", StrCat("written since ", step, list));
      FakeSharing other(looker.handed_in);
      const auto taken = Open(&other, list);
      ASSERT_TRUE(taken) << taken.status().ToString();
      EXPECT_FALSE(taken->rebuilt);
      EXPECT_EQ(other.asked, looker.asked);
      EXPECT_FALSE(other.handed_in);
      ExpectSame(*taken->catalog, *own->catalog);
    }
    const auto alone = Open(nullptr, list);
    ASSERT_TRUE(alone);
    EXPECT_EQ(alone->catalog->total_bytes(), [&] {
      uint64_t bytes = 0;
      for (size_t i = 0; i < 100; ++i) bytes += std::filesystem::file_size(files_[i]);
      return bytes;
    }());
  }
}

TEST_F(LookSharingTest, AnotherListIsLookedAt) {
  FakeSharing looker;
  ASSERT_TRUE(Open(&looker, false));
  ASSERT_TRUE(looker.handed_in);
  // Somebody has saved another one since.
  Put("data/1/new", "new");
  ASSERT_TRUE(Open(nullptr, false));
  Put("data/1/40", "changed");
  FakeSharing other(looker.handed_in);
  const auto opened = Open(&other, false);
  ASSERT_TRUE(opened) << opened.status().ToString();
  EXPECT_EQ(opened->catalog->size(), 101u);
  EXPECT_FALSE(other.handed_in) << "nobody asked it to";
  const auto alone = Open(nullptr, false);
  ExpectSame(*opened->catalog, *alone->catalog);
  // What belongs to another list is not believed, whatever it says.
  SeenFiles wrong = *looker.handed_in;
  wrong.list = opened->catalog->ListHash();
  EXPECT_EQ(opened->catalog->TakeLook(wrong).status().code(), Code::kChanged);
}

TEST_F(LookSharingTest, WithoutASavedCatalogEachLooks) {
  FakeSharing looker;
  ASSERT_TRUE(Open(&looker, false));
  std::filesystem::remove_all(cache_ / "c");
  Put("data/1/40", "changed");
  FakeSharing other(looker.handed_in);
  const auto opened = Open(&other, false);
  ASSERT_TRUE(opened);
  EXPECT_TRUE(opened->rebuilt);
  ExpectSame(*opened->catalog, *Open(nullptr, false)->catalog);
}

TEST_F(LookSharingTest, NobodyIsAskedWhereNobodyLooks) {
  FakeSharing looks;
  BuildOptions options;
  options.looks = &looks;
  options.look_at_files = false;
  ASSERT_TRUE(OpenOrBuild(data_ / "data", options));
  options.look_at_files = true;
  options.sizes_later = true;
  ASSERT_TRUE(OpenOrBuild(data_ / "data", options));
  EXPECT_TRUE(looks.asked.empty());
  looks.cancel = true;
  EXPECT_EQ(Open(&looks, false).status().code(), Code::kCancelled);
}

TEST_F(LookSharingTest, ALaterLookIsSharedToo) {
  const auto opened = Open(nullptr, false);
  ASSERT_TRUE(opened);
  const Catalog& catalog = *opened->catalog;
  for (const bool change : {false, true}) {
    SCOPED_TRACE(change);
    if (change) Put("data/1/40", "changed");
    FakeSharing looker;
    const auto own = catalog.LookTogether(looker, 4, nullptr);
    ASSERT_TRUE(own) << own.status().ToString();
    EXPECT_EQ(own->changed, change ? 2u : 0u);
    ASSERT_TRUE(looker.handed_in);
    Put("data/2/50", StrCat("written since ", change));
    FakeSharing other(looker.handed_in);
    const auto taken = catalog.LookTogether(other, 4, nullptr);
    ASSERT_TRUE(taken) << taken.status().ToString();
    EXPECT_EQ(other.asked, looker.asked);
    EXPECT_EQ(taken->changed, own->changed);
    EXPECT_EQ(taken->first, own->first);
    EXPECT_EQ(*taken->stamps, *own->stamps);
    ASSERT_EQ(taken->catalog == nullptr, own->catalog == nullptr);
    if (own->catalog) ExpectSame(*taken->catalog, *own->catalog);
  }
}

TEST_F(LookSharingTest, TheListIsOfNamesOrderAndLabels) {
  const auto built = BuildCatalog(data_ / "data", {});
  ASSERT_TRUE(built);
  const uint64_t hash = (*built)->ListHash();
  Put("data/1/40", "other bytes");
  EXPECT_EQ((*BuildCatalog(data_ / "data", {}))->ListHash(), hash);
  const std::vector<std::string> some(files_.begin(), files_.begin() + 10);
  const std::vector<std::string> turned(some.rbegin(), some.rend());
  EXPECT_NE((*BuildFileList(some, {}))->ListHash(), (*BuildFileList(turned, {}))->ListHash());
  Put("data/1/another", "");
  EXPECT_NE((*BuildCatalog(data_ / "data", {}))->ListHash(), hash);
}

}  // namespace
}  // namespace forebay
