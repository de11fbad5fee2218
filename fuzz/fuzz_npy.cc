// .npy and .npz files: what is read lies inside the file, and has the bytes that type and shape
// say.
#include <cstddef>
#include <cstdint>
#include <span>

#include "decode/npy.h"
#include "expect.h"

namespace forebay {
namespace {

void Try(std::span<const std::byte> file, std::string_view name) {
  const Result<NpyArray> array = ReadArray(file, name);
  if (!array) {
    FUZZ_EXPECT(!array.error().message().empty());
    return;
  }
  uint64_t bytes = ItemBytes(array->dtype);
  FUZZ_EXPECT(bytes > 0);
  for (const uint64_t n : array->shape) bytes *= n;
  FUZZ_EXPECT(array->bytes.size() == bytes);
  FUZZ_EXPECT(bytes == 0 || (array->bytes.data() >= file.data() &&
                             array->bytes.data() + bytes <= file.data() + file.size()));
}

}  // namespace
}  // namespace forebay

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const auto file = std::as_bytes(std::span(data, size));
  forebay::Try(file, "");
  forebay::Try(file, "a");
  return 0;
}
