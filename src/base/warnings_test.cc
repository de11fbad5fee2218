#include "base/warnings.h"

#include <gtest/gtest.h>

namespace forebay {
namespace {

TEST(Warnings, EachOnceWhateverItAdvises) {
  Warnings warnings;
  EXPECT_TRUE(warnings.Add("the disk is full; free it"));
  EXPECT_FALSE(warnings.Add("the disk is full; buy another"));
  EXPECT_TRUE(warnings.Add("the disk fails; free it"));
  EXPECT_EQ(warnings.All(),
            (std::vector<std::string>{"the disk is full; free it", "the disk fails; free it"}));
}

TEST(Warnings, SoManyAndNoMore) {
  Warnings warnings;
  for (size_t i = 0; i < Warnings::kMost; ++i) EXPECT_TRUE(warnings.Add(std::to_string(i)));
  EXPECT_FALSE(warnings.Add("one more"));
  EXPECT_EQ(warnings.All().size(), Warnings::kMost);
}

}  // namespace
}  // namespace forebay
