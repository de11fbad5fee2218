#include "files/disk_calls.h"

#include <gtest/gtest.h>

#include <atomic>
#include <functional>
#include <memory>
#include <thread>
#include <vector>

namespace forebay::files {
namespace {

constexpr Nanos kLong = 60 * kSecond;

// A call that hangs until it is let go.
class HungCall {
 public:
  std::function<void()> call() const {
    return [state = state_] {
      state->begun.store(true);
      state->begun.notify_all();
      state->hangs.wait(true);
    };
  }
  void AwaitBegun() const { state_->begun.wait(false); }
  void LetGo() {
    state_->hangs.store(false);
    state_->hangs.notify_all();
  }

 private:
  struct State {
    std::atomic<bool> begun = false;
    std::atomic<bool> hangs = true;
  };
  const std::shared_ptr<State> state_ = std::make_shared<State>();
};

TEST(DiskCallsTest, AreMadeInTheirOrder) {
  auto calls = DiskCalls::Start(kLong);
  ASSERT_TRUE(calls);
  std::vector<int> made;
  for (int i = 0; i < 99; ++i) {
    EXPECT_TRUE((*calls)->Make([&made, i] { made.push_back(i); }, 10));
  }
  EXPECT_TRUE((*calls)->Make([&made] { made.push_back(99); }));
  ASSERT_EQ(made.size(), 100u);
  for (int i = 0; i < 100; ++i) EXPECT_EQ(made[static_cast<size_t>(i)], i);
  EXPECT_FALSE((*calls)->busy());
}

TEST(DiskCallsTest, NobodyWaitsForOneThatHangsMoreThanOnce) {
  HungCall hung;
  auto calls = DiskCalls::Start(kMilli);
  ASSERT_TRUE(calls);
  EXPECT_FALSE((*calls)->Make(hung.call()));
  const auto made = std::make_shared<std::atomic<bool>>(false);
  // Whoever waited for this would wait for good.
  EXPECT_FALSE((*calls)->Make([made] { *made = true; }, 0, 1000 * kSecond));
  EXPECT_TRUE((*calls)->busy());
  EXPECT_FALSE(*made);
  hung.LetGo();
  while ((*calls)->busy()) std::this_thread::yield();
  EXPECT_TRUE(*made) << "it is made when the disk answers";
  EXPECT_TRUE((*calls)->Make([] {}, 0, kLong)) << "it is waited for again";
}

TEST(DiskCallsTest, OneThatHangsOutlivesThem) {
  HungCall hung;
  const auto made = std::make_shared<std::atomic<bool>>(false);
  {
    auto calls = DiskCalls::Start(kMilli);
    ASSERT_TRUE(calls);
    EXPECT_FALSE((*calls)->Make(hung.call()));
    hung.AwaitBegun();
    EXPECT_FALSE((*calls)->Make([made] { *made = true; }));
    EXPECT_FALSE((*calls)->Close());
    EXPECT_FALSE((*calls)->Make([] {}));
  }
  EXPECT_EQ(made.use_count(), 1) << "what had not begun is dropped";
  EXPECT_FALSE(*made);
  hung.LetGo();
}

}  // namespace
}  // namespace forebay::files
