#ifdef FOREBAY_HAVE_JPEG
#include "decode/jpeg_turbo.h"

#include <csetjmp>
#include <cstdio>
#include <vector>

// After <cstdio>, which it needs.
#include <jpeglib.h>

#include "decode/jpeg_color.h"
#include "decode/jpeg_header.h"

namespace forebay::jpeg {
namespace {

struct Errors {
  jpeg_error_mgr base;
  std::jmp_buf back;
  char message[JMSG_LENGTH_MAX];
};

[[noreturn]] void Exit(j_common_ptr info) {
  Errors* errors = reinterpret_cast<Errors*>(info->err);
  info->err->format_message(info, errors->message);
  std::longjmp(errors->back, 1);
}
void Emit(j_common_ptr info, int level) {
  if (level < 0) Exit(info);
}
void Silent(j_common_ptr) {}

// The library jumps out of its calls: nothing that needs a destructor may live in the functions
// that call it.
class TurboReader final : public ImageReader {
 public:
  TurboReader() {
    info_.err = jpeg_std_error(&errors_.base);
    errors_.base.error_exit = Exit;
    errors_.base.emit_message = Emit;
    errors_.base.output_message = Silent;
    created_ = Create();
  }
  ~TurboReader() override { jpeg_destroy_decompress(&info_); }
  TurboReader(const TurboReader&) = delete;
  TurboReader& operator=(const TurboReader&) = delete;

  Result<ImageInfo> Open(std::span<const std::byte> file) override {
    file_ = file;
    shrink_ = 1;
    if (!created_ || !Header()) return Error();
    const ImageInfo size{info_.image_width, info_.image_height};
    FOREBAY_RETURN_IF_ERROR(CheckPixels(size, kMostImagePixels));
    buffered_ = Buffered();
    return size;
  }

  ImageInfo Shrink(uint32_t shrink) override {
    shrink_ = shrink;
    info_.scale_num = 1;
    info_.scale_denom = shrink;
    if (!Dimensions()) return ImageInfo{info_.image_width, info_.image_height};
    return ImageInfo{info_.output_width, info_.output_height};
  }

  uint64_t ScratchBytes() const override {
    // All coefficients of a file of several scans; rows of samples and their context of any other.
    const uint64_t width = uint64_t{info_.image_width} + 64;
    const uint64_t height = uint64_t{info_.image_height} + 64;
    const auto components = static_cast<uint64_t>(info_.num_components);
    return width * components * 64 + (buffered_ ? width * height * components * 2 : 0) +
           kFixedBytes;
  }

  Status Read(const Rect& rect, RowSink& sink) override {
    if (!Header()) return Error();
    const bool four = info_.num_components == 4;
    line_.resize((size_t{info_.image_width} + 64) * 4);
    if (!Begin(four)) return Error();
    bool ok = true;
    for (uint32_t y = 0; ok && y < rect.y + rect.height; ++y) {
      ok = Line();
      if (!ok || y < rect.y) continue;
      uint8_t* pixels = line_.data() + size_t{rect.x} * 4;
      if (four) {
        for (uint32_t x = 0; x < rect.width; ++x) black_.push_back(pixels[4 * x + 3]);
        CmykToRgb(black_.data(), false, rect.width, pixels);
        black_.clear();
      }
      sink.Row(pixels);
    }
    jpeg_abort_decompress(&info_);
    return ok ? Status() : Error();
  }

 private:
  static constexpr uint64_t kFixedBytes = uint64_t{64} << 10;

  Status Error() const {
    return Status(Code::kDataLoss, StrCat("JPEG: ", std::string_view(errors_.message)));
  }

  bool Create() {
    if (setjmp(errors_.back) != 0) return false;
    jpeg_create_decompress(&info_);
    return true;
  }
  bool Header() {
    if (setjmp(errors_.back) != 0) return false;
    jpeg_abort_decompress(&info_);
    jpeg_mem_src(&info_, reinterpret_cast<const unsigned char*>(file_.data()), file_.size());
    return jpeg_read_header(&info_, TRUE) == JPEG_HEADER_OK;
  }
  bool Buffered() {
    if (setjmp(errors_.back) != 0) return true;
    return jpeg_has_multiple_scans(&info_) == TRUE;
  }
  bool Dimensions() {
    if (setjmp(errors_.back) != 0) return false;
    jpeg_calc_output_dimensions(&info_);
    return true;
  }
  bool Begin(bool four) {
    if (setjmp(errors_.back) != 0) return false;
    info_.scale_num = 1;
    info_.scale_denom = shrink_;
    info_.out_color_space = four ? JCS_CMYK : JCS_EXT_RGBX;
    return jpeg_start_decompress(&info_) == TRUE;
  }
  bool Line() {
    if (setjmp(errors_.back) != 0) return false;
    JSAMPROW row = line_.data();
    return jpeg_read_scanlines(&info_, &row, 1) == 1;
  }

  jpeg_decompress_struct info_{};
  Errors errors_{};
  bool created_ = false;
  bool buffered_ = false;
  std::span<const std::byte> file_;
  uint32_t shrink_ = 1;
  std::vector<uint8_t> line_;
  std::vector<uint8_t> black_;
};

}  // namespace

std::unique_ptr<ImageReader> MakeTurboReader() { return std::make_unique<TurboReader>(); }

}  // namespace forebay::jpeg
#endif
