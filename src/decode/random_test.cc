#include "decode/random.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <map>
#include <vector>

namespace forebay {
namespace {

// The known answers of Random123, the reference implementation.
TEST(Philox, KnownAnswers) {
  using Block = std::array<uint32_t, 4>;
  EXPECT_EQ(Philox4x32({0, 0, 0, 0}, {0, 0}),
            (Block{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}));
  EXPECT_EQ(Philox4x32({0xffffffff, 0xffffffff, 0xffffffff, 0xffffffff}, {0xffffffff, 0xffffffff}),
            (Block{0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}));
  EXPECT_EQ(Philox4x32({0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344}, {0xa4093822, 0x299f31d0}),
            (Block{0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}));
}

TEST(SampleRandom, GoldenVector) {
  SampleRandom random({0x0123456789abcdefULL, 7, 0xfedcba9876543210ULL}, 0x0203);
  std::vector<uint32_t> got;
  for (int i = 0; i < 6; ++i) got.push_back(random.Next32());
  const std::array<uint32_t, 2> key = {0x89abcdef, 0x01234567};
  const auto first = Philox4x32({0x76543210, 0xfedcba98, 7, 0x02030000}, key);
  const auto second = Philox4x32({0x76543210, 0xfedcba98, 7, 0x02030001}, key);
  EXPECT_EQ(got,
            (std::vector<uint32_t>{first[0], first[1], first[2], first[3], second[0], second[1]}));
  EXPECT_EQ(got[0], 0xfc12be1fu);
  EXPECT_EQ(got[1], 0x508cac7au);
}

TEST(SampleRandom, EveryPartOfTheKeyCounts) {
  const auto draw = [](SampleKey key, uint16_t stream) {
    SampleRandom random(key, stream);
    return random.Next32();
  };
  const uint32_t base = draw({1, 2, 3}, 4);
  EXPECT_EQ(base, draw({1, 2, 3}, 4));
  EXPECT_NE(base, draw({2, 2, 3}, 4));
  EXPECT_NE(base, draw({1 + (1ULL << 32), 2, 3}, 4));
  EXPECT_NE(base, draw({1, 3, 3}, 4));
  EXPECT_NE(base, draw({1, 2, 4}, 4));
  EXPECT_NE(base, draw({1, 2, 3 + (1ULL << 32)}, 4));
  EXPECT_NE(base, draw({1, 2, 3}, 5));
}

TEST(SampleRandom, IntCoversItsRangeEvenly) {
  SampleRandom random({5, 0, 0});
  std::map<int64_t, int> counts;
  for (int i = 0; i < 70000; ++i) ++counts[random.Int(-3, 4)];
  ASSERT_EQ(counts.size(), 7u);
  EXPECT_EQ(counts.begin()->first, -3);
  EXPECT_EQ(counts.rbegin()->first, 3);
  for (const auto& [value, count] : counts) EXPECT_NEAR(count, 10000, 500) << value;
  EXPECT_EQ(random.Int(9, 10), 9);
}

TEST(SampleRandom, UniformAndBernoulli) {
  SampleRandom random({6, 0, 0});
  double sum = 0;
  int hits = 0;
  for (int i = 0; i < 20000; ++i) {
    const double x = random.Uniform(-2, 6);
    ASSERT_GE(x, -2);
    ASSERT_LT(x, 6);
    sum += x;
    hits += random.Bernoulli(0.2);
  }
  EXPECT_NEAR(sum / 20000, 2.0, 0.1);
  EXPECT_NEAR(hits, 4000, 300);
  EXPECT_FALSE(random.Bernoulli(0));
  EXPECT_TRUE(random.Bernoulli(1));
}

TEST(SampleRandom, PermutationsAreAllEquallyLikely) {
  std::map<std::array<uint8_t, 4>, int> counts;
  for (uint64_t i = 0; i < 24000; ++i) {
    std::array<uint8_t, 4> order;
    SampleRandom({1, 0, i}).Permutation(order);
    ++counts[order];
  }
  ASSERT_EQ(counts.size(), 24u);
  for (const auto& [order, count] : counts) {
    EXPECT_NEAR(count, 1000, 200);
    EXPECT_EQ(order[0] + order[1] + order[2] + order[3], 6);
  }
}

}  // namespace
}  // namespace forebay
