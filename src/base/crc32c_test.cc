#include "base/crc32c.h"

#include <gtest/gtest.h>

#include <algorithm>
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

TEST(Crc32c, ACopyIsChecksummedAtEveryLengthAndAlignment) {
  SplitMix64 rng(8);
  std::vector<std::byte> data(70000);
  for (auto& b : data) b = static_cast<std::byte>(rng.Next());
  std::vector<std::byte> to(data.size() + 256);
  for (int i = 0; i < 2000; ++i) {
    const size_t skip = rng.Below(100);
    const size_t n = i < 200 ? static_cast<size_t>(i) : rng.Below(data.size() - skip);
    const size_t at = 64 + rng.Below(128);
    const std::span<const std::byte> from = std::span(data).subspan(skip, n);
    std::fill(to.begin(), to.end(), std::byte{0xa5});
    ASSERT_EQ(CopyCrc32c(std::span(to).subspan(at, n), from), Crc32cPortable(from)) << n;
    ASSERT_TRUE(std::equal(from.begin(), from.end(), to.begin() + static_cast<ptrdiff_t>(at)));
    for (size_t k = 0; k < to.size(); ++k) {
      ASSERT_TRUE((k >= at && k < at + n) || to[k] == std::byte{0xa5}) << n << " at " << at;
    }
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
