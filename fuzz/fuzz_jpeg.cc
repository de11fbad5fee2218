// JPEG files: our decoder with and without SIMD gives the same, and a part of the image is what the
// whole has there.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "decode/jpeg.h"
#include "expect.h"

namespace forebay {
namespace {

class Pixels final : public RowSink {
 public:
  explicit Pixels(uint32_t width) : width_(width) {}
  void Row(const uint8_t* rgbx) override {
    bytes.insert(bytes.end(), rgbx, rgbx + size_t{width_} * 4);
    after += rgbx[size_t{width_} * 4 + 31];
  }
  std::vector<uint8_t> bytes;
  uint32_t after = 0;

 private:
  uint32_t width_;
};

void Try(std::span<const std::byte> file) {
  const std::unique_ptr<ImageReader> fast = jpeg::MakeOwnReader();
  const std::unique_ptr<ImageReader> plain = jpeg::MakeOwnReader(false);
  const Result<ImageInfo> info = fast->Open(file);
  FUZZ_EXPECT(plain->Open(file).has_value() == info.has_value());
  if (!info || uint64_t{info->width} * info->height > 1 << 18) return;
  for (const uint32_t shrink : {1u, 2u, 4u, 8u}) {
    const ImageInfo size = fast->Shrink(shrink);
    plain->Shrink(shrink);
    const Rect all{0, 0, size.width, size.height};
    Pixels a(all.width);
    Pixels b(all.width);
    const Status status = fast->Read(all, a);
    FUZZ_EXPECT(plain->Read(all, b).ok() == status.ok());
    FUZZ_EXPECT(a.bytes == b.bytes);
    const Rect part{all.width / 3, all.height / 3, (all.width + 2) / 3, (all.height + 2) / 3};
    Pixels c(part.width);
    const Status part_status = fast->Read(part, c);
    FUZZ_EXPECT(part_status.ok() || !status.ok());
    if (!status.ok()) continue;
    FUZZ_EXPECT(c.bytes.size() == size_t{part.width} * part.height * 4);
    for (size_t y = 0; y < part.height; ++y) {
      const size_t row = size_t{part.width} * 4;
      const auto whole =
          a.bytes.begin() + static_cast<std::ptrdiff_t>(((y + part.y) * all.width + part.x) * 4);
      FUZZ_EXPECT(std::equal(whole, whole + static_cast<std::ptrdiff_t>(row),
                             c.bytes.begin() + static_cast<std::ptrdiff_t>(y * row)));
    }
  }
}

}  // namespace
}  // namespace forebay

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  forebay::Try(std::as_bytes(std::span(data, size)));
  return 0;
}
