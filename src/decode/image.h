// ImageReader: one interface for every image format, made for reading only the part that a crop
// needs.
//
// Pixels are handed over row by row, while they are in the cache, as RGBX: four bytes a pixel, red,
// green, blue and one that nobody reads. Whatever the file holds (gray, CMYK, palette) arrives as
// RGB, with the values that PIL's convert("RGB") gives. EXIF orientation is not applied, as
// torchvision's loader does not apply it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

#include "base/status.h"

namespace forebay {

enum class ImageFormat : uint8_t { kUnknown, kJpeg, kPng, kWebp };

// By the first bytes.
ImageFormat FormatOf(std::span<const std::byte> file);
std::string_view FormatName(ImageFormat format);

// The most pixels that a reader takes: sizes beyond are nonsense, or made to exhaust memory.
inline constexpr uint64_t kMostImagePixels = uint64_t{1} << 28;

struct ImageInfo {
  uint32_t width = 0;
  uint32_t height = 0;
};

struct Rect {
  uint32_t x = 0;
  uint32_t y = 0;
  uint32_t width = 0;
  uint32_t height = 0;
  bool operator==(const Rect&) const = default;
};

// kDataLoss for an image of more than `most` pixels.
Status CheckPixels(const ImageInfo& info, uint64_t most);

// What takes the rows of a rectangle, from the top to the bottom, each once.
class RowSink {
 public:
  virtual ~RowSink() = default;
  // The rectangle's pixels of one row. At least 32 bytes after them may be read too; the memory is
  // the reader's and changes with the next row.
  virtual void Row(const uint8_t* rgbx) = 0;
};

// Not safe for concurrent use: one reader a thread, which keeps its scratch memory from image to
// image. Errors say what is wrong with the bytes; the caller adds the path.
class ImageReader {
 public:
  virtual ~ImageReader() = default;
  // Reads the header. `file` must stay until the last Read of it.
  virtual Result<ImageInfo> Open(std::span<const std::byte> file) = 0;
  // The size of the image when decoded at 1/shrink (2, 4 or 8), or the full size where the format
  // cannot. Chosen before Read; 1 after each Open.
  virtual ImageInfo Shrink(uint32_t shrink) = 0;
  // After Open and Shrink: the most memory that Read takes, whatever the rectangle. Nothing that
  // grows with the image is allocated before Read, so that a caller can refuse it.
  virtual uint64_t ScratchBytes() const = 0;
  // Hands `rect`, which lies inside the image (as shrunk), to `sink`. The pixels are those of the
  // whole image, also at the rectangle's edges. A file that ends early or holds nonsense is an
  // error (kDataLoss): no gray rows.
  virtual Status Read(const Rect& rect, RowSink& sink) = 0;
};

}  // namespace forebay
