#include "decode/sample_decoder.h"

#include <array>
#include <cstring>
#include <utility>

#include "decode/image.h"
#include "decode/jpeg.h"
#include "decode/npy.h"
#include "decode/png.h"
#include "decode/transform.h"
#include "decode/webp.h"

namespace forebay {
namespace {

class ImageSampleDecoder final : public SampleDecoder {
 public:
  ImageSampleDecoder(std::unique_ptr<Transformer> transformer, const DecodeOptions& options,
                     ScratchLender* lender)
      : transformer_(std::move(transformer)),
        fast_(options.fast),
        max_pixels_(options.max_pixels),
        lender_(lender) {
    const OutputShape size = transformer_->shape();
    // Two scratch images of the output's size are the user's choice, not the data's.
    own_bytes_ = kScratchBytes + uint64_t{size.width} * size.height * 8;
    shape_ = options.output.layout == Layout::kChw
                 ? std::vector<uint64_t>{3, size.height, size.width}
                 : std::vector<uint64_t>{size.height, size.width, 3};
  }

  Status Decode(std::span<const std::byte> stored, const SampleKey& key, std::byte* out) override {
    if (stored.empty()) return Status(Code::kDataLoss, "the file is empty");
    const ImageFormat format = FormatOf(stored);
    auto& reader = readers_[static_cast<size_t>(format)];
    if (reader == nullptr) {
      Result<std::unique_ptr<ImageReader>> made = MakeImageReader(format);
      if (!made) return made.error();
      reader = *std::move(made);
    }
    const Result<ImageInfo> info = reader->Open(stored);
    if (!info) return info.error();
    FOREBAY_RETURN_IF_ERROR(CheckPixels(*info, max_pixels_));
    const uint32_t shrink = fast_ ? transformer_->BestShrink(*info, key) : 1;
    const Result<uint64_t> scratch =
        transformer_->Prepare(*info, shrink == 1 ? *info : reader->Shrink(shrink), key);
    if (!scratch) return scratch.error();
    const uint64_t bytes = *scratch + reader->ScratchBytes();
    if (bytes <= own_bytes_ || lender_ == nullptr) return Read(*reader, out);
    const Status lent = lender_->Take(bytes - own_bytes_);
    if (!lent.ok()) {
      return Status(lent.code(), StrCat("an image of ", info->width, " x ", info->height,
                                        " pixels: ", lent.message()));
    }
    const Borrowed borrowed{*this, reader};
    return Read(*reader, out);
  }
  size_t sample_bytes() const override { return transformer_->OutputBytes(); }
  const std::vector<uint64_t>& shape() const override { return shape_; }

 private:
  // Memory that was lent is free before it is given back, also when there was not enough of it.
  struct Borrowed {
    ImageSampleDecoder& decoder;
    std::unique_ptr<ImageReader>& reader;
    ~Borrowed() {
      reader = nullptr;
      decoder.transformer_->DropScratch();
      decoder.lender_->GiveBack();
    }
  };

  Status Read(ImageReader& reader, std::byte* out) {
    FOREBAY_RETURN_IF_ERROR(reader.Read(transformer_->Start(out), *transformer_));
    return transformer_->Finish();
  }

  const std::unique_ptr<Transformer> transformer_;
  const bool fast_;
  const uint64_t max_pixels_;
  uint64_t own_bytes_ = 0;  // of scratch; what is beyond is borrowed
  ScratchLender* const lender_;
  std::vector<uint64_t> shape_;
  std::array<std::unique_ptr<ImageReader>, 4> readers_;  // by format, made when first met
};

std::string ShapeText(std::span<const uint64_t> shape) {
  std::string text;
  for (const uint64_t n : shape) text += StrCat(text.empty() ? "" : ", ", n);
  return StrCat("(", text, ")");
}

class ArraySampleDecoder final : public SampleDecoder {
 public:
  ArraySampleDecoder(const DecodeOptions& options, size_t bytes)
      : name_(options.array_name), dtype_(options.dtype), shape_(options.shape), bytes_(bytes) {}

  Status Decode(std::span<const std::byte> stored, const SampleKey&, std::byte* out) override {
    const Result<NpyArray> array = ReadArray(stored, name_);
    if (!array) return array.error();
    if (array->dtype != dtype_ || array->shape != shape_) {
      return Status(
          Code::kDataLoss,
          StrCat("the array is ", array->dtype, " ", ShapeText(array->shape), ", the first one is ",
                 dtype_, " ", ShapeText(shape_), "; a batch needs one type and shape"));
    }
    if (bytes_ != 0) std::memcpy(out, array->bytes.data(), bytes_);
    return Status();
  }
  size_t sample_bytes() const override { return bytes_; }
  const std::vector<uint64_t>& shape() const override { return shape_; }

 private:
  const std::string name_;
  const std::string dtype_;
  const std::vector<uint64_t> shape_;
  const size_t bytes_;
};

}  // namespace

Result<std::unique_ptr<SampleDecoder>> MakeSampleDecoder(const DecodeOptions& options,
                                                         ScratchLender* lender) {
  if (options.kind == DecodeOptions::Kind::kImage) {
    Result<std::unique_ptr<Transformer>> transformer =
        Transformer::Make(options.transform, options.output);
    if (!transformer) return transformer.error();
    if (options.max_pixels == 0 || options.max_pixels > kMostImagePixels) {
      return Status(Code::kInvalidArgument, StrCat("max_pixels is ", options.max_pixels,
                                                   "; it takes 1 to ", kMostImagePixels));
    }
    return std::unique_ptr<SampleDecoder>(
        std::make_unique<ImageSampleDecoder>(*std::move(transformer), options, lender));
  }
  const uint64_t item = ItemBytes(options.dtype);
  if (item == 0) {
    return Status(Code::kInvalidArgument,
                  StrCat("dtype '", options.dtype, "' is no plain little-endian number"));
  }
  uint64_t bytes = item;
  for (const uint64_t n : options.shape) bytes *= n;
  return std::unique_ptr<SampleDecoder>(std::make_unique<ArraySampleDecoder>(options, bytes));
}

Result<std::unique_ptr<ImageReader>> MakeImageReader(ImageFormat format) {
  std::unique_ptr<ImageReader> reader;
  switch (format) {
    case ImageFormat::kJpeg:
      reader = MakeJpegReader();
      break;
    case ImageFormat::kPng:
      reader = MakePngReader();
      break;
    case ImageFormat::kWebp:
      reader = MakeWebpReader();
      break;
    case ImageFormat::kUnknown:
      return Status(Code::kDataLoss, StrCat("this is no image of a known kind (", ImageFormats(),
                                            "); extensions= leaves other files out"));
  }
  if (reader != nullptr) return reader;
  return Status(Code::kUnimplemented,
                StrCat("this build cannot read ", FormatName(format), " (it reads ", ImageFormats(),
                       "); build with ", format == ImageFormat::kPng ? "libpng" : "libwebp"));
}

std::string ImageFormats() {
  std::string names = "JPEG";
  if (MakePngReader() != nullptr) names += ", PNG";
  if (MakeWebpReader() != nullptr) names += ", WebP";
  return names;
}

}  // namespace forebay
