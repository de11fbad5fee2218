#include "core/home.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <vector>

namespace forebay {
namespace {

// Frozen: every node, build and release must agree, and cache folders outlive jobs.
TEST(Home, GoldenVectors) {
  std::vector<uint32_t> four, thousand, second;
  for (SampleId s = 0; s < 12; ++s) {
    four.push_back(HomeOf(s, 4).node);
    thousand.push_back(HomeOf(s, 1000).node);
    second.push_back(HomeOf(s, 4, 1).node);
  }
  EXPECT_EQ(four, (std::vector<uint32_t>{1, 3, 2, 0, 3, 3, 1, 2, 3, 2, 0, 3}));
  EXPECT_EQ(thousand,
            (std::vector<uint32_t>{195, 754, 786, 301, 654, 968, 843, 755, 529, 839, 803, 570}));
  EXPECT_EQ(second, (std::vector<uint32_t>{1, 0, 2, 2, 2, 3, 0, 0, 1, 3, 0, 0}));
}

TEST(Home, SpreadsEvenlyAndMovesOnlyToOrFromTheLastNode) {
  constexpr uint32_t kSamples = 20000;
  for (const uint32_t nodes : {1u, 2u, 3u, 4u, 7u, 64u}) {
    std::vector<uint32_t> count(nodes + 1);
    for (SampleId s = 0; s < kSamples; ++s) {
      const Home now = HomeOf(s, nodes), more = HomeOf(s, nodes + 1);
      ASSERT_LT(now.node, nodes);
      ASSERT_GE(now.until, nodes);
      ++count[now.node];
      ASSERT_EQ(more.node, now.until == nodes ? nodes : now.node);
    }
    const double mean = static_cast<double>(kSamples) / nodes;
    for (uint32_t n = 0; n < nodes; ++n) {
      EXPECT_GT(count[n], mean * 0.7) << n << " of " << nodes;
      EXPECT_LT(count[n], mean * 1.3) << n << " of " << nodes;
    }
  }
}

TEST(Home, ChoicesAreIndependent) {
  int same = 0;
  for (SampleId s = 0; s < 8000; ++s) same += HomeOf(s, 4).node == HomeOf(s, 4, 1).node ? 1 : 0;
  EXPECT_NEAR(same, 2000, 200);
}

}  // namespace
}  // namespace forebay
