#include "decode/image.h"

#include <cstring>

namespace forebay {
namespace {

bool StartsWith(std::span<const std::byte> file, size_t at, std::string_view magic) {
  return file.size() >= at + magic.size() &&
         std::memcmp(file.data() + at, magic.data(), magic.size()) == 0;
}

}  // namespace

ImageFormat FormatOf(std::span<const std::byte> file) {
  if (StartsWith(file, 0, "\xff\xd8\xff")) return ImageFormat::kJpeg;
  if (StartsWith(file, 0, "\x89PNG\r\n\x1a\n")) return ImageFormat::kPng;
  if (StartsWith(file, 0, "RIFF") && StartsWith(file, 8, "WEBP")) return ImageFormat::kWebp;
  return ImageFormat::kUnknown;
}

Status CheckPixels(const ImageInfo& info, uint64_t most) {
  if (uint64_t{info.width} * info.height <= most) return Status();
  return Status(Code::kDataLoss, StrCat("an image of ", info.width, " x ", info.height,
                                        " pixels, where max_pixels= allows ", most));
}

std::string_view FormatName(ImageFormat format) {
  switch (format) {
    case ImageFormat::kUnknown:
      return "unknown";
    case ImageFormat::kJpeg:
      return "JPEG";
    case ImageFormat::kPng:
      return "PNG";
    case ImageFormat::kWebp:
      return "WebP";
  }
  return "unknown";
}

}  // namespace forebay
