#include "base/slots.h"

#include <gtest/gtest.h>

#include <memory>
#include <set>

#include "base/rng.h"

namespace forebay {
namespace {

TEST(Slots, ACapacityIsThereAtOnce) {
  Slots<int> slots(3);
  EXPECT_EQ(slots.capacity(), 3u);
  EXPECT_EQ(slots.left(), 3u);
  EXPECT_EQ(slots.used(), 0u);
  const int* first = &slots[0];
  EXPECT_EQ(slots.Next(), 0u);
  EXPECT_EQ(slots.Next(2), 2u);
  EXPECT_EQ(slots.Take(), 0u);
  EXPECT_EQ(slots.Take(), 1u);
  EXPECT_EQ(slots.Take(), 2u);
  EXPECT_EQ(slots.left(), 0u);
  EXPECT_EQ(&slots[0], first);
}

TEST(Slots, GrowsWithoutOne) {
  Slots<std::unique_ptr<int>> slots;
  EXPECT_EQ(slots.Take(), 0u);
  slots[0] = std::make_unique<int>(7);
  EXPECT_EQ(slots.Take(), 1u);
  slots.Free(0);
  EXPECT_EQ(slots.used(), 1u);
  EXPECT_EQ(slots.Take(), 0u);
  EXPECT_EQ(*slots[0], 7);  // as it was left
  EXPECT_EQ(slots.capacity(), 2u);
}

TEST(Slots, NoNumberIsThereTwice) {
  SplitMix64 rng(3);
  Slots<uint32_t> slots(20);
  std::set<uint32_t> used;
  for (int round = 0; round < 2000; ++round) {
    if (slots.left() > 0 && rng.Below(2) == 0) {
      const uint32_t next = slots.Next();
      ASSERT_EQ(slots.Take(), next);
      ASSERT_TRUE(used.insert(next).second);
      slots[next] = next;
    } else if (!used.empty()) {
      const uint32_t index = *used.begin();
      ASSERT_EQ(slots[index], index);
      used.erase(used.begin());
      slots.Free(index);
    }
    ASSERT_EQ(slots.used(), used.size());
    ASSERT_EQ(slots.capacity(), 20u);
  }
}

}  // namespace
}  // namespace forebay
