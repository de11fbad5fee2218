#include "decode/pool.h"

#include <gtest/gtest.h>

#include <atomic>
#include <filesystem>
#include <fstream>
#include <set>
#include <thread>

#include "decode/numa.h"

namespace forebay {
namespace {

TEST(ThreadGovernor, SparesThreadsWhileBatchesStayReady) {
  ThreadGovernor governor(8);
  EXPECT_EQ(governor.limit(), 8U);
  for (int i = 0; i < 1000; ++i) governor.OnTake(4, 4);
  EXPECT_LT(governor.limit(), 4U);
  EXPECT_GE(governor.limit(), 1U);
}

TEST(ThreadGovernor, BringsAllBackWhenBatchesRunLowAndRemembers) {
  ThreadGovernor governor(8);
  while (governor.limit() > 3) governor.OnTake(4, 4);
  governor.OnTake(1, 4);
  EXPECT_EQ(governor.limit(), 8U);
  for (int i = 0; i < 300; ++i) governor.OnTake(4, 4);
  EXPECT_EQ(governor.limit(), 4U) << "three were too few a short while ago";
  for (int i = 0; i < 600; ++i) governor.OnTake(4, 4);
  EXPECT_LT(governor.limit(), 4U) << "long ago: tried again";
}

// Counts down pieces of work.
class Countdown final : public DecodeWork {
 public:
  explicit Countdown(int pieces) : left_(pieces) {}
  bool Step(size_t thread) override {
    if (left_.fetch_sub(1) <= 0) return false;
    std::lock_guard lock(mutex_);
    threads_.insert(thread);
    ++done_;
    return true;
  }
  int done() {
    std::lock_guard lock(mutex_);
    return done_;
  }
  std::set<size_t> threads() {
    std::lock_guard lock(mutex_);
    return threads_;
  }

 private:
  std::atomic<int> left_;
  std::mutex mutex_;
  int done_ = 0;
  std::set<size_t> threads_;
};

TEST(DecodePool, DoesAllWorkOfAllAndLetsGo) {
  Registry registry;
  DecodePool pool(registry, 4);
  Countdown a(1000);
  Countdown b(1000);
  ASSERT_TRUE(pool.Add(a).ok());
  ASSERT_TRUE(pool.Add(b).ok());
  for (int i = 0; i < 10000 && (a.done() < 1000 || b.done() < 1000); ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  EXPECT_EQ(a.done(), 1000);
  EXPECT_EQ(b.done(), 1000);
  pool.Remove(a);
  pool.Remove(b);
}

TEST(DecodePool, TheKnobFixesTheThreads) {
  Registry registry;
  DecodePool pool(registry, 4);
  ASSERT_TRUE(registry.SetKnob("decode_threads", 1).ok());
  EXPECT_FALSE(registry.SetKnob("decode_threads", 5).ok());
  Countdown work(500);
  ASSERT_TRUE(pool.Add(work).ok());
  for (int i = 0; i < 10000 && work.done() < 500; ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  EXPECT_EQ(work.done(), 500);
  EXPECT_EQ(work.threads(), (std::set<size_t>{0}));
  pool.Remove(work);
}

TEST(Numa, ReadsNodesOfThisProcess) {
  char name[] = "/tmp/forebay_numa_XXXXXX";
  ASSERT_NE(mkdtemp(name), nullptr);
  const std::string root = name;
  cpu_set_t allowed;
  CPU_ZERO(&allowed);
  ASSERT_EQ(sched_getaffinity(0, sizeof allowed, &allowed), 0);
  int first = 0;
  while (!CPU_ISSET(first, &allowed)) ++first;
  auto node = [&](int number, const std::string& processors) {
    const std::string folder = root + "/node" + std::to_string(number);
    std::filesystem::create_directories(folder);
    std::ofstream(folder + "/cpulist") << processors << "\n";
  };
  node(0, std::to_string(first));
  node(1, "1022-1023");                                 // not ours
  node(3, "0-" + std::to_string(first) + ",900-1000");  // a gap in the numbers
  node(4, "nonsense");
  const std::vector<cpu_set_t> nodes = NumaNodes(root);
  ASSERT_EQ(nodes.size(), 2U);
  EXPECT_TRUE(CPU_ISSET(first, &nodes[0]));
  EXPECT_EQ(CPU_COUNT(&nodes[0]), 1);
  EXPECT_TRUE(NumaNodes(root + "/none").empty());
  EXPECT_GE(UsableProcessors(), 1U);
  std::filesystem::remove_all(root);
}

}  // namespace
}  // namespace forebay
