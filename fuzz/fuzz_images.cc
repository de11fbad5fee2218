// PNG and WebP files, by our wrappers of libpng and libwebp: no reader takes more memory than it
// said before, and a part of the image is what the whole has there.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "decode/png.h"
#include "decode/webp.h"
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

void Try(ImageReader* reader, std::span<const std::byte> file) {
  if (reader == nullptr) return;
  Result<ImageInfo> info = reader->Open(file);
  if (!info || uint64_t{info->width} * info->height > 1 << 18) return;
  FUZZ_EXPECT(reader->ScratchBytes() >= uint64_t{info->width} * 4);
  const Rect all{0, 0, info->width, info->height};
  Pixels whole(all.width);
  const Status status = reader->Read(all, whole);
  FUZZ_EXPECT(!status.ok() || whole.bytes.size() == size_t{all.width} * all.height * 4);
  // A reader that met a damaged file is used again.
  FUZZ_EXPECT(reader->Open(file).has_value());
  const Rect part{all.width / 3, all.height / 3, (all.width + 2) / 3, (all.height + 2) / 3};
  Pixels some(part.width);
  const Status part_status = reader->Read(part, some);
  FUZZ_EXPECT(part_status.ok() || !status.ok());
  if (!status.ok()) return;
  for (size_t y = 0; y < part.height; ++y) {
    const size_t row = size_t{part.width} * 4;
    const auto at =
        whole.bytes.begin() + static_cast<std::ptrdiff_t>(((y + part.y) * all.width + part.x) * 4);
    for (size_t i = 0; i < row; ++i) {
      if (i % 4 != 3) FUZZ_EXPECT(at[static_cast<std::ptrdiff_t>(i)] == some.bytes[y * row + i]);
    }
  }
}

}  // namespace
}  // namespace forebay

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const auto file = std::as_bytes(std::span(data, size));
  forebay::Try(forebay::MakePngReader().get(), file);
  forebay::Try(forebay::MakeWebpReader().get(), file);
  return 0;
}
