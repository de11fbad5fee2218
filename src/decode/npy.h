// NumPy's file formats: .npy, and .npz archives of them.
//
// Only the plain kind: little-endian numbers in C order. An array with objects or in Fortran order,
// a compressed archive, or a header that does not parse is an error that says so.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"

namespace forebay {

struct NpyArray {
  std::string dtype;  // "<f4", "|u1", ...
  std::vector<uint64_t> shape;
  std::span<const std::byte> bytes;  // of the file
};

// Bytes of one item of such a type; 0 for what is no plain little-endian number.
uint64_t ItemBytes(std::string_view dtype);

// Checks that the file holds the array whole.
Result<NpyArray> ReadNpy(std::span<const std::byte> file);

// The member `name` ("image" or "image.npy") of an archive; an empty name takes the only member.
Result<NpyArray> ReadNpz(std::span<const std::byte> file, std::string_view name);

// Either, by the first bytes.
Result<NpyArray> ReadArray(std::span<const std::byte> file, std::string_view name);

}  // namespace forebay
