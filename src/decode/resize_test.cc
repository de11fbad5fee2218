#include "decode/resize.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <string>
#include <vector>

#include "base/rng.h"

namespace forebay {
namespace {

constexpr Interpolation kAll[] = {Interpolation::kNearest,  Interpolation::kLanczos,
                                  Interpolation::kBilinear, Interpolation::kBicubic,
                                  Interpolation::kBox,      Interpolation::kHamming};

struct Pixels {
  uint32_t width = 0;
  uint32_t height = 0;
  std::vector<uint8_t> bytes;  // RGBX, then 32 bytes
};

Pixels Noise(uint32_t width, uint32_t height, uint64_t seed) {
  Pixels p{width, height, std::vector<uint8_t>(size_t{width} * height * 4 + 32)};
  SplitMix64 random(seed);
  for (uint8_t& b : p.bytes) b = static_cast<uint8_t>(random.Next());
  return p;
}

AxisSpec Whole(uint32_t in, uint32_t out) { return {in, 0, static_cast<double>(in), out, 0, out}; }

// The window, RGB. Each row is handed over in a buffer of its own that ends where it may be read
// last, and is spoilt afterwards.
std::vector<uint8_t> Resized(Resampler& r, const Pixels& p, const AxisSpec& x, const AxisSpec& y,
                             Interpolation interpolation, PassOrder order = PassOrder::kPillow13) {
  const Rect rect = r.Start(x, y, interpolation, order);
  EXPECT_LE(rect.x + rect.width, p.width);
  EXPECT_LE(rect.y + rect.height, p.height);
  std::vector<uint8_t> out;
  uint32_t rows = 0;
  for (uint32_t i = 0; i < rect.height; ++i) {
    std::vector<uint8_t> row(size_t{rect.width} * 4 + 32, 0xee);
    std::memcpy(row.data(), &p.bytes[(size_t{rect.y + i} * p.width + rect.x) * 4],
                size_t{rect.width} * 4);
    r.Push(row.data());
    while (const uint8_t* done = r.Pop()) {
      ++rows;
      for (uint32_t j = 0; j < x.window_size; ++j) {
        out.insert(out.end(), done + j * 4, done + j * 4 + 3);
      }
    }
  }
  EXPECT_EQ(rows, y.window_size);
  return out;
}

std::vector<SimdLevel> Levels() {
  std::vector<SimdLevel> levels = {SimdLevel::kScalar};
  if (BestSimd() >= SimdLevel::kAvx2) levels.push_back(SimdLevel::kAvx2);
  if (BestSimd() >= SimdLevel::kVnni) levels.push_back(SimdLevel::kVnni);
  return levels;
}

TEST(Resampler, EveryLevelGivesTheSameBits) {
  SplitMix64 random(1);
  std::vector<Resampler> resamplers;
  for (const SimdLevel level : Levels()) resamplers.emplace_back(level);
  for (int round = 0; round < 300; ++round) {
    const uint64_t most = round % 10 == 0 ? 400 : 60;
    const auto size = [&] { return static_cast<uint32_t>(1 + random.Below(most)); };
    const Pixels p = Noise(size(), size(), static_cast<uint64_t>(round));
    const AxisSpec x = Whole(p.width, size());
    const AxisSpec y = Whole(p.height, size());
    const Interpolation interpolation = kAll[random.Below(std::size(kAll))];
    const PassOrder order = round % 2 ? PassOrder::kPillow13 : PassOrder::kRowsFirst;
    const std::vector<uint8_t> want = Resized(resamplers[0], p, x, y, interpolation, order);
    for (size_t i = 1; i < resamplers.size(); ++i) {
      ASSERT_EQ(Resized(resamplers[i], p, x, y, interpolation, order), want)
          << p.width << "x" << p.height << " to " << x.out_size << "x" << y.out_size << " by "
          << static_cast<int>(interpolation);
    }
  }
}

// Sums that leave 0 to 255 on both sides.
TEST(Resampler, EveryLevelClipsAlike) {
  Pixels p = Noise(40, 40, 3);
  for (uint8_t& b : p.bytes) b = b & 1 ? 255 : 0;
  for (const Interpolation interpolation : {Interpolation::kBicubic, Interpolation::kLanczos}) {
    Resampler scalar(SimdLevel::kScalar);
    const auto want = Resized(scalar, p, Whole(40, 97), Whole(40, 61), interpolation);
    for (const SimdLevel level : Levels()) {
      Resampler r(level);
      EXPECT_EQ(Resized(r, p, Whole(40, 97), Whole(40, 61), interpolation), want);
    }
  }
}

TEST(Resampler, AWindowHasTheBitsOfTheWhole) {
  SplitMix64 random(2);
  Resampler r;
  for (int round = 0; round < 200; ++round) {
    const auto size = [&] { return static_cast<uint32_t>(1 + random.Below(90)); };
    const Pixels p = Noise(size(), size(), static_cast<uint64_t>(round));
    AxisSpec x = Whole(p.width, size());
    AxisSpec y = Whole(p.height, size());
    const Interpolation interpolation = kAll[random.Below(std::size(kAll))];
    const std::vector<uint8_t> whole = Resized(r, p, x, y, interpolation);
    const uint32_t full_width = x.out_size;
    x.window_begin = static_cast<uint32_t>(random.Below(x.out_size));
    x.window_size = static_cast<uint32_t>(1 + random.Below(x.out_size - x.window_begin));
    y.window_begin = static_cast<uint32_t>(random.Below(y.out_size));
    y.window_size = static_cast<uint32_t>(1 + random.Below(y.out_size - y.window_begin));
    const std::vector<uint8_t> window = Resized(r, p, x, y, interpolation);
    for (uint32_t i = 0; i < y.window_size; ++i) {
      const auto* want = &whole[(size_t{y.window_begin + i} * full_width + x.window_begin) * 3];
      ASSERT_EQ(std::memcmp(&window[size_t{i} * x.window_size * 3], want, x.window_size * 3), 0);
    }
  }
}

TEST(Resampler, AWindowNeedsItsPartOnly) {
  Resampler r;
  AxisSpec x = Whole(1000, 500);
  AxisSpec y = Whole(800, 400);
  x.window_begin = 100;
  x.window_size = 50;
  y.window_begin = 200;
  y.window_size = 10;
  const Rect rect = r.Start(x, y, Interpolation::kBilinear, PassOrder::kPillow13);
  EXPECT_EQ(rect, (Rect{199, 399, 102, 22}));
}

TEST(Resampler, TheSameSizeIsACopy) {
  const Pixels p = Noise(33, 21, 5);
  for (const Interpolation interpolation : kAll) {
    Resampler r;
    const auto got = Resized(r, p, Whole(33, 33), Whole(21, 21), interpolation);
    for (size_t i = 0; i < got.size() / 3; ++i) {
      ASSERT_EQ(std::memcmp(&got[i * 3], &p.bytes[i * 4], 3), 0);
    }
  }
}

// What Pillow 13 makes of it, and what earlier ones do.
TEST(Resampler, PillowsBits) {
  Pixels p{4, 5, std::vector<uint8_t>(4 * 5 * 4 + 32)};
  for (size_t i = 0; i < 20; ++i) {
    p.bytes[i * 4] = static_cast<uint8_t>(i * 37 % 256);
    p.bytes[i * 4 + 1] = static_cast<uint8_t>(i * 101 % 256);
    p.bytes[i * 4 + 2] = static_cast<uint8_t>(255 - i * 11);
  }
  const std::vector<uint8_t> bilinear = {78,  78,  211, 97, 123, 206, 119, 167, 198, 137, 165, 191,
                                         107, 145, 184, 73, 125, 178, 118, 118, 123, 137, 116, 118,
                                         144, 115, 110, 98, 121, 103, 100, 144, 96,  113, 165, 90};
  const std::vector<uint8_t> bicubic = {72,  68,  218, 90, 118, 212, 118, 174, 204, 142, 174, 197,
                                        106, 144, 189, 66, 118, 183, 118, 120, 118, 142, 117, 112,
                                        150, 114, 104, 94, 116, 97,  99,  145, 89,  119, 170, 83};
  const std::vector<uint8_t> old_bilinear = {
      78,  78,  211, 97,  123, 206, 119, 167, 198, 137, 164, 191, 107, 145, 184, 73,  125, 178,
      118, 118, 123, 137, 117, 118, 144, 116, 110, 99,  121, 103, 101, 144, 96,  113, 165, 90};
  const std::vector<uint8_t> old_bicubic = {
      73,  70,  218, 90,  118, 212, 117, 174, 204, 142, 174, 197, 106, 144, 189, 71,  118, 183,
      118, 120, 118, 141, 117, 112, 150, 114, 104, 95,  116, 97,  99,  144, 89,  119, 170, 83};
  for (const SimdLevel level : Levels()) {
    Resampler r(level);
    const AxisSpec x = Whole(4, 6);
    const AxisSpec y = Whole(5, 2);
    EXPECT_EQ(Resized(r, p, x, y, Interpolation::kBilinear), bilinear);
    EXPECT_EQ(Resized(r, p, x, y, Interpolation::kBicubic), bicubic);
    EXPECT_EQ(Resized(r, p, x, y, Interpolation::kBilinear, PassOrder::kRowsFirst), old_bilinear);
    EXPECT_EQ(Resized(r, p, x, y, Interpolation::kBicubic, PassOrder::kRowsFirst), old_bicubic);
  }
}

}  // namespace
}  // namespace forebay
