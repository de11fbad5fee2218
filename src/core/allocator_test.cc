#include "core/allocator.h"

#include <gtest/gtest.h>

#include <map>
#include <vector>

#include "base/rng.h"

namespace forebay {
namespace {

TEST(ArenaAllocator, FillsCompletelyWithEqualBlocks) {
  ArenaAllocator arena(64 * 1000);
  for (int i = 0; i < 1000; ++i) ASSERT_NE(arena.Allocate(1), ArenaAllocator::kNone);
  EXPECT_EQ(arena.used(), arena.capacity());
  EXPECT_EQ(arena.Allocate(0), ArenaAllocator::kNone);
}

TEST(ArenaAllocator, WholeArenaInOneBlockAlsoWhenItsSizeIsOdd) {
  for (uint64_t grains : {1u, 7u, 15u, 16u, 17u, 33u, 1000003u}) {
    ArenaAllocator arena(grains * 64);
    const auto block = arena.Allocate(grains * 64);
    ASSERT_NE(block, ArenaAllocator::kNone) << grains;
    arena.Free(block);
    ASSERT_EQ(arena.used(), 0u);
  }
  ArenaAllocator none(0);
  EXPECT_EQ(none.Allocate(1), ArenaAllocator::kNone);
}

// A model of the arena as a map of intervals: no overlap, nothing outside, everything merges back.
TEST(ArenaAllocator, RandomTraceNeverOverlapsAndMergesBack) {
  for (uint64_t seed = 0; seed < 20; ++seed) {
    SplitMix64 rng(seed);
    const uint64_t capacity = 64 * (1 + rng.Below(20000));
    ArenaAllocator arena(capacity);
    std::map<uint64_t, uint64_t> live;  // offset -> end
    std::vector<ArenaAllocator::Block> blocks;
    for (int step = 0; step < 5000; ++step) {
      if (rng.Below(5) < 3) {
        const uint64_t bytes = rng.Below(rng.Below(2) == 0 ? 200 : 60000);
        const auto block = arena.Allocate(bytes);
        if (block == ArenaAllocator::kNone) continue;
        const uint64_t begin = arena.offset(block);
        const uint64_t end = begin + arena.size(block);
        ASSERT_GE(arena.size(block), bytes);
        ASSERT_LE(end, capacity);
        ASSERT_EQ(begin % 64, 0u);
        auto next = live.lower_bound(begin);
        if (next != live.end()) {
          ASSERT_LE(end, next->first);
        }
        if (next != live.begin()) {
          ASSERT_LE(std::prev(next)->second, begin);
        }
        live[begin] = end;
        blocks.push_back(block);
      } else if (!blocks.empty()) {
        const size_t i = rng.Below(blocks.size());
        live.erase(arena.offset(blocks[i]));
        arena.Free(blocks[i]);
        blocks[i] = blocks.back();
        blocks.pop_back();
      }
    }
    for (auto block : blocks) arena.Free(block);
    ASSERT_EQ(arena.used(), 0u);
    ASSERT_NE(arena.Allocate(capacity), ArenaAllocator::kNone) << "holes did not merge";
  }
}

}  // namespace
}  // namespace forebay
