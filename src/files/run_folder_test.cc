#include "files/run_folder.h"

#include <gtest/gtest.h>
#include <linux/magic.h>
#include <sys/stat.h>
#include <sys/statfs.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

namespace forebay::files {
namespace {

class RunFolderTest : public ::testing::Test {
 protected:
  RunFolderTest() {
    char name[] = "/var/tmp/forebay_run_folder_XXXXXX";
    root_ = mkdtemp(name);
  }
  ~RunFolderTest() override { std::filesystem::remove_all(root_); }

  std::vector<std::string> NamesIn(const std::string& folder) const {
    std::vector<std::string> out;
    for (const auto& found : std::filesystem::directory_iterator(folder)) {
      out.push_back(found.path().filename());
    }
    std::sort(out.begin(), out.end());
    return out;
  }

  std::string root_;
};

TEST_F(RunFolderTest, HasWhatProgramsLookForAndNothingElse) {
  const std::string path = root_ + "/run";
  Result<RunFolder> run = RunFolder::Open(path);
  ASSERT_TRUE(run) << run.error().message();
  EXPECT_EQ(NamesIn(path), (std::vector<std::string>{"copies", "lock"}));
  struct stat copies = {};
  ASSERT_EQ(stat((path + "/copies").c_str(), &copies), 0);
  EXPECT_EQ(copies.st_mode & 07777, 0700u);
  EXPECT_TRUE(run->InPlace());
  run->Leave();
  EXPECT_TRUE(NamesIn(root_).empty());
}

TEST_F(RunFolderTest, TakesOverFromAServiceThatWasKilled) {
  const std::string path = root_ + "/run";
  std::filesystem::create_directories(path + "/copies");
  std::filesystem::create_directories(path + "/spread");
  std::filesystem::permissions(path, std::filesystem::perms::owner_all);
  std::ofstream(path + "/copies/0123") << "of the one before";
  std::ofstream(path + "/table") << "of an older Forebay";
  Result<RunFolder> run = RunFolder::Open(path);
  ASSERT_TRUE(run) << run.error().message();
  EXPECT_TRUE(NamesIn(path + "/copies").empty());
  EXPECT_EQ(NamesIn(path), (std::vector<std::string>{"copies", "lock"}));
  run->Leave();
}

// Where ext4 has thousands of block groups, eight folders are not all in one.
TEST_F(RunFolderTest, CopiesAreSpreadOverBlockGroups) {
  struct statfs found = {};
  ASSERT_EQ(statfs(root_.c_str(), &found), 0);
  constexpr uint64_t kManyInodes = 4 << 20;
  if (static_cast<uint64_t>(found.f_type) != EXT4_SUPER_MAGIC || found.f_files < kManyInodes) {
    GTEST_SKIP() << "may-skip: /var/tmp is not on a large ext4";
  }
  ino_t least = ~ino_t{0};
  ino_t most = 0;
  for (int i = 0; i < 8; ++i) {
    const std::string path = root_ + "/run" + std::to_string(i);
    Result<RunFolder> run = RunFolder::Open(path);
    ASSERT_TRUE(run) << run.error().message();
    struct stat copies = {};
    ASSERT_EQ(stat((path + "/copies").c_str(), &copies), 0);
    least = std::min(least, copies.st_ino);
    most = std::max(most, copies.st_ino);
    run->Leave();
  }
  EXPECT_GT(most - least, 100'000u);
}

}  // namespace
}  // namespace forebay::files
