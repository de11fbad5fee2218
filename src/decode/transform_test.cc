#include "decode/transform.h"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include "base/rng.h"
#include "decode/color_kernels.h"

namespace forebay {
namespace {

constexpr OutputSpec kBytes{DType::kUint8, Layout::kHwc};

struct Pixels {
  uint32_t width = 0;
  uint32_t height = 0;
  std::vector<uint8_t> bytes;  // RGBX

  const uint8_t* at(uint32_t x, uint32_t y) const { return &bytes[(size_t{y} * width + x) * 4]; }
};

Pixels Noise(uint32_t width, uint32_t height, uint64_t seed = 1) {
  Pixels p{width, height, std::vector<uint8_t>(size_t{width} * height * 4)};
  SplitMix64 random(seed);
  for (uint8_t& b : p.bytes) b = static_cast<uint8_t>(random.Next());
  return p;
}

std::unique_ptr<Transformer> Made(const TransformSpec& spec, OutputSpec output = kBytes) {
  auto made = Transformer::Make(spec, output);
  EXPECT_TRUE(made) << made.status().ToString();
  return made ? *std::move(made) : nullptr;
}

// Rows in buffers of their own, as small as the contract allows.
std::vector<uint8_t> Transformed(Transformer& t, const Pixels& p, const SampleKey& key) {
  std::vector<uint8_t> out(t.OutputBytes(), 0xcd);
  const auto rect = t.Begin({p.width, p.height}, key, reinterpret_cast<std::byte*>(out.data()));
  EXPECT_TRUE(rect) << rect.status().ToString();
  if (!rect) return {};
  EXPECT_LE(rect->x + rect->width, p.width);
  EXPECT_LE(rect->y + rect->height, p.height);
  for (uint32_t y = 0; y < rect->height; ++y) {
    std::vector<uint8_t> row(size_t{rect->width} * 4 + 32, 0xee);
    std::memcpy(row.data(), p.at(rect->x, rect->y + y), size_t{rect->width} * 4);
    t.Row(row.data());
  }
  const Status status = t.Finish();
  EXPECT_TRUE(status.ok()) << status.ToString();
  return out;
}

TransformSpec Augmented() {
  return {{ops::RandomResizedCrop{32, 48}, ops::RandomHorizontalFlip{},
           ops::ColorJitter{ops::Range{0.6, 1.4}, ops::Range{0.6, 1.4}, ops::Range{0.6, 1.4},
                            ops::Range{-0.1, 0.1}},
           ops::RandAugment{}, ops::RandomCrop{32, 32, {4, 4, 4, 4}}, ops::RandomVerticalFlip{}}};
}

TEST(Transform, ASampleDependsOnItsKeyAlone) {
  const auto one = Made(Augmented());
  const Pixels p = Noise(90, 70);
  std::vector<std::vector<uint8_t>> first;
  for (uint64_t i = 0; i < 40; ++i) first.push_back(Transformed(*one, p, {9, 1, i}));
  // Another transformer, other images in between, another order.
  const auto two = Made(Augmented());
  for (uint64_t i = 40; i-- > 0;) {
    Transformed(*two, Noise(20 + static_cast<uint32_t>(i), 133), {9, 1, i});
    ASSERT_EQ(Transformed(*two, p, {9, 1, i}), first[i]) << i;
  }
  EXPECT_NE(first[0], first[1]);
}

TEST(Transform, ACropTakesItsRectangleOnly) {
  const auto t = Made({{ops::CenterCrop{10, 20}}});
  std::vector<std::byte> out(t->OutputBytes());
  const auto rect = t->Begin({100, 50}, {}, out.data());
  ASSERT_TRUE(rect);
  EXPECT_EQ(*rect, (Rect{40, 20, 20, 10}));
  const auto window = Made({{ops::Resize{256}, ops::CenterCrop{224, 224}}});
  out.resize(window->OutputBytes());
  const auto part = window->Begin({1024, 512}, {}, out.data());
  ASSERT_TRUE(part);
  EXPECT_EQ(*part, (Rect{287, 31, 450, 450}));
}

TEST(Transform, FlipsMirror) {
  const Pixels p = Noise(7, 5);
  const auto t =
      Made({{ops::RandomHorizontalFlip{1}, ops::RandomVerticalFlip{1}, ops::CenterCrop{5, 7}}});
  const auto out = Transformed(*t, p, {});
  for (uint32_t y = 0; y < 5; ++y) {
    for (uint32_t x = 0; x < 7; ++x) {
      ASSERT_EQ(std::memcmp(&out[(y * 7 + x) * 3], p.at(6 - x, 4 - y), 3), 0);
    }
  }
}

TEST(Transform, PaddingIsFilled) {
  const Pixels p = Noise(3, 2);
  const auto t = Made({{ops::RandomCrop{6, 6, {3, 4, 0, 0}, false, {1, 2, 3}}}});
  const auto out = Transformed(*t, p, {});
  const uint8_t fill[3] = {1, 2, 3};
  for (uint32_t y = 0; y < 6; ++y) {
    for (uint32_t x = 0; x < 6; ++x) {
      const uint8_t* want = x >= 3 && y >= 4 ? p.at(x - 3, y - 4) : fill;
      ASSERT_EQ(std::memcmp(&out[(y * 6 + x) * 3], want, 3), 0) << x << "," << y;
    }
  }
}

TEST(Transform, ShapesOfEveryOrder) {
  const auto shape = [](std::vector<ops::Op> list) {
    return TransformSpec{std::move(list)}.Shape();
  };
  EXPECT_EQ(*shape({ops::RandomResizedCrop{3, 4}}), (OutputShape{3, 4, 3}));
  EXPECT_EQ(*shape({ops::Resize{8}, ops::CenterCrop{5, 6}}), (OutputShape{5, 6, 3}));
  EXPECT_EQ(*shape({ops::CenterCrop{5, 5}, ops::Resize{8}}), (OutputShape{8, 8, 3}));
  EXPECT_EQ(*shape({ops::Resize{8, 9}, ops::ToTensor{}}), (OutputShape{8, 9, 3}));
  for (const auto& list :
       {std::vector<ops::Op>{}, {ops::Resize{8}}, {ops::CenterCrop{5, 6}, ops::Resize{8}}}) {
    const auto none = shape(list);
    ASSERT_FALSE(none);
    EXPECT_EQ(none.error().code(), Code::kInvalidArgument);
    EXPECT_NE(none.error().message().find("CenterCrop"), std::string::npos);
  }
}

TEST(Transform, WrongParametersAreRefused) {
  const double nan = std::numeric_limits<double>::quiet_NaN();
  const ops::CenterCrop crop{8, 8};
  const std::vector<std::vector<ops::Op>> wrong = {
      {ops::CenterCrop{0, 8}},
      {ops::CenterCrop{8, 1 << 20}},
      {crop, ops::RandomHorizontalFlip{1.5}},
      {crop, ops::RandomVerticalFlip{nan}},
      {crop, ops::RandomGrayscale{-1}},
      {ops::RandomResizedCrop{8, 8, {0.5, 0.1}}},
      {ops::RandomResizedCrop{8, 8, {nan, 1}}},
      {ops::RandomResizedCrop{8, 8, {0.1, 1}, {0, 1}}},
      {ops::Resize{8, 0, 8}, crop},
      {ops::Resize{8, 8, 9}},
      {crop, ops::ColorJitter{{}, {}, {}, ops::Range{-0.6, 0}}},
      {crop, ops::ColorJitter{ops::Range{-1, 0}, {}, {}, {}}},
      {crop, ops::RandAugment{2, 31, 31}},
      {crop, ops::RandAugment{2, 9, 31, Interpolation::kLanczos}},
      {crop, ops::Normalize{}},
      {crop, ops::ToTensor{}, ops::Normalize{{0, 0, 0}, {1, 0, 1}}},
      {ops::ToTensor{}, crop},
  };
  for (size_t i = 0; i < wrong.size(); ++i) {
    const Status status = TransformSpec{wrong[i]}.Validate();
    EXPECT_EQ(status.code(), Code::kInvalidArgument) << i;
    EXPECT_FALSE(status.message().empty());
  }
  EXPECT_FALSE(Transformer::Make({{crop, ops::ToTensor{}}}, kBytes));
  EXPECT_FALSE(Transformer::Make({{crop}}, {DType::kFloat32, Layout::kChw}));
}

TEST(Transform, MissingRowsAreAnError) {
  const auto t = Made({{ops::CenterCrop{4, 4}}});
  std::vector<std::byte> out(t->OutputBytes());
  ASSERT_TRUE(t->Begin({4, 4}, {}, out.data()));
  const std::vector<uint8_t> row(4 * 4 + 32);
  t->Row(row.data());
  EXPECT_EQ(t->Finish().code(), Code::kDataLoss);
  // Too many are ignored, and a sample may be dropped by beginning another.
  ASSERT_TRUE(t->Begin({4, 4}, {}, out.data()));
  for (int i = 0; i < 9; ++i) t->Row(row.data());
  EXPECT_TRUE(t->Finish().ok());
  EXPECT_FALSE(t->Begin({0, 4}, {}, out.data()));
}

TEST(Transform, ACropLargerThanTheImageSaysWhatToDo) {
  const auto t = Made({{ops::RandomCrop{32, 32}}});
  std::vector<std::byte> out(t->OutputBytes());
  const auto rect = t->Begin({31, 40}, {}, out.data());
  ASSERT_FALSE(rect);
  EXPECT_NE(rect.error().message().find("pad_if_needed"), std::string::npos);
}

TEST(Transform, ShrinkLeavesEnoughPixels) {
  const auto t = Made({{ops::Resize{64, 64}}});
  EXPECT_EQ(t->BestShrink({512, 512}, {}), 8u);
  EXPECT_EQ(t->BestShrink({511, 512}, {}), 4u);
  EXPECT_EQ(t->BestShrink({5000, 128}, {}), 2u);
  EXPECT_EQ(t->BestShrink({127, 5000}, {}), 1u);
  EXPECT_EQ(Made({{ops::CenterCrop{8, 8}}})->BestShrink({800, 800}, {}), 1u);
  EXPECT_EQ(Made({{ops::Resize{8, 8, 0, Interpolation::kNearest}}})->BestShrink({800, 800}, {}),
            1u);
}

TEST(Transform, AShrunkenImageIsReadWhereTheCropLies) {
  const auto t = Made({{ops::CenterCrop{400, 400}, ops::Resize{50, 50}}});
  std::vector<std::byte> out(t->OutputBytes());
  ASSERT_EQ(t->BestShrink({1001, 801}, {}), 8u);
  const auto rect = t->Begin({1001, 801}, {126, 101}, {}, out.data());
  ASSERT_TRUE(rect);
  // 300 / 8 to 700 / 8, and 200 / 8 to 600 / 8.
  EXPECT_EQ(*rect, (Rect{37, 25, 51, 50}));
  // Sizes that no divisor explains still work.
  for (const ImageInfo& odd : {ImageInfo{1, 1}, {3, 800}, {999, 2}}) {
    const auto part = t->Begin({1001, 801}, odd, {}, out.data());
    ASSERT_TRUE(part);
    EXPECT_LE(part->x + part->width, odd.width);
    EXPECT_LE(part->y + part->height, odd.height);
    const std::vector<uint8_t> row(size_t{part->width} * 4 + 32);
    for (uint32_t y = 0; y < part->height; ++y) t->Row(row.data());
    EXPECT_TRUE(t->Finish().ok());
  }
}

TEST(ColorKernels, EveryLevelGivesTheSameBits) {
  for (uint32_t width : {1u, 3u, 15u, 16u, 17u, 64u, 1000u, 40000u}) {
    const std::vector<uint8_t> row = Noise(width, 1, width).bytes;
    for (const SimdLevel level : {SimdLevel::kAvx2, SimdLevel::kVnni}) {
      if (level > BestSimd()) continue;
      const auto same = [&](const auto& kernel, auto... arguments) {
        std::vector<uint8_t> want = row;
        std::vector<uint8_t> got = row;
        kernel(SimdLevel::kScalar)(want.data(), width, arguments...);
        kernel(level)(got.data(), width, arguments...);
        for (size_t i = 3; i < got.size(); i += 4) got[i] = want[i];
        EXPECT_EQ(got, want) << width;
      };
      for (const float factor : {0.0f, 0.3f, 0.77777f, 1.0f, 1.3333f, 7.1f}) {
        same(kernels::BlendValue, 0.0f, factor);
        same(kernels::BlendValue, 131.0f, factor);
        same(kernels::BlendGray, factor);
      }
      same(kernels::Gray);
      for (int shift = 0; shift < 256; shift += 15) {
        same(kernels::ShiftHue, static_cast<uint8_t>(shift));
      }
      EXPECT_EQ(kernels::GraySum(level)(row.data(), width),
                kernels::GraySum(SimdLevel::kScalar)(row.data(), width));
    }
  }
}

TEST(Output, TheUsualNormalizationIsComputed) {
  if (!kernels::HaveOutputKernels()) GTEST_SKIP() << "no AVX2";
  const ops::Normalize imagenet{{0.485f, 0.456f, 0.406f}, {0.229f, 0.224f, 0.225f}};
  const ops::Normalize half{{0.5f, 0.5f, 0.5f}, {0.5f, 0.5f, 0.5f}};
  for (const auto& list : {std::vector<ops::Op>{ops::ToTensor{}},
                           {ops::ToTensor{}, imagenet},
                           {ops::ToTensor{}, half}}) {
    for (const DType dtype : {DType::kFloat32, DType::kFloat16, DType::kBfloat16}) {
      EXPECT_TRUE(OutputWriter({list}, {dtype, Layout::kChw}, {8, 8}).fast());
    }
  }
  // Two of them go through the table.
  const std::vector<ops::Op> twice = {ops::ToTensor{}, imagenet, half};
  EXPECT_FALSE(OutputWriter({twice}, {DType::kFloat32, Layout::kChw}, {8, 8}).fast());
}

TEST(Output, HalvesAreRoundedToEven) {
  EXPECT_EQ(ToFloat16(0.0f), 0x0000);
  EXPECT_EQ(ToFloat16(-0.0f), 0x8000);
  EXPECT_EQ(ToFloat16(1.0f), 0x3c00);
  EXPECT_EQ(ToFloat16(-2.0f), 0xc000);
  EXPECT_EQ(ToFloat16(1.0f + 0x1p-11f), 0x3c00);             // a half, to even
  EXPECT_EQ(ToFloat16(1.0f + 3 * 0x1p-11f), 0x3c02);         // a half, to even
  EXPECT_EQ(ToFloat16(1.0f + 0x1p-11f + 0x1p-20f), 0x3c01);  // above a half
  EXPECT_EQ(ToFloat16(65504.0f), 0x7bff);
  EXPECT_EQ(ToFloat16(65520.0f), 0x7c00);
  EXPECT_EQ(ToFloat16(0x1p-24f), 0x0001);
  EXPECT_EQ(ToFloat16(0x1p-25f), 0x0000);
  EXPECT_EQ(ToFloat16(1023.5f * 0x1p-24f), 0x0400);
  EXPECT_EQ(ToFloat16(std::numeric_limits<float>::infinity()), 0x7c00);
  EXPECT_EQ(ToFloat16(std::numeric_limits<float>::quiet_NaN()), 0x7e00);
  EXPECT_EQ(ToBfloat16(1.0f), 0x3f80);
  EXPECT_EQ(ToBfloat16(1.0f + 0x1p-8f), 0x3f80);
  EXPECT_EQ(ToBfloat16(1.0f + 3 * 0x1p-8f), 0x3f82);
  EXPECT_EQ(ToBfloat16(-1.0f - 0x1p-8f - 0x1p-20f), 0xbf81);
}

TEST(Output, EveryLayoutHoldsTheSamePixels) {
  const Pixels p = Noise(37, 11);
  const std::vector<ops::Op> list = {ops::CenterCrop{11, 37}, ops::RandomHorizontalFlip{0.5},
                                     ops::ToTensor{},
                                     ops::Normalize{{0.4f, 0.5f, 0.6f}, {0.2f, 0.3f, 0.1f}}};
  for (uint64_t sample = 0; sample < 4; ++sample) {
    const auto chw = Made({list}, {DType::kFloat32, Layout::kChw});
    const auto hwc = Made({list}, {DType::kFloat32, Layout::kHwc});
    const auto half = Made({list}, {DType::kBfloat16, Layout::kChw});
    const auto a = Transformed(*chw, p, {0, 0, sample});
    const auto b = Transformed(*hwc, p, {0, 0, sample});
    const auto h = Transformed(*half, p, {0, 0, sample});
    const bool flip = chw->steps().size() == 2;
    const float mean[3] = {0.4f, 0.5f, 0.6f};
    const float std[3] = {0.2f, 0.3f, 0.1f};
    for (uint32_t i = 0; i < 11 * 37; ++i) {
      for (uint32_t c = 0; c < 3; ++c) {
        const uint32_t x = i % 37;
        const float level = p.at(flip ? 36 - x : x, i / 37)[c];
        const float want = (level / 255.0f - mean[c]) / std[c];
        float got;
        std::memcpy(&got, &a[(c * 11 * 37 + i) * 4], 4);
        ASSERT_EQ(got, want);
        std::memcpy(&got, &b[(i * 3 + c) * 4], 4);
        ASSERT_EQ(got, want);
        uint16_t bits;
        std::memcpy(&bits, &h[(c * 11 * 37 + i) * 2], 2);
        ASSERT_EQ(bits, ToBfloat16(want));
      }
    }
  }
}

}  // namespace
}  // namespace forebay
