// Our decoder against libjpeg-turbo where the build has it, and on a small file of its own.
#include "decode/jpeg.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <random>
#include <string>
#include <vector>

#include "decode/jpeg_test_data.h"
#ifdef FOREBAY_HAVE_JPEG
#include "decode/jpeg_turbo.h"
#endif

namespace forebay {
namespace {

using testing::SmallFile;

// The rows of one Read; `width` pixels each, without the fourth byte.
class Pixels final : public RowSink {
 public:
  explicit Pixels(uint32_t width) : width_(width) {}
  void Row(const uint8_t* rgbx) override {
    for (uint32_t i = 0; i < width_; ++i) bytes.insert(bytes.end(), rgbx + 4 * i, rgbx + 4 * i + 3);
    // Readers may touch what follows.
    for (uint32_t i = 0; i < 32; ++i) after += rgbx[4 * width_ + i];
  }
  std::vector<uint8_t> bytes;
  uint32_t after = 0;

 private:
  uint32_t width_;
};

std::span<const std::byte> Bytes(const std::vector<uint8_t>& file) {
  return std::as_bytes(std::span(file));
}

Status ReadPart(ImageReader& reader, const std::vector<uint8_t>& file, const Rect& rect,
                std::vector<uint8_t>& out) {
  Result<ImageInfo> info = reader.Open(Bytes(file));
  if (!info) return info.error();
  Pixels pixels(rect.width);
  Status status = reader.Read(rect, pixels);
  EXPECT_TRUE(!status.ok() || pixels.bytes.size() == size_t{rect.width} * rect.height * 3);
  out = std::move(pixels.bytes);
  return status;
}

Status ReadAll(ImageReader& reader, const std::vector<uint8_t>& file, std::vector<uint8_t>& out,
               uint32_t shrink = 1) {
  Result<ImageInfo> info = reader.Open(Bytes(file));
  if (!info) return info.error();
  const ImageInfo size = reader.Shrink(shrink);
  EXPECT_EQ(size.width, (info->width + shrink - 1) / shrink);
  Pixels pixels(size.width);
  Status status = reader.Read(Rect{0, 0, size.width, size.height}, pixels);
  EXPECT_TRUE(!status.ok() || pixels.bytes.size() == size_t{size.width} * size.height * 3);
  out = std::move(pixels.bytes);
  return status;
}

TEST(JpegTest, SmallFile) {
  for (const bool simd : {false, true}) {
    const std::unique_ptr<ImageReader> reader = jpeg::MakeOwnReader(simd);
    std::vector<uint8_t> pixels;
    const Status status = ReadAll(*reader, SmallFile(), pixels);
    ASSERT_TRUE(status.ok()) << status.ToString();
    EXPECT_EQ(pixels, std::vector<uint8_t>(64 * 3, 128 + 4 * 16 / 8));
  }
}

TEST(JpegTest, EndsEarly) {
  const std::unique_ptr<ImageReader> reader = MakeJpegReader();
  std::vector<uint8_t> file = SmallFile();
  file.resize(file.size() - 3);
  std::vector<uint8_t> pixels;
  const Status status = ReadAll(*reader, file, pixels);
  EXPECT_EQ(status.code(), Code::kDataLoss);
  EXPECT_NE(status.message().find("ends at byte 0 of the scan"), std::string::npos)
      << status.ToString();
  while (!file.empty()) {
    file.pop_back();
    EXPECT_EQ(ReadAll(*reader, file, pixels).code(), Code::kDataLoss);
  }
}

TEST(JpegTest, SaysWhatIsLeftOut) {
  const std::unique_ptr<ImageReader> reader = jpeg::MakeOwnReader();
  const auto with = [](size_t at, uint8_t value) {
    std::vector<uint8_t> file = SmallFile();
    file[71 + at] = value;
    return file;
  };
  for (const int marker : {0xC3, 0xC5, 0xC9, 0xCA}) {
    const Result<ImageInfo> info = reader->Open(Bytes(with(1, static_cast<uint8_t>(marker))));
    ASSERT_FALSE(info);
    EXPECT_EQ(info.error().code(), Code::kUnimplemented);
  }
  EXPECT_EQ(reader->Open(Bytes(with(4, 12))).error().code(), Code::kUnimplemented);
  const std::vector<uint8_t> zero_height = with(6, 0);
  EXPECT_EQ(reader->Open(Bytes(zero_height)).error().code(), Code::kUnimplemented);
  std::vector<uint8_t> huge = SmallFile();
  huge[76] = huge[77] = huge[78] = huge[79] = 0xFF;
  EXPECT_EQ(reader->Open(Bytes(huge)).error().code(), Code::kDataLoss);
}

TEST(JpegTest, ShortFileCannotAskForMuchMemory) {
  std::vector<uint8_t> file = SmallFile();
  file[72] = 0xC2;             // progressive
  file[76] = file[78] = 0x3F;  // 16136x16136
  file[file.size() - 5] = 0;   // a scan of DC alone
  const std::unique_ptr<ImageReader> reader = jpeg::MakeOwnReader();
  std::vector<uint8_t> pixels;
  const Status status = ReadPart(*reader, file, Rect{0, 0, 8, 8}, pixels);
  EXPECT_EQ(status.code(), Code::kDataLoss);
  EXPECT_NE(status.message().find("cannot hold"), std::string::npos) << status.ToString();
}

TEST(JpegTest, RefusesRectanglesOutside) {
  const std::unique_ptr<ImageReader> reader = MakeJpegReader();
  std::vector<uint8_t> pixels;
  const std::vector<uint8_t> file = SmallFile();
  EXPECT_EQ(ReadPart(*reader, file, Rect{0, 0, 9, 1}, pixels).code(), Code::kInvalidArgument);
  EXPECT_EQ(ReadPart(*reader, file, Rect{8, 0, 1, 1}, pixels).code(), Code::kInvalidArgument);
  EXPECT_EQ(ReadPart(*reader, file, Rect{0, 1, 1, 0xFFFFFFFF}, pixels).code(),
            Code::kInvalidArgument);
}

#ifdef FOREBAY_HAVE_JPEG

using testing::Encode;
using testing::JpegOptions;
using testing::Picture;

constexpr std::array<std::array<int, 8>, 10> kSamplings = {{
    {1, 1, 1, 1, 1, 1, 1, 1},  // 4:4:4
    {2, 1, 1, 1, 1, 1, 2, 1},  // 4:2:2
    {2, 2, 1, 1, 1, 1, 2, 2},  // 4:2:0
    {1, 2, 1, 1, 1, 1, 1, 2},  // 4:4:0
    {4, 1, 1, 1, 1, 1, 1, 1},  // 4:1:1
    {4, 2, 1, 1, 1, 1, 0, 0},  // 4:1:0; only three components
    {2, 2, 1, 2, 2, 1, 1, 1},  // every one its own
    {1, 1, 2, 2, 1, 2, 1, 1},  // luma is not the finest
    {1, 4, 1, 1, 1, 2, 1, 1},  //
    {2, 4, 1, 1, 1, 1, 0, 0},  // only three components
}};
constexpr std::array<J_COLOR_SPACE, 5> kSpaces = {JCS_YCbCr, JCS_GRAYSCALE, JCS_RGB, JCS_CMYK,
                                                  JCS_YCCK};

JpegOptions RandomOptions(std::mt19937& random) {
  const auto pick = [&](auto&&... values) {
    const std::array list = {values...};
    return list[random() % list.size()];
  };
  JpegOptions o;
  o.width = pick(1u, 2u, 3u, 4u, 5u, 7u, 8u, 9u, 16u, 17u, 33u, 50u, 64u, 100u, 131u);
  o.height = pick(1u, 2u, 3u, 7u, 8u, 9u, 15u, 16u, 17u, 33u, 47u, 64u, 90u);
  o.space = random() % 2 == 0 ? JCS_YCbCr : kSpaces[random() % kSpaces.size()];
  do {
    o.factors = kSamplings[random() % kSamplings.size()];
  } while ((o.space == JCS_CMYK || o.space == JCS_YCCK) && o.factors[6] == 0);
  o.quality = pick(5, 30, 60, 75, 90, 95, 100);
  o.progressive = random() % 4 == 0;
  o.optimize = random() % 2 == 0;
  o.separate = !o.progressive && random() % 6 == 0;
  o.restart = pick(0, 0, 0, 1, 2, 5, 100);
  o.picture = pick(Picture::kNoise, Picture::kSmooth, Picture::kSmooth, Picture::kExtreme);
  return o;
}

// Whole, with and without SIMD, and in parts.
void ExpectSame(const std::vector<uint8_t>& file, std::mt19937& random, uint32_t shrink = 1) {
  const std::unique_ptr<ImageReader> turbo = jpeg::MakeTurboReader();
  const std::unique_ptr<ImageReader> own = jpeg::MakeOwnReader();
  const std::unique_ptr<ImageReader> plain = jpeg::MakeOwnReader(false);
  std::vector<uint8_t> expected;
  Status status = ReadAll(*turbo, file, expected, shrink);
  ASSERT_TRUE(status.ok()) << status.ToString();
  for (ImageReader* reader : {own.get(), plain.get()}) {
    std::vector<uint8_t> actual;
    status = ReadAll(*reader, file, actual, shrink);
    ASSERT_TRUE(status.ok()) << status.ToString();
    ASSERT_EQ(actual.size(), expected.size());
    const auto differs = std::mismatch(actual.begin(), actual.end(), expected.begin());
    ASSERT_EQ(differs.first - actual.begin(), static_cast<std::ptrdiff_t>(actual.size()))
        << (reader == own.get() ? "SIMD" : "plain");
    const ImageInfo info = reader->Shrink(shrink);
    for (uint32_t i = 0; i < 4; ++i) {
      Rect rect;
      rect.x = static_cast<uint32_t>(random() % info.width);
      rect.y = static_cast<uint32_t>(random() % info.height);
      rect.width = static_cast<uint32_t>(1 + random() % (info.width - rect.x));
      rect.height = static_cast<uint32_t>(1 + random() % (info.height - rect.y));
      std::vector<uint8_t> cut;
      for (uint32_t y = rect.y; y < rect.y + rect.height; ++y) {
        const auto from = expected.begin() + (size_t{y} * info.width + rect.x) * 3;
        cut.insert(cut.end(), from, from + size_t{rect.width} * 3);
      }
      Pixels pixels(rect.width);
      status = reader->Read(rect, pixels);
      ASSERT_TRUE(status.ok()) << status.ToString();
      ASSERT_TRUE(pixels.bytes == cut)
          << rect.x << "," << rect.y << " " << rect.width << "x" << rect.height;
    }
  }
}

TEST(JpegTest, SameAsLibjpegTurbo) {
  for (uint32_t seed = 0; seed < 1500; ++seed) {
    std::mt19937 random(seed);
    const JpegOptions options = RandomOptions(random);
    SCOPED_TRACE(::testing::Message() << "seed " << seed << ": " << options);
    ExpectSame(Encode(options, random), random);
    if (HasFatalFailure()) return;
  }
}

TEST(JpegTest, ShrinksAsLibjpegTurbo) {
  for (uint32_t seed = 0; seed < 600; ++seed) {
    std::mt19937 random(seed);
    const JpegOptions options = RandomOptions(random);
    const uint32_t shrink = 2u << random() % 3;
    SCOPED_TRACE(::testing::Message() << "1/" << shrink << ", seed " << seed << ": " << options);
    ExpectSame(Encode(options, random), random, shrink);
    if (HasFatalFailure()) return;
  }
}

TEST(JpegTest, EverySamplingInEverySpace) {
  std::mt19937 random(7);
  for (const J_COLOR_SPACE space : kSpaces) {
    for (const std::array<int, 8>& factors : kSamplings) {
      for (const bool progressive : {false, true}) {
        JpegOptions options;
        options.width = 75;
        options.height = 45;
        options.space = space;
        options.factors = factors;
        options.progressive = progressive;
        options.picture = Picture::kSmooth;
        if ((space == JCS_CMYK || space == JCS_YCCK) && factors[6] == 0) continue;
        SCOPED_TRACE(::testing::Message() << options);
        ExpectSame(Encode(options, random), random);
      }
    }
  }
}

#ifdef D_ARITH_CODING_SUPPORTED
TEST(JpegTest, LeavesTheRestToLibjpegTurbo) {
  std::mt19937 random(3);
  JpegOptions options;
  options.width = 40;
  options.height = 30;
  options.picture = Picture::kSmooth;
  std::vector<uint8_t> expected;
  const std::unique_ptr<ImageReader> reader = MakeJpegReader();
  ASSERT_TRUE(ReadAll(*reader, Encode(options, random), expected).ok());
  options.arithmetic = true;
  const std::vector<uint8_t> file = Encode(options, random);
  EXPECT_EQ(jpeg::MakeOwnReader()->Open(Bytes(file)).error().code(), Code::kUnimplemented);
  std::vector<uint8_t> pixels;
  const Status status = ReadAll(*reader, file, pixels);
  ASSERT_TRUE(status.ok()) << status.ToString();
  EXPECT_TRUE(pixels == expected);
  // And back.
  options.arithmetic = false;
  ASSERT_TRUE(ReadAll(*reader, Encode(options, random), pixels).ok());
  EXPECT_TRUE(pixels == expected);
}
#endif

TEST(JpegTest, BrokenFilesAreErrorsOrPixels) {
  const std::unique_ptr<ImageReader> reader = jpeg::MakeOwnReader();
  for (uint32_t seed = 0; seed < 24; ++seed) {
    std::mt19937 random(seed);
    JpegOptions options = RandomOptions(random);
    options.width = std::min(options.width, 40u);
    options.height = std::min(options.height, 40u);
    const std::vector<uint8_t> file = Encode(options, random);
    std::vector<uint8_t> expected;
    ASSERT_TRUE(ReadAll(*reader, file, expected).ok());
    std::vector<uint8_t> pixels;
    for (size_t size = 0; size < file.size(); ++size) {
      const std::vector<uint8_t> part(file.begin(), file.begin() + static_cast<long>(size));
      const Status status = ReadAll(*reader, part, pixels);
      if (status.ok()) {
        EXPECT_TRUE(pixels == expected) << "seed " << seed << ", " << size << " bytes";
      } else {
        EXPECT_EQ(status.code(), Code::kDataLoss) << status.ToString();
      }
    }
    for (uint32_t i = 0; i < 300; ++i) {
      std::vector<uint8_t> flipped = file;
      for (uint32_t j = 0; j <= i % 4; ++j) {
        flipped[random() % file.size()] ^= static_cast<uint8_t>(1u << random() % 8);
      }
      const Result<ImageInfo> info = reader->Open(Bytes(flipped));
      if (!info || uint64_t{info->width} * info->height > 1 << 22) continue;
      const Status status = ReadAll(*reader, flipped, pixels);
      EXPECT_NE(status.code(), Code::kInternal);
    }
  }
}

#endif

}  // namespace
}  // namespace forebay
