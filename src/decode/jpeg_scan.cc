#include "decode/jpeg_scan.h"

namespace forebay::jpeg {
namespace {

// The same code is compiled twice: shifts by a variable take a third of the time with BMI2.
FOREBAY_JPEG_INLINE bool Skip(BitReader& in, ScanParts& parts, uint32_t begin, uint32_t end) {
  for (uint32_t mcu = begin; mcu < end; ++mcu) {
    for (uint32_t c = 0; c < parts.count; ++c) {
      ScanPart& part = parts.part[c];
      for (uint32_t i = 0; i < part.h * part.v; ++i) {
        if (!ReadDc(in, *part.dc, part.predictor)) return false;
        if (!SkipAc(in, *part.ac)) return false;
      }
    }
    if (in.Overrun()) return false;
  }
  return true;
}

// Where memset would become a string instruction, which starts slowly.
FOREBAY_JPEG_INLINE void Clear(int16_t* block) {
  using Vector = int16_t __attribute__((vector_size(32), may_alias));
  for (uint32_t i = 0; i < 4; ++i) reinterpret_cast<Vector*>(block)[i] = Vector{};
}

FOREBAY_JPEG_INLINE bool Decode(BitReader& in, ScanParts& parts, uint32_t row, uint32_t begin,
                                uint32_t end, IdctPair idct) {
  struct alignas(64) Block {
    int16_t values[96];  // 64, and what kNaturalOrder points to behind them
  };
  Block blocks[2];
  IdctJob jobs[2];
  uint32_t pending = 0;
  for (uint32_t mcu = begin; mcu < end; ++mcu) {
    for (uint32_t c = 0; c < parts.count; ++c) {
      ScanPart& part = parts.part[c];
      for (uint32_t v = 0; v < part.v; ++v) {
        const uint32_t y = row * part.v + v;
        const bool inside = y >= part.wanted.y0 && y < part.wanted.y1;
        for (uint32_t h = 0; h < part.h; ++h) {
          if (!ReadDc(in, *part.dc, part.predictor)) return false;
          const uint32_t x = mcu * part.h + h;
          if (!inside || x < part.wanted.x0 || x >= part.wanted.x1) {
            if (!SkipAc(in, *part.ac)) return false;
            continue;
          }
          int16_t* block = blocks[pending].values;
          Clear(block);
          block[0] = static_cast<int16_t>(part.predictor);
          IdctJob& job = jobs[pending];
          if (part.size == 1) {
            job.last = 0;
            if (!SkipAc(in, *part.ac)) return false;
          } else if (!ReadAc(in, *part.ac, block, job.last)) {
            return false;
          }
          job.block = block;
          job.quant = part.quant;
          job.out = part.samples + part.size * (v * part.stride + size_t{x - part.wanted.x0});
          job.stride = part.stride;
          if (part.size != 8) {
            IdctSmall(job, part.size);
          } else if (++pending == 2) {
            idct(jobs[0], jobs[1]);
            pending = 0;
          }
        }
      }
    }
    if (in.Overrun()) return false;
  }
  if (pending == 1) idct(jobs[0], jobs[0]);
  return true;
}

// With a copy of the reader, which stays in registers.
FOREBAY_JPEG_INLINE bool SkipRun(BitReader& in, ScanParts& parts, uint32_t begin, uint32_t end) {
  BitReader reader = in;
  const bool ok = Skip(reader, parts, begin, end);
  in = reader;
  return ok;
}
FOREBAY_JPEG_INLINE bool DecodeRun(BitReader& in, ScanParts& parts, uint32_t row, uint32_t begin,
                                   uint32_t end, IdctPair idct) {
  BitReader reader = in;
  const bool ok = Decode(reader, parts, row, begin, end, idct);
  in = reader;
  return ok;
}

bool SkipPlain(BitReader& in, ScanParts& parts, uint32_t, uint32_t begin, uint32_t end) {
  return SkipRun(in, parts, begin, end);
}
bool DecodePlain(BitReader& in, ScanParts& parts, uint32_t row, uint32_t begin, uint32_t end) {
  return DecodeRun(in, parts, row, begin, end, IdctPairPlain);
}

#if defined(__x86_64__)
#define FOREBAY_JPEG_FAST __attribute__((target("avx2,bmi,bmi2")))
#else
#define FOREBAY_JPEG_FAST
#endif
FOREBAY_JPEG_FAST bool SkipFast(BitReader& in, ScanParts& parts, uint32_t, uint32_t begin,
                                uint32_t end) {
  return SkipRun(in, parts, begin, end);
}
FOREBAY_JPEG_FAST bool DecodeFast(BitReader& in, ScanParts& parts, uint32_t row, uint32_t begin,
                                  uint32_t end) {
  return DecodeRun(in, parts, row, begin, end, IdctPairAvx2);
}

}  // namespace

const ScanKernels& Kernels(bool simd) {
  static constexpr ScanKernels kPlain = {DecodePlain, SkipPlain, IdctPairPlain};
  static constexpr ScanKernels kFast = {DecodeFast, SkipFast, IdctPairAvx2};
  return simd && Avx2() ? kFast : kPlain;
}

}  // namespace forebay::jpeg
