#include "decode/decode.h"

#include <gtest/gtest.h>

#include <vector>

namespace forebay {
namespace {

TEST(Decode, CopyGivesTheSameBytes) {
  std::vector<std::byte> in(1000);
  for (size_t i = 0; i < in.size(); ++i) in[i] = static_cast<std::byte>(i * 7);
  std::vector<std::byte> out(DecodedBytes(DecodeKind::kCopy, in.size()));
  ASSERT_TRUE(Decode(DecodeKind::kCopy, in, out).ok());
  EXPECT_EQ(in, out);
  EXPECT_TRUE(Decode(DecodeKind::kCopy, {}, {}).ok());
}

TEST(Decode, AWrongSizeIsOurOwnBug) {
  std::vector<std::byte> in(10);
  std::vector<std::byte> out(9);
  EXPECT_EQ(Decode(DecodeKind::kCopy, in, out).code(), Code::kInternal);
}

}  // namespace
}  // namespace forebay
