// The inner loops of Resampler. All levels give the same bits.
//
// Each reads whole groups of 4 taps and writes whole groups of 4 pixels: coefficients beyond an
// output pixel's taps are 0, and buffers end in 64 spare bytes.
#pragma once

#include <cstddef>
#include <cstdint>

namespace forebay::kernels {

constexpr int kPrecision = 22;      // fractional bits of a coefficient
constexpr int kSplit = 11;          // a coefficient is high * 2^11 + low
constexpr size_t kAvx2Bytes = 128;  // packed coefficients of two pixels and four taps
constexpr size_t kVnniBytes = 192;  // of four pixels and four taps

// One row: out pixel i is the sum of `groups` * 4 taps from byte offsets[i] of `in`. `n` is a
// multiple of 4.
void HorizontalScalar(const uint8_t* in, uint8_t* out, size_t n, const uint32_t* offsets,
                      size_t groups, const int32_t* coefficients);
void HorizontalAvx2(const uint8_t* in, uint8_t* out, size_t n, const uint32_t* offsets,
                    size_t groups, const uint8_t* packed);
void HorizontalVnni(const uint8_t* in, uint8_t* out, size_t n, const uint32_t* offsets,
                    size_t groups, const uint8_t* packed);
// Lays out n * groups * 4 coefficients for the kernel above.
void PackAvx2(const int32_t* coefficients, size_t n, size_t groups, uint8_t* packed);
void PackVnni(const int32_t* coefficients, size_t n, size_t groups, uint8_t* packed);

// One row: each of `bytes` bytes is the sum over `taps` rows. Writes whole groups of 64 bytes.
void VerticalScalar(const uint8_t* const* rows, size_t taps, const int32_t* coefficients,
                    uint8_t* out, size_t bytes);
void VerticalAvx2(const uint8_t* const* rows, size_t taps, const int32_t* coefficients,
                  uint8_t* out, size_t bytes);
// Rows and coefficients are there up to the next multiple of 4 taps, coefficients of 0.
void VerticalVnni(const uint8_t* const* rows, size_t taps, const int32_t* coefficients,
                  uint8_t* out, size_t bytes);

}  // namespace forebay::kernels
