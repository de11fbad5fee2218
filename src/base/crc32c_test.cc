#include "base/crc32c.h"

#include <gtest/gtest.h>

#include <cstring>
#include <string_view>
#include <vector>

#include "base/rng.h"

namespace forebay {
namespace {

std::span<const std::byte> Bytes(std::string_view s) {
  return std::as_bytes(std::span<const char>(s.data(), s.size()));
}

TEST(Crc32c, KnownVectors) {
  EXPECT_EQ(Crc32c(Bytes("123456789")), 0xe3069283u);
  EXPECT_EQ(Crc32c(Bytes("")), 0u);
  std::vector<std::byte> zeros(32);
  EXPECT_EQ(Crc32c(zeros), 0x8a9136aau);  // RFC 3720, B.4
  std::vector<std::byte> ones(32, std::byte{0xff});
  EXPECT_EQ(Crc32c(ones), 0x62a8ab43u);
}

TEST(Crc32c, HardwareEqualsPortableAtEveryLengthAndSplit) {
  SplitMix64 rng(7);
  std::vector<std::byte> data(20000);
  for (auto& b : data) b = static_cast<std::byte>(rng.Next());
  const std::span<const std::byte> all(data);
  for (size_t n = 0; n < 2000; ++n)
    ASSERT_EQ(Crc32c(all.first(n)), Crc32cPortable(all.first(n))) << n;
  for (int i = 0; i < 300; ++i) {
    const size_t n = rng.Below(data.size());
    const size_t cut = n == 0 ? 0 : rng.Below(n);
    const uint32_t whole = Crc32cPortable(all.first(n));
    ASSERT_EQ(Crc32c(all.first(n)), whole);
    ASSERT_EQ(Crc32c(all.subspan(cut, n - cut), Crc32c(all.first(cut))), whole);
  }
}

TEST(Crc32c, MaskRoundTrip) {
  for (uint32_t crc : {0u, 1u, 0xdeadbeefu, 0xffffffffu}) {
    EXPECT_EQ(UnmaskCrc(MaskCrc(crc)), crc);
    EXPECT_NE(MaskCrc(crc), crc);
  }
}

}  // namespace
}  // namespace forebay
