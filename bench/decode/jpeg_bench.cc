// jpeg_bench FOLDER [DRAWS [REPEATS]]: our JPEG decoder against libjpeg-turbo on the files of
// FOLDER.
//
// Prints milliseconds an image: of a whole decode, and of decoding the rectangle of a
// RandomResizedCrop (area 8..100 %, ratio 3/4..4/3), the mean over DRAWS draws for each file. The
// decoders take turns, image by image; each figure is the median over REPEATS, with the lowest and
// the highest. Pixels are handed to a sink that reads them, as a resize would.
#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <random>
#include <string>
#include <vector>

#include "decode/jpeg.h"
#include "decode/jpeg_turbo.h"

namespace forebay {
namespace {

class Touch final : public RowSink {
 public:
  explicit Touch(uint32_t width) : bytes_(width * 4) {}
  void Row(const uint8_t* rgbx) override {
    for (uint32_t i = 0; i < bytes_; i += 64) sum_ += rgbx[i];
  }
  uint64_t sum() const { return sum_; }

 private:
  uint32_t bytes_;
  uint64_t sum_ = 0;
};

Rect RandomResizedCrop(std::mt19937& random, uint32_t width, uint32_t height) {
  std::uniform_real_distribution<double> area(0.08, 1.0);
  std::uniform_real_distribution<double> log_ratio(std::log(0.75), std::log(4.0 / 3));
  for (int i = 0; i < 10; ++i) {
    const double target = area(random) * width * height;
    const double ratio = std::exp(log_ratio(random));
    const uint32_t w = static_cast<uint32_t>(std::lround(std::sqrt(target * ratio)));
    const uint32_t h = static_cast<uint32_t>(std::lround(std::sqrt(target / ratio)));
    if (w == 0 || h == 0 || w > width || h > height) continue;
    return Rect{static_cast<uint32_t>(random() % (width - w + 1)),
                static_cast<uint32_t>(random() % (height - h + 1)), w, h};
  }
  return Rect{0, 0, width, height};
}

struct Image {
  std::vector<std::byte> bytes;
  std::vector<Rect> crops;
  Rect all;
};

struct Figures {
  std::vector<double> values;
  double Median() {
    std::sort(values.begin(), values.end());
    return values[values.size() / 2];
  }
};

double Milliseconds(ImageReader& reader, const Image& image, const Rect& rect) {
  const auto begin = std::chrono::steady_clock::now();
  Touch touch(rect.width);
  if (!reader.Open(image.bytes) || !reader.Read(rect, touch).ok()) {
    std::fprintf(stderr, "an image that cannot be decoded\n");
    std::exit(1);
  }
  const std::chrono::duration<double, std::milli> took = std::chrono::steady_clock::now() - begin;
  if (touch.sum() == 1) std::puts("");  // the sum is used
  return took.count();
}

int Main(const std::string& folder, uint32_t draws, uint32_t repeats) {
  std::mt19937 random(1);
  std::vector<Image> images;
  const std::unique_ptr<ImageReader> readers[2] = {jpeg::MakeOwnReader(), jpeg::MakeTurboReader()};
  size_t total = 0;
  std::vector<std::filesystem::path> paths;
  for (const auto& entry : std::filesystem::directory_iterator(folder)) {
    paths.push_back(entry.path());
  }
  std::sort(paths.begin(), paths.end());
  for (const auto& path : paths) {
    std::ifstream file(path, std::ios::binary);
    const std::string text((std::istreambuf_iterator<char>(file)), {});
    Image image;
    image.bytes.resize(text.size());
    std::transform(text.begin(), text.end(), image.bytes.begin(),
                   [](char c) { return static_cast<std::byte>(c); });
    const Result<ImageInfo> info = readers[0]->Open(image.bytes);
    if (!info) continue;
    image.all = Rect{0, 0, info->width, info->height};
    for (uint32_t i = 0; i < draws; ++i) {
      image.crops.push_back(RandomResizedCrop(random, info->width, info->height));
    }
    total += image.bytes.size();
    images.push_back(std::move(image));
  }
  if (images.empty()) {
    std::fprintf(stderr, "no JPEG in %s\n", folder.c_str());
    return 1;
  }
  const double count = static_cast<double>(images.size());
  std::printf("%zu images of %.1f KiB\n", images.size(), static_cast<double>(total) / count / 1024);
  Figures full[2];
  Figures part[2];
  for (uint32_t repeat = 0; repeat < repeats; ++repeat) {
    double sums[4] = {};
    // From image to image, as a training does: tables may change each time.
    for (uint32_t draw = 0; draw <= draws; ++draw) {
      for (const Image& image : images) {
        for (uint32_t r = 0; r < 2; ++r) {
          const Rect& rect = draw == draws ? image.all : image.crops[draw];
          const double took = Milliseconds(*readers[r], image, rect);
          if (draw == draws) {
            sums[r] += took;
          } else {
            sums[2 + r] += took / draws;
          }
        }
      }
    }
    for (uint32_t r = 0; r < 2; ++r) {
      full[r].values.push_back(sums[r] / count);
      part[r].values.push_back(sums[2 + r] / count);
    }
  }
  const auto line = [](const char* name, Figures& figures, double full_turbo) {
    const double median = figures.Median();
    std::printf("%-28s %7.3f ms [%.3f, %.3f]  %.3f of libjpeg-turbo's whole decode\n", name, median,
                figures.values.front(), figures.values.back(), median / full_turbo);
  };
  const double reference = full[1].Median();
  line("whole, ours", full[0], reference);
  line("whole, libjpeg-turbo", full[1], reference);
  line("crop, ours", part[0], reference);
  line("crop, libjpeg-turbo", part[1], reference);
  return 0;
}

}  // namespace
}  // namespace forebay

int main(int argc, char** argv) {
  if (argc < 2 || argc > 4) {
    std::fprintf(stderr, "usage: jpeg_bench FOLDER [DRAWS [REPEATS]]\n");
    return 2;
  }
  const auto number = [&](int i, uint32_t otherwise) {
    return argc > i ? static_cast<uint32_t>(std::strtoul(argv[i], nullptr, 10)) : otherwise;
  };
  return forebay::Main(argv[1], std::max(number(2, 20), 1u), std::max(number(3, 9), 1u));
}
