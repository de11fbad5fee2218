#include "files/key.h"

#include <gtest/gtest.h>

#include <cinttypes>
#include <cstdio>
#include <string>

#include "base/rng.h"

namespace forebay::files {
namespace {

TEST(FileKeyTest, TheNameIsTheKeyInHexadecimal) {
  SplitMix64 rng(1);
  for (int i = 0; i < 1000; ++i) {
    const FileKey key{.high = rng.Next(), .low = i == 0 ? 0 : rng.Next()};
    char wanted[kNameLength + 1];
    std::snprintf(wanted, sizeof(wanted), "%016" PRIx64 "%016" PRIx64, key.high, key.low);
    char name[kNameLength + 1];
    NameOf(key, name);
    EXPECT_STREQ(name, wanted);
  }
}

TEST(FileKeyTest, OddNamesAreFoundWhereverTheyAre) {
  SplitMix64 rng(2);
  int odd = 0;
  for (int i = 0; i < 20'000; ++i) {
    std::string path = "/";
    const size_t length = 1 + rng.Below(60);
    while (path.size() < length) path += "/.aaaaaaaaaaaaaaaaaaaaaaaaaaaaaa"[rng.Below(32)];
    const size_t from = rng.Below(length);
    const bool wanted =
        path.find("//", from) != std::string::npos || path.find("/.", from) != std::string::npos;
    odd += wanted ? 1 : 0;
    EXPECT_EQ(HasOddName(path, from), wanted) << path << " from " << from;
  }
  EXPECT_GT(odd, 500);
  EXPECT_LT(odd, 15'000);
}

}  // namespace
}  // namespace forebay::files
