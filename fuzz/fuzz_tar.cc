// Tar shards, as they come and with the checksums of their headers made right.
#include <cstddef>
#include <cstdint>
#include <string>

#include "fuzz_shard.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace forebay;
  std::string bytes(reinterpret_cast<const char*>(data), size);
  testing::TryShard(Format::kWebDataset, testing::Bytes(bytes), ScanTar);
  for (size_t at = 0; at + 512 <= size; at += 512) {
    if (bytes.compare(at + 257, 5, "ustar") != 0) continue;
    std::string header = bytes.substr(at, 512);
    testing::SetTarChecksum(header);
    bytes.replace(at, 512, header);
  }
  testing::TryShard(Format::kWebDataset, testing::Bytes(bytes), ScanTar);
  return 0;
}
