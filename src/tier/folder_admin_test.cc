#include "tier/folder_admin.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <span>
#include <string>

#include "base/owned.h"
#include "tier/folder_log.h"
#include "tier/tier_testing.h"

namespace forebay {
namespace {

using namespace tier_testing;

TEST(FolderAdminTest, ListsChecksDropsAndClears) {
  const TempFolder folder;
  {
    auto store = OpenStore(folder.path(), 1 << 20);
    store->Use(9, "/data/train");
    auto tier = *FolderStore::MakeTier(store, 4);
    for (uint32_t i = 0; i < 20; ++i) ASSERT_TRUE(Put(*tier, {9, i}).stored);
    ASSERT_TRUE(Put(*tier, {10, 5, 10}, Bytes(70'000, std::byte{1})).stored);
    // Read while somebody writes, but not changed.
    auto read = FolderAdmin::Open(folder.path(), false);
    ASSERT_TRUE(read.has_value()) << read.status().ToString();
    EXPECT_NE(read->writer().find(std::to_string(getpid())), std::string::npos) << read->writer();
    EXPECT_EQ(read->groups().size(), 2u);
    EXPECT_FALSE(read->Clear(9).ok());
    const auto change = FolderAdmin::Open(folder.path(), true);
    ASSERT_EQ(change.status().code(), Code::kUnavailable);
    EXPECT_NE(change.error().message().find(std::to_string(getpid())), std::string::npos);
  }
  auto admin = FolderAdmin::Open(folder.path(), true);
  ASSERT_TRUE(admin.has_value()) << admin.status().ToString();
  EXPECT_EQ(admin->limit_bytes(), 1u << 20);
  const auto datasets = admin->groups();
  ASSERT_EQ(datasets.size(), 2u);
  EXPECT_EQ(datasets[0].path, "/data/train");
  EXPECT_EQ(datasets[0].copies, 20u);
  EXPECT_GT(datasets[0].last_used_s, 1'600'000'000);
  EXPECT_EQ(datasets[1].bytes, 70'000u);
  EXPECT_GE(admin->used_bytes(), datasets[0].bytes + 70'000 + 21 * 40);
  EXPECT_LE(admin->used_bytes(), datasets[0].bytes + 70'000 + 21 * (40 + 4096));

  const TierKey key{10, 5, 10};
  ASSERT_EQ(admin->Keys(10), std::vector<TierKey>{key});
  uint64_t bytes = 0;
  EXPECT_TRUE(*admin->Check(key, &bytes));
  EXPECT_EQ(bytes, 70'000u);
  ASSERT_EQ(truncate(folder.Files(".bin").front().c_str(), 100), 0);
  for (const fs::path& file : folder.Files(".bin")) ASSERT_EQ(truncate(file.c_str(), 100), 0);
  EXPECT_FALSE(*admin->Check(key, &bytes));
  EXPECT_TRUE(admin->Drop(key).ok());
  EXPECT_EQ(admin->groups().size(), 1u);
  EXPECT_TRUE(admin->Clear(9).ok());
  EXPECT_TRUE(folder.Files(".seg").empty());
  admin = FolderAdmin::Open(folder.path(), false);
  EXPECT_TRUE(admin->groups().empty()) << "the log says the same";
}

// A copy is checked in little memory, whatever length its record has.
TEST(FolderAdminTest, ARecordOfAHugeCopyClaimsNoMemory) {
  const TempFolder folder;
  constexpr TierKey kKey{9, 1};
  { ASSERT_TRUE(Put(*OpenFolder(folder.path()), kKey, Bytes(1000)).stored); }
  {
    const OwnedFd at(open(folder.path().c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
    auto log = FolderLog::Open(at.get(), true);
    ASSERT_TRUE(log.has_value());
    ASSERT_EQ(log->ReadNew([](std::span<const LogRecord>) {}), 0);
    LogRecord record;
    record.group = kKey.group;
    record.name = kKey.name;
    record.length = 0xf000'0000;
    record.kind = LogRecord::Kind::kPacked;
    ASSERT_EQ(log->Append(std::span(&record, 1)), 0);
  }
  auto admin = FolderAdmin::Open(folder.path(), false);
  ASSERT_TRUE(admin.has_value());
  const uint64_t before = ResidentBytes();
  uint64_t bytes = 0;
  const Result<bool> good = admin->Check(kKey, &bytes);
  EXPECT_TRUE(good.has_value() && !*good);
  EXPECT_LT(ResidentBytes(), before + (256 << 20)) << "it would be 4 GB";
}

TEST(FolderAdminTest, FoldersThatAreNone) {
  const TempFolder folder;
  EXPECT_EQ(FolderAdmin::Open(folder.path() + "/none", false).status().code(), Code::kNotFound);
  EXPECT_EQ(FolderAdmin::Open(folder.path(), true).status().code(), Code::kNotFound);
  EXPECT_TRUE(fs::is_empty(folder.path())) << "nothing was made in a folder that is no cache";
  OpenStore(folder.path());
  fs::remove(folder.path() + "/index.log");
  const std::string old = folder.path() + "/0123456789abcdef";
  fs::create_directories(old + "/00000000");
  auto admin = FolderAdmin::Open(folder.path(), true);
  ASSERT_TRUE(admin.has_value());
  EXPECT_FALSE(admin->foreign().empty());
  EXPECT_TRUE(admin->ClearAll().ok());
  EXPECT_FALSE(fs::exists(old));
  EXPECT_TRUE(FolderAdmin::Open(folder.path(), false)->foreign().empty());
}

}  // namespace
}  // namespace forebay
