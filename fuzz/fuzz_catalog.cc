// Saved catalogs: any bytes end in an error or in a catalog whose every index can be followed.
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "catalog/catalog.h"
#include "catalog/test_data.h"

namespace {

void Try(std::vector<std::byte> image) {
  auto catalog = forebay::Catalog::FromImage(std::move(image));
  if (catalog) forebay::testing::Touch(**catalog);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const auto* bytes = reinterpret_cast<const std::byte*>(data);
  std::vector<std::byte> image(bytes, bytes + size);
  Try(image);
  // Behind the checksums, where mutations alone would not come.
  if (size >= sizeof(forebay::ImageHeader)) {
    const uint64_t length = size;
    std::memcpy(image.data() + offsetof(forebay::ImageHeader, image_bytes), &length, sizeof length);
  }
  forebay::testing::Reseal(image);
  Try(std::move(image));
  return 0;
}
