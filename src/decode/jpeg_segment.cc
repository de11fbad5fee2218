#include "decode/jpeg_segment.h"

namespace forebay::jpeg {

BitReader Segment::Read(std::span<const uint8_t> file, size_t& at) {
  // The copy is never longer than what is left of the file; a segment ends at its marker, so many
  // short ones do not add up: only the vector's size is touched.
  bytes_.resize(std::max(bytes_.size(), file.size() - at + kPadding));
  uint8_t* out = bytes_.data();
  const uint8_t* in = file.data() + at;
  const uint8_t* const end = file.data() + file.size();
  while (in < end) {
    const void* found = std::memchr(in, 0xFF, static_cast<size_t>(end - in));
    const uint8_t* stop = found == nullptr ? end : static_cast<const uint8_t*>(found);
    std::memcpy(out, in, static_cast<size_t>(stop - in));
    out += stop - in;
    in = stop;
    if (end - in < 2) break;  // the file's end, or a lone 0xFF there
    if (in[1] == 0) {
      *out++ = 0xFF;
      in += 2;
    } else if (in[1] == 0xFF) {
      ++in;  // fill
    } else {
      break;
    }
  }
  at = static_cast<size_t>(in - file.data());
  std::memset(out, 0, kPadding);
  BitReader reader;
  reader.next = bytes_.data();
  reader.end = out;
  return reader;
}

SegmentReader::SegmentReader(std::span<const uint8_t> file, size_t start, uint32_t interval,
                             Segment& memory)
    : file_(file),
      start_(start),
      at_(start),
      interval_(interval),
      left_(interval == 0 ? UINT64_MAX : interval),
      memory_(memory),
      bits_(memory.Read(file, at_)) {}

Status SegmentReader::Restart() {
  if (file_.size() - at_ < 2) return Broken();
  const uint8_t marker = file_[at_ + 1];
  if (marker != 0xD0 + number_) {
    return Status(Code::kDataLoss, StrCat("JPEG: no restart marker ", number_, " at byte ", at_));
  }
  at_ += 2;
  number_ = (number_ + 1) % 8;
  left_ = interval_;
  bits_ = memory_.Read(file_, at_);
  return Status();
}

Status SegmentReader::Broken() const {
  if (file_.size() - at_ < 2) {
    return Status(Code::kDataLoss,
                  StrCat("JPEG: the file ends at byte ", file_.size() - start_, " of the scan"));
  }
  if (bits_.Overrun()) {
    return Status(Code::kDataLoss, StrCat("JPEG: a scan that ends early, at byte ", at_));
  }
  return Status(Code::kDataLoss, StrCat("JPEG: a code that makes no sense before byte ", at_));
}

}  // namespace forebay::jpeg
