#include "base/system_memory.h"

#include <gtest/gtest.h>
#include <stdlib.h>

#include <filesystem>
#include <fstream>

namespace forebay {
namespace {

namespace fs = std::filesystem;

class MemoryLimitTest : public ::testing::Test {
 protected:
  void SetUp() override {
    char name[] = "/tmp/forebay_memory_XXXXXX";
    ASSERT_NE(mkdtemp(name), nullptr);
    root_ = name;
    Write("/proc/meminfo", "MemTotal: 1000 kB\nMemFree: 5 kB\nMemAvailable:   800 kB\n");
  }
  void TearDown() override { fs::remove_all(root_); }
  void Write(const std::string& path, const std::string& text) {
    fs::create_directories(fs::path(root_ + path).parent_path());
    std::ofstream(root_ + path) << text;
  }
  std::string root_;
};

TEST_F(MemoryLimitTest, NoCgroup) {
  const MemoryLimit limit = ReadMemoryLimit(root_);
  EXPECT_EQ(limit.available, 800u * 1024);
  EXPECT_EQ(limit.usable(), 800u * 1024);
}

TEST_F(MemoryLimitTest, TightestLevelOfVersionTwoCounts) {
  Write("/proc/self/cgroup", "0::/job/step\n");
  Write("/sys/fs/cgroup/job/memory.max", "300000\n");
  Write("/sys/fs/cgroup/job/memory.current", "100000\n");
  Write("/sys/fs/cgroup/job/step/memory.max", "max\n");
  EXPECT_EQ(ReadMemoryLimit(root_).usable(), 200000u);
}

TEST_F(MemoryLimitTest, PagesOfFilesAreNotUsed) {
  Write("/proc/self/cgroup", "0::/job\n");
  Write("/sys/fs/cgroup/job/memory.max", "300000\n");
  Write("/sys/fs/cgroup/job/memory.current", "299000\n");
  Write("/sys/fs/cgroup/job/memory.stat",
        "anon 99000\nfile 210000\nshmem 10000\ninactive_file 150000\nactive_file 50000\n");
  EXPECT_EQ(ReadMemoryLimit(root_).usable(), 201000u);
  Write("/proc/self/cgroup", "4:memory:/slurm\n");
  Write("/sys/fs/cgroup/memory/slurm/memory.limit_in_bytes", "50000\n");
  Write("/sys/fs/cgroup/memory/slurm/memory.usage_in_bytes", "49000\n");
  Write("/sys/fs/cgroup/memory/slurm/memory.stat",
        "inactive_file 1\ntotal_cache 30000\ntotal_inactive_file 20000\ntotal_active_file 9000\n");
  EXPECT_EQ(ReadMemoryLimit(root_).usable(), 30000u);
}

TEST_F(MemoryLimitTest, VersionOne) {
  Write("/proc/self/cgroup", "9:cpu:/x\n4:memory:/slurm\n");
  Write("/sys/fs/cgroup/memory/slurm/memory.limit_in_bytes", "50000\n");
  Write("/sys/fs/cgroup/memory/slurm/memory.usage_in_bytes", "0\n");
  Write("/sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n");
  EXPECT_EQ(ReadMemoryLimit(root_).usable(), 50000u);
}

TEST(LocalRanks, OneForWhoServesThemAll) {
  const auto serve = [] {
    setenv("LOCAL_WORLD_SIZE", "8", 1);
    ServeAllRanks();
    std::_Exit(LocalRanks() == 1 ? 0 : 1);
  };
  EXPECT_EXIT(serve(), ::testing::ExitedWithCode(0), "");
}

TEST(LocalRanks, FromTheLauncher) {
  setenv("LOCAL_WORLD_SIZE", "8", 1);
  EXPECT_EQ(LocalRanks(), 8u);
  unsetenv("LOCAL_WORLD_SIZE");
  EXPECT_EQ(LocalRanks(), 1u);
}

}  // namespace
}  // namespace forebay
