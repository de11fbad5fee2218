#include "io/scatter.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <vector>

#include "base/crc32c.h"
#include "base/rng.h"

namespace forebay {
namespace {

// A file that answers each request with a part of it, as it may.
TEST(Scatter, EveryByteFindsItsPlaceHoweverReadsEnd) {
  for (uint64_t seed = 1; seed <= 300; ++seed) {
    SCOPED_TRACE(seed);
    SplitMix64 rng(seed);
    std::vector<std::vector<std::byte>> dests;
    std::vector<ReadPart> parts;
    for (size_t i = 1 + rng.Below(20); i > 0; --i) {
      dests.emplace_back(rng.Below(4) == 0 ? 0 : rng.Below(60));
      parts.push_back({.gap = rng.Below(3) == 0 ? 0 : rng.Below(90), .dest = dests.back()});
    }
    const ReadOp op{.parts = parts, .checksum = true};
    std::vector<std::byte> file(RangeBytes(op));
    for (std::byte& b : file) b = static_cast<std::byte>(rng.Next());

    std::vector<std::byte> waste(16);
    Completion done;
    while (done.bytes < file.size()) {
      std::vector<iovec> vectors(2 + rng.Below(8));
      uint64_t bytes = 0;
      const size_t count =
          Vectors(op, done.bytes, waste, std::span(vectors).first(vectors.size() - 1), bytes);
      EXPECT_EQ(vectors.back().iov_base, nullptr) << "beyond the room";
      ASSERT_GT(count, 0u);
      ASSERT_LT(count, vectors.size());
      vectors.resize(count);
      uint64_t named = 0;
      for (const iovec& vector : vectors) named += vector.iov_len;
      ASSERT_EQ(named, bytes);
      ASSERT_LE(done.bytes + bytes, file.size());
      uint64_t left = 1 + rng.Below(bytes);
      for (const iovec& vector : vectors) {
        const size_t n = std::min<uint64_t>(left, vector.iov_len);
        std::memcpy(vector.iov_base, file.data() + done.bytes, n);
        done.bytes += n;
        left -= n;
      }
    }
    Checksum(op, done);
    uint64_t at = 0;
    for (const ReadPart& part : parts) {
      at += part.gap;
      const auto expected = std::span(file).subspan(at, part.dest.size());
      ASSERT_TRUE(std::ranges::equal(part.dest, expected));
      ASSERT_EQ(part.crc, Crc32c(expected));
      at += part.dest.size();
    }
    ASSERT_EQ(at, file.size());
  }
}

}  // namespace
}  // namespace forebay
