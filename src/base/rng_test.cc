#include "base/rng.h"

#include <gtest/gtest.h>

#include <random>

namespace forebay {
namespace {

TEST(Mt19937, EqualsTheStandardLibrarys) {
  for (uint32_t seed : {0u, 1u, 5489u, 0xffffffffu}) {
    Mt19937 ours(seed);
    std::mt19937 reference(seed);
    for (int i = 0; i < 2000; ++i) ASSERT_EQ(ours.Next(), reference()) << seed << " " << i;
  }
}

TEST(Mt19937, ContinuesFromSavedState) {
  Mt19937 a(42);
  for (int i = 0; i < 1000; ++i) a.Next();
  Mt19937 b(a.state(), a.used());
  for (int i = 0; i < 1000; ++i) ASSERT_EQ(a.Next(), b.Next());
}

TEST(SplitMix64, GoldenVector) {
  // The reference implementation's first outputs for seed 1234567 (Vigna).
  SplitMix64 rng(1234567);
  EXPECT_EQ(rng.Next(), 6457827717110365317ULL);
  EXPECT_EQ(rng.Next(), 3203168211198807973ULL);
  EXPECT_EQ(rng.Next(), 9817491932198370423ULL);
}

}  // namespace
}  // namespace forebay
