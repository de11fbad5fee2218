#include "port/failover_port.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

namespace forebay {
namespace {

EpochStats Epoch(uint64_t number, uint64_t batches) {
  EpochStats out;
  out.epoch = number;
  out.batches = batches;
  out.samples = 10 * batches;
  out.wall_ns = 7;
  out.wait_ns[1] = 3;
  out.batch_us.assign(batches, 5);
  return out;
}

TEST(MergeStats, AddsUpTheEpochThatTwoEnginesHaveAPartOf) {
  const std::vector<EpochStats> both =
      MergeStats({Epoch(0, 4), Epoch(1, 2)}, {Epoch(1, 3), Epoch(2, 1), Epoch(3, 0)});
  ASSERT_EQ(both.size(), 3u);
  EXPECT_EQ(both[1].batches, 5u);
  EXPECT_EQ(both[1].samples, 50u);
  EXPECT_EQ(both[1].wall_ns, 14);
  EXPECT_EQ(both[1].wait_ns[1], 6);
  EXPECT_EQ(both[1].batch_us.size(), 5u);
  EXPECT_EQ(both[2].epoch, 2u);
}

TEST(MergeStats, OneSideMayBeEmpty) {
  EXPECT_EQ(MergeStats({}, {Epoch(1, 2)}).size(), 1u);
  EXPECT_EQ(MergeStats({Epoch(1, 2)}, {}).size(), 1u);
  EXPECT_EQ(MergeStats({Epoch(1, 2)}, {Epoch(1, 0)}).size(), 1u);
  EXPECT_EQ(MergeStats({Epoch(1, 2)}, {Epoch(2, 1)}).size(), 2u);
}

TEST(DaemonSettings, AreWhatDiffersFromTheDefaults) {
  EXPECT_TRUE(DaemonSettings(EngineOptions()).empty());
  EngineOptions options;
  options.memory = 1 << 30;
  options.keep = false;
  options.io = PosixSourceOptions::Io::kThreads;
  options.cache_folder = "/nvme/cache";
  options.cache_bytes = 5;
  EXPECT_EQ(DaemonSettings(options),
            (std::vector<std::string>{"memory=1073741824", "io=threads", "keep=0",
                                      "cache_dir=/nvme/cache", "cache_bytes=5"}));
}

}  // namespace
}  // namespace forebay
