// SampleDecoder: from a sample's stored bytes to its finished place in a batch.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"
#include "decode/random.h"
#include "decode/transform_spec.h"

namespace forebay {

struct DecodeOptions {
  enum class Kind : uint8_t { kImage, kArray };
  Kind kind = Kind::kImage;
  // Images.
  TransformSpec transform;
  OutputSpec output;
  // A larger image is corrupt. The default is where PIL raises DecompressionBombError; at most
  // kMostImagePixels.
  uint64_t max_pixels = 178'956'970;
  bool fast = false;  // JPEG: let the DCT shrink large images; other pixels than a full decode's
  // Arrays: every sample has this type and shape.
  std::string array_name;  // member of an .npz archive; empty: the only one
  std::string dtype;       // as NumPy writes it, "<f4"
  std::vector<uint64_t> shape;
};

// Who lends a decoder memory for an image that needs more than kScratchBytes.
class ScratchLender {
 public:
  virtual ~ScratchLender() = default;
  // Before `bytes` are allocated; they may wait for room. kResourceExhausted: there is none.
  virtual Status Take(uint64_t bytes) = 0;
  // What was taken is free again.
  virtual void GiveBack() = 0;
};

// What a decoder may keep from image to image, each format by itself: rows, tables and coefficients
// (measured: 0.3 to 0.9 MiB for photographs).
inline constexpr uint64_t kScratchBytes = uint64_t{1} << 20;

// Not safe for concurrent use: one a thread, which keeps its scratch memory.
class SampleDecoder {
 public:
  virtual ~SampleDecoder() = default;
  // Fills `out`, which has sample_bytes() bytes. kDataLoss or kUnimplemented: the bytes are at
  // fault, and the message says how.
  virtual Status Decode(std::span<const std::byte> stored, const SampleKey& key,
                        std::byte* out) = 0;
  virtual size_t sample_bytes() const = 0;
  virtual const std::vector<uint64_t>& shape() const = 0;  // of one sample
};

// `lender` must outlive the decoder; without one, memory is taken as it comes.
Result<std::unique_ptr<SampleDecoder>> MakeSampleDecoder(const DecodeOptions& options,
                                                         ScratchLender* lender = nullptr);

// Formats of images that this build reads: "JPEG, PNG".
std::string ImageFormats();
// A reader for the format of `file`; kUnimplemented names the library that is missing.
Result<std::unique_ptr<ImageReader>> MakeImageReader(ImageFormat format);

}  // namespace forebay
