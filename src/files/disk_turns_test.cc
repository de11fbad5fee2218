#include "files/disk_turns.h"

#include <gtest/gtest.h>

#include <deque>
#include <stop_token>
#include <thread>
#include <utility>
#include <vector>

#include "base/thread_annotations.h"

namespace forebay::files {
namespace {

using Asked = std::pair<bool, uint64_t>;  // urgent, number

class DiskTurnsTest : public ::testing::Test {
 protected:
  void SetUp() override {
    for (size_t i = 0; i < DiskTurns::kMost; ++i) first_.emplace_back(turns_, false, i, stop());
  }
  std::stop_token stop() const { return stop_.get_token(); }
  // Returns when it waits.
  std::thread Ask(Asked asked) {
    const size_t before = turns_.waiting();
    std::thread thread([this, asked] {
      const DiskTurns::Turn turn(turns_, asked.first, asked.second, stop());
      if (!turn.given()) return;
      const MutexLock lock(mutex_);
      order_.push_back(asked);
    });
    while (turns_.waiting() == before) std::this_thread::yield();
    return thread;
  }

  DiskTurns turns_;
  std::stop_source stop_;
  std::deque<DiskTurns::Turn> first_;
  Mutex mutex_;
  std::vector<Asked> order_ GUARDED_BY(mutex_);
};

TEST_F(DiskTurnsTest, UrgentOnesFirstThenByNumber) {
  std::vector<std::thread> threads;
  for (const Asked& asked : {Asked(false, 5), Asked(true, 9), Asked(false, 30), Asked(true, 40),
                             Asked(false, 4), Asked(true, 2)}) {
    threads.push_back(Ask(asked));
  }
  EXPECT_EQ(turns_.given(), DiskTurns::kMost);
  first_.pop_back();  // the others stay: one after the other has this one
  for (std::thread& thread : threads) thread.join();
  const MutexLock lock(mutex_);
  EXPECT_EQ(order_, (std::vector<Asked>{
                        {true, 2}, {true, 9}, {true, 40}, {false, 4}, {false, 5}, {false, 30}}));
  EXPECT_EQ(turns_.given(), DiskTurns::kMost - 1);
}

TEST_F(DiskTurnsTest, WhoWaitsWhenItEndsGetsNone) {
  std::thread thread = Ask({true, 1});
  stop_.request_stop();
  thread.join();
  EXPECT_EQ(turns_.waiting(), 0u);
  {
    const MutexLock lock(mutex_);
    EXPECT_TRUE(order_.empty());
  }
  first_.clear();
  EXPECT_EQ(turns_.given(), 0u);
}

}  // namespace
}  // namespace forebay::files
