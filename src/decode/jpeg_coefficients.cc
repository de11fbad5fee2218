#include "decode/jpeg_coefficients.h"

#include <algorithm>
#include <bit>

#include "decode/jpeg_idct.h"

namespace forebay::jpeg {
namespace {

// A file has about ten scans. More than this is made to burn time.
constexpr uint32_t kMaxScans = 200;

FOREBAY_JPEG_INLINE void Want(BitReader& in) {
  if ((in.bits & 63) < 32) in.Refill();
}

FOREBAY_JPEG_INLINE bool DcFirst(BitReader& in, const SymbolTable& table, uint32_t low,
                                 uint32_t& predictor, int16_t* block) {
  if (!ReadDc(in, table, predictor)) return false;
  block[0] = static_cast<int16_t>(predictor << low);
  return true;
}

FOREBAY_JPEG_INLINE void DcRefine(BitReader& in, uint32_t low, int16_t* block) {
  Want(in);
  if (in.Take(1) != 0) block[0] = static_cast<int16_t>(block[0] | 1 << low);
}

FOREBAY_JPEG_INLINE bool AcFirst(BitReader& in, const SymbolTable& table, const Scan& scan,
                                 uint32_t& end_of_band, int16_t* block, uint64_t& nonzero) {
  if (end_of_band > 0) {
    --end_of_band;
    return true;
  }
  uint32_t k = scan.first;
  while (k <= scan.last) {
    Want(in);
    const int32_t symbol = table.Symbol(in);
    if (symbol < 0) return false;
    const uint32_t run = static_cast<uint32_t>(symbol) >> 4;
    const uint32_t size = symbol & 15;
    if (size != 0) {
      k += run;
      if (k > scan.last) return false;
      Want(in);
      const int32_t value = Extend(in.Take(size), size);
      nonzero |= uint64_t{1} << k;
      block[kNaturalOrder[k++]] = static_cast<int16_t>(static_cast<uint32_t>(value) << scan.low);
    } else if (run == 15) {
      k += 16;
    } else {
      Want(in);
      end_of_band = (1u << run) - 1 + in.Take(run);
      break;
    }
  }
  return true;
}

// One more bit for each of the coefficients in `which`, bits by their place as stored.
FOREBAY_JPEG_INLINE void Refine(BitReader& in, int32_t bit, uint64_t which, int16_t* block) {
  for (; which != 0; which &= which - 1) {
    Want(in);
    // Without branches: neither the bit nor the sign can be foreseen.
    const int32_t more = -static_cast<int32_t>(in.Take(1));
    int16_t& value = block[kNaturalOrder[static_cast<size_t>(std::countr_zero(which))]];
    const int32_t sign = value >> 15;
    value = static_cast<int16_t>(value + (((bit & ~value & more) ^ sign) - sign));
  }
}

// `nonzero` has a bit for each coefficient of the block that is not zero, by its place as stored:
// going from one to the next costs no guess of the branch predictor for each coefficient.
FOREBAY_JPEG_INLINE bool AcRefine(BitReader& in, const SymbolTable& table, const Scan& scan,
                                  uint32_t& end_of_band, int16_t* block, uint64_t& nonzero) {
  const int32_t bit = 1 << scan.low;
  // Coefficients of the band that are still to come.
  uint64_t rest = ~uint64_t{0} >> (63 - scan.last) & ~uint64_t{0} << scan.first;
  if (end_of_band == 0) {
    while (rest != 0) {
      Want(in);
      const int32_t symbol = table.Symbol(in);
      if (symbol < 0) return false;
      const uint32_t run = static_cast<uint32_t>(symbol) >> 4;
      int32_t value = 0;
      if ((symbol & 15) != 0) {
        if ((symbol & 15) != 1) return false;
        Want(in);
        value = in.Take(1) != 0 ? bit : -bit;
      } else if (run != 15) {
        Want(in);
        end_of_band = (1u << run) + in.Take(run);
        break;
      }
      // Over `run` coefficients that are still zero, to the next one; the others get their bit.
      uint64_t zeros = rest & ~nonzero;
      for (uint32_t i = 0; i < run; ++i) zeros &= zeros - 1;
      const uint64_t target = zeros & (0 - zeros);  // 0: there is none
      const uint64_t passed = rest & (target - 1);
      Refine(in, bit, passed & nonzero, block);
      rest &= ~(passed | target);
      if (value == 0) continue;
      if (target == 0) return false;
      nonzero |= target;
      block[kNaturalOrder[static_cast<size_t>(std::countr_zero(target))]] =
          static_cast<int16_t>(value);
    }
  }
  if (end_of_band == 0) return true;
  --end_of_band;
  Refine(in, bit, rest & nonzero, block);
  return true;
}

}  // namespace

Status CheckTables(const Header& header, const Scan& scan) {
  const bool dc = !header.progressive || (scan.first == 0 && scan.high == 0);
  const bool ac = !header.progressive || scan.first != 0;
  for (uint32_t i = 0; i < scan.count; ++i) {
    if (!header.quant[header.components[scan.component[i]].quant].present) {
      return Status(Code::kDataLoss, "JPEG: a quantisation table is missing");
    }
    if ((dc && !header.dc[scan.dc[i]].present) || (ac && !header.ac[scan.ac[i]].present)) {
      return Status(Code::kUnimplemented, "JPEG without its Huffman tables");
    }
  }
  return Status();
}

template <typename ReadBlock>
Status Coefficients::ForEachBlock(std::span<const uint8_t> file, size_t& at, Segment& segment,
                                  ReadBlock&& read) {
  predictor_ = {};
  end_of_band_ = 0;
  SegmentReader in(file, scan_.data, header_.restart_interval, segment);
  const bool interleaved = scan_.count > 1;
  const Component& only = header_.components[scan_.component[0]];
  const uint32_t mcu_width = 8u * (interleaved ? header_.max_h : 1);
  const uint32_t mcu_height = 8u * (interleaved ? header_.max_v : 1);
  const uint32_t width = interleaved ? header_.width : only.width;
  const uint32_t height = interleaved ? header_.height : only.height;
  const uint32_t columns = (width + mcu_width - 1) / mcu_width;
  const uint32_t rows = (height + mcu_height - 1) / mcu_height;
  for (uint32_t row = 0; row < rows; ++row) {
    const auto part = [&](BitReader& in_segment, uint32_t from, uint32_t to, bool restarted) {
      BitReader bits = in_segment;
      if (restarted) {
        predictor_ = {};
        end_of_band_ = 0;
      }
      bool ok = true;
      for (uint32_t mcu = from; ok && mcu < to; ++mcu) {
        for (uint32_t i = 0; ok && i < scan_.count; ++i) {
          const Component& component = header_.components[scan_.component[i]];
          const uint32_t h = interleaved ? component.h : 1;
          const uint32_t v = interleaved ? component.v : 1;
          const Plane& plane = planes_[scan_.component[i]];
          for (uint32_t b = 0; ok && b < h * v; ++b) {
            const size_t y = row * v + b / h;
            const size_t x = mcu * h + b % h;
            ok = read(bits, i, plane.first + y * plane.stride + x);
          }
        }
        ok = ok && !bits.Overrun();
      }
      in_segment = bits;
      return ok;
    };
    FOREBAY_RETURN_IF_ERROR(in.Run(0, columns, part));
  }
  at = in.at();
  return Status();
}

Status Coefficients::ReadOne(std::span<const uint8_t> file, size_t& at, Segment& segment) {
  FOREBAY_RETURN_IF_ERROR(CheckTables(header_, scan_));
  const bool dc = !header_.progressive || (scan_.first == 0 && scan_.high == 0);
  for (uint32_t i = 0; i < scan_.count; ++i) {
    Plane& plane = planes_[scan_.component[i]];
    if (!plane.seen) {
      plane.seen = true;
      plane.quant = header_.quant[header_.components[scan_.component[i]].quant].values;
    }
    const uint8_t dc_table = scan_.dc[i];
    const uint8_t ac_table = scan_.ac[i];
    if (dc) FOREBAY_RETURN_IF_ERROR(dc_[dc_table].Set(header_.dc[dc_table], 15));
    if (!header_.progressive) {
      FOREBAY_RETURN_IF_ERROR(fast_ac_[ac_table].Set(header_.ac[ac_table], Avx2()));
    } else if (scan_.first != 0) {
      FOREBAY_RETURN_IF_ERROR(ac_[ac_table].Set(header_.ac[ac_table], 255));
    }
  }
  if (!header_.progressive) {
    return ForEachBlock(file, at, segment, [&](BitReader& in, uint32_t i, size_t block) {
      int16_t values[65] = {};
      uint32_t last;
      if (!ReadDc(in, dc_[scan_.dc[i]], predictor_[i])) return false;
      values[0] = static_cast<int16_t>(predictor_[i]);
      if (!ReadAc(in, fast_ac_[scan_.ac[i]], values, last)) return false;
      std::memcpy(blocks_ + block * 64, values, 64 * sizeof(int16_t));
      return true;
    });
  }
  if (scan_.first == 0 && scan_.high == 0) {
    return ForEachBlock(file, at, segment, [&](BitReader& in, uint32_t i, size_t block) {
      return DcFirst(in, dc_[scan_.dc[i]], scan_.low, predictor_[i], blocks_ + block * 64);
    });
  }
  if (scan_.first == 0) {
    return ForEachBlock(file, at, segment, [&](BitReader& in, uint32_t, size_t block) {
      DcRefine(in, scan_.low, blocks_ + block * 64);
      return true;
    });
  }
  const SymbolTable& table = ac_[scan_.ac[0]];
  if (scan_.high == 0) {
    return ForEachBlock(file, at, segment, [&](BitReader& in, uint32_t, size_t block) {
      return AcFirst(in, table, scan_, end_of_band_, blocks_ + block * 64, nonzero_[block]);
    });
  }
  return ForEachBlock(file, at, segment, [&](BitReader& in, uint32_t, size_t block) {
    return AcRefine(in, table, scan_, end_of_band_, blocks_ + block * 64, nonzero_[block]);
  });
}

Status Coefficients::CheckSize(const Header& header, size_t file_bytes) {
  size_t coded = 0;  // without those that only fill up MCUs
  for (uint32_t c = 0; c < header.count; ++c) {
    const Component& component = header.components[c];
    coded += size_t{(component.width + 7) / 8} * ((component.height + 7) / 8);
  }
  // Each block takes a bit at least, so a short file cannot ask for much memory.
  if (coded <= file_bytes * 8) return Status();
  return Status(Code::kDataLoss, StrCat("JPEG: ", file_bytes, " bytes cannot hold ", header.width,
                                        "x", header.height, " pixels"));
}

uint64_t Coefficients::ScratchBytes(const Header& header) {
  const uint64_t columns = (header.width + 8u * header.max_h - 1) / (8u * header.max_h);
  const uint64_t rows = (header.height + 8u * header.max_v - 1) / (8u * header.max_v);
  uint64_t blocks = 0;
  for (uint32_t c = 0; c < header.count; ++c) {
    blocks += columns * header.components[c].h * rows * header.components[c].v;
  }
  return blocks * (64 * sizeof(int16_t) + (header.progressive ? sizeof(uint64_t) : 0));
}

Status Coefficients::Read(std::span<const uint8_t> file, const Header& header, const Scan& scan,
                          Segment& segment) {
  header_ = header;
  scan_ = scan;
  const uint32_t mcu_width = 8u * header.max_h;
  const uint32_t mcu_height = 8u * header.max_v;
  const uint32_t columns = (header.width + mcu_width - 1) / mcu_width;
  const uint32_t rows = (header.height + mcu_height - 1) / mcu_height;
  size_t blocks = 0;
  for (uint32_t c = 0; c < header.count; ++c) {
    const Component& component = header.components[c];
    blocks += size_t{columns} * component.h * rows * component.v;
  }
  FOREBAY_RETURN_IF_ERROR(CheckSize(header, file.size()));
  const size_t alignment = 64 / sizeof(int16_t);
  memory_.resize(std::max(memory_.size(), blocks * 64 + alignment));
  blocks_ = memory_.data();
  while (reinterpret_cast<uintptr_t>(blocks_) % 64 != 0) ++blocks_;
  std::fill_n(blocks_, blocks * 64, int16_t{0});
  nonzero_.assign(header.progressive ? blocks : 0, 0);
  size_t first = 0;
  for (uint32_t c = 0; c < header.count; ++c) {
    const Component& component = header.components[c];
    planes_[c].first = first;
    planes_[c].stride = columns * component.h;
    planes_[c].seen = false;
    first += size_t{columns} * component.h * rows * component.v;
  }
  for (uint32_t scans = 0; scan_.count != 0; ++scans) {
    if (scans == kMaxScans) return Status(Code::kDataLoss, "JPEG: too many scans");
    size_t at = 0;
    FOREBAY_RETURN_IF_ERROR(ReadOne(file, at, segment));
    const auto begin = planes_.begin();
    if (!header_.progressive &&
        std::all_of(begin, begin + header.count, [](const Plane& p) { return p.seen; })) {
      return Status();
    }
    FOREBAY_RETURN_IF_ERROR(ReadMarkers(file, at, header_, scan_));
  }
  for (uint32_t c = 0; c < header.count; ++c) {
    if (!planes_[c].seen) return Status(Code::kDataLoss, "JPEG: a component has no scan");
  }
  return Status();
}

}  // namespace forebay::jpeg
