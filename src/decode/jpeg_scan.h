// Entropy-coded MCUs of a sequential scan that holds all components: those of a rectangle are
// decoded and transformed, the others only passed over.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include "decode/jpeg_header.h"
#include "decode/jpeg_huffman.h"
#include "decode/jpeg_idct.h"

namespace forebay::jpeg {

// A range of blocks, ends not included.
struct BlockRange {
  uint32_t x0 = 0;
  uint32_t x1 = 0;
  uint32_t y0 = 0;
  uint32_t y1 = 0;
};

struct ScanPart {
  const SymbolTable* dc = nullptr;
  const AcTable* ac = nullptr;
  const uint16_t* quant = nullptr;
  uint32_t h = 1;
  uint32_t v = 1;
  uint32_t size = 8;  // samples in a row of a block
  BlockRange wanted;
  // Samples of the row of MCUs that is being decoded, from block column wanted.x0 on.
  uint8_t* samples = nullptr;
  size_t stride = 0;
  uint32_t predictor = 0;  // wraps as in libjpeg
};

struct ScanParts {
  std::array<ScanPart, kMaxComponents> part;
  uint32_t count = 0;
};

// MCUs `begin` to `end` of row `row`. False where the bytes make no sense or have run out.
using McuRun = bool (*)(BitReader& in, ScanParts& parts, uint32_t row, uint32_t begin,
                        uint32_t end);

struct ScanKernels {
  McuRun decode = nullptr;
  McuRun skip = nullptr;
  IdctPair idct = nullptr;
};
const ScanKernels& Kernels(bool simd);

}  // namespace forebay::jpeg
