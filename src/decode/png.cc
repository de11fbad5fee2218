#include "decode/png.h"

#if FOREBAY_HAVE_PNG
#include <png.h>

#include <csetjmp>
#include <cstring>
#include <string>
#include <vector>

namespace forebay {
namespace {

// libpng reports errors by longjmp: nothing with a destructor lives in the functions that set one.
class PngReader final : public ImageReader {
 public:
  ~PngReader() override { Close(); }

  Result<ImageInfo> Open(std::span<const std::byte> file) override {
    Close();
    file_ = file;
    at_ = 0;
    error_.clear();
    png_ = png_create_read_struct(PNG_LIBPNG_VER_STRING, this, &OnError, &OnWarning);
    if (png_ != nullptr) info_ = png_create_info_struct(png_);
    if (info_ == nullptr) return Status(Code::kResourceExhausted, "libpng finds no memory");
    if (!ReadHeader()) return Bad();
    FOREBAY_RETURN_IF_ERROR(CheckPixels(size_, kMostImagePixels));
    return size_;
  }

  ImageInfo Shrink(uint32_t) override { return size_; }

  uint64_t ScratchBytes() const override {
    // libpng has two rows of up to eight bytes a pixel; an interlaced image is kept whole.
    const uint64_t row = uint64_t{size_.width} * 4;
    const uint64_t kept = interlaced_ ? (row + sizeof(png_bytep)) * size_.height : row;
    return kept + uint64_t{size_.width} * 16 + kFixedBytes;
  }

  Status Read(const Rect& rect, RowSink& sink) override {
    if (!StartRows()) return Bad();
    const size_t stride = size_t{size_.width} * 4;
    const size_t rows = interlaced_ ? size_.height : 1;
    pixels_.resize(stride * rows + 64);
    if (interlaced_) {
      row_pointers_.resize(size_.height);
      for (size_t y = 0; y < rows; ++y) row_pointers_[y] = pixels_.data() + y * stride;
      if (!ReadWhole()) return Bad();
      for (uint32_t y = 0; y < rect.height; ++y) {
        sink.Row(row_pointers_[rect.y + y] + size_t{rect.x} * 4);
      }
      return Status();
    }
    for (uint32_t y = 0; y < rect.y + rect.height; ++y) {
      if (!ReadRow()) return Bad();
      if (y >= rect.y) sink.Row(pixels_.data() + size_t{rect.x} * 4);
    }
    return Status();
  }

 private:
  static constexpr uint64_t kFixedBytes = uint64_t{64} << 10;  // zlib's window and tables

  Status Bad() const { return Status(Code::kDataLoss, StrCat("PNG: ", error_)); }

  bool ReadHeader() {
    if (setjmp(jump_)) return false;
    png_set_read_fn(png_, this, &OnRead);
    png_set_crc_action(png_, PNG_CRC_ERROR_QUIT, PNG_CRC_QUIET_USE);
    png_set_user_limits(png_, 1 << 24, 1 << 24);
    // Text and colour profiles, which may unpack to megabytes each, have no part in the pixels.
    png_set_keep_unknown_chunks(png_, PNG_HANDLE_CHUNK_NEVER, nullptr, -1);
    png_read_info(png_, info_);
    size_ = {png_get_image_width(png_, info_), png_get_image_height(png_, info_)};
    interlaced_ = png_get_interlace_type(png_, info_) != PNG_INTERLACE_NONE;
    return true;
  }

  // Here libpng allocates its rows.
  bool StartRows() {
    if (setjmp(jump_)) return false;
    // Colours without alpha, as PIL's convert("RGB") makes them.
    png_set_palette_to_rgb(png_);
    png_set_expand_gray_1_2_4_to_8(png_);
    png_set_strip_16(png_);
    png_set_gray_to_rgb(png_);
    png_set_strip_alpha(png_);
    png_set_filler(png_, 0xff, PNG_FILLER_AFTER);
    (void)png_set_interlace_handling(png_);
    png_read_update_info(png_, info_);
    if (png_get_rowbytes(png_, info_) != size_t{size_.width} * 4) {
      error_ = "rows of an unexpected size";
      return false;
    }
    return true;
  }

  bool ReadWhole() {
    if (setjmp(jump_)) return false;
    png_read_image(png_, row_pointers_.data());
    return true;
  }

  bool ReadRow() {
    if (setjmp(jump_)) return false;
    png_read_row(png_, pixels_.data(), nullptr);
    return true;
  }

  void Close() {
    if (png_ != nullptr) png_destroy_read_struct(&png_, &info_, nullptr);
    png_ = nullptr;
    info_ = nullptr;
  }

  static void OnError(png_structp png, png_const_charp message) {
    auto* self = static_cast<PngReader*>(png_get_error_ptr(png));
    self->error_ = message;
    std::longjmp(self->jump_, 1);
  }
  static void OnWarning(png_structp, png_const_charp) {}
  static void OnRead(png_structp png, png_bytep out, size_t bytes) {
    auto* self = static_cast<PngReader*>(png_get_io_ptr(png));
    if (self->file_.size() - self->at_ < bytes) png_error(png, "the file ends early");
    std::memcpy(out, self->file_.data() + self->at_, bytes);
    self->at_ += bytes;
  }

  std::span<const std::byte> file_;
  size_t at_ = 0;
  ImageInfo size_;
  bool interlaced_ = false;
  png_structp png_ = nullptr;
  png_infop info_ = nullptr;
  std::jmp_buf jump_;
  std::string error_;
  std::vector<uint8_t> pixels_;
  std::vector<png_bytep> row_pointers_;
};

}  // namespace

std::unique_ptr<ImageReader> MakePngReader() { return std::make_unique<PngReader>(); }

}  // namespace forebay

#else

namespace forebay {
std::unique_ptr<ImageReader> MakePngReader() { return nullptr; }
}  // namespace forebay

#endif
