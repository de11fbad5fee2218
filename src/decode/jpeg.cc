#include "decode/jpeg.h"

#include <algorithm>
#include <vector>

#include "decode/jpeg_coefficients.h"
#include "decode/jpeg_header.h"
#include "decode/jpeg_huffman.h"
#include "decode/jpeg_output.h"
#include "decode/jpeg_scan.h"
#ifdef FOREBAY_HAVE_JPEG
#include "decode/jpeg_turbo.h"
#endif

namespace forebay {
namespace jpeg {
namespace {

class OwnReader final : public ImageReader {
 public:
  explicit OwnReader(bool simd) : simd_(simd && Avx2()), kernels_(Kernels(simd)), output_(simd) {}

  Result<ImageInfo> Open(std::span<const std::byte> file) override {
    file_ = {reinterpret_cast<const uint8_t*>(file.data()), file.size()};
    header_ = Header();
    scan_ = Scan();
    shrink_ = 1;
    size_t at = 0;
    Status status = ReadMarkers(file_, at, header_, scan_);
    if (status.ok() && scan_.count == 0) {
      status = Status(Code::kDataLoss, "JPEG: an image without pixels");
    }
    if (status.ok()) status = CheckTables(header_, scan_);
    if (status.ok() && Buffered()) status = Coefficients::CheckSize(header_, file.size());
    if (!status.ok()) {
      header_.count = 0;
      return status;
    }
    return ImageInfo{header_.width, header_.height};
  }

  ImageInfo Shrink(uint32_t shrink) override {
    shrink_ = shrink == 2 || shrink == 4 || shrink == 8 ? shrink : 1;
    return size();
  }

  uint64_t ScratchBytes() const override {
    uint64_t bytes = file_.size() + Output::ScratchBytes(header_);
    if (Buffered()) bytes += Coefficients::ScratchBytes(header_);
    return bytes + kFixedBytes;
  }

  Status Read(const Rect& rect, RowSink& sink) override {
    if (header_.count == 0) return Status(Code::kInvalidArgument, "no JPEG is open");
    if (rect.width == 0 || rect.height == 0) return Status();
    const ImageInfo all = size();
    if (rect.x >= all.width || rect.width > all.width - rect.x || rect.y >= all.height ||
        rect.height > all.height - rect.y) {
      return Status(Code::kInvalidArgument, "a rectangle outside the image");
    }
    output_.Begin(header_, shrink_, rect);
    if (Buffered()) return ReadBuffered(sink);
    return ReadScan(sink);
  }

 private:
  static constexpr uint64_t kFixedBytes = uint64_t{64} << 10;

  bool Buffered() const { return header_.progressive || scan_.count != header_.count; }
  ImageInfo size() const {
    return ImageInfo{(header_.width + shrink_ - 1) / shrink_,
                     (header_.height + shrink_ - 1) / shrink_};
  }

  // All components in one sequential scan: decoded row by row.
  Status ReadScan(RowSink& sink) {
    ScanParts parts;
    parts.count = scan_.count;
    for (uint32_t i = 0; i < scan_.count; ++i) {
      const uint32_t c = scan_.component[i];
      const Component& component = header_.components[c];
      FOREBAY_RETURN_IF_ERROR(dc_[scan_.dc[i]].Set(header_.dc[scan_.dc[i]], 15));
      AcTable& ac = ac_[scan_.ac[i]];
      FOREBAY_RETURN_IF_ERROR(ac.Set(header_.ac[scan_.ac[i]], simd_));
      ScanPart& part = parts.part[i];
      part.dc = &dc_[scan_.dc[i]];
      part.ac = &ac;
      part.quant = header_.quant[component.quant].values.data();
      part.h = component.h;
      part.v = component.v;
      part.size = output_.size(c);
      part.wanted = output_.blocks(c);
      part.samples = output_.samples(c);
      part.stride = output_.stride(c);
    }
    for (uint32_t i = 0; i < scan_.count; ++i) {
      ac_[scan_.ac[i]].PrepareSkip(output_.skipped());
    }
    SegmentReader in(file_, scan_.data, header_.restart_interval, segment_);
    const auto run = [&](McuRun kernel, uint32_t row, uint32_t begin, uint32_t end) {
      return in.Run(begin, end, [&](BitReader& bits, uint32_t from, uint32_t to, bool restarted) {
        if (restarted) {
          for (ScanPart& part : parts.part) part.predictor = 0;
        }
        return kernel(bits, parts, row, from, to);
      });
    };
    const BlockRange mcus = output_.mcus();
    const uint32_t width = output_.mcus_per_row();
    for (uint32_t row = 0; row < mcus.y1; ++row) {
      if (row < mcus.y0) {
        FOREBAY_RETURN_IF_ERROR(run(kernels_.skip, row, 0, width));
        continue;
      }
      FOREBAY_RETURN_IF_ERROR(run(kernels_.skip, row, 0, mcus.x0));
      FOREBAY_RETURN_IF_ERROR(run(kernels_.decode, row, mcus.x0, mcus.x1));
      if (row + 1 < mcus.y1) FOREBAY_RETURN_IF_ERROR(run(kernels_.skip, row, mcus.x1, width));
      output_.Emit(row, sink);
    }
    return Status();
  }

  // Several scans: all of them to coefficients first.
  Status ReadBuffered(RowSink& sink) {
    if (coefficients_ == nullptr) coefficients_ = std::make_unique<Coefficients>();
    FOREBAY_RETURN_IF_ERROR(coefficients_->Read(file_, header_, scan_, segment_));
    const BlockRange mcus = output_.mcus();
    for (uint32_t row = mcus.y0; row < mcus.y1; ++row) {
      for (uint32_t c = 0; c < header_.count; ++c) {
        const uint32_t v = header_.components[c].v;
        const BlockRange& wanted = output_.blocks(c);
        for (uint32_t i = 0; i < v; ++i) {
          const uint32_t y = row * v + i;
          if (y < wanted.y0 || y >= wanted.y1) continue;
          TransformRow(c, y, output_.samples(c) + i * output_.size(c) * output_.stride(c));
        }
      }
      output_.Emit(row, sink);
    }
    return Status();
  }

  // The wanted blocks of one row of blocks.
  void TransformRow(uint32_t c, uint32_t y, uint8_t* out) {
    const BlockRange& wanted = output_.blocks(c);
    const uint32_t size = output_.size(c);
    IdctJob a{coefficients_->Block(c, wanted.x0, y), coefficients_->Quant(c), out,
              output_.stride(c), 63};
    uint32_t left = wanted.x1 - wanted.x0;
    for (; size != 8 && left > 0; --left, a.block += 64, a.out += size) IdctSmall(a, size);
    for (; left > 0; left -= std::min(left, 2u), a.block += 128, a.out += 16) {
      IdctJob b = a;
      if (left > 1) {
        b.block += 64;
        b.out += 8;
      }
      kernels_.idct(a, b);
    }
  }

  const bool simd_;
  const ScanKernels& kernels_;
  std::span<const uint8_t> file_;
  Header header_;
  Scan scan_;
  uint32_t shrink_ = 1;
  std::array<SymbolTable, 4> dc_;
  std::array<AcTable, 4> ac_;
  Segment segment_;
  Output output_;
  std::unique_ptr<Coefficients> coefficients_;  // most files need none
};

}  // namespace

std::unique_ptr<ImageReader> MakeOwnReader(bool simd) { return std::make_unique<OwnReader>(simd); }

}  // namespace jpeg

#ifdef FOREBAY_HAVE_JPEG
namespace {

// Ours, and libjpeg-turbo for what ours leaves out.
class JpegReader final : public ImageReader {
 public:
  Result<ImageInfo> Open(std::span<const std::byte> file) override {
    reader_ = own_.get();
    Result<ImageInfo> info = own_->Open(file);
    if (info || info.error().code() != Code::kUnimplemented) return info;
    if (turbo_ == nullptr) turbo_ = jpeg::MakeTurboReader();
    Result<ImageInfo> other = turbo_->Open(file);
    if (!other) return info;
    reader_ = turbo_.get();
    return other;
  }
  ImageInfo Shrink(uint32_t shrink) override { return reader_->Shrink(shrink); }
  uint64_t ScratchBytes() const override { return reader_->ScratchBytes(); }
  Status Read(const Rect& rect, RowSink& sink) override { return reader_->Read(rect, sink); }

 private:
  std::unique_ptr<ImageReader> own_ = jpeg::MakeOwnReader();
  std::unique_ptr<ImageReader> turbo_;
  ImageReader* reader_ = own_.get();
};

}  // namespace

std::unique_ptr<ImageReader> MakeJpegReader() { return std::make_unique<JpegReader>(); }
#else
std::unique_ptr<ImageReader> MakeJpegReader() { return jpeg::MakeOwnReader(); }
#endif

}  // namespace forebay
