#include "decode/webp.h"

#if FOREBAY_HAVE_WEBP
#include <webp/decode.h>

#include <vector>

namespace forebay {
namespace {

// The whole image is decoded whatever the rectangle: libwebp's own cropping moves the edges.
class WebpReader final : public ImageReader {
 public:
  Result<ImageInfo> Open(std::span<const std::byte> file) override {
    file_ = file;
    WebPBitstreamFeatures features;
    if (WebPGetFeatures(Bytes(), file.size(), &features) != VP8_STATUS_OK) {
      return Status(Code::kDataLoss, "WebP: the header is damaged");
    }
    if (features.has_animation) {
      return Status(Code::kUnimplemented, "WebP: animations are not read");
    }
    size_ = {static_cast<uint32_t>(features.width), static_cast<uint32_t>(features.height)};
    FOREBAY_RETURN_IF_ERROR(CheckPixels(size_, kMostImagePixels));
    // Beside our pixels libwebp keeps all of a lossless image, and of an alpha plane, which is
    // coded as one, five bytes for each pixel; a lossy image goes by a few rows at a time.
    constexpr int kLossy = 1;
    own_bytes_a_pixel_ = features.format == kLossy ? (features.has_alpha ? 5 : 0) : 5;
    return size_;
  }

  ImageInfo Shrink(uint32_t) override { return size_; }

  uint64_t ScratchBytes() const override {
    return uint64_t{size_.width} * size_.height * (4 + own_bytes_a_pixel_) +
           uint64_t{size_.width} * kRowBytesAPixel + kFixedBytes;
  }

  Status Read(const Rect& rect, RowSink& sink) override {
    const size_t stride = size_t{size_.width} * 4;
    pixels_.resize(stride * size_.height + 64);
    if (WebPDecodeRGBAInto(Bytes(), file_.size(), pixels_.data(), stride * size_.height,
                           static_cast<int>(stride)) == nullptr) {
      return Status(Code::kDataLoss, "WebP: the data is damaged or ends early");
    }
    for (uint32_t y = 0; y < rect.height; ++y) {
      sink.Row(pixels_.data() + (rect.y + y) * stride + size_t{rect.x} * 4);
    }
    return Status();
  }

 private:
  // libwebp's cache of rows, its filters and tables (read from its sources; measured below).
  static constexpr uint64_t kRowBytesAPixel = 128;
  static constexpr uint64_t kFixedBytes = uint64_t{128} << 10;

  const uint8_t* Bytes() const { return reinterpret_cast<const uint8_t*>(file_.data()); }

  std::span<const std::byte> file_;
  ImageInfo size_;
  uint64_t own_bytes_a_pixel_ = 0;
  std::vector<uint8_t> pixels_;
};

}  // namespace

std::unique_ptr<ImageReader> MakeWebpReader() { return std::make_unique<WebpReader>(); }

}  // namespace forebay

#else

namespace forebay {
std::unique_ptr<ImageReader> MakeWebpReader() { return nullptr; }
}  // namespace forebay

#endif
