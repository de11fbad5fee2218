#include "decode/jpeg_header.h"

#include <algorithm>
#include <cstring>

#include "decode/image.h"

namespace forebay::jpeg {
namespace {

constexpr std::array<uint8_t, 256> MakeNaturalOrder() {
  std::array<uint8_t, 256> order{};
  for (uint8_t& entry : order) entry = 64;
  uint32_t k = 0;
  for (uint32_t diagonal = 0; diagonal < 15; ++diagonal) {
    for (uint32_t i = 0; i <= diagonal; ++i) {
      const uint32_t row = diagonal % 2 == 0 ? diagonal - i : i;
      const uint32_t column = diagonal - row;
      if (row < 8 && column < 8) order[k++] = static_cast<uint8_t>(row * 8 + column);
    }
  }
  return order;
}

// A cursor over one marker's payload.
class Payload {
 public:
  explicit Payload(std::span<const uint8_t> bytes) : bytes_(bytes) {}
  size_t left() const { return bytes_.size(); }
  uint8_t U8() {
    const uint8_t value = bytes_[0];
    bytes_ = bytes_.subspan(1);
    return value;
  }
  uint16_t U16() {
    const uint32_t high = U8();
    return static_cast<uint16_t>(high << 8 | U8());
  }
  std::span<const uint8_t> Take(size_t count) {
    const std::span<const uint8_t> taken = bytes_.first(count);
    bytes_ = bytes_.subspan(count);
    return taken;
  }

 private:
  std::span<const uint8_t> bytes_;
};

Status Bad(std::string_view what, size_t at) {
  return Status(Code::kDataLoss, StrCat("JPEG: ", what, " at byte ", at));
}

Status ReadQuant(Payload in, size_t at, Header& header) {
  while (in.left() > 0) {
    const uint8_t kind = in.U8();
    const uint32_t precision = kind >> 4;
    const size_t bytes = precision == 0 ? 64 : 128;
    if (precision > 1 || (kind & 15) > 3 || in.left() < bytes) {
      return Bad("a broken quantisation table", at);
    }
    QuantTable& table = header.quant[kind & 15];
    table.present = true;
    for (uint32_t k = 0; k < 64; ++k) {
      table.values[kNaturalOrder[k]] = precision == 0 ? in.U8() : in.U16();
    }
  }
  return Status();
}

Status ReadHuffman(Payload in, size_t at, Header& header) {
  while (in.left() > 0) {
    const uint8_t kind = in.U8();
    if (kind >> 4 > 1 || (kind & 15) > 3 || in.left() < 16) {
      return Bad("a broken Huffman table", at);
    }
    HuffmanSpec spec;
    spec.present = true;
    size_t total = 0;
    for (uint8_t& count : spec.counts) total += count = in.U8();
    if (total > 256 || in.left() < total) return Bad("a broken Huffman table", at);
    std::ranges::copy(in.Take(total), spec.symbols.begin());
    (kind >> 4 == 0 ? header.dc : header.ac)[kind & 15] = spec;
  }
  return Status();
}

uint32_t DivideUp(uint32_t a, uint32_t b) { return (a + b - 1) / b; }

Status ReadFrame(Payload in, size_t at, bool progressive, Header& header) {
  if (header.count != 0) return Bad("a second frame", at);
  if (in.left() < 6) return Bad("a frame header that is cut short", at);
  const uint8_t precision = in.U8();
  if (precision != 8) {
    return Status(Code::kUnimplemented, StrCat("JPEG with ", precision, " bits a sample"));
  }
  header.progressive = progressive;
  header.height = in.U16();
  header.width = in.U16();
  const uint32_t count = in.U8();
  if (header.width == 0 || count == 0) return Bad("an empty frame", at);
  if (header.height == 0) {
    return Status(Code::kUnimplemented, "JPEG whose height comes after its pixels (DNL)");
  }
  FOREBAY_RETURN_IF_ERROR(CheckPixels({header.width, header.height}, kMostImagePixels));
  if (count != 1 && count != 3 && count != 4) {
    return Status(Code::kUnimplemented, StrCat("JPEG with ", count, " components"));
  }
  if (in.left() != 3 * count) return Bad("a frame header of the wrong length", at);
  header.max_h = header.max_v = 1;
  for (uint32_t c = 0; c < count; ++c) {
    Component& component = header.components[c];
    component.id = in.U8();
    const uint8_t sampling = in.U8();
    component.h = sampling >> 4;
    component.v = sampling & 15;
    component.quant = in.U8();
    if (component.h < 1 || component.h > 4 || component.v < 1 || component.v > 4 ||
        component.quant > 3) {
      return Bad("a broken frame header", at);
    }
    for (uint32_t other = 0; other < c; ++other) {
      if (header.components[other].id == component.id) return Bad("a broken frame header", at);
    }
    // One component is never interleaved, so its factors mean nothing.
    if (count == 1) component.h = component.v = 1;
    header.max_h = std::max(header.max_h, component.h);
    header.max_v = std::max(header.max_v, component.v);
  }
  for (uint32_t c = 0; c < count; ++c) {
    Component& component = header.components[c];
    if (header.max_h % component.h != 0 || header.max_v % component.v != 0) {
      return Status(Code::kUnimplemented, "JPEG with fractional sampling factors");
    }
    component.width = DivideUp(header.width * component.h, header.max_h);
    component.height = DivideUp(header.height * component.v, header.max_v);
  }
  header.count = count;
  return Status();
}

Status ReadScan(Payload in, size_t at, const Header& header, Scan& scan) {
  if (header.count == 0) return Bad("a scan before the frame", at);
  scan = Scan();
  const uint32_t count = in.left() == 0 ? 0 : in.U8();
  if (count < 1 || count > header.count || in.left() != 2 * count + 3) {
    return Bad("a broken scan header", at);
  }
  uint32_t blocks = 0;
  for (uint32_t i = 0; i < count; ++i) {
    const uint8_t id = in.U8();
    const uint8_t tables = in.U8();
    uint32_t c = 0;
    while (c < header.count && header.components[c].id != id) ++c;
    if (c == header.count || tables >> 4 > 3 || (tables & 15) > 3) {
      return Bad("a broken scan header", at);
    }
    for (uint32_t other = 0; other < i; ++other) {
      if (scan.component[other] == c) return Bad("a scan that names a component twice", at);
    }
    scan.component[i] = static_cast<uint8_t>(c);
    scan.dc[i] = tables >> 4;
    scan.ac[i] = tables & 15;
    blocks += header.components[c].h * header.components[c].v;
  }
  if (count > 1 && blocks > kMaxBlocksInMcu) return Bad("a scan of too many blocks", at);
  scan.first = in.U8();
  scan.last = in.U8();
  const uint8_t approximation = in.U8();
  scan.high = approximation >> 4;
  scan.low = approximation & 15;
  if (header.progressive) {
    const bool dc = scan.first == 0;
    if (scan.last > 63 || scan.first > scan.last || (dc && scan.last != 0) || (!dc && count != 1) ||
        scan.low > 13 || (scan.high != 0 && scan.high != scan.low + 1)) {
      return Bad("a progressive scan that makes no sense", at);
    }
  }
  scan.count = count;
  return Status();
}

void ReadApplication(uint8_t marker, std::span<const uint8_t> in, Header& header) {
  if (marker == 0xE0 && in.size() >= 14 && std::memcmp(in.data(), "JFIF", 5) == 0) {
    header.jfif = true;
  }
  if (marker == 0xEE && in.size() >= 12 && std::memcmp(in.data(), "Adobe", 5) == 0) {
    header.adobe = true;
    header.adobe_transform = in[11];
  }
}

}  // namespace

constexpr std::array<uint8_t, 256> kNaturalOrder = MakeNaturalOrder();

ColorSpace Header::Color() const {
  if (count == 1) return ColorSpace::kGray;
  if (count == 4) {
    return adobe && adobe_transform != 0 ? ColorSpace::kYcck : ColorSpace::kCmyk;
  }
  if (jfif) return ColorSpace::kYcc;
  if (adobe) return adobe_transform == 0 ? ColorSpace::kRgb : ColorSpace::kYcc;
  const bool rgb = components[0].id == 'R' && components[1].id == 'G' && components[2].id == 'B';
  return rgb ? ColorSpace::kRgb : ColorSpace::kYcc;
}

Status ReadMarkers(std::span<const uint8_t> file, size_t& at, Header& header, Scan& scan) {
  if (at == 0) {
    if (file.size() < 2 || file[0] != 0xFF || file[1] != 0xD8) return Bad("no JPEG", 0);
    at = 2;
  }
  while (true) {
    // Bytes that belong to nothing are skipped, as libjpeg does: some writers leave them.
    while (at < file.size() && file[at] != 0xFF) ++at;
    while (at < file.size() && file[at] == 0xFF) ++at;  // fill bytes
    if (at >= file.size()) break;
    const size_t start = at - 1;
    const uint8_t marker = file[at++];
    if (marker == 0xD9) {
      scan = Scan();
      return header.count == 0 ? Bad("no frame before the end of the image", start) : Status();
    }
    if (marker <= 0x01 || (marker >= 0xD0 && marker <= 0xD7)) continue;
    if (marker == 0xD8) return Bad("a second image", start);
    if (file.size() - at < 2) break;
    const size_t length = static_cast<size_t>(file[at]) << 8 | file[at + 1];
    if (length < 2) return Bad("a marker without a length", start);
    if (file.size() - at < length) break;
    const std::span<const uint8_t> bytes = file.subspan(at + 2, length - 2);
    at += length;
    switch (marker) {
      case 0xDB:
        FOREBAY_RETURN_IF_ERROR(ReadQuant(Payload(bytes), start, header));
        break;
      case 0xC4:
        FOREBAY_RETURN_IF_ERROR(ReadHuffman(Payload(bytes), start, header));
        break;
      case 0xDD:
        if (bytes.size() != 2) return Bad("a broken restart interval", start);
        header.restart_interval = Payload(bytes).U16();
        break;
      case 0xC0:
      case 0xC1:
      case 0xC2:
        FOREBAY_RETURN_IF_ERROR(ReadFrame(Payload(bytes), start, marker == 0xC2, header));
        break;
      case 0xC3:
        return Status(Code::kUnimplemented, "lossless JPEG");
      case 0xC5:
      case 0xC6:
      case 0xC7:
      case 0xCD:
      case 0xCE:
      case 0xCF:
        return Status(Code::kUnimplemented, "hierarchical JPEG");
      case 0xC9:
      case 0xCA:
      case 0xCB:
      case 0xCC:
        return Status(Code::kUnimplemented, "JPEG with arithmetic coding");
      case 0xDC:
        return Status(Code::kUnimplemented, "JPEG whose height comes after its pixels (DNL)");
      case 0xDA:
        FOREBAY_RETURN_IF_ERROR(ReadScan(Payload(bytes), start, header, scan));
        scan.data = at;
        return Status();
      default:
        ReadApplication(marker, bytes, header);
    }
  }
  return Status(Code::kDataLoss,
                StrCat("JPEG: the file ends at byte ", file.size(), ", within its header"));
}

}  // namespace forebay::jpeg
