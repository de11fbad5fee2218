#include "stage/governor.h"

#include <gtest/gtest.h>

#include <algorithm>

namespace forebay {
namespace {

// Storage that answers `room` reads at once, each after `base`; more than that queue.
void Drive(ReadGovernor& governor, double room, double base_ns, int reads, bool hungry) {
  for (int i = 0; i < reads; ++i) {
    const double inflight = static_cast<double>(governor.limit());
    governor.OnRead(static_cast<int64_t>(base_ns * std::max(1.0, inflight / room)), hungry);
  }
}

TEST(ReadGovernor, GrowsWhileTheStorageHasRoom) {
  ReadGovernor governor({4, 256, 32});
  Drive(governor, 1e9, 40e6, 1000, true);
  EXPECT_EQ(governor.limit(), 256u);
}

TEST(ReadGovernor, StopsNearWhatTheStorageTakes) {
  ReadGovernor governor({4, 256, 8});
  Drive(governor, 40, 1e6, 5000, true);
  EXPECT_GE(governor.limit(), 40u);
  EXPECT_LE(governor.limit(), 96u);
}

TEST(ReadGovernor, DoesNotGrowForAFedConsumer) {
  ReadGovernor governor({4, 256, 16});
  Drive(governor, 1e9, 40e6, 1000, false);
  EXPECT_EQ(governor.limit(), 16u);
}

TEST(ReadGovernor, ReopensWhenTheStorageSlowsDown) {
  ReadGovernor governor({4, 256, 16});
  Drive(governor, 20, 1e6, 3000, true);
  EXPECT_LE(governor.limit(), 64u);
  Drive(governor, 1e9, 20e6, 3000, true);  // latency up, but no queue: parallelism helps again
  EXPECT_EQ(governor.limit(), 256u);
}

TEST(ReadGovernor, FixedStaysFixed) {
  ReadGovernor governor({4, 256, 16});
  governor.Fix(12);
  Drive(governor, 1e9, 40e6, 1000, true);
  EXPECT_EQ(governor.limit(), 12u);
}

}  // namespace
}  // namespace forebay
