#include <algorithm>

#include "base/clock.h"
#include "common.h"
#include "decode/image.h"
#if FOREBAY_HAVE_JPEG
#include "decode/jpeg_turbo.h"
#endif
#include "decode/sample_decoder.h"
#include "decode/transform.h"
#include "image.h"

namespace forebay::python {
namespace {

std::span<const std::byte> Span(const BytesIn& bytes) {
  return {reinterpret_cast<const std::byte*>(bytes.data()), bytes.size()};
}

// Keeps the rows as RGB.
class Collected final : public RowSink {
 public:
  Collected(uint8_t* out, uint32_t width) : out_(out), width_(width) {}
  void Row(const uint8_t* rgbx) override {
    for (uint32_t x = 0; x < width_; ++x, rgbx += 4) {
      for (int c = 0; c < 3; ++c) *out_++ = rgbx[c];
    }
  }

 private:
  uint8_t* out_;
  const uint32_t width_;
};

// Looks at the rows and keeps nothing.
class Dropped final : public RowSink {
 public:
  void Row(const uint8_t* rgbx) override { seen_ = rgbx[0]; }

 private:
  volatile uint8_t seen_ = 0;
};

std::unique_ptr<ImageReader> ReaderFor(std::span<const std::byte> file, bool turbo) {
  if (!turbo) return Value(MakeImageReader(FormatOf(file)));
#if FOREBAY_HAVE_JPEG
  return jpeg::MakeTurboReader();
#else
  Raise(Status(Code::kUnimplemented, "this build has no libjpeg-turbo to compare with"));
  return nullptr;
#endif
}

nb::object DecodeImage(BytesIn data, std::optional<std::array<uint32_t, 4>> rect, uint32_t shrink,
                       bool turbo) {
  const std::span<const std::byte> file = Span(data);
  const std::unique_ptr<ImageReader> reader = ReaderFor(file, turbo);
  ImageInfo info = Value(reader->Open(file));
  if (shrink != 1) info = reader->Shrink(shrink);
  Rect part{0, 0, info.width, info.height};
  if (rect) {
    part = {(*rect)[0], (*rect)[1], (*rect)[2], (*rect)[3]};
    if (uint64_t{part.x} + part.width > info.width ||
        uint64_t{part.y} + part.height > info.height || part.width == 0 || part.height == 0) {
      Raise(Status(Code::kInvalidArgument, StrCat("the rectangle is not inside the image of ",
                                                  info.width, " x ", info.height)));
    }
  }
  auto* pixels = new std::vector<uint8_t>(size_t{part.width} * part.height * 3);
  nb::capsule owner(pixels, [](void* p) noexcept { delete static_cast<std::vector<uint8_t>*>(p); });
  Collected sink(pixels->data(), part.width);
  Raise(reader->Read(part, sink));
  return nb::cast(nb::ndarray<nb::numpy, uint8_t, nb::ndim<3>>(
      pixels->data(), {part.height, part.width, 3}, owner));
}

std::vector<double> CropSeconds(BytesIn data, const nb::list& transform, uint32_t draws,
                                uint64_t seed, bool fast) {
  DecodeOptions options;
  options.transform = SpecFrom(transform);
  options.output.dtype = DType::kUint8;
  for (const ops::Op& op : options.transform.ops) {
    if (std::holds_alternative<ops::ToTensor>(op)) options.output.dtype = DType::kFloat32;
  }
  options.fast = fast;
  const std::unique_ptr<SampleDecoder> decoder = Value(MakeSampleDecoder(options));
  std::vector<std::byte> out(decoder->sample_bytes());
  std::vector<double> seconds;
  Status status;
  {
    WaitUnlocked unlocked;
    for (uint32_t i = 0; i < draws && status.ok(); ++i) {
      const Nanos start = SteadyClock().Now();
      status = decoder->Decode(Span(data), {seed, 0, i}, out.data());
      seconds.push_back(static_cast<double>(SteadyClock().Now() - start) * 1e-9);
    }
  }
  Raise(status);
  return seconds;
}

std::vector<double> FullSeconds(BytesIn data, uint32_t repeats, bool turbo) {
  const std::span<const std::byte> file = Span(data);
  const std::unique_ptr<ImageReader> reader = ReaderFor(file, turbo);
  std::vector<double> seconds;
  Status status;
  {
    WaitUnlocked unlocked;
    for (uint32_t i = 0; i < repeats && status.ok(); ++i) {
      const Nanos start = SteadyClock().Now();
      const Result<ImageInfo> info = reader->Open(file);
      Dropped sink;
      status = info ? reader->Read({0, 0, info->width, info->height}, sink) : info.error();
      seconds.push_back(static_cast<double>(SteadyClock().Now() - start) * 1e-9);
    }
  }
  Raise(status);
  return seconds;
}

}  // namespace

void BindDecode(nb::module_& m) {
  m.def("decode_image", &DecodeImage, nb::arg("data"), nb::arg("rect") = nb::none(),
        nb::arg("shrink") = 1, nb::arg("turbo") = false,
        "Pixels of an image, or of its rectangle (x, y, width, height), as height x width x 3 "
        "bytes. `turbo`: by libjpeg-turbo.");
  m.def("crop_decode_seconds", &CropSeconds, nb::arg("data"), nb::arg("transform"),
        nb::arg("draws"), nb::arg("seed") = 0, nb::arg("fast") = false,
        "Seconds that each of `draws` samples took, made of one image.");
  m.def("full_decode_seconds", &FullSeconds, nb::arg("data"), nb::arg("repeats"),
        nb::arg("turbo") = true, "Seconds that each whole decode took.");
}

}  // namespace forebay::python
